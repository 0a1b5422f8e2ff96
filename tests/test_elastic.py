"""Resuming with another number of replicas, and what a saved state is refused for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.elastic import check_together, elastic_state, leftovers
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.state import check_values
from odb_megatron.testing.worlds import World, plan_step

TOTAL = 90


def config(num_replicas: int = 2, **changes: Any) -> PlanConfig:
    values: dict[str, Any] = {
        "policy": PolicyName.COST,
        "total": TOTAL,
        "global_batch_size": 8,
        "num_replicas": num_replicas,
        "token_budget": 64,
        "window": 12,
        "max_delay_steps": 2,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    }
    return PlanConfig(**{**values, **changes})


def world(num_replicas: int = 2, **changes: Any) -> World:
    made = config(num_replicas, **changes)
    return World(config=made, lengths=[1 + 7 * p % 40 for p in range(made.total)])


def saved(stopped: World, *, steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Positions emitted by so many steps, and the states after them, through JSON."""
    planners = stopped.planners()
    emitted: list[int] = []
    for _ in range(steps):
        if not planners[0].is_finished:
            emitted += positions(plan_step(planners, stopped.lengths))
    return emitted, [json.loads(json.dumps(planner.state_dict())) for planner in planners]


def positions(plans: Any) -> list[int]:
    return [p for plan in plans for m in plan.micro_batches for p in m]


def resumed(states: list[dict[str, Any]], later: World) -> list[ReplicaPlanner]:
    planners = later.planners()
    for replica, planner in enumerate(planners):
        planner.load_state_dict(elastic_state(states, later.config, replica=replica), fetched={})
    return planners


def run_on(planners: list[ReplicaPlanner], later: World) -> list[int]:
    emitted: list[int] = []
    while not planners[0].is_finished:
        emitted += positions(plan_step(planners, later.lengths))
    return emitted


@pytest.mark.parametrize("steps", [0, 1, 4, 8, 11])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 2), (8, 3), (1, 4), (4, 1)])
def test_every_sample_once(before: int, after: int, steps: int) -> None:
    first, states = saved(world(before), steps=steps)
    later = world(after)
    rest = run_on(resumed(states, later), later)
    assert sorted(first + rest) == list(range(TOTAL))


def test_leftovers_are_spread_evenly_and_oldest_first() -> None:
    _, states = saved(world(3), steps=4)
    held = leftovers(states)
    assert len(held) > 20
    rows = [row for state in states for row in state["window"]]
    assert sum(due >= 0 for _, _, due in rows) > 0, "some samples are overdue"
    overdue = [position for due, position in sorted((row[2], row[0]) for row in rows) if due >= 0]
    assert held[: len(overdue)] == overdue
    assert held[len(overdue) :] == sorted(held[len(overdue) :])
    dealt = [elastic_state(states, config(4), replica=r)["upcoming"] for r in range(4)]
    assert [held[r::4] for r in range(4)] == dealt
    sizes = [len(held[r::4]) for r in range(4)]
    assert max(sizes) - min(sizes) <= 1


def test_the_states_given_are_not_changed() -> None:
    _, states = saved(world(3), steps=4)
    before = json.dumps(states)
    resumed(states, world(2))
    assert json.dumps(states) == before


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 6),
    st.sampled_from(ExchangeMode),
)
def test_several_changes_of_size(
    before: int, sizes: list[int], steps: int, exchange: ExchangeMode
) -> None:
    emitted, states = saved(world(before, exchange=exchange), steps=steps)
    for size in sizes:
        later = world(size, exchange=exchange)
        planners = resumed(states, later)
        for _ in range(min(steps, 2)):
            if not planners[0].is_finished:
                emitted += positions(plan_step(planners, later.lengths))
        states = [json.loads(json.dumps(planner.state_dict())) for planner in planners]
    emitted += run_on(planners, later)
    assert Counter(emitted) == Counter(range(TOTAL))


def test_a_smaller_window_than_what_is_held() -> None:
    first, states = saved(world(2, window=40), steps=2)
    assert min(len(state["window"]) for state in states) > 20
    later = world(2, window=4)
    planners = later.planners()
    for planner, state in zip(planners, states, strict=True):
        planner.load_state_dict(state, fetched=later.fetched(state))
    assert sorted(first + run_on(planners, later)) == list(range(TOTAL))


@pytest.mark.parametrize("assignment", Assignment)
def test_a_longer_run(assignment: Assignment) -> None:
    """Also after the drain had begun, whose deadline no longer holds."""
    changes: dict[str, Any] = {"assignment": assignment}
    last = len(world(2, **changes).run()) - 1
    emitted, states = saved(world(2, **changes), steps=last)
    assert states[0]["deadline"] >= 0
    later = world(2, **changes | {"total": 2 * TOTAL})
    planners = later.planners()
    for planner, state in zip(planners, states, strict=True):
        planner.load_state_dict(state, fetched=later.fetched(state))
    assert sorted(emitted + run_on(planners, later)) == list(range(2 * TOTAL))


def test_a_run_that_is_over_stays_so() -> None:
    _, states = saved(world(2), steps=len(world(2).run()))
    planners = resumed(states, world(3))
    assert all(planner.is_finished for planner in planners)


@pytest.mark.parametrize("shards", [(), (40, 50)])
def test_fixed_shards_are_refused_by_name(shards: tuple[int, ...]) -> None:
    fixed = {"assignment": Assignment.FIXED}
    _, states = saved(world(2, shards=shards, **fixed), steps=2)
    name = "shards of their own" if shards else "fixed shards"
    others = config(3, shards=(20, 30, 40) if shards else (), **fixed)
    with pytest.raises(ValueError, match=f"of 2 replicas and this run has 3: a source with {name}"):
        elastic_state(states, others, replica=0)


def test_a_shorter_run_than_what_was_drawn() -> None:
    _, states = saved(world(2), steps=4)
    planner = ReplicaPlanner(config(total=states[0]["cursor"] - 1), replica=0)
    with pytest.raises(ValueError, match=r"samples, but the data state has \d+ drawn already"):
        planner.load_state_dict(states[0], fetched={})


@pytest.mark.parametrize(
    ("replica", "change", "text"),
    [
        (1, {"step": 5}, "of replicas 0 and 1 differ in step"),
        (2, {"consumed": 1}, "of replicas 0 and 2 differ in consumed"),
        (1, {"replica": 2}, "at place 1 has replica=2; expected 1: restore the files of all"),
        (0, {"num_replicas": 2}, "at place 0 has num_replicas=2; expected 3"),
        (1, {"upcoming": []}, "a position is lost or came twice"),
    ],
)
def test_states_that_do_not_belong_together(
    replica: int, change: dict[str, Any], text: str
) -> None:
    _, states = saved(world(3), steps=4)
    check_together(states)
    states[replica] |= change
    with pytest.raises(ValueError, match=text):
        check_together(states)


def test_a_position_on_two_replicas() -> None:
    _, states = saved(world(2), steps=4)
    states[1]["upcoming"] = states[0]["upcoming"]
    with pytest.raises(ValueError, match="hold a position on two replicas"):
        check_together(states)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 3}, "saved with version=3, this run has 4: resume with the version of"),
        ({"more": 1}, "has the keys"),
        ({"policy": 1}, "has policy 1; expected a name"),
        ({"step": 1.5}, r"has step 1\.5; expected an integer of 0 or more, below 2\*\*62"),
        ({"step": True}, "has step True; expected an integer"),
        ({"consumed": -1}, "has consumed -1; expected an integer of 0 or more"),
        ({"cursor": 1 << 62}, "has cursor 4611686018427387904; expected an integer of 0"),
        ({"deadline": -2}, "has deadline -2; expected an integer of -1 or more"),
        ({"cost": [1, 2]}, r"has cost \[1, 2\]; expected a list of 4 integers"),
        ({"cost": "x" * 100}, r"has cost 'xxx.* \.\.\.; expected a list of integers"),
        ({"knowledge": [0] * 65}, "has knowledge .*; expected a list of 64 integers"),
        ({"upcoming": [[1]]}, r"has upcoming \[1\]; expected an integer"),
        ({"window": {}}, "has window {}; expected a list"),
        ({"window": [[1, 2]]}, r"has window \[1, 2\]; expected lists of position, arrival and due"),
        ({"window": [[-1, 0, -1]]}, r"has window \[-1, 0, -1\]; expected lists of position"),
        ({"window": [[1, 5, -1], [2, 4, -1]]}, "a position or an arrival twice, or out of order"),
        ({"window": [[1, 5, -1], [1, 6, -1]]}, "a position or an arrival twice, or out of order"),
        ({"window": [[80, 5, -1]]}, r"holds position 80, of \d+ that were drawn"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], text: str) -> None:
    _, states = saved(world(2), steps=4)
    check_values(states[0])
    with pytest.raises(ValueError, match=text):
        check_values(states[0] | change)
    planner = ReplicaPlanner(config(), replica=0)
    with pytest.raises(ValueError, match=text):
        planner.load_state_dict(states[0] | change, fetched={})


@pytest.mark.parametrize(
    ("state", "text"),
    [([], "is of type list; expected an object"), ({}, "has the keys []".replace("[]", r"\[\]"))],
)
def test_what_is_no_state(state: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_values(state)


def test_knowledge_of_another_length() -> None:
    _, states = saved(world(2), steps=4)
    planner = ReplicaPlanner(config(), replica=0)
    with pytest.raises(ValueError, match="has knowledge .*; expected a list of 10 integers"):
        planner.load_state_dict(states[0] | {"knowledge": [1]}, fetched={})


def test_another_batch_size_does_not_make_up_for_the_old_one() -> None:
    """Else the first steps would be half as large again until 4 steps of 8 look like 4 of 16."""
    _, states = saved(world(2, total=400), steps=6)
    later = world(4, total=400, global_batch_size=16)
    planners = resumed(states, later)
    sizes = [len(positions(plan_step(planners, later.lengths))) for _ in range(8)]
    assert 14 <= sum(sizes) / 8 <= 18
    kept = replace(config(total=400), global_batch_size=8)
    assert resumed(states, World(config=kept, lengths=later.lengths))[0].state_dict()["start"] == 0
