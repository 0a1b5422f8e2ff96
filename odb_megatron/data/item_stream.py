"""An iterable training set as a stream: each replica reads its own shards, item after item.

Knows no step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odb_megatron.data.item_feed import (
    ItemFeed,
    ReplicaShard,
    Snapshot,
    is_count,
    snapshot_from,
    snapshot_values,
)
from odb_megatron.data.iterable import IterableShards, SourceError, has_own_workers
from odb_megatron.data.loop import HEAD_ITEMS
from odb_megatron.data.sample import Sample, SampleRules, Skipped
from odb_megatron.data.stream import Location
from odb_megatron.data.workers import Workers
from odb_megatron.plan.record import OPEN_TOTAL

__all__ = ["ItemReader", "ItemStream"]

_STATE_VERSION = 4
_NO_STATE = (
    "the data state holds no state of an iterable source, and this run has one: resume "
    "with the data that was saved, or start the data anew (--finetune)"
)
_STATE_KEYS = {"version", "replicas", "passes", "has_state", "ended", "next", "skips", "from"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemStream:
    """An iterable data set with what is done with it.

    Attributes:
        shards: the data set.
        rules: policies for every item.
        name: for reports and errors.
        passes: passes over each shard, after which it ends; None where each starts again until the
            quota is reached.
        num_samples: the quota; `OPEN_TOTAL` with `passes`.
        keeps_state: whether the run may be saved.
    """

    shards: IterableShards
    rules: SampleRules
    name: str
    passes: int | None = None
    num_samples: int = OPEN_TOTAL
    keeps_state: bool = True

    def __len__(self) -> int:
        return self.num_samples

    @property
    def has_own_workers(self) -> bool:
        """Whether the data set is a loader with worker processes of its own."""
        return has_own_workers(self.shards)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Name of the one source."""
        return (self.name,)

    def locate(self, position: int) -> Location:
        """Return what names a position in reports; it does not say which item it stands for."""
        return Location(epoch=0, place=position, source=0, record=position)

    def sources(self) -> list[dict[str, object]]:
        """Length and order are not known."""
        parts = {
            "num_records": -1,
            "seed": 0,
            "ends": [0, self.shards.total_parts or self.shards.parts],
        }
        return [{"path": self.name, "fingerprint": self.data_digest(), **parts}]

    def blend_digest(self, most: int) -> tuple[int, str]:
        """A single source."""
        del most
        return 0, ""

    def data_digest(self) -> str:
        """Digest of what the data set says of itself: its name and parts, equal on all replicas."""
        shards = self.shards
        text = f"{shards.name} {shards.parts} {shards.total_parts} {shards.is_own}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Digest of all that all replicas must have alike."""
        text = f"{self.data_digest()} {self.passes} {self.num_samples}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, *, replica: int, num_replicas: int, workers: Workers) -> ItemReader:
        """Return a replica's items, from the beginning."""
        return ItemReader(self.shard(replica, num_replicas), workers=workers)

    def own_state(self, states: Sequence[Any], *, replica: int, num_replicas: int) -> Any:
        """Return the state that a replica goes on with; see `ItemReader.restore`.

        Args:
            states: of all replicas when they were saved, or this replica's alone; not trusted.

        Raises:
            ValueError: of another number of replicas, and the parts cannot be assigned anew.
        """
        then = states[0].get("replicas") if states and isinstance(states[0], Mapping) else None
        if not is_count(then) or (then == num_replicas and len(states) not in (1, then)):
            raise ValueError(_NO_STATE)
        if then == num_replicas:
            return states[0] if len(states) == 1 else states[replica]
        if not self.shards.total_parts or len(states) != then:
            raise ValueError(
                f"each replica reads an iterator of its own, and the data was saved with {then} "
                f"of them: resume with that data-parallel size, not {num_replicas}, or start the "
                "data anew (--finetune); IterableShards(make, total_parts=N) can be resumed at any"
            )
        old = [self.shard(at, then) for at in range(then)]
        begins = [_checked(*pair) for pair in zip(old, states, strict=True)]
        readers = [one for one in zip(old, states, begins, strict=True) if one[0].parts]
        current = min(begin.pass_index for _, _, begin in readers)
        places: dict[int, tuple[list[Any] | None, int]] = {}
        for shard, state, begin in readers:
            is_next = begin.pass_index == current + 1 and not any(state["skips"])
            if begin.pass_index != current and not (is_next and begin.parts is None):
                raise ValueError(
                    f"the {then} replicas were in different passes of {self.name} when it was "
                    f"saved: resume with that data-parallel size, not {num_replicas}"
                )
            blank: list[Any] | None = None if is_next else []
            parts = begin.parts or [blank] * len(shard.parts)
            places |= zip(shard.parts, zip(parts, state["skips"], strict=True), strict=True)
        own = [places[part] for part in self.shard(replica, num_replicas).parts]
        number = -(-max(state["next"] for state in states) * then // num_replicas)
        begin = Snapshot(
            number=number,  # ids go on
            pass_index=current,
            parts=tuple(state for state, _ in own) or None,
            skips=tuple(skip for _, skip in own),
        )
        return states[0] | {
            "replicas": num_replicas,
            "ended": all(state["ended"] for state in states),
            "next": number,
            "skips": list(begin.skips),
            "from": snapshot_values(begin),
        }

    def shard(self, replica: int, num_replicas: int) -> ReplicaShard:
        """Return what a replica reads."""
        return ReplicaShard(
            shards=self.shards,
            replica=replica,
            num_replicas=num_replicas,
            rules=self.rules,
            name=self.name,
            passes=self.passes,
            keeps_state=self.keeps_state,
        )


class ItemReader:
    """The items of one replica's iterators; a `loop.Reader`.

    The k-th item of replica r has the id `k * num_replicas + r`.

    Args:
        shard: what is read.
        workers: worker processes.

    Raises:
        ValueError: see `ItemFeed`.
    """

    def __init__(self, shard: ReplicaShard, *, workers: Workers) -> None:
        self._shard, self._workers = shard, workers
        self._feed = ItemFeed(shard, workers=workers)
        self._head = hashlib.sha256()
        self._head_items: set[bytes] = set()
        self._num_head = 0

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        """Return the next items with their ids, fewer where the iterators end; see `ItemFeed`."""
        shard, items = self._shard, list[tuple[int, Sample | Skipped]]()
        while len(items) < count and self._feed.has_next():
            number, item = self._feed.take()
            items.append((number * shard.num_replicas + shard.replica, item))
            if self._num_head < HEAD_ITEMS:
                self._num_head += 1
                if isinstance(item, Sample):
                    data = item.tokens.tobytes() + item.labels.tobytes()
                    self._head.update(data)
                    self._head_items.add(data)
        return items

    def has_ended(self) -> bool:
        """Whether the iterators have no further item; reads ahead to find out."""
        return self._shard.passes is not None and not self._feed.has_next()

    def head(self) -> bytes:
        """Return 48 bytes of the first items read."""
        counts = (self._num_head, len(self._head_items))
        return self._head.digest() + b"".join(n.to_bytes(8, "little") for n in counts)

    def check_heads(self, heads: Sequence[bytes]) -> None:
        """Raise if replicas begin with the same items, or none has any.

        Equal items one after the other (synthetic data) tell nothing.

        Raises:
            SourceError: on all replicas.
        """
        counts = [int.from_bytes(head[32:40], "little") for head in heads]
        if not any(counts):
            raise SourceError("no replica has any data: every shard of the train dataset is empty")
        first: dict[bytes, int] = {}
        for replica, head in enumerate(heads):
            if int.from_bytes(head[40:48], "little") < 2:
                continue
            other = first.setdefault(head, replica)
            if other != replica:
                raise SourceError(
                    f"replicas {other} and {replica} begin with the same {counts[replica]} "
                    "samples: each has to read a shard of its own; pass IterableShards(make=...), "
                    "whose make(index, num_shards) returns one, or shard the dataset by the "
                    "data-parallel rank"
                )

    def state(self) -> dict[str, Any]:
        """Return where the replica is, as JSON values."""
        following = self._feed.next_number
        has_ended = self.has_ended()
        begin = self._feed.snapshot(following)
        return {
            "version": _STATE_VERSION,
            "replicas": self._shard.num_replicas,
            "passes": self._shard.passes,
            "has_state": self._feed.has_state and self._shard.keeps_state,
            "ended": has_ended,
            "next": following,
            "skips": self._feed.skips(),
            "from": snapshot_values(begin),
        }

    def restore(self, state: Any) -> None:
        """Go on from `state`, before the first item is read: read on from its snapshot.

        Args:
            state: from `state`; it comes from a file and is not trusted.

        Raises:
            ValueError: the state is damaged or does not fit, or the source gives less than it did.
        """
        begin = _checked(self._shard, state)
        self.close()
        self._feed = ItemFeed(self._shard, workers=self._workers, begin=begin)
        try:
            for number in range(begin.number, state["next"]):
                if not self._feed.has_next():
                    raise ValueError(
                        f"{self._shard.name} gives replica {self._shard.replica} {number} items, "
                        f"and {state['next']} had been read when the state was saved: the data has "
                        "changed; restore it, or start the data anew (--finetune)"
                    )
                self._feed.skip()
        except RuntimeError as error:  # told to the other replicas as what cannot be resumed
            raise ValueError(str(error)) from error

    def close(self) -> None:
        """Nothing more is read."""
        self._feed.close()


def _checked(shard: ReplicaShard, state: Any) -> Snapshot:
    """Return the snapshot of a state that fits.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(state, Mapping) or set(state) != _STATE_KEYS:
        raise ValueError(_NO_STATE)
    following = state["next"]
    is_sound = is_count(following) and type(state["ended"]) is bool
    is_sound &= state["replicas"] == shard.num_replicas
    is_sound &= isinstance(state["skips"], list) and all(map(is_count, state["skips"]))
    if state["version"] != _STATE_VERSION or not is_sound:
        raise ValueError(
            "the source's state is damaged or of another version: restore the file, or start "
            "the data anew (--finetune)"
        )
    if state["has_state"] is not True:
        raise ValueError(
            f"{shard.name} had no state of its own when the checkpoint was saved, so a "
            "run cannot go on with its data: give it state_dict() and load_state_dict() (or "
            "use torchdata's StatefulDataLoader, or Megatron-Energon's savable loader), and "
            "start the data anew (--finetune)"
        )
    _check_passes(shard, state["passes"])
    begin = snapshot_from(state["from"], num_parts=len(shard.parts))
    if begin.number > following or len(state["skips"]) != len(shard.parts):
        raise ValueError("the source's state is damaged: the file was changed; restore it")
    return begin


def _check_passes(shard: ReplicaShard, saved: Any) -> None:
    """Raise unless the run may end where this one is to end.

    Raises:
        ValueError: another kind of run length, or a shorter run.
    """
    passes = shard.passes
    if (saved is None) is not (passes is None):
        then = "a number of samples" if saved is None else f"--odb-epochs {saved}"
        raise ValueError(
            f"the data state was saved with {then} and this run has the other: resume with the "
            "same kind of run length, or start the data anew (--finetune)"
        )
    if passes is not None and (type(saved) is not int or saved > passes):
        raise ValueError(
            f"the data state was saved with --odb-epochs {saved}, this run has {passes}: ask "
            "for at least as many, or start the data anew (--finetune)"
        )
