"""Reassigns positions near the end of a run: what one replica holds too much, another fetches.

Pure, integers only; online assignment. No payload moves: a replica that is left with more than its
share of the run's rest names one sample that it holds, and the replica with the least fetches it
anew. Must not change what a step emits, nor the number of positions anyone is left with in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.draw import Holdings
from odb_megatron.plan.records import RecordTable, WindowRecord
from odb_megatron.plan.window import Column

__all__ = [
    "OFFERS",
    "EndLoads",
    "Reassignment",
    "end_loads",
    "holdings_after",
    "offers",
    "reassign",
]

Integers = npt.NDArray[np.int64]

OFFERS = ("offer_0", "offer_1", "offer_2", "offer_3")
"""Fields of a window record, the costliest sample first."""

_COST_SHIFT = 16  # an offer's cost is rounded down to that of a token, so that it fits beside
_COST_BITS = 24  # the position
_COST_MASK = (1 << _COST_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLoads:
    """What replicas are expected to have left, in cost.

    Attributes:
        level: of each, if all that is left were shared evenly.
        lowest: of the replica with the least, by what it has been assigned.
    """

    level: int = 0
    lowest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """A position that goes to another replica.

    Attributes:
        position: the stream position.
        cost: its cost.
        giver: the replica that holds it.
        taker: the replica that fetches it.
    """

    position: int
    cost: int
    giver: int
    taker: int


def end_loads(loads: Integers, *, num_unassigned: int, each: int) -> EndLoads:
    """Return what follows from what all replicas have been assigned.

    Args:
        loads: cost of what each replica has left, int64 [replicas].
        num_unassigned: positions not assigned to anyone.
        each: expected cost of one position.
    """
    total = sum(loads.tolist()) + num_unassigned * each
    return EndLoads(level=total // len(loads), lowest=int(loads.min()))


def offers(rows: Integers, *, load: int, ends: EndLoads, each: int) -> dict[str, int]:
    """Return the fields of a window record that offer samples; none without an excess.

    The costliest that neither pass what is left of the excess nor half the distance to the replica
    with the least. What is late already stays: its delay is counted where it is held.

    Args:
        rows: the samples held, int64 [len(Column), samples].
        load: cost of what this replica has left.
        ends: of all replicas.
        each: expected cost of one position, at least 1.
    """
    excess, most = load - ends.level, (load - ends.lowest) // 2
    found: dict[str, int] = {}
    if excess <= each:
        return found
    costs = np.where(rows[Column.DUE] < 0, rows[Column.COST] >> _COST_SHIFT, 0)
    falling = (-costs).argsort(kind="stable")
    costs = costs[falling]
    at = 0
    for name in OFFERS:
        at = max(at, int((-costs).searchsorted(-(min(excess, most) >> _COST_SHIFT))))
        if at == len(costs) or not costs[at]:
            break
        cost = int(costs[at])
        found[name] = int(rows[Column.POSITION, falling[at]]) << _COST_BITS | cost
        excess -= cost << _COST_SHIFT
        at += 1
    return found


def reassign(
    table: RecordTable[WindowRecord], holdings: Holdings, *, num_unassigned: int, each: int
) -> list[Reassignment]:
    """Return who gives which position to whom, from all replicas' offers.

    The replica with the most left gives first, to the one with the least, where that lowers the
    larger of the two.

    Args:
        table: first records of a step.
        holdings: what each replica holds.
        num_unassigned: positions not assigned to anyone.
        each: expected cost of one position, at least 1.
    """
    if not table.column(OFFERS[0]).any():
        return []
    offered = np.stack([table.column(name) for name in OFFERS])
    givers = np.flatnonzero(offered.any(axis=0))
    loads = holdings.loads(each)
    level = end_loads(loads, num_unassigned=num_unassigned, each=each).level
    heap = [(load, replica) for replica, load in enumerate(loads.tolist()) if load <= level]
    heapify(heap)
    found: list[Reassignment] = []
    for giver in givers[np.argsort(-loads[givers], kind="stable")].tolist():
        load = int(loads[giver])
        for offer in offered[:, giver].tolist():
            if not offer or not heap or load - level <= each:
                break
            position, cost = offer >> _COST_BITS, (offer & _COST_MASK) << _COST_SHIFT
            least, taker = heap[0]
            if least + cost >= load:
                continue
            heapreplace(heap, (least + cost, taker))
            load -= cost
            found.append(Reassignment(position=position, cost=cost, giver=giver, taker=taker))
    return found


def holdings_after(holdings: Holdings, moves: Sequence[Reassignment]) -> Holdings:
    """Return what each replica holds after some positions have gone to others."""
    if not moves:
        return holdings
    num, cost = holdings.num_held.copy(), holdings.cost_held.copy()
    for move in moves:
        num[move.giver] -= 1
        num[move.taker] += 1
        cost[move.giver] -= move.cost
        cost[move.taker] += move.cost
    return Holdings(num_held=num, cost_held=cost, num_upcoming=holdings.num_upcoming)
