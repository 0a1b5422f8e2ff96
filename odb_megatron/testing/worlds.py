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
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.step import StepPlan

__all__ = ["BYTES_PER_TOKEN", "World", "observe_drawn", "plan_step", "wire_size"]

BYTES_PER_TOKEN = 4
"""Size of a token when its sample is handed to another replica (`data.sample_wire`)."""


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


def observe_drawn(
    planner: ReplicaPlanner, lengths: Sequence[int], *, patches: Sequence[int] = ()
) -> list[int]:
    """Let a planner draw all it wants now; return the positions drawn.

    Args:
        planner: one replica's.
        lengths: tokens of the sample at each stream position; half of them carry loss.
        patches: its patches; empty for none.
    """
    drawn: list[int] = []
    while positions := planner.draw():
        for position in positions:
            length = lengths[position]
            planner.observe(
                position,
                num_tokens=length,
                num_loss_tokens=length // 2,
                num_patches=patches[position] if patches else 0,
                num_bytes=BYTES_PER_TOKEN * length,
            )
        drawn += positions
    return drawn


def plan_step(
    planners: Sequence[ReplicaPlanner],
    lengths: Sequence[int],
    *,
    patches: Sequence[int] = (),
    drawn: Sequence[list[int]] | None = None,
) -> list[StepPlan]:
    """Plan one step on all replicas.

    Args:
        planners: one per replica, in order.
        lengths: see `observe_drawn`.
        patches: see `observe_drawn`.
        drawn: per replica a list that the positions it draws are appended to.
    """
    for replica, planner in enumerate(planners):
        positions = observe_drawn(planner, lengths, patches=patches)
        if drawn is not None:
            drawn[replica] += positions
    windows = RecordTable(WindowRecord, [p.window_record().to_bytes() for p in planners])
    for replica, planner in enumerate(planners):
        planner.set_target(windows)
        positions = observe_drawn(planner, lengths, patches=patches)
        if drawn is not None:
            drawn[replica] += positions
    records = RecordTable(PlanRecord, [p.plan_record().to_bytes() for p in planners])
    lists: list[bytes] = []
    if planners[0].wants_exchange(records):
        lists = [planner.sample_list(records) for planner in planners]
    return [planner.commit(records, lists) for planner in planners]
