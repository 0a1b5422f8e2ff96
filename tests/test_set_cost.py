"""`ReplicaPlanner.set_cost` and the calibration exchange: another cost model between steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_calibration import _times
from test_plan import config, worlds

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.records import (
    CalibrationRecord,
    RecordTable,
    ReplicaFailedError,
    WindowRecord,
)
from odb_megatron.plan.step import StepPlan
from odb_megatron.plan.termination import LoaderClosedError, Phase
from odb_megatron.plan.window import Column, SampleWindow
from odb_megatron.testing.worlds import World, observe_drawn, plan_step

STEEP = CostModel.from_ratios(quadratic=1.0, fixed_tokens=100, patch_tokens=7)
COST_WORLD = World(
    config=config(policy=PolicyName.COST, total=400, global_batch_size=16, window=32),
    lengths=[random.Random(p).randint(1, 64) for p in range(400)],
)


def _plan_all(
    planners: list[ReplicaPlanner], world: World, *, switch: int | None
) -> list[list[StepPlan]]:
    steps: list[list[StepPlan]] = []
    while not planners[0].is_finished:
        if len(steps) == switch:
            for planner in planners:
                planner.set_cost(STEEP, linear_ps=5)
        steps.append(plan_step(planners, world.lengths, patches=world.patches))
    return steps


def _restored(world: World, planners: list[ReplicaPlanner]) -> list[ReplicaPlanner]:
    fresh = world.planners()
    for planner, old in zip(fresh, planners, strict=True):
        state: Any = old.state_dict()
        planner.load_state_dict(state, fetched=world.fetched(state))
        assert planner.state_dict() == state
    return fresh


@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(0, 6), st.integers(0, 4))
def test_a_switch_loses_nothing_and_survives_a_resume(
    world: World, switch: int, later: int
) -> None:
    steps = _plan_all(world.planners(), world, switch=switch)
    emitted = [p for plans in steps for plan in plans for m in plan.micro_batches for p in m]
    assert sorted(emitted) == [p for p, length in enumerate(world.lengths) if length]
    for plans in steps:
        assert all(plan.totals == plans[0].totals for plan in plans)
    stop = min(switch + later, len(steps))
    planners = world.planners()
    for step in range(stop):
        if step == switch:
            for planner in planners:
                planner.set_cost(STEEP, linear_ps=5)
        plan_step(planners, world.lengths, patches=world.patches)
    resumed = _restored(world, planners)
    assert {planner.is_calibrated for planner in resumed} == {stop > switch}
    left = None if stop > switch else switch - stop
    assert _plan_all(resumed, world, switch=left) == steps[stop:]


def test_the_switch_matters() -> None:
    """Guard: another model gives other steps, and they are balanced by it."""
    before = _plan_all(COST_WORLD.planners(), COST_WORLD, switch=None)
    after = _plan_all(COST_WORLD.planners(), COST_WORLD, switch=5)
    assert after[:5] == before[:5]
    assert after[5:] != before[5:]
    balances = [plans[0].totals.balance for plans in after[5:-4]]
    assert sum(balances) / len(balances) > 0.97
    planned = sum(STEEP.sample(COST_WORLD.lengths[p]) for m in after[9][0].micro_batches for p in m)
    totals = after[9][0].totals
    assert planned + totals.num_micro_batches * STEEP.fixed == totals.costs[0]


def test_the_running_mean_of_samples_stays_the_batch_size() -> None:
    steps = _plan_all(COST_WORLD.planners(), COST_WORLD, switch=8)[:-2]
    consumed = sum(plans[0].totals.num_consumed for plans in steps)
    assert consumed / len(steps) == pytest.approx(16, rel=0.03)


def test_the_window_is_priced_anew() -> None:
    planner = COST_WORLD.planners()[0]
    observe_drawn(planner, COST_WORLD.lengths)
    held: Any = planner.state_dict()["window"]
    planner.set_cost(STEEP)
    expected = sum(STEEP.sample(COST_WORLD.lengths[p]) for p, _, _ in held)
    assert len(held) == 32
    assert planner.window_record().cost_held == expected
    assert planner.config.cost == STEEP


def test_what_was_learned_is_learned_again() -> None:
    planners = COST_WORLD.planners()
    for _ in range(4):
        plan_step(planners, COST_WORLD.lengths)
    learned: Any = planners[0].state_dict()["knowledge"]
    for planner in planners:
        planner.set_cost(planner.config.cost)  # the same: nothing is forgotten
    assert planners[0].state_dict()["knowledge"] == learned
    for planner in planners:
        planner.set_cost(STEEP)
    fresh: Any = planners[0].state_dict()["knowledge"]
    assert [a for a, b in zip(fresh, learned, strict=True) if a == b and b] == [
        learned[4]
    ]  # margin
    observe_drawn(planners[0], COST_WORLD.lengths)
    record = planners[0].window_record()
    assert record.num_observed == record.num_held


def test_replicas_must_switch_together() -> None:
    planners = COST_WORLD.planners()
    planners[1].set_cost(STEEP)
    for planner in planners:
        observe_drawn(planner, COST_WORLD.lengths)
    records = RecordTable(WindowRecord, [p.window_record().to_bytes() for p in planners])
    for planner in planners:
        with pytest.raises(ReplicaFailedError, match="replicas disagree on config"):
            planner.set_target(records)


def test_a_cost_beyond_the_records_changes_nothing() -> None:
    window = SampleWindow()
    window.append([0, 0, 1 << 20, 1 << 20, 1, 0, 77, 0, -1, 0])
    with pytest.raises(ValueError, match="lower the quadratic or patch cost"):
        window.reprice(CostModel.from_ratios(quadratic=1.0, fixed_tokens=0))
    assert (window.cost, window.rows()[Column.COST].tolist()) == (77, [77])
    window.reprice(CostModel())
    assert window.cost == 1 << 36
    SampleWindow().reprice(STEEP)


def test_calibration_follows_the_protocol() -> None:
    planners = COST_WORLD.planners()
    for _ in range(3):
        plan_step(planners, COST_WORLD.lengths)
    records = [p.calibration_record(_times(r, 40, budget=64)) for r, p in enumerate(planners)]
    assert [record.step for record in records] == [3, 3]
    table = RecordTable(CalibrationRecord, [record.to_bytes() for record in records])
    fits = [planner.fit_cost(table) for planner in planners]
    assert fits[0] == fits[1]
    assert fits[0].linear_ps > 0
    for planner, fit in zip(planners, fits, strict=True):
        planner.set_cost(fit.cost, linear_ps=fit.linear_ps)
    plan_step(planners, COST_WORLD.lengths)


def test_closing_and_failing_in_the_calibration_exchange() -> None:
    planners = COST_WORLD.planners()
    planners[1].close()
    table = RecordTable.from_records([planner.calibration_record([]) for planner in planners])
    for planner in planners:
        with pytest.raises(LoaderClosedError, match="replica 1 closed its loader in step 0"):
            planner.fit_cost(table)
        assert planner.phase is Phase.CLOSED
    planners = COST_WORLD.planners()
    failed = CalibrationRecord(step=0, failed=True, message="OSError: no clock")
    table = RecordTable.from_records([planners[0].calibration_record([]), failed])
    for planner in planners:
        with pytest.raises(ReplicaFailedError, match="replica 1 failed: OSError: no clock"):
            planner.fit_cost(table)
