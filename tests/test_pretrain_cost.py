"""The cost model of real runs: flags, calibration, what is printed and kept."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron_world import Megatron, Run

from odb_megatron.megatron.config import cost_flags
from odb_megatron.plan.cost import CostPrices

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

STEPS, EARLY, LATE = 33, 11, 22
FLAGS = ("--odb", "--train-samples", 8 * STEPS, "--ckpt-format", "torch")
PRICES = re.compile(r"(--odb-cost-linear \S+(?: --odb-cost-\w+ \S+)*)")
CALIBRATED = re.compile(
    r"^odb: cost (calibrated|not calibrated) over steps (\d+) to (\d+): .*$", re.M
)


def _printed(text: str) -> list[CostPrices]:
    """Return the prices of all flags printed in `text`."""
    found = []
    for flags in PRICES.findall(text):
        words = shlex.split(flags)
        names = [word.removeprefix("--odb-cost-") for word in words[::2]]
        found.append(CostPrices(**dict(zip(names, map(float, words[1::2]), strict=True))))
    return found


def _saved(folder: Path, *, iteration: int) -> list[list[int]]:
    """Return the cost model in each replica's data state."""
    paths = sorted((folder / f"iter_{iteration:07d}" / "odb").iterdir())
    return [json.loads(path.read_text())["planner"]["cost"] for path in paths]


def _calibrations(run: Run) -> list[tuple[str, str, str]]:
    found = [CALIBRATED.findall(replica.output) for replica in run.replicas]
    assert not any(found[1:])  # rank 0 alone prints
    lines: list[tuple[str, str, str]] = found[0]
    return lines


def _plans(run: Run, *, after: int = 0) -> list[Any]:
    return [
        (step.iteration, step.ids, step.record["num_micro_batches"], step.record["balance"])
        for step in run.steps
        if step.iteration > after
    ]


@pytest.fixture(scope="module", params=["samples", "cost"])
def auto(
    request: pytest.FixtureRequest,
    megatron: Megatron,
    data_flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[tuple[Any, ...], Path, Run]:
    """A run with `--odb-cost auto` to its end: its flags, its checkpoints, itself."""
    folder = tmp_path_factory.mktemp("auto")
    flags = (*FLAGS, "--odb-policy", request.param, *data_flags)
    saving = ("--save", folder, "--save-interval", EARLY)
    return flags, folder, megatron.train(*flags, *saving, "--odb-cost", "auto")


def test_it_calibrates_once_and_says_what_came_of_it(auto: tuple[Any, Path, Run]) -> None:
    """The fit itself may fail on a busy machine; then the shape stays and the line says why."""
    _, folder, run = auto
    ((outcome, first, last),) = _calibrations(run)
    assert (first, last) == ("4", "20")
    output = run.replicas[0].output
    (shape,) = _printed(next(line for line in output.splitlines() if "odb: cost model" in line))
    assert "(the model's shape; not calibrated yet), to be calibrated over 20 steps" in output
    line = next(line for line in output.splitlines() if "odb: cost " + outcome in line)
    (prices,) = _printed(line)
    model = prices.model()
    ints = [model.quadratic, model.fixed, model.per_patch]
    for saved in _saved(folder, iteration=LATE):
        assert saved[:3] == ints
        assert (saved[3] > 0) == (outcome == "calibrated")
    assert _saved(folder, iteration=LATE) == _saved(folder, iteration=STEPS)
    assert {saved[3] for saved in _saved(folder, iteration=EARLY)} == {-1}
    assert _printed(run.summary) == [prices]
    if outcome == "not calibrated":
        assert prices == shape
        assert "it stays --odb-cost-linear 1.0" in line
    else:
        assert prices.linear == pytest.approx(saved[3] / 1e6, rel=1e-4)
        assert re.search(r"reproduce with --odb-cost-linear .* \(median error \d+\.\d%", line)


def test_every_sample_once_whatever_the_model(auto: tuple[Any, Path, Run]) -> None:
    flags, _, run = auto
    assert len(run.all_ids) == len(set(run.all_ids)) == 8 * STEPS
    if "samples" in flags:
        assert [len(step.all_ids) for step in run.steps] == [8] * STEPS


@pytest.mark.parametrize("given", ["auto", "flags"])
def test_a_resume_goes_on_with_the_calibrated_model(
    megatron: Megatron, auto: tuple[Any, Path, Run], given: str
) -> None:
    """By `--odb-cost auto` or by the flags that were printed, with the steps of the first run."""
    flags, folder, run = auto
    (prices,) = _printed(run.summary)
    cost = ["--odb-cost", "auto"] if given == "auto" else shlex.split(cost_flags(prices))
    load = ("--load", folder, "--ckpt-step", LATE)
    rest = megatron.train(*flags, *cost, *load)
    assert _plans(rest) == _plans(run, after=LATE)
    assert _calibrations(rest) == []
    assert [p.model() for p in _printed(rest.summary)] == [prices.model()]
    if given == "auto":
        assert re.search(r"cost model .* \((calibrated before the resume|.*, kept)\)", rest.summary)
    else:
        assert "(as given)" in rest.summary
        assert "is replaced" not in rest.replicas[0].output


def test_a_resume_before_the_fit_calibrates_anew(
    megatron: Megatron, auto: tuple[Any, Path, Run]
) -> None:
    flags, folder, _ = auto
    load = ("--load", folder, "--ckpt-step", EARLY)
    rest = megatron.train(*flags, "--odb-cost", "auto", *load)
    ((_, first, last),) = _calibrations(rest)
    assert (int(first), int(last)) == (EARLY + 4, EARLY + 20)
    assert len(rest.steps) == STEPS - EARLY


def test_another_model_replaces_that_of_the_state(
    megatron: Megatron, auto: tuple[Any, Path, Run]
) -> None:
    flags, folder, _ = auto
    load = ("--load", folder, "--ckpt-step", LATE)
    rest = megatron.train(*flags, "--odb-cost-linear", 1, *load)
    assert "the data state's cost model --odb-cost-linear 1.0 " in rest.replicas[0].output
    assert " is replaced\n" in rest.replicas[0].output
    assert "cost model          --odb-cost-linear 1.0 (as given)\n" in rest.summary


def test_a_run_that_ends_before_the_fit(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    run = megatron.train(
        "--odb", "--train-samples", 16, "--odb-cost", "auto", "--odb-policy", "cost", *data_flags
    )
    assert _calibrations(run) == []
    assert "(the model's shape; not calibrated yet)\n" in run.summary


def test_prices_patches_and_scope_are_taken_and_printed(megatron: Megatron) -> None:
    """Own data sets with patches: seven of 24 samples have more than a micro-batch may hold."""
    over = 7
    items = [
        {
            "tokens": list(range(1, 2 + at)),
            "labels": list(range(2, 3 + at)),
            "loss_mask": [1] * (1 + at),
            "num_patches": 9 if at < over else at % 4,
        }
        for at in range(24)
    ]
    given = (
        *("--odb", "--odb-policy", "cost", "--odb-max-patches", 8, "--odb-balance", "microbatch"),
        *("--odb-cost-linear", 2, "--odb-cost-quadratic", "1e-3", "--odb-cost-fixed", 70),
        *("--odb-cost-patch", 0.5),
    )
    run = megatron.train(
        *(*given, "--train-samples", 24, "--split", "100,0,0", "--eval-iters", 0),
        items=(items, None, None),
    )
    output = run.replicas[0].output
    (line,) = (line for line in output.splitlines() if "odb: reproduce with" in line)
    prices = "--odb-cost-linear 2.0 --odb-cost-quadratic 0.001 --odb-cost-fixed 70.0"
    prices += " --odb-cost-patch 0.5"
    for flag in (prices, "--odb-max-patches 8", "--odb-balance microbatch"):
        assert flag in line
    assert "odb: balance scope microbatch: as given\n" in output
    assert f"; over the budget or patch cap, alone: {over}\n" in run.summary
    assert f"  cost model          {prices} (as given)\n" in run.summary
    for replica in run.replicas:
        for record in replica.steps:
            for lengths in record["lengths"]:
                assert len(lengths) == 1 or min(lengths) > over


def test_the_scope_is_chosen_from_the_topology(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    run = megatron.train("--odb", "--train-samples", 8, *data_flags)
    output = run.replicas[0].output
    assert "odb: balance scope step: replicas meet once per optimizer step\n" in output
    (line,) = (line for line in output.splitlines() if "odb: reproduce with" in line)
    assert "--odb-cost shape --odb-balance step" in line
