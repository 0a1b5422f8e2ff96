"""Which samples of its window a replica emits, so that a step costs the same on all replicas.

Pure. Must not see other replicas: the common target comes in as an `Aim`. What must go goes;
then the oldest, long samples held back or brought forward just so far that cost and tokens both
come out; then the largest that fits what cost is missing; then one swap at a time.

Keys are floats, computed element by element and never summed, so they are the same on any CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.packing import Caps, MicroBatchRooms
from odb_megatron.plan.window import Column

__all__ = ["Aim", "Selection", "oldest_first", "select"]

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_SEARCH_STEPS = 6
_SKIPS = 4
_GOOD_PREFIX = 64  # a prefix that misses less than 1/64 of the cost is good enough
_FILL_TRIES = 96
_CLOSE_ENOUGH = 5000  # a gap below 1/5000 of the target cost is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What one replica's selection should come to.

    Attributes:
        cost: cost to reach and not to pass (what must go may pass it).
        tokens: padded tokens wanted beside it.
        cost_per_token: what an average token costs; a sample's *excess* is its cost beyond that.
        num_micro_batches: pack into at most so many; None for as many as needed.
        hold: ranks by which a sample of excess `cost` may be held back or brought forward.
        heights: costs of the micro-batches that take large samples, descending (scope
            `microbatch`).
    """

    cost: int
    tokens: int
    cost_per_token: int
    num_micro_batches: int | None
    hold: int
    heights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a replica emits.

    Attributes:
        chosen: marks among the oldest `len(chosen)` samples of the window.
        micro_batches: slots into the same, per micro-batch; None to be packed by the caller.
        missing: cost by which ordinary micro-batches stay below theirs (scope `microbatch`).
        num_large: samples that cost more than an ordinary micro-batch (scope `microbatch`).
        cost_large: what they cost.
    """

    chosen: Flags
    micro_batches: list[list[int]] | None = None
    missing: int = 0
    num_large: int = 0
    cost_large: int = 0


def select(rows: Integers, due: Flags, *, aim: Aim, caps: Caps) -> Selection:
    """Select and pack.

    Args:
        rows: the window's oldest samples, int64 [len(Column), samples].
        due: which of them must go.
        aim: what to reach.
        caps: limits of a micro-batch.
    """
    wanted = oldest_first(rows, due, aim)
    packing = _Packing(rows, caps, aim.num_micro_batches)
    padded = rows[Column.PADDED]
    for group in (due, wanted):
        slots = np.flatnonzero(group)
        packing.place_all(slots[(-padded[slots]).argsort(kind="stable")])
    assert packing.chosen[due].all(), "samples that are due do not fit: the target is wrong"
    _fill(packing, aim.cost)
    _swap(packing, due, aim.cost)
    _swap(packing, due, aim.cost)
    return Selection(chosen=packing.chosen, micro_batches=packing.micro_batches())


class _Packing:
    """Samples chosen so far and where they are."""

    def __init__(self, rows: Integers, caps: Caps, count: int | None) -> None:
        self.costs = rows[Column.COST]
        self.padded = rows[Column.PADDED]
        self.patches = rows[Column.PATCHES]
        self.rooms = MicroBatchRooms(caps, count=count)
        self.cost = 0
        self.rising: npt.NDArray[np.intp] = self.costs.argsort(kind="stable")
        self.where: Integers = np.full(rows.shape[1], -1, dtype=np.int64)
        self._patches: list[int] | None = self.patches.tolist() if caps.max_patches else None

    @property
    def chosen(self) -> Flags:
        """Which samples have a place."""
        flags: Flags = self.where >= 0
        return flags

    def place(self, slot: int) -> bool:
        """Find a place for a sample; return whether there was one."""
        patches = self._patches[slot] if self._patches is not None else 0
        index = self.rooms.place(int(self.padded[slot]), patches)
        if index < 0:
            return False
        self.where[slot] = index
        self.cost += int(self.costs[slot])
        return True

    def place_all(self, slots: npt.NDArray[np.intp]) -> None:
        """Find places for samples, in their order."""
        if self._patches is not None:
            for slot in slots.tolist():
                self.place(slot)
            return
        places = np.array(self.rooms.place_all(self.padded[slots].tolist()), dtype=np.int64)
        self.where[slots] = places
        self.cost += int(self.costs[slots[places >= 0]].sum())

    def micro_batches(self) -> list[list[int]]:
        """Return the slots of each micro-batch that is not empty."""
        bins: list[list[int]] = [[] for _ in range(self.rooms.num_micro_batches)]
        slots = np.flatnonzero(self.chosen)
        for slot, index in zip(slots.tolist(), self.where[slots].tolist(), strict=True):
            bins[index].append(slot)
        return [found for found in bins if found]


def oldest_first(rows: Integers, due: Flags, aim: Aim) -> Flags:
    """Choose, beside what is due, the oldest up to the cost: long ones shifted for the tokens."""
    chosen = np.zeros(rows.shape[1], dtype=np.bool_)
    cost = aim.cost - int(rows[Column.COST][due].sum())
    wanted = aim.tokens - int(rows[Column.PADDED][due].sum())
    usable = np.flatnonzero(~due & (rows[Column.COST] <= cost))
    if not len(usable):
        return chosen
    costs, padded = rows[Column.COST][usable], rows[Column.PADDED][usable]
    excess = costs.astype(np.float64) - np.float64(aim.cost_per_token) * padded
    shift = excess * (np.float64(aim.hold) / np.float64(max(1, aim.cost)))
    ranks = np.arange(len(usable), dtype=np.float64)
    low, high = -1.0, 1.0
    best: npt.NDArray[np.intp] | None = None
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        picked, gap = _prefix(costs, ranks - shift * middle, cost)
        off = int(padded[picked].sum()) + gap // aim.cost_per_token - wanted
        if off > 0:
            low = middle
            continue
        high, best = middle, picked
        if -off * 64 < aim.tokens:
            break
    if best is None:
        best, _ = _prefix(costs, ranks - shift * high, cost)
    chosen[usable[best]] = True
    return chosen


def _prefix(
    costs: Integers, keys: npt.NDArray[np.float64], cost: int
) -> tuple[npt.NDArray[np.intp], int]:
    """Pick in the order of the keys up to `cost`, going on behind what is too large to fit.

    Returns:
        What was picked, and the cost that is missing.
    """
    order = keys.argsort(kind="stable")
    picked, gap = [], cost
    for _ in range(_SKIPS):
        sums = costs[order].cumsum()
        taken = int(sums.searchsorted(gap, side="right"))
        if taken:
            picked.append(order[:taken])
            gap -= int(sums[taken - 1])
        order = order[taken + 1 :]
        if not len(order) or gap * _GOOD_PREFIX < cost:
            break
        order = order[costs[order] <= gap]
    return np.concatenate(picked) if picked else order[:0], max(0, gap)


def _fill(packing: _Packing, cost: int) -> None:
    """Close the gap to `cost`: again and again the largest sample that fits it and has a room."""
    rising = packing.rising
    fits = ~packing.chosen[rising] & (packing.costs[rising] <= cost - packing.cost)
    order = rising[fits][::-1]
    falling_costs, falling_lengths = -packing.costs[order], -packing.padded[order]
    is_sorted = bool((falling_lengths[1:] >= falling_lengths[:-1]).all())
    at, gap = 0, cost - packing.cost
    for _ in range(_FILL_TRIES):
        at = max(at, int(falling_costs.searchsorted(-gap)))
        if is_sorted:
            at = max(at, int(falling_lengths.searchsorted(-packing.rooms.largest)))
        if at >= len(order) or gap * _CLOSE_ENOUGH <= cost:
            break
        packing.place(int(order[at]))
        gap = cost - packing.cost
        at += 1


def _swap(packing: _Packing, due: Flags, cost: int) -> None:
    """Exchange one chosen sample for one that is not, where that brings the cost closest."""
    gap = cost - packing.cost
    inside = np.flatnonzero(packing.chosen & ~due)
    outside = packing.rising[~packing.chosen[packing.rising]]
    if gap * _CLOSE_ENOUGH <= cost or not len(inside) or not len(outside):
        return
    best = np.searchsorted(packing.costs[outside], packing.costs[inside] + gap, side="right") - 1
    partner = outside[np.maximum(best, 0)]
    gain = packing.costs[partner] - packing.costs[inside]
    more = packing.padded[partner] - packing.padded[inside]
    free = np.array(packing.rooms.by_micro_batch(), dtype=np.int64)
    gain[(best < 0) | (more > free[packing.where[inside]])] = 0
    at = int(gain.argmax())
    if gain[at] <= 0:
        return
    old, new, index = int(inside[at]), int(partner[at]), int(packing.where[inside[at]])
    patches = int(packing.patches[new] - packing.patches[old])
    if not packing.rooms.accepts(index, num_patches=patches):
        return
    packing.rooms.exchange(index, tokens=int(more[at]), num_patches=patches)
    packing.where[old], packing.where[new] = -1, index
    packing.cost += int(gain[at])
