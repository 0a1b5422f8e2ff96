"""One replica's planner: observe, exchange, select, exchange, commit.

Pure: the caller draws samples and moves records; nothing here reads a clock, a rank or a socket.
A step goes through `draw` / `observe` until `draw` returns nothing, then `window_record`,
`set_target`, again `draw` / `observe`, then `plan_record` and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from odb_megatron.plan.alignment import common_count, meet_count, needed_count
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost_policy import build_policy
from odb_megatron.plan.draw import DrawLimits, Holdings, OnlineShard
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.policy import (
    BalanceScope,
    PolicyName,
    StepState,
)
from odb_megatron.plan.records import (
    PlanRecord,
    RecordTable,
    ReplicaFailedError,
    WindowRecord,
    check_agreement,
)
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.state import STATE_VERSION, check_state, window_row
from odb_megatron.plan.step import StepPlan, StepTotals
from odb_megatron.plan.target import StepTarget
from odb_megatron.plan.termination import LoaderClosedError, Phase, Termination
from odb_megatron.plan.window import Column, SampleWindow, token_counts

__all__ = ["ReplicaPlanner"]

WindowRecords = Sequence[WindowRecord] | RecordTable[WindowRecord]
PlanRecords = Sequence[PlanRecord] | RecordTable[PlanRecord]


class ReplicaPlanner:
    """Plans the steps of one replica.

    Args:
        config: equal on all replicas.
        replica: which one this is, as data.
        consumed: positions consumed before the run starts (samples policy resumes here).
    """

    def __init__(self, config: PlanConfig, *, replica: int, consumed: int = 0) -> None:
        if not 0 <= replica < config.num_replicas:
            raise ValueError(f"replica {replica} is not below num_replicas {config.num_replicas}")
        self.config = config
        self.replica = replica
        self._digest = config.digest()
        self._caps = Caps(token_budget=config.token_budget, max_patches=config.max_patches)
        self._policy = build_policy(config)
        self._start = consumed
        self._step = 0
        self._consumed = consumed  # positions, all replicas
        self._cursor = self._own_position_from(consumed)  # fixed shards
        self._window = SampleWindow()
        self._num_arrived = 0
        self._num_recorded = 0  # arrivals that are in a window record
        self._num_emitted = 0
        self._left_out = 0  # since the last step
        self._target: StepTarget | None = None
        self._selection: Selection | None = None
        self._is_closing = False
        self._termination = Termination(
            total=config.total,
            global_batch_size=config.global_batch_size,
            consumed=consumed,
            rounds_up=config.policy is PolicyName.SAMPLES,
        )
        self._shard: OnlineShard | None = None
        if config.is_online:
            self._shard = self._make_shard(consumed)
            none = np.zeros(config.num_replicas, dtype=np.int64)
            self._shard.top_up(Holdings(num_held=none, cost_held=none, num_upcoming=none), each=1)

    @property
    def consumed(self) -> int:
        """Stream positions consumed by all replicas so far."""
        return self._consumed

    @property
    def phase(self) -> Phase:
        """Where the run stands after the last exchange."""
        return self._termination.phase

    @property
    def is_finished(self) -> bool:
        """Whether the run's last sample has been emitted."""
        return self._termination.phase is Phase.FINISHED

    def close(self) -> None:
        """End the loader: this replica's next record carries the closing bit."""
        self._is_closing = True

    def draw(self) -> list[int]:
        """Return the stream positions to fetch next, in order; `observe` each of them."""
        end, most = self._policy.draw_before(self._consumed)
        if self._target is not None:
            end = self._target.end
            if self._target.steps_left == 1:
                most = self.config.total
            elif self._shard is None:
                return []
        room = max(0, most - len(self._window))
        if self._shard is not None:
            return self._shard.draw(room)
        positions = self._undrawn()[:room]
        positions = positions[: len(range(self._cursor, end, positions.step))]
        self._cursor += len(positions) * positions.step
        return list(positions)

    def upcoming(self) -> list[int]:
        """Return positions assigned since the last call, in the order `draw` will return them.

        For prefetching with online assignment; fixed shards return nothing, their order being
        known.
        """
        return [] if self._shard is None else self._shard.take_announced()

    def observe(
        self,
        position: int,
        *,
        num_tokens: int,
        num_loss_tokens: int,
        truncated: bool = False,
        num_patches: int = 0,
    ) -> None:
        """Take a drawn sample into the window; `num_tokens` 0 means the position emits nothing.

        Raises:
            ValueError: more patches than a micro-batch may hold, or a cost beyond the records.
        """
        if num_tokens == 0:
            self._left_out += 1
            return
        sample = (num_tokens, num_loss_tokens, truncated, num_patches)
        self._window.append(window_row(self.config, position, self._num_arrived, -1, sample))
        self._num_arrived += 1

    def window_record(self) -> WindowRecord:
        """Return this replica's first record of the step."""
        assert not self._termination.is_over, "a planner never plans past the final step"
        window = self._window
        report = self._policy.describe(
            window,
            state=self._state(),
            first_new=self._num_recorded,
            num_emitted=self._num_emitted,
        )
        self._num_recorded = self._num_arrived
        record = WindowRecord(
            config=self._digest,
            step=self._step,
            position=self._consumed,
            num_held=len(window),
            cost_held=window.cost,
            num_undrawn=self._num_undrawn(),
            closing=self._is_closing,
        )
        return replace(record, **report)  # type: ignore[arg-type]

    def set_target(self, records: WindowRecords) -> None:
        """Derive the common target from all replicas' first records.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        table = self._agreed(records, names=("config", "step", "position"))
        undrawn = table.column("num_undrawn")
        if self._shard is None:
            drained = bool((undrawn == 0).any())
        else:
            drained = self._shard.num_unassigned == 0
        left = self._termination.begin_step(
            step=self._step, consumed=self._consumed, is_drained=drained
        )
        self._target = self._policy.target(
            table, state=self._state(), steps_left=left, drained=drained
        )
        if self._shard is not None:
            self._shard.top_up(
                Holdings(
                    num_held=table.column("num_held"),
                    cost_held=table.column("cost_held"),
                    num_upcoming=undrawn,
                ),
                each=self._policy.mean_cost,
                is_late=True,
                is_final=left == 1,
            )

    def plan_record(self, *, wait_us: int = 0) -> PlanRecord:
        """Select and pack this replica's share; return its second record of the step."""
        target = self._require_target()
        undrawn = self._num_undrawn()
        drained = (undrawn if self._shard is None else self._shard.num_unassigned) == 0
        found = self._policy.select(
            self._window,
            target=target,
            state=self._state(),
            num_to_come=undrawn if drained else None,
        )
        rows = self._window.rows(len(found.chosen))[:, found.chosen]
        self._selection = found
        num, cost = rows.shape[1], int(rows[Column.COST].sum())
        record = PlanRecord(
            target=target.digest(),
            num_micro_batches=needed_count(found, rows, caps=self._caps),
            num_samples=num,
            num_left_out=self._left_out,
            cost=cost,
            num_remaining=undrawn + len(self._window) - num,
            num_kept=len(self._window) - num,
            cost_kept=self._window.cost - cost,
            cost_missing=found.missing,
            num_large=found.num_large,
            cost_large=found.cost_large,
            wait_us=wait_us,
            closing=self._is_closing,
        )
        return replace(record, **token_counts(rows))  # type: ignore[arg-type]

    def commit(self, records: PlanRecords) -> StepPlan:
        """Fix the step from all replicas' second records and move on to the next.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        table = self._agreed(records, names=("target",))
        needed = int(table.column("num_micro_batches").max())
        count = common_count([needed], multiple=self.config.count_multiple)
        totals = self._totals(table, count)
        self._policy.learn(table, target=self._require_target(), count=count)
        assert self._selection is not None, "plan_record comes before commit"
        micro_batches = meet_count(
            self._selection,
            self._window.rows(len(self._selection.chosen)),
            count=count,
            caps=self._caps,
            by_cost=self.config.balance is BalanceScope.MICROBATCH,
        )
        plan = StepPlan(totals=totals, micro_batches=micro_batches)
        self._advance(table, totals)
        return plan

    def state_dict(self) -> dict[str, object]:
        """Return the state between two steps: plain ints and lists, no payloads.

        `window` lists position, arrival and due step (-1: none) of each held sample, `upcoming`
        the positions assigned and not drawn.
        """
        assert not self._left_out, "the state is that between two steps: take it after commit"
        rows = self._window.rows()[[Column.POSITION, Column.ARRIVAL, Column.DUE]]
        return {
            "version": STATE_VERSION,
            "policy": self.config.policy.value,
            "num_replicas": self.config.num_replicas,
            "replica": self.replica,
            "assignment": self.config.assignment_in_force.value,
            "start": self._start,
            "step": self._step,
            "consumed": self._consumed,
            "cursor": self._shard.cursor if self._shard is not None else self._cursor,
            "upcoming": [] if self._shard is None else list(self._shard.upcoming),
            "num_emitted": self._num_emitted,
            "num_recorded": self._num_recorded,
            "deadline": self._termination.state(),
            "knowledge": self._policy.knowledge(),
            "window": rows.T.tolist(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, fetched: Mapping[int, tuple[int, ...]]
    ) -> None:
        """Continue from `state`; the argument is not changed.

        Args:
            state: from `state_dict` of the same replica.
            fetched: for each position of the state's window, its number of tokens, of loss tokens,
                whether it was truncated, and (optional) its patches: the caller preprocesses
                these samples again.

        Raises:
            ValueError: unknown or missing keys, another version, policy, topology or replica, or
                a window sample that is no longer usable.
        """
        check_state(state, self.state_dict())
        self._start, self._step = state["start"], state["step"]
        self._consumed, self._cursor = state["consumed"], state["cursor"]
        self._num_emitted, self._num_recorded = state["num_emitted"], state["num_recorded"]
        self._window, self._left_out = SampleWindow(), 0
        self._target = self._selection = None
        self._termination.restore(state["deadline"], consumed=self._consumed)
        self._policy.restore(list(state["knowledge"]))
        if self._shard is not None:
            self._shard = self._make_shard(state["cursor"], state["upcoming"])
        for position, arrival, due in state["window"]:
            num_tokens, num_loss_tokens, truncated, *patches = fetched[position]
            if num_tokens == 0:
                raise ValueError(
                    f"position {position} was in the window when the state was saved and can no "
                    "longer be used: the data or its policies have changed"
                )
            sample = (num_tokens, num_loss_tokens, bool(truncated), patches[0] if patches else 0)
            self._window.append(window_row(self.config, position, arrival, due, sample))
        self._num_arrived = self._num_emitted + len(self._window)

    def _state(self) -> StepState:
        return StepState(step=self._step, consumed=self._consumed, start=self._start)

    def _require_target(self) -> StepTarget:
        assert self._target is not None, "set_target comes before plan_record"
        return self._target

    def _own_position_from(self, position: int) -> int:
        own = self.config.own_positions(self.replica)
        if self.config.shards:
            if position:
                raise ValueError(
                    f"a run with shards of its own cannot begin at sample {position}: the saved "
                    "state alone tells which samples those were; restore it"
                )
            return own.start
        return position + (own.start - position) % own.step

    def _undrawn(self) -> range:
        own = self.config.own_positions(self.replica)
        return range(self._cursor, own.stop, own.step)

    def _make_shard(self, cursor: int, upcoming: Sequence[int] = ()) -> OnlineShard:
        config = self.config
        limits = DrawLimits(
            total=config.total,
            capacity=config.window + config.lead,
            batch=config.global_batch_size,
        )
        return OnlineShard(limits, replica=self.replica, cursor=cursor, upcoming=upcoming)

    def _num_undrawn(self) -> int:
        if self._shard is not None:
            return len(self._shard.upcoming)
        return len(self._undrawn())

    def _agreed(self, records: Any, *, names: Sequence[str]) -> RecordTable[Any]:
        """Return the records as a table; an error beats closing, and closing beats a mismatch."""
        if not isinstance(records, RecordTable):
            records = RecordTable.from_records(records)
        check_agreement(records, names=())
        closing = records.column("closing")
        if closing.any():
            self._termination.close()
            raise LoaderClosedError(
                f"replica {int(closing.argmax())} closed its loader in step {self._step}"
            )
        check_agreement(records, names=names)
        table: RecordTable[Any] = records
        return table

    def _totals(self, table: RecordTable[PlanRecord], count: int) -> StepTotals:
        unassigned = 0 if self._shard is None else self._shard.num_unassigned
        totals = StepTotals.add_up(
            table,
            step=self._step,
            consumed=self._consumed,
            num_unassigned=unassigned,
            count=count,
            fixed=self.config.cost.fixed,
        )
        remaining = table.total("num_remaining") + unassigned
        if self._consumed + totals.num_consumed + remaining != self.config.total:
            raise ReplicaFailedError(
                f"step {self._step} loses samples: {self._consumed} consumed before, "
                f"{totals.num_samples} emitted, {totals.num_left_out} left out and {remaining} "
                f"remaining are not the {self.config.total} of the run; this is a defect of "
                "odb_megatron, please report"
            )
        return totals

    def _advance(self, table: RecordTable[PlanRecord], totals: StepTotals) -> None:
        assert self._selection is not None
        self._num_emitted += int(self._selection.chosen.sum())
        self._window.remove(self._selection.chosen)
        self._window.mark_due(num_emitted=self._num_emitted, step=self._step)
        self._consumed += totals.num_consumed
        self._termination.end_step(consumed=self._consumed)
        self._step += 1
        self._left_out = 0
        self._target = None
        self._selection = None
        if self._shard is not None:
            kept = table.column("num_kept")
            self._shard.top_up(
                Holdings(
                    num_held=kept,
                    cost_held=table.column("cost_kept"),
                    num_upcoming=table.column("num_remaining") - kept,
                ),
                each=self._policy.mean_cost,
            )
