"""`odb_megatron.data.step_queue`: a thread that makes steps, and a trainer that takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from odb_megatron.data.step_queue import StepQueue

WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    number: int
    num_bytes: int = 10


class Counting:
    """Steps with numbers; each waits for a permit, of which there are enough by default.

    Args:
        total: steps until the end.
        failing: step that raises.
        permits: steps that may be made.
    """

    def __init__(
        self, total: int = 1000, *, failing: int | None = None, permits: int = 10_000
    ) -> None:
        self.made = self.num_ended = 0
        self.has_begun = self.is_ending = False
        self._total, self._failing = total, failing
        self.permits = threading.Semaphore(permits)
        self.has_made = threading.Semaphore(0)
        self.threads: set[int] = set()

    def begin(self) -> None:
        self.has_begun = True

    def make(self, until_trained: Callable[[], None]) -> Step | None:
        assert self.permits.acquire(timeout=WAIT_S)
        self.threads.add(threading.get_ident())
        if self.made == self._failing:
            raise KeyError(f"no step {self.made}")
        if self.made == self._total:
            return None
        self.made += 1
        self.has_made.release()
        return Step(number=self.made - 1)

    def request_end(self) -> None:
        self.is_ending = True

    def end(self) -> None:
        assert self.is_ending
        self.num_ended += 1


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_steps_come_in_order_and_end(depth: int) -> None:
    steps = Counting(7)
    queue = StepQueue(steps, depth=depth, name="q")
    assert [queue.take().number for _ in range(7)] == list(range(7))
    for _ in range(2):
        with pytest.raises(StopIteration):
            queue.take()
    assert queue.wait_s >= 0.0
    assert queue.num_bytes == 0
    assert (steps.threads == {threading.get_ident()}) == (depth == 0)
    assert steps.has_begun == (depth > 0)
    assert queue.is_running == (depth > 0)  # until it is closed: others may need it
    assert queue.close(timeout_s=WAIT_S)
    assert not queue.is_running
    assert steps.num_ended == 1


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_steps_are_made_than_there_is_room_for(depth: int) -> None:
    steps = Counting()
    queue = StepQueue(steps, depth=depth, name="q")
    assert not queue.is_running  # nothing before the first step is asked for
    for taken in range(1, 5):
        assert queue.take().number == taken - 1
        for _ in range(depth + 1 if taken == 1 else 1):
            assert steps.has_made.acquire(timeout=WAIT_S)
        assert not steps.has_made.acquire(timeout=0.05)
        assert steps.made == taken + depth
        assert queue.num_bytes == 10 * depth
    assert queue.close(timeout_s=WAIT_S)
    assert queue.num_bytes == 0


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_an_error_comes_after_the_steps_before_it(depth: int) -> None:
    queue = StepQueue(Counting(failing=3), depth=depth, name="q")
    assert [queue.take().number for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="no step 3") as caught:
            queue.take()
        names = [entry.name for entry in caught.traceback]
        assert "make" in names  # where it was raised
    assert queue.close(timeout_s=WAIT_S)


def test_closing_wakes_a_thread_that_waits_for_room() -> None:
    steps = Counting()
    queue = StepQueue(steps, depth=2, name="the train queue")
    queue.take()
    for _ in range(3):
        assert steps.has_made.acquire(timeout=WAIT_S)
    for _ in range(3):
        assert queue.close(timeout_s=WAIT_S)
    assert (steps.num_ended, steps.made) == (1, 3)
    with pytest.raises(RuntimeError, match="the train queue is closed: no step can be taken"):
        queue.take()


@pytest.mark.parametrize("depth", [0, 2])
def test_closing_before_the_first_step_ends_too(depth: int) -> None:
    steps = Counting()
    queue = StepQueue(steps, depth=depth, name="q")
    assert queue.close(timeout_s=WAIT_S)
    assert (steps.made, steps.num_ended) == (0, 1)
    with pytest.raises(RuntimeError, match="q is closed"):
        queue.take()


def test_closing_does_not_wait_for_ever() -> None:
    """The thread is in a step that others hold up."""
    steps = Counting(permits=1)
    queue = StepQueue(steps, depth=2, name="q")
    queue.take()
    assert not queue.close(timeout_s=0.01)
    assert queue.is_running
    steps.permits.release(5)
    assert queue.close(timeout_s=WAIT_S)
    assert steps.num_ended == 1


def test_closing_wakes_a_trainer_that_waits() -> None:
    """As a signal handler or a watchdog does."""
    steps = Counting(permits=0)
    queue = StepQueue(steps, depth=1, name="q")
    found: list[BaseException] = []

    def train() -> None:
        try:
            queue.take()
        except RuntimeError as error:
            found.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    while not queue.is_running:
        pass
    queue.close(timeout_s=0.0)
    trainer.join(WAIT_S)
    assert [str(error) for error in found] == ["q is closed: no step can be taken from it any more"]
    steps.permits.release(5)
    assert queue.close(timeout_s=WAIT_S)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_step_can_wait_until_all_before_it_are_trained(depth: int) -> None:
    class Measuring(Counting):
        trained = 0
        seen: int | None = None

        def make(self, until_trained: Callable[[], None]) -> Step | None:
            if self.made == 4:
                until_trained()
                self.seen = self.trained
            return super().make(until_trained)

    steps = Measuring(8)
    queue = StepQueue(steps, depth=depth, name="q")
    for number in range(8):
        assert queue.take().number == number
        steps.trained += 1
    assert steps.seen == 4
    assert queue.close(timeout_s=WAIT_S)


def test_closing_ends_the_wait_for_training() -> None:
    class Measuring(Counting):
        def make(self, until_trained: Callable[[], None]) -> Step | None:
            if self.made == 1:
                until_trained()
                assert self.is_ending
            return super().make(until_trained)

    steps = Measuring()
    queue = StepQueue(steps, depth=3, name="q")
    assert queue.take().number == 0
    assert queue.close(timeout_s=WAIT_S)
    assert steps.num_ended == 1


def test_the_threads_time_is_known() -> None:
    class Busy(Counting):
        def make(self, until_trained: Callable[[], None]) -> Step | None:
            sum(range(300_000))
            return super().make(until_trained)

    queue = StepQueue(Busy(3), depth=1, name="q")
    assert queue.cpu_ns() == 0
    for _ in range(3):
        queue.take()
    during = queue.cpu_ns()
    assert during > 1_000_000
    assert queue.close(timeout_s=WAIT_S)
    assert queue.cpu_ns() >= during
    same_thread = StepQueue(Busy(3), depth=0, name="q")
    same_thread.take()
    assert same_thread.cpu_ns() == 0


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a queue of -1 steps: give 0 \(no thread\) or more"):
        StepQueue(Counting(), depth=-1, name="q")
