"""Finished steps between the thread that makes them and the trainer that takes them.

Must not know what a step is, and decides nothing: the thread makes steps in order until the queue
is full, and waits. With a depth of 0 there is no thread: the trainer makes its steps itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["StepQueue", "Steps", "Waits"]

Step = TypeVar("Step", covariant=True)
Sized = TypeVar("Sized", bound="_HasBytes")


class _HasBytes(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes of the step's tensors."""


class Waits(Protocol):
    """What `comm.deadline.Deadline` does: it counts the time that the trainer waits."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The trainer waits within."""


class Steps(Protocol[Step]):
    """Where steps come from; called from one thread at a time."""

    def begin(self) -> None:
        """The thread that calls the others has started."""

    def make(self, until_trained: Callable[[], None]) -> Step | None:
        """Return the next step; None when there is none.

        Args:
            until_trained: returns when the trainer has finished all steps made so far, or the end
                was requested.
        """

    def request_end(self) -> None:
        """Make no further step (called from the trainer's thread)."""

    def end(self) -> None:
        """After `request_end`, or an error: do what others need to end too. May wait for them."""


class StepQueue(Generic[Sized]):
    """Steps made ahead.

    Args:
        steps: where they come from.
        depth: most finished steps that wait for the trainer; 0 makes each when it is asked for.
        name: of the thread.

    Attributes:
        num_bytes: bytes of the steps that wait.
        wait_s: seconds that the last `take` waited.
        patience: is told when the trainer waits, if there is one.
    """

    def __init__(self, steps: Steps[Sized], *, depth: int, name: str) -> None:
        if depth < 0:
            raise ValueError(f"a queue of {depth} steps: give 0 (no thread) or more")
        self._steps = steps
        self._depth = depth
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Sized] = deque()
        self._thread: threading.Thread | None = None
        self._clock: int | None = None
        self._cpu_ns = 0
        self._is_asked = False  # the trainer waits in `take`
        self._is_closing = False
        self._is_over = False  # no further step will come
        self._error: BaseException | None = None
        self.num_bytes = 0
        self.wait_s = 0.0
        self.patience: Waits | None = None

    @property
    def num_steps(self) -> int:
        """Steps that wait."""
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def take(self) -> Sized:
        """Return the next step, waiting for it.

        Raises:
            StopIteration: there is none.
            RuntimeError: the queue is closed.
            BaseException: what the thread met, with its traceback, once its steps are taken.
        """
        started = time.perf_counter()
        try:
            with self.patience.waiting() if self.patience else contextlib.nullcontext():
                return self._make_now() if self._depth == 0 else self._take()
        finally:
            self.wait_s = time.perf_counter() - started

    def _until_asked(self) -> None:
        """Wait until the trainer has taken, and trained, every step; or the queue is closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._is_asked and not self._waiting) or self._is_closing
            )

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

    def cpu_ns(self) -> int:
        """CPU time of the thread in nanoseconds, for clocks that count the whole process."""
        if self._clock is not None:
            try:
                self._cpu_ns = time.clock_gettime_ns(self._clock)
            except OSError:  # it has ended
                self._clock = None
        return self._cpu_ns

    def _make_now(self) -> Sized:
        if self._is_closing:
            raise RuntimeError(_closed(self._name))
        if self._error is not None:
            raise self._error
        try:
            step = self._steps.make(_at_once)
        except BaseException as error:
            self._error = error
            raise
        if step is None:
            raise StopIteration
        return step

    def _take(self) -> Sized:
        with self._changed:
            if self._thread is None:
                self._start(self._run)
            self._is_asked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_over or self._is_closing)
            self._is_asked = False
            if self._is_closing:
                raise RuntimeError(_closed(self._name))
            if self._waiting:
                step = self._waiting.popleft()
                self.num_bytes -= step.num_bytes
                self._changed.notify_all()
                return step
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        self._thread = threading.Thread(target=target, name=self._name, daemon=True)
        self._thread.start()
        return self._thread

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._steps.begin()
            while self._has_room():
                step = self._steps.make(self._until_asked)
                if step is None:
                    break
                with self._changed:
                    self._waiting.append(step)
                    self.num_bytes += step.num_bytes
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
            self.num_bytes = 0
        self._steps.end()


def _at_once() -> None:
    """The trainer itself makes the step."""


def _closed(name: str) -> str:
    return f"{name} is closed: no step can be taken from it any more"
