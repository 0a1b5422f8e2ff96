"""Which replica gets which stream positions: online assignment, or fixed shards.

Pure. Online, all replicas share one order of positions and each computes the same assignment from
the same records: a replica gets as many new positions as it emitted, and when they run short, the
last ones go where the least cost remains. No payload moves. Fixed shards (`position % replicas`)
are for sources that are sharded already, and for the policy `samples`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

__all__ = ["Assignment", "OnlineShard", "deal", "held_goal", "own_positions"]

Integers = npt.NDArray[np.int64]

_KEPT_BACK = (3, 8)
"""Share of the remaining positions not yet assigned when they run short, after a step ..."""

_KEPT_BACK_LATE = (1, 8)
"""... and inside a step, after the replicas have told what their windows cost."""


class Assignment(Enum):
    """How stream positions come to replicas.

    ONLINE: by what each replica has emitted, for map-style data. FIXED: position modulo replicas.
    """

    ONLINE = "online"
    FIXED = "fixed"


def held_goal(remaining: int, *, capacity: int, least: int, is_late: bool) -> int:
    """Return how many positions all replicas should hold, assigned and not emitted.

    Up to `capacity`; near the end a share of what remains is kept back, so that the last
    positions are assigned when it is known which replicas need them.

    Args:
        remaining: positions not yet emitted by anyone.
        capacity: what all replicas may hold.
        least: hold at least so many (or all that remain), enough for the next step.
        is_late: assigned inside a step, when the windows' costs are known.
    """
    part, whole = _KEPT_BACK_LATE if is_late else _KEPT_BACK
    return min(capacity, remaining, max(least, remaining - remaining * part // whole))


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


class OnlineShard:
    """One replica's view of the assignment.

    Args:
        replica: which one.
        cursor: first position not assigned to anyone.
        upcoming: positions assigned to this replica and not drawn.
    """

    def __init__(self, replica: int, *, cursor: int, upcoming: Sequence[int] = ()) -> None:
        self._replica = replica
        self.cursor = cursor
        self.upcoming: deque[int] = deque(upcoming)
        self._announced: list[int] = list(upcoming)

    def assign(self, counts: Integers) -> None:
        """Take this replica's part of a deal."""
        positions = own_positions(counts, self._replica, first=self.cursor)
        self.upcoming.extend(positions)
        self._announced.extend(positions)
        self.cursor += int(counts.sum())

    def draw(self, most: int) -> list[int]:
        """Return the next positions, at most `most`."""
        return [self.upcoming.popleft() for _ in range(min(most, len(self.upcoming)))]

    def take_announced(self) -> list[int]:
        """Return positions assigned since the last call, in the order in which they are drawn."""
        announced, self._announced = self._announced, []
        return announced
