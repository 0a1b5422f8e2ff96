"""`odb_megatron.comm.deadline`: only the time that the trainer waits counts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from odb_megatron.comm import deadline as module
from odb_megatron.comm.deadline import Deadline, PeerError


class FakeHeartbeat:
    """Answers at once with what the test says."""

    who = "rank 0 (replica 0, host, process 7)"

    def __init__(self) -> None:
        self.gone: dict[int, str] = {}
        self.missing = ""
        self.noted: list[tuple[str, int]] = []
        self.asked: list[tuple[str, int]] = []

    def note(self, what: str, number: int) -> None:
        self.noted.append((what, number))

    def ask(self, what: str, number: int) -> None:
        self.asked.append((what, number))

    def diagnosis(self, what: str = "") -> str:
        return "; ".join([*self.gone.values(), *([self.missing] if self.missing else [])])

    def wait_for_loss(self, timeout_s: float) -> bool:
        return bool(self.gone)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        import time

        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def _deadline(heartbeat: FakeHeartbeat | None = None) -> Deadline:
    return Deadline(cast(Any, heartbeat), timeout_s=100.0, warn_s=30.0)


def test_no_deadline_runs_while_the_trainer_does_not_wait(clock: Clock) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.expect("train exchange")
    deadline.begin("train exchange", 4)
    clock.now += 10_000
    deadline.check()
    with deadline.waiting():
        clock.now += 29
        deadline.check()
    clock.now += 10_000
    with deadline.waiting():  # from the start, when it waits again
        clock.now += 29
        deadline.check()
    assert heartbeat.noted == [("train exchange", -1), ("train exchange", 4)]
    assert heartbeat.asked == []


def test_a_stalled_peer_is_warned_of_once_and_then_an_error(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.begin("train exchange", 4)
    with deadline.waiting():
        clock.now += 31
        deadline.check()
        assert heartbeat.asked == [("train exchange", 4)]
        assert capsys.readouterr().err == ""  # answers take a moment
        heartbeat.missing = "rank 3 answers but is late"
        for _ in range(3):
            clock.now += 3
            deadline.check()
        warning = capsys.readouterr().err
        assert warning.count("odb: warning: rank 0 (replica 0, host, process 7): the trainer") == 1
        assert "waits for train exchange 4 since " in warning
        assert "rank 3 answers but is late. It is an error after 100 s" in warning
        clock.now += 61
        with pytest.raises(PeerError, match=r"waited 101 s \(--odb-timeout-s 100\)\. rank 3 an"):
            deadline.check()
        deadline.begin("train exchange", 5)  # a new exchange has its own time
        deadline.check()
    assert heartbeat.asked == [("train exchange", 4)]


def test_a_peer_that_is_gone_is_an_error_at_once(clock: Clock) -> None:
    heartbeat = FakeHeartbeat()
    deadline = _deadline(heartbeat)
    deadline.begin("train exchange", 4)
    assert deadline.explain() == ""
    heartbeat.gone = {2: "rank 2 is gone"}
    with pytest.raises(PeerError, match="rank 2 is gone"):
        deadline.check()
    assert deadline.explain() == "rank 2 is gone"


def test_a_world_of_one_rank_has_a_deadline_too(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline = _deadline()
    deadline.expect("train exchange")
    deadline.begin("train exchange", 0)
    assert deadline.explain() == ""
    with deadline.waiting():
        for _ in range(2):
            clock.now += 40
            deadline.check()
        assert "No rank says that it is late" in capsys.readouterr().err
        clock.now += 40
        with pytest.raises(PeerError, match="No rank says that it is late"):
            deadline.check()
