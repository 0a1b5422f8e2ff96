"""`odb_megatron.testing.replicas`: threads that exchange like leaders over gloo."""

from __future__ import annotations

import re
import time

import pytest

from odb_megatron.comm.blocks import ControlError
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_records_come_in_replica_order_in_every_round(num_replicas: int) -> None:
    def talk(exchange: ThreadExchange) -> list[list[bytes]]:
        rounds = []
        for number in range(20):
            if exchange.replica == number % num_replicas:
                time.sleep(0.001)  # another replica is late each time
            rounds.append(exchange.exchange(b"%d:%d" % (number, exchange.replica)))
        return rounds

    exchanges = thread_exchanges(num_replicas)
    assert [exchange.num_replicas for exchange in exchanges] == [num_replicas] * num_replicas
    expected = [[b"%d:%d" % (n, r) for r in range(num_replicas)] for n in range(20)]
    assert run_in_threads(talk, exchanges) == [expected] * num_replicas


def test_errors_are_returned_by_replica() -> None:
    def fail_on_one(exchange: ThreadExchange) -> int:
        if exchange.replica == 1:
            raise KeyError("mine")
        return exchange.replica

    results = run_in_threads(fail_on_one, thread_exchanges(3))
    assert (results[0], repr(results[1]), results[2]) == (0, "KeyError('mine')", 2)


@pytest.mark.parametrize("raises", [False, True])
def test_a_peer_that_has_left_is_not_waited_for(raises: bool) -> None:
    def leave(exchange: ThreadExchange) -> object:
        exchange.exchange(b"x")
        if exchange.replica == 0 and raises:
            raise KeyError("mine")
        return exchange.exchange(b"y") if exchange.replica else None

    exchanges = thread_exchanges(3, timeout_s=200)
    first, *others = run_in_threads(leave, exchanges)
    assert repr(first) == ("KeyError('mine')" if raises else "None")
    assert {type(error) for error in others} == {ControlError}
    for replica, error in enumerate(others, start=1):  # the first to give up leaves as well
        assert re.fullmatch(rf"replica {replica}: replicas \[0.*\] are gone", str(error))


def test_exchanges_can_be_used_again() -> None:
    exchanges = thread_exchanges(2)
    for text in (b"a", b"b"):
        assert run_in_threads(lambda one: one.exchange(text), exchanges) == [[text] * 2] * 2  # noqa: B023


def test_a_peer_that_does_not_come_ends_the_wait() -> None:
    (end, _) = thread_exchanges(2, timeout_s=0.1)
    with pytest.raises(ControlError, match=r"replica 0: replicas \[1\] are not there in 0.1 s"):
        end.exchange(b"x")
