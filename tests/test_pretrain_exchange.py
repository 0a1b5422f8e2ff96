"""`--odb-exchange` under `pretrain()`: the same samples and losses, on other replicas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_world import Megatron, Run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

NUM_SAMPLES = 45


@pytest.fixture(scope="module")
def runs(megatron: Megatron, data_flags: tuple[str, ...]) -> dict[str, Run]:
    flags = ("--odb", "--train-samples", NUM_SAMPLES, "--eval-interval", 3, *data_flags)
    return {
        mode: megatron.train(*flags, "--odb-exchange", mode) for mode in ("none", "tokens", "auto")
    }


@pytest.mark.parametrize("mode", ["tokens", "auto"])
def test_losses_are_those_without(runs: dict[str, Run], mode: str) -> None:
    plain, moved = runs["none"], runs[mode]
    assert [step.all_ids for step in moved.steps] == [step.all_ids for step in plain.steps]
    assert moved.losses == pytest.approx(plain.losses, abs=1e-5)
    norms = [[step.record["grad_norm"] for step in run.steps] for run in (plain, moved)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert [loss for _, loss in moved.evaluations] == pytest.approx(
        [loss for _, loss in plain.evaluations], abs=1e-5
    )
    assert moved.replicas[0].learning_rates == plain.replicas[0].learning_rates
    assert [step.ids for step in moved.steps] != [step.ids for step in plain.steps]


def test_what_was_moved_is_reported(runs: dict[str, Run]) -> None:
    for mode in ("tokens", "auto"):
        records = [step.record for step in runs[mode].steps]
        moved = [record for record in records if record["moved"]]
        assert moved
        assert all(record["bytes_moved"] > 32 * record["moved"] for record in moved)
        assert np.mean([record["balance"] for record in moved]) > np.mean(
            [record["balance_before"] for record in moved]
        )
        assert f"  exchange            in {len(moved)} steps, " in runs[mode].summary
    moved = sum(step.record["moved"] > 0 for step in runs["auto"].steps)
    steps = len(runs["auto"].steps)
    assert (
        f"  exchange auto       step by step: samples moved in {moved} of {steps} steps\n"
    ) in runs["auto"].summary
    assert "  exchange  " not in runs["none"].summary
    assert "  exchange auto" not in runs["none"].summary + runs["tokens"].summary
    assert all(record["moved"] == 0 for record in (s.record for s in runs["none"].steps))


def test_sources_are_counted_where_samples_are_trained(runs: dict[str, Run]) -> None:
    lines = {run.summary[run.summary.index("sources:") :] for run in runs.values()}
    assert len(lines) == 1


@pytest.mark.parametrize("policy", ["samples", "cost"])
def test_stop_and_resume(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path, policy: str
) -> None:
    flags = (
        *("--odb", "--odb-policy", policy, "--odb-exchange", "tokens"),
        *("--train-samples", NUM_SAMPLES, "--ckpt-format", "torch", *data_flags),
    )
    whole = megatron.train(*flags)
    saving = ("--save", tmp_path, "--save-interval", 100)
    first = megatron.train(*flags, "--exit-interval", 3, *saving)
    rest = megatron.train(*flags, "--load", tmp_path, *saving)
    assert [s.ids for s in [*first.steps, *rest.steps]] == [s.ids for s in whole.steps]
    assert rest.losses == pytest.approx(whole.losses[3:], abs=1e-5)
    assert sum(step.record["moved"] for step in rest.steps) > 0


def test_auto_says_what_it_chose(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    flags = ("--odb", "--odb-policy", "cost", "--odb-exchange", "auto", *data_flags)
    short = megatron.train(*flags, "--train-samples", 24, "--odb-window", 4)
    kept_of_run = megatron.last_log("run.json")
    (line,) = [
        line for line in short.replicas[0].output.splitlines() if line.startswith("odb: exchange")
    ]
    assert line.startswith("odb: exchange tokens: ")
    assert "window 4 for a share of 4 samples" in line
    assert line.endswith("--odb-exchange tokens reproduces it")
    assert "odb: exchange tokens" not in short.replicas[1].output
    (again,) = [line for line in short.summary.splitlines() if "exchange auto" in line]
    assert again == f"  exchange auto       {line.removeprefix('odb: ')}"
    kept = json.loads(kept_of_run)
    assert kept["exchange auto"] == line.removeprefix("odb: ")
    assert kept["cost model"].startswith("--odb-cost-linear ")
    assert kept["flags"].startswith("--odb --odb-policy cost --odb-exchange auto ")
    assert kept["ended_cleanly"] is True
    same = megatron.train(
        *("--odb", "--odb-policy", "cost", "--odb-exchange", "tokens", "--train-samples", 24),
        *("--odb-window", 4, *data_flags),
    )
    assert json.dumps([s.ids for s in same.steps]) == json.dumps([s.ids for s in short.steps])


def test_a_resumed_run_says_what_was_chosen_before(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = (
        *("--odb", "--odb-policy", "cost", "--odb-exchange", "auto", "--odb-window", 4),
        *("--train-samples", 24, "--ckpt-format", "torch", "--save", tmp_path),
        *("--save-interval", 100, *data_flags),
    )
    megatron.train(*flags, "--exit-interval", 1)
    rest = megatron.train(*flags, "--load", tmp_path)
    assert "  exchange auto       tokens, chosen before the resume" in rest.summary
