"""In-process replicas: the source ranks' channel between threads, in place of gloo.

For tests of everything above `comm`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

from odb_megatron.comm.blocks import ControlError
from odb_megatron.plan.blocks import BLOCK, block_of

__all__ = ["ThreadChannel", "run_in_threads", "thread_channels"]

T = TypeVar("T")


class _Meeting:
    """Where replicas meet, operation after operation."""

    def __init__(self, size: int, timeout_s: float, block: int) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.blocks = [block_of(at, size, block) for at in range(size)]
        self._changed = threading.Condition()
        self._came: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._numbers: dict[tuple[str, int], int] = defaultdict(int)
        self._away: set[int] = set()

    def set_away(self, replica: int, away: bool) -> None:
        """Say that a replica will not come, or comes again; those who wait for it are told."""
        with self._changed:
            (self._away.add if away else self._away.discard)(replica)
            self._changed.notify_all()

    def meet(self, what: str, replica: int, members: Sequence[int], value: Any) -> dict[int, Any]:
        """Return what all members bring."""
        number = self._numbers[what, replica]
        self._numbers[what, replica] += 1
        key = what, members[0], number
        with self._changed:
            came = self._came[key]
            came[replica] = value
            self._changed.notify_all()
            ended = self._changed.wait_for(
                lambda: len(came) == len(members) or (self._away & set(members)) - set(came),
                timeout=self.timeout_s,
            )
            if len(came) < len(members):
                missing = sorted(set(members) - set(came))
                why = "gone" if ended else f"not there in {self.timeout_s} s"
                raise ControlError(f"replica {replica}: replicas {missing} are {why}")
        return came


class ThreadChannel:
    """One replica's end; has `comm.blocks.SourceGroup`'s methods."""

    def __init__(self, meeting: _Meeting, replica: int) -> None:
        self._meeting, self.replica = meeting, replica
        self.num_replicas, self.block = meeting.size, meeting.blocks[replica]

    def gather(self, record: bytes) -> list[bytes]:
        """A peer that has left `run_in_threads` is not waited for."""
        came = self._meeting.meet("gather", self.replica, self.block, record)
        return [came[at] for at in self.block]

    def gather_blocks(self, record: bytes) -> list[bytes]:
        if len(set(self._meeting.blocks)) == 1:
            return [record]
        everyone = range(self.num_replicas)
        came = self._meeting.meet("blocks", self.replica, everyone, record)
        return [came[at] for at in everyone if self._meeting.blocks[at].start == at]

    def gather_all(self, record: bytes) -> list[bytes]:
        everyone = range(self.num_replicas)
        came = self._meeting.meet("all", self.replica, everyone, record)
        return [came[at] for at in everyone]

    def exchange(
        self, step: int, sends: Mapping[int, bytes] | None, receives: Mapping[int, int]
    ) -> dict[int, memoryview | None]:
        came = self._meeting.meet("exchange", self.replica, self.block, (step, sends))
        assert all(came[by][0] == step for by in self.block), "replicas exchange different steps"
        if failed := [by for by in self.block if came[by][1] is None]:
            return dict.fromkeys(failed)
        return {by: memoryview(came[by][1][self.replica]) for by in receives}

    def close(self) -> None:
        self.set_away(True)

    def set_away(self, away: bool) -> None:
        """Say that this replica has left, or is back."""
        self._meeting.set_away(self.replica, away)


def thread_channels(
    num_replicas: int, *, timeout_s: float = 60.0, block: int = BLOCK
) -> list[ThreadChannel]:
    """Return one connected channel per replica."""
    meeting = _Meeting(num_replicas, timeout_s, block)
    return [ThreadChannel(meeting, replica) for replica in range(num_replicas)]


def run_in_threads(
    function: Callable[[ThreadChannel], T], channels: Sequence[ThreadChannel]
) -> list[T | BaseException]:
    """Run `function` once per replica, each in a thread; return results or what was raised.

    The function may start data-loader workers: a process forked in a thread of a
    ThreadPoolExecutor would exit with code 1.
    """
    results: dict[int, T | BaseException] = {}

    def run(channel: ThreadChannel) -> None:
        try:
            results[channel.replica] = function(channel)
        except BaseException as error:
            results[channel.replica] = error
        finally:
            channel.set_away(True)

    for channel in channels:
        channel.set_away(False)
    threads = [threading.Thread(target=run, args=(channel,)) for channel in channels]
    with _one_fork_at_a_time():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[channel.replica] for channel in channels]


@contextlib.contextmanager
def _one_fork_at_a_time() -> Iterator[None]:
    """Replicas start data-loader workers at once; filelock's hooks refuse forks that overlap."""
    lock, fork = threading.Lock(), os.fork

    def fork_alone() -> int:
        with lock:
            return fork()

    with mock.patch.object(os, "fork", fork_alone):
        yield
