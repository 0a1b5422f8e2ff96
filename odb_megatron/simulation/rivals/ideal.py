"""The yardstick `lpt-window`: global knowledge of a step, payloads that move for nothing.

Pure. A step's samples are given (see `outliers.hold_outliers`); they are placed on replicas and in
micro-batches so that the step takes as little time as can be found: longest processing time first
under token capacity, then local improvement, for each count M that may be best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.packing import Caps, MicroBatchRooms
from odb_megatron.plan.policy import BalanceScope
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["lpt_window"]

Integers = npt.NDArray[np.int64]
Placement = list[list[list[int]]]  # [replica][micro-batch] slots

_MORE_COUNTS = 3
_TRIES = 48
_SWAPS = 64
_ROUNDS = 3
_EVEN = 1.0005


def lpt_window(
    stream: Stream,
    setting: Setting,
    *,
    steps: Sequence[Integers],
    only: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule of steps of these samples.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        steps: stream positions of each step, int64.
        only: steps to place, ascending; the others are left out. None for all.
    """
    placed_steps = []
    for index in range(len(steps)) if only is None else only:
        part = steps[index]
        placed = _place(_Step(stream.lengths[part], stream.costs[part], setting))
        positions: list[int] = part.tolist()
        placed_steps.append(
            [[[positions[slot] for slot in slots] for slots in bins] for bins in placed]
        )
    return Schedule.build(placed_steps, num_replicas=setting.num_replicas)


class _Step:
    """A step's samples, costliest first."""

    def __init__(self, lengths: Integers, costs: Integers, setting: Setting) -> None:
        self.order = np.argsort(-costs, kind="stable")
        self.lengths: list[int] = lengths[self.order].tolist()
        self.costs: list[int] = costs[self.order].tolist()
        self.shortest = min(self.lengths)
        self.setting = setting
        self.total = int(costs.sum())
        self.tokens = int(lengths.sum())

    def counts(self) -> Iterator[int]:
        """Yield the counts M that the samples may fit into, from the least."""
        multiple = self.setting.count_multiple
        count = -(-self.tokens // (self.setting.num_replicas * self.setting.token_budget))
        count = -(-count // multiple) * multiple
        while True:
            yield count
            count += multiple


def _place(step: _Step) -> Placement:
    """Return the best placement found over the counts that may be best."""
    setting = step.setting
    by_step = setting.sync is BalanceScope.STEP
    best: tuple[float, Placement] | None = None
    least = step.total / setting.num_replicas
    tried = 0
    for count in step.counts():
        if best is not None and (
            tried > _MORE_COUNTS or least + count * setting.cost.fixed >= best[0]
        ):
            break
        found = _by_replica(step, count) if by_step else _by_micro_batch(step, count)
        tried += best is not None
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    assert best is not None
    order = step.order.tolist()
    return [[[order[slot] for slot in slots] for slots in bins] for bins in best[1]]


def _by_replica(step: _Step, count: int) -> tuple[float, Placement] | None:
    """Balance replicas by cost, then pack each into its micro-batches."""
    setting = step.setting
    num, budget = setting.num_replicas, setting.token_budget
    targets = [0] * num
    shares = _largest_gap_first(step, targets, room=count * budget)
    if shares is None:
        return None
    loads = [sum(step.costs[slot] for slot in share) for share in shares]
    _swap(step, shares, loads, room=count * budget)
    placed: Placement = []
    for share in shares:
        share.sort()  # by falling cost, and so by falling length
        rooms = MicroBatchRooms(Caps(token_budget=budget), count=count)
        bins: list[list[int]] = [[] for _ in range(count)]
        places = rooms.place_all([step.lengths[slot] for slot in share])
        for slot, index in zip(share, places, strict=True):
            if index < 0:
                return None
            bins[index].append(slot)
        bins.sort(key=lambda slots: -sum(step.costs[slot] for slot in slots))
        placed.append(bins)
    return max(loads) + count * setting.cost.fixed, placed


def _by_micro_batch(step: _Step, count: int) -> tuple[float, Placement] | None:
    """Give every micro-batch index a height of its own; fill up to it on all replicas."""
    num, budget = step.setting.num_replicas, step.setting.token_budget
    best: tuple[float, Placement] | None = None
    targets = [0] * (num * count)
    for _ in range(_ROUNDS):
        bins = _largest_gap_first(step, targets, room=budget)
        if bins is None:
            break
        bins.sort(key=lambda slots: -sum(step.costs[slot] for slot in slots))
        loads = [sum(step.costs[slot] for slot in slots) for slots in bins]
        heights = loads[::num]
        time = sum(heights) + count * step.setting.cost.fixed
        if best is None or time < best[0]:
            best = time, [bins[replica::num] for replica in range(num)]
        targets = _heights(step, loads)
    return best


def _heights(step: _Step, loads: Sequence[int]) -> list[int]:
    """Return a target for each micro-batch: what one sample forces, and an even rest.

    Replicas that wait for a costly sample anyway may run up to its cost in that micro-batch.
    """
    num = step.setting.num_replicas
    count = len(loads) // num
    left, forced = step.total, []
    for index in range(count):
        largest = step.costs[index * num] if index * num < len(step.costs) else 0
        if largest * num * (count - index) <= left:
            break
        forced += [largest] * num
        left -= sum(min(largest, load) for load in loads[index * num : (index + 1) * num])
    rest = num * count - len(forced)
    return forced + [max(0, left) // max(1, rest)] * rest


def _largest_gap_first(step: _Step, targets: Sequence[int], *, room: int) -> list[list[int]] | None:
    """Place each sample, costliest first, where most is missing and there is room.

    Args:
        step: the samples.
        targets: cost that each bin should reach; it may be passed.
        room: most tokens of a bin.

    Returns:
        Slots of each bin, or None where a sample finds no room.
    """
    bins: list[list[int]] = [[] for _ in targets]
    rooms = [room] * len(targets)
    heap = [(-target, index) for index, target in enumerate(targets)]
    heapq.heapify(heap)
    for slot, (length, cost) in enumerate(zip(step.lengths, step.costs, strict=True)):
        aside = []
        while heap:
            gap, index = heap[0]
            if rooms[index] >= length:
                bins[index].append(slot)
                rooms[index] -= length
                heapq.heapreplace(heap, (gap + cost, index))
                break
            heapq.heappop(heap)
            if rooms[index] >= step.shortest:  # a shorter one may still fit
                aside.append((gap, index))
        else:
            return None
        for pair in aside:
            heapq.heappush(heap, pair)
    return bins


def _swap(step: _Step, shares: list[list[int]], loads: list[int], *, room: int) -> None:
    """Exchange single samples between the costliest replica and another while that helps."""
    costs = np.array(step.costs, dtype=np.int64)
    lengths = np.array(step.lengths, dtype=np.int64)
    mean = step.total / len(shares)
    for _ in range(_SWAPS):
        high = max(range(len(loads)), key=loads.__getitem__)
        if loads[high] <= mean * _EVEN or len(shares[high]) < 1:
            return
        move = _best_exchange(_Exchange(costs, lengths, shares, loads, room), high)
        if move is None:
            return
        low, old, new = move
        shares[high].remove(old)
        shares[low].append(old)
        loads[high] -= step.costs[old]
        loads[low] += step.costs[old]
        if new >= 0:
            shares[low].remove(new)
            shares[high].append(new)
            loads[high] += step.costs[new]
            loads[low] -= step.costs[new]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What an exchange of samples between replicas goes by."""

    costs: Integers
    lengths: Integers
    shares: list[list[int]]
    loads: list[int]
    room: int


def _best_exchange(state: _Exchange, high: int) -> tuple[int, int, int] | None:
    """Return (other replica, sample to give, sample to take or -1) that lowers the larger load.

    The larger of the two replicas' costs should fall as far as it can; None where nothing helps.
    """
    mine = np.array(state.shares[high], dtype=np.int64)
    tokens_high = int(state.lengths[mine].sum())
    best, found = state.loads[high], None
    others = sorted(range(len(state.loads)), key=state.loads.__getitem__)[:_TRIES]
    for low in others:
        if low == high:
            continue
        theirs = np.array([*state.shares[low], -1], dtype=np.int64)  # -1: takes nothing back
        cost = np.where(theirs >= 0, state.costs[theirs], 0)
        length = np.where(theirs >= 0, state.lengths[theirs], 0)
        falls = state.costs[mine][:, None] - cost[None, :]
        grows = state.lengths[mine][:, None] - length[None, :]
        free = state.room - int(length.sum())
        larger = np.maximum(state.loads[high] - falls, state.loads[low] + falls)
        allowed = (falls > 0) & (grows <= free) & (-grows <= state.room - tokens_high)
        larger = np.where(allowed, larger, np.iinfo(np.int64).max)
        at = int(larger.argmin())
        if larger.flat[at] < best:
            best = int(larger.flat[at])
            give, take = divmod(at, len(theirs))
            found = low, int(mine[give]), int(theirs[take])
    return found
