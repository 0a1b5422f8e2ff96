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
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odb_megatron.data.context_parallel import slice_micro_batch
from odb_megatron.data.loop import Progress
from odb_megatron.data.step_images import pixel_bytes, with_pixels
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.step_wire import (
    Ending,
    StepMetadata,
    decode_header,
    decode_payload,
    encode_header,
    payload_bytes,
)
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.plan.record import LoaderClosedError, ReplicaFailedError, StepTotals

__all__ = ["Channel", "ChunkIterator", "ContextPart", "Delivered", "StepFeed", "StepHeader"]

_AT_EXIT_S = 1.0
"""Seconds that the end of the process waits for each feed that nobody closed."""


class Channel(Protocol):
    """What `comm.delivery.ReplicaGroup` does."""

    num_collectives: int
    num_bytes: int

    @property
    def has_payload(self) -> bool:
        """Whether this rank takes part in payload broadcasts."""

    @property
    def has_attachment(self) -> bool:
        """Whether this rank takes part in broadcasts of a second payload, the patches of images."""

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the source rank passes it."""

    def payload(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Broadcast a payload into a buffer of its size."""

    def attachment(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """As `payload`, for the second one."""


class Waits(Protocol):
    """What `comm.deadline.Deadline` does: it counts the time that the trainer waits."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The trainer waits within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """Which part of a context-parallel group's tokens a rank holds."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """First item of a step.

    Attributes:
        totals: the step, over all replicas.
        micro_batches: this replica's stream positions per micro-batch.
        lengths: tokens of each of them, padding and all context-parallel parts included.
    """

    totals: StepTotals
    micro_batches: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """How a step came to the trainer.

    Attributes:
        wait_s: seconds the trainer waited for it.
        plan_s: seconds that making it took the source rank, waits included.
        queue_steps: finished steps behind it.
        queue_bytes: their bytes.
        collectives: broadcasts that brought it to this rank.
        bytes_delivered: their bytes.
    """

    wait_s: float = 0.0
    plan_s: float = 0.0
    queue_steps: int = 0
    queue_bytes: int = 0
    collectives: int = 0
    bytes_delivered: int = 0


Item = StepHeader | MicroBatchLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    header: StepHeader
    micro_batches: tuple[MicroBatchLayout, ...]
    delivered: Delivered
    progress: Progress | None  # the loader's after it; on source ranks
    num_bytes: int


class _RankSteps:
    """Steps as one rank uses them, one per call."""

    def __init__(
        self, loader: StepLoader | None, channel: Channel | None, part: ContextPart
    ) -> None:
        if loader is None and channel is None:
            raise ValueError("a rank without a loader needs a channel to its source rank")
        self._loader, self._channel, self._part = loader, channel, part
        self._has_device = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._has_device else 0
        self._has_ended = False  # the other ranks of the replica know that no step follows

    def begin(self) -> None:
        """Use the trainer's device: a new thread would take up memory on the first one."""
        if self._has_device:
            torch.cuda.set_device(self._device)

    def make(self) -> _Step | None:
        """Return the next step; None when there is none.

        Raises:
            ReplicaFailedError: the source rank failed; it raises its own error.
            LoaderClosedError: a replica closed its loader.
        """
        before = self._counts()
        found = self._receive() if self._loader is None else self._send(self._loader)
        if found is None:
            return None
        metadata, items, progress = found
        lengths = tuple(int(item.cu_seqlens_padded[-1]) for item in items)
        part = self._part
        items = [
            slice_micro_batch(item, size=part.size, rank=part.rank)
            if isinstance(item, MicroBatch)
            else item
            for item in items
        ]
        if self._has_device:
            items = list(map(_pinned, items))
        counts = [now - then for now, then in zip(self._counts(), before, strict=True)]
        return _Step(
            header=StepHeader(
                totals=metadata.totals, micro_batches=metadata.positions, lengths=lengths
            ),
            micro_batches=tuple(items),
            delivered=Delivered(
                plan_s=metadata.plan_us / 1e6, collectives=counts[0], bytes_delivered=counts[1]
            ),
            progress=progress,
            num_bytes=sum(one.nbytes for item in items for one in _tensors(item).values()),
        )

    def request_end(self) -> None:
        """Make no further step; see `StepLoader.close`."""
        if self._loader is not None:
            self._loader.close()

    def end(self) -> None:
        """Tell the other replicas (source rank), or receive until it ends; drop what comes.

        Never raises: whoever ends has an error of its own, or none.
        """
        if self._loader is not None:
            with contextlib.suppress(Exception):
                self._loader.end()
        with contextlib.suppress(Exception):
            if self._loader is not None:
                self._tell(Ending(closed="it closed its loader"))
            while not self._has_ended:  # on the others; the source rank has told them
                self._receive()

    def _send(
        self, loader: StepLoader
    ) -> tuple[StepMetadata, list[MicroBatchLayout], Progress | None] | None:
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
        metadata = decode_header(step.header)
        assert isinstance(metadata, StepMetadata)
        if self._channel is not None:
            self._channel.header(step.header)
            self._channel.payload(step.payload)
            if step.pixels is not None and self._channel.has_attachment:
                self._channel.attachment(step.pixels)
        return metadata, _items(metadata, step.payload, step.pixels), step.progress

    def _receive(
        self,
    ) -> tuple[StepMetadata, list[MicroBatchLayout], Progress | None] | None:
        assert self._channel is not None, "checked in the constructor"
        if self._has_ended:
            return None
        try:
            content = decode_header(self._channel.header())
        except BaseException:
            self._has_ended = True
            raise
        if isinstance(content, Ending):
            self._has_ended = True
            if content.error:
                raise ReplicaFailedError(f"the source rank of this replica failed: {content.error}")
            if content.closed:
                raise LoaderClosedError(
                    f"the source rank of this replica stopped: {content.closed}"
                )
            return None
        if not self._channel.has_payload:
            return content, list(content.layouts()), None
        payload = self._channel.payload(np.zeros(payload_bytes(content), dtype=np.uint8))
        pixels = None
        if content.pixels is not None and self._channel.has_attachment:
            size = pixel_bytes(content.images, content.pixels)
            pixels = self._channel.attachment(np.zeros(size, dtype=np.uint8))
        return content, _items(content, payload, pixels), None

    def _tell(self, ending: Ending) -> None:
        if not self._has_ended:
            self._has_ended = True
            if self._channel is not None:
                self._channel.header(encode_header(ending))

    def _counts(self) -> tuple[int, int]:
        channel = self._channel
        return (0, 0) if channel is None else (channel.num_collectives, channel.num_bytes)


def _items(
    metadata: StepMetadata,
    payload: npt.NDArray[np.uint8],
    pixels: npt.NDArray[np.uint8] | None,
) -> list[MicroBatchLayout]:
    items = decode_payload(metadata, payload)
    if pixels is not None and metadata.pixels is not None:
        items = with_pixels(items, pixels, metadata.pixels)
    return list(items)


def _pinned(item: MicroBatchLayout) -> MicroBatchLayout:
    """Return it in page-locked memory, which the device copies from without waiting."""
    pinned: dict[str, Any] = {name: value.pin_memory() for name, value in _tensors(item).items()}
    return replace(item, **pinned)


def _tensors(item: MicroBatchLayout) -> dict[str, Tensor]:
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class _Queue:
    """Finished steps between the thread that makes them and the trainer that takes them."""

    def __init__(self, steps: _RankSteps, *, depth: int) -> None:
        if depth < 0:
            raise ValueError(f"a queue of {depth} steps: give 0 (no thread) or more")
        self._steps, self._depth = steps, depth
        self._changed = threading.Condition()
        self._waiting: deque[_Step] = deque()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_over = False  # no further step will come
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_ready(self) -> int:
        """Steps that wait."""
        return len(self._waiting)

    def take(self) -> _Step:
        """Return the next step, waiting for it.

        Raises:
            StopIteration: there is none.
            RuntimeError: the queue is closed.
            BaseException: what the thread met, with its traceback, once its steps are taken.
        """
        if self._depth == 0:
            return self._make_now()
        with self._changed:
            if self._thread is None:
                self._start(self._run)
            self._changed.wait_for(lambda: self._waiting or self._is_over or self._is_closing)
            if self._is_closing:
                raise RuntimeError(_CLOSED)
            if self._waiting:
                step = self._waiting.popleft()
                self._changed.notify_all()
                delivered = replace(
                    step.delivered,
                    queue_steps=len(self._waiting),
                    queue_bytes=sum(one.num_bytes for one in self._waiting),
                )
                return replace(step, delivered=delivered)
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self, *, timeout_s: float) -> bool:
        """End; no further step can be taken. Harmless when called again.

        Args:
            timeout_s: most seconds to wait for the thread.

        Returns:
            Whether it has ended: it may still wait for others.
        """
        with self._changed:
            if not self._is_closing:
                self._is_closing = True
                self._steps.request_end()
                self._changed.notify_all()
            thread = self._thread or self._start(self._end)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _make_now(self) -> _Step:
        if self._is_closing:
            raise RuntimeError(_CLOSED)
        if self._error is not None:
            raise self._error
        try:
            step = self._steps.make()
        except BaseException as error:
            self._error = error
            raise
        if step is None:
            raise StopIteration
        return step

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        self._thread = threading.Thread(target=target, name="the step queue", daemon=True)
        self._thread.start()
        return self._thread

    def _run(self) -> None:
        try:
            self._steps.begin()
            while self._has_room():
                step = self._steps.make()
                if step is None:
                    break
                with self._changed:
                    self._waiting.append(step)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closing)
        self._end()

    def _has_room(self) -> bool:
        """Wait for room; return False when the queue closes instead."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._depth or self._is_closing)
            return not self._is_closing

    def _end(self) -> None:
        with self._changed:
            self._waiting.clear()
        self._steps.end()


_CLOSED = "the step queue is closed: no step can be taken from it any more"

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
        part: this rank's context-parallel part.
        num_chunks: virtual pipeline chunks of this rank.
        plan_ahead: most finished steps that wait for the trainer; 0 makes each when it is asked
            for, without a thread.
        num_steps: steps of one pass over the stream.

    Attributes:
        num_steps: see above.
        delivered: how the last step came to the trainer.
        deadline: counts the time that the trainer waits; set before the first step is taken.
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
        self.deadline: Waits | None = None
        self.delivered = Delivered()
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
        """Where the loader stood after the last step that was handed out; source ranks only."""
        assert self._loader is not None, "only the source rank of a replica has a loader"
        return self._progress or self._loader.progress

    @property
    def is_running(self) -> bool:
        """Whether steps are being made ahead."""
        return self._queue.is_running

    @property
    def num_ready(self) -> int:
        """Finished steps that wait for the trainer."""
        return self._queue.num_ready

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
            ReplicaFailedError: the source rank failed; it raises its own error.
            LoaderClosedError: a replica closed its loader before this step.
            Exception: what making the step raised.
        """
        self._has_begun[chunk] = True
        if not self._items[chunk]:
            self._fetch()
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
        return self._queue.close(timeout_s=timeout_s)

    def _fetch(self) -> None:
        started = time.perf_counter()
        with self.deadline.waiting() if self.deadline else contextlib.nullcontext():
            step = self._queue.take()
        self._progress = step.progress
        self.delivered = replace(step.delivered, wait_s=time.perf_counter() - started)
        for items in self._items:
            items.append(step.header)
            items.extend(step.micro_batches)

    def _new_queue(self) -> _Queue:
        steps = _RankSteps(self._loader, self._channel, self._part)
        return _Queue(steps, depth=self._plan_ahead)


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
