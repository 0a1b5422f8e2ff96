"""`odb_megatron.plan.draw`: who gets which positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import (
    Assignment,
    DrawLimits,
    Holdings,
    deal,
    held_goal,
    own_positions,
)
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.shard import FixedShard, OnlineShard
from odb_megatron.testing.worlds import World, observe_drawn, plan_step


def _ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


class TestDeal:
    @pytest.mark.parametrize(
        ("amount", "costs", "caps", "each", "expected"),
        [
            (0, [5, 1], [9, 9], 1, [0, 0]),
            (4, [0, 0], [9, 9], 1, [2, 2]),
            (3, [0, 0], [9, 9], 1, [2, 1]),  # ties go to the lower replica
            (4, [10, 0, 5], [9, 9, 9], 2, [0, 3, 1]),
            (4, [0, 0], [1, 9], 1, [1, 3]),  # a full window
            (20, [0, 7], [3, 4], 1, [3, 4]),  # more than there is room for
            (2, [100, 99], [9, 9], 10, [1, 1]),
            (2, [100, 89], [9, 9], 10, [0, 2]),
        ],
    )
    def test_table(
        self, amount: int, costs: list[int], caps: list[int], each: int, expected: list[int]
    ) -> None:
        found = deal(amount, costs=_ints(costs), caps=_ints(caps), each=each)
        assert found.tolist() == expected

    @given(
        st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), min_size=1, max_size=12),
        st.integers(1, 30),
        st.integers(0, 100),
    )
    def test_no_exchange_would_help(
        self, replicas: list[tuple[int, int]], each: int, amount: int
    ) -> None:
        costs, caps = _ints([c for c, _ in replicas]), _ints([c for _, c in replicas])
        amount = min(amount, int(caps.sum()))
        dealt = deal(amount, costs=costs, caps=caps, each=each)
        assert int(dealt.sum()) == amount
        assert ((dealt >= 0) & (dealt <= caps)).all()
        after = costs + dealt * each
        receivers, open_ones = np.flatnonzero(dealt), np.flatnonzero(dealt < caps)
        if len(receivers) and len(open_ones):
            assert after[receivers].max() - each < after[open_ones].min() + each


class TestPositions:
    @given(st.lists(st.integers(0, 15), min_size=1, max_size=10), st.integers(0, 1000))
    def test_every_position_once(self, counts: list[int], first: int) -> None:
        found = [own_positions(_ints(counts), r, first=first) for r in range(len(counts))]
        assert [len(own) for own in found] == counts
        assert all(own == sorted(own) for own in found)
        everyone = sorted(p for own in found for p in own)
        assert everyone == list(range(first, first + sum(counts)))

    def test_equal_counts_take_turns(self) -> None:
        assert own_positions(_ints([3, 3, 3]), 1, first=10) == [11, 14, 17]


class TestGoal:
    @pytest.mark.parametrize("is_late", [False, True])
    def test_shape(self, is_late: bool) -> None:
        """All that fits while the run is long; some kept back at its end; nothing at the last."""
        goals = [
            held_goal(remaining, capacity=300, batch=100, is_late=is_late)
            for remaining in range(0, 2000)
        ]
        assert all(goal <= min(300, remaining) for remaining, goal in enumerate(goals))
        assert all(goals[remaining] == 300 for remaining in range(500, 2000))
        assert all(goals[remaining] == remaining for remaining in range(0, 126))
        assert goals[300] < 300

    def test_more_is_given_when_more_is_known(self) -> None:
        early = held_goal(240, capacity=300, batch=100, is_late=False)
        late = held_goal(240, capacity=300, batch=100, is_late=True)
        assert early < late < 240


class TestOnlineShard:
    LIMITS = DrawLimits(total=100, capacity=12, batch=20)

    def _holdings(self, held: list[int], costs: list[int]) -> Holdings:
        return Holdings(
            num_held=_ints(held), cost_held=_ints(costs), num_upcoming=_ints([0] * len(held))
        )

    def test_a_window_full_of_cost_waits(self) -> None:
        shards = [OnlineShard(self.LIMITS, replica=r, cursor=0) for r in range(2)]
        for shard in shards:
            shard.top_up(self._holdings([4, 4], [40, 130]), each=10)
        assert [len(shard.upcoming) for shard in shards] == [8, 0]

    def test_announced_positions_are_the_drawn_ones(self) -> None:
        shard = OnlineShard(self.LIMITS, replica=1, cursor=0, upcoming=[5, 7])
        shard.top_up(self._holdings([3, 3], [3, 3]), each=1)
        announced = shard.take_announced()
        assert shard.take_announced() == []
        drawn = [shard.draw(most, end=0, is_late=late) for most, late in ((3, True), (100, False))]
        assert drawn[0] + drawn[1] == announced
        assert len(drawn[0]) == 3
        assert announced[:2] == [5, 7]

    def test_the_end_is_dealt_out(self) -> None:
        shard = OnlineShard(self.LIMITS, replica=0, cursor=95)
        shard.top_up(self._holdings([9, 9], [90, 0]), each=10, is_final=True)
        assert (shard.num_unassigned, len(shard.upcoming)) == (0, 0)


class TestFixedShard:
    def test_positions_come_in_order_and_below_the_end(self) -> None:
        shard = FixedShard(range(1, 30, 3), cursor=4)
        assert shard.draw(2, end=100, is_late=False) == [4, 7]
        assert shard.draw(9, end=14, is_late=False) == [10, 13]
        assert shard.draw(9, end=13, is_late=False) == []
        assert shard.draw(9, end=100, is_late=True) == []
        assert (shard.cursor, shard.num_undrawn, shard.is_own_known) == (16, 5, False)
        assert shard.draw(9, end=100, is_late=False) == [16, 19, 22, 25, 28]
        assert shard.is_own_known

    def test_one_drained_replica_drains_all(self) -> None:
        shard = FixedShard(range(5), cursor=0)
        assert shard.is_drained(_ints([3, 0, 5]))
        assert not shard.is_drained(_ints([3, 1, 5]))


def _world(*, lengths: list[int], window: int = 24, **changes: object) -> World:
    config = PlanConfig(
        policy=PolicyName.COST,
        total=len(lengths),
        global_batch_size=32,
        num_replicas=4,
        token_budget=64,
        window=window,
        **changes,  # type: ignore[arg-type]
    )
    return World(config=config, lengths=lengths)


class TestInARun:
    def test_no_replica_is_left_with_a_heavy_shard(self) -> None:
        """Every fourth sample is long: a fixed shard holds them all, online assignment does not."""
        lengths = [60 if position % 4 == 0 else 8 for position in range(960)]
        cost = {
            assignment: sum(
                max(plans[0].totals.costs)
                for plans in _world(lengths=lengths, assignment=assignment).run()
            )
            for assignment in Assignment
        }
        assert cost[Assignment.ONLINE] < 0.5 * cost[Assignment.FIXED]

    @pytest.mark.parametrize("lead", [0, 5, None])
    @pytest.mark.parametrize("varied", [False, True])
    def test_positions_are_known_ahead(self, lead: int | None, varied: bool) -> None:
        """What is drawn was announced before, and `draw_lead` more while the end is far."""
        random = np.random.RandomState(3)
        lengths = random.randint(1, 64, size=700).tolist() if varied else [9] * 700
        world = _world(lengths=lengths, draw_lead=lead)
        planners = world.planners()
        feeds: list[list[int]] = [[] for _ in planners]

        def feed_and_draw() -> None:
            for planner, feed in zip(planners, feeds, strict=True):
                feed += planner.upcoming()
                while drawn := planner.draw():
                    assert feed[: len(drawn)] == drawn
                    del feed[: len(drawn)]
                    for position in drawn:
                        length = lengths[position]
                        planner.observe(position, num_tokens=length, num_loss_tokens=1)

        while not planners[0].is_finished:
            feed_and_draw()
            if not varied and planners[0].consumed < 400:
                assert {len(feed) for feed in feeds} == {world.config.lead}
            windows = [planner.window_record() for planner in planners]
            for planner in planners:
                planner.set_target(windows)
            feed_and_draw()
            records = [planner.plan_record() for planner in planners]
            for planner in planners:
                planner.commit(records)
        assert all(not feed for feed in feeds)

    def test_the_state_keeps_what_is_in_flight(self) -> None:
        world = _world(lengths=[9] * 600, draw_lead=6)
        planners = world.planners()
        plan_step(planners, world.lengths)
        observe_drawn(planners[1], world.lengths)
        state = planners[1].state_dict()
        assert state["upcoming"]
        resumed = ReplicaPlanner(world.config, replica=1)
        fetched = {row[0]: (9, 4, False) for row in state["window"]}  # type: ignore[attr-defined]
        resumed.load_state_dict(state, fetched=fetched)
        assert resumed.upcoming() == state["upcoming"]
        assert resumed.state_dict() == state
