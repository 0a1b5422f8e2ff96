"""Which replica trains which samples of a step in which of M micro-batches.

Pure, integers only: from the same lengths every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["SHARE_OVERHEAD", "StepPlan", "plan_step"]

Integers = npt.NDArray[np.int64]
Sync = Literal["step", "microbatch"]

SHARE_OVERHEAD = 8
"""Percent that a sample costs more where it is cut over replicas, whose keys and values travel."""

FILL = (95, 85, 75, 65, 50, 0)  # percent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step of all replicas.

    Attributes:
        num_micro_batches: M, the same on every replica.
        micro_batches: `micro_batches[replica][m]` are indices of samples; () is idle. A sample
            that k replicas share stands in all of them, a*k to a*k + k - 1, at the same m.
        shares: k of each shared sample.
        loads: `loads[replica][m]` is the cost of these samples (of their parts), no overhead.
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
        fixed = self.num_micro_batches * self.overhead
        return tuple(sum(load) + fixed for load in self.loads)


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
    """Plan a step."""
    cost = cost or CostModel()
    real = np.asarray(lengths, dtype=np.int64)
    padded = -(-real // alignment) * alignment
    images = np.zeros_like(real) if patches is None else np.asarray(patches, dtype=np.int64)
    prices = cost.samples(padded, images)
    cap = max_patches or int(images.sum())
    order = np.argsort(-prices, kind="stable")
    step = _Step(
        prices=prices[order], sizes=padded[order], images=images[order], replicas=num_replicas,
        budget=token_budget, cap=cap, max_share=max_share, part=math.lcm(2, alignment), sync=sync,
    )
    count = max(min_micro_batches, -(-int(padded.sum()) // (num_replicas * token_budget)), 1)
    count = -(-count // count_multiple) * count_multiple
    best = None
    while True:
        low = int(prices.sum()) // num_replicas + count * cost.fixed
        if best is not None and best[0] <= low:
            break
        bins = step.plan(count)
        found = bins and (step.time(bins) + count * cost.fixed, count, bins)
        if best is not None and (found is None or found[0] >= best[0]):
            break
        if found is not None:
            best = found
        count += count_multiple
    _, count, rows = best
    names = order.tolist()
    shares = {names[i]: b.width for row in rows for b in row if b.width > 1 for i in b.members}
    return StepPlan(
        num_micro_batches=count,
        micro_batches=tuple(tuple(tuple(names[i] for i in b.members) for b in row) for row in rows),
        shares=shares,
        loads=tuple(tuple(b.load for b in row) for row in rows),
        overhead=cost.fixed,
    )


class Bin:
    def __init__(self, width, m, target, room, cap):
        self.width = width; self.m = m; self.target = target; self.load = 0; self.room = room; self.cap = cap; self.members = []


class _Step:
    def __init__(self, *, prices, sizes, images, replicas, budget, cap, max_share, part, sync):
        self.c = prices; self.t = sizes; self.p = images; self.R = replicas; self.B = budget; self.cap = cap
        self.k = 1
        while self.k * 2 <= min(max_share, replicas): self.k *= 2
        self.part = part; self.sync = sync
        self.cl = prices.tolist(); self.tl = sizes.tolist(); self.pl = images.tolist()
        self.cc = np.concatenate(([0], np.cumsum(prices))); self.ct = np.concatenate(([0], np.cumsum(sizes)))

    def price(self, i, k):
        return self.cl[i] if k == 1 else -(-self.cl[i] * (100 + SHARE_OVERHEAD) // (100 * k))
    def size(self, i, k):
        return self.tl[i] if k == 1 else -(-self.tl[i] // (k * self.part)) * self.part

    def time(self, rows):
        if self.sync == "step": return max(sum(b.load for b in row) for row in rows)
        return sum(max(row[m].load for row in rows) for m in range(len(rows[0])))

    def plan(self, M):
        R = self.R
        if self.sync == "step" and (self.k == 1 or (self.cl[0] <= self.cc[-1] // R and self.t.max() <= self.B)):
            reps = [Bin(1, 0, 0, M * self.B, M * self.cap) for _ in range(R)]
            if not self.spread(range(len(self.cl)), reps, self.cl): return None
            rows = []
            for rep in reps:
                row = [Bin(1, m, 0, self.B, self.cap) for m in range(M)]
                if not self.spread(sorted(rep.members, key=lambda i: -self.tl[i]), row, self.tl):
                    return None
                for b in row: b.load = sum(self.cl[i] for i in b.members)
                rows.append(row)
            return rows
        best = None
        for f in FILL if self.k > 1 else (100,):
            found = self.heights(M, f)
            if found is not None and (best is None or found[0] < best[0]): best = found
            if found is not None and found[3] == 0: break
        if best is None: return None
        est, bins, left, m = best
        if left:
            rest = [Bin(1, mm, 0, self.B, self.cap) for mm in range(m, M) for _ in range(R)]
            if not self.spread(left, rest, self.cl): return None
            bins = bins + rest
        rows = self.deal(bins, M)
        #print(M, est, self.time(rows), m)
        return rows

    def heights(self, M, f):
        R, n = self.R, len(self.cl); done = []; total = 0
        left = list(range(n))
        for m in range(M):
            if not left: return total, done, left, m
            c = self.c[left]; t = self.t[left]
            rest = int(c.sum())
            level = -(-rest // (R * (M - m)))
            top = int(c[0])
            if top <= level and t.max() <= self.B:
                if t.sum() > R * self.B * (M - m): return None
                return total + level * (M - m), done, left, m
            end = int(np.searchsorted(np.cumsum(t), R * self.B, side="right"))
            dense = int(c[:end].sum()) // R
            T = top
            bins = []; cols = 0; last = m == M - 1; shared = []
            if self.k > 1:
                T = max(level, min(top, dense * f // 100))
                for i in left:
                    if self.cl[i] <= T and (self.tl[i] <= self.B): break
                    k = 2
                    while k < self.k and (self.price(i, k) > T or self.size(i, k) > self.B): k *= 2
                    if cols + k > R: break
                    b = Bin(k, m, T, self.B - self.size(i, k), self.cap - self.pl[i])
                    b.load = self.price(i, k); b.members = [i]; bins.append(b); shared.append(i); cols += k
            bins += [Bin(1, m, T, self.B, self.cap) for _ in range(R - cols)]
            gone = set(shared)
            left = self.spread([i for i in left if i not in gone], bins, self.cl, capped=not last)
            if left is None: return None
            left = [] if left is True else left
            done += bins
            total += max(b.load for b in bins)
        return (total, done, left, M) if not left else None

    def spread(self, units, bins, prices, capped=False):
        heap = [(b.load - b.target, x) for x, b in enumerate(bins)]
        heapq.heapify(heap); parked = []; left = []
        for i in units:
            t, p = self.tl[i], self.pl[i]; c = prices[i]
            while parked and -parked[0][0] >= t:
                x = heapq.heappop(parked)[1]; heapq.heappush(heap, (bins[x].load - bins[x].target, x))
            skipped = []; ok = False
            while heap:
                g, x = heap[0]; b = bins[x]
                if b.width == 1: need = t; price = c
                else: need = self.size(i, b.width); price = self.price(i, b.width)
                if capped and g + price > 0: 
                    if b.width == 1: break
                    skipped.append(heapq.heappop(heap)); continue
                if need <= b.room:
                    if p <= b.cap: ok = True; break
                    skipped.append(heapq.heappop(heap))
                else:
                    heapq.heappop(heap); heapq.heappush(parked, (-b.room * b.width, x))
            if ok:
                b.load += price; b.room -= need; b.cap -= p; b.members.append(i)
                heapq.heapreplace(heap, (b.load - b.target, x))
            elif capped: left.append(i)
            else: return None
            for e in skipped: heapq.heappush(heap, e)
        return left if capped else True

    def deal(self, bins, M):
        R = self.R
        rows = [[None] * M for _ in range(R)]
        singles = sorted((b for b in bins if b.width == 1), key=lambda b: -b.load)
        wide = [[b for b in bins if b.width > 1 and b.m == m] for m in range(M)]
        at = 0
        for m in range(M):
            col = 0
            for b in sorted(wide[m], key=lambda b: -b.width):
                for r in range(col, col + b.width): rows[r][m] = b
                col += b.width
            for r in range(col, R):
                rows[r][m] = singles[at]; at += 1
        return rows
