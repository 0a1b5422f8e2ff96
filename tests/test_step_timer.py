"""`odb_megatron.megatron.step_timer`: which micro-batches are timed, and on which clock."""

from __future__ import annotations

import inspect
import time

import pytest
import torch

from odb_megatron.data.thd import MicroBatch, assemble_idle
from odb_megatron.megatron.step_timer import CpuClock, CudaClock, MicroBatchTimer
from odb_megatron.plan.calibration import CALIBRATION_STEPS, WARM_UP_STEPS, MicroBatchTime


class Counter:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        return self.now

    def elapsed_ns(self, start: int, end: int) -> int:
        return end - start


def _micro_batch(*lengths: int, patches: int = 0) -> MicroBatch:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    empty = torch.zeros((1, sum(lengths)))
    return MicroBatch(
        tokens=empty,
        labels=empty,
        loss_mask=empty,
        position_ids=empty,
        cu_seqlens=bounds - (bounds > 0).int(),  # one token of padding: not what is timed
        cu_seqlens_padded=bounds,
        max_seqlen=max(lengths),
        positions=tuple(range(len(lengths))),
        num_patches=patches,
    )


def _run(
    timer: MicroBatchTimer, clock: Counter, step: int, micro_batches: list[tuple[MicroBatch, int]]
) -> None:
    clock.now += 1000  # between steps: the optimizer, an evaluation
    timer.begin_step(step)
    clock.now += 100  # before the first batch is there
    for item, lasts in micro_batches:
        timer.begin_micro_batch(item)
        clock.now += lasts
    timer.end_step()


def test_a_steps_micro_batches_up_to_the_reduction() -> None:
    clock = Counter()
    timer = MicroBatchTimer(clock)
    for step in range(WARM_UP_STEPS):
        _run(timer, clock, step, [(_micro_batch(9), 7)])
    assert timer.times() == []
    last = [(_micro_batch(3, 4, patches=5), 60), (assemble_idle(), 70), (_micro_batch(2), 80)]
    _run(timer, clock, WARM_UP_STEPS, last)
    assert timer.times() == [
        MicroBatchTime(tokens=7, squares=25, patches=5, time_ns=60),
        MicroBatchTime(tokens=2, squares=4, time_ns=80),
    ]


def test_one_micro_batch_per_step_is_enough() -> None:
    clock = Counter()
    timer = MicroBatchTimer(clock)
    for step in range(50, 50 + 2 * CALIBRATION_STEPS):  # a resumed run starts at step 50
        _run(timer, clock, step, [(_micro_batch(step), step)])
    assert [time.time_ns for time in timer.times()] == list(
        range(50 + WARM_UP_STEPS, 50 + CALIBRATION_STEPS)
    )


@pytest.mark.parametrize("counts", [(1, []), (3, [11, 12])])
def test_the_first_of_a_step_can_be_left_out(counts: tuple[int, list[int]]) -> None:
    clock = Counter()
    timer = MicroBatchTimer(clock, skips_first=True)
    num, expected = counts
    for step in range(WARM_UP_STEPS + 1):
        _run(timer, clock, step, [(_micro_batch(4), 10 + at) for at in range(num)])
    assert [time.time_ns for time in timer.times()] == expected


def test_a_replayed_step_counts_once_and_an_interrupted_one_not_at_all() -> None:
    clock = Counter()
    timer = MicroBatchTimer(clock)
    timer.begin_step(0)
    _run(timer, clock, WARM_UP_STEPS, [(_micro_batch(4), 10)])
    _run(timer, clock, WARM_UP_STEPS, [(_micro_batch(4), 20)])
    timer.begin_step(WARM_UP_STEPS + 1)
    timer.begin_micro_batch(_micro_batch(4))
    assert [time.time_ns for time in timer.times()] == [20]
    timer.begin_step(WARM_UP_STEPS + 2)
    assert [time.time_ns for time in timer.times()] == [20]


def test_cpu_clock() -> None:
    clock = CpuClock()
    start = clock.mark()
    before = time.process_time_ns()
    sum(range(100_000))
    used = time.process_time_ns() - before
    end = clock.mark()
    assert clock.elapsed_ns(start, end) >= used > 0


def test_torch_has_what_the_cuda_clock_calls() -> None:
    """A contract, since most machines that run the tests have no device."""
    event = torch.cuda.Event
    assert "enable_timing" in inspect.signature(event.__new__).parameters
    assert list(inspect.signature(event.record).parameters) == ["self", "stream"]
    assert inspect.signature(event.record).parameters["stream"].default is None
    assert list(inspect.signature(event.elapsed_time).parameters) == ["self", "end_event"]
    assert list(inspect.signature(event.synchronize).parameters) == ["self"]


@pytest.mark.gpu
def test_cuda_clock() -> None:
    clock = CudaClock()
    matrix = torch.ones((2048, 2048), device="cuda")
    start = clock.mark()
    middle = clock.mark()
    for _ in range(50):
        matrix = matrix @ matrix
    end = clock.mark()
    assert 0 <= clock.elapsed_ns(start, middle) < clock.elapsed_ns(start, end)
