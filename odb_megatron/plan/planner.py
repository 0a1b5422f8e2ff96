"""One replica's planner: observe, exchange, select, exchange, commit.

Pure: the caller draws samples and moves records; nothing here reads a clock, a rank or a socket.
A step goes through `draw` / `observe` until `draw` returns nothing, then `window_record`,
`set_target`, again `draw` / `observe`, then `plan_record` and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from odb_megatron.plan.alignment import common_count, fit_to_count, num_idle, num_split
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.packing import pack
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.policy import Held, StepTarget
from odb_megatron.plan.records import PlanRecord, ReplicaFailedError, WindowRecord, check_agreement
from odb_megatron.plan.step import StepPlan, StepTotals

__all__ = ["ReplicaPlanner"]

STATE_VERSION = 1


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
        self._policy = config.build_policy()
        self._start = consumed
        self._step = 0
        self._consumed = consumed  # positions, all replicas
        self._cursor = self._own_position_from(consumed)
        self._window: list[Held] = []
        self._num_arrived = 0
        self._num_emitted = 0
        self._left_out = 0  # since the last step
        self._target: StepTarget | None = None
        self._selection: list[Held] = []

    @property
    def consumed(self) -> int:
        """Stream positions consumed by all replicas so far."""
        return self._consumed

    @property
    def is_finished(self) -> bool:
        """Whether the run's last sample has been emitted."""
        return self._consumed >= self.config.total

    def draw(self) -> list[int]:
        """Return the stream positions to fetch next, in order; `observe` each of them."""
        if self._target is None:
            end, most = self._policy.draw_before(self._consumed, num_held=len(self._window))
        elif self._target.steps_left == 1:
            end, most = self._target.end, self.config.total
        else:
            return []
        room = max(0, most - len(self._window))
        stop = min(end, self._cursor + room * self.config.num_replicas)
        positions = list(range(self._cursor, stop, self.config.num_replicas))
        self._cursor += len(positions) * self.config.num_replicas
        return positions

    def observe(
        self, position: int, *, num_tokens: int, num_loss_tokens: int, truncated: bool = False
    ) -> None:
        """Take a drawn sample into the window; `num_tokens` 0 means the position emits nothing."""
        if num_tokens == 0:
            self._left_out += 1
            return
        padded = padded_length(num_tokens, self.config.multiple)
        held = Held(
            position=position,
            arrival=self._num_arrived,
            num_tokens=num_tokens,
            padded=padded,
            num_loss_tokens=num_loss_tokens,
            cost=self.config.cost.sample(padded),
            truncated=truncated,
        )
        self._num_arrived += 1
        self._window.append(held)

    def window_record(self) -> WindowRecord:
        """Return this replica's first record of the step."""
        return WindowRecord(
            config=self.config.digest(),
            step=self._step,
            position=self._consumed,
            num_held=len(self._window),
            cost_held=sum(held.cost for held in self._window),
            num_undrawn=self._num_undrawn(),
        )

    def set_target(self, records: Sequence[WindowRecord]) -> None:
        """Derive the common target from all replicas' first records.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
        """
        check_agreement(records, names=("config", "step", "position"))
        self._target = self._policy.target(records, start=self._start)

    def plan_record(self, *, wait_us: int = 0) -> PlanRecord:
        """Select and pack this replica's share; return its second record of the step."""
        target = self._require_target()
        undrawn = self._num_undrawn()
        self._selection = self._policy.select(
            self._window, target=target, step=self._step, num_undrawn=undrawn
        )
        chosen = self._selection
        bins = pack([held.padded for held in chosen], token_budget=self.config.token_budget)
        return PlanRecord(
            target=target.digest(),
            num_micro_batches=len(bins),
            num_samples=len(chosen),
            num_left_out=self._left_out,
            num_truncated=sum(held.truncated for held in chosen),
            num_tokens=sum(held.num_tokens for held in chosen),
            num_padded_tokens=sum(held.padded for held in chosen),
            num_squared_tokens=sum(held.num_tokens**2 for held in chosen),
            num_loss_tokens=sum(held.num_loss_tokens for held in chosen),
            cost=sum(held.cost for held in chosen),
            num_remaining=undrawn + len(self._window) - len(chosen),
            wait_us=wait_us,
        )

    def commit(self, records: Sequence[PlanRecord]) -> StepPlan:
        """Fix the step from all replicas' second records and move on to the next.

        Raises:
            ReplicaFailedError: a replica reported an error, or they do not agree.
        """
        check_agreement(records, names=("target",))
        count = common_count(
            [record.num_micro_batches for record in records], multiple=self.config.count_multiple
        )
        chosen = self._selection
        bins = fit_to_count(
            [held.padded for held in chosen],
            [held.cost for held in chosen],
            count=count,
            token_budget=self.config.token_budget,
        )
        totals = self._totals(records, count)
        plan = StepPlan(
            totals=totals,
            micro_batches=tuple(tuple(chosen[slot].position for slot in slots) for slots in bins),
        )
        self._advance(totals)
        return plan

    def state_dict(self) -> dict[str, object]:
        """Return the state between two steps: plain ints and lists, no payloads.

        `window` lists position, arrival and due step (-1: none) of each held sample.
        """
        return {
            "version": STATE_VERSION,
            "policy": self.config.policy.value,
            "num_replicas": self.config.num_replicas,
            "replica": self.replica,
            "start": self._start,
            "step": self._step,
            "consumed": self._consumed,
            "cursor": self._cursor,
            "num_emitted": self._num_emitted,
            "window": [
                [held.position, held.arrival, -1 if held.due_step is None else held.due_step]
                for held in self._window
            ],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, fetched: Mapping[int, tuple[int, int, bool]]
    ) -> None:
        """Continue from `state`; the argument is not changed.

        Args:
            state: from `state_dict` of the same replica.
            fetched: for each position of the state's window, its number of tokens, of loss tokens,
                and whether it was truncated (the caller preprocesses these samples again).

        Raises:
            ValueError: unknown or missing keys, another version, policy, topology or replica, or
                a window sample that is no longer usable.
        """
        current = self.state_dict()
        if set(state) != set(current):
            raise ValueError(
                f"data state has the keys {sorted(state)}; expected {sorted(current)}: it was "
                "written by another version of odb_megatron"
            )
        for name in ("version", "policy", "num_replicas", "replica"):
            if state[name] != current[name]:
                raise ValueError(
                    f"data state was saved with {name}={state[name]}, this run has "
                    f"{current[name]}: resume with the same setting, or start the data anew "
                    "(--finetune)"
                )
        self._start, self._step = state["start"], state["step"]
        self._consumed, self._cursor = state["consumed"], state["cursor"]
        self._num_emitted = state["num_emitted"]
        self._window, self._left_out = [], 0
        for position, arrival, due in state["window"]:
            num_tokens, num_loss_tokens, truncated = fetched[position]
            if num_tokens == 0:
                raise ValueError(
                    f"position {position} was in the window when the state was saved and can no "
                    "longer be used: the data or its policies have changed"
                )
            self._num_arrived = arrival
            self.observe(
                position,
                num_tokens=num_tokens,
                num_loss_tokens=num_loss_tokens,
                truncated=truncated,
            )
            self._window[-1] = replace(self._window[-1], due_step=None if due < 0 else due)
        self._num_arrived = self._num_emitted + len(self._window)

    def _require_target(self) -> StepTarget:
        assert self._target is not None, "set_target comes before plan_record"
        return self._target

    def _own_position_from(self, position: int) -> int:
        return position + (self.replica - position) % self.config.num_replicas

    def _num_undrawn(self) -> int:
        return max(0, -(-(self.config.total - self._cursor) // self.config.num_replicas))

    def _totals(self, records: Sequence[PlanRecord], count: int) -> StepTotals:
        samples = sum(record.num_samples for record in records)
        left_out = sum(record.num_left_out for record in records)
        remaining = sum(record.num_remaining for record in records)
        if self._consumed + samples + left_out + remaining != self.config.total:
            raise ReplicaFailedError(
                f"step {self._step} loses samples: {self._consumed} consumed before, {samples} "
                f"emitted, {left_out} left out and {remaining} remaining are not the "
                f"{self.config.total} of the run; this is a defect of odb_megatron, please report"
            )
        return StepTotals(
            step=self._step,
            num_micro_batches=count,
            num_consumed=samples + left_out,
            consumed_before=self._consumed,
            num_samples=samples,
            num_left_out=left_out,
            num_truncated=sum(record.num_truncated for record in records),
            num_tokens=sum(record.num_tokens for record in records),
            num_padded_tokens=sum(record.num_padded_tokens for record in records),
            num_squared_tokens=sum(record.num_squared_tokens for record in records),
            num_loss_tokens=sum(record.num_loss_tokens for record in records),
            num_idle=sum(num_idle(record.num_samples, count=count) for record in records),
            num_split=sum(
                num_split(record.num_samples, record.num_micro_batches, count=count)
                for record in records
            ),
            costs=tuple(record.cost + count * self.config.cost.fixed for record in records),
            wait_us=max(record.wait_us for record in records),
            is_final=remaining == 0,
        )

    def _advance(self, totals: StepTotals) -> None:
        chosen = {held.position for held in self._selection}
        self._num_emitted += len(chosen)
        self._window = [
            replace(held, due_step=self._step)
            if held.due_step is None and held.arrival < self._num_emitted
            else held
            for held in self._window
            if held.position not in chosen
        ]
        self._consumed += totals.num_consumed
        self._step += 1
        self._left_out = 0
        self._target = None
        self._selection = []
