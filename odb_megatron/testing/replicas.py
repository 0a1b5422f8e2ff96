"""In-process replicas: exchanges and payloads between threads, in place of gloo.

For tests and fuzzing of everything above `comm`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, Queue
from typing import TypeVar
from unittest import mock

from odb_megatron.comm.blocks import ControlError
from odb_megatron.comm.payload import check_frame, frame

__all__ = ["ThreadExchange", "ThreadPayloads", "run_in_threads", "thread_exchanges"]

T = TypeVar("T")


class _Meeting:
    """Where replicas meet, round after round."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.payloads: dict[tuple[int, int], Queue[bytes]] = defaultdict(Queue)
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._next_round = [0] * size
        self._away: set[int] = set()

    def set_away(self, replica: int, away: bool) -> None:
        """Say that a replica will not come, or comes again; those who wait for it are told."""
        with self._changed:
            (self._away.add if away else self._away.discard)(replica)
            self._changed.notify_all()

    def exchange(self, replica: int, record: bytes) -> list[bytes]:
        number = self._next_round[replica]
        self._next_round[replica] += 1
        with self._changed:
            came = self._rounds[number]
            came[replica] = record
            self._changed.notify_all()
            ended = self._changed.wait_for(
                lambda: len(came) == self.size or self._away - set(came), timeout=self.timeout_s
            )
            if len(came) < self.size:
                missing = sorted(set(range(self.size)) - set(came))
                why = "gone" if ended else f"not there in {self.timeout_s} s"
                raise ControlError(f"replica {replica}: replicas {missing} are {why}")
            self._rounds.pop(number, None)
        return [came[one] for one in range(self.size)]


class ThreadExchange:
    """One replica's end of an in-process exchange; has `comm.control.ControlGroup`'s methods."""

    def __init__(self, meeting: _Meeting, replica: int) -> None:
        self._meeting = meeting
        self._replica = replica

    @property
    def payloads(self) -> ThreadPayloads:
        """This replica's end of the channel for payloads."""
        return ThreadPayloads(self._meeting, self._replica)

    @property
    def replica(self) -> int:
        """This replica."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._meeting.size

    def exchange(self, record: bytes) -> list[bytes]:
        """See `ControlGroup.exchange`; a peer that has left `run_in_threads` is not waited for."""
        return self._meeting.exchange(self._replica, record)

    def set_away(self, away: bool) -> None:
        """Say that this replica has left, or is back."""
        self._meeting.set_away(self._replica, away)


class ThreadPayloads:
    """One replica's end of an in-process payload channel; see `comm.payload.PayloadGroup`."""

    def __init__(self, meeting: _Meeting, replica: int) -> None:
        self._meeting = meeting
        self._replica = replica

    def post(
        self, step: int, *, sends: Mapping[int, bytes], receives: Mapping[int, int]
    ) -> ThreadTransfer:
        """See `PayloadGroup.post`."""
        for peer, data in sends.items():
            queue = self._meeting.payloads[self._replica, peer]
            queue.put(frame(data, step=step, replica=self._replica))
        queues = {peer: self._meeting.payloads[peer, self._replica] for peer in receives}
        return ThreadTransfer(self._meeting, self._replica, step, queues)


class ThreadTransfer:
    """The transfers of one step; see `comm.payload.PayloadTransfer`."""

    def __init__(
        self, meeting: _Meeting, replica: int, step: int, queues: Mapping[int, Queue[bytes]]
    ) -> None:
        self._timeout_s = meeting.timeout_s
        self._replica, self._step = replica, step
        self._queues = dict(queues)

    def receive(self, peer: int) -> memoryview:
        """See `PayloadTransfer.receive`."""
        try:
            data = self._queues.pop(peer).get(timeout=self._timeout_s)
        except Empty as error:
            raise ControlError(
                f"replica {self._replica}: no samples of step {self._step} from replica {peer}"
            ) from error
        view = memoryview(data)
        return check_frame(view, step=self._step, replica=self._replica, peer=peer)

    def finish(self) -> None:
        """See `PayloadTransfer.finish`."""


def thread_exchanges(num_replicas: int, *, timeout_s: float = 60.0) -> list[ThreadExchange]:
    """Return one connected exchange per replica."""
    meeting = _Meeting(num_replicas, timeout_s)
    return [ThreadExchange(meeting, replica) for replica in range(num_replicas)]


def run_in_threads(
    function: Callable[[ThreadExchange], T], exchanges: Sequence[ThreadExchange]
) -> list[T | BaseException]:
    """Run `function` once per replica, each in a thread; return results or what was raised.

    The function may start data-loader workers: a process forked in a thread of a
    ThreadPoolExecutor would exit with code 1.
    """
    results: dict[int, T | BaseException] = {}

    def run(exchange: ThreadExchange) -> None:
        try:
            results[exchange.replica] = function(exchange)
        except BaseException as error:
            results[exchange.replica] = error
        finally:
            exchange.set_away(True)

    for exchange in exchanges:
        exchange.set_away(False)
    threads = [threading.Thread(target=run, args=(exchange,)) for exchange in exchanges]
    with _one_fork_at_a_time():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[exchange.replica] for exchange in exchanges]


@contextlib.contextmanager
def _one_fork_at_a_time() -> Iterator[None]:
    """Replicas start data-loader workers at once; filelock's hooks refuse forks that overlap."""
    lock, fork = threading.Lock(), os.fork

    def fork_alone() -> int:
        with lock:
            return fork()

    with mock.patch.object(os, "fork", fork_alone):
        yield
