"""Ends a process whose peer is gone and whose trainer does not notice.

The trainer may sit in a collective on the device that never returns. A thread of its own names who
is missing, gives the process a few seconds to end by itself, and ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from odb_megatron.comm.heartbeat import Heartbeat

__all__ = ["PEER_LOST", "Watchdog", "limit_end"]

PEER_LOST = 75
"""Exit code of a process that is ended because of another (EX_TEMPFAIL: it may be started anew)."""

_LOOK_S, _FLUSH_S = 0.25, 0.5

_SHUTDOWN_S = 3.0
"""Seconds that Python's shutdown may take once a peer is gone."""

_END_S = 120.0
"""Seconds that it may take after a failed run whose peers were all there: other packages may have
something to write."""


class Watchdog:
    """Watches over one process.

    Args:
        heartbeat: says who is missing.
        grace_s: seconds that the process has to end by itself.
        is_saving: whether a checkpoint is being written: the process is not ended then.
        longest_save_s: most seconds that a checkpoint is waited for.
        leave_reason: is given the reason before the process is ended.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        grace_s: float,
        is_saving: Callable[[], bool],
        longest_save_s: float,
        leave_reason: Callable[[str], object],
    ) -> None:
        self._heartbeat, self._leave_reason = heartbeat, leave_reason
        self._grace_s = grace_s
        self._is_saving, self._longest_save_s = is_saving, longest_save_s
        self._stopped = threading.Event()
        self._trainer = threading.get_ident()
        threading.Thread(target=self._run, name="the watchdog", daemon=True).start()

    def stop(self) -> None:
        """The run is over. A process whose peer is gone is still ended: it may hang in its end.

        Python's shutdown stops this thread, and takes its time on a loaded host: a timer of the
        system's ends the process then, after `_SHUTDOWN_S`.
        """
        if not self._heartbeat.gone:
            self._stopped.set()
        else:
            limit_shutdown(min(self._grace_s, _SHUTDOWN_S))

    def _run(self) -> None:
        while not self._heartbeat.wait_for_loss(_LOOK_S):
            if self._stopped.is_set():
                return
        since, text = time.monotonic(), self._heartbeat.diagnosis()
        _print(
            f"odb: {self._heartbeat.who}: {text}; this process ends within {self._grace_s:.0f} s"
        )
        longest_s = max(self._grace_s, self._longest_save_s)
        while time.monotonic() < since + (longest_s if self._is_saving() else self._grace_s):
            if self._stopped.wait(_LOOK_S):
                return
        text = self._heartbeat.diagnosis()  # others may be gone by now
        self._leave_reason(text)
        _print(f"odb: {self._heartbeat.who} is ended: {text}. The trainer was in {self._where()}")
        end_process(PEER_LOST)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._trainer)
        if frame is None:
            return "its end"
        last = traceback.extract_stack(frame)[-1]
        return f"{last.name} ({os.path.basename(last.filename)}:{last.lineno})"


def end_process(code: int) -> None:
    """End this process at once, and its workers, without any clean-up that could wait."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.kill()
    # Of its own: the trainer may be stuck while it holds the stream.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    os._exit(code)


def limit_shutdown(limit_s: float) -> None:
    """End this process with code 1 after so many seconds, whatever it does then."""
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=stderr)


def limit_end() -> None:
    """See that this process does not hang as it ends, after a failed run; until then it goes on."""
    atexit.unregister(_limit_own_end)  # of an earlier run
    atexit.register(_limit_own_end)


def _limit_own_end() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()  # Python does it last
    limit_shutdown(_END_S)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
