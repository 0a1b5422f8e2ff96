"""Iterable data sets: how one is handed over, and one part of it read item by item.

Knows no position and no other replica. What an item must be is `sources.ItemSource`'s part.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from odb_megatron.data.plain_state import decode, encode

__all__ = ["IterableShards", "PartReader", "ShardMaker", "SourceError", "as_shards", "is_iterable"]

ShardMaker = Callable[[int, int], Iterable[Any]]
"""Takes a shard's index and the number of shards; all shards together are the data set."""


class SourceError(RuntimeError):
    """An iterable data set raised, has no data, or is not sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterableShards:
    """An iterable data set, by the function that makes each of its shards.

    Attributes:
        make: `make(index, num_shards)` returns an iterable over one of `num_shards` disjoint shards
            that together are the data set. It is called in the process that reads the shard.
        parts: shards that a replica reads in turns, and so the most worker processes it can have
            (`--num-workers`). Plans depend on it, and not on the number of workers.
        total_parts: shards of all replicas together, in place of `parts`: shard n is read by
            replica n mod replicas, and a run may go on with another number of replicas. 0: none.
        name: for reports and errors.
        is_own: `make` returns the replica's own shard, whatever it is asked for.
    """

    make: ShardMaker
    parts: int = 1
    total_parts: int = 0
    name: str = ""
    is_own: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1, got {self.parts}")
        if self.total_parts < 0 or (self.total_parts and self.parts > 1):
            raise ValueError(
                f"parts is {self.parts} and total_parts {self.total_parts}: give one of them"
            )


@dataclass(frozen=True, slots=True)
class _Own:
    """Returns a replica's own iterable; a class, so that workers can be sent it."""

    dataset: Any

    def __call__(self, index: int, num_shards: int) -> Any:
        del index, num_shards
        return self.dataset


def is_iterable(dataset: Any) -> bool:
    """Whether a data set is to be iterated, for want of random access."""
    if isinstance(dataset, (IterableShards, torch.utils.data.IterableDataset)):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    return hasattr(dataset, "__iter__")


def as_shards(dataset: Any, *, name: str) -> IterableShards:
    """Return a user's iterable as shards; a bare one is this replica's own shard.

    Raises:
        ValueError: it can be run through only once.
    """
    if isinstance(dataset, IterableShards):
        return dataset
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"the {name} is a {type(dataset).__name__}, which can be run through only once: give "
            "an object whose __iter__ starts anew each time"
        )
    return IterableShards(make=_Own(dataset), name=type(dataset).__name__, is_own=True)


def has_own_workers(shards: IterableShards) -> bool:
    """Whether the data set is a loader, which worker processes (having no children) cannot run."""
    return isinstance(shards.make, _Own) and isinstance(
        shards.make.dataset, torch.utils.data.DataLoader
    )


@dataclass(slots=True)
class PartReader:
    """One shard, read pass after pass.

    Args:
        dataset: the shard.
        name: for errors.

    Attributes:
        error: why it cannot be read on, with the original traceback.
        num_read: items read by this object.
    """

    dataset: Any
    name: str
    error: str = ""
    num_read: int = 0
    _items: Iterator[Any] | None = field(default=None, init=False)

    @property
    def has_state(self) -> bool:
        """Whether the shard can say where it is, and go on there."""
        return _methods(self.dataset) is not None

    def begin(self, pass_index: int, state: Any = None) -> None:
        """Start a pass, or go on where `state` (from `state`) was taken.

        Raises:
            ValueError: the state does not fit.
        """
        plain = None if state is None else decode(state)
        try:
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(pass_index)
            if plain is not None:
                methods = _methods(self.dataset)
                if methods is None:
                    raise TypeError("it has no state of its own, and had one when it was saved")
                getattr(self.dataset, methods[1])(plain)
            self._items = iter(self.dataset)
        except Exception as error:
            what = "going on with its saved state" if plain is not None else "starting a pass"
            raise ValueError(raised(f"{self.name}, {what},", error)) from error

    def take(self) -> tuple[Any, bool]:
        """Return the next item and whether there was one; see `error` where there was none."""
        assert self._items is not None, "begin comes first"
        try:
            return next(self._items), True
        except StopIteration:
            return None, False
        except Exception as error:
            note = "; an iterator cannot go on after that, so --odb-max-bad-records does not apply"
            self.error = raised(self.name, error, note=note)
            return None, False

    def state(self) -> Any:
        """Return where the shard is, as JSON values; None where it cannot say.

        Raises:
            ValueError: it raised; or see `plain_state.encode`.
        """
        methods = _methods(self.dataset)
        if methods is None:
            return None
        try:
            found = getattr(self.dataset, methods[0])()
        except Exception as error:
            raise ValueError(raised(f"{self.name}, saying where it is,", error)) from error
        return encode(found, owner=self.name)


def raised(who: str, error: Exception, *, note: str = "") -> str:
    """Say what a user's data set raised, with its traceback."""
    trace = "".join(traceback.format_exception(error))
    return f"{who} raised {type(error).__name__}: {error}{note}\nOriginal traceback:\n{trace}"


def _methods(dataset: Any) -> tuple[str, str] | None:
    for names in (("state_dict", "load_state_dict"), ("save_state_rank", "restore_state_rank")):
        if all(callable(getattr(dataset, name, None)) for name in names):
            return names
    return None
