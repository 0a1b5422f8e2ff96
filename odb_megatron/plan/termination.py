"""When a run ends: running, draining, final, finished, closed.

Pure: a state machine over what all replicas know after an exchange, so every replica is in the
same phase. It must not look at one replica's window.

Bound. Let `r` be the positions not yet consumed when the first replica is found drained (nothing
left for it to draw) before the step `d`, and `b` the global batch size. Then the last step is at
most step `d + n - 1` with `n = steps_bound(r)`, which is `r / b` rounded up (a rest of
less than a quarter of a batch joins the step before it, except under the policy `samples`, where
every step but the last takes exactly `b`), at least 1: the deadline is fixed once, in the step of
the first drained replica; from then on the number of steps left falls by at least one per step (it
is the smaller of the estimate and the distance to the deadline); and the step with one step left
emits everything. Before that, every step consumes at least one position, because a replica with a
non-empty window selects at least one sample and an empty window with positions left is refilled.
`Termination.begin_step` asserts the bound.

Shards of unknown length (`total` None). Nobody knows `r` before the last shard has ended. The run
drains from the first end on, each step consumes at least one position, and the bound above counts
from the step `d` before which all shards have ended, with `r` the samples held then.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["UNBOUNDED", "LoaderClosedError", "Phase", "Termination", "steps_bound"]

UNBOUNDED = 1 << 30
"""Steps left while a shard of unknown length has not ended."""


class LoaderClosedError(RuntimeError):
    """A replica closed its loader; no replica plans another step."""


class Phase(Enum):
    """Where a run stands.

    RUNNING: every replica has something left to draw. DRAINING: some replica has not. FINAL: the
    step being planned is the last. FINISHED: it has been planned. CLOSED: a replica has closed
    its loader, and nothing more is planned.
    """

    RUNNING = "running"
    DRAINING = "draining"
    FINAL = "final"
    FINISHED = "finished"
    CLOSED = "closed"


def steps_bound(remaining: int, *, global_batch_size: int, rounds_up: bool = False) -> int:
    """Return the most steps that `remaining` positions take once a replica is drained.

    Args:
        remaining: positions not consumed yet.
        global_batch_size: positions per step.
        rounds_up: any rest is a step of its own; otherwise one of a quarter batch or more is.
    """
    if rounds_up:
        return max(1, -(-remaining // global_batch_size))
    return max(1, -(-(4 * remaining - global_batch_size) // (4 * global_batch_size)))


class Termination:
    """Phase and deadline of one run; the same on all replicas.

    Args:
        total: positions of the run; None for not known before its end.
        global_batch_size: positions per step asked for.
        consumed: positions consumed before the first step.
        rounds_up: see `steps_bound`.
    """

    def __init__(
        self,
        *,
        total: int | None,
        global_batch_size: int,
        consumed: int = 0,
        rounds_up: bool = False,
    ) -> None:
        self._total = total
        self._batch = global_batch_size
        self._rounds_up = rounds_up
        self._deadline: int | None = None
        self._last = -1  # step begun
        is_done = total is not None and consumed >= total
        self._phase = Phase.FINISHED if is_done else Phase.RUNNING

    @property
    def phase(self) -> Phase:
        """The phase after the last exchange."""
        return self._phase

    @property
    def deadline(self) -> int | None:
        """The latest final step (0-based); None while no replica is drained."""
        return self._deadline

    @property
    def is_over(self) -> bool:
        """Whether no further step may be planned."""
        return self._phase in (Phase.FINISHED, Phase.CLOSED)

    def begin_step(
        self, *, step: int, consumed: int, is_drained: bool, rest: int | None = None
    ) -> int:
        """Enter a step after its first exchange; return the steps left, this one included.

        Args:
            step: the step being planned.
            consumed: positions consumed by all earlier steps.
            is_drained: some replica has nothing left to draw.
            rest: samples held when all shards of unknown length have ended, None before.
        """
        assert not self.is_over, f"step {step} is planned past the end ({self._phase.value})"
        self._last = step
        if self._total is not None:
            rest = self._total - consumed
        elif rest is None:
            self._phase = Phase.DRAINING if is_drained else Phase.RUNNING
            return UNBOUNDED
        left = steps_bound(rest, global_batch_size=self._batch, rounds_up=self._rounds_up)
        if is_drained and self._deadline is None:
            self._deadline = step + left - 1
        if self._deadline is not None:
            assert step <= self._deadline, f"step {step} is past the deadline {self._deadline}"
            left = min(left, self._deadline - step + 1)
            self._phase = Phase.DRAINING
        if left == 1:
            self._phase = Phase.FINAL
        return left

    def end_step(self, *, consumed: int, is_final: bool = False) -> bool:
        """Leave a step after its second exchange; return whether it was the final one.

        Args:
            consumed: positions consumed by all steps so far.
            is_final: nothing is left anywhere, where the total does not tell.
        """
        if is_final or (self._total is not None and consumed >= self._total):
            self._phase = Phase.FINISHED
            if self._total is None:
                self._deadline = self._last  # so that a state tells
        else:
            left = "some" if self._total is None else self._total - consumed
            assert self._phase is not Phase.FINAL, f"the final step left {left} positions"
        return self._phase is Phase.FINISHED

    def close(self) -> None:
        """A record with the closing bit arrived: nothing more is planned anywhere."""
        if self._phase is not Phase.FINISHED:
            self._phase = Phase.CLOSED

    def state(self) -> int:
        """Return the deadline as an int, -1 for none."""
        return -1 if self._deadline is None else self._deadline

    def restore(self, deadline: int, *, step: int, consumed: int) -> None:
        """Continue from `state` before `step`, after `consumed` positions."""
        self._deadline = None if deadline < 0 else deadline
        done = -1 < deadline < step if self._total is None else consumed >= self._total
        drains = self._deadline is not None
        self._phase = Phase.FINISHED if done else Phase.DRAINING if drains else Phase.RUNNING
