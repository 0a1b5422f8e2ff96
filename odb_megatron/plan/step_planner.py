"""Which replica trains which samples of a step, in which of its M micro-batches.

Pure, integers only: from the same table every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["SHARE_OVERHEAD", "StepPlan", "plan_step"]

Sync = Literal["step", "microbatch"]
Integers = npt.NDArray[np.int64]

SHARE_OVERHEAD = 8  # percent that a sample costs more where replicas share it (keys, values travel)
_DENSITIES = (90, 70)  # heights tried, percent of what an index full of the costliest costs
_EVEN = (100, 80, 0)  # percent of the units that are spread; the others fill bin after bin


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
    shares: Mapping[int, int]
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
    for sync "step" and sum over m (max over r load[r][m]) for sync "microbatch". A replica with
    fewer samples than M has idle micro-batches, no other has (a group
    counts as one sample, what replicas share as none).

    Args:
        lengths: tokens of each sample, at least 1, [samples]; so are the other arrays.
        num_replicas: data-parallel size.
        token_budget: most tokens of a micro-batch, after padding.
        sync: where replicas wait for each other.
        alignment: samples are padded to a multiple of it, the parts of a shared one to a multiple
            of lcm(2, alignment).
        patches: image patches of each sample.
        max_patches: most patches of a micro-batch; a sample with more is alone in one.
        cost: cost model; None where the cost is the number of tokens.
        count_multiple: M is a multiple of it (virtual pipelines).
        min_micro_batches: M is at least this.
        max_share: most replicas that share a sample.
        groups: samples with the same number >= 0 stay in one micro-batch.
        owner: replica that has read each sample; where plans take equal time, few tokens move.
        solo: samples that may be over the budget, alone in a micro-batch.

    Raises:
        ValueError: a sample is over the budget and may be neither shared nor alone.
    """
    cost = cost or CostModel()
    tokens: Integers = -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment
    none = np.zeros_like(tokens)
    images = none if patches is None else np.asarray(patches, dtype=np.int64)
    planner = _Planner(
        np.stack([tokens, images, cost.samples(tokens, images), none if solo is None else solo]),
        none - 1 if groups is None else np.asarray(groups, dtype=np.int64),
        num_replicas=num_replicas,
        room=(token_budget, max_patches or int(images.sum())),
        widest=1 << min(max_share, num_replicas).bit_length() - 1,
        part=math.lcm(2, alignment),
    )
    count = max(min_micro_batches, 1, -(-planner.fewest // num_replicas))
    count = -(-count // count_multiple) * count_multiple
    rows, time = list[list[_Bin]](), 1 << 62
    while planner.total // num_replicas + count * cost.fixed < time:
        found = planner.plan(count, sync, limit=time - count * cost.fixed)
        loads = np.array([[one.load for one in row] for row in found] or [[time]], dtype=np.int64)
        height = int(loads.sum(1).max() if sync == "step" else loads.max(0).sum())
        if height + count * cost.fixed < time:
            rows, time = found, height + count * cost.fixed
        elif rows:
            break
        count += count_multiple
    if owner is not None:
        planner.keep_at_home(rows, np.asarray(owner, dtype=np.int64), sync)
    names = [[tuple(sorted(planner.samples_of(one))) for one in row] for row in rows]
    return StepPlan(
        num_micro_batches=len(rows[0]),
        micro_batches=tuple(map(tuple, names)),
        shares={
            at: one.width
            for row in rows
            for one in row
            if one.width > 1
            for at in planner.samples_of(one)
        },
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
        self, table: Integers, groups: Integers, *, num_replicas: int, room: tuple[int, int],
        widest: int, part: int,
    ) -> None:  # fmt: skip
        named = np.where(groups < 0, np.arange(-len(groups), 0), groups)
        _, unit, counts = np.unique(named, return_inverse=True, return_counts=True)
        samples, ends = np.argsort(unit, kind="stable"), counts.cumsum()
        sums = np.add.reduceat(table[:, samples], ends - counts, axis=1)
        order = np.argsort(-sums[2], kind="stable")
        sizes, images, self.price_array, solo = sums[:, order]
        spans = zip((ends - counts)[order].tolist(), ends[order].tolist(), strict=True)
        flat: list[int] = samples.tolist()
        self.samples = [flat[start:end] for start, end in spans]
        parts = (-(-sizes // (widest * part)) + counts[order] - 1) * part
        can_share = (widest > 1) & (parts <= room[0]) & (images <= room[1])
        for at in np.flatnonzero((sizes > room[0]) & ~can_share & (solo == 0)).tolist():
            raise ValueError(
                f"sample {', '.join(map(str, self.samples[at]))} has {sizes[at]} tokens after "
                f"padding; a micro-batch holds {room[0]}, and at most {widest} replicas share one: "
                "raise the token budget, or let it be shared, truncated, dropped or alone"
            )
        alone = (images > room[1]) | (sizes > room[0]) & ~can_share
        self.alone, self.is_whole = set(np.flatnonzero(alone).tolist()), ~can_share
        self.num_replicas, self.room, self.part = num_replicas, room, part
        self.widths = [1 << bit for bit in range(1, widest.bit_length())]
        self.size_array = np.where(alone, room[0], sizes)
        self.sizes: list[int] = self.size_array.tolist()
        self.images: list[int] = np.minimum(images, room[1]).tolist()
        self.prices: list[int] = self.price_array.tolist()
        self.total = sum(self.prices)
        crowded = (  # n bins hold n * m units that are longer than a part of the budget in m + 1
            -(-int(np.count_nonzero(self.is_whole & (self.size_array * (m + 1) > room[0]))) // m)
            for m in range(1, 9)
        )
        full = -(-sum(self.sizes) // room[0]), -(-sum(self.images) // max(1, room[1]))
        self.fewest = max(*full, *crowded)  # micro-batches

    def part_of(self, unit: int, width: int) -> tuple[int, int]:
        """Return the tokens (of a group at most) and the cost of a unit's part on each replica."""
        if unit in self.alone:
            return self.sizes[unit], self.prices[unit]
        pieces = -(-self.sizes[unit] // (width * self.part)) + len(self.samples[unit]) - 1
        return pieces * self.part, -(-self.prices[unit] * (100 + SHARE_OVERHEAD) // (100 * width))

    def plan(self, count: int, sync: Sync, *, limit: int) -> list[list[_Bin]]:
        """Return `bins[replica][m]`, empty where no plan of so many micro-batches is found."""
        budget, images = self.room
        is_long = (self.price_array * self.num_replicas > self.total) | (self.size_array > budget)
        if sync == "microbatch" or (is_long & ~self.is_whole).any():
            return self.plan_by_index(count, limit)
        replicas = [_Bin(budget * count, images * count) for _ in range(self.num_replicas)]
        if self.spread(range(len(self.prices)), replicas, self.prices):
            return []
        by_size = [sorted(one.units, key=lambda unit: -self.sizes[unit]) for one in replicas]
        rows = [self.pack(units, count, self.sizes) for units in by_size]
        return rows if all(rows) else []

    def plan_by_index(self, count: int, limit: int) -> list[list[_Bin]]:
        """Return a plan whose micro-batches of one index cost the same on every replica."""
        densities = _DENSITIES if count > 1 and self.widths else (100,)
        found = [self.fill_costly(count, density, limit) for density in densities]
        if not any(found):
            return []
        _, costly, others = min(filter(None, found), key=lambda one: one[0])
        bins = self.pack(others, self.num_replicas * (count - len(costly)), self.prices)
        if others and not bins:
            return []
        bins += [one for column in costly for one in column if one.width == 1]
        self.use_idle(bins)
        bins.sort(key=lambda one: one.load)  # so that equal ones meet
        rows: list[list[_Bin]] = [[] for _ in range(self.num_replicas)]
        for column in [*costly, *[[]] * (count - len(costly))]:
            shared = [one for one in column for _ in range(one.width) if one.width > 1]
            for row, one in zip(rows, shared, strict=False):
                row.append(one)
            for row in sorted(rows[len(shared) :], key=lambda row: sum(one.load for one in row)):
                row.append(bins.pop())
        return rows

    def fill_costly(
        self, count: int, density: int, limit: int
    ) -> tuple[int, list[list[_Bin]], list[int]] | None:
        """Fill, one index after the other, those that one unit makes higher than the mean.

        An index as high as that unit takes the costliest on its other replicas. Where units may
        be shared it is as high as it can be filled, and shared are those that cost more. Returns
        what the step will take, the bins of each such index, and the units for the others, none
        of them costly; None where that is not below the limit.
        """
        (budget, images), num_replicas = self.room, self.num_replicas
        left, columns, time = np.arange(len(self.prices)), list[list[_Bin]](), 0
        while len(left):
            rest = count - len(columns)
            price, size = self.price_array[left], self.size_array[left]
            level = -(-int(price.sum()) // (num_replicas * max(1, rest)))
            if not rest or time + level * rest >= limit:
                return None
            if price[0] <= level and size.max() <= budget:
                fits = int(size.sum()) <= num_replicas * rest * budget
                return (time + level * rest, columns, left.tolist()) if fits else None
            held = int(np.searchsorted(size.cumsum(), num_replicas * budget, side="right"))
            dense = int(price[:held].sum()) // num_replicas * density // 100
            whole = int(price[self.is_whole[left]].max(initial=0))
            height = max(level, min(int(price[0]), dense), whole)
            bins, free, shared = list[_Bin](), num_replicas, list[int]()
            for at in np.flatnonzero((price > height) | (size > budget)).tolist():
                unit = int(left[at])
                parts = [(width, *self.part_of(unit, width)) for width in self.widths]
                fit = (one for one in parts if one[1] <= budget and one[2] <= height)
                width, tokens, load = next(fit, parts[-1])
                if width <= free:
                    bins.append(
                        _Bin(budget - tokens, images - self.images[unit], width, load, [unit])
                    )
                    free -= width
                    shared.append(at)
            bins.sort(key=lambda one: -one.width)  # widest first, so that all are aligned
            bins += [_Bin(budget, images) for _ in range(free)]
            left = np.delete(left, shared)
            if rest == 1 and self.size_array[left].max(initial=0) > budget:
                return None
            others = self.spread(left.tolist(), bins, self.prices, height if rest > 1 else 0)
            left = np.array(others, dtype=np.int64)
            columns.append(bins)
            time += max(one.load for one in bins)
        return (time, columns, []) if time < limit else None

    def pack(self, units: list[int], count: int, keys: list[int]) -> list[_Bin]:
        """Return so many bins with the units, falling in size, or empty where they do not fit."""
        for percent in _EVEN:
            bins = [_Bin(*self.room) for _ in range(count)]
            num = len(units) * percent // 100
            small = sorted(units[num:], key=lambda unit: -self.sizes[unit])
            if not self.spread(units[:num], bins, keys) and not self.spread(small, bins, []):
                self.use_idle(bins)
                return bins
        return []

    def spread(
        self, units: Iterable[int], bins: list[_Bin], keys: list[int], height: int = 0
    ) -> list[int]:
        """Put each unit into the lowest bin that has room for it; return those that find none.

        With a height no bin grows beyond it. Low is a bin by the keys of its units; without keys
        one bin after the other is filled.
        """
        sizes, prices, images = self.sizes, self.prices, self.images
        heap = []
        for at, one in enumerate(bins):
            low = one.load - height
            if height and one.width > 1:  # in prices of whole units
                low = low * one.width * 100 // (100 + SHARE_OVERHEAD)
            heap.append((low, at))
        heapq.heapify(heap)
        full: list[tuple[int, int, int]] = []  # without room for the present unit
        others = []
        for unit in units:
            size, key = sizes[unit], keys[unit] if keys else 0
            while full and -full[0][0] >= size:
                heapq.heappush(heap, heapq.heappop(full)[1:])
            apart = []
            while heap and not (height and heap[0][0] + key > 0):
                low, at = heap[0]
                one = bins[at]
                need, cost = size, prices[unit]
                if one.width > 1:
                    need, cost = self.part_of(unit, one.width)
                if need > one.room:
                    heapq.heappush(full, (-one.room * one.width, *heapq.heappop(heap)))
                elif images[unit] > one.images:
                    apart.append(heapq.heappop(heap))
                else:
                    one.units.append(unit)
                    one.room -= need
                    one.images -= images[unit]
                    one.load += cost
                    low += key if height or one.width == 1 else cost
                    heapq.heapreplace(heap, (low, at))
                    break
            else:
                others.append(unit)
            for entry in apart:
                heapq.heappush(heap, entry)
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
        count = len(rows[0])
        home_of = owner[np.array([one[0] for one in self.samples], dtype=np.int64)]
        for part in [slice(count)] if sync == "step" else [slice(m, m + 1) for m in range(count)]:
            bins = {
                at: row[part]
                for at, row in enumerate(rows)
                if max(one.width for one in row[part]) == 1
            }
            tokens = np.zeros((len(rows), len(rows)), dtype=np.int64)
            for at, mine in bins.items():
                units = np.array([unit for one in mine for unit in one.units], dtype=np.int64)
                np.add.at(tokens[at], home_of[units], self.size_array[units])
            homes = set(bins)
            for pair in np.argsort(-tokens, axis=None, kind="stable").tolist():
                at, home = divmod(pair, len(rows))
                if at in bins and home in homes:
                    homes.remove(home)
                    rows[home][part] = bins.pop(at)

    def samples_of(self, one: _Bin) -> Iterable[int]:
        return chain.from_iterable(map(self.samples.__getitem__, one.units))
