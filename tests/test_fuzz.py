"""The fuzzer: its worlds, that each kind of violation is seen, and its command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.step import StepPlan
from odb_megatron.testing import fuzz
from odb_megatron.testing.fuzz import Stop, random_world, run_world
from odb_megatron.testing.invariants import Tally, tally_run
from odb_megatron.testing.worlds import World

Steps = list[list[StepPlan]]


def small_world(policy: PolicyName = PolicyName.COST, **changes: object) -> World:
    rng = random.Random(3)
    lengths = [rng.randint(1, 40) for _ in range(60)]
    values: dict[str, object] = {
        "policy": policy,
        "total": 60,
        "global_batch_size": 8,
        "num_replicas": 2,
        "token_budget": 64,
        "window": 16,
        "max_delay_steps": 2,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    }
    config = PlanConfig(**{**values, **changes})  # type: ignore[arg-type]
    return World(config=config, lengths=lengths, epochs=[p // 30 for p in range(60)])


def with_micro_batches(
    plan: StepPlan, change: Callable[[tuple[tuple[int, ...], ...]], Sequence[tuple[int, ...]]]
) -> StepPlan:
    return replace(plan, micro_batches=tuple(change(plan.micro_batches)))


def lose_one(world: World, steps: Steps) -> None:
    steps[1][0] = with_micro_batches(steps[1][0], lambda m: (m[0][1:], *m[1:]))


def emit_twice(world: World, steps: Steps) -> None:
    first = steps[0][0].micro_batches[0][:1]
    steps[1][0] = with_micro_batches(steps[1][0], lambda m: (m[0] + first, *m[1:]))


def overfill(world: World, steps: Steps) -> None:
    steps[0][0] = with_micro_batches(steps[0][0], lambda m: [sum(m, ())] + [()] * (len(m) - 1))


def drop_a_micro_batch(world: World, steps: Steps) -> None:
    steps[0][1] = with_micro_batches(steps[0][1], lambda m: m[:-1])


def other_totals(world: World, steps: Steps) -> None:
    totals = replace(steps[0][1].totals, num_tokens=1)
    steps[0][1] = replace(steps[0][1], totals=totals)


def swap_steps(world: World, steps: Steps) -> None:
    """The first samples come last, with the counts of each step unchanged."""
    first, last = steps[0][0].micro_batches, steps[-1][0].micro_batches
    one, other = first[0][0], last[0][0]
    exchanged = {one: other, other: one}
    for step in (0, -1):
        steps[step][0] = with_micro_batches(
            steps[step][0], lambda m: [tuple(exchanged.get(p, p) for p in part) for part in m]
        )


def end_early(world: World, steps: Steps) -> None:
    for at, plan in enumerate(steps[2]):
        steps[2][at] = replace(plan, totals=replace(plan.totals, is_final=True))


class TestTally:
    @pytest.mark.parametrize("policy", PolicyName)
    def test_nothing_in_a_good_run(self, policy: PolicyName) -> None:
        world = small_world(policy)
        assert tally_run(world, world.run()).num_violations == 0

    @pytest.mark.parametrize(
        ("spoil", "name", "policy"),
        [
            (lose_one, "lost", PolicyName.COST),
            (emit_twice, "duplicated", PolicyName.COST),
            (overfill, "over_budget", PolicyName.COST),
            (drop_a_micro_batch, "misaligned", PolicyName.COST),
            (other_totals, "misaligned", PolicyName.COST),
            (swap_steps, "over_delay", PolicyName.COST),
            (swap_steps, "misaligned", PolicyName.SAMPLES),
            (end_early, "over_bound", PolicyName.COST),
        ],
    )
    def test_each_violation_is_seen(
        self, spoil: Callable[[World, Steps], None], name: str, policy: PolicyName
    ) -> None:
        world = small_world(policy)
        steps = world.run()
        spoil(world, steps)
        assert getattr(tally_run(world, steps), name) > 0

    def test_a_drain_beyond_the_bound(self) -> None:
        world = small_world(PolicyName.SAMPLES)
        steps = world.run()
        assert tally_run(world, steps, drained_at=0).over_bound == 0
        assert tally_run(world, steps, drained_at=len(steps) - 1).over_bound == 0
        assert tally_run(world, [*steps, steps[-1]], drained_at=0).over_bound > 0

    def test_a_sample_from_anothers_shard(self) -> None:
        world = small_world(assignment=Assignment.FIXED)
        steps = world.run()
        plans = steps[0]
        assert tally_run(world, steps).over_delay == 0
        plans[0], plans[1] = (
            replace(plans[0], micro_batches=plans[1].micro_batches),
            replace(plans[1], micro_batches=plans[0].micro_batches),
        )
        assert tally_run(world, steps).over_delay > 0


class TestWorlds:
    def test_a_world_is_a_function_of_seed_and_number(self) -> None:
        assert random_world(random.Random("0 7")) == random_world(random.Random("0 7"))
        assert random_world(random.Random("0 7")) != random_world(random.Random("0 8"))

    def test_no_violation(self) -> None:
        total = Tally()
        for number in range(250):
            total.add(run_world(*random_world(random.Random(f"tests {number}"))))
        assert total.num_violations == 0
        for name in ("idle", "split", "drained_early", "epochs_crossed", "closed_early"):
            assert getattr(total, name) > 0, name

    def test_ranges(self) -> None:
        worlds = [random_world(random.Random(f"tests {n}"))[0] for n in range(400)]
        shards = [world.config.shards for world in worlds if world.config.shards]
        assert {0, 1} <= {min(sizes) for sizes in shards}
        assert {world.config.num_replicas for world in worlds} >= {1, 16}
        assert {world.config.window for world in worlds} >= {1, 64}
        assert {max(world.epochs, default=0) for world in worlds} == {0, 1, 2}
        assert any(not world.lengths for world in worlds)
        assert any(world.config.total % (max(world.epochs, default=0) + 1) for world in worlds)

    def test_a_run_stopped_at_every_step(self) -> None:
        world = small_world()
        for step in range(len(world.run())):
            for closing in (None, 1):
                assert run_world(world, Stop(step=step, closing=closing)).num_violations == 0


class TestOwnShards:
    """Shards of very different sizes, one of them empty (fixed assignment)."""

    @pytest.mark.parametrize("window", [4, 16])
    @pytest.mark.parametrize("shards", [(0, 60), (1, 59), (57, 3), (60, 0)])
    def test_uneven(self, shards: tuple[int, int], window: int) -> None:
        world = small_world(assignment=Assignment.FIXED, shards=shards, window=window)
        tally = run_world(world)
        assert tally.num_violations == 0
        assert tally.idle > 0

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"shards": (60,)}, "not 2 sizes"),
            ({"shards": (61, -1)}, "not 2 sizes of at least 0"),
            ({"shards": (30, 29)}, "hold 59 samples, not the 60"),
            ({"shards": (30, 30), "assignment": Assignment.ONLINE}, "fixed assignment"),
            ({"shards": (30, 30), "policy": PolicyName.SAMPLES}, "need the policy cost"),
        ],
    )
    def test_refusals(self, changes: dict[str, object], text: str) -> None:
        values: dict[str, object] = {"assignment": Assignment.FIXED}
        with pytest.raises(ValueError, match=text):
            small_world(**{**values, **changes})  # type: ignore[arg-type]

    def test_no_start_in_the_middle(self) -> None:
        config = small_world(assignment=Assignment.FIXED, shards=(30, 30)).config
        with pytest.raises(ValueError, match="restore it"):
            ReplicaPlanner(config, replica=0, consumed=8)


class TestCommand:
    def test_result(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "fuzz.json"
        arguments = ["--worlds", "120", "--processes", "2", "--json", str(out)]
        assert fuzz.main(arguments) == 0, capsys.readouterr().err
        result = json.loads(out.read_text())
        assert result["worlds"] == 120
        assert result["lost"] == result["duplicated"] == result["misaligned"] == 0
        assert result["idle"] > 0

    def test_a_run_without_the_cases_does_not_pass(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with mock.patch.object(fuzz, "_run_all", return_value=(Tally(idle=1), [])):
            assert fuzz.main(["--worlds", "100"]) == 1
        text = capsys.readouterr().err
        assert "never occurred in 100 worlds: split, drained_early, moved" in text

    def test_one_world_can_be_repeated(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert fuzz.main(["--first", "7", "--worlds", "1", "--processes", "1"]) == 0

    def test_a_result_without_a_folder(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            fuzz.main(["--json", str(tmp_path / "absent" / "out.json")])
        assert "there is no folder" in capsys.readouterr().err

    def test_a_defect_is_named(self) -> None:
        with mock.patch.object(fuzz, "plan_step", side_effect=AssertionError("spoilt")):
            tally, failures = fuzz._run_part((range(5, 7), 0))
        assert tally.misaligned == 2
        assert [failure["world"] for failure in failures] == [5, 6]
        assert "spoilt" in str(failures[0]["what"])

    def test_bad_arguments(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            fuzz.main(["--worlds", "0"])
        assert "must be at least 1" in capsys.readouterr().err
