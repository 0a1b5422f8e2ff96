"""Which replica trains which samples of a step, in which of its M micro-batches.

Pure, integers only: from the same table every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
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
_FAR = 1 << 62


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
    units = _Units(
        np.stack([tokens, images, cost.samples(tokens, images), none if solo is None else solo]),
        groups=none - 1 if groups is None else np.asarray(groups, dtype=np.int64),
        room=(token_budget, max_patches or int(images.sum())),
        widest=1 << min(max_share, num_replicas).bit_length() - 1,
        part=math.lcm(2, alignment),
    )
    count = max(min_micro_batches, 1, -(-units.fewest // num_replicas))
    count = -(-count // count_multiple) * count_multiple
    rows, time = list[list[_Bin]](), _FAR
    while units.total // num_replicas + count * cost.fixed < time:
        found = units.plan(num_replicas, count, sync, limit=time - count * cost.fixed)
        loads = np.array([[one.load for one in row] for row in found], dtype=np.int64)
        if found:
            height = int(loads.sum(1).max() if sync == "step" else loads.max(0).sum())
        if found and height + count * cost.fixed < time:
            rows, time = found, height + count * cost.fixed
        elif rows:
            break
        count += count_multiple
    if owner is not None:
        units.keep_at_home(rows, np.asarray(owner).tolist(), sync)
    return units.named(rows, cost.fixed)


@dataclass(slots=True)
class _Bin:
    """A micro-batch of one replica, or shared by `width`; then the numbers are those of each."""

    room: int
    images: int
    width: int = 1
    load: int = 0
    units: list[int] = field(default_factory=list)


class _Units:
    """What is placed as one, costliest first: a sample, or the samples of a group."""

    def __init__(
        self, table: Integers, *, groups: Integers, room: tuple[int, int], widest: int, part: int
    ) -> None:
        named = np.where(groups < 0, np.arange(-len(groups), 0), groups)
        _, unit, counts = np.unique(named, return_inverse=True, return_counts=True)
        samples, ends = np.argsort(unit, kind="stable"), counts.cumsum()
        sums = np.add.reduceat(table[:, samples], ends - counts, axis=1)
        order = np.argsort(-sums[2], kind="stable")
        sizes, images, prices, solo = sums[:, order]
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
        self.room, self.part = room, part
        self.widths = [1 << bit for bit in range(1, widest.bit_length())]
        self.size_array, self.price_array = np.where(alone, room[0], sizes), prices
        self.is_whole, self.alone = ~can_share, set(np.flatnonzero(alone).tolist())
        self.sizes: list[int] = self.size_array.tolist()
        self.images: list[int] = np.minimum(images, room[1]).tolist()
        self.prices: list[int] = prices.tolist()
        self.total = sum(self.prices)
        halves = int(np.count_nonzero(self.is_whole & (2 * self.size_array > room[0])))
        pictured = -(-sum(self.images) // max(1, room[1]))
        self.fewest = max(-(-sum(self.sizes) // room[0]), pictured, halves)  # micro-batches

    def part_of(self, unit: int, width: int) -> tuple[int, int]:
        """Return the tokens (of a group at most) and the cost of a unit's part on each replica."""
        if unit in self.alone:
            return self.sizes[unit], self.prices[unit]
        pieces = -(-self.sizes[unit] // (width * self.part)) + len(self.samples[unit]) - 1
        price = -(-self.prices[unit] * (100 + SHARE_OVERHEAD) // (100 * width))
        return pieces * self.part, price

    def plan(self, num_replicas: int, count: int, sync: Sync, *, limit: int) -> list[list[_Bin]]:
        """Return `bins[replica][m]`, empty where no plan of so many micro-batches is found."""
        is_long = (self.price_array * num_replicas > self.total) | (self.size_array > self.room[0])
        if sync == "microbatch" or (is_long & ~self.is_whole).any():
            return self.plan_by_index(num_replicas, count, limit)
        room, images = self.room
        replicas = [_Bin(room * count, images * count) for _ in range(num_replicas)]
        if self.spread(range(len(self.prices)), replicas, self.prices):
            return []
        rows = []
        for replica in replicas:
            by_size = sorted(replica.units, key=self.sizes.__getitem__, reverse=True)
            rows.append(self.pack(by_size, count, self.sizes))
            self.use_idle(rows[-1])
        return rows if all(rows) else []

    def plan_by_index(self, num_replicas: int, count: int, limit: int) -> list[list[_Bin]]:
        """Return a plan whose micro-batches of one index cost the same on every replica."""
        best = None
        for density in _DENSITIES if count > 1 and not self.is_whole.all() else (100,):
            found = self.fill_costly(num_replicas, count, density, limit)
            if found is not None:
                best, limit = found, found[0]
                if not found[1]:
                    break  # nothing is costly
        if best is None:
            return []
        _, costly, others = best
        bins = self.pack(others, num_replicas * (count - len(costly)), self.prices)
        if others and not bins:
            return []
        self.use_idle([*bins, *chain.from_iterable(costly)])
        bins += [one for column in costly for one in column if one.width == 1]
        bins.sort(key=lambda one: one.load)  # so that equal ones meet
        rows: list[list[_Bin]] = [[] for _ in range(num_replicas)]
        for column in [*costly, *[[]] * (count - len(costly))]:
            shared = sorted((one for one in column if one.width > 1), key=lambda one: -one.width)
            places = [one for one in shared for _ in range(one.width)]  # aligned, as widest first
            for row, one in zip(rows, places, strict=False):
                row.append(one)
            for row in sorted(rows[len(places) :], key=lambda row: sum(one.load for one in row)):
                row.append(bins.pop())
        return rows

    def fill_costly(
        self, num_replicas: int, count: int, density: int, limit: int
    ) -> tuple[int, list[list[_Bin]], list[int]] | None:
        """Fill, one index after the other, those that one unit makes higher than the mean.

        An index as high as that unit takes the costliest on its other replicas. Where units may
        be shared it is as high as it can be filled, and shared are those that cost more.

        Returns:
            What the step will take, the bins of each such index, and the units for the others,
            none of them costly; None where that is not below the limit.
        """
        left, columns, time, budget = (
            np.arange(len(self.prices)),
            list[list[_Bin]](),
            0,
            self.room[0],
        )
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
                parts = {width: self.part_of(unit, width) for width in self.widths}
                fit = [k for k, (t, c) in parts.items() if t <= budget and c <= height]
                width = min(fit, default=self.widths[-1])
                if width <= free:
                    tokens, load = parts[width]
                    images = self.room[1] - self.images[unit]
                    bins.append(_Bin(budget - tokens, images, width, load, [unit]))
                    free -= width
                    shared.append(at)
            bins += [_Bin(*self.room) for _ in range(free)]
            left = np.delete(left, shared)
            if rest == 1 and self.size_array[left].max(initial=0) > budget:
                return None
            others = self.spread(left.tolist(), bins, self.prices, height if rest > 1 else 0)
            left = np.array(others, dtype=np.int64)
            columns.append(bins)
            time += max(one.load for one in bins)
        return (time, columns, []) if time < limit else None

    def pack(self, units: list[int], count: int, keys: list[int]) -> list[_Bin]:
        """Return so many bins with the units spread as evenly as possible; empty if it is not."""
        for percent in _EVEN:
            bins = [_Bin(*self.room) for _ in range(count)]
            num = len(units) * percent // 100
            small = sorted(units[num:], key=self.sizes.__getitem__, reverse=True)
            if not self.spread(units[:num], bins, keys) and not self.spread(small, bins, None):
                return bins
        return []

    def spread(
        self, units: Iterable[int], bins: list[_Bin], keys: list[int] | None, height: int = 0
    ) -> list[int]:
        """Put each unit into the lowest bin that has room for it; return those that find none.

        Args:
            units: falling.
            bins: changed.
            keys: what adds up in bins; None where each bin is filled as far as it can be.
            height: no bin grows beyond it; 0 for no end.
        """
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
            size, images, key = self.sizes[unit], self.images[unit], keys[unit] if keys else 0
            while full and -full[0][0] >= size:
                _, low, at = heapq.heappop(full)
                heapq.heappush(heap, (low, at))
            apart = []
            while heap and not (height and heap[0][0] + key > 0):
                low, at = heap[0]
                one = bins[at]
                need, cost = size, self.prices[unit]
                if one.width > 1:
                    need, cost = self.part_of(unit, one.width)
                if need > one.room:
                    heapq.heappush(full, (-one.room * one.width, *heapq.heappop(heap)))
                elif images > one.images:
                    apart.append(heapq.heappop(heap))
                else:
                    one.units.append(unit)
                    one.room -= need
                    one.images -= images
                    one.load += cost
                    grown = low + (key if height or one.width == 1 else cost)
                    heapq.heapreplace(heap, (grown, at))
                    break
            else:
                others.append(unit)
            for entry in apart:
                heapq.heappush(heap, entry)
        return others

    def use_idle(self, bins: list[_Bin]) -> None:
        """Move a unit into each empty bin as long as others hold several."""
        for idle in (one for one in bins if not one.units):
            several = [one for one in bins if len(one.units) > 1]
            movable = [one for one in several if self.sizes[one.units[-1]] <= self.room[0]]
            if not movable:
                break
            costliest = max(movable, key=lambda one: one.load)
            unit = costliest.units.pop()
            price = self.prices[unit]
            costliest.load -= self.part_of(unit, costliest.width)[1] if costliest.width > 1 else price
            idle.units, idle.load = [unit], price

    def keep_at_home(self, rows: list[list[_Bin]], owner: list[int], sync: Sync) -> None:
        """Exchange what takes equal time on other replicas: steps, or micro-batches of an index."""
        count = len(rows[0])
        for part in [slice(count)] if sync == "step" else [slice(m, m + 1) for m in range(count)]:
            bins = {
                at: row[part]
                for at, row in enumerate(rows)
                if all(one.width == 1 for one in row[part])
            }
            tokens: Counter[tuple[int, int]] = Counter()
            for at, parts in bins.items():
                for unit in chain.from_iterable(one.units for one in parts):
                    tokens[at, owner[self.samples[unit][0]]] += self.sizes[unit]
            homes = set(bins)
            for at, home in sorted(tokens, key=lambda pair: (-tokens[pair], pair)):
                if at in bins and home in homes:
                    rows[home][part] = bins.pop(at)
                    homes.remove(home)
            for home, parts in zip(sorted(homes), bins.values(), strict=True):
                rows[home][part] = parts

    def named(self, rows: list[list[_Bin]], overhead: int) -> StepPlan:
        """Return the plan with samples for units."""
        bins = {
            id(one): tuple(sorted(chain.from_iterable(map(self.samples.__getitem__, one.units))))
            for row in rows
            for one in row
        }
        return StepPlan(
            num_micro_batches=len(rows[0]),
            micro_batches=tuple(tuple(bins[id(one)] for one in row) for row in rows),
            shares={
                at: one.width
                for row in rows
                for one in row
                if one.width > 1
                for at in bins[id(one)]
            },
            loads=tuple(tuple(one.load for one in row) for row in rows),
            overhead=overhead,
        )
