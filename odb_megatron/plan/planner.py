"""One replica's planner: observe, exchange, select, exchange, commit.

Pure: the caller draws samples and moves records; nothing here reads a clock, a rank or a socket.
A step goes through `draw` / `observe` until `draw` returns nothing, then `window_record`,
`set_target`, again `draw` / `observe`, then `plan_record` and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.alignment import common_count, fit_to_count
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import OnlineShard, deal, held_goal
from odb_megatron.plan.packing import pack
from odb_megatron.plan.policy import BalanceScope, PolicyName, StepState
from odb_megatron.plan.records import (
    PlanRecord,
    RecordTable,
    ReplicaFailedError,
    WindowRecord,
    check_agreement,
)
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.step import StepPlan, StepTotals
from odb_megatron.plan.target import StepTarget
from odb_megatron.plan.termination import LoaderClosedError, Phase, Termination
from odb_megatron.plan.window import Column, SampleWindow

__all__ = ["ReplicaPlanner"]

STATE_VERSION = 2

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
        self._policy = config.build_policy()
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
        self._shard = OnlineShard(replica, cursor=consumed) if config.is_online else None
        if self._shard is not None:
            self._assign(np.zeros((3, config.num_replicas), dtype=np.int64), is_late=False)

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
        stop = min(end, self._cursor + room * self.config.num_replicas)
        positions = list(range(self._cursor, stop, self.config.num_replicas))
        self._cursor += len(positions) * self.config.num_replicas
        return positions

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
        self._append(
            (position, self._num_arrived, num_tokens, num_loss_tokens, num_patches, truncated, -1)
        )
        self._num_arrived += 1

    def window_record(self) -> WindowRecord:
        """Return this replica's first record of the step."""
        assert not self._termination.is_over, "a planner never plans past the final step"
        window = self._window
        num_new = min(len(window), self._num_arrived - self._num_recorded)
        self._num_recorded = self._num_arrived
        return WindowRecord(
            config=self._digest,
            step=self._step,
            position=self._consumed,
            num_held=len(window),
            cost_held=window.cost,
            num_undrawn=self._num_undrawn(),
            closing=self._is_closing,
            **self._policy.describe(
                window, state=self._state(), num_new=num_new, num_emitted=self._num_emitted
            ),
        )

    def set_target(self, records: WindowRecords) -> None:
        """Derive the common target from all replicas' first records.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        table = _as_table(records)
        check_agreement(table, names=("config", "step", "position"))
        self._stop_if_closing(table)
        undrawn = table.column("num_undrawn")
        drained = (
            bool((undrawn == 0).any())
            if self._shard is None
            else self._shard.cursor >= self.config.total
        )
        left = self._termination.begin_step(
            step=self._step, consumed=self._consumed, is_drained=drained
        )
        self._target = self._policy.target(
            table, state=self._state(), steps_left=left, drained=drained
        )
        if self._shard is not None:
            held = np.stack((table.column("num_held"), table.column("cost_held"), undrawn))
            self._assign(held, is_late=True)

    def plan_record(self, *, wait_us: int = 0) -> PlanRecord:
        """Select and pack this replica's share; return its second record of the step."""
        target = self._require_target()
        undrawn = self._num_undrawn()
        drained = undrawn == 0 if self._shard is None else self._shard.cursor >= self.config.total
        found = self._policy.select(
            self._window,
            target=target,
            state=self._state(),
            num_to_come=undrawn if drained else None,
        )
        rows = self._window.rows(len(found.chosen))[:, found.chosen]
        self._selection = found
        tokens = rows[Column.NUM_TOKENS]
        num, cost = rows.shape[1], int(rows[Column.COST].sum())
        return PlanRecord(
            target=target.digest(),
            num_micro_batches=self._num_needed(found, rows),
            num_samples=num,
            num_left_out=self._left_out,
            num_truncated=int(rows[Column.TRUNCATED].sum()),
            num_tokens=int(tokens.sum()),
            num_padded_tokens=int(rows[Column.PADDED].sum()),
            num_squared_tokens=int((tokens * tokens).sum()),
            num_loss_tokens=int(rows[Column.LOSS_TOKENS].sum()),
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

    def commit(self, records: PlanRecords) -> StepPlan:
        """Fix the step from all replicas' second records and move on to the next.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
            LoaderClosedError: a replica closed its loader.
        """
        table = _as_table(records)
        check_agreement(table, names=("target",))
        self._stop_if_closing(table)
        needed = int(table.column("num_micro_batches").max())
        count = common_count([needed], multiple=self.config.count_multiple)
        totals = self._totals(table, count)
        self._policy.learn(table, target=self._require_target(), count=count)
        plan = StepPlan(totals=totals, micro_batches=self._micro_batches(count))
        self._advance(table, totals)
        return plan

    def state_dict(self) -> dict[str, object]:
        """Return the state between two steps: plain ints and lists, no payloads.

        `window` lists position, arrival and due step (-1: none) of each held sample, `upcoming`
        the positions assigned and not drawn.
        """
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
            "upcoming": list(self._shard.upcoming) if self._shard is not None else [],
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
        self._check_state(state)
        self._start, self._step = state["start"], state["step"]
        self._consumed, self._cursor = state["consumed"], state["cursor"]
        self._num_emitted, self._num_recorded = state["num_emitted"], state["num_recorded"]
        self._window, self._left_out = SampleWindow(), 0
        self._target = self._selection = None
        self._termination.restore(state["deadline"], consumed=self._consumed)
        self._policy.restore(list(state["knowledge"]))
        if self._shard is not None:
            self._shard = OnlineShard(
                self.replica, cursor=state["cursor"], upcoming=state["upcoming"]
            )
        for position, arrival, due in state["window"]:
            num_tokens, num_loss_tokens, truncated, *patches = fetched[position]
            if num_tokens == 0:
                raise ValueError(
                    f"position {position} was in the window when the state was saved and can no "
                    "longer be used: the data or its policies have changed"
                )
            num_patches = patches[0] if patches else 0
            self._append(
                (position, arrival, num_tokens, num_loss_tokens, num_patches, truncated, due)
            )
        self._num_arrived = self._num_emitted + len(self._window)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        current = self.state_dict()
        if set(state) != set(current):
            raise ValueError(
                f"data state has the keys {sorted(state)}; expected {sorted(current)}: it was "
                "written by another version of odb_megatron"
            )
        for name in ("version", "policy", "num_replicas", "replica", "assignment"):
            if state[name] != current[name]:
                raise ValueError(
                    f"data state was saved with {name}={state[name]}, this run has "
                    f"{current[name]}: resume with the same setting, or start the data anew "
                    "(--finetune)"
                )

    def _append(self, sample: tuple[int, int, int, int, int, bool, int]) -> None:
        position, arrival, num_tokens, num_loss_tokens, num_patches, truncated, due = sample
        config = self.config
        if 0 < config.max_patches < num_patches:
            raise ValueError(
                f"position {position} has {num_patches} patches; a micro-batch may hold "
                f"{config.max_patches}: raise max_patches, or shrink the images"
            )
        padded = -(-num_tokens // config.multiple) * config.multiple
        cost = config.cost.sample(padded, num_patches=num_patches)
        self._window.append(
            (
                position,
                arrival,
                num_tokens,
                padded,
                num_loss_tokens,
                num_patches,
                cost,
                truncated,
                due,
            )
        )

    def _state(self) -> StepState:
        return StepState(step=self._step, consumed=self._consumed, start=self._start)

    def _require_target(self) -> StepTarget:
        assert self._target is not None, "set_target comes before plan_record"
        return self._target

    def _own_position_from(self, position: int) -> int:
        return position + (self.replica - position) % self.config.num_replicas

    def _num_undrawn(self) -> int:
        if self._shard is not None:
            return len(self._shard.upcoming)
        return max(0, -(-(self.config.total - self._cursor) // self.config.num_replicas))

    def _stop_if_closing(self, table: RecordTable[Any]) -> None:
        closing = table.column("closing")
        if closing.any():
            self._termination.close()
            raise LoaderClosedError(
                f"replica {int(closing.argmax())} closed its loader in step {self._step}"
            )

    def _assign(self, held: npt.NDArray[np.int64], *, is_late: bool) -> None:
        """Assign new positions to all replicas.

        Args:
            held: per replica the samples in its window, their cost, and positions assigned and
                not drawn: int64 [3, replicas].
            is_late: see `draw.held_goal`.
        """
        assert self._shard is not None
        config, total = self.config, self.config.total
        left = total - self._shard.cursor
        if not left:
            return
        num_held, cost_held, num_upcoming = held
        outstanding = num_held + num_upcoming
        capacity = config.window + config.lead
        each = self._policy.mean_cost
        costs = cost_held + num_upcoming * each
        # a window that is full of cost waits with drawing, even if it holds few samples
        by_cost = (capacity * each - costs) // each
        caps = np.maximum(np.minimum(capacity - outstanding, by_cost), 0)
        now = int(outstanding.sum())
        if self._target is not None and self._target.steps_left == 1:
            amount, caps = left, np.full_like(caps, left)
        else:
            goal = held_goal(
                left + now,
                capacity=capacity * config.num_replicas,
                batch=config.global_batch_size,
                is_late=is_late,
            )
            amount = min(left, max(0, goal - now), int(caps.sum()))
        if not amount:
            return
        self._shard.assign(deal(amount, costs=costs, caps=caps, each=each))

    def _num_needed(self, found: Selection, rows: npt.NDArray[np.int64]) -> int:
        if found.micro_batches is not None:
            return len(found.micro_batches)
        bins = pack(
            rows[Column.PADDED].tolist(),
            token_budget=self.config.token_budget,
            patches=rows[Column.PATCHES].tolist(),
            max_patches=self.config.max_patches,
        )
        return len(bins)

    def _micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        found = self._selection
        assert found is not None, "plan_record comes before commit"
        view = self._window.rows(len(found.chosen))
        bins = found.micro_batches
        if bins is None or len(bins) != count:
            view = view[:, found.chosen]
            bins = fit_to_count(
                view[Column.PADDED].tolist(),
                view[Column.COST].tolist(),
                count=count,
                token_budget=self.config.token_budget,
                patches=view[Column.PATCHES].tolist(),
                max_patches=self.config.max_patches,
            )
        if self.config.balance is BalanceScope.MICROBATCH:
            costs = view[Column.COST].tolist()
            bins = sorted(bins, key=lambda slots: -sum(costs[slot] for slot in slots))
        positions = view[Column.POSITION].tolist()
        return tuple(tuple(positions[slot] for slot in slots) for slots in bins)

    def _totals(self, table: RecordTable[PlanRecord], count: int) -> StepTotals:
        samples, left_out = table.total("num_samples"), table.total("num_left_out")
        unassigned = 0 if self._shard is None else self.config.total - self._shard.cursor
        remaining = table.total("num_remaining") + unassigned
        if self._consumed + samples + left_out + remaining != self.config.total:
            raise ReplicaFailedError(
                f"step {self._step} loses samples: {self._consumed} consumed before, {samples} "
                f"emitted, {left_out} left out and {remaining} remaining are not the "
                f"{self.config.total} of the run; this is a defect of odb_megatron, please report"
            )
        own = table.column("num_samples")
        filled = np.minimum(own, count)
        costs = table.column("cost") + count * self.config.cost.fixed
        return StepTotals(
            step=self._step,
            num_micro_batches=count,
            num_consumed=samples + left_out,
            consumed_before=self._consumed,
            num_samples=samples,
            num_left_out=left_out,
            num_truncated=table.total("num_truncated"),
            num_tokens=table.total("num_tokens"),
            num_padded_tokens=table.total("num_padded_tokens"),
            num_squared_tokens=table.total("num_squared_tokens"),
            num_loss_tokens=table.total("num_loss_tokens"),
            num_idle=int((count - filled).sum()),
            num_split=int((filled - table.column("num_micro_batches")).sum()),
            costs=tuple(costs.tolist()),
            wait_us=table.largest("wait_us"),
            is_final=remaining == 0,
        )

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
            kept, remaining = table.column("num_kept"), table.column("num_remaining")
            held = np.stack((kept, table.column("cost_kept"), remaining - kept))
            self._assign(held, is_late=False)


def _as_table(records: Any) -> RecordTable[Any]:
    return records if isinstance(records, RecordTable) else RecordTable.from_records(records)
