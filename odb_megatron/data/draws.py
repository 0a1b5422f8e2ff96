"""What a replica draws: samples by position from a stream, or the next items of its own shards.

Must not decide what is drawn: the planner says. Nothing is opened before the first draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.data.item_stream import ItemStream, ReplicaItems
from odb_megatron.data.replica_stream import PositionFeed, ReplicaStream
from odb_megatron.data.sample import Skipped, SkipReason, Sample
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import Workers
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.planner import ReplicaPlanner

__all__ = ["Draws"]

Drawn = Iterator[tuple[int, Sample | Skipped]]


class Draws:
    """The samples of one replica in the order in which its planner draws them.

    Args:
        stream: the run's stream.
        config: how positions come to replicas.
        replica: which one this is.

    Attributes:
        known_bad: positions that are left out whatever they hold; see `BadRecords.known`.
    """

    def __init__(
        self, stream: SampleStream | ItemStream, config: PlanConfig, *, replica: int
    ) -> None:
        self._stream = stream
        self._config = config
        self._replica = replica
        self._feed = PositionFeed()
        self._source: ReplicaStream | None = None
        self._items: ReplicaItems | None = None
        self.known_bad: frozenset[int] = frozenset()

    def drawn(self, planner: ReplicaPlanner, *, workers: Workers) -> Drawn:
        """Yield what the planner wants to draw, until it wants no more or is closed.

        Each sample is to be observed before the next is asked for.

        Args:
            planner: the replica's.
            workers: in force when the data is opened.
        """
        announced = planner.upcoming()
        if isinstance(self._stream, ItemStream):  # items come in their own order
            yield from self._drawn_items(planner, self._open_items(self._stream, workers))
            return
        self._feed.extend(announced)
        while positions := planner.draw():
            source = self._open(self._stream, positions[0], workers)
            for position in positions:
                if planner.is_closing:  # the record that comes next says so
                    return
                yield position, source.take(position)

    def restored(
        self, window: Sequence[int], *, source: Any, workers: Workers
    ) -> Iterator[Sample | Skipped]:
        """Go on from a saved state, and yield the window's samples again.

        Args:
            window: positions drawn and not emitted when it was saved.
            source: what `state` returned; it comes from a file and is not trusted.
            workers: see `drawn`.

        Raises:
            ValueError: see `ReplicaItems.restore`.
        """
        if isinstance(self._stream, ItemStream):
            items = self._open_items(self._stream, workers).restore(source, window)
            return iter([items[position] for position in window])
        stream = self._stream
        return (stream.fetch(position) for position in window)

    def state(self, window: npt.NDArray[np.int64], *, workers: Workers) -> dict[str, Any] | None:
        """Return where the replica's own shards are; None for random access.

        Args:
            window: rows of the planner's snapshot.
            workers: see `drawn`.
        """
        if not isinstance(self._stream, ItemStream):
            return None
        return self._open_items(self._stream, workers).state(window[:, 0].tolist())

    def has_other_end(self, source: Mapping[str, Any]) -> bool:
        """Whether a saved run was to end after another number of passes."""
        return isinstance(self._stream, ItemStream) and source["passes"] != self._stream.passes

    def head(self) -> bytes:
        """See `ReplicaItems.head`."""
        assert self._items is not None, "something was drawn"
        return self._items.head()

    def end(self) -> None:
        """End the workers; nothing more is drawn."""
        self._source = None
        if self._items is not None:
            self._items.close()

    def _drawn_items(self, planner: ReplicaPlanner, items: ReplicaItems) -> Drawn:
        """Draw from iterators, whose end shows only when it is there."""
        ends = self._config.has_unknown_end
        while positions := planner.draw():
            for position in positions:
                if planner.is_closing:
                    return
                if ends and not items.has_next():
                    planner.end_shard(position)
                    return
                item = items.take(position)
                yield position, self._left_out(position, item)
        if ends and not items.has_next():
            planner.end_shard()

    def _left_out(self, position: int, item: Sample | Skipped) -> Sample | Skipped:
        """Return the item, or what stands in its place where it is known to be bad."""
        if position not in self.known_bad or isinstance(item, Skipped):
            return item
        message = f"item {position} was bad before the run was resumed"
        return Skipped(reason=SkipReason.BAD_RECORD, message=message, source=item.source)

    def _open_items(self, stream: ItemStream, workers: Workers) -> ReplicaItems:
        if self._items is None:
            self._items = stream.open(self._config, replica=self._replica, workers=workers)
        return self._items

    def _open(self, stream: SampleStream, first: int, workers: Workers) -> ReplicaStream:
        if self._source is None:
            config = self._config
            stream = stream.without(self.known_bad)
            if config.is_online:
                self._source = ReplicaStream(stream, self._feed, workers=workers, lead=config.lead)
            else:
                own = config.own_positions(self._replica)
                shard = range(first, own.stop, own.step)
                self._source = ReplicaStream(stream, shard, workers=workers)
        return self._source
