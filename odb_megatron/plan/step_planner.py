"""Which replica trains which samples of a step in which micro-batch: pure, and integers only."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["StepPlan", "plan_step"]

Sync = Literal["step", "microbatch"]
Ids = list[int]
Integers = npt.NDArray[np.int64]

_DENSITY = 90  # percent of the cost of an index full of the costliest units that is aimed at


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step of all replicas.

    Attributes:
        num_micro_batches: M, the same on every replica.
        micro_batches: `micro_batches[replica][m]` are indices into `lengths`; () is idle. A sample
            that k replicas share stands in each of them, a*k to a*k + k - 1, at the same m.
        shares: k of every shared sample, by its index.
        loads: `loads[replica][m]` is the cost of those samples, or of their parts.
        overhead: cost of a micro-batch beside its samples.
    """

    num_micro_batches: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    shares: dict[int, int]
    loads: tuple[tuple[int, ...], ...]
    overhead: int

    @property
    def costs(self) -> tuple[int, ...]:
        """Cost of each replica's step, the overhead of its micro-batches included."""
        return tuple(sum(load) + self.num_micro_batches * self.overhead for load in self.loads)


def plan_step(  # noqa: PLR0913
    lengths: npt.ArrayLike, *, num_replicas: int, token_budget: int, sync: Sync = "step",
    alignment: int = 1, patches: npt.ArrayLike | None = None, max_patches: int | None = None,
    cost: CostModel | None = None, count_multiple: int = 1, min_micro_batches: int = 1,
    max_share: int = 1, groups: npt.ArrayLike | None = None, owner: npt.ArrayLike | None = None,
    solo: npt.ArrayLike | None = None,
) -> StepPlan:  # fmt: skip
    """Plan one optimizer step of all replicas.

    Made small is, with the overhead of M micro-batches added, max over r (sum over m load[r][m])
    for sync "step", sum over m (max over r load[r][m]) for sync "microbatch". Idle are only micro-
    batches of replicas with fewer samples (shared ones do not count, groups as one) than M.

    Args:
        lengths: tokens of each sample, at least 1, int [samples]; so are the other arrays.
        token_budget: most tokens of a micro-batch, after padding to `alignment`.
        alignment: of samples; parts of a shared one are aligned to lcm(2, alignment).
        max_patches: most image patches of a micro-batch; a sample with more is alone in one.
        cost: None where the cost is the number of tokens.
        count_multiple: M is a multiple of it (virtual pipelines).
        max_share: most replicas that share a sample.
        groups: samples with the same number >= 0 stay in one micro-batch.
        owner: replica that has read the sample, -1 for none: few tokens move where it is free.
        solo: whether the sample may be over the budget, alone in a micro-batch.

    Raises:
        ValueError: a sample is over the budget and may be neither shared nor alone.
    """
    cost = cost or CostModel()
    tokens: Integers = -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment
    none = np.zeros_like(tokens)
    images = none if patches is None else np.asarray(patches, dtype=np.int64)
    prices, alone = cost.samples(tokens, images), none if solo is None else solo
    room = (token_budget, max_patches or int(images.sum()) or 1)
    widest, part = 1 << min(max_share, num_replicas).bit_length() - 1, math.lcm(2, alignment)
    table = np.stack([tokens, images, prices, alone, none - 1 if groups is None else groups])
    planner = _Planner(table, num_replicas, room, (widest, part), cost)
    count = max(min_micro_batches, 1, -(-planner.fewest // num_replicas))
    count = -(-count // count_multiple) * count_multiple
    rows, time = list[list[_Bin]](), 1 << 62
    while planner.total // num_replicas + count * cost.fixed < time:
        found = planner.plan(count, sync, limit=time - count * cost.fixed)
        loads = np.array([[one.load for one in row] for row in found] or [[time]])
        height = int(loads.sum(1).max() if sync == "step" else loads.max(0).sum())
        if height + count * cost.fixed < time:
            rows, time = found, height + count * cost.fixed
        elif rows:
            break
        count += count_multiple
    if owner is not None:
        planner.keep_at_home(rows, np.asarray(owner, dtype=np.int64), sync)
    flat, ids = chain.from_iterable, planner.samples.__getitem__
    names = [[tuple(sorted(flat(map(ids, one.units)))) for one in row] for row in rows]
    bins = zip(flat(rows), flat(names), strict=True)
    return StepPlan(
        num_micro_batches=len(rows[0]),
        micro_batches=tuple(map(tuple, names)),
        shares={index: one.width for one, ids in bins if one.width > 1 for index in ids},
        loads=tuple(tuple(one.load for one in row) for row in rows),
        overhead=cost.fixed,
    )


@dataclass(slots=True)
class _Bin:
    """A micro-batch of one replica, or shared by `width`; then the numbers are those of each."""

    room: int
    images: int
    width: int = 1
    load: int = 0
    units: list[int] = field(default_factory=list)


class _Planner:
    """Places units: samples, or groups of them that stay together; costliest first."""

    def __init__(
        self, table: Integers, num_replicas: int, room: tuple[int, int],
        sharing: tuple[int, int], cost: CostModel,
    ) -> None:  # fmt: skip
        (widest, part), self.cost = sharing, cost
        named = np.where(table[4] < 0, np.arange(-len(table[4]), 0), table[4])
        _, unit, counts = np.unique(named, return_inverse=True, return_counts=True)
        samples, ends = np.argsort(unit, kind="stable"), counts.cumsum()
        sums = np.add.reduceat(table[:, samples], ends - counts, axis=1)
        order = np.argsort(-sums[2], kind="stable")
        tokens, images, price, solo, _ = sums[:, order]
        flat, spans = samples.tolist(), np.stack([ends - counts, ends])[:, order].T.tolist()
        self.samples: list[Ids] = [flat[start:end] for start, end in spans]
        parts = (-(-tokens // (widest * part)) + counts[order] - 1) * part
        can_share = (widest > 1) & (parts <= room[0]) & (images <= room[1])
        can_share &= (price >= 2 * cost.fixed) | (tokens > room[0])  # parts as dear as a launch
        for at in np.flatnonzero((tokens > room[0]) & ~can_share & (solo == 0)).tolist():
            raise ValueError(
                f"sample {str(self.samples[at])[1:-1]} takes up {tokens[at]} tokens; a micro-batch "
                f"holds {room[0]}, {widest} replicas may share it: raise the token budget"
            )
        alone = (images > room[1]) | (tokens > room[0]) & ~can_share
        size = np.where(alone, room[0], tokens)
        self.num_replicas, self.room, self.part = num_replicas, room, part
        self.widths = [1 << bit for bit in range(1, widest.bit_length())]
        self.size, self.price, self.is_whole = size, price, ~can_share
        self.sizes, self.prices = list[int](size.tolist()), list[int](price.tolist())
        self.images: list[int] = np.minimum(images, room[1]).tolist()
        self.alone, self.total = set(np.flatnonzero(alone).tolist()), sum(self.prices)
        long = [np.count_nonzero(~can_share & (size * (n + 1) > room[0])) for n in range(1, 9)]
        fewest = [-(-int(num) // n) for n, num in enumerate(long, 1)]  # n of them fit in one
        self.fewest = max(*fewest, -(-sum(self.sizes) // room[0]), -(-sum(self.images) // room[1]))

    def part_of(self, unit: int, width: int) -> tuple[int, int]:
        """Return the tokens (of a group at most) and the cost of a unit's part on each replica."""
        if unit in self.alone:
            return self.sizes[unit], self.prices[unit]
        pieces = -(-self.sizes[unit] // (width * self.part)) + len(self.samples[unit]) - 1
        return pieces * self.part, self.cost.part(self.prices[unit], width)

    def plan(self, count: int, sync: Sync, *, limit: int) -> list[list[_Bin]]:
        """Return `bins[replica][m]`, empty where no plan of so many micro-batches is found."""
        budget, images = self.room
        is_long = (self.price * self.num_replicas > self.total) | (self.size > budget)
        if sync == "microbatch" or (is_long & ~self.is_whole).any():
            return self.plan_by_index(count, limit)
        for spare in (count * budget // 256, 0):  # what cannot be packed to the last token
            room = (budget * count - spare, images * count)
            replicas = [_Bin(*room) for _ in range(self.num_replicas)]
            if not self.spread(list(range(len(self.prices))), replicas, self.prices):
                rows = [self.pack(one.units, count, self.sizes) for one in replicas]
                if all(rows):
                    return rows
        return []

    def plan_by_index(self, count: int, limit: int) -> list[list[_Bin]]:
        """Return a plan whose micro-batches of one index cost the same on every replica.

        An index that one unit makes higher than the mean takes the costliest units on its other
        replicas, as high as that one is. Where units may be shared, such an index is as high as it
        can be filled, and shared are those that cost more.
        """
        budget, images = self.room
        left, time, columns = list(range(len(self.prices))), 0, list[list[_Bin]]()
        while left and len(columns) < count:
            price, size, rest = self.price[left], self.size[left], count - len(columns)
            level = -(-int(price.sum()) // (self.num_replicas * rest))
            if time + level * rest >= limit:
                return []
            if price[0] <= level and size.max() <= budget:
                break
            held = np.searchsorted(size.cumsum(), self.num_replicas * budget, side="right")
            dense = int(price[:held].sum()) * _DENSITY // (100 * self.num_replicas)
            whole = int(price[self.is_whole[left]].max(initial=0))
            height = max(level, min(int(price[0]), dense), whole)
            column = list[_Bin]()
            for unit in np.array(left)[(price > height) | (size > budget)].tolist():
                parts = [(width, *self.part_of(unit, width)) for width in self.widths]
                fit = (one for one in parts if one[1] <= budget and one[2] <= height)
                width, tokens, load = next(fit, parts[-1])
                if sum(one.width for one in column) + width <= self.num_replicas:
                    room = (budget - tokens, images - self.images[unit])
                    column.append(_Bin(*room, width, load, [unit]))
            column.sort(key=lambda one: -one.width)  # widest first, so that all are aligned
            left = sorted({*left} - {one.units[0] for one in column})
            free = self.num_replicas - sum(one.width for one in column)
            column += [_Bin(budget, images) for _ in range(free)]
            left = self.spread(left, column, self.prices, height if rest > 1 else 0)
            columns.append(column)
            time += max(one.load for one in column)
        bins = self.pack(left, self.num_replicas * (count - len(columns)), self.prices)
        if left and not bins:
            return []
        bins += [one for column in columns for one in column if one.width == 1]
        self.use_idle(bins)
        bins.sort(key=lambda one: one.load)  # so that equal ones meet
        rows: list[list[_Bin]] = [[] for _ in range(self.num_replicas)]
        for column in [*columns, *[[]] * (count - len(columns))]:
            places = [one for one in column for _ in range(one.width) if one.width > 1]
            for row, one in zip(rows, places, strict=False):
                row.append(one)
            for row in sorted(rows[len(places) :], key=lambda row: sum(one.load for one in row)):
                row.append(bins.pop())
        return rows

    def pack(self, units: Ids, count: int, keys: Ids) -> list[_Bin]:
        """Return so many bins with all units, or empty where they do not fit."""
        for key in (keys, []):
            bins = [_Bin(*self.room) for _ in range(count)]
            if not self.spread(units, bins, key):
                self.use_idle(bins)
                return bins
        return []

    def spread(self, units: Ids, bins: list[_Bin], keys: Ids, height: int = 0) -> Ids:
        """Put each unit into the bin that is lowest, by keys; return those that find no room.

        With a height no bin grows beyond it; without keys one bin after the other is filled.
        """
        sizes, images, prices, whole = self.sizes, self.images, self.prices, 100 + self.cost.share
        heap = [(one.load, at) for at, one in enumerate(bins)]
        if height:  # what is missing, in costs of units that nobody shares
            scales = [100 * one.width if one.width > 1 else whole for one in bins]
            heap = [((low - height) * scales[at] // whole, at) for low, at in heap]
        heapq.heapify(heap)
        full, others = list[tuple[int, int, int]](), list[int]()  # bins without room, units
        for unit in units:
            size, key = sizes[unit], keys[unit] if keys else 0
            while full and -full[0][0] >= size:
                heapq.heappush(heap, heapq.heappop(full)[1:])
            while heap and not (height and heap[0][0] + key > 0):
                low, at = heap[0]
                one = bins[at]
                need, cost = size, prices[unit]
                if one.width > 1:
                    need, cost = self.part_of(unit, one.width)
                if need > one.room or images[unit] > one.images:
                    heapq.heappush(full, (-one.room * one.width, *heapq.heappop(heap)))
                    continue
                one.units.append(unit)
                one.room -= need
                one.images -= images[unit]
                one.load += cost
                low += key if height or one.width == 1 else cost
                heapq.heapreplace(heap, (low, at))
                break
            else:
                others.append(unit)
        return others

    def use_idle(self, bins: list[_Bin]) -> None:
        """Move a unit into each empty bin as long as others hold several."""
        for idle in (one for one in bins if not one.units):
            costliest = max(bins, key=lambda one: (len(one.units) > 1, one.load))
            if len(costliest.units) > 1:
                idle.units = [costliest.units.pop()]
                idle.load = self.prices[idle.units[0]]
                costliest.load -= idle.load

    def keep_at_home(self, rows: list[list[_Bin]], owner: Integers, sync: Sync) -> None:
        """Exchange what takes equal time on other replicas: steps, or micro-batches of an index."""
        home_of = owner[np.array([one[0] for one in self.samples], dtype=np.int64)]
        width = len(rows[0]) if sync == "step" else 1
        for part in [slice(m, m + width) for m in range(0, len(rows[0]), width)]:
            free = [at for at, row in enumerate(rows) if all(one.width == 1 for one in row[part])]
            bins = [rows[at][part] for at in free]
            tokens = np.zeros((len(bins), len(rows) + 1), dtype=np.int64)  # the last: no owner
            for at, ones in enumerate(bins):
                units = np.array([unit for one in ones for unit in one.units], dtype=np.int64)
                np.add.at(tokens[at], home_of[units], self.size[units])
            for home in free:
                at = int(tokens[:, home].argmax())
                rows[home][part] = bins[at]
                tokens[at] = -1  # taken
