"""Assigns a step's samples to replicas and micro-batches when replicas hand samples to each other.

Pure, integers only: every leader computes the same assignment from the same lists. A sample stays
with its owner unless moving it makes the step shorter. Must not know windows, policies or payloads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.alignment import fit_to_count
from odb_megatron.plan.even_out import Bins
from odb_megatron.plan.packing import Caps, MicroBatchRooms, split
from odb_megatron.plan.placement import (
    STARTS,
    ExchangeRules,
    cost_targets,
    make_bins,
    step_cost_bound,
)
from odb_megatron.plan.policy import BalanceScope
from odb_megatron.plan.sample_list import StepSamples

__all__ = ["Assignment", "assign"]

Integers = npt.NDArray[np.int64]

_GOOD_BITS = 7  # within 1/128 of the bound a start from scratch is not tried
_LEAST_GAIN_BITS = 9  # less than 1/512 of the step is not worth a move


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Who trains what in a step.

    Attributes:
        samples: the step's samples.
        count: micro-batches of each replica.
        needed: the same before rounding to a multiple.
        time: cost of the step, prices of micro-batches included: of the costliest replica, or
            under scope `microbatch` of the costliest micro-batch of each rank in turn.
        replica_of: replica that trains each sample, int64 [samples].
        slot_of: its micro-batch there, int64 [samples]; -1 where any way to pack serves.
        is_local: nothing is gained, and every replica keeps what it has.
    """

    samples: StepSamples
    count: int
    needed: int
    time: int
    replica_of: Integers
    slot_of: Integers
    is_local: bool = False

    @property
    def moved(self) -> npt.NDArray[np.bool_]:
        """Which samples change their replica, bool [samples]."""
        changed: npt.NDArray[np.bool_] = self.replica_of != self.samples.owner
        return changed

    @property
    def bytes_moved(self) -> int:
        """Payload bytes that replicas hand to each other."""
        return int(self.samples.payload[self.moved].sum())

    def costs(self, num_replicas: int) -> list[int]:
        """Return the cost of each replica, without the price of micro-batches."""
        loads = np.zeros(num_replicas, dtype=np.int64)
        np.add.at(loads, self.replica_of, self.samples.cost)
        return loads.tolist()

    def micro_batches(
        self, replica: int, *, caps: Caps, by_cost: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Return the stream positions of a replica's micro-batches, those without moved ones first.

        Args:
            replica: which one.
            caps: limits of a micro-batch.
            by_cost: order them by falling cost instead, so that equal ones meet on all replicas.
        """
        mine = np.flatnonzero(self.replica_of == replica)
        mine = mine[np.argsort(self.samples.position[mine], kind="stable")]
        costs, slots = self.samples.cost[mine], self.slot_of[mine]
        if len(slots) and int(slots[0]) < 0:
            bins = _fit(self.samples, mine, count=self.count, caps=caps)
        else:
            found = [np.flatnonzero(slots == slot).tolist() for slot in range(self.count)]
            num_filled = min(self.count, len(mine))
            bins = split([one for one in found if one], costs.tolist(), count=num_filled)
            bins += [[] for _ in range(self.count - num_filled)]
        moved = self.moved[mine]
        if by_cost:
            bins.sort(key=lambda slots: -int(costs[slots].sum()))
        else:
            bins.sort(key=lambda slots: (not slots, bool(moved[slots].any())))
        positions = self.samples.position[mine]
        return tuple(tuple(positions[slots].tolist()) for slots in bins)


def assign(samples: StepSamples, rules: ExchangeRules, *, local_count: int) -> Assignment:
    """Assign a step's samples.

    The fewest micro-batches first, and more where that makes the step shorter by 1/512 at least: a
    micro-batch costs its price however full it is, and is not free where that price is 0. Where
    nothing is gained, every replica keeps what it has.

    Args:
        samples: of all replicas, at least one.
        rules: see `ExchangeRules`.
        local_count: micro-batches of the step without an exchange.
    """
    total, largest = sum(samples.cost.tolist()), int(samples.cost.max())
    bound = step_cost_bound(total, largest, num_replicas=rules.num_replicas)
    needed = _fewest(samples, rules)
    multiple = rules.count_multiple
    best: Assignment | None = None
    count = -(-needed // multiple) * multiple
    while count <= local_count + multiple:
        if best is not None and best.time <= bound + count * rules.fixed:
            break
        targets = cost_targets(samples, rules, count)
        found = _with_count(samples, rules, targets=targets, count=count, needed=needed)
        least_gain = 0 if best is None else max(1, best.time >> _LEAST_GAIN_BITS)
        if found is not None and best is not None and found.time > best.time - least_gain:
            break
        best = found or best
        count += multiple
        needed = max(needed, count - multiple + 1)
    least = _largest_load(samples.owner, samples, rules) + local_count * rules.fixed
    if best is None or best.time >= least - (least >> _LEAST_GAIN_BITS):
        local = _local(samples, rules, count=local_count)
        if best is None or best.time >= local.time - (local.time >> _LEAST_GAIN_BITS):
            return local
    return best


def _with_count(
    samples: StepSamples, rules: ExchangeRules, *, targets: Integers, count: int, needed: int
) -> Assignment | None:
    """Return the best assignment found for a micro-batch count, None for none that fits."""
    by_step = rules.scope is BalanceScope.STEP
    ideal = int(targets.sum())
    found = None
    for start in STARTS[rules.scope]:
        bins = make_bins(samples, rules, targets=targets, count=count)
        bin_of = start(bins, samples, rules, count)
        if bin_of is None:
            continue
        bins.put_all(bin_of)
        bins.even_out()
        bins.fill_up(count if by_step else 1)
        if not bins.within_room():
            continue
        slot_of = _mend(bins, samples, rules, count) if by_step else bins.bin_of % count
        if slot_of is None:
            continue
        time = _time(bins.loads, rules, count)
        if found is None or time < found.time - (found.time >> _LEAST_GAIN_BITS):
            found = Assignment(
                samples=samples,
                count=count,
                needed=needed,
                time=time,
                replica_of=bins.bin_of if by_step else bins.bin_of // count,
                slot_of=slot_of,
            )
        if found.time <= ideal + (ideal >> _GOOD_BITS) + count * rules.fixed:
            break
    return found


def _mend(bins: Bins, samples: StepSamples, rules: ExchangeRules, count: int) -> Integers | None:
    """Pack replicas that are so full that it takes care; None where they cannot be packed.

    What does not fit goes to the least loaded replica whose micro-batches have room for it.

    Returns:
        Micro-batch of each sample, -1 on replicas where any order packs.
    """
    caps = rules.caps
    slot_of = np.full(len(samples), -1, dtype=np.int64)
    if count == 1:
        return slot_of  # `within_room` has said that one holds all
    patches = samples.patches if caps.max_patches else np.zeros_like(samples.patches)
    rooms: dict[int, MicroBatchRooms] = {}
    left: list[int] = []

    def place(sample: int, replica: int) -> bool:
        slot = rooms[replica].place(int(samples.padded[sample]), int(patches[sample]))
        slot_of[sample] = slot
        return slot >= 0

    def pack_replica(replica: int) -> None:
        members = bins.members[replica]
        rooms[replica] = MicroBatchRooms(caps, count=count)
        falling = members[np.argsort(-samples.padded[members], kind="stable")]
        left.extend(sample for sample in falling.tolist() if not place(sample, replica))

    for replica, members in enumerate(bins.members):
        sizes = np.minimum(samples.padded[members], caps.token_budget)
        if not caps.max_patches and len(sizes):
            longest = int(sizes.max())
            if int(sizes.sum()) <= count * (caps.token_budget - longest) + longest:
                continue
        pack_replica(replica)
    if not left:
        return slot_of
    for replica in range(rules.num_replicas):
        if replica not in rooms:
            pack_replica(replica)
    largest = np.array([rooms[replica].largest for replica in range(rules.num_replicas)])
    for sample in sorted(left, key=lambda sample: (-int(samples.padded[sample]), sample)):
        able = np.flatnonzero(largest >= min(int(samples.padded[sample]), caps.token_budget))
        for replica in able[np.argsort(bins.loads[able], kind="stable")].tolist():
            if place(sample, replica):  # the patch cap may forbid it
                bins.move(sample, replica)
                largest[replica] = rooms[replica].largest
                break
        else:
            return None
    return slot_of


def _fit(
    samples: StepSamples, members: npt.NDArray[np.intp], *, count: int, caps: Caps
) -> list[list[int]]:
    return fit_to_count(
        samples.padded[members].tolist(),
        samples.cost[members].tolist(),
        count=count,
        token_budget=caps.token_budget,
        patches=samples.patches[members].tolist() if caps.max_patches else (),
        max_patches=caps.max_patches,
    )


def _fewest(samples: StepSamples, rules: ExchangeRules) -> int:
    """Return the fewest micro-batches that could hold the step, at least 1."""
    caps, num = rules.caps, rules.num_replicas
    tokens = int(np.minimum(samples.padded, caps.token_budget).sum())
    needed = -(-tokens // (num * caps.token_budget))
    if caps.max_patches:
        needed = max(needed, -(-int(samples.patches.sum()) // (num * caps.max_patches)))
    return max(1, needed)


def _local(samples: StepSamples, rules: ExchangeRules, *, count: int) -> Assignment:
    """Return the assignment in which every replica keeps what it has."""
    slot_of = np.full(len(samples), -1, dtype=np.int64)
    if rules.scope is BalanceScope.STEP:
        time = _largest_load(samples.owner, samples, rules) + count * rules.fixed
    else:
        loads = np.zeros(rules.num_replicas * count, dtype=np.int64)
        for replica in range(rules.num_replicas):
            mine = np.flatnonzero(samples.owner == replica)
            for slot, slots in enumerate(_fit(samples, mine, count=count, caps=rules.caps)):
                slot_of[mine[slots]] = slot
                loads[replica * count + slot] = samples.cost[mine[slots]].sum()
        time = _time(loads, rules, count)
    return Assignment(
        samples=samples,
        count=count,
        needed=count,
        time=time,
        replica_of=samples.owner,
        slot_of=slot_of,
        is_local=True,
    )


def _largest_load(replica_of: Integers, samples: StepSamples, rules: ExchangeRules) -> int:
    loads = np.zeros(rules.num_replicas, dtype=np.int64)
    np.add.at(loads, replica_of, samples.cost)
    return int(loads.max())


def _time(loads: Integers, rules: ExchangeRules, count: int) -> int:
    """Return a step's cost from that of its bins, prices of micro-batches included."""
    if rules.scope is BalanceScope.STEP:
        return int(loads.max()) + count * rules.fixed
    falling = -np.sort(-loads.reshape(rules.num_replicas, count), axis=1)
    return int(falling.max(axis=0).sum()) + count * rules.fixed
