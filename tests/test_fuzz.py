"""The fuzzer of the step loop: its worlds, that each kind of violation is seen, its command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from odb_megatron.data.loop import PackedStep
from odb_megatron.data.wire import StepHeader
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing import fuzz
from odb_megatron.testing.fuzz import run_world
from odb_megatron.testing.worlds import Tally, World, check_run, decoded, random_world

Steps = list[list[PackedStep]]

WORLD = World(
    config=PlanConfig(total=24, global_batch_size=8, num_replicas=2, token_budget=64),
    lengths={at: 1 + at % 40 for at in range(24)},
)


def spoil(step: PackedStep, change: Callable[[StepHeader], StepHeader]) -> PackedStep:
    return replace(step, header=change(step.header))


def another_id(steps: Steps) -> None:
    """A sample in place of another one, which is lost."""

    def change(metadata: StepHeader) -> StepHeader:
        (_, *rest), *others = metadata.positions
        return replace(metadata, positions=((23, *rest), *map(tuple, others)))

    steps[0][0] = spoil(steps[0][0], change)


def other_totals(steps: Steps) -> None:
    steps[1][1] = spoil(steps[1][1], lambda m: replace(m, totals=replace(m.totals, num_tokens=1)))


def fewer_micro_batches(steps: Steps) -> None:
    def change(metadata: StepHeader) -> StepHeader:
        return replace(
            metadata,
            positions=(sum(metadata.positions, ()),),
            lengths=(sum(metadata.lengths, ()),),
            patches=(0,),
            shares=((1, 0),),
        )

    assert len(decoded(steps[2][1]).positions) > 1
    steps[2][1] = spoil(steps[2][1], change)


def swap_steps(steps: Steps) -> None:
    steps[0], steps[1] = steps[1], steps[0]


def end_early(steps: Steps) -> None:
    del steps[2]


def other_tokens(steps: Steps) -> None:
    payload = steps[0][0].payload.copy()
    payload[0] ^= 1
    steps[0][0] = replace(steps[0][0], payload=payload)


class TestInvariants:
    @pytest.mark.parametrize(
        ("change", "name"),
        [
            (another_id, "lost"),
            (another_id, "duplicated"),
            (end_early, "lost"),
            (other_totals, "misaligned"),
            (fewer_micro_batches, "misaligned"),
            (swap_steps, "misaligned"),
            (end_early, "misaligned"),
            (other_tokens, "misaligned"),
        ],
    )
    def test_each_violation_is_seen(self, change: Callable[[Steps], None], name: str) -> None:
        steps = WORLD.run()
        assert not check_run(WORLD, steps, is_whole=True).num_violations
        change(steps)
        assert check_run(WORLD, steps, is_whole=True)[name] > 0

    def test_a_full_micro_batch_under_a_smaller_budget(self) -> None:
        for changes in ({"token_budget": 40}, {"max_patches": 1}):
            other = replace(WORLD, config=replace(WORLD.config, **changes))
            steps = replace(WORLD, patches=dict.fromkeys(range(24), 1)).run()
            assert check_run(other, steps, is_whole=True)["over_budget"] > 0


def test_a_world_is_a_function_of_seed_and_number() -> None:
    assert random_world(random.Random("0 7")) == random_world(random.Random("0 7"))
    assert random_world(random.Random("0 7")) != random_world(random.Random("0 8"))


def test_no_violation_and_every_case() -> None:
    total = Tally()
    worlds = (random_world(random.Random(f"tests {number}")) for number in range(200))
    small = [one for one in worlds if len(one[0].lengths) < 1000]
    assert len(small) > 50
    for number, (world, fault) in enumerate(small):
        total.update(run_world(world, fault, rng=random.Random(number)))
    assert not total.num_violations, total
    assert all(total[name] for name in Tally.CASES)


def test_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fuzz.json"
    arguments = ["--first", "7", "--worlds", "4", "--processes", "1", "--json", str(out)]
    assert fuzz.main(arguments) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert result["worlds"] == 4
    assert result["lost"] == result["duplicated"] == result["misaligned"] == 0
    assert result["failures"] == []


def _spoilt(number: int, seed: int) -> Tally:
    if number == 6:
        raise AssertionError("spoilt")
    return Tally(idle=1)


def test_what_fails_is_named_with_its_seed_and_all_cases_are_due(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options: dict[str, Any] = {"name": "n", "description": "d", "unit": "world", "run": _spoilt}
    few = ["--worlds", "3", "--first", "5", "--processes", "2"]
    assert fuzz.fuzz_command(few, **options, total=Tally()) == 1
    found = capsys.readouterr()
    assert "world 6 (--seed 0 --first 6 --worlds 1): " in found.err
    assert "AssertionError: spoilt" in found.err
    assert json.loads(found.out)["misaligned"] == 1
    many = ["--worlds", "100", "--first", "7", "--processes", "1"]
    assert fuzz.fuzz_command(many, **options, total=Tally()) == 1
    assert "never occurred in 100 worlds: moved, shared, skipped" in capsys.readouterr().err
    few = ["--worlds", "9", "--first", "7", "--processes", "1"]
    assert fuzz.fuzz_command(few, **options, total=Tally()) == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--worlds", "0"], "--worlds and --processes must be at least 1"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json cannot be written"),
    ],
)
def test_refusals(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fuzz.main(flags)
    assert text in capsys.readouterr().err
