"""Reads from worker processes without waiting for one that is gone.

A worker that is killed while it writes leaves part of a message in the pipe: torch's loader waits
for the rest of it for ever, whatever its time-out, which ends with the first byte. Must not know
what is read.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["DeadWorkerError", "WorkerReader"]

T = TypeVar("T")

_LOOK_S = 1.0
_GRACE_S = 12.0
"""Torch looks after its workers every 5 s, and says the same if the pipe is in order."""


class DeadWorkerError(RuntimeError):
    """A worker is gone and nothing comes."""


class WorkerReader(Generic[T]):
    """An iterator over another one that workers feed, read by a thread of its own on demand.

    Args:
        items: what is read; only ever used while `next` waits for it.
        dead: returns process ids of workers that are gone.
    """

    def __init__(self, items: Iterator[T], *, dead: Callable[[], list[int]]) -> None:
        self._dead = dead
        self._is_stuck = False
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()
        arguments = (items, self._asked, self._found)  # not self: it would never be freed
        self._thread = threading.Thread(
            target=_read, args=arguments, name="the reader", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> WorkerReader[T]:
        return self

    def __next__(self) -> T:
        self._asked.put(True)
        since: float | None = None
        while True:
            try:
                found = self._found.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                pids = self._dead()
            now = time.monotonic()
            since = (since or now) if pids else None
            if since is not None and now - since > _GRACE_S:
                self._is_stuck = True
                raise DeadWorkerError(
                    f"worker process {', '.join(map(str, pids))} ended in the middle of sending"
                )
        try:
            if isinstance(found, BaseException):
                raise found
            return found
        finally:
            del found  # its traceback has this frame: a cycle would keep the workers

    def __del__(self) -> None:
        """Free what is read, and with it its workers; the thread ends."""
        self._asked.put(False)
        if not self._is_stuck and not sys.is_finalizing():
            self._thread.join(_GRACE_S)


def _read(
    items: Iterator[T],
    asked: queue.SimpleQueue[bool],
    found: queue.SimpleQueue[T | BaseException],
) -> None:
    while asked.get():
        try:
            found.put(next(items))
        except BaseException as error:
            found.put(error)
