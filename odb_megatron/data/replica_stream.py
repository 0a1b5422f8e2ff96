"""One replica's share of the stream, fetched in order by data-loader workers.

Which positions are a replica's own follows from the run's length, its batch size and what was
consumed before, so that workers fetch ahead.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from odb_megatron.data.fetch_limit import limited
from odb_megatron.data.sample import Sample, Skipped
from odb_megatron.data.stream import FetchError, Location, SampleStream
from odb_megatron.data.worker_reader import WorkerReader
from odb_megatron.data.workers import Workers, recorded, starting
from odb_megatron.plan.record import PlanConfig

__all__ = ["StreamReader", "WorkerError", "end_with_trainer", "own_positions"]

_MAX_IN_GROUP = 8
"""Positions that a worker fetches and sends at once, at most: sending each sample by itself costs
the planner 0.3 ms of processor time."""

_MAX_NAMED = 8

_PREFETCH = 2
"""Groups ahead of each worker."""

Group = list[tuple[int, Location]]
Fetched = list[tuple[int, Sample | Skipped | FetchError]]


class WorkerError(RuntimeError):
    """A data-loader worker died."""


def own_positions(config: PlanConfig, *, replica: int, consumed: int) -> Iterator[int]:
    """Yield the stream positions that a replica reads, step by step.

    Of each step's samples, in Megatron's order, every `num_replicas`-th from `replica` on.
    """
    while consumed < config.total:
        end = min(consumed + config.global_batch_size, config.total)
        yield from range(consumed + replica, end, config.num_replicas)
        consumed = end


class StreamReader:
    """A replica's samples of a stream with random access; a `loop.Reader`.

    Args:
        stream: the run's stream.
        config: how positions come to replicas.
        replica: which one this is.
        consumed: samples consumed before the first.
        workers: worker processes.

    Raises:
        ValueError: the stream cannot be sent to workers.
    """

    def __init__(
        self,
        stream: SampleStream,
        config: PlanConfig,
        *,
        replica: int,
        consumed: int = 0,
        workers: Workers | None = None,
    ) -> None:
        workers = workers or Workers()
        self._asked: deque[int] = deque()  # given to workers, and not yet come
        share = -(-config.global_batch_size // config.num_replicas)
        num, options = workers.num, dict[str, Any]()
        fetcher, dead = _Fetcher(stream), _none
        if num:
            fetcher = _Fetcher(stream, limit_s=workers.timeout_s)
            context, dead = recorded(multiprocessing.get_context("fork"))
            options = {"prefetch_factor": _PREFETCH, "multiprocessing_context": context}
        size = max(1, min(_MAX_IN_GROUP, share // (max(1, num) * _PREFETCH))) if num else 1
        positions = own_positions(config, replica=replica, consumed=consumed)
        loader = torch.utils.data.DataLoader(
            fetcher,
            batch_size=None,
            sampler=_Groups(stream, positions, size, asked=self._asked),
            num_workers=num,
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(0),  # else the model's would be advanced
            worker_init_fn=end_with_trainer,
            **options,
        )
        self._stream = stream
        self._loader: Any = loader
        self._dead = dead
        self._groups: Iterator[Fetched] | None = None
        self._items: deque[tuple[int, Sample | Skipped | FetchError]] = deque()

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        """Return the next samples with their stream positions.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatFormatError, DataFileError: always.
            WorkerError: a worker process has died.
        """
        return [self._take() for _ in range(count)]

    def has_ended(self) -> bool:
        """The run's length says when it ends."""
        return False

    def head(self) -> bytes:
        return b""

    def check_heads(self, heads: Sequence[bytes]) -> None:
        """Positions differ by themselves."""

    def state(self) -> None:
        """The consumed samples are all there is."""

    def close(self) -> None:
        """End the workers; nothing more is read."""
        self._groups = self._loader = None

    def _take(self) -> tuple[int, Sample | Skipped]:
        if self._groups is None:
            assert self._loader is not None, "a reader that was closed"
            with starting():
                self._groups = iter(self._loader)
            if self._loader.num_workers:
                self._groups = WorkerReader(self._groups, dead=self._dead)
        while not self._items:
            try:
                group = next(self._groups)
            except RuntimeError as error:
                raise self._worker_error(error) from error
            self._items.extend(group)
            for _ in group:
                self._asked.popleft()
        position, item = self._items.popleft()
        if isinstance(item, FetchError):
            raise item.error
        return position, item

    def _worker_error(self, error: RuntimeError) -> WorkerError:
        asked = [self._stream.describe(position) for position in self._asked]
        more = f" and {len(asked) - _MAX_NAMED} more" if len(asked) > _MAX_NAMED else ""
        return WorkerError(
            f"a data-loader worker has ended ({error}) while the workers were to fetch "
            f"{', '.join(asked[:_MAX_NAMED])}{more}. Its own output, or the system's log, may say "
            "why; SIGKILL often means that memory ran out: lower --num-workers"
        )


class _Groups(torch.utils.data.Sampler[Group]):
    """Positions in groups, in order, and where they are: only this process has the permutations."""

    def __init__(
        self, stream: SampleStream, positions: Iterator[int], size: int, *, asked: deque[int]
    ) -> None:
        self._stream = stream
        self._positions, self._size, self._asked = positions, size, asked

    def __iter__(self) -> Iterator[Group]:
        while group := list(islice(self._positions, self._size)):
            self._asked.extend(group)
            yield [(position, self._stream.locate(position)) for position in group]


class _Fetcher(torch.utils.data.Dataset[Any]):
    """The stream by groups of places, with the position beside each sample.

    Args:
        stream: the stream.
        limit_s: seconds that a sample may take in a worker process; 0 for any time.
    """

    def __init__(self, stream: SampleStream, *, limit_s: float = 0.0) -> None:
        self._stream, self._limit_s = stream, limit_s

    def __getitem__(self, group: Group) -> Fetched:
        stream = self._stream
        if self._limit_s == 0.0:
            return [(position, stream.fetched(position, where)) for position, where in group]
        found = []
        for position, where in group:
            with limited(self._limit_s, what=lambda: stream.describe(position, where)):  # noqa: B023
                found.append((position, stream.fetched(position, where)))
        return found


def _as_is(item: Any) -> Any:
    return item


def _none() -> list[int]:
    return []


def end_with_trainer(_worker: int = 0) -> None:
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
