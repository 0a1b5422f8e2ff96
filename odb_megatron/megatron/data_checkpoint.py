"""What a checkpoint has to hold for a run's data to go on: a text among Megatron's arguments.

They are part of the common state of every checkpoint format, so no checkpoint is without it. Of
map-style data the consumed samples are all there is; the text tells which data they were counted
in. Iterable sources add their own states.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.loop import Progress
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.errors import SettingError
from odb_megatron.megatron.data_identity import changed_files, check_same_samples, data_identity

__all__ = ["DataCheckpoint", "DataState", "restore", "together"]

T = TypeVar("T")

_VERSION = 1
_MESSAGE_BYTES = 1024
_MAX_BYTES = 1 << 28


class Gathers(Protocol):
    """What `comm.blocks.SourceGroup` does."""

    @property
    def replica(self) -> int:
        """This replica."""

    def gather_all(self, record: bytes) -> list[bytes]:
        """All-gather equal-sized records of all replicas."""


class HeaderChannel(Protocol):
    """What `comm.delivery.ReplicaGroup` does."""

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the source rank passes it."""


class Feed(Protocol):
    """What `data.feed.StepFeed` has to tell for its state to be saved."""

    @property
    def progress(self) -> Progress:
        """Where the loader stood after the last step that was handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """What is saved.

    Attributes:
        data: see `data_identity`.
        consumed: samples consumed since the run's start.
        num_bad: bad records of all replicas since then.
        tokens_so_far: tokens trained since then.
        sources: states of the iterators, by replica; empty for map-style data.
        version: of this format.
    """

    data: Mapping[str, Any]
    consumed: int
    num_bad: int
    tokens_so_far: int
    sources: Sequence[Any] = ()
    version: int = _VERSION

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: Any) -> DataState:
        """Inverse of `to_text`; the text comes from a file and is not trusted.

        Raises:
            ValueError: something else.
        """
        try:
            state = cls(**json.loads(text))
            counts = (state.version, state.consumed, state.num_bad, state.tokens_so_far)
            if state.version != _VERSION or not all(map(_is_count, counts)):
                raise ValueError(f"version and counts are {counts}")
            if not isinstance(state.data, dict) or not isinstance(state.sources, list):
                raise TypeError("data or sources are of another kind")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"the checkpoint's data state is {str(text)[:80]!r} ({str(error)[:200]}): it is "
                "damaged, or was written by another version of odb_megatron; restore it, or start "
                "the data anew (--finetune)"
            ) from error
        return state


class DataCheckpoint:
    """One rank's part in saving the data state.

    Args:
        args: Megatron's; `odb_data_state` is set on them.
        group: of the source ranks, for this alone; None on other ranks.
        channel: to the other ranks of the replica, for this alone; None for a replica of one rank.
    """

    def __init__(
        self, args: argparse.Namespace, *, group: Gathers | None, channel: HeaderChannel | None
    ) -> None:
        self._args, self._group, self._channel = args, group, channel
        self._feed: Feed | None = None
        self._identity: Mapping[str, Any] = {}
        self._trained: Progress | None = None
        self._has_warned = False

    def watch(self, feed: Feed, *, identity: Mapping[str, Any]) -> None:
        """Save the state of this feed of training data; source ranks call it.

        Args:
            feed: of the training data.
            identity: of its data; see `data_identity`.
        """
        self._feed, self._identity = feed, identity

    def note_trained(self) -> None:
        """Keep the loader's progress if it is of the last step trained; before a step is fetched.

        A step is handed out and not trained where Megatron's rerun machine saves and exits, and
        while it replays one.
        """
        if self._feed is not None:
            progress = self._feed.progress
            if progress.consumed == self._args.consumed_train_samples:
                self._trained = progress

    def state(self, *, tokens_so_far: int) -> DataState:
        """Return this replica's state, with its own iterator's alone; source ranks call it."""
        self.note_trained()
        assert self._trained is not None, "a checkpoint before any step"
        source = self._trained.source
        if source is not None and not source["has_state"] and not self._has_warned:
            self._has_warned = True
            if self._group is None or self._group.replica == 0:
                print(
                    "odb: WARNING: the train dataset has no state of its own (state_dict() and "
                    "load_state_dict()): a run that resumes from this checkpoint cannot go on with "
                    "its data",
                    flush=True,
                )
        return DataState(
            data=self._identity,
            consumed=self._trained.consumed,
            num_bad=self._trained.num_bad,
            tokens_so_far=tokens_so_far,
            sources=[] if source is None else [source],
        )

    def save(self, *, tokens_so_far: int) -> None:
        """Put the state into Megatron's arguments, before it saves; all ranks call it.

        Args:
            tokens_so_far: tokens trained by all replicas since the run's start.

        Raises:
            RuntimeError: the iterators' states are too large.
        """
        text = b""
        if self._group is not None:
            state = self.state(tokens_so_far=tokens_so_far)
            if state.sources:
                state = DataState(**asdict(state) | {"sources": self._gathered(state.sources[0])})
            text = state.to_text().encode()
        if self._channel is not None:
            text = self._channel.header(text if self._group is not None else None)
        self._args.odb_data_state = text.decode()

    def _gathered(self, source: Any) -> list[Any]:
        """Return the iterators' states of all replicas."""
        assert self._group is not None
        data = json.dumps(source).encode()
        sizes = [int.from_bytes(one, "little") for one in self._sizes(len(data))]
        if max(sizes) * len(sizes) > _MAX_BYTES:
            raise RuntimeError(
                f"the iterators' states have up to {max(sizes)} bytes on each of {len(sizes)} "
                f"replicas, more than {_MAX_BYTES} in all: they would burden every checkpoint; "
                "return less from state_dict()"
            )
        found = self._group.gather_all(data.ljust(max(sizes)))
        return [json.loads(one) for one in found]

    def _sizes(self, size: int) -> list[bytes]:
        assert self._group is not None
        return self._group.gather_all(size.to_bytes(8, "little"))


def restore(
    args: argparse.Namespace,
    loader: StepLoader,
    *,
    group: Gathers,
    text: str | None,
) -> DataState | None:
    """Let the loader go on where a checkpoint left the data; source ranks of all replicas call it.

    Args:
        args: Megatron's, after the checkpoint was loaded.
        loader: of the training data.
        group: to the other replicas.
        text: what the checkpoint holds; None for nothing.

    Returns:
        The state; None for a start anew.

    Raises:
        ValueError: on all replicas: the state is missing, damaged, or belongs to other data.
    """
    if text is None:
        if isinstance(loader.stream, ItemStream):
            raise ValueError(
                "no data state in the checkpoint, and an iterable source cannot be continued "
                "without: restore it, or start the data anew (--finetune)"
            )
        if args.rank == 0:
            print(
                f"odb: no data state in the checkpoint of iteration {args.iteration}; the data "
                f"goes on at sample {args.consumed_train_samples} of the stream",
                flush=True,
            )
        return None
    state, source = together(group, lambda: _restored(args, loader, text))
    stream = loader.stream
    if isinstance(stream, ItemStream):  # may be at its end, which the consumed samples do not tell
        has_ended = source["ended"] and source["passes"] == stream.passes
        loader.is_over = all(map(any, group.gather_all(bytes([has_ended]))))
    return state


def _restored(args: argparse.Namespace, loader: StepLoader, text: str) -> tuple[DataState, Any]:
    """Return the state and that of this replica's iterator."""
    state = DataState.parse(text)
    try:
        _check(args, loader, state)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the checkpoint's data state is damaged ({type(error).__name__}: {error}): restore "
            "it, or start the data anew (--finetune)"
        ) from error
    source, num = None, loader.config.num_replicas
    if isinstance(loader.stream, ItemStream):
        source = loader.stream.own_state(state.sources, replica=loader.replica, num_replicas=num)
    loader.restore(Progress(consumed=state.consumed, num_bad=state.num_bad, source=source))
    return state, source


def _check(args: argparse.Namespace, loader: StepLoader, state: DataState) -> None:
    """Hold a state against this run.

    Raises:
        ValueError: it is of other data or another step.
    """
    current = data_identity(args, loader.stream, num_places=state.data["blend"][0])
    check_same_samples(state.data, current)
    if state.consumed != args.consumed_train_samples:
        raise ValueError(
            f"the data state was saved after {state.consumed} samples, the checkpoint after "
            f"{args.consumed_train_samples}: one of them was changed; restore it"
        )
    changed = changed_files(state.data, current)
    if changed:
        raise SettingError(
            "data changed since the checkpoint was saved: {changed}. Restore it, or start the data "
            "anew from this checkpoint's weights ({finetune})",
            changed=changed,
        )


def together(group: Gathers, function: Callable[[], T]) -> T:
    """Return what `function` does, or raise on all replicas what it raises on one."""
    message, failure, result = "", None, None
    try:
        result = function()
    except ValueError as error:
        message, failure = str(error) or type(error).__name__, error
    sent = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    found = group.gather_all(sent)
    if failure is not None:
        raise failure
    for replica, text in enumerate(part.rstrip(b"\0").decode("utf-8", "ignore") for part in found):
        if text:
            raise ValueError(f"replica {replica} cannot resume its data: {text}")
    return result  # type: ignore[return-value]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
