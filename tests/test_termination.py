"""`odb_megatron.plan.termination`: phases, the bound, closing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.records import PlanRecord, ReplicaFailedError, WindowRecord
from odb_megatron.plan.termination import (
    LoaderClosedError,
    Phase,
    Termination,
    steps_bound,
)
from odb_megatron.testing.worlds import World, observe_drawn, plan_step


def _config(**changes: object) -> PlanConfig:
    values: dict[str, object] = {
        "policy": PolicyName.COST,
        "total": 60,
        "global_batch_size": 8,
        "num_replicas": 2,
        "token_budget": 32,
        "window": 8,
    }
    return PlanConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("remaining", "rounds_up", "steps"),
    [
        (0, False, 1),
        (1, False, 1),
        (8, False, 1),
        (10, False, 1),  # a quarter batch joins the step before it
        (11, False, 2),
        (18, False, 2),
        (10, True, 2),
        (16, True, 2),
    ],
)
def test_steps_bound(remaining: int, rounds_up: bool, steps: int) -> None:
    assert steps_bound(remaining, global_batch_size=8, rounds_up=rounds_up) == steps


class TestStateMachine:
    def test_a_run(self) -> None:
        run = Termination(total=40, global_batch_size=10)
        assert run.phase is Phase.RUNNING
        assert run.begin_step(step=0, consumed=0, is_drained=False) == 4
        assert not run.end_step(consumed=10)
        assert run.begin_step(step=1, consumed=10, is_drained=True) == 3
        assert (run.phase, run.deadline) == (Phase.DRAINING, 3)
        assert not run.end_step(consumed=11)  # one position only
        assert run.begin_step(step=2, consumed=11, is_drained=True) == 2  # and yet one step fewer
        assert not run.end_step(consumed=20)
        assert run.begin_step(step=3, consumed=20, is_drained=True) == 1
        assert run.phase is Phase.FINAL
        assert run.end_step(consumed=40)
        assert run.is_over
        with pytest.raises(AssertionError, match="planned past the end"):
            run.begin_step(step=4, consumed=40, is_drained=True)

    def test_a_final_step_that_leaves_something_is_a_defect(self) -> None:
        run = Termination(total=4, global_batch_size=10)
        assert run.begin_step(step=0, consumed=0, is_drained=False) == 1
        with pytest.raises(AssertionError, match="the final step left 1 positions"):
            run.end_step(consumed=3)

    def test_past_the_deadline_is_a_defect(self) -> None:
        run = Termination(total=40, global_batch_size=10)
        run.begin_step(step=0, consumed=30, is_drained=True)
        run.restore(run.state(), step=1, consumed=30)
        assert run.phase is Phase.DRAINING
        with pytest.raises(AssertionError, match="step 1 is past the deadline 0"):
            run.begin_step(step=1, consumed=31, is_drained=True)

    def test_nothing_to_do(self) -> None:
        assert Termination(total=0, global_batch_size=1).phase is Phase.FINISHED

    def test_closing_does_not_undo_an_end(self) -> None:
        run = Termination(total=4, global_batch_size=10, consumed=4)
        run.close()
        assert run.phase is Phase.FINISHED


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_bound_holds(data: st.DataObject) -> None:
    """From the first drained replica, uneven shards and skipped included."""
    replicas = data.draw(st.integers(1, 5))
    batch = data.draw(st.integers(1, 12))
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 9, 32]), max_size=90))
    config = _config(
        policy=data.draw(st.sampled_from(PolicyName)),
        assignment=data.draw(st.sampled_from(Assignment)),
        total=len(lengths),
        global_batch_size=batch,
        num_replicas=replicas,
        window=data.draw(st.integers(-(-batch // replicas), 20)),
    )
    planners = World(config=config, lengths=lengths).planners()
    bound = None
    step = 0
    while not planners[0].is_finished:
        before = planners[0].consumed
        plan_step(planners, lengths)
        deadline = planners[0].state_dict()["deadline"]
        assert all(planner.state_dict()["deadline"] == deadline for planner in planners)
        if bound is None and isinstance(deadline, int) and deadline >= 0:
            bound = step + steps_bound(
                len(lengths) - before,
                global_batch_size=batch,
                rounds_up=config.policy is PolicyName.SAMPLES,
            )
        step += 1
        assert bound is None or step <= bound
    assert {planner.phase for planner in planners} == {Phase.FINISHED}


class TestClosing:
    LENGTHS = (7,) * 60

    def _planners(self) -> list[ReplicaPlanner]:
        planners = World(config=_config(), lengths=self.LENGTHS).planners()
        plan_step(planners, self.LENGTHS)
        for planner in planners:
            observe_drawn(planner, self.LENGTHS)
        return planners

    def test_in_the_first_exchange(self) -> None:
        planners = self._planners()
        planners[1].close()
        windows = [planner.window_record() for planner in planners]
        for planner in planners:
            with pytest.raises(LoaderClosedError, match="replica 1 closed its loader in step 1"):
                planner.set_target(windows)
            assert planner.phase is Phase.CLOSED
            with pytest.raises(AssertionError, match="never plans past the final step"):
                planner.window_record()

    def test_in_the_second_exchange(self) -> None:
        planners = self._planners()
        windows = [planner.window_record() for planner in planners]
        for planner in planners:
            planner.set_target(windows)
        planners[0].close()
        records = [planner.plan_record() for planner in planners]
        for planner in planners:
            with pytest.raises(LoaderClosedError, match="replica 0 closed its loader in step 1"):
                planner.commit(records)
            assert planner.phase is Phase.CLOSED

    def test_an_error_is_told_before_closing(self) -> None:
        planners = self._planners()
        planners[1].close()
        windows = [planner.window_record() for planner in planners]
        windows[0] = replace(windows[0], failed=True, message="no data")
        with pytest.raises(ReplicaFailedError, match="replica 0 failed: no data"):
            planners[1].set_target(windows)

    def test_closing_comes_before_a_mismatch(self) -> None:
        """A replica that closes need not know what the others know."""
        planners = self._planners()
        windows = [planners[0].window_record(), WindowRecord(config=0, step=0, position=0)]
        windows[1] = replace(windows[1], closing=True)
        with pytest.raises(LoaderClosedError):
            planners[0].set_target(windows)
        assert PlanRecord.from_bytes(PlanRecord(target=1, closing=True).to_bytes()).closing
