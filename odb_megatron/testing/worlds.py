"""Small worlds: all replicas of a run planned in one thread, over made-up lengths.

For tests and the fuzzer; no torch, no process groups. A length of 0 stands for a position that
emits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.step import StepPlan
from odb_megatron.simulation.drive import BYTES_PER_TOKEN, observe_drawn, plan_step

__all__ = ["World", "observe_drawn", "plan_step", "wire_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A run's configuration, and the length and patches of the sample at each stream position.

    Attributes:
        config: what all replicas agree on; its `total` is the number of lengths.
        lengths: tokens of each position's sample.
        consumed: positions consumed before the run starts.
        patches: patches of each position's sample, empty for none.
        epochs: epoch of each position, empty for a single one.
    """

    config: PlanConfig
    lengths: Sequence[int]
    consumed: int = 0
    patches: Sequence[int] = ()
    epochs: Sequence[int] = ()

    def fetched(self, state: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
        """Return what `ReplicaPlanner.load_state_dict` wants to know of a state's samples."""
        return {
            position: (
                self.lengths[position],
                self.lengths[position] // 2,
                0,
                self.patches[position] if self.patches else 0,
                wire_size(self, position),
            )
            for position, _, _ in state["window"]
        }

    def planners(self) -> list[ReplicaPlanner]:
        """Return one planner per replica."""
        return [
            ReplicaPlanner(self.config, replica=replica, consumed=self.consumed)
            for replica in range(self.config.num_replicas)
        ]

    def run(self, *, most_steps: int = 100_000) -> list[list[StepPlan]]:
        """Plan until every planner is finished; return the steps, each a plan per replica."""
        planners = self.planners()
        steps: list[list[StepPlan]] = []
        while not planners[0].is_finished:
            assert len(steps) < most_steps, "the run does not end"
            steps.append(plan_step(planners, self.lengths, patches=self.patches))
        assert all(planner.is_finished for planner in planners)
        return steps


def wire_size(world: World, position: int) -> int:
    """Bytes of a sample when it is handed to another replica."""
    return BYTES_PER_TOKEN * world.lengths[position]
