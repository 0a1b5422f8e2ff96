"""`odb_megatron.comm.watchdog`: when a process is ended because of another, and when not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from odb_megatron.comm import watchdog as module
from odb_megatron.comm.watchdog import PEER_LOST, OnPeerFailure, Watchdog

WAIT_S = 20.0


class FakeHeartbeat:
    who = "rank 0"

    def __init__(self) -> None:
        self.gone: dict[int, str] = {}
        self._loss = threading.Event()

    def lose(self, text: str, *, is_gone: bool = True) -> None:
        self.text = text
        if is_gone:
            self.gone[1] = text
        self._loss.set()

    def wait_for_loss(self, timeout_s: float) -> bool:
        return self._loss.wait(timeout_s)

    def diagnosis(self) -> str:
        return self.text


class Ended:
    """In place of `end_process`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        self.event = threading.Event()
        self.reasons: list[str] = []
        monkeypatch.setattr(module, "end_process", self._end)
        self.limits: list[float] = []
        monkeypatch.setattr(module, "limit_shutdown", self.limits.append)
        monkeypatch.setattr(module, "leave_reason", lambda text, **_: self.reasons.append(text))
        monkeypatch.setattr(module, "_LOOK_S", 0.01)

    def _end(self, code: int) -> None:
        self.codes.append(code)
        self.event.set()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(monkeypatch)


def _watch(
    heartbeat: FakeHeartbeat,
    *,
    action: OnPeerFailure = OnPeerFailure.EXIT,
    grace_s: float = 0.05,
    is_saving: Callable[[], bool] = lambda: False,
    longest_save_s: float = 3600.0,
) -> Watchdog:
    return Watchdog(
        cast(Any, heartbeat),
        action=action,
        grace_s=grace_s,
        is_saving=is_saving,
        longest_save_s=longest_save_s,
    )


def _thread() -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == "the watchdog")


def test_a_process_that_does_not_end_by_itself_is_ended(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = FakeHeartbeat()
    _watch(heartbeat)
    assert not ended.event.wait(0.1)  # nothing has happened
    heartbeat.lose("rank 1 is gone")
    assert ended.event.wait(WAIT_S)
    assert ended.codes == [PEER_LOST]
    assert ended.reasons == ["rank 1 is gone"]
    printed = capsys.readouterr().err
    assert "odb: rank 0: rank 1 is gone; this process ends within 0 s" in printed
    assert "odb: rank 0 is ended: rank 1 is gone. The trainer was in " in printed


def test_a_checkpoint_is_waited_for(ended: Ended) -> None:
    heartbeat, saving = FakeHeartbeat(), threading.Event()
    saving.set()
    _watch(heartbeat, is_saving=saving.is_set)
    heartbeat.lose("rank 1 is gone")
    assert not ended.event.wait(0.3)
    saving.clear()
    assert ended.event.wait(WAIT_S)


def test_a_checkpoint_that_never_ends_is_not_waited_for_for_ever(ended: Ended) -> None:
    heartbeat = FakeHeartbeat()
    _watch(heartbeat, is_saving=lambda: True, longest_save_s=0.1)
    heartbeat.lose("rank 1 is gone")
    assert ended.event.wait(WAIT_S)


def test_reporting_alone(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = FakeHeartbeat()
    _watch(heartbeat, action=OnPeerFailure.REPORT)
    thread = _thread()
    heartbeat.lose("rank 1 is gone")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert ended.codes == []
    assert "rank 1 is gone; nothing is done (--odb-on-peer-failure)" in capsys.readouterr().err


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_run_that_has_ended(ended: Ended, is_gone: bool) -> None:
    """It is left alone, unless a peer is gone: its end may hang then."""
    heartbeat = FakeHeartbeat()
    watchdog = _watch(heartbeat, grace_s=0.2)
    thread = _thread()
    heartbeat.lose("rank 1 is no more", is_gone=is_gone)
    watchdog.stop()
    thread.join(WAIT_S)
    assert ended.codes == ([PEER_LOST] if is_gone else [])
    assert ended.limits == ([0.2] if is_gone else [])


def test_a_run_without_a_loss_ends_its_watchdog(ended: Ended) -> None:
    watchdog = _watch(FakeHeartbeat())
    thread = _thread()
    watchdog.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert ended.codes == []


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
