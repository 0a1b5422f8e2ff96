"""Which replica trains which samples of a step, in which of its M micro-batches.

Pure, integers only: from the same table every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
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

CUT = 75
_DENSITIES = (95, 80, 65, 50)  # percent; finer steps gain less than .001 of the bound


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
        rows = units.plan(num_replicas, count, sync=sync)
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
        units.keep_at_home(rows, np.asarray(owner).tolist(), by_step=sync == "step")
    return units.named(rows, cost.fixed)


@dataclass(slots=True)
class _Bin:
    """A micro-batch, of one replica or shared by `width`. Room and load are those of a replica."""

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
        """Return the tokens of a unit's part; of a group's at most."""
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

    def plan(self, num_replicas: int, count: int, *, sync: Sync) -> list[list[_Bin]] | None:
        """Return `bins[replica][m]`, or None where no plan of so many micro-batches is found."""
        prices, sizes, widest = self.arrays
        if sync == "microbatch" or ((widest > 1) & ((prices * num_replicas > self.total) | (sizes > self.room[0]))).any():
            return self.by_index(num_replicas, count, sync=sync)
        replicas = self.bins(num_replicas, times=count)
        if not self.spread(range(len(self.prices)), replicas, self.prices):
            return None
        rows = []
        for replica in replicas:
            row = self.bins(count)
            if not self.pack(replica.members, row, self.sizes): return None
            rows.append(row)
        return rows

    def bins(self, count: int, *, times: int = 1) -> list[_Bin]:
        return [_Bin(self.room[0] * times, self.room[1] * times) for _ in range(count)]

    def by_index(self, R, M, sync):
        best = None
        many = max(self.widest, default=1) > 1 and M > 1
        for density in _DENSITIES if many else (100,):
            found = self.costly(R, M, density, best and best[0])
            if found is not None:
                best = found
                if not found[1]: break
        if best is None: return None
        _, columns, left = best
        rest = self.bins(R * (M - len(columns)))
        if not self.pack(left, rest, self.prices): return None
        singles = rest + [one for column in columns for one in column if one.width == 1]
        self.split(singles)
        singles.sort(key=lambda one: -one.load)
        at = 0; out = []
        for m in range(M):
            col = []
            if m < len(columns):
                for one in sorted(columns[m], key=lambda one: -one.width):
                    if one.width > 1: col += [one] * one.width
            n = R - len(col)
            out.append(col + singles[at:at + n]); at += n
        rows = [list(row) for row in zip(*out, strict=True)]
        return rows

    def costly(self, R, M, density, limit):
        """Fill micro-batch indices whose height a single sample sets."""
        prices, sizes, widest = self.arrays
        left = np.arange(len(prices)); columns = []; time = 0
        for m in range(M):
            c, t = prices[left], sizes[left]
            level = -(-int(c.sum()) // (R * (M - m)))
            if limit is not None and time + level * (M - m) >= limit: return None
            if not len(left): break
            if c[0] <= level and t.max() <= self.room[0]:
                if int(t.sum()) > R * self.room[0] * (M - m): return None
                return time + level * (M - m), columns, left.tolist()
            end = int(np.searchsorted(np.cumsum(t), R * self.room[0], side="right"))
            dense = int(c[:end].sum()) // R
            whole = int(c[widest[left] == 1].max(initial=0))
            height = max(level, min(int(c[0]), dense * density // 100), whole)
            wide = []; free = R
            for unit in left[(c > height) | (t > self.room[0])].tolist():
                k = 2
                while k < self.widest[unit] and (self.price(unit, k) > height or self.size(unit, k) > self.room[0]): k *= 2
                if k <= free:
                    free -= k
                    wide.append(_Bin(self.room[0] - self.size(unit, k), self.room[1] - self.images[unit], k, self.price(unit, k), [unit]))
            taken = [one.members[0] for one in wide]
            left = np.setdiff1d(left, taken)
            bins = wide + self.bins(free)
            if m == M - 1:
                if len(left) and sizes[left].max() > self.room[0]: return None
                if not self.spread(left.tolist(), bins, self.prices): return None
                left = left[:0]
            else:
                left = np.array(self.top_up(left.tolist(), bins, height), dtype=np.int64)
            columns.append(bins); time += max(one.load for one in bins)
        return None if len(left) or (limit is not None and time >= limit) else (time, columns, [])

    def top_up(self, units, bins, height):
        over = 100 + SHARE_OVERHEAD
        heap = [((b.load - height) * (over if b.width == 1 else 100 * b.width), x) for x, b in enumerate(bins)]
        heapq.heapify(heap); parked = []; left = []
        prices, sizes = self.prices, self.sizes
        for i in units:
            c = prices[i] * over; t = sizes[i]
            while parked and -parked[0][0] >= t:
                _, x, key = heapq.heappop(parked); heapq.heappush(heap, (key, x))
            skipped = []; ok = False
            while heap and c <= -heap[0][0]:
                key, x = heapq.heappop(heap); b = bins[x]
                need = t if b.width == 1 else self.size(i, b.width)
                if need > b.room: heapq.heappush(parked, (-b.room * b.width, x, key))
                elif self.images[i] > b.images: skipped.append((key, x))
                else: ok = True; break
            if ok:
                b.room -= need; b.images -= self.images[i]; b.members.append(i)
                b.load += self.price(i, b.width)
                heapq.heappush(heap, ((b.load - height) * (over if b.width == 1 else 100 * b.width), x))
            else: left.append(i)
            for e in skipped: heapq.heappush(heap, e)
        return left

    def spread(self, units, bins, prices):
        heap = [(b.load, x) for x, b in enumerate(bins)]
        heapq.heapify(heap); parked = []
        sizes, images = self.sizes, self.images
        for i in units:
            t = sizes[i]
            while parked and -parked[0][0] >= t:
                x = heapq.heappop(parked)[1]; heapq.heappush(heap, (bins[x].load, x))
            skipped = []
            while heap:
                x = heap[0][1]; b = bins[x]
                need = t if b.width == 1 else self.size(i, b.width)
                if need > b.room:
                    heapq.heappop(heap); heapq.heappush(parked, (-b.room * b.width, x))
                elif images[i] > b.images: skipped.append(heapq.heappop(heap))
                else: break
            else: return False
            b.load += prices[i] if b.width == 1 else self.price(i, b.width)
            b.room -= need; b.images -= images[i]; b.members.append(i)
            heapq.heapreplace(heap, (b.load, x))
            for e in skipped: heapq.heappush(heap, e)
        return True

    def pack(self, units, bins, keys):
        units = list(units) if keys is self.prices else sorted(units, key=lambda u: -self.sizes[u])
        for num in (len(units), len(units) * CUT // 100, 0):
            if self.spread(units[:num], bins, keys) and self.brim(sorted(units[num:], key=lambda u: -self.sizes[u]), bins): break
            for b in bins: b.room, b.images = self.room; b.load = 0; b.members = []
        else:
            return False
        for b in bins: b.load = sum(map(self.prices.__getitem__, b.members))
        self.split(bins)
        return True

    def brim(self, units, bins):
        falling = [-self.sizes[u] for u in units]; n = len(units)
        after = list(range(n + 1))
        def alive(at):
            while after[at] != at:
                after[at] = after[after[at]]; at = after[at]
            return at
        num = 0
        for b in bins:
            at = 0
            while True:
                at = alive(max(at, bisect_left(falling, -b.room)))
                if at == n: break
                u = units[at]
                if self.images[u] <= b.images:
                    b.room -= self.sizes[u]; b.images -= self.images[u]; b.members.append(u); after[at] = at + 1; num += 1
                at += 1
        return num == n

    def split(self, bins):
        pass

    def named(self, rows, overhead):
        return StepPlan(
            num_micro_batches=len(rows[0]),
            micro_batches=tuple(tuple(tuple(sorted(chain.from_iterable(map(self.samples.__getitem__, b.members)))) for b in row) for row in rows),
            shares={i: b.width for row in rows for b in row if b.width > 1 for u in b.members for i in self.samples[u]},
            loads=tuple(tuple(b.load for b in row) for row in rows), overhead=overhead)
