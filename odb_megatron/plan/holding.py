"""What one replica holds: positions to draw, the window, and the counts that go with them.

Pure. It does not decide what is drawn or emitted, and knows nothing of other replicas beyond what
its shard is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.alignment import meet_count, needed_count
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Holdings
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.reassign import holdings_after, reassign
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.shard import Shard, make_shard
from odb_megatron.plan.state import restored_window, window_row
from odb_megatron.plan.step import Reassigned
from odb_megatron.plan.window import Column, SampleWindow, token_counts

__all__ = ["Holding"]

Integers = npt.NDArray[np.int64]


class Holding:
    """Shard and window of one replica.

    Args:
        config: equal on all replicas.
        replica: which one this is, as data.
        consumed: positions consumed before the run starts.

    Attributes:
        shard: positions not drawn.
        window: samples drawn and not emitted.
        num_recorded: arrivals that are in a window record.
        num_emitted: samples emitted.
        num_left_out: positions since the last step that emit nothing.
        num_bad: those of them whose records are bad.

    Raises:
        ValueError: a run with shards of its own cannot begin in the middle.
    """

    def __init__(self, config: PlanConfig, *, replica: int, consumed: int) -> None:
        self._config = config
        self._replica = replica
        self.window = SampleWindow()
        self._num_arrived = 0
        self.num_recorded = 0
        self.num_emitted = 0
        self.num_left_out = self.num_bad = 0
        cursor = _first_position(config, replica=replica, consumed=consumed)
        self.shard: Shard = make_shard(config, replica=replica, cursor=cursor)
        none = np.zeros(config.num_replicas, dtype=np.int64)
        self.shard.top_up(Holdings(num_held=none, cost_held=none, num_upcoming=none), each=1)

    def draw(self, most_held: int, *, end: int, is_late: bool) -> list[int]:
        """Return the positions to draw until the window has `most_held` samples; see `Shard`."""
        return self.shard.draw(max(0, most_held - len(self.window)), end=end, is_late=is_late)

    def observe(self, position: int, sample: tuple[int, ...]) -> None:
        """Take a drawn sample into the window, or count a position that emits nothing.

        Args:
            position: its stream position.
            sample: see `window_row`; no tokens means that it emits nothing.

        Raises:
            ValueError: a cost beyond the records.
        """
        if sample[0] == 0:
            self.leave_out(is_bad=False)
            return
        self.window.append(window_row(self._config, position, self._num_arrived, -1, sample))
        self._num_arrived += 1

    def leave_out(self, *, is_bad: bool) -> None:
        """See `ReplicaPlanner.leave_out`."""
        self.num_left_out += 1
        self.num_bad += is_bad

    def mark_recorded(self) -> None:
        """Note that a window record tells of all that has arrived."""
        self.num_recorded = self._num_arrived

    def set_cost(self, cost: CostModel) -> None:
        """Price the window anew; all of it is told again in the next window record.

        Raises:
            ValueError: a cost beyond the records; nothing has changed then.
        """
        self.window.reprice(cost)
        self._config = replace(self._config, cost=cost)
        self.num_recorded = 0

    def selected(self, selection: Selection) -> Integers:
        """Return the selected samples, int64 [len(Column), samples]."""
        return self.window.rows(len(selection.chosen))[:, selection.chosen]

    def plan_record(self, selection: Selection, *, target: int, caps: Caps) -> PlanRecord:
        """Return the second record of a step that emits `selection`.

        Args:
            selection: what this replica emits.
            target: digest of the step's target.
            caps: limits of a micro-batch.
        """
        rows = self.selected(selection)
        num, cost = rows.shape[1], int(rows[Column.COST].sum())
        num_kept = len(self.window) - num
        record = PlanRecord(
            target=target,
            num_micro_batches=needed_count(selection, rows, caps=caps),
            num_samples=num,
            num_left_out=self.num_left_out,
            num_bad=self.num_bad,
            cost=cost,
            cost_largest=int(rows[Column.COST].max()) if num else 0,
            num_remaining=self.shard.num_undrawn + num_kept,
            num_kept=num_kept,
            cost_kept=self.window.cost - cost,
            cost_missing=selection.missing,
            num_large=selection.num_large,
            cost_large=selection.cost_large,
        )
        return replace(record, **token_counts(rows))  # type: ignore[arg-type]

    def micro_batches(
        self, selection: Selection, *, count: int, caps: Caps, by_cost: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Return the positions of `selection` in `count` micro-batches; see `meet_count`."""
        rows = self.window.rows(len(selection.chosen))
        return meet_count(selection, rows, count=count, caps=caps, by_cost=by_cost)

    def reassign(
        self, table: RecordTable[WindowRecord], *, each: int
    ) -> tuple[Holdings, Reassigned]:
        """Give and take positions that are offered; what is given counts as emitted here.

        Args:
            table: first records of a step.
            each: expected cost of one position, at least 1.

        Returns:
            What all replicas hold then, and what this one gave and took.
        """
        holdings = Holdings.before(table)
        if not self._config.is_online or self._config.has_own_iterators:
            return holdings, Reassigned()
        unassigned = self.shard.num_unassigned
        moves = reassign(table, holdings, num_unassigned=unassigned, each=each)
        given = tuple(move.position for move in moves if move.giver == self._replica)
        taken = tuple(move.position for move in moves if move.taker == self._replica)
        if given:
            self.window.remove(np.isin(self.window.rows()[Column.POSITION], given))
            self.num_emitted += len(given)
        if taken:
            self.shard.take_over(taken)
        change = Reassigned(given=given, taken=taken, cursor=self.shard.cursor, num_all=len(moves))
        return holdings_after(holdings, moves), change

    def emit(self, selection: Selection, *, step: int) -> None:
        """Remove what a step emits from the window, and note what is due after it."""
        self.num_emitted += int(selection.chosen.sum())
        self.window.remove(selection.chosen)
        self.window.mark_due(num_emitted=self.num_emitted, step=step)
        self.num_left_out = self.num_bad = 0

    def state(self) -> dict[str, Any]:
        """Return this part of `ReplicaPlanner.snapshot`."""
        assert not self.num_left_out, "the state is that between two steps: take it after commit"
        rows = self.window.rows()[[Column.POSITION, Column.ARRIVAL, Column.DUE]]
        return {
            "cursor": self.shard.cursor,
            "upcoming": list(self.shard.upcoming),
            "num_emitted": self.num_emitted,
            "num_recorded": self.num_recorded,
            "window": rows.T,  # a copy: the columns were picked by number
        }

    def restore(self, state: Mapping[str, Any], *, fetched: Mapping[int, tuple[int, ...]]) -> None:
        """Continue from `state`, with the cost model in force; see `load_state_dict`.

        Raises:
            ValueError: a window sample that is no longer usable; nothing has changed then.
        """
        self.window = restored_window(self._config, state, fetched)
        self.num_left_out = self.num_bad = 0
        self.num_emitted, self.num_recorded = state["num_emitted"], state["num_recorded"]
        self._num_arrived = self.num_emitted + len(self.window)
        self.shard = make_shard(
            self._config, replica=self._replica, cursor=state["cursor"], upcoming=state["upcoming"]
        )


def _first_position(config: PlanConfig, *, replica: int, consumed: int) -> int:
    """Return the shard's cursor when so many positions have been consumed."""
    if consumed and config.has_own_iterators:
        raise ValueError(
            f"a run over iterators cannot begin at sample {consumed}: the saved state alone tells "
            "where each of them was; restore it"
        )
    if config.is_online:
        return consumed
    if config.has_unknown_end:
        return replica
    own = config.own_positions(replica)
    if config.shards:
        if consumed:
            raise ValueError(
                f"a run with shards of its own cannot begin at sample {consumed}: the saved "
                "state alone tells which samples those were; restore it"
            )
        return own.start
    return consumed + (own.start - consumed) % own.step
