"""One replica's positions: dealt out while the run goes on, or fixed from the start.

Pure. Three kinds of shard with the same methods; the planner does not ask which it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import DrawLimits, Holdings, deal, held_goal, own_positions

__all__ = ["FixedShard", "OnlineShard", "OpenShard", "Shard", "make_shard"]

Integers = npt.NDArray[np.int64]


class Shard(Protocol):
    """Where a replica's positions come from."""

    @property
    def cursor(self) -> int:
        """First position that is not assigned (online), or not drawn (fixed)."""

    @property
    def upcoming(self) -> Sequence[int]:
        """Positions assigned to this replica and not drawn, where that is part of the state."""

    @property
    def num_undrawn(self) -> int:
        """Positions known to be this replica's and not drawn."""

    @property
    def num_unassigned(self) -> int:
        """Positions that no replica has been given yet."""

    @property
    def is_own_known(self) -> bool:
        """Whether this replica has nothing left, or will get no more than it knows of."""

    def is_drained(self, undrawn: Integers) -> bool:
        """Whether some replica has nothing left to draw; `undrawn` is all replicas' number."""

    def draw(self, most: int, *, end: int, is_late: bool) -> list[int]:
        """Return the next positions, at most `most`, below `end`; `is_late`: inside a step."""

    def take_announced(self) -> list[int]:
        """Return positions assigned since the last call, in the order in which they are drawn."""

    def top_up(
        self, holdings: Holdings, *, each: int, is_late: bool = False, is_final: bool = False
    ) -> Integers:
        """Assign new positions to all replicas; return how many each gets."""

    def take_over(self, positions: Sequence[int]) -> None:
        """Take positions that other replicas held."""

    def end(self, position: int) -> None:
        """There is nothing at `position`, nor after it."""


def make_shard(
    config: PlanConfig, *, replica: int, cursor: int, upcoming: Sequence[int] = ()
) -> Shard:
    """Return a replica's shard of the kind in force."""
    if config.has_unknown_end:
        return OpenShard(config.num_replicas, cursor=cursor)
    if not config.is_online:
        return FixedShard(config.own_positions(replica), cursor=cursor)
    limits = DrawLimits(
        total=config.total,
        capacity=config.window + config.lead,
        batch=config.global_batch_size,
    )
    return OnlineShard(limits, replica=replica, cursor=cursor, upcoming=upcoming)


class FixedShard:
    """Positions that are a replica's from the start.

    Args:
        own: all of them.
        cursor: the next one to draw.
    """

    def __init__(self, own: range, *, cursor: int) -> None:
        self._own = own
        self._cursor = cursor

    @property
    def cursor(self) -> int:
        """See `Shard`."""
        return self._cursor

    @property
    def upcoming(self) -> Sequence[int]:
        """See `Shard`: they follow from the cursor."""
        return ()

    @property
    def num_undrawn(self) -> int:
        """See `Shard`."""
        return len(self._undrawn())

    @property
    def num_unassigned(self) -> int:
        """See `Shard`."""
        return 0

    @property
    def is_own_known(self) -> bool:
        """Whether this replica has nothing left to draw."""
        return self.num_undrawn == 0

    def is_drained(self, undrawn: Integers) -> bool:
        """See `Shard`."""
        return bool((undrawn == 0).any())

    def draw(self, most: int, *, end: int, is_late: bool) -> list[int]:
        """See `Shard`: inside a step only all that is left is drawn, at its end."""
        if is_late:
            return []
        positions = self._undrawn()[:most]
        positions = positions[: len(range(self._cursor, end, positions.step))]
        self._cursor += len(positions) * positions.step
        return list(positions)

    def take_announced(self) -> list[int]:
        """See `Shard`: none, they are known from the start."""
        return []

    def top_up(
        self, holdings: Holdings, *, each: int, is_late: bool = False, is_final: bool = False
    ) -> Integers:
        """See `Shard`: nothing to assign."""
        return np.zeros_like(holdings.num_held)

    def take_over(self, positions: Sequence[int]) -> None:
        """See `Shard`: a fixed shard takes nothing over."""
        raise AssertionError(f"positions {positions} belong to another fixed shard")

    def end(self, position: int) -> None:
        """See `Shard`: its end is known from the start."""
        raise AssertionError(f"position {position} is inside a shard of known length")

    def _undrawn(self) -> range:
        return range(self._cursor, self._own.stop, self._own.step)


class OpenShard:
    """Every `stride`-th position, up to an end that is not known before it is reached.

    Args:
        stride: number of replicas.
        cursor: the next position to draw; its remainder is the replica.
    """

    def __init__(self, stride: int, *, cursor: int) -> None:
        self._stride = stride
        self._cursor = self._front = cursor
        self._has_ended = False

    @property
    def cursor(self) -> int:
        """See `Shard`."""
        return self._cursor

    @property
    def upcoming(self) -> Sequence[int]:
        """See `Shard`: they follow from the cursor."""
        return ()

    @property
    def num_undrawn(self) -> int:
        """Positions not drawn: 1 stands for at least one, until the end is known."""
        return 0 if self._has_ended else 1

    @property
    def num_unassigned(self) -> int:
        """See `Shard`."""
        return 0

    @property
    def is_own_known(self) -> bool:
        """Whether the end has been reached."""
        return self._has_ended

    def is_drained(self, undrawn: Integers) -> bool:
        """See `Shard`."""
        return bool((undrawn == 0).any())

    def draw(self, most: int, *, end: int, is_late: bool) -> list[int]:
        """See `Shard`; `end` is relative to where the last step left this replica."""
        if is_late or self._has_ended:
            return []
        stop = min(self._cursor + most * self._stride, self._front + end)
        positions = list(range(self._cursor, stop, self._stride))
        self._cursor += len(positions) * self._stride
        return positions

    def take_announced(self) -> list[int]:
        """See `Shard`: none, items come in their own order."""
        return []

    def top_up(
        self, holdings: Holdings, *, each: int, is_late: bool = False, is_final: bool = False
    ) -> Integers:
        """See `Shard`: nothing to assign; a step begins here, or ends."""
        if not is_late:
            self._front = self._cursor
        return np.zeros_like(holdings.num_held)

    def take_over(self, positions: Sequence[int]) -> None:
        """See `Shard`: items cannot be taken from another replica's iterator."""
        raise AssertionError(f"positions {positions} are of another replica's iterator")

    def end(self, position: int) -> None:
        """See `Shard`; positions from `position` on count as not drawn."""
        assert position <= self._cursor, f"position {position} was not drawn yet"
        self._cursor, self._has_ended = position, True


class OnlineShard:
    """Positions of one stream, assigned while the run goes on; see `draw`.

    Args:
        limits: what assignment goes by, equal on all replicas.
        replica: which one this is.
        cursor: first position not assigned to anyone.
        upcoming: positions assigned to this replica and not drawn.
    """

    def __init__(
        self, limits: DrawLimits, *, replica: int, cursor: int, upcoming: Sequence[int] = ()
    ) -> None:
        self._limits = limits
        self._replica = replica
        self._cursor = cursor
        self._upcoming: deque[int] = deque(upcoming)
        self._announced: list[int] = list(upcoming)

    @property
    def cursor(self) -> int:
        """First position not assigned to anyone."""
        return self._cursor

    @property
    def num_unassigned(self) -> int:
        """Positions not assigned to anyone."""
        return max(0, self._limits.total - self._cursor)

    @property
    def upcoming(self) -> Sequence[int]:
        """Positions assigned to this replica and not drawn."""
        return self._upcoming

    @property
    def num_undrawn(self) -> int:
        """Positions known to be this replica's and not drawn."""
        return len(self._upcoming)

    @property
    def is_own_known(self) -> bool:
        """Whether this replica will get no more positions than those it knows of."""
        return self.num_unassigned == 0

    def is_drained(self, undrawn: Integers) -> bool:
        """Whether nothing is left to assign; it does not matter what the replicas have left."""
        del undrawn
        return self.num_unassigned == 0

    def draw(self, most: int, *, end: int, is_late: bool) -> list[int]:
        """Return the next positions, at most `most`: also inside a step, and wherever they lie."""
        del end, is_late
        return [self._upcoming.popleft() for _ in range(min(most, len(self._upcoming)))]

    def take_announced(self) -> list[int]:
        """Return positions assigned since the last call, in the order in which they are drawn."""
        announced, self._announced = self._announced, []
        return announced

    def top_up(
        self, holdings: Holdings, *, each: int, is_late: bool = False, is_final: bool = False
    ) -> Integers:
        """Assign new positions to all replicas and take this replica's part; return how many.

        A window that is full of cost waits with drawing, even if it holds few samples: so no
        replica runs so far ahead of the others that the end of the run could not make up for it.

        Args:
            holdings: what each replica holds.
            each: expected cost of one position, at least 1.
            is_late: see `held_goal`.
            is_final: assign everything that is left.
        """
        left = self.num_unassigned
        counts = np.zeros_like(holdings.num_held)
        if not left:
            return counts
        held = holdings.num_held + holdings.num_upcoming
        amount = left
        if not is_final:
            now = int(held.sum())
            capacity = self._limits.capacity
            goal = held_goal(
                left + now,
                capacity=capacity * len(held),
                batch=self._limits.batch,
                is_late=is_late,
            )
            amount = min(left, goal - now)
        if amount <= 0:
            return counts
        costs = holdings.loads(each)
        if is_final:
            caps = np.full_like(held, left)
        else:
            room = np.minimum(capacity - held, (capacity * each - costs) // each)
            caps = np.maximum(room, 0)
            amount = min(amount, int(caps.sum()))
        if amount:
            counts = deal(amount, costs=costs, caps=caps, each=each)
            positions = own_positions(counts, self._replica, first=self._cursor)
            self._upcoming.extend(positions)
            self._announced.extend(positions)
            self._cursor += amount
        return counts

    def take_over(self, positions: Sequence[int]) -> None:
        """Take positions that other replicas held; they are drawn last."""
        self._upcoming.extend(positions)
        self._announced.extend(positions)

    def end(self, position: int) -> None:
        """See `Shard`: the stream's end is known from the start."""
        raise AssertionError(f"position {position} is inside a stream of known length")
