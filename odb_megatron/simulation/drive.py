"""The real planners of all replicas in one thread, exchanging records in their wire form.

The one place that knows the order of a planner's calls; it neither scores nor decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from odb_megatron.plan.batch_size import check_batch_size
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.step import StepPlan
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["BYTES_PER_TOKEN", "check_plannable", "observe_drawn", "plan_step", "run_planners"]

BYTES_PER_TOKEN = 4
"""Size of a token when its sample is handed to another replica (`data.sample_wire`, which adds a
bit per token for the loss mask and 36 bytes per sample)."""


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


def run_planners(policy: PolicyName, stream: Stream, setting: Setting) -> Schedule:
    """Run one of our policies over a stream, to its end."""
    config = _config(policy, stream, setting)
    planners = [ReplicaPlanner(config, replica=replica) for replica in range(setting.num_replicas)]
    lengths: list[int] = stream.lengths.tolist()
    drawn: list[list[int]] = [[] for _ in planners]
    steps = []
    bytes_moved: list[int] = []
    while not planners[0].is_finished:
        plans = plan_step(planners, lengths, drawn=drawn)
        steps.append([plan.micro_batches for plan in plans])
        bytes_moved.append(plans[0].totals.bytes_moved)
    schedule = Schedule.build(
        steps,
        num_replicas=setting.num_replicas,
        arrivals=[np.array(positions, dtype=np.int64) for positions in drawn],
        bytes_moved=bytes_moved,
    )
    choice = planners[0].exchange_choice
    exchanges = setting.exchange is ExchangeMode.TOKENS or (choice is not None and choice.exchanges)
    return replace(
        schedule,
        keeps_order=policy is PolicyName.SAMPLES or exchanges,
        exchange="" if choice is None else choice.reason(),
    )


def check_plannable(policy: PolicyName, stream: Stream, setting: Setting) -> None:
    """Raise ValueError where the planner refuses the setting, before anything is run."""
    check_batch_size(
        policy, global_batch_size=setting.global_batch_size, num_replicas=setting.num_replicas
    )
    ReplicaPlanner(_config(policy, stream, setting), replica=0)


def _config(policy: PolicyName, stream: Stream, setting: Setting) -> PlanConfig:
    return PlanConfig(
        policy=policy,
        total=len(stream),
        global_batch_size=setting.global_batch_size,
        num_replicas=setting.num_replicas,
        token_budget=setting.token_budget,
        window=setting.window,
        max_delay_steps=setting.max_delay_steps,
        count_multiple=setting.count_multiple,
        cost=setting.cost,
        balance=setting.sync,
        exchange=setting.exchange,
    )
