"""A time limit for what a worker process does with one sample.

Must not be used outside worker processes: it takes over SIGALRM. What runs in Python, sleeps or
waits for a file or socket is interrupted where it is; code in C that never returns ends the worker.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["FetchTimeoutError", "limited"]

_IN_C_S = 2.0
"""Seconds after the limit in which an interruption has its effect."""


class FetchTimeoutError(Exception):
    """A sample took too long; raised inside the code that makes it."""


@contextmanager
def limited(limit_s: float, *, what: Callable[[], str]) -> Iterator[None]:
    """Run what makes one sample.

    Args:
        limit_s: seconds it may take.
        what: returns the sample in words.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal would come here
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise FetchTimeoutError(
            f"{what()} took longer than {limit_s:g} s (0.8 times --odb-timeout-s): it hangs, or "
            "reads too slowly"
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(limit_s + _IN_C_S, exit=True, file=stderr)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
