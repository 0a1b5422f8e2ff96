"""One replica's planner: observe, exchange, select, exchange, commit.

Pure: the caller draws samples and moves records; nothing here reads a clock, a rank or a socket.
A step goes through `draw` / `observe` until `draw` returns nothing, then `window_record`,
`set_target`, again `draw` / `observe`, then `plan_record`, `sample_list` where `wants_exchange`
says so, and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from odb_megatron.plan.agreement import agreed_table, check_none_lost
from odb_megatron.plan.calibration import CostFit, MicroBatchTime, calibration_record, fit_cost
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Holdings
from odb_megatron.plan.exchange_choice import ExchangeChoice
from odb_megatron.plan.exchange_phase import ExchangePhase
from odb_megatron.plan.holding import Holding
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.policies import build_policy
from odb_megatron.plan.policy import BalanceScope, PolicyName, StepState
from odb_megatron.plan.reassign import end_loads
from odb_megatron.plan.records import CalibrationRecord, PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.sample_list import pack_list
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.state import (
    NOT_CALIBRATED,
    begin_state,
    check_state,
    plain_state,
    resume_point,
    saved_cost,
)
from odb_megatron.plan.step import Reassigned, StepPlan, StepTotals, parcels
from odb_megatron.plan.target import StepTarget
from odb_megatron.plan.termination import Phase, Termination

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
        self._exchange = ExchangePhase(config)
        self._start = consumed
        self._step = 0
        self._consumed = consumed  # positions, all replicas
        self._holding = Holding(config, replica=replica, consumed=consumed)
        self._target: StepTarget | None = None
        self._selection: Selection | None = None
        self._is_closing = False
        self._linear_ps = NOT_CALIBRATED
        self._reassigned = Reassigned()
        self._termination = Termination(
            total=None if config.has_unknown_end else config.total,
            global_batch_size=config.global_batch_size,
            consumed=consumed,
            rounds_up=config.policy is PolicyName.SAMPLES,
        )

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

    @property
    def is_calibrated(self) -> bool:
        """Whether a calibration has decided the cost model."""
        return self._linear_ps != NOT_CALIBRATED

    @property
    def exchange_choice(self) -> ExchangeChoice | None:
        """See `ExchangePhase.choice`."""
        return self._exchange.choice

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing

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
        is_late = self._target is not None and self._target.steps_left > 1
        return self._holding.draw(most, end=end, is_late=is_late)

    def end_shard(self, position: int | None = None) -> None:
        """Note that this replica's shard, of unknown length, ends before `position`.

        Args:
            position: what `draw` has returned from there on does not exist, and may not be
                observed. None: all that was drawn exists.
        """
        shard = self._holding.shard
        shard.end(shard.cursor if position is None else position)

    def upcoming(self) -> list[int]:
        """Return positions assigned since the last call, in the order `draw` will return them.

        For prefetching with online assignment; fixed shards return nothing, their order being
        known.
        """
        return self._holding.shard.take_announced()

    def observe(
        self,
        position: int,
        *,
        num_tokens: int,
        num_loss_tokens: int,
        truncated: bool = False,
        num_patches: int = 0,
        num_bytes: int = 0,
    ) -> None:
        """Take a drawn sample into the window; `num_tokens` 0 means the position emits nothing.

        Args:
            position: its stream position.
            num_tokens: its tokens.
            num_loss_tokens: positions that carry loss.
            truncated: it was cut.
            num_patches: its patches.
            num_bytes: its size when it is handed to another replica.

        Raises:
            ValueError: a cost beyond the records.
        """
        sample = (num_tokens, num_loss_tokens, truncated, num_patches, num_bytes)
        self._holding.observe(position, sample)

    def leave_out(self, *, is_bad: bool) -> None:
        """Count a drawn position that emits nothing; `is_bad`: its record is the reason."""
        self._holding.leave_out(is_bad=is_bad)

    def calibration_record(self, times: Sequence[MicroBatchTime]) -> CalibrationRecord:
        """Return this replica's sums of measured times, to be exchanged between two steps."""
        return calibration_record(
            times,
            token_budget=self.config.token_budget,
            step=self._step,
            closing=self._is_closing,
        )

    def fit_cost(self, table: RecordTable[CalibrationRecord]) -> CostFit:
        """Fit the cost model to all replicas' sums; `set_cost` puts it in force.

        Raises:
            ReplicaFailedError, LoaderClosedError: as `set_target`.
        """
        table = self._agreed(table, names=("step",))
        budget = self.config.token_budget
        return fit_cost(table, prior=self.config.cost, token_budget=budget)

    def set_cost(self, cost: CostModel, *, linear_ps: int = NOT_CALIBRATED) -> None:
        """Go on with another cost model: between two steps, the same on all replicas.

        Samples held are priced anew, and what was learned of costs is learned again from them.

        Args:
            cost: the model.
            linear_ps: `CostFit.linear_ps` where a calibration has decided it.

        Raises:
            ValueError: a sample's cost beyond the records.
        """
        assert self._target is None, "the cost model changes between steps"
        self._linear_ps = linear_ps
        if cost == self.config.cost:
            return
        self._holding.set_cost(cost)
        self._policy.set_cost(cost)
        self._exchange.set_cost(cost)
        self.config = replace(self.config, cost=cost)
        self._digest = self.config.digest()

    def window_record(self) -> WindowRecord:
        """Return this replica's first record of the step."""
        assert not self._termination.is_over, "a planner never plans past the final step"
        held = self._holding
        report = self._policy.describe(
            held.window,
            state=self._state(),
            first_new=held.num_recorded,
            num_emitted=held.num_emitted,
        )
        load = held.window.cost + held.shard.num_undrawn * self._policy.mean_cost
        if not self.config.has_own_iterators:  # else no other replica can fetch it
            report |= self._policy.offer(held.window, load=load)
        held.mark_recorded()
        record = WindowRecord(
            config=self._digest,
            step=self._step,
            position=self._consumed,
            num_held=len(held.window),
            cost_held=held.window.cost,
            num_undrawn=held.shard.num_undrawn,
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
        self._rebuild_policy(self._exchange.choose(table))
        undrawn = table.column("num_undrawn")
        left = self._termination.begin_step(
            step=self._step,
            consumed=self._consumed,
            is_drained=self._holding.shard.is_drained(undrawn),
            rest=None if undrawn.any() else table.total("num_held"),
        )
        drained = self._termination.deadline is not None
        self._target = self._policy.target(
            table, state=self._state(), steps_left=left, drained=drained
        )
        each = self._policy.mean_cost
        holdings, self._reassigned = self._holding.reassign(table, each=each)
        self._holding.shard.top_up(holdings, each=each, is_late=True, is_final=left == 1)

    def plan_record(self, *, wait_us: int = 0) -> PlanRecord:
        """Select and pack this replica's share; return its second record of the step."""
        target = self._require_target()
        shard = self._holding.shard
        self._selection = self._policy.select(
            self._holding.window,
            target=target,
            state=self._state(),
            num_to_come=shard.num_undrawn if self._knows_rest() else None,
        )
        record = self._holding.plan_record(self._selection, target=target.digest(), caps=self._caps)
        return replace(record, wait_us=wait_us, closing=self._is_closing)

    def wants_exchange(self, records: PlanRecords) -> bool:
        """Whether this step has a third exchange, of `sample_list`; equal on all replicas.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        return self._exchange.is_wanted(self._agreed(records, names=("target",)))

    def sample_list(self, records: PlanRecords) -> bytes:
        """Return this replica's list for the third exchange; all lists of a step have one size.

        Raises:
            ValueError: see `sample_list.pack_list`.
        """
        if not isinstance(records, RecordTable):
            records = RecordTable.from_records(records)
        assert self._selection is not None, "plan_record comes before sample_list"
        rows = self._holding.selected(self._selection)
        return pack_list(rows, room=records.largest("num_samples"))

    def commit(self, records: PlanRecords, lists: Sequence[bytes] = ()) -> StepPlan:
        """Fix the step from all replicas' second records and move on to the next.

        Args:
            records: second records.
            lists: all replicas' sample lists, where the step has a third exchange.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        table = self._agreed(records, names=("target",))
        count = self._exchange.local_count(table)
        totals = replace(self._totals(table, count), num_reassigned=self._reassigned.num_all)
        assignment = self._exchange.assign(table, lists) if lists else None
        self._policy.learn(table, target=self._require_target(), count=count)
        if assignment is not None:
            totals = totals.exchanged(assignment, fixed=self.config.cost.fixed)
        by_cost = self.config.balance is BalanceScope.MICROBATCH
        if assignment is None or assignment.is_local:
            assert self._selection is not None, "plan_record comes before commit"
            own = self._holding.micro_batches(
                self._selection, count=count, caps=self._caps, by_cost=by_cost
            )
            plan = StepPlan(totals=totals, micro_batches=own)
        else:
            sends, receives = parcels(assignment, self.replica)
            own = assignment.micro_batches(self.replica, caps=self._caps, by_cost=by_cost)
            plan = StepPlan(totals=totals, micro_batches=own, sends=sends, receives=receives)
        self._advance(table, totals)
        return replace(plan, reassigned=self._reassigned)

    def state_dict(self) -> dict[str, object]:
        """Return the state between two steps: plain ints and lists, no payloads.

        `window` lists position, arrival and due step (-1: none), `upcoming` positions assigned and
        not drawn, `cost` the model's integers and `linear_ps` of `set_cost`.
        """
        return plain_state(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Return the same as `state_dict`, cheaply: `plain_state` makes that of it, at any time."""
        cost = self.config.cost
        return {
            **begin_state(self.config, replica=self.replica),
            "start": self._start,
            "step": self._step,
            "consumed": self._consumed,
            "deadline": self._termination.state(),
            "cost": [cost.quadratic, cost.fixed, cost.per_patch, self._linear_ps],
            "knowledge": self._policy.knowledge(),
            "exchanges": self._exchange.state(),
            **self._holding.state(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, fetched: Mapping[int, tuple[int, ...]]
    ) -> None:
        """Continue from `state`; the argument is not changed.

        Args:
            state: from `state_dict` of the same replica, or from `elastic.elastic_state`.
            fetched: for each position of the state's window, its number of tokens, of loss tokens,
                whether it was truncated, and (optional) its patches and payload bytes: the caller
                preprocesses these samples again.

        Raises:
            ValueError: see `state.check_state`, or a window sample that is no longer usable.
        """
        check_state(state, plain_state(self.snapshot()))
        self._start, deadline = resume_point(state, self.config)
        self._step, self._consumed = state["step"], state["consumed"]
        self._target = self._selection = None
        cost, linear_ps = saved_cost(state)
        self.set_cost(cost, linear_ps=linear_ps)
        self._holding.restore(state, fetched=fetched)
        self._termination.restore(deadline, step=self._step, consumed=self._consumed)
        self._rebuild_policy(self._exchange.restore(state["exchanges"]))
        self._policy.restore(list(state["knowledge"]))

    def _rebuild_policy(self, exchanges: bool | None) -> None:
        """Mode `auto` has chosen; go on with the policy that goes with it, nothing forgotten."""
        if exchanges is not None:
            knowledge = self._policy.knowledge()
            self._policy = build_policy(self.config, exchanges=exchanges)
            self._policy.restore(knowledge)

    def _state(self) -> StepState:
        return StepState(step=self._step, consumed=self._consumed, start=self._start)

    def _require_target(self) -> StepTarget:
        assert self._target is not None, "set_target comes before plan_record"
        return self._target

    def _agreed(self, records: Any, *, names: Sequence[str]) -> RecordTable[Any]:
        return agreed_table(records, names=names, step=self._step, termination=self._termination)

    def _knows_rest(self) -> bool:
        """Whether this replica knows what it has left, and how many steps to spread it over."""
        return self._holding.shard.is_own_known and self._termination.deadline is not None

    def _totals(self, table: RecordTable[PlanRecord], count: int) -> StepTotals:
        unassigned = self._holding.shard.num_unassigned
        totals = StepTotals.add_up(
            table,
            step=self._step,
            consumed=self._consumed,
            num_unassigned=unassigned,
            count=count,
            fixed=self.config.cost.fixed,
        )
        remaining = table.total("num_remaining") + unassigned
        if not self.config.has_unknown_end:
            check_none_lost(totals, remaining=remaining, total=self.config.total)
        return totals

    def _advance(self, table: RecordTable[PlanRecord], totals: StepTotals) -> None:
        assert self._selection is not None
        self._holding.emit(self._selection, step=self._step)
        self._consumed += totals.num_consumed
        self._termination.end_step(consumed=self._consumed, is_final=totals.is_final)
        self._step += 1
        self._target = self._selection = None
        holdings = Holdings.after(table)
        shard, each = self._holding.shard, self._policy.mean_cost
        loads = holdings.loads(each) + shard.top_up(holdings, each=each) * each
        unassigned = shard.num_unassigned
        self._policy.note_ends(end_loads(loads, num_unassigned=unassigned, each=each))
