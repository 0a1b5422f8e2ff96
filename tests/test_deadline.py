"""`odb_megatron.comm.heartbeat` and `watchdog`, with a heartbeat that says what the test says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest

from odb_megatron.comm import heartbeat as deadline_module
from odb_megatron.comm import watchdog as watchdog_module
from odb_megatron.comm.heartbeat import Deadline, PeerError
from odb_megatron.comm.watchdog import PEER_LOST, Watchdog

WAIT_S = 20.0


class FakeHeartbeat:
    """Answers at once."""

    who = "rank 0 (replica 0, host, process 7)"

    def __init__(self) -> None:
        self.gone: dict[int, str] = {}
        self.missing = ""
        self.noted: list[tuple[str, int]] = []
        self.asked: list[tuple[str, int]] = []
        self._loss = threading.Event()

    def lose(self, text: str, *, is_gone: bool = True) -> None:
        if is_gone:
            self.gone[1] = text
        else:
            self.missing = text
        self._loss.set()

    def note(self, what: str, number: int) -> None:
        self.noted.append((what, number))

    def ask(self, what: str, number: int) -> None:
        self.asked.append((what, number))

    def diagnosis(self, what: str = "") -> str:
        return "; ".join([*self.gone.values(), *filter(None, [self.missing])])

    def wait_for_loss(self, timeout_s: float) -> bool:
        return self._loss.wait(min(timeout_s, 0.01))


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(deadline_module, "time", found)
    return found


def _deadline(heartbeat: FakeHeartbeat) -> Deadline:
    return Deadline(cast(Any, heartbeat), timeout_s=100.0, warn_s=30.0)


def test_no_deadline_runs_while_the_trainer_does_not_wait(clock: Clock) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.expect("train gather")
    deadline.begin("train gather", 4)
    clock.now += 10_000
    deadline.check()
    for _ in range(2):  # from the start, when it waits again
        with deadline.waiting():
            clock.now += 29
            deadline.check()
        clock.now += 10_000
    assert heartbeat.noted == [("train gather", -1), ("train gather", 4)]
    assert heartbeat.asked == []


@pytest.mark.parametrize("is_late", [True, False])
def test_a_stalled_peer_is_warned_of_once_and_then_an_error(
    clock: Clock, capsys: pytest.CaptureFixture[str], is_late: bool
) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.begin("train gather", 4)
    assert deadline.explain() == ""
    with deadline.waiting():
        clock.now += 31
        deadline.check()
        assert capsys.readouterr().err == ""  # answers take a moment
        heartbeat.missing = "rank 3 answers but is late" if is_late else ""
        late = heartbeat.missing or "No rank says that it is late"
        for _ in range(3):
            clock.now += 3
            deadline.check()
        warning = capsys.readouterr().err
        assert warning.count("odb: warning: ") == 1
        assert "waits for train gather 4 since " in warning
        assert f"{late}. It is an error after 100 s" in warning
        clock.now += 61
        with pytest.raises(
            PeerError,
            match=rf"train gather 4: the trainer has waited 101 s \(--odb-timeout-s 100\)\. {late}",
        ):
            deadline.check()
        deadline.begin("train gather", 5)  # has its own time
        deadline.check()
    assert heartbeat.asked == [("train gather", 4)]


def test_a_peer_that_is_gone_is_an_error_at_once(clock: Clock) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.begin("train gather", 4)
    heartbeat.lose("rank 1 is gone")
    with pytest.raises(PeerError, match="^train gather 4: rank 1 is gone"):
        deadline.check()
    assert deadline.explain() == "rank 1 is gone"


class Watched:
    """A watchdog that ends nothing, but notes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.codes: list[int] = []
        self.reasons: list[str] = []
        self.limits: list[float] = []
        self.ended, self.heartbeat = threading.Event(), FakeHeartbeat()
        monkeypatch.setattr(watchdog_module, "end_process", self._end)
        monkeypatch.setattr(watchdog_module, "limit_shutdown", self.limits.append)
        monkeypatch.setattr(watchdog_module, "_LOOK_S", 0.01)
        defaults: Any = {"grace_s": 0.05, "longest_save_s": 3600.0}
        defaults |= {"is_saving": lambda: False, "leave_reason": self.reasons.append}
        self.watchdog = Watchdog(cast(Any, self.heartbeat), **{**defaults, **options})
        self.thread = next(t for t in threading.enumerate() if t.name == "the watchdog")

    def _end(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


def test_a_process_that_does_not_end_by_itself_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(monkeypatch)
    assert not watched.ended.wait(0.1)  # nothing has happened
    watched.heartbeat.lose("rank 1 is gone")
    assert watched.ended.wait(WAIT_S)
    assert (watched.codes, watched.reasons) == ([PEER_LOST], ["rank 1 is gone"])
    printed = capsys.readouterr().err
    assert "process 7): rank 1 is gone; this process ends within 0 s" in printed
    assert "process 7) is ended: rank 1 is gone. The trainer was in " in printed


def test_a_checkpoint_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = threading.Event()
    saving.set()
    watched = Watched(monkeypatch, is_saving=saving.is_set)
    watched.heartbeat.lose("rank 1 is gone")
    assert not watched.ended.wait(0.3)
    saving.clear()
    assert watched.ended.wait(WAIT_S)
    watched.thread.join(WAIT_S)
    watched = Watched(monkeypatch, is_saving=lambda: True, longest_save_s=0.1)
    watched.heartbeat.lose("rank 1 is gone")
    assert watched.ended.wait(WAIT_S)


@pytest.mark.parametrize("loss", ["gone", "failed", ""])
def test_a_run_that_has_ended(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """It is left alone, unless a peer is gone: its end may hang then."""
    watched = Watched(monkeypatch, grace_s=0.2)
    if loss:
        watched.heartbeat.lose("rank 1 is no more", is_gone=loss == "gone")
    watched.watchdog.stop()
    watched.thread.join(WAIT_S)
    assert not watched.thread.is_alive()
    assert watched.codes == ([PEER_LOST] if loss == "gone" else [])
    assert watched.limits == ([0.2] if loss == "gone" else [])


def test_a_process_that_hangs_as_it_ends_is_ended() -> None:
    """And its status is that of a failure; without the limit it would sleep for an hour."""
    code = (
        "import atexit, time\n"
        "from odb_megatron.comm import watchdog\n"
        "atexit.register(time.sleep, 3600)\n"
        "watchdog._END_S = 0.2\n"
        "watchdog.limit_end()\n"
        "print('ran')\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=buffered,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "ran\n")
    assert "Timeout" in done.stderr
