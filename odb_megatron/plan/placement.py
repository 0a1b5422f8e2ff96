"""Where a step's samples start from before they are evened out: targets, bins, first placements.

Pure, integers only. Each start is a function of the bins that gives every sample a bin; those that
move fewer samples come first. Must not judge what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.even_out import Bins, Room
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.policy import BalanceScope
from odb_megatron.plan.sample_list import StepSamples

__all__ = ["STARTS", "ExchangeRules", "cost_targets", "make_bins", "step_cost_bound"]

Integers = npt.NDArray[np.int64]

_KEEP_BITS = 5  # a replica keeps what passes a micro-batch's target by no more than 1/32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRules:
    """What an assignment goes by, equal on all replicas.

    Attributes:
        num_replicas: data-parallel size.
        caps: limits of a micro-batch.
        count_multiple: the micro-batch count is a multiple of this.
        fixed: price of a micro-batch.
        scope: where replicas wait for each other.
    """

    num_replicas: int
    caps: Caps
    count_multiple: int
    fixed: int
    scope: BalanceScope


def step_cost_bound(total: int, largest: int, *, num_replicas: int) -> int:
    """Return the least cost that the costliest replica can have.

    Args:
        total: cost of all samples.
        largest: cost of the costliest one.
        num_replicas: data-parallel size.
    """
    return max(-(-total // num_replicas), largest)


def make_bins(samples: StepSamples, rules: ExchangeRules, *, targets: Integers, count: int) -> Bins:
    num, caps = rules.num_replicas, rules.caps
    if rules.scope is BalanceScope.STEP:
        return Bins(
            samples,
            replica_of=np.arange(num),
            group_of=np.zeros(num, dtype=np.int64),
            targets=np.tile(targets, num),
            room=Room(
                tokens=count * caps.token_budget,
                token_budget=caps.token_budget,
                patches=count * caps.max_patches,
            ),
        )
    return Bins(
        samples,
        replica_of=np.arange(num * count) // count,
        group_of=np.arange(num * count) % count,
        targets=np.tile(targets, num),
        room=Room(
            tokens=caps.token_budget, token_budget=caps.token_budget, patches=caps.max_patches
        ),
    )


def cost_targets(samples: StepSamples, rules: ExchangeRules, count: int) -> Integers:
    """Return the cost aimed at in a replica's bins.

    Under scope `microbatch` large samples meet in the same micro-batch, and the rest is level.
    """
    num = rules.num_replicas
    falling = np.sort(samples.cost)[::-1]
    left = sum(falling.tolist())
    if rules.scope is BalanceScope.STEP:
        return np.array([step_cost_bound(left, int(falling[0]), num_replicas=num)], dtype=np.int64)
    rate = left // max(1, int(samples.padded.sum()))
    most = rate * rules.caps.token_budget  # what ordinary samples can fill
    heights: list[int] = []
    while len(heights) < count - 1:
        level = max(1, -(-left // (num * (count - len(heights)))))
        first = num * len(heights)
        if first >= len(falling) or int(falling[first]) <= level:
            break
        heights.append(int(falling[first]))
        largest = falling[first : first + num]
        left -= int(np.clip(largest, min(heights[-1], most), None).sum())
        left -= (num - len(largest)) * min(heights[-1], most)
        left = max(left, 0)
    rest = count - len(heights)
    level = max(1, -(-left // (num * rest)))
    at = num * len(heights)
    top = int(falling[at]) if at < len(falling) else level
    return np.array([*heights, max(level, top), *[level] * (rest - 1)], dtype=np.int64)


def _keep_all(
    bins: Bins, samples: StepSamples, rules: ExchangeRules, count: int
) -> Integers | None:
    """Start from what replicas have; the shortest of what is too much for their room go away."""
    budget = rules.caps.token_budget
    sizes = np.minimum(samples.padded, budget)
    tokens = np.bincount(samples.owner, sizes, minlength=rules.num_replicas).astype(np.int64)
    room = count * budget
    if (tokens <= room).all():
        return samples.owner
    bin_of = samples.owner.copy()
    pool: list[int] = []
    for replica in np.flatnonzero(tokens > room).tolist():
        mine = np.flatnonzero(samples.owner == replica)
        mine = mine[np.argsort(-sizes[mine], kind="stable")]
        left = room
        for sample, size in zip(mine.tolist(), sizes[mine].tolist(), strict=True):
            if size <= left:
                left -= size
            else:
                pool.append(sample)
    bin_of[pool] = -1
    return _place(bins, samples, rules, bin_of, pool, room=room)


def _keep_most(
    bins: Bins, samples: StepSamples, rules: ExchangeRules, count: int
) -> Integers | None:
    """Replicas keep what does not lift them above the target, the costliest first."""
    budget = rules.caps.token_budget
    room = count * budget
    order = np.argsort(-samples.cost, kind="stable")
    owners, costs = samples.owner[order].tolist(), samples.cost[order].tolist()
    sizes = np.minimum(samples.padded, budget)[order].tolist()
    gaps, free = bins.targets.tolist(), [room] * rules.num_replicas
    bin_of = np.full(len(samples), -1, dtype=np.int64)
    kept, pool = [], []
    for sample, owner, cost, size in zip(order.tolist(), owners, costs, sizes, strict=True):
        if cost <= gaps[owner] and size <= free[owner]:
            gaps[owner] -= cost
            free[owner] -= size
            kept.append(sample)
        else:
            pool.append(sample)
    bin_of[kept] = samples.owner[kept]
    return _place(bins, samples, rules, bin_of, pool, room=room)


def _from_scratch(
    bins: Bins, samples: StepSamples, rules: ExchangeRules, count: int
) -> Integers | None:
    """Start from nothing: the costliest sample first, where most cost is missing."""
    budget = rules.caps.token_budget
    room = count * budget if rules.scope is BalanceScope.STEP else budget
    nowhere = np.full(len(samples), -1, dtype=np.int64)
    return _place(bins, samples, rules, nowhere, list(range(len(samples))), room=room)


def _keep_first(
    bins: Bins, samples: StepSamples, rules: ExchangeRules, count: int
) -> Integers | None:
    """Replicas fill their micro-batches themselves; what does not fit goes to the others."""
    budget, cap = rules.caps.token_budget, rules.caps.max_patches
    sizes = np.minimum(samples.padded, budget).tolist()
    costs, patches = samples.cost.tolist(), samples.patches.tolist()
    targets = bins.targets.tolist()
    free, used = [budget] * len(targets), [0] * len(targets)
    gaps = [
        [(-targets[at], at) for at in range(replica * count, (replica + 1) * count)]
        for replica in range(rules.num_replicas)
    ]
    for heap in gaps:
        heapify(heap)
    bin_of, pool = [-1] * len(costs), []
    owners = samples.owner.tolist()
    for sample in np.argsort(-samples.cost, kind="stable").tolist():
        heap, cost = gaps[owners[sample]], costs[sample]
        gap, at = heap[0]
        if -gap + (targets[at] >> _KEEP_BITS) >= cost:
            if sizes[sample] > free[at] or (cap and used[at] + patches[sample] > cap):
                at = _with_room(heap, sample, (sizes, patches), (free, used, cap), cost)
            if at >= 0:
                bin_of[sample] = at
                free[at] -= sizes[sample]
                used[at] += patches[sample]
                place = next(i for i, (_, other) in enumerate(heap) if other == at)
                heap[place] = (heap[place][0] + cost, at)
                heapify(heap)
                continue
        pool.append(sample)
    return _place(bins, samples, rules, np.array(bin_of, dtype=np.int64), pool, room=budget)


def _with_room(
    heap: list[tuple[int, int]],
    sample: int,
    needs: tuple[Sequence[int], Sequence[int]],
    has: tuple[Sequence[int], Sequence[int], int],
    cost: int,
) -> int:
    """Return the bin with the largest gap that takes a sample, -1 for none."""
    (sizes, patches), (free, used, cap) = needs, has
    for gap, at in sorted(heap):
        if -gap < cost:
            return -1
        if sizes[sample] <= free[at] and (not cap or used[at] + patches[sample] <= cap):
            return at
    return -1


def _place(
    bins: Bins,
    samples: StepSamples,
    rules: ExchangeRules,
    bin_of: Integers,
    pool: Sequence[int],
    *,
    room: int,
) -> Integers | None:
    """Place the pooled samples, costliest first, where most cost is missing; None: no room."""
    budget = rules.caps.token_budget
    cap = rules.caps.max_patches * (room // budget)
    sizes, costs = np.minimum(samples.padded, budget), samples.cost
    num = len(bins.targets)
    placed = bin_of >= 0
    loads = np.zeros(num, dtype=np.int64)
    tokens, patches = loads.copy(), loads.copy()
    for sums, values in ((loads, costs), (tokens, sizes), (patches, samples.patches)):
        np.add.at(sums, bin_of[placed], values[placed])
    free, used = (room - tokens).tolist(), patches.tolist()
    heap = list(zip((loads - bins.targets).tolist(), range(num), strict=True))
    heapify(heap)
    result = bin_of.tolist()
    sizes_list, costs_list, patches_list = sizes.tolist(), costs.tolist(), samples.patches.tolist()
    order = np.array(pool, dtype=np.int64)
    order = order[np.lexsort((order, -sizes[order], -costs[order]))]
    least = np.minimum.accumulate(sizes[order][::-1])[::-1].tolist()  # of those still to come
    for sample, smallest in zip(order.tolist(), least, strict=True):
        size, more = sizes_list[sample], patches_list[sample]
        passed = []
        while heap:
            load, at = heappop(heap)
            if size <= free[at] and (not cap or used[at] + more <= cap):
                break
            if free[at] >= smallest:
                passed.append((load, at))
        else:
            return None
        result[sample] = at
        free[at] -= size
        used[at] += more
        heappush(heap, (load + costs_list[sample], at))
        for entry in passed:
            heappush(heap, entry)
    return np.array(result, dtype=np.int64)


Start = Callable[[Bins, StepSamples, ExchangeRules, int], Integers | None]

STARTS: dict[BalanceScope, tuple[Start, ...]] = {
    BalanceScope.STEP: (_keep_all, _keep_most, _from_scratch),
    BalanceScope.MICROBATCH: (_keep_first, _from_scratch),
}
"""Ways to begin, those that move least first; each improves only on what the last one missed."""
