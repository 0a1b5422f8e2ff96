"""Which replica trains which samples of a step, in which of its M micro-batches.

Pure, integers only: from the same table every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["SHARE_OVERHEAD", "StepPlan", "plan_step"]

Integers = npt.NDArray[np.int64]
Sync = Literal["step", "microbatch"]

SHARE_OVERHEAD = 8
"""Percent by which a sample costs more where replicas share it: keys and values travel."""

_DENSITIES = (95, 80, 65, 50)  # percent of the cost that an index can hold, as its height
_EVEN = (100, 80, 0)  # percent of the units spread by cost before the others fill what is left


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
    lengths: npt.ArrayLike,
    *,
    num_replicas: int,
    token_budget: int,
    sync: Sync = "step",
    alignment: int = 1,
    patches: npt.ArrayLike | None = None,
    max_patches: int | None = None,
    cost: CostModel | None = None,
    count_multiple: int = 1,
    min_micro_batches: int = 1,
    max_share: int = 1,
    groups: npt.ArrayLike | None = None,
    owner: npt.ArrayLike | None = None,
    solo: npt.ArrayLike | None = None,
) -> StepPlan:
    """Plan one optimizer step of all replicas.

    Made small is, with the overhead of M micro-batches added, `max over r (sum over m load[r][m])`
    for sync "step", and `sum over m (max over r load[r][m])` for sync "microbatch". A replica with
    fewer samples than M has idle micro-batches, no other has (a group counts as one sample).

    Args:
        lengths: tokens of each sample, at least 1, int [samples].
        num_replicas: data-parallel size.
        token_budget: most tokens of a micro-batch, after padding.
        sync: where replicas wait for each other.
        alignment: samples are padded to a multiple of it; parts of a sample that k replicas share
            to one of lcm(2, alignment).
        patches: image patches of each sample, int [samples].
        max_patches: most patches of a micro-batch; a sample with more is alone in one.
        cost: cost model; None where cost is the number of tokens.
        count_multiple: M is a multiple of it (virtual pipelines).
        min_micro_batches: M is at least this.
        max_share: most replicas that share a sample.
        groups: samples with the same number >= 0 stay in one micro-batch, int [samples].
        owner: replica that has read the sample, int [samples]: plans that take equal time differ
            in who trains what, and fewer tokens move.
        solo: samples that are alone in a micro-batch where they are over the budget, bool [samples].

    Raises:
        ValueError: a sample is over the budget and may be neither shared nor alone.
    """
    cost = cost or CostModel()
    padded = -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment
    images = np.zeros_like(padded) if patches is None else np.asarray(patches, dtype=np.int64)
    units = _Units.build(
        padded,
        images,
        cost.samples(padded, images),
        groups=np.full(len(padded), -1) if groups is None else np.asarray(groups, dtype=np.int64),
        solo=np.zeros(len(padded), dtype=np.bool_) if solo is None else np.asarray(solo),
        room=(token_budget, max_patches or int(images.sum())),
        widest=1 << min(max_share, num_replicas).bit_length() - 1,
        part=math.lcm(2, alignment),
    )
    count = max(min_micro_batches, units.fewest_micro_batches(num_replicas))
    count = -(-count // count_multiple) * count_multiple
    fair = units.total // num_replicas
    best: tuple[int, list[list[_Bin]]] | None = None
    while best is None or fair + count * cost.fixed < best[0]:
        limit = best[0] - count * cost.fixed if best else None
        rows = units.plan(num_replicas, count, sync=sync, limit=limit)
        if rows is not None:
            time = _time(rows, sync) + count * cost.fixed
            if best is not None and time >= best[0]:
                break
            best = (time, rows)
        elif best is not None:
            break
        count += count_multiple
    rows = best[1]
    if owner is not None:
        units.keep_at_home(rows, np.asarray(owner).tolist(), sync=sync)
    return units.named(rows, cost.fixed)


@dataclass(slots=True)
class _Bin:
    """A micro-batch, of one replica or shared by `width`; room and load are those of a replica."""

    room: int
    images: int
    width: int = 1
    load: int = 0
    members: list[int] = field(default_factory=list)


def _time(rows: list[list[_Bin]], sync: Sync) -> int:
    if sync == "step":
        return max(sum(one.load for one in row) for row in rows)
    return sum(max(one.load for one in column) for column in zip(*rows, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What is placed as one, costliest first: a sample, or the samples of a group.

    `widest` is the largest number of replicas that may share a unit; 1 for one that is alone in
    its micro-batch, whose size is set to the budget.
    """

    prices: list[int]
    sizes: list[int]
    images: list[int]
    samples: list[Sequence[int]]
    widest: list[int]
    arrays: tuple[Integers, Integers, Integers]  # prices, sizes, widest
    room: tuple[int, int]
    part: int
    total: int

    @classmethod
    def build(
        cls,
        sizes: Integers,
        images: Integers,
        prices: Integers,
        *,
        groups: Integers,
        solo: npt.NDArray[np.bool_],
        room: tuple[int, int],
        widest: int,
        part: int,
    ) -> _Units:
        samples: list[Sequence[int]] = [(index,) for index in range(len(sizes))]
        if (groups >= 0).any():
            names = np.where(groups < 0, np.arange(len(sizes)) - len(sizes), groups)
            _, first, unit = np.unique(names, return_index=True, return_inverse=True)
            by_unit: list[list[int]] = [[] for _ in first]
            for index, at in enumerate(unit.tolist()):
                by_unit[at].append(index)
            samples = [*by_unit]
            sizes, images, prices = (
                np.array([int(values[one].sum()) for one in by_unit], dtype=np.int64)
                for values in (sizes, images, prices)
            )
            solo = solo[first] & np.array([len(one) == 1 for one in by_unit])
        counts = np.array([len(one) for one in samples], dtype=np.int64)
        shared = (-(-sizes // (widest * part)) + counts - 1) * part
        alone = (images > room[1]) | (solo & (sizes > room[0]) & (shared > room[0]))
        for at in np.flatnonzero(~alone & (sizes > room[0]) & ((widest == 1) | (shared > room[0]))):
            raise ValueError(
                f"sample {', '.join(map(str, samples[at]))} has {sizes[at]} tokens after padding; "
                f"a micro-batch holds {room[0]}"
                + (f" and {widest} replicas at most share one" if widest > 1 else "")
                + ": raise the token budget, or let it be shared or alone"
            )
        order = np.argsort(-prices, kind="stable")
        prices, limits = prices[order], np.where(alone, 1, widest)[order]
        sizes = np.where(alone, room[0], sizes)[order]
        return cls(
            prices=prices.tolist(),
            sizes=sizes.tolist(),
            images=np.minimum(images, room[1])[order].tolist(),
            samples=[samples[at] for at in order.tolist()],
            widest=limits.tolist(),
            arrays=(prices, sizes, limits),
            room=room,
            part=part,
            total=int(prices.sum()),
        )

    def price(self, unit: int, width: int) -> int:
        """Return the cost of a unit's part on each of `width` replicas."""
        if width == 1:
            return self.prices[unit]
        return -(-self.prices[unit] * (100 + SHARE_OVERHEAD) // (100 * width))

    def size(self, unit: int, width: int) -> int:
        """Return the tokens of a unit's part; those of a group at most."""
        if width == 1:
            return self.sizes[unit]
        pieces = -(-self.sizes[unit] // (width * self.part))
        return (pieces + len(self.samples[unit]) - 1) * self.part

    def fewest_micro_batches(self, num_replicas: int) -> int:
        """Return an M below which there is no plan."""
        _, sizes, widest = self.arrays
        halves = int(np.count_nonzero((2 * sizes > self.room[0]) & (widest == 1)))
        full = -(-int(sizes.sum()) // self.room[0])
        pictured = -(-sum(self.images) // max(1, self.room[1]))
        return max(1, -(-max(halves, full, pictured) // num_replicas))

    def plan(
        self, num_replicas: int, count: int, *, sync: Sync, limit: int | None
    ) -> list[list[_Bin]] | None:
        """Return `bins[replica][m]`; None where no plan, or none faster than `limit`, is found."""
        prices, sizes, widest = self.arrays
        too_much = (prices * num_replicas > self.total) | (sizes > self.room[0])
        if sync == "microbatch" or (too_much & (widest > 1)).any():
            return self.by_index(num_replicas, count, sync=sync, limit=limit)
        replicas = self.bins(num_replicas, times=count)
        if self.spread(range(len(self.prices)), replicas, keys=self.prices):
            return None
        rows = [self.bins(count) for _ in replicas]
        for replica, row in zip(replicas, rows, strict=True):
            members = sorted(replica.members, key=lambda unit: -self.sizes[unit])
            if not self.pack(members, row, keys=self.sizes):
                return None
            self.use_idle(row)
        return rows

    def by_index(
        self, num_replicas: int, count: int, *, sync: Sync, limit: int | None
    ) -> list[list[_Bin]] | None:
        """Plan for micro-batches of one index that cost the same on every replica."""
        best = None
        is_choice = count > 1 and max(self.widest, default=1) > 1
        for density in _DENSITIES if is_choice else (100,):
            found = self.costly(num_replicas, count, density=density, limit=limit)
            if found is not None:
                best, limit = found, found[0]
                if not found[1]:
                    break  # nothing is costly
        if best is None:
            return None
        _, costly, left = best
        bins = self.bins(num_replicas * (count - len(costly)))
        if not self.pack(left, bins, keys=self.prices):
            return None
        self.use_idle([*bins, *chain.from_iterable(costly)])
        bins += [one for column in costly for one in column if one.width == 1]
        bins.sort(key=lambda one: one.load)  # equal ones meet
        rows: list[list[_Bin]] = [[] for _ in range(num_replicas)]
        for column in costly + [[]] * (count - len(costly)):
            shared = sorted((one for one in column if one.width > 1), key=lambda one: -one.width)
            taken = [one for one in shared for _ in range(one.width)]  # so aligned, widest first
            for row, one in zip(rows, taken, strict=False):
                row.append(one)
            free = rows[len(taken) :]
            if sync == "step":
                free.sort(key=lambda row: sum(one.load for one in row))
            for row in free:
                row.append(bins.pop())
        return rows

    def costly(
        self, num_replicas: int, count: int, *, density: int, limit: int | None
    ) -> tuple[int, list[list[_Bin]], list[int]] | None:
        """Fill, one index after the other, those that a costly unit makes higher than the mean.

        An index as high as that unit holds the next costliest on the other replicas. Where units
        may be shared, it is as high as it can be filled with samples, and what is higher is shared.

        Returns:
            The time of the step, the bins of each such index, and the units left for the others,
            none of which is costly; None where there is no plan faster than `limit`.
        """
        prices, sizes, widest = self.arrays
        budget = self.room[0]
        left = np.arange(len(prices))
        columns: list[list[_Bin]] = []
        time = 0
        while len(left):
            rest = count - len(columns)
            price, size = prices[left], sizes[left]
            level = -(-int(price.sum()) // (num_replicas * rest)) if rest else 0
            if not rest or (limit is not None and time + level * rest >= limit):
                return None
            if price[0] <= level and size.max() <= budget:
                is_full = int(size.sum()) > num_replicas * rest * budget
                return None if is_full else (time + level * rest, columns, left.tolist())
            filled = int(np.searchsorted(size.cumsum(), num_replicas * budget, side="right"))
            dense = int(price[:filled].sum()) // num_replicas * density // 100
            whole = int(price[widest[left] == 1].max(initial=0))
            height = max(level, min(int(price[0]), dense), whole)
            bins = []
            over = np.flatnonzero((price > height) | (size > budget))
            free, shared = num_replicas, []
            for at, unit in zip(over.tolist(), left[over].tolist(), strict=True):
                width = 2
                while width < self.widest[unit] and (
                    self.price(unit, width) > height or self.size(unit, width) > budget
                ):
                    width *= 2
                if width <= free:
                    free -= width
                    shared.append(at)
                    one = _Bin(budget, self.room[1], width)
                    self.put(unit, one)
                    bins.append(one)
            left = np.delete(left, shared)
            bins += self.bins(free)
            if rest == 1 and len(left) and sizes[left].max() > budget:
                return None
            top = height if rest > 1 else None
            left = np.array(
                self.spread(left.tolist(), bins, keys=self.prices, height=top), np.int64
            )
            columns.append(bins)
            time += max(one.load for one in bins)
        return (time, columns, []) if limit is None or time < limit else None

    def bins(self, count: int, *, times: int = 1) -> list[_Bin]:
        """Return empty bins."""
        return [_Bin(self.room[0] * times, self.room[1] * times) for _ in range(count)]

    def put(self, unit: int, one: _Bin) -> None:
        """Put a unit into a bin."""
        one.load += self.price(unit, one.width)
        one.room -= self.size(unit, one.width)
        one.images -= self.images[unit]
        one.members.append(unit)

    def spread(
        self, units: Sequence[int], bins: list[_Bin], *, keys: list[int], height: int | None = None
    ) -> list[int]:
        """Put each unit where least is, or where most is missing to the height; return the others.

        Without a height it ends at the first unit that finds no room.
        """
        sizes, images = self.sizes, self.images
        whole = 100 + SHARE_OVERHEAD
        others: list[int] = []
        heap = []
        for at, one in enumerate(bins):
            heap.append(
                (
                    (one.load - (height or 0))
                    * (whole if one.width == 1 or height is None else 100 * one.width),
                    at,
                )
            )
        heapq.heapify(heap)
        full: list[tuple[int, int, int]] = []  # no room for the present unit
        for unit in units:
            size, key = sizes[unit], keys[unit]
            while full and -full[0][0] >= size:
                _, load, at = heapq.heappop(full)
                heapq.heappush(heap, (load, at))
            if height is not None and (not heap or key * whole > -heap[0][0]):
                others.append(unit)
                continue
            apart = []
            while heap and (height is None or key * whole <= -heap[0][0]):
                load, at = heap[0]
                one = bins[at]
                need = size if one.width == 1 else self.size(unit, one.width)
                if need > one.room:
                    heapq.heappop(heap)
                    heapq.heappush(full, (-one.room * one.width, load, at))
                elif images[unit] > one.images:
                    apart.append(heapq.heappop(heap))
                else:
                    cost = key if one.width == 1 else self.price(unit, one.width)
                    one.load += cost
                    one.room -= need
                    one.images -= images[unit]
                    one.members.append(unit)
                    heapq.heapreplace(
                        heap,
                        (
                            load
                            + cost
                            * (whole if one.width == 1 or height is None else 100 * one.width),
                            at,
                        ),
                    )
                    break
            else:
                others.append(unit)
                if height is None:
                    return others
            for entry in apart:
                heapq.heappush(heap, entry)
        return others

    def pack(self, units: Sequence[int], bins: list[_Bin], *, keys: list[int]) -> bool:
        """Put all units into empty bins as evenly as their room permits; whether they fit."""
        for percent in _EVEN:
            num = len(units) * percent // 100
            small = sorted(units[num:], key=lambda unit: -self.sizes[unit])
            if not self.spread(units[:num], bins, keys=keys) and not self.fill(small, bins):
                break
            for one in bins:
                one.room, one.images = self.room
                one.load = 0
                one.members = []
        else:
            return False
        for one in bins:
            one.load = sum(map(self.prices.__getitem__, one.members))
        return True

    def fill(self, units: list[int], bins: list[_Bin]) -> int:
        """Fill one bin after the other with the longest that fit; return how many are left."""
        shorter = [-self.sizes[unit] for unit in units]
        after = list(range(len(units) + 1))  # of one that is placed: one behind it
        missing = len(units)
        for one in bins:
            at = 0
            while missing:
                at = max(at, bisect_left(shorter, -one.room))
                while after[at] != at:
                    after[at] = at = after[after[at]]
                if at == len(units):
                    break
                if self.images[units[at]] <= one.images:
                    self.put(units[at], one)
                    after[at] = at + 1
                    missing -= 1
                at += 1
        return missing

    def use_idle(self, bins: list[_Bin]) -> None:
        """Move a unit into each empty bin as long as others hold several."""
        for idle in (one for one in bins if not one.members):
            several = [one for one in bins if len(one.members) > 1]
            if not several:
                break
            costliest = max(several, key=lambda one: one.load)
            unit = costliest.members.pop()
            costliest.load -= self.price(unit, costliest.width)
            self.put(unit, idle)

    def keep_at_home(self, rows: list[list[_Bin]], owner: list[int], *, sync: Sync) -> None:
        """Exchange what replicas may, so that most tokens are where they have been read."""
        whole = [slice(None)] if sync == "step" else [slice(m, m + 1) for m in range(len(rows[0]))]
        for part in whole:
            free = [at for at, row in enumerate(rows) if all(one.width == 1 for one in row[part])]
            tokens: Counter[tuple[int, int]] = Counter()
            for at in free:
                for one in rows[at][part]:
                    for unit in one.members:
                        tokens[at, owner[self.samples[unit][0]]] += self.sizes[unit]
            bins = {at: rows[at][part] for at in free}
            homes = set(free)
            for (at, home), _ in sorted(tokens.items(), key=lambda item: (-item[1], item[0])):
                if at in bins and home in homes:
                    rows[home][part] = bins.pop(at)
                    homes.remove(home)
            for home, at in zip(sorted(homes), sorted(bins), strict=True):
                rows[home][part] = bins[at]

    def named(self, rows: list[list[_Bin]], overhead: int) -> StepPlan:
        """Return the plan with samples for units."""
        names = self.samples.__getitem__
        return StepPlan(
            num_micro_batches=len(rows[0]),
            micro_batches=tuple(
                tuple(tuple(sorted(chain.from_iterable(map(names, one.members)))) for one in row)
                for row in rows
            ),
            shares={
                sample: one.width
                for one in chain.from_iterable(rows)
                if one.width > 1
                for sample in chain.from_iterable(map(names, one.members))
            },
            loads=tuple(tuple(one.load for one in row) for row in rows),
            overhead=overhead,
        )
