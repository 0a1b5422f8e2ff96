"""Times the micro-batches of the first steps, for `--odb-cost auto`.

A micro-batch lasts from its batch's arrival to the next one's, the last of a step until gradients
are about to be reduced; without pipelining that is one forward and one backward pass. On CUDA the
moments are events in the trainer's stream, read after the step: nothing waits for the device
meanwhile. Must not fit, plan or print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from odb_megatron.data.thd import MicroBatch
from odb_megatron.plan.calibration import CALIBRATION_STEPS, WARM_UP_STEPS, MicroBatchTime

__all__ = ["Clock", "CpuClock", "CudaClock", "MicroBatchTimer", "WallClock"]


class Clock(Protocol):
    """Marks moments and tells how far apart they are."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two marks."""


class CpuClock:
    """CPU time of this process, a thread that makes steps ahead left out.

    Not the wall clock: on cores shared with others that measures the others. (Two replicas on two
    cores at load 15: median error of the fit 3 % by CPU time, 15 % by the wall clock.)

    Args:
        others_ns: returns the CPU time of what is to be left out.
    """

    def __init__(self, others_ns: Callable[[], int] = int) -> None:
        self._others_ns = others_ns

    def mark(self) -> int:
        """See `Clock`."""
        return time.process_time_ns() - self._others_ns()

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `Clock`."""
        return end - start


class WallClock:
    """The wall clock of this process, for what a reader is told."""

    def mark(self) -> int:
        """See `Clock`."""
        return time.perf_counter_ns()

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `Clock`."""
        return end - start


class CudaClock:
    """Events of the current stream."""

    def mark(self) -> Any:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """See `Clock`; waits for the event, which is past once its optimizer step has ended."""
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


class MicroBatchTimer:
    """Collects the times of `CALIBRATION_STEPS` steps, the warm-up and idle micro-batches left out.

    Args:
        clock: of the device.
        skips_first: leave out each step's first micro-batch, which may wait for parameters
            (`--overlap-param-gather`).
    """

    def __init__(self, clock: Clock, *, skips_first: bool = False) -> None:
        self._clock = clock
        self._skips_first = skips_first
        self._first: int | None = None
        self._steps: dict[int, list[tuple[Any, MicroBatch | None]]] = {}
        self._current: list[tuple[Any, MicroBatch | None]] | None = None

    def begin_step(self, step: int) -> None:
        """A step starts (again, when Megatron replays it)."""
        self._first = step if self._first is None else self._first
        self._current = None
        if WARM_UP_STEPS <= step - self._first < CALIBRATION_STEPS:
            self._current = self._steps[step] = []

    def begin_micro_batch(self, item: MicroBatch) -> None:
        """A micro-batch was taken for training."""
        if self._current is not None:
            self._current.append((self._clock.mark(), item))

    def end_step(self) -> None:
        """The step's last backward pass was launched."""
        if self._current is not None:
            self._current.append((self._clock.mark(), None))
            self._current = None

    def times(self) -> list[MicroBatchTime]:
        """Return the times of all steps that have ended."""
        found = []
        for marks in self._steps.values():
            if not marks or marks[-1][1] is not None:
                continue  # an error ended it
            pairs = list(pairwise(marks))
            for (start, item), (end, _) in pairs[int(self._skips_first) :]:
                if item is not None and not item.is_idle:
                    found.append(self._time(item, start, end))
        return found

    def _time(self, item: MicroBatch, start: Any, end: Any) -> MicroBatchTime:
        lengths = item.cu_seqlens_padded.diff().tolist()
        return MicroBatchTime(
            tokens=sum(lengths),
            squares=sum(length * length for length in lengths),
            patches=item.num_patches,
            time_ns=self._clock.elapsed_ns(start, end),
        )
