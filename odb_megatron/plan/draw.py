"""Which replica gets which stream positions: online assignment, or fixed shards.

Pure. Online, all replicas share one order of positions and each computes the same assignment from
the same records: a replica gets as many new positions as it emitted, and when they run short, the
last ones go where the least cost remains. No payload moves. Fixed shards (`position % replicas`)
are for sources that are sharded already, and for the policy `samples`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord

__all__ = [
    "Assignment",
    "DrawLimits",
    "Holdings",
    "deal",
    "held_goal",
    "own_positions",
]

Integers = npt.NDArray[np.int64]

_MOST_KEPT = 2
"""Positions kept back when a run nears its end, at most, in batches."""

_KEPT_SCALE = 8
"""Percent of a batch; s steps before none is kept back, 4 ** s - 1 times as many are."""

_NONE_KEPT = 44
"""Nothing is kept back when so many 32nds of a batch remain; inside a step, half a batch more."""


class Assignment(Enum):
    """How stream positions come to replicas.

    ONLINE: by what each replica has emitted, for map-style data. FIXED: position modulo replicas.
    """

    ONLINE = "online"
    FIXED = "fixed"


def held_goal(remaining: int, *, capacity: int, batch: int, is_late: bool) -> int:
    """Return how many positions all replicas should hold, assigned and not emitted.

    `capacity`, as long as the run does not near its end. There some positions are kept back, so
    that they can go where they are needed when it is known how the windows turned out: two
    batches at first, then less and less, and none in the last step, so that what turns out
    costly can still go to another replica (`reassign`).

    Args:
        remaining: positions not yet emitted by anyone.
        capacity: what all replicas may hold.
        batch: positions per step.
        is_late: assigned inside a step, when the windows' costs are known.
    """
    steps = 32 * remaining // batch - _NONE_KEPT - 16 * is_late  # in sixteenths of a halving
    whole, part = min(steps >> 4, 16), steps & 15
    kept = batch * (16 + part) * _KEPT_SCALE
    kept = kept << whole if whole >= 0 else kept >> -whole
    kept = max(0, kept // 1600 - batch * _KEPT_SCALE // 100)
    kept = min(kept, batch * _MOST_KEPT)
    return min(capacity, remaining, max(batch * 5 // 4, remaining - kept))


def deal(amount: int, *, costs: Integers, caps: Integers, each: int) -> Integers:
    """Deal `amount` positions so that the lowest cost is raised first (water-filling).

    Args:
        amount: positions to deal; at most `caps.sum()`.
        costs: expected remaining cost of each replica, int64 [replicas].
        caps: most positions for each replica, int64 [replicas].
        each: expected cost of one position, at least 1.

    Returns:
        Positions per replica, int64 [replicas], summing to `amount`; ties go to lower replicas.
    """
    if amount >= int(caps.sum()):
        return caps.copy()
    base = costs // each  # levels in units of one position
    low, high = int(base.min()), int((base + caps).max())
    while low < high:  # the highest level that does not need more than `amount`
        middle = (low + high + 1) // 2
        if int(np.clip(middle - base, 0, caps).sum()) <= amount:
            low = middle
        else:
            high = middle - 1
    dealt: Integers = np.clip(low - base, 0, caps)
    left = amount - int(dealt.sum())
    open_ones = np.flatnonzero((dealt < caps) & (base + dealt <= low))
    order = np.argsort(costs[open_ones] - base[open_ones] * each, kind="stable")
    dealt[open_ones[order[:left]]] += 1
    return dealt


def own_positions(counts: Integers, replica: int, *, first: int) -> list[int]:
    """Return a replica's positions when everyone takes turns until each has its count.

    Args:
        counts: positions per replica.
        replica: whose positions.
        first: first position dealt.
    """
    own = int(counts[replica])
    if own == 0:
        return []
    ends = np.bincount(np.minimum(counts, own), minlength=own + 1)
    active = len(counts) - np.cumsum(ends)[:own]  # replicas in each turn
    before = np.bincount(np.minimum(counts[:replica], own), minlength=own + 1)
    ahead = replica - np.cumsum(before)[:own]  # lower replicas in each turn
    turns = first + np.concatenate(([0], np.cumsum(active)[:-1])) + ahead
    positions: list[int] = turns.tolist()
    return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLimits:
    """What online assignment goes by.

    Attributes:
        total: positions of the run.
        capacity: most positions a replica holds, in its window and assigned ahead.
        batch: positions per step.
    """

    total: int
    capacity: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What each replica holds, int64 [replicas] each.

    Attributes:
        num_held: samples in the window.
        cost_held: their cost.
        num_upcoming: positions assigned and not drawn.
    """

    num_held: Integers
    cost_held: Integers
    num_upcoming: Integers

    @classmethod
    def before(cls, table: RecordTable[WindowRecord]) -> Holdings:
        """Return what replicas hold when a step begins."""
        return cls(
            num_held=table.column("num_held"),
            cost_held=table.column("cost_held"),
            num_upcoming=table.column("num_undrawn"),
        )

    @classmethod
    def after(cls, table: RecordTable[PlanRecord]) -> Holdings:
        """Return what replicas hold after a step."""
        kept = table.column("num_kept")
        return cls(
            num_held=kept,
            cost_held=table.column("cost_kept"),
            num_upcoming=table.column("num_remaining") - kept,
        )

    def loads(self, each: int) -> Integers:
        """Return the cost of what each replica has left; `each`: expected cost of a position."""
        loads: Integers = self.cost_held + self.num_upcoming * each
        return loads
