"""The data iterators of one rank of a replica: steps made ahead, as this rank uses them.

Must not plan: the leader's step loader does. A thread of its own takes each step from the loader
and hands it to the replica's other ranks, whose threads receive it; each rank cuts its
context-parallel part. Virtual pipeline chunks get an iterator each, over the same steps. What is
asked about the loader (state, counts) is answered for the last step that the trainer was given.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odb_megatron.data.finished_step import FinishedStep, Progress, StepHeader
from odb_megatron.data.rank_steps import Channel, ContextPart, RankSteps
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.step_queue import StepQueue, Waits
from odb_megatron.data.thd import MicroBatchLayout

__all__ = ["Channel", "ChunkIterator", "ContextPart", "HandedOut", "StepFeed"]

Item = StepHeader | MicroBatchLayout

_AT_EXIT_S = 1.0
"""Seconds that the end of the process waits for each feed that nobody closed."""

_feeds: weakref.WeakSet[StepFeed] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for feed in list(_feeds):
        feed.close(timeout_s=_AT_EXIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """How the last step came to the trainer.

    Attributes:
        wait_s: seconds the trainer waited for it.
        plan_s: seconds that making it took the replica's leader, waits included.
        window_bytes: see `Progress`.
        queue_steps: finished steps behind it.
        queue_bytes: their bytes.
        collectives: see `FinishedStep`.
        bytes_delivered: see `FinishedStep`.
    """

    wait_s: float = 0.0
    plan_s: float = 0.0
    window_bytes: int = 0
    queue_steps: int = 0
    queue_bytes: int = 0
    collectives: int = 0
    bytes_delivered: int = 0


class StepFeed:
    """Steps of one loader on one rank of a replica.

    Args:
        loader: the leader's; None on other ranks.
        channel: to the replica's other ranks; None for a replica of one rank.
        part: this rank's context-parallel part.
        num_chunks: virtual pipeline chunks of this rank.
        plan_ahead: most finished steps that wait for the trainer; 0 makes each when it is asked
            for, without a thread.
        num_steps: steps of one pass over the stream.

    Attributes:
        num_steps: see above.
        handed_out: how the last step came to the trainer.
        patience: see `StepQueue`; set before the first step is taken.
    """

    def __init__(
        self,
        loader: StepLoader | None,
        *,
        channel: Channel | None = None,
        part: ContextPart | None = None,
        num_chunks: int = 1,
        plan_ahead: int = 0,
        num_steps: int = 0,
    ) -> None:
        self._loader = loader
        self._channel = channel
        self._part = part or ContextPart()
        self._plan_ahead = plan_ahead
        self._progress: Progress | None = None
        self.num_steps = num_steps
        self.patience: Waits | None = None
        self.handed_out = HandedOut()
        self._items: list[deque[Item]] = [deque() for _ in range(num_chunks)]  # for each chunk
        self._has_begun = [False] * num_chunks
        self._queue = self._new_queue()
        _feeds.add(self)

    @property
    def iterators(self) -> list[ChunkIterator]:
        """Iterators of all chunks, which give the same items."""
        return [ChunkIterator(self, chunk) for chunk in range(len(self._items))]

    @property
    def progress(self) -> Progress:
        """Where the loader stood after the last step that was handed out; leaders only."""
        assert self._loader is not None, "only the leader of a replica has a loader"
        return self._progress or self._loader.progress()

    @property
    def is_running(self) -> bool:
        """Whether steps are being made ahead."""
        return self._queue.is_running

    def state_dict(self) -> dict[str, object]:
        """Return the planner's state after the last step that was handed out."""
        return self.progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, before the first step is taken; see `StepLoader`.

        Raises:
            ValueError: see `StepLoader.load_state_dict`.
        """
        assert self._loader is not None, "only the leader of a replica has a loader"
        assert self._progress is None, "a state is loaded before the first step"
        self._loader.load_state_dict(state)

    def planner_cpu_ns(self) -> int:
        """CPU time of the thread that makes steps."""
        return self._queue.cpu_ns()

    def restart(self, *, timeout_s: float = 600.0) -> None:
        """Begin the loader's stream again (Megatron's full validation).

        Every rank of every replica restarts; a pass that is not at its end is closed by all.

        Args:
            timeout_s: most seconds that others may take to come here.

        Raises:
            RuntimeError: others did not come.
        """
        if not self.close(timeout_s=timeout_s):
            raise RuntimeError(
                f"the pass before this one did not end within {timeout_s:.0f} s: a rank of this "
                "or another replica has not begun a new pass; its own output says why"
            )
        if self._loader is not None:
            self._loader = self._loader.restarted()
        self._progress = None
        self._queue = self._new_queue()
        self._has_begun = [False] * len(self._items)
        for items in self._items:
            items.clear()

    def begin(self, chunk: int) -> None:
        """Start the stream again, if it has begun for this chunk."""
        if self._has_begun[chunk]:
            self.restart()

    def next_item(self, chunk: int) -> Item:
        """Return a chunk's next item: a step's header, or a micro-batch.

        Raises:
            StopIteration: the stream has ended.
            ReplicaFailedError: the leader failed; it raises its own error.
            LoaderClosedError: a replica closed its loader before this step.
            Exception: what making the step raised.
        """
        self._has_begun[chunk] = True
        if not self._items[chunk]:
            self._fetch()
        return self._items[chunk].popleft()

    def close(self, *, timeout_s: float) -> bool:
        """End: no further step is made anywhere. Harmless when called again.

        All replicas stop at this one's next exchange, and all ranks of this replica with it.

        Args:
            timeout_s: most seconds to wait for that. The thread is a daemon: it does not hold up
                the end of the process.

        Returns:
            Whether it came to that.
        """
        return self._queue.close(timeout_s=timeout_s)

    def _fetch(self) -> None:
        if self._progress is None and self._loader is not None:
            self._progress = self._loader.progress()
        self._queue.patience = self.patience
        step = self._queue.take()
        self._progress = step.progress
        if step.progress is not None:
            step.progress.bad_records.forget(step.progress.snapshot["step"])
        self.handed_out = HandedOut(
            wait_s=self._queue.wait_s,
            plan_s=step.plan_us / 1e6,
            window_bytes=step.window_bytes,
            queue_steps=self._queue.num_steps,
            queue_bytes=self._queue.num_bytes,
            collectives=step.collectives,
            bytes_delivered=step.bytes_delivered,
        )
        if step.fit is not None and self._loader is not None:
            self._loader.tell_fit(step.fit)
        for items in self._items:
            items.append(step.header)
            items.extend(step.micro_batches)

    def _new_queue(self) -> StepQueue[FinishedStep]:
        steps = RankSteps(self._loader, channel=self._channel, part=self._part)
        return StepQueue(steps, depth=self._plan_ahead, name="the step queue")


class ChunkIterator:
    """Iterator of one model chunk over step headers and micro-batches.

    A step's header travels through it like any item, so whoever replays the iterator replays the
    step's M with it.

    Args:
        feed: where steps come from, shared by the chunks of a rank.
        chunk: which one this is.
    """

    def __init__(self, feed: StepFeed, chunk: int) -> None:
        self._feed = feed
        self._chunk = chunk

    def __len__(self) -> int:
        """Steps of one pass over the stream."""
        return self._feed.num_steps

    def __iter__(self) -> ChunkIterator:
        """Start the stream again if it has begun (Megatron's full validation iterates so)."""
        self._feed.begin(self._chunk)
        return self

    def __next__(self) -> Item:
        return self._feed.next_item(self._chunk)
