"""`odb_megatron.testing.replicas`: threads that exchange like leaders over gloo."""

from __future__ import annotations

import threading
import time

import pytest

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


def test_a_missing_peer_ends_the_wait() -> None:
    def leave(exchange: ThreadExchange) -> object:
        return exchange.exchange(b"x") if exchange.replica else None

    start = time.monotonic()
    results = run_in_threads(leave, thread_exchanges(3, timeout_s=0.2))
    assert time.monotonic() - start < 5
    assert results[0] is None
    assert [type(result) for result in results[1:]] == 2 * [threading.BrokenBarrierError]
