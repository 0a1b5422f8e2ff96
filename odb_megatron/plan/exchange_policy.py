"""The policy `cost` when replicas hand samples to each other: oldest first, up to the common cost.

Pure. The exchange evens the step out, so nothing is held back or brought forward, and steps are
composed as the stream is. An outlier is not held for others either: the exchange lets it run on any
replica, but what it costs beyond a replica's share is lost, which `cost` without an exchange
avoids by making all replicas do more in its step.
"""

from __future__ import annotations

import numpy as np

from odb_megatron.plan.cost_policy import CostPolicy
from odb_megatron.plan.policy import StepState, select_all, select_none
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.target import StepTarget
from odb_megatron.plan.window import Column, SampleWindow

__all__ = ["OldestFirstPolicy"]


class OldestFirstPolicy(CostPolicy):
    """Each replica emits its oldest samples, as many as come nearest to the common cost target."""

    def describe(
        self, window: SampleWindow, *, state: StepState, first_new: int, num_emitted: int
    ) -> dict[str, int]:
        """See base."""
        rows = window.rows()
        fresh = rows[:, int(np.searchsorted(rows[Column.ARRIVAL], first_new)) :]
        return {
            "num_observed": fresh.shape[1],
            "tokens_observed": int(fresh[Column.PADDED].sum()),
            "cost_observed": int(fresh[Column.COST].sum()),
        }

    def offer(self, window: SampleWindow, *, load: int) -> dict[str, int]:
        """See base: the exchange evens out the last steps too."""
        return {}

    def target(
        self, table: RecordTable[WindowRecord], *, state: StepState, steps_left: int, drained: bool
    ) -> StepTarget:
        """See base."""
        knowledge = self._knowledge
        knowledge.observe(table)
        cost = None
        if steps_left > 1 and knowledge.num_samples and table.total("num_held"):
            wanted = self._wanted(state) * knowledge.cost // knowledge.num_samples
            cost = max(1, wanted // self._config.num_replicas)
        return StepTarget(end=self.total, cost=cost, steps_left=steps_left)

    def select(
        self, window: SampleWindow, *, target: StepTarget, state: StepState, num_to_come: int | None
    ) -> Selection:
        """See base."""
        if target.cost is None:
            return select_all(window) if target.steps_left == 1 else select_none()
        if not len(window):
            return select_none()
        cost = target.cost
        if num_to_come is not None:  # spread what is left evenly
            left = window.cost + num_to_come * self.mean_cost
            cost = -(-left // target.steps_left)
        rows = self._view(window, state)
        sums = rows[Column.COST].cumsum()
        most = int(np.searchsorted(sums, cost))  # so many stay below it
        if most < len(sums):
            below = int(sums[most - 1]) if most else 0
            most += int(sums[most]) - cost < cost - below
        due = np.flatnonzero(self._due(rows, state.step))  # of a run that began without exchange
        most = max(1, most, int(due[-1]) + 1 if len(due) else 0)
        return Selection(chosen=np.ones(min(most, len(sums)), dtype=np.bool_))

    def learn(self, table: RecordTable[PlanRecord], *, target: StepTarget, count: int) -> None:
        """See base: there is nothing to learn."""
