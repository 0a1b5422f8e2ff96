"""The planner's invariants, checked on a finished run of a small world.

Must not use the planner's own bookkeeping where a plan itself can be looked at: what is checked
here is what the bookkeeping claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.plan.step import StepPlan
from odb_megatron.testing.worlds import World, wire_size

__all__ = ["Tally", "tally_run"]

Steps = Sequence[Sequence[StepPlan]]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Violations found (all must be 0), and cases that occurred (none should be 0 in many runs).

    Attributes:
        lost: positions with a sample that were not emitted.
        duplicated: emissions of a position beyond its first, or of one that holds no sample.
        over_budget: micro-batches of several samples over the token budget or the patch cap.
        misaligned: steps whose replicas differ in M or in the totals, whose M is no multiple of
            what it should be, that idle where a split (or another replica's samples, if they are
            handed over) could fill, whose parcels do not match, or (policy `samples`) that consist
            of other samples than Megatron's order gives.
        over_delay: samples emitted later than `max_delay_steps` allows, or (fixed shards) by
            another replica than their own.
        over_bound: steps beyond the bound on the drain, or final steps that are not the last.
        idle: idle micro-batches.
        split: micro-batches split to meet M.
        drained_early: replicas that emit nothing in the final step although they emitted before.
        moved: samples handed to another replica.
        epochs_crossed: steps that hold samples of two epochs.
        closed_early: runs that a replica closed before their end.
    """

    lost: int = 0
    duplicated: int = 0
    over_budget: int = 0
    misaligned: int = 0
    over_delay: int = 0
    over_bound: int = 0
    idle: int = 0
    split: int = 0
    drained_early: int = 0
    moved: int = 0
    epochs_crossed: int = 0
    closed_early: int = 0

    @property
    def num_violations(self) -> int:
        """Sum of what must be 0."""
        return (
            self.lost
            + self.duplicated
            + self.over_budget
            + self.misaligned
            + self.over_delay
            + self.over_bound
        )

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def tally_run(world: World, steps: Steps, *, drained_at: int | None = None) -> Tally:
    """Check a whole run.

    Args:
        world: what was run.
        steps: its steps, each a plan per replica.
        drained_at: step in which a replica was first found drained, None for not known.
    """
    tally = Tally()
    _count_emissions(world, steps, tally)
    for step, plans in enumerate(steps):
        _check_step(world, plans, tally)
        if world.config.policy is PolicyName.SAMPLES:
            tally.misaligned += _samples(plans) != _samples_wanted(world, step)
        tally.over_bound += plans[0].totals.is_final != (step == len(steps) - 1)
        if world.epochs:
            tally.epochs_crossed += len({world.epochs[p] for p in _samples(plans)}) > 1
    if world.config.policy is PolicyName.COST:
        for replica in range(world.config.num_replicas):
            tally.over_delay += _num_delayed(world, steps, replica)
    for replica in range(world.config.num_replicas):
        sizes = [len(_emitted(plans[replica])) for plans in steps]
        tally.drained_early += bool(steps) and any(sizes) and sizes[-1] == 0
    if drained_at is not None:
        _check_bound(world, steps, drained_at, tally)
    return tally


def _count_emissions(world: World, steps: Steps, tally: Tally) -> None:
    emitted = Counter(p for plans in steps for plan in plans for m in plan.micro_batches for p in m)
    wanted = {p for p in range(world.consumed, len(world.lengths)) if world.lengths[p]}
    tally.lost += len(wanted - emitted.keys())
    tally.duplicated += sum(emitted.values()) - len(wanted & emitted.keys())


def _check_step(world: World, plans: Sequence[StepPlan], tally: Tally) -> None:
    config, totals = world.config, plans[0].totals
    count = totals.num_micro_batches
    fits = all(p.totals == totals and len(p.micro_batches) == count for p in plans)
    idle, tokens = 0, []
    for plan in plans:
        sizes = [len(m) for m in plan.micro_batches]
        idle += sizes.count(0)
        fits = fits and (0 not in sizes or max(sizes) <= 1)
        for micro_batch in plan.micro_batches:
            own = [world.lengths[p] for p in micro_batch]
            tokens += own
            over = sum(map(config.size_rule.padded, own)) > config.token_budget
            if world.patches:
                over = over or sum(world.patches[p] for p in micro_batch) > config.max_patches
            tally.over_budget += over and len(own) > 1
    fits = fits and count % config.count_multiple == 0 and idle == totals.num_idle
    fits = fits and _parcels_match(world, plans)
    fits = fits and totals.num_tokens == sum(tokens)
    fits = fits and totals.num_squared_tokens == sum(n * n for n in tokens)
    tally.misaligned += not fits
    tally.idle += idle
    tally.split += totals.num_split
    tally.moved += totals.num_moved


def _check_bound(world: World, steps: Steps, drained_at: int, tally: Tally) -> None:
    """Hold the drain against theorem 3 of docs/dgap.md, in exact arithmetic of its own."""
    batch = world.config.global_batch_size
    left = len(world.lengths) - steps[drained_at][0].totals.consumed_before
    if world.config.policy is PolicyName.SAMPLES:
        most = -(-left // batch)
    else:
        most = left // batch + (4 * (left % batch) > batch)
    tally.over_bound += max(0, len(steps) - drained_at - max(1, most))


def _parcels_match(world: World, plans: Sequence[StepPlan]) -> bool:
    """Both sides of every parcel agree, what is moved is trained there, and it pays."""
    totals, config = plans[0].totals, world.config
    sent = {(r, one.peer): one for r, plan in enumerate(plans) for one in plan.sends}
    received = {(one.peer, r): one for r, plan in enumerate(plans) for one in plan.receives}
    match = sent.keys() == received.keys()
    for (source, target), parcel in sent.items():
        other = received.get((source, target), parcel)
        trained = {p for m in plans[target].micro_batches for p in m}
        match = match and source != target and {*parcel.positions} <= trained
        match = match and (parcel.positions, parcel.sizes) == (other.positions, other.sizes)
        match = match and parcel.sizes == tuple(wire_size(world, p) for p in parcel.positions)
    match = match and totals.num_moved == sum(len(one.positions) for one in sent.values())
    match = match and totals.bytes_moved == sum(sum(one.sizes) for one in sent.values())
    if not totals.num_moved:
        return match
    spare = totals.num_micro_batches * config.num_replicas - totals.num_samples
    match = match and config.exchange is not ExchangeMode.NONE
    match = match and totals.num_idle == max(0, spare)
    if config.balance is BalanceScope.STEP:
        match = match and max(totals.costs) < max(totals.costs_before)
    return match


def _emitted(plan: StepPlan) -> list[int]:
    """Positions that a replica took out of its window, wherever they are trained."""
    own = {p for m in plan.micro_batches for p in m}
    own -= {p for parcel in plan.receives for p in parcel.positions}
    return sorted(own | {p for parcel in plan.sends for p in parcel.positions})


def _samples(plans: Sequence[StepPlan]) -> set[int]:
    return {p for plan in plans for m in plan.micro_batches for p in m}


def _samples_wanted(world: World, step: int) -> set[int]:
    batch = world.config.global_batch_size
    first = world.consumed + step * batch
    return {p for p in range(first, min(first + batch, len(world.lengths))) if world.lengths[p]}


def _num_delayed(world: World, steps: Steps, replica: int) -> int:
    """Count delays against a first-in-first-out queue that lets go as many samples at each step.

    What a replica gives to another has left its queue; what it takes over has joined it.
    """
    config = world.config
    left: list[tuple[tuple[int, int, int], int]] = []  # place in order of arrival, step
    taken: dict[int, tuple[int, int, int]] = {}
    num_taken = late = 0
    for step, plans in enumerate(steps):
        change, emitted = plans[replica].reassigned, _emitted(plans[replica])
        left += [(taken.pop(p, (p, 1, 0)), step) for p in change.given]
        for position in change.taken:
            num_taken += 1
            taken[position] = (change.cursor, 0, num_taken)
        left += [(taken.pop(p, (p, 1, 0)), step) for p in emitted]
        if config.assignment_in_force is Assignment.FIXED:
            late += sum(p not in config.own_positions(replica) for p in emitted)
    fifo = sorted(left)
    for (_, step), (_, turn) in zip(fifo, left, strict=True):
        late += step - turn > config.max_delay_steps
    return late
