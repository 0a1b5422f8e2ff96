"""How long a rank waits for its peers: only the time that its trainer waits for data counts."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from odb_megatron.comm.gloo_group import PeerError
from odb_megatron.comm.heartbeat import Heartbeat

__all__ = ["Deadline", "PeerError"]

_ANSWER_S = 2.0
"""Seconds in which answers to a question, or news of a loss, come."""


class Deadline:
    """Deadline and warning of one loader's exchanges on one rank.

    A peer that evaluates, saves or computes for long holds up this rank's planner, but not its
    trainer, which waits in a collective or has finished steps left: no deadline runs then.

    Args:
        heartbeat: of the rank.
        timeout_s: seconds that the trainer waits for one exchange before it is an error.
        warn_s: seconds before those who are missing are named in a warning.
    """

    def __init__(self, heartbeat: Heartbeat, *, timeout_s: float, warn_s: float) -> None:
        self._heartbeat = heartbeat
        self._timeout_s, self._warn_s = timeout_s, warn_s
        self._trainer_since: float | None = None
        self._what, self._number, self._since = "", 0, 0.0
        self._asked: float | None = None
        self._has_warned = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer waits for data within."""
        self._trainer_since = time.monotonic()
        try:
            yield
        finally:
            self._trainer_since = None

    def expect(self, what: str) -> None:
        """This rank will take part in exchanges called `what`; it has come to none yet."""
        self._heartbeat.note(what, -1)

    def begin(self, what: str, number: int) -> None:
        """This rank enters exchange `number` of `what`."""
        self._what, self._number, self._since = what, number, time.monotonic()
        self._asked, self._has_warned = None, False
        self._heartbeat.note(what, number)

    def check(self) -> None:
        """Go on waiting.

        Raises:
            PeerError: a peer is gone, or the deadline is over; names who is missing.
        """
        if self._heartbeat.gone:
            raise PeerError(f"{self._what} {self._number}: {self._heartbeat.diagnosis()}")
        trainer = self._trainer_since
        if trainer is None:
            return
        now = time.monotonic()
        waited_s = now - max(trainer, self._since)
        if waited_s > min(self._warn_s, max(0.0, self._timeout_s - _ANSWER_S)):
            self._warn(now)
        if waited_s > self._timeout_s:
            raise PeerError(
                f"{self._what} {self._number}: the trainer has waited {waited_s:.0f} s "
                f"(--odb-timeout-s {self._timeout_s:g}). {self._missing()}"
            )

    def explain(self) -> str:
        """Return who is missing after an exchange has failed; news may take a moment."""
        self._heartbeat.wait_for_loss(_ANSWER_S)
        return self._heartbeat.diagnosis(self._what)

    def _missing(self) -> str:
        return self._heartbeat.diagnosis(self._what) or "No rank says that it is late"

    def _warn(self, now: float) -> None:
        """Ask who is late; say what they have answered."""
        if self._asked is None:
            self._asked = now
            self._heartbeat.ask(self._what, self._number)
        elif not self._has_warned and now > self._asked + _ANSWER_S:
            self._has_warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
            print(
                f"odb: warning: {self._heartbeat.who}: the trainer waits for {self._what} "
                f"{self._number} since {since}. {self._missing()}. It is an error after "
                f"{self._timeout_s:g} s",
                file=sys.stderr,
                flush=True,
            )
