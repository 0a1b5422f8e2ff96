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

from odb_megatron.comm.control import ControlError
from odb_megatron.comm.payload import check_frame, frame

__all__ = ["ThreadExchange", "ThreadPayloads", "run_in_threads", "thread_exchanges"]

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.records: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.timeout_s = timeout_s
        self.payloads: dict[tuple[int, int], Queue[bytes]] = defaultdict(Queue)


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
        return len(self._meeting.records)

    def exchange(self, record: bytes) -> list[bytes]:
        """See `ControlGroup.exchange`; a missing peer breaks the barrier after its time-out."""
        self._meeting.records[self._replica] = record
        self._meeting.barrier.wait()
        records = list(self._meeting.records)
        self._meeting.barrier.wait()
        return records


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


def thread_exchanges(num_replicas: int, *, timeout_s: float = 20.0) -> list[ThreadExchange]:
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
