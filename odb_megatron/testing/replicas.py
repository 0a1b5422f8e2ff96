"""In-process replicas: what answers the requests of step loops in place of process groups.

`Lockstep` runs all loops of a run in one thread, in any order of progress; `ThreadChannel` is the
channel of a loader in a thread of its own. Replicas that wait for
ever are found and named.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any, TypeVar
from unittest import mock

from odb_megatron.comm.groups import ControlError
from odb_megatron.data.loop import Ask, Failure, PackedStep, StepLoop
from odb_megatron.plan.blocks import BLOCK, blocks_of
from odb_megatron.plan.record import PlanConfig

__all__ = ["Lockstep", "ThreadChannel", "run_in_threads", "thread_channels"]

T = TypeVar("T")


def _answers(waiting: Sequence[Any], blocks: Sequence[range]) -> Iterator[dict[int, Any]]:
    """Yield the answers that can be given now, each to all who have asked the same, by replica.

    Args:
        waiting: what each replica waits for.
        blocks: the replicas of each block.
    """
    everyone = range(len(waiting))
    firsts = [block.start for block in blocks]
    groups = [(method, block) for block in blocks for method in ("gather", "exchange")]
    for method, members in [*groups, ("gather_blocks", everyone), ("gather_all", everyone)]:
        asked = {at: waiting[at] for at in members}
        if not all(isinstance(one, Ask) and one.method == method for one in asked.values()):
            continue
        if method == "exchange":
            yield _exchanged({at: one.args for at, one in asked.items()})
            continue
        records = {at: one.args[0] for at, one in asked.items()}
        of = firsts if method == "gather_blocks" else members
        assert method != "gather" or len(set(map(len, records.values()))) == 1, "different sizes"
        answer = [records[at] for at in of]
        yield dict.fromkeys(members, answer)


def _exchanged(asked: dict[int, Any]) -> dict[int, Any]:
    assert len({step for step, _, _ in asked.values()}) == 1, "exchanges of different steps"
    failed = {at: None for at, (_, sends, _) in asked.items() if sends is None}
    if failed:
        return dict.fromkeys(asked, failed)
    for at, (_, _, receives) in asked.items():
        sizes = {by: len(sends[at]) for by, (_, sends, _) in asked.items() if at in sends}
        assert sizes == receives, "bytes that were not announced"
    return {
        at: {by: bytes(asked[by][1][at]) for by in receives}
        for at, (_, _, receives) in asked.items()
    }


class Lockstep:
    """Runs loops to their end.

    Args:
        loops: of all replicas.
        config: theirs.
        rng: in which order they go on; None for one after the other.

    Attributes:
        steps: steps made by each replica.
        errors: what each loop has raised.
        failures: what each loop has told its trainer before that.
    """

    def __init__(
        self, loops: Sequence[StepLoop], config: PlanConfig, *, rng: random.Random | None = None
    ) -> None:
        self._blocks = blocks_of(config.num_replicas, config.block)
        self._rng = rng
        self._runs = [loop.run() for loop in loops]
        self._waiting: list[Any] = [None] * len(loops)
        self._is_over = [False] * len(loops)
        self.steps: list[list[PackedStep]] = [[] for _ in loops]
        self.errors: list[BaseException | None] = [None] * len(loops)
        self.failures: list[BaseException | None] = [None] * len(loops)
        for replica in range(len(loops)):
            self._advance(replica, None)

    def run(self, *, num_steps: int | None = None) -> None:
        """Go on until all loops have ended, or every one has made so many steps.

        Raises:
            AssertionError: loops wait for each other for ever.
        """
        while not all(self._is_over):
            goes_on = [num_steps is None or len(steps) < num_steps for steps in self.steps]
            if not any(on and not over for on, over in zip(goes_on, self._is_over, strict=True)):
                return
            answers = list(_answers(self._waiting, self._blocks))
            for at, request in enumerate(self._waiting):
                is_waiting = isinstance(request, (PackedStep, Failure))
                if is_waiting and (goes_on[at] or self.failures[at]):
                    answers.append({at: None})
            assert answers, f"no loop can go on: {[type(one).__name__ for one in self._waiting]}"
            for group in answers if self._rng is None else [self._rng.choice(answers)]:
                for replica, answer in group.items():
                    self._advance(replica, answer)

    def close(self) -> None:
        """Drop all loops."""
        for run in self._runs:
            run.close()

    def _advance(self, replica: int, answer: Any) -> None:
        try:
            request: Any = self._runs[replica].send(answer)
        except (StopIteration, Exception) as error:
            self._is_over[replica], request = True, None
            self.errors[replica] = None if isinstance(error, StopIteration) else error
        self._waiting[replica] = request
        if isinstance(request, PackedStep):
            self.steps[replica].append(request)
        elif isinstance(request, Failure):
            self.failures[replica] = request.error


class _Meeting:
    """Where the threads of replicas meet."""

    def __init__(self, size: int, timeout_s: float, block: int) -> None:
        self.timeout_s, self.blocks = timeout_s, blocks_of(size, block)
        self.changed = threading.Condition()
        self.waiting: list[Any] = [None] * size
        self.answers: dict[int, Any] = {}
        self.away: set[int] = set()

    def ask(self, replica: int, request: Ask) -> Any:
        everyone = request.method in ("gather_blocks", "gather_all")
        block = next(one for one in self.blocks if replica in one)
        members = set(range(len(self.waiting)) if everyone else block)
        with self.changed:
            self.waiting[replica] = request
            for found in list(_answers(self.waiting, self.blocks)):
                self.answers |= found
                for at in found:
                    self.waiting[at] = None
            self.changed.notify_all()
            ended = self.changed.wait_for(
                lambda: replica in self.answers or self.away & members, timeout=self.timeout_s
            )
            if replica in self.answers:
                return self.answers.pop(replica)
            self.waiting[replica] = None
            missing = sorted(at for at in members - {replica} if self.waiting[at] is None)
            why = "gone" if ended else f"not there in {self.timeout_s} s"
            raise ControlError(f"replica {replica}: replicas {missing} are {why}")


class ThreadChannel:
    """One replica's end; has `comm.groups.SourceGroup`'s methods."""

    def __init__(self, meeting: _Meeting, replica: int) -> None:
        self._meeting, self.replica = meeting, replica
        self.num_replicas = len(meeting.waiting)

    def close(self) -> None:
        self.set_away(True)

    def set_away(self, away: bool) -> None:
        """Say that this replica has left, or is back; those who wait for it are told."""
        with self._meeting.changed:
            (self._meeting.away.add if away else self._meeting.away.discard)(self.replica)
            self._meeting.changed.notify_all()

    def _ask(self, method: str, *args: Any) -> Any:
        return self._meeting.ask(self.replica, Ask(method, args))

    gather = partialmethod(_ask, "gather")
    gather_blocks = partialmethod(_ask, "gather_blocks")
    gather_all = partialmethod(_ask, "gather_all")
    exchange = partialmethod(_ask, "exchange")


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
