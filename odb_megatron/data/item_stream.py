"""An iterable training set as a stream: each replica reads its own shards, item after item.

Knows no step. Positions have no fixed sample here: one stands for the next item of the replica that
draws it, and `ReplicaItems` remembers which that was.
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
from odb_megatron.data.iterable import IterableShards, SourceError
from odb_megatron.data.preprocess import SampleRules
from odb_megatron.data.sample import Skipped, Sample
from odb_megatron.data.stream import Location
from odb_megatron.data.workers import Workers
from odb_megatron.plan.config import OPEN_TOTAL, PlanConfig, ShardLength

__all__ = ["ItemStream", "ReplicaItems", "compare_heads"]

_STATE_VERSION = 1
_STATE_KEYS = {"version", "passes", "has_state", "next", "held", "from"}
_HEAD_ITEMS = 8


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
    def shard_length(self) -> ShardLength:
        """What is known of the length of a replica's shards."""
        return ShardLength.ENDLESS if self.passes is None else ShardLength.UNKNOWN

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

    def open(self, config: PlanConfig, *, replica: int, workers: Workers) -> ReplicaItems:
        """Return a replica's items, from the beginning."""
        shard = ReplicaShard(
            shards=self.shards,
            replica=replica,
            num_replicas=config.num_replicas,
            rules=self.rules,
            name=self.name,
            passes=self.passes,
            keeps_state=self.keeps_state,
        )
        return ReplicaItems(shard, workers=workers)


class ReplicaItems:
    """The items of one replica by the positions they were drawn for.

    Args:
        shard: what is read.
        workers: worker processes.

    Raises:
        ValueError: see `ItemFeed`.
    """

    def __init__(self, shard: ReplicaShard, *, workers: Workers) -> None:
        self._shard = shard
        self._workers = workers
        self._feed = ItemFeed(shard, workers=workers)
        self._numbers: dict[int, int] = {}  # of the items that were drawn and not emitted
        self._head = hashlib.sha256()
        self._head_items: set[bytes] = set()
        self._num_head = 0

    def has_next(self) -> bool:
        """See `ItemFeed.has_next`."""
        return self._feed.has_next()

    def take(self, position: int) -> Sample | Skipped:
        """Return the next item, which stands at `position` from now on; see `ItemFeed.take`."""
        number, item = self._feed.take()
        self._numbers[position] = number
        if self._num_head < _HEAD_ITEMS:
            self._num_head += 1
            if isinstance(item, Sample):
                data = item.tokens.tobytes() + item.labels.tobytes()
                self._head.update(data)
                self._head_items.add(data)
        return item

    def head(self) -> bytes:
        """Return what `compare_heads` compares: 48 bytes of the first items taken."""
        counts = (self._num_head, len(self._head_items))
        return self._head.digest() + b"".join(n.to_bytes(8, "little") for n in counts)

    def state(self, window: Sequence[int]) -> dict[str, Any]:
        """Return where the replica is, as JSON values; items that are neither held nor to come are
        forgotten.

        Args:
            window: positions drawn and not emitted.
        """
        self._numbers = {position: self._numbers[position] for position in window}
        held = list(self._numbers.values())
        following = self._feed.next_number
        return {
            "version": _STATE_VERSION,
            "passes": self._shard.passes,
            "has_state": self._feed.has_state and self._shard.keeps_state,
            "next": following,
            "held": held,
            "from": snapshot_values(self._feed.snapshot(min(held, default=following))),
        }

    def restore(self, state: Any, window: Sequence[int]) -> dict[int, Sample | Skipped]:
        """Go on from `state`: read on from its snapshot, and return the window's items by position.

        Args:
            state: from `state`; it comes from a file and is not trusted.
            window: the positions it was taken with.

        Raises:
            ValueError: the state is damaged or does not fit, or the source gives less than it did.
        """
        begin = self._checked(state, window)
        wanted = dict(zip(state["held"], window, strict=True))
        self.close()
        self._feed = ItemFeed(self._shard, workers=self._workers, begin=begin)
        self._numbers = {}
        try:
            return self._read_again(begin.number, state["next"], wanted)
        except RuntimeError as error:  # told to the other replicas as what cannot be resumed
            raise ValueError(str(error)) from error

    def _read_again(
        self, first: int, following: int, wanted: Mapping[int, int]
    ) -> dict[int, Sample | Skipped]:
        """Pass over items up to `following`, and return those that are wanted, by position."""
        found: dict[int, Sample | Skipped] = {}
        for number in range(first, following):
            if not self._feed.has_next():
                raise ValueError(
                    f"{self._shard.name} gives replica {self._shard.replica} {number} items, and "
                    f"{following} had been read when the state was saved: the data has "
                    "changed; restore it, or start the data anew (--finetune)"
                )
            position = wanted.get(number)
            if position is None:
                self._feed.skip()
            else:
                found[position] = self._feed.take()[1]
                self._numbers[position] = number
        return found

    def close(self) -> None:
        """Nothing more is read."""
        self._feed.close()

    def _checked(self, state: Any, window: Sequence[int]) -> Snapshot:
        """Return the snapshot of a state that fits.

        Raises:
            ValueError: it does not.
        """
        if not isinstance(state, Mapping) or set(state) != _STATE_KEYS:
            raise ValueError(
                "the data state holds no state of an iterable source, and this run has one: resume "
                "with the data that was saved, or start the data anew (--finetune)"
            )
        numbers = [state["next"], *state["held"]] if isinstance(state["held"], list) else [None]
        if state["version"] != _STATE_VERSION or any(
            type(number) is not int or not 0 <= number <= OPEN_TOTAL for number in numbers
        ):
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
        held = state["held"]
        is_whole = len(held) == len(window) == len(set(held))
        if not is_whole or not all(begin.number <= number < state["next"] for number in held):
            raise ValueError(
                "the source's state and the window do not belong together: the file was changed; "
                "restore it"
            )
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


def compare_heads(heads: Sequence[bytes]) -> None:
    """Raise if replicas begin with the same items, or none has any; from `ReplicaItems.head`.

    Equal items one after the other (made-up data) tell nothing.

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
                f"replicas {other} and {replica} begin with the same {counts[replica]} samples: "
                "each has to read a shard of its own; pass IterableShards(make=...), whose make("
                "index, num_shards) returns one, or shard the dataset by the data-parallel rank"
            )
