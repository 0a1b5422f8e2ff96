"""The data iterators of one rank: steps made ahead, as this rank of the replica uses them.

The source rank's loader makes each step in a thread of its own, which hands it to the replica's
other ranks, whose threads receive it; each rank cuts its context-parallel part. Virtual pipeline
chunks get an iterator each, over the same steps. What is asked about the loader is answered for the
last step that the trainer was given.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from odb_megatron.comm.heartbeat import Deadline
from odb_megatron.data.loop import Progress
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatchLayout, slice_micro_batch
from odb_megatron.data.wire import Ending, StepHeader, decode_header, decode_step, encode_header
from odb_megatron.plan.record import LoaderClosedError, ReplicaFailedError

if TYPE_CHECKING:
    from odb_megatron.comm.groups import ReplicaGroup

__all__ = ["ChunkIterator", "StepFeed"]

_AT_EXIT_S = 1.0
"""Seconds that the end of the process waits for each feed that nobody closed."""

_CLOSED = "the step queue is closed: no step can be taken from it any more"

Item = StepHeader | MicroBatchLayout


class _Step(NamedTuple):
    items: list[Item]  # the header, and this rank's part of each micro-batch
    delivered: dict[str, float]
    progress: Progress | None  # the loader's after it; on source ranks
    num_bytes: int


class _Pass:
    """One pass over the loader's steps, made ahead by a thread."""

    def __init__(
        self,
        loader: StepLoader | None,
        channel: ReplicaGroup | None,
        part: tuple[int, int],
        depth: int,
    ) -> None:
        self._loader, self._channel, self._part = loader, channel, part
        self._has_told = False  # the other ranks of the replica know that no step follows
        self._room, self._filled = threading.Semaphore(depth), threading.Semaphore(0)
        self._made: deque[_Step | BaseException] = deque()
        self._over: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="the step queue", daemon=True)

    def waiting(self) -> list[_Step]:
        """Return the finished steps that nobody has taken."""
        return [one for one in list(self._made) if isinstance(one, _Step)]

    def take(self) -> _Step:
        """Return the next step, waiting for it.

        Raises:
            StopIteration: there is none.
            RuntimeError: the pass is closed.
            BaseException: what the thread met, with its traceback, once its steps are taken.
        """
        if self._closing.is_set():
            raise RuntimeError(_CLOSED)
        if self._thread.ident is None:
            self._thread.start()
        if self._over is None:
            self._filled.acquire()
            found = self._made.popleft()
            self._room.release()
            if isinstance(found, _Step):
                return found
            self._over = found
        raise self._over

    def close(self, *, timeout_s: float) -> bool:
        """End; no further step can be taken. Harmless when called again.

        Returns:
            Whether the thread has ended within the time: it may still wait for others.
        """
        if not self._closing.is_set():
            self._closing.set()
            if self._loader is not None:
                self._loader.close()
            self._room.release()
            self._made.append(RuntimeError(_CLOSED))
            self._filled.release()
            if self._thread.ident is None:
                self._thread.start()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        found: _Step | BaseException | None = None
        while not isinstance(found, BaseException):
            self._room.acquire()
            if self._closing.is_set():
                break
            try:
                found = self._make()
            except BaseException as error:
                found = error
            self._made.append(found)
            self._filled.release()
        self._closing.wait()
        # Whoever ends has an error of its own, or none.
        if self._loader is not None:
            with contextlib.suppress(Exception):
                self._loader.end()  # tells the other replicas
            with contextlib.suppress(Exception):
                self._tell(Ending(closed="it closed its loader"))
        with contextlib.suppress(Exception):
            while not self._has_told:  # on the others; the source rank has told them
                self._receive()

    def _make(self) -> _Step | StopIteration:
        """Return the next step.

        Raises:
            ReplicaFailedError: the source rank failed; it raises its own error.
            LoaderClosedError: a replica closed its loader.
        """
        channel = self._channel
        before = (channel.num_collectives, channel.num_bytes) if channel else (0, 0)
        found = self._receive() if self._loader is None else self._send(self._loader)
        if found is None:
            return StopIteration()
        header, payload, pixels, progress = found
        items: list[MicroBatchLayout]
        if payload is None:
            items = header.layouts()
        else:
            size, rank = self._part
            whole = decode_step(header, payload, pixels)
            items = [slice_micro_batch(item, size=size, rank=rank) for item in whole]
        after = (channel.num_collectives, channel.num_bytes) if channel else (0, 0)
        delivered = {
            "plan_s": header.plan_us / 1e6,
            "collectives": after[0] - before[0],
            "bytes_delivered": after[1] - before[1],
        }
        return _Step([header, *items], delivered, progress, sum(map(_num_bytes, items)))

    def _send(self, loader: StepLoader) -> tuple[StepHeader, Any, Any, Progress] | None:
        try:
            step = loader.make_step()
        except LoaderClosedError as error:
            self._tell(Ending(closed=str(error)))
            raise
        except BaseException as error:
            self._tell(Ending(error=f"{type(error).__name__}: {error}"))
            raise
        if step is None:
            self._tell(Ending())
            return None
        if self._channel is not None:
            self._channel.header(encode_header(step.header))
            self._channel.payload(step.payload)
            if step.pixels is not None and self._channel.has_attachment:
                self._channel.attachment(step.pixels)
        return step.header, step.payload, step.pixels, step.progress

    def _receive(self) -> tuple[StepHeader, Any, Any, None] | None:
        assert self._channel is not None, "a rank without a loader has a channel"
        if self._has_told:
            return None
        try:
            header = decode_header(self._channel.header())
        except BaseException:
            self._has_told = True
            raise
        if isinstance(header, Ending):
            self._has_told = True
            who = "the source rank of this replica"
            if header.error:
                raise ReplicaFailedError(f"{who} failed: {header.error}")
            if header.closed:
                raise LoaderClosedError(f"{who} stopped: {header.closed}")
            return None
        payload = pixels = None
        if self._channel.has_payload:
            payload = self._channel.payload(np.zeros(header.payload_bytes, dtype=np.uint8))
        if header.pixels is not None and self._channel.has_attachment:
            pixels = self._channel.attachment(np.zeros(header.pixel_bytes, dtype=np.uint8))
        return header, payload, pixels, None

    def _tell(self, ending: Ending) -> None:
        if not self._has_told:
            self._has_told = True
            if self._channel is not None:
                self._channel.header(encode_header(ending))


def _num_bytes(item: MicroBatchLayout) -> int:
    return sum(value.nbytes for value in vars(item).values() if isinstance(value, Tensor))


_feeds: weakref.WeakSet[StepFeed] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for feed in list(_feeds):
        feed.close(timeout_s=_AT_EXIT_S)


class StepFeed:
    """Steps of one loader on one rank of a replica.

    Args:
        loader: the source rank's; None on other ranks.
        channel: to the replica's other ranks; None for a replica of one rank.
        part: a replica's context-parallel size, and this rank's place in it.
        num_chunks: virtual pipeline chunks of this rank.
        plan_ahead: most finished steps that wait for the trainer, at least 1.
        num_steps: steps of one pass over the stream.

    Attributes:
        num_steps: see above.
        delivered: how the last step came to the trainer: `wait_s` that it waited for it, `plan_s`
            that making it took the source rank, waits included; `queue_steps` finished steps behind
            it and their `queue_bytes`; broadcasts that brought it to this rank (`collectives`) and
            their bytes (`bytes_delivered`).
        deadline: counts the time that the trainer waits; set before the first step is taken.
    """

    def __init__(
        self,
        loader: StepLoader | None,
        *,
        channel: ReplicaGroup | None = None,
        part: tuple[int, int] = (1, 0),
        num_chunks: int = 1,
        plan_ahead: int = 2,
        num_steps: int = 0,
    ) -> None:
        self._loader, self._channel, self._part = loader, channel, part
        assert plan_ahead > 0, "steps are made ahead"
        self._plan_ahead = plan_ahead
        self._progress: Progress | None = None
        self.num_steps = num_steps
        self.deadline: Deadline | None = None
        self.delivered: dict[str, float] = {}
        self._items: list[deque[Item]] = [deque() for _ in range(num_chunks)]  # for each chunk
        self._has_begun = [False] * num_chunks
        self._pass = self._new_pass()
        _feeds.add(self)

    @property
    def iterators(self) -> list[ChunkIterator]:
        """Iterators of all chunks, which give the same items."""
        return [ChunkIterator(self, chunk) for chunk in range(len(self._items))]

    @property
    def progress(self) -> Progress:
        """Where the loader stood after the last step that was handed out; source ranks only."""
        assert self._loader is not None, "only the source rank of a replica has a loader"
        return self._progress or self._loader.progress

    @property
    def num_ready(self) -> int:
        """Finished steps that wait for the trainer."""
        return len(self._pass.waiting())

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
        self._pass = self._new_pass()
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
            ReplicaFailedError: the source rank failed; it raises its own error.
            LoaderClosedError: a replica closed its loader before this step.
            Exception: what making the step raised.
        """
        self._has_begun[chunk] = True
        if not self._items[chunk]:
            started = time.perf_counter()
            with self.deadline.waiting() if self.deadline else contextlib.nullcontext():
                step = self._pass.take()
            self._progress = step.progress
            wait_s, behind = time.perf_counter() - started, self._pass.waiting()
            self.delivered = step.delivered | {
                "wait_s": wait_s,
                "queue_steps": len(behind),
                "queue_bytes": sum(one.num_bytes for one in behind),
            }
            for items in self._items:
                items.extend(step.items)
        return self._items[chunk].popleft()

    def close(self, *, timeout_s: float) -> bool:
        """End: no further step is made anywhere. Harmless when called again.

        All replicas stop at this one's next gather, and all ranks of this replica with it.

        Args:
            timeout_s: most seconds to wait for that. The thread is a daemon: it does not hold up
                the end of the process.

        Returns:
            Whether it came to that.
        """
        return self._pass.close(timeout_s=timeout_s)

    def _new_pass(self) -> _Pass:
        return _Pass(self._loader, self._channel, self._part, self._plan_ahead)


class ChunkIterator:
    """Iterator of one model chunk over step headers and micro-batches.

    A step's header travels through it like any item, so whoever replays the iterator replays the
    step's M with it.

    Args:
        feed: where steps come from, shared by the chunks of a rank.
        chunk: which one this is.
    """

    def __init__(self, feed: StepFeed, chunk: int) -> None:
        self._feed, self._chunk = feed, chunk

    def __len__(self) -> int:
        """Steps of one pass over the stream."""
        return self._feed.num_steps

    def __iter__(self) -> ChunkIterator:
        """Start the stream again if it has begun (Megatron's full validation iterates so)."""
        self._feed.begin(self._chunk)
        return self

    def __next__(self) -> Item:
        return self._feed.next_item(self._chunk)
