"""Positions that go to another replica near the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import Holdings
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.reassign import (
    OFFERS,
    EndLoads,
    Reassignment,
    end_loads,
    holdings_after,
    offers,
    reassign,
)
from odb_megatron.plan.records import RecordTable, WindowRecord
from odb_megatron.plan.step import StepPlan
from odb_megatron.plan.window import Column
from odb_megatron.testing.invariants import tally_run
from odb_megatron.testing.worlds import World, plan_step

UNIT = 1 << 16  # cost of a token, in which offers are told
NOBODY = EndLoads(level=10 * UNIT, lowest=0)


def rows(costs: Sequence[int], *, due: Sequence[int] = ()) -> np.ndarray:
    held = np.zeros((len(Column), len(costs)), dtype=np.int64)
    held[Column.POSITION] = range(100, 100 + len(costs))
    held[Column.COST] = np.array(costs) * UNIT
    held[Column.DUE] = due or [-1] * len(costs)
    return held


def offered(fields: dict[str, int]) -> list[tuple[int, int]]:
    return [(fields[name] >> 24, fields[name] & 0xFFFFFF) for name in OFFERS if name in fields]


class TestOffers:
    @pytest.mark.parametrize(
        ("costs", "load", "expected"),
        [
            ([3, 2, 1], 10, []),  # no excess
            ([3, 2, 1], 11, []),  # not more than a position
            ([3, 2, 1], 12, [(101, 2)]),  # 3 would be too much
            ([5, 1, 1, 1, 1, 1], 15, [(100, 5)]),
            ([1, 1, 1, 1, 1, 1], 30, [(100, 1), (101, 1), (102, 1), (103, 1)]),
            ([40, 7, 4, 9], 30, [(103, 9), (101, 7), (102, 4)]),  # 40 is more than half the way
            ([], 30, []),
        ],
    )
    def test_table(self, costs: list[int], load: int, expected: list[tuple[int, int]]) -> None:
        found = offers(rows(costs), load=load * UNIT, ends=NOBODY, each=UNIT)
        assert offered(found) == expected

    def test_what_is_late_stays(self) -> None:
        held = rows([5, 4, 3], due=[2, -1, 0])
        found = offers(held, load=20 * UNIT, ends=NOBODY, each=UNIT)
        assert offered(found) == [(101, 4)]


def table(given: Sequence[Sequence[tuple[int, int]]]) -> RecordTable[WindowRecord]:
    return RecordTable.from_records(
        [
            WindowRecord(
                config=0,
                step=0,
                position=0,
                **{name: p << 24 | c for name, (p, c) in zip(OFFERS, own, strict=False)},
            )
            for own in given
        ]
    )


def holdings(costs: Sequence[int], upcoming: Sequence[int] = ()) -> Holdings:
    return Holdings(
        num_held=np.full(len(costs), 50, dtype=np.int64),
        cost_held=np.array(costs, dtype=np.int64) * UNIT,
        num_upcoming=np.array(upcoming or [0] * len(costs), dtype=np.int64),
    )


class TestReassign:
    @pytest.mark.parametrize(
        ("costs", "given", "expected"),
        [
            ([20, 10, 0], [[], [], []], []),
            ([20, 10, 0], [[(7, 9)], [], []], [(7, 0, 2)]),
            ([20, 10, 0], [[(7, 20)], [], []], []),  # would only change places
            ([20, 10, 0], [[], [(7, 2)], []], []),  # has no excess after all
            ([30, 10, 2, 0], [[(7, 9), (8, 5)], [], [], []], [(7, 0, 3), (8, 0, 2)]),
            ([30, 40, 2, 0], [[(7, 6)], [(8, 9)], [], []], [(8, 1, 3), (7, 0, 2)]),  # most first
        ],
    )
    def test_table(
        self,
        costs: list[int],
        given: list[list[tuple[int, int]]],
        expected: list[tuple[int, int, int]],
    ) -> None:
        found = reassign(table(given), holdings(costs), num_unassigned=0, each=UNIT)
        assert [(move.position, move.giver, move.taker) for move in found] == expected

    def test_far_from_the_end_nothing_moves(self) -> None:
        given = [[(7, 9)], [], []]
        assert not reassign(table(given), holdings([20, 10, 0]), num_unassigned=60, each=UNIT)

    @given(
        st.lists(
            st.tuples(st.integers(0, 200), st.lists(st.integers(1, 60), max_size=4)),
            min_size=1,
            max_size=12,
        ),
        st.integers(0, 100),
    )
    def test_the_largest_load_never_grows(
        self, replicas: list[tuple[int, list[int]]], unassigned: int
    ) -> None:
        given = [
            [(10 * replica + at, cost) for at, cost in enumerate(sorted(own, reverse=True))]
            for replica, (_, own) in enumerate(replicas)
        ]
        before = holdings([load for load, _ in replicas])
        moves = reassign(table(given), before, num_unassigned=unassigned, each=UNIT)
        after = holdings_after(before, moves)
        assert after.num_held.sum() == before.num_held.sum()
        assert after.cost_held.sum() == before.cost_held.sum()
        assert after.cost_held.max() <= before.cost_held.max()
        assert len({move.position for move in moves}) == len(moves)
        level = end_loads(before.loads(UNIT), num_unassigned=unassigned, each=UNIT).level
        for move in moves:
            assert before.cost_held[move.giver] > level >= before.cost_held[move.taker]

    def test_what_is_on_its_way_counts(self) -> None:
        ends = end_loads(holdings([4, 0], upcoming=[0, 6]).loads(UNIT), num_unassigned=2, each=UNIT)
        assert ends == EndLoads(level=6 * UNIT, lowest=4 * UNIT)

    def test_counts_follow_the_moves(self) -> None:
        move = Reassignment(position=7, cost=2 * UNIT, giver=0, taker=1)
        after = holdings_after(holdings([5, 1]), [move])
        assert after.num_held.tolist() == [49, 51]
        assert after.cost_held.tolist() == [3 * UNIT, 3 * UNIT]


def lengths(num: int, seed: int) -> list[int]:
    random = np.random.RandomState(seed)
    drawn: list[int] = np.clip(random.lognormal(2.0, 1.2, size=num), 1, 200).astype(int).tolist()
    return drawn


def run(seed: int, *, resume_at: int = -1) -> tuple[World, list[list[StepPlan]]]:
    config = PlanConfig(
        policy=PolicyName.COST,
        total=400,
        global_batch_size=40,
        num_replicas=4,
        token_budget=200,
        window=24,
    )
    world = World(config=config, lengths=lengths(400, seed))
    planners = world.planners()
    steps: list[list[StepPlan]] = []
    while not planners[0].is_finished:
        if len(steps) == resume_at:
            states = [planner.state_dict() for planner in planners]
            planners = world.planners()
            for planner, state in zip(planners, states, strict=True):
                planner.load_state_dict(state, fetched=world.fetched(state))
        steps.append(plan_step(planners, world.lengths))
    return world, steps


class TestRuns:
    @pytest.mark.parametrize("seed", range(4))
    def test_all_are_emitted_once_by_who_fetched_them_last(self, seed: int) -> None:
        world, steps = run(seed)
        assert tally_run(world, steps).num_violations == 0
        holder: dict[int, int] = {}
        for plans in steps:
            given = [p for plan in plans for p in plan.reassigned.given]
            taken = [p for plan in plans for p in plan.reassigned.taken]
            assert sorted(given) == sorted(taken)
            assert {plan.totals.num_reassigned for plan in plans} == {len(given)}
            for replica, plan in enumerate(plans):
                holder |= dict.fromkeys(plan.reassigned.taken, replica)
                for position in (p for m in plan.micro_batches for p in m):
                    assert holder.get(position, replica) == replica
        assert holder, "nothing was reassigned"

    @pytest.mark.parametrize("seed", range(2))
    def test_a_resumed_run_reassigns_the_same(self, seed: int) -> None:
        _, whole = run(seed)
        moving = [at for at, plans in enumerate(whole) if plans[0].totals.num_reassigned]
        for at in moving:
            assert run(seed, resume_at=at)[1] == whole
