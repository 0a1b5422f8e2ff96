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
    snapshot_from,
    snapshot_values,
)
from odb_megatron.data.iterable import IterableShards, SourceError, has_own_workers
from odb_megatron.data.loop import HEAD_ITEMS
from odb_megatron.data.preprocess import SampleRules
from odb_megatron.data.sample import Sample, Skipped
from odb_megatron.data.stream import Location
from odb_megatron.data.workers import Workers
from odb_megatron.plan.record import OPEN_TOTAL

__all__ = ["ItemReader", "ItemStream"]

_STATE_VERSION = 3
_STATE_KEYS = {"version", "passes", "has_state", "ended", "next", "from"}


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
        """See `SampleStream.sources`; length and order are not known."""
        parts = {"num_records": -1, "seed": 0, "ends": [0, self.shards.parts]}
        return [{"path": self.name, "fingerprint": self.data_digest(), **parts}]

    def blend_digest(self, most: int) -> tuple[int, str]:
        """See `SampleStream.blend_digest`: a single source."""
        del most
        return 0, ""

    def data_digest(self) -> str:
        """Digest of what the data set says of itself: its name and parts, equal on all replicas."""
        text = f"{self.shards.name} {self.shards.parts} {self.shards.is_own}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Digest of all that all replicas must have alike."""
        text = f"{self.data_digest()} {self.passes} {self.num_samples}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, *, replica: int, num_replicas: int, workers: Workers) -> ItemReader:
        """Return a replica's items, from the beginning."""
        shard = ReplicaShard(
            shards=self.shards,
            replica=replica,
            num_replicas=num_replicas,
            rules=self.rules,
            name=self.name,
            passes=self.passes,
            keeps_state=self.keeps_state,
        )
        return ItemReader(shard, workers=workers)


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
        return {
            "version": _STATE_VERSION,
            "passes": self._shard.passes,
            "has_state": self._feed.has_state and self._shard.keeps_state,
            "ended": self.has_ended(),
            "next": following,
            "from": snapshot_values(self._feed.snapshot(following)),
        }

    def restore(self, state: Any) -> None:
        """Go on from `state`, before the first item is read: read on from its snapshot.

        Args:
            state: from `state`; it comes from a file and is not trusted.

        Raises:
            ValueError: the state is damaged or does not fit, or the source gives less than it did.
        """
        begin = self._checked(state)
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

    def _checked(self, state: Any) -> Snapshot:
        """Return the snapshot of a state that fits.

        Raises:
            ValueError: it does not.
        """
        if not isinstance(state, Mapping) or set(state) != _STATE_KEYS:
            raise ValueError(
                "the data state holds no state of an iterable source, and this run has one: resume "
                "with the data that was saved, or start the data anew (--finetune)"
            )
        following = state["next"]
        is_sound = type(following) is int and 0 <= following <= OPEN_TOTAL
        is_sound &= type(state["ended"]) is bool
        if state["version"] != _STATE_VERSION or not is_sound:
            raise ValueError(
                "the source's state is damaged or of another version: restore the file, or start "
                "the data anew (--finetune)"
            )
        if state["has_state"] is not True:
            raise ValueError(
                f"{self._shard.name} had no state of its own when the checkpoint was saved, so a "
                "run cannot go on with its data: give it state_dict() and load_state_dict() (or "
                "use torchdata's StatefulDataLoader, or Megatron-Energon's savable loader), and "
                "start the data anew (--finetune)"
            )
        self._check_passes(state["passes"])
        begin = snapshot_from(state["from"], num_parts=self._shard.shards.parts)
        if begin.number > following:
            raise ValueError("the source's state is damaged: the file was changed; restore it")
        return begin

    def _check_passes(self, saved: Any) -> None:
        """Raise unless the run may end where this one is to end.

        Raises:
            ValueError: another kind of run length, or a shorter run.
        """
        passes = self._shard.passes
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
