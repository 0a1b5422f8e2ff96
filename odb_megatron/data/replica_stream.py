"""One replica's share of the stream, fetched in order by data-loader workers.

Must not decide what is drawn when: it hands out positions in the order in which the planner draws
them. Uses torch's public DataLoader.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any

import torch

from odb_megatron.data.fetch_limit import limited
from odb_megatron.data.sample import Skipped, Sample
from odb_megatron.data.stream import FetchError, SampleStream
from odb_megatron.data.worker_reader import WorkerReader
from odb_megatron.data.workers import Packed, Workers, WorkerStart, recorded

__all__ = ["PositionFeed", "ReplicaStream", "WorkerError", "end_with_trainer"]

_MOST_IN_GROUP = 8
"""Positions that a worker fetches and sends at once, at most: sending each sample by itself costs
the planner 0.3 ms of processor time."""

_MOST_NAMED = 8

_PREFETCH = 2
"""Groups ahead of each worker."""

Group = tuple[int, ...]
Fetched = list[tuple[int, Sample | Skipped | FetchError]]


class WorkerError(RuntimeError):
    """A data-loader worker died."""


class PositionFeed:
    """Positions that become known while the run goes on (online assignment).

    A data loader asks its sampler for positions from inside `next()`, as many as its workers may
    fetch ahead. Where none is known yet the feed answers at once with an empty group, a placeholder
    for which no worker has to fetch; so it never blocks, and what is fetched when does not change
    any plan.
    """

    def __init__(self) -> None:
        self._positions: deque[int] = deque()

    def extend(self, positions: Iterable[int]) -> None:
        """Add positions, in the order in which they will be taken."""
        self._positions.extend(positions)

    def groups(self, size: int) -> Iterator[Group]:
        """Yield groups of up to `size` positions, without end."""
        while True:
            most = min(size, len(self._positions))
            yield tuple(self._positions.popleft() for _ in range(most))


class ReplicaStream:
    """Samples of one replica, in the order of `positions`.

    Args:
        stream: the run's stream.
        positions: positions in the order in which they will be taken.
        workers: worker processes.
        lead: positions that are known ahead, at least 1; workers fetch no further.

    Raises:
        ValueError: the stream cannot be sent to workers.
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
        self._asked: deque[int] = deque()  # given to workers, and not yet come
        num = min(workers.num, max(1, lead))
        size, options = 1, dict[str, Any]()
        fetcher = _Fetcher(stream)
        limit_s = workers.timeout_s if num else 0.0
        if num:
            ahead = lead if isinstance(positions, PositionFeed) else min(lead, len(positions))
            size = max(1, min(_MOST_IN_GROUP, ahead // (num * _PREFETCH)))
            options["prefetch_factor"] = max(1, min(_PREFETCH, lead // num))
            context: BaseContext = multiprocessing.get_context("fork")
            if workers.start is not WorkerStart.FORK:
                packed = Packed(stream)
                context = packed.context(workers.start)
                fetcher = _Fetcher(packed)
            options["multiprocessing_context"], dead = recorded(context)
        fetcher.limit_s = limit_s
        loader = torch.utils.data.DataLoader(
            fetcher,
            batch_size=None,
            sampler=_Groups(positions, size, asked=self._asked),
            num_workers=num,
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(0),  # else the model's would be advanced
            worker_init_fn=end_with_trainer,
            **options,
        )
        self._stream = stream
        self._groups: Iterator[Fetched] = iter(loader)
        if num:
            self._groups = WorkerReader(self._groups, dead=dead)
        self._items: deque[tuple[int, Sample | Skipped | FetchError]] = deque()

    def take(self, position: int) -> Sample | Skipped:
        """Return the sample at `position`, which must be the next one.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatTemplateError: always.
            WorkerError: a worker process has died.
        """
        while not self._items:
            try:
                group = next(self._groups)  # nothing of a placeholder
            except RuntimeError as error:
                raise self._worker_error(error) from error
            self._items.extend(group)
            for _ in group:
                self._asked.popleft()
        at, item = self._items.popleft()
        assert position == at, f"position {position} asked, {at} is next"
        if isinstance(item, FetchError):
            raise item.error
        return item

    def _worker_error(self, error: RuntimeError) -> WorkerError:
        asked = [self._stream.describe(position) for position in self._asked]
        more = f" and {len(asked) - _MOST_NAMED} more" if len(asked) > _MOST_NAMED else ""
        return WorkerError(
            f"a data-loader worker has ended ({error}) while the workers were to fetch "
            f"{', '.join(asked[:_MOST_NAMED])}{more}. Its own output, or the system's log, may say "
            "why; SIGKILL often means that memory ran out: lower --num-workers"
        )


class _Groups(torch.utils.data.Sampler[Group]):
    """Positions in groups, in order."""

    def __init__(
        self, positions: Sequence[int] | PositionFeed, size: int, *, asked: deque[int]
    ) -> None:
        self._positions, self._size, self._asked = positions, size, asked

    def __iter__(self) -> Iterator[Group]:
        for group in self._groups():
            self._asked.extend(group)
            yield group

    def _groups(self) -> Iterator[Group]:
        if isinstance(self._positions, PositionFeed):
            return self._positions.groups(self._size)
        starts = range(0, len(self._positions), self._size)
        return (tuple(self._positions[start : start + self._size]) for start in starts)


class _Fetcher(torch.utils.data.Dataset[Any]):
    """The stream by groups of positions, with the position beside each sample.

    Attributes:
        limit_s: seconds that a sample may take in a worker process; 0 for any time.
    """

    def __init__(self, stream: SampleStream | Packed) -> None:
        self._packed = stream if isinstance(stream, Packed) else None
        self._stream = None if isinstance(stream, Packed) else stream
        self.limit_s = 0.0

    def __getitem__(self, positions: Group) -> Fetched:
        if self._stream is None:
            assert self._packed is not None
            self._stream = self._packed.unpack()
            self._packed = None
        if self.limit_s == 0.0:
            return [(position, self._stream[position]) for position in positions]
        stream, found = self._stream, []
        for position in positions:
            with limited(self.limit_s, what=lambda: stream.describe(position)):  # noqa: B023
                found.append((position, stream[position]))
        return found


def _as_is(item: Any) -> Any:
    return item


def end_with_trainer(_worker: int) -> None:
    """End this worker when the trainer's process is gone.

    Torch's workers look after their parent, which is the fork server; and that one lives as long as
    a worker does, which holds the pipe it watches.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end, args=(parent,), daemon=True).start()


def _wait_for_end(parent: Any) -> None:
    parent.join()
    os._exit(1)
