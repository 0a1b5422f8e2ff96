"""One replica's share of the stream, fetched in order by data-loader workers.

Must not decide what is drawn when: it hands out positions in the order in which the planner draws
them. Uses torch's public DataLoader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from odb_megatron.data.sample import Hole, Sample
from odb_megatron.data.stream import FetchError, SampleStream
from odb_megatron.data.workers import Packed, Workers, WorkerStart

__all__ = ["PositionFeed", "ReplicaStream"]

_NOTHING_YET = -1
_PREFETCH = 2


class PositionFeed:
    """Positions that become known while the run goes on (online assignment).

    A data loader asks its sampler for positions from inside `next()`, as many as its workers may
    fetch ahead. Where none is known yet the feed answers at once with a placeholder, which no
    worker has to fetch; so it never blocks, and what is fetched when does not change any plan.
    """

    def __init__(self) -> None:
        self._positions: deque[int] = deque()

    def extend(self, positions: Iterable[int]) -> None:
        """Add positions, in the order in which they will be taken."""
        self._positions.extend(positions)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self._positions.popleft() if self._positions else _NOTHING_YET


class ReplicaStream:
    """Samples of one replica, in the order of `positions`.

    Args:
        stream: the run's stream.
        positions: positions in the order in which they will be taken.
        workers: worker processes.
        lead: positions that are known ahead, at least 1; workers fetch no further.
    """

    def __init__(
        self,
        stream: SampleStream,
        positions: Sequence[int] | PositionFeed,
        *,
        workers: Workers | None = None,
        lead: int = 1 << 30,
    ) -> None:
        workers = workers or Workers()
        num = min(workers.num, max(1, lead))
        options: dict[str, Any] = {}
        if num:
            packed = None if workers.start is WorkerStart.FORK else Packed(stream)
            context = (packed or Packed(None)).context(workers.start)
            prefetch = max(1, min(_PREFETCH, lead // num))
            options = {"multiprocessing_context": context, "prefetch_factor": prefetch}
            fetcher = _Fetcher(packed or stream)
        else:
            fetcher = _Fetcher(stream)
        loader = torch.utils.data.DataLoader(
            fetcher,
            batch_size=None,
            sampler=positions,
            num_workers=num,
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(0),  # else the model's would be advanced
            **options,
        )
        self._items: Iterator[tuple[int, Sample | Hole | FetchError] | None] = iter(loader)

    def take(self, position: int) -> Sample | Hole:
        """Return the sample at `position`, which must be the next one.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatTemplateError: always.
        """
        while (found := next(self._items)) is None:
            pass  # a placeholder
        at, item = found
        assert position == at, f"position {position} asked, {at} is next"
        if isinstance(item, FetchError):
            raise item.error
        return item


class _Fetcher(torch.utils.data.Dataset[Any]):
    """The stream, with the position beside each sample, and nothing for a placeholder."""

    def __init__(self, stream: SampleStream | Packed) -> None:
        self._packed = stream if isinstance(stream, Packed) else None
        self._stream = None if isinstance(stream, Packed) else stream

    def __getitem__(self, position: int) -> tuple[int, Sample | Hole | FetchError] | None:
        if position == _NOTHING_YET:
            return None
        if self._stream is None:
            assert self._packed is not None
            self._stream = self._packed.unpack()
            self._packed = None
        return position, self._stream[position]


def _as_is(item: Any) -> Any:
    return item
