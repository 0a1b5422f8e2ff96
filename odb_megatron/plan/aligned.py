"""Selection for balance scope `microbatch`: every micro-batch has a cost of its own to meet.

Pure. Micro-batch k should cost the same on every replica, so samples that cost more than a full
ordinary micro-batch are released by all replicas in the same step, each into a micro-batch of an
agreed height; the other micro-batches are alike. Nothing passes its height but what must go.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.packing import Caps
from odb_megatron.plan.selection import Aim, Selection, oldest_first
from odb_megatron.plan.window import Column

__all__ = ["select_aligned"]

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_FILL_TRIES = 12
_SLACK = 6
_LEAST_SLACK, _MOST_SLACK = 1 << 13, 1 << 18  # of 1 << 20
_CLOSE_ENOUGH = 1000  # a gap below 1/1000 of a micro-batch's height is left


def select_aligned(
    rows: Integers, due: Flags, *, pressing: Flags, aim: Aim, caps: Caps
) -> Selection | None:
    """Select samples and pack them into micro-batches of given costs.

    Args:
        rows: the window's oldest samples, int64 [len(Column), samples].
        due: which of them must go.
        pressing: which of the large ones go before larger ones, those due among them.
        aim: what to reach; needs a micro-batch count above the number of heights.
        caps: limits of a micro-batch.

    Returns:
        The selection, micro-batches by falling target; None where what must go does not fit so.
    """
    count, heights = aim.num_micro_batches, aim.heights
    assert count is not None
    assert count > len(heights)
    level = max(1, (aim.cost - sum(heights)) // (count - len(heights)))
    bins = _Bins(rows, caps, [*heights, *[level] * (count - len(heights))])
    _place_large(bins, pressing, heights, level)
    for slot in _falling(rows[Column.COST], np.flatnonzero(due & ~bins.chosen)):
        if not bins.place(slot, must=True):
            return None
    usable = np.flatnonzero(~bins.chosen & (rows[Column.COST] <= level))
    if len(usable):
        part = rows[:, usable]
        rate = max(1, int(part[Column.COST].sum()) // max(1, int(part[Column.PADDED].sum())))
        cost = bins.missing(rate, slack=_slack(part[Column.PADDED], caps.token_budget))
        ordinary = replace(aim, cost=cost, tokens=bins.tokens(cost // rate), cost_per_token=rate)
        none = np.zeros(len(usable), dtype=np.bool_)
        wanted = oldest_first(part, none, ordinary)
        bins.place_all(_falling(rows[Column.COST], usable[wanted]))
        by_cost = _ByCost(rows, usable)
        for index in range(count):
            bins.fill(index, by_cost)
            bins.swap(index, by_cost, due)
    large = rows[Column.COST][bins.chosen & (rows[Column.COST] > level)]
    return Selection(
        num_large=len(large),
        cost_large=int(large.sum()),
        chosen=bins.chosen,
        micro_batches=[slots for slots in bins.slots if slots],
        missing=sum(max(0, gap) for gap in bins.gaps[len(heights) :]),
    )


class _Bins:
    """Micro-batches with a target cost each."""

    def __init__(self, rows: Integers, caps: Caps, targets: list[int]) -> None:
        self._rows = rows
        self._costs: Integers = rows[Column.COST]
        self._padded: Integers = rows[Column.PADDED]
        self._patches: Integers = rows[Column.PATCHES]
        self._caps = caps
        self.gaps = list(targets)
        self._targets = targets
        self.rooms = [caps.token_budget] * len(targets)
        self._used = [0] * len(targets)
        self.slots: list[list[int]] = [[] for _ in targets]
        self.chosen: Flags = np.zeros(rows.shape[1], dtype=np.bool_)

    def put(self, slot: int, index: int) -> None:
        """Add a sample to a micro-batch."""
        self._change(slot, index, 1)
        self.slots[index].append(slot)
        self.chosen[slot] = True

    def place_all(self, slots: list[int]) -> None:
        """Place samples one after the other where they fit; see `place`."""
        gaps, rooms, members = self.gaps, self.rooms, self.slots
        used, cap = self._used, self._caps.max_patches
        part = self._rows[:, slots]
        costs, lengths = part[Column.COST].tolist(), part[Column.PADDED].tolist()
        patches = part[Column.PATCHES].tolist()
        placed = []
        for slot, cost, length, more in zip(slots, costs, lengths, patches, strict=True):
            most = max(gaps)
            if cost > most:
                continue
            index = gaps.index(most)
            if length > rooms[index] or (cap and used[index] + more > cap):
                self.place(slot)
                continue
            gaps[index] = most - cost
            rooms[index] -= length
            used[index] += more
            members[index].append(slot)
            placed.append(slot)
        self.chosen[placed] = True

    def place(self, slot: int, *, must: bool = False) -> bool:
        """Add a sample where most cost is missing; without `must` only where it fits the gap."""
        order = sorted(range(len(self.gaps)), key=lambda index: (-self.gaps[index], index))
        for index in order:
            if not must and self._costs[slot] > self.gaps[index]:
                return False
            if self._has_room(slot, index):
                self.put(slot, index)
                return True
        return False

    def missing(self, rate: int, *, slack: int) -> int:
        """Return the cost that ordinary samples of `rate` per token can still add.

        Not all of a room is counted: what is wanted and finds no place is the shortest, and left
        behind it would gather in the window until one step takes far too much of it.
        """
        most = [
            min(max(gap, 0), max(room, 0) * rate * ((1 << 20) - slack) >> 20)
            for gap, room in zip(self.gaps, self.rooms, strict=True)
        ]
        return max(1, sum(most))

    def tokens(self, wanted: int) -> int:
        """Return the tokens ordinary samples should have, at most what the rooms hold."""
        free = sum(max(room, 0) for room in self.rooms)
        return max(1, min(wanted, free * 127 // 128))

    def fill(self, index: int, usable: _ByCost) -> None:
        """Close a micro-batch's gap with the largest samples that fit it."""
        at = 0
        for _ in range(_FILL_TRIES):
            gap, room = self.gaps[index], self.rooms[index]
            if gap * _CLOSE_ENOUGH <= self._targets[index]:
                return
            at = max(at, usable.first(cost=gap, length=room))
            while at < len(usable.slots) and (
                self.chosen[usable.slots[at]] or -usable.lengths[at] > room
            ):
                at += 1
            if at == len(usable.slots) or not self._has_room(usable.slots[at], index):
                return
            self.put(usable.slots[at], index)

    def swap(self, index: int, usable: _ByCost, due: Flags) -> None:
        """Exchange one sample of a micro-batch for one outside, where that closes its gap most."""
        gap = self.gaps[index]
        if gap * _CLOSE_ENOUGH <= self._targets[index]:
            return
        inside = np.array([slot for slot in self.slots[index] if not due[slot]], dtype=np.int64)
        outside = usable.rising[~self.chosen[usable.rising]]
        if not len(inside) or not len(outside):
            return
        costs, padded = self._costs, self._padded
        best = costs[outside].searchsorted(costs[inside] + gap, side="right") - 1
        partner = outside[np.maximum(best, 0)]
        gain = costs[partner] - costs[inside]
        gain[(best < 0) | (padded[partner] - padded[inside] > self.rooms[index])] = 0
        at = int(gain.argmax())
        if gain[at] <= 0:
            return
        old, new = int(inside[at]), int(partner[at])
        patches = int(self._patches[new] - self._patches[old])
        if self._caps.max_patches and self._used[index] + patches > self._caps.max_patches:
            return
        self._change(old, index, -1)
        self.slots[index].remove(old)
        self.chosen[old] = False
        self.put(new, index)

    def _has_room(self, slot: int, index: int) -> bool:
        if not self.slots[index]:
            return True
        patches = self._used[index] + self._patches[slot]
        cap = self._caps.max_patches
        return self._padded[slot] <= self.rooms[index] and (not cap or patches <= cap)

    def _change(self, slot: int, index: int, sign: int) -> None:
        self.gaps[index] -= sign * int(self._costs[slot])
        self.rooms[index] -= sign * int(self._padded[slot])
        self._used[index] += sign * int(self._patches[slot])


class _ByCost:
    """Samples that ordinary micro-batches may take, sorted once.

    Attributes:
        slots: by falling cost.
        lengths: theirs, negative.
        rising: the slots by rising cost.
    """

    def __init__(self, rows: Integers, usable: npt.NDArray[np.intp]) -> None:
        costs = rows[Column.COST][usable]
        self.rising = usable[costs.argsort(kind="stable")]
        falling = (-costs).argsort(kind="stable")
        lengths = -rows[Column.PADDED][usable[falling]]
        self.slots: list[int] = usable[falling].tolist()
        self.lengths: list[int] = lengths.tolist()
        self._costs: list[int] = (-costs[falling]).tolist()
        self._falls_in_length = bool((lengths[1:] >= lengths[:-1]).all())

    def first(self, *, cost: int, length: int) -> int:
        """Return an index before which every sample costs more or, if that is known, is longer."""
        at = bisect_left(self._costs, -cost)
        return max(at, bisect_left(self.lengths, -length)) if self._falls_in_length else at


def _place_large(bins: _Bins, pressing: Flags, heights: tuple[int, ...], level: int) -> None:
    """Put samples that press into the least heights that fit them, then the largest into others."""
    costs = bins._rows[Column.COST]
    large = np.flatnonzero(costs > level)
    free = list(range(len(heights)))
    for is_pressing in (True, False):
        for slot in _falling(costs, large[pressing[large] == is_pressing]):
            fitting = [index for index in free if costs[slot] <= heights[index]]
            if fitting:
                index = fitting[-1 if is_pressing else 0]
                bins.put(slot, index)
                free.remove(index)


def _slack(padded: Integers, token_budget: int) -> int:
    """Return the share of a room that is not counted on, of 1 << 20.

    So many squares of the share that the sample of a typical token has in the budget (measured,
    lognormal lengths: with less, short samples gather; with more, long ones fill the gaps).
    """
    typical = int((padded * padded).sum()) // max(1, int(padded.sum()))
    share = (typical << 10) // token_budget
    return min(_MOST_SLACK, max(_LEAST_SLACK, _SLACK * share * share))


def _falling(costs: Integers, slots: npt.NDArray[np.intp]) -> list[int]:
    order: list[int] = slots[np.argsort(-costs[slots], kind="stable")].tolist()
    return order
