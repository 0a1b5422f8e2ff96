"""What must hold of a run that was killed and resumed, on its plans alone.

Must not use the planner's own bookkeeping beyond the totals of its steps, which are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from odb_megatron.plan.step import StepPlan
from odb_megatron.testing.worlds import World

__all__ = ["Steps", "check_coverage", "check_delay", "check_equal", "check_same_samples"]

Steps = list[list[StepPlan]]


def check_equal(plans: Sequence[StepPlan], expected: Sequence[StepPlan]) -> None:
    """Hold a step against the uninterrupted run's: ids, micro-batches, counts and parcels."""
    step = expected[0].totals.step
    for replica, (plan, other) in enumerate(zip(plans, expected, strict=True)):
        assert plan == other, f"step {step}, replica {replica}: {plan} instead of {other}"


def check_same_samples(plans: Sequence[StepPlan], expected: Sequence[StepPlan]) -> None:
    """Policy `samples`: the same samples and counts, wherever they are trained."""
    found, other = _samples(plans), _samples(expected)
    assert found == other, f"samples {sorted(found)} instead of {sorted(other)}"
    for name in ("consumed_before", "num_consumed", "num_left_out", "num_tokens"):
        seen, wanted = (getattr(p[0].totals, name) for p in (plans, expected))
        assert seen == wanted, f"{name} {seen} instead of {wanted}"


def check_coverage(world: World, steps: Steps) -> None:
    """Every sample of the run once, every position consumed, the same totals on all replicas."""
    emitted = Counter(p for plans in steps for plan in plans for m in plan.micro_batches for p in m)
    wanted = {position for position, length in enumerate(world.lengths) if length}
    twice = sorted(position for position, times in emitted.items() if times > 1)
    assert not twice, f"emitted twice: {twice}"
    lost, foreign = sorted(wanted - emitted.keys()), sorted(emitted.keys() - wanted)
    assert not lost, f"lost: {lost}"
    assert not foreign, f"not of the run: {foreign}"
    consumed = 0
    for plans in steps:
        totals = plans[0].totals
        assert all(plan.totals == totals for plan in plans), "replicas differ in the totals"
        assert all(len(plan.micro_batches) == totals.num_micro_batches for plan in plans)
        assert totals.consumed_before == consumed, "the consumed count jumps"
        consumed += totals.num_consumed
        assert totals.is_final == (consumed == world.config.total), "final step not marked"
    assert consumed == world.config.total, f"{consumed} consumed of {world.config.total}"


def check_delay(world: World, steps: Steps, drawn: Sequence[Sequence[int]]) -> None:
    """No sample is later than the delay allows behind the order in which it was drawn.

    Args:
        world: what was run (policy `cost`), from steps[0] on with empty windows.
        steps: what was planned, not necessarily to the end.
        drawn: positions that each replica drew, in order.
    """
    most = world.config.max_delay_steps
    for replica, positions in enumerate(drawn):
        queue = _occurrences(position for position in positions if world.lengths[position])
        left = [sorted(_left(plans[replica])) for plans in steps]
        turns = [step for step, own in enumerate(left) for _ in own]
        fifo = dict(zip(queue, turns, strict=False))
        gone = dict(zip(_occurrences(p for own in left for p in own), turns, strict=True))
        waits = {p: gone.get(p, len(steps)) - turn for p, turn in fifo.items()}
        late = {p: wait for (p, _), wait in waits.items() if wait > most}
        assert not late, f"replica {replica}: held for more than {most} steps: {late}"


def _occurrences(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Number the times of each position: one that is reassigned can come back."""
    times: Counter[int] = Counter()
    found = []
    for position in positions:
        found.append((position, times[position]))
        times[position] += 1
    return found


def _left(plan: StepPlan) -> set[int]:
    """Positions that left a replica's window: emitted, or reassigned to another."""
    return _emitted(plan) | set(plan.reassigned.given)


def _emitted(plan: StepPlan) -> set[int]:
    """Positions that a replica took out of its window, wherever they are trained."""
    own = {p for m in plan.micro_batches for p in m}
    own -= {p for parcel in plan.receives for p in parcel.positions}
    return own | {p for parcel in plan.sends for p in parcel.positions}


def _samples(plans: Sequence[StepPlan]) -> set[int]:
    return {p for plan in plans for m in plan.micro_batches for p in m}
