"""`odb-megatron trace LOGS --fit-cost`: known prices are found; what says nothing is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_run_log import HEADER, RECORD

from odb_megatron.cli import main
from odb_megatron.plan.cost import CostCoefficients
from odb_megatron.report.cost_fit import fit_cost
from odb_megatron.report.steps import LoggedStep, RunLog, StepLog

TRUE = CostCoefficients(linear=2.5, quadratic=0.004, overhead=900, patch=1.5)


def _run(
    prices: CostCoefficients = TRUE, *, steps: int = 40, lengths: tuple[int, int] = (20, 2000),
    samples: tuple[int, int] = (1, 8), noise: float = 0.02, first_waits_us: float = 0.0,
    has_patches: bool = True, **header: Any,
) -> RunLog:  # fmt: skip
    """A run of two replicas whose micro-batches take what the prices say, in microseconds."""
    random, found = np.random.default_rng(0), []
    cost = "linear=1.0,quadratic=0.001,overhead=500.0"
    head = replace(HEADER, num_replicas=2, cost=cost, **header)
    for iteration in range(1, steps + 1):
        records = {}
        for replica in range(2):
            batches, widths, times, patches = [], [], [], []
            count = int(random.integers(2, 6))
            for at in range(count):
                batch = random.integers(*lengths, int(random.integers(*samples)))
                batch = batch[: None if replica or at < count - 1 else 0]  # the last is idle
                padded = -(-batch // head.multiple) * head.multiple
                patches.append(int(random.integers(0, 4000)) * has_patches)
                time = prices.linear * padded.sum() + prices.quadratic * (padded**2).sum()
                time += prices.overhead + prices.patch * patches[-1]
                time *= 1 + noise * random.normal()
                time += first_waits_us if at == 0 else 0
                times.append(time / 1e6 * (10 if iteration <= 3 else 1))  # warm-up
                batches.append(tuple(batch.tolist()))
                widths.append(int(padded.sum()))
            records[replica] = replace(
                RECORD, iteration=iteration, num_micro_batches=count,
                lengths=tuple(batches), widths=tuple(widths), micro_batch_s=tuple(times),
                patches=tuple(patches) if has_patches else (),
            )  # fmt: skip
        found.append(LoggedStep(iteration=iteration, part=0, records=records))
    return RunLog(headers=(head,), steps=tuple(found))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"multiple": 32},
        {"first_waits_us": 20_000.0, "steps": 80},
        {"has_patches": False},
        {"noise": 0.0},
    ],
)
def test_known_prices_are_found(how: dict[str, Any]) -> None:
    fit = fit_cost(_run(**how))
    for name in ("linear", "quadratic", "overhead", "patch"):
        expected = getattr(TRUE, name) * (name != "patch" or how.get("has_patches", True))
        assert getattr(fit.prices, name) == pytest.approx(expected, rel=0.15), name
    assert fit.median_error < 0.03
    assert fit.explained > 0.98
    assert fit.notes == ()


def test_what_is_not_told_apart_keeps_its_ratio() -> None:
    """Samples of one length have no quadratic price, full micro-batches no overhead."""
    same = fit_cost(_run(lengths=(500, 501), noise=0.01))
    assert "lengths vary too little to tell the quadratic price" in same.notes[0]
    assert same.prices.quadratic == pytest.approx(same.prices.linear * 0.001, rel=1e-3)
    full = _run(lengths=(1000, 1001), samples=(4, 5), noise=0.01)
    random, steps = np.random.default_rng(0), []
    for step in full.steps:  # every micro-batch has 4000 tokens, cut at random
        records = {}
        for replica, record in step.records.items():
            cuts = [np.sort(random.integers(1, 4000, 5)) for _ in record.lengths]
            lengths = [np.diff([0, *cut, 4000]) for cut in cuts]
            times = [TRUE.linear * 4000 + TRUE.quadratic * (own**2).sum() + 900 for own in lengths]
            noisy = tuple(time / 1e6 * (1 + 0.01 * random.normal()) for time in times)
            batches, widths = tuple(tuple(own.tolist()) for own in lengths), (4000,) * len(times)
            own = {"lengths": batches, "widths": widths, "micro_batch_s": noisy, "patches": ()}
            records[replica] = replace(record, **own)
        steps.append(replace(step, records=records))
    fit = fit_cost(replace(full, steps=tuple(steps)))
    assert "a micro-batch's overhead is not told apart from its tokens'" in fit.notes[0]
    assert fit.prices.overhead == pytest.approx(fit.prices.linear * 500, rel=1e-3)
    assert fit.prices.quadratic == pytest.approx(TRUE.quadratic, rel=0.2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": 3}, "0 micro-batches were timed after the first 3 steps, and 16 are needed"),
        ({"steps": 5}, r"\d micro-batches were timed"),
        ({"noise": 5.0}, "too noisy, to tell the price of a token|off the best fit"),
        (
            {"lengths": (500, 501), "samples": (4, 5)},
            "micro-batches are too much alike, or their times too noisy",
        ),
    ],
)
def test_what_says_nothing_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"no cost model: .*({message})"):
        fit_cost(_run(**how))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"batches": "padded", "cost": ""}, "the padded baseline times no micro-batch"),
        (
            {"sizes": {"tp": 1, "pp": 2}},
            "micro-batches of pipelined runs overlap and are not timed",
        ),
        ({}, "0 micro-batches were timed"),
    ],
)
def test_a_run_that_was_not_timed_is_refused(header: dict[str, Any], message: str) -> None:
    run = _run()
    steps = tuple(
        replace(step, records={0: replace(step.records[0], micro_batch_s=())}) for step in run.steps
    )
    run = replace(run, headers=(replace(run.headers[0], **header),), steps=steps)
    with pytest.raises(ValueError, match=f"no cost model: {message}"):
        fit_cost(run)


def test_the_command_prints_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run()
    for replica in range(2):
        log = StepLog(str(tmp_path), header=replace(run.headers[0], replica=replica))
        for step in run.steps:
            log.write(step.records[replica])
        log.close()
    assert main(["trace", str(tmp_path), "--fit-cost", "--json", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    flag, fit, *_ = text[text.index("--odb-cost") :].splitlines()
    values = json.loads((tmp_path / "out").read_text())["cost_fit"]
    assert CostCoefficients.parse(flag.split()[1]) == CostCoefficients(**values["prices"])
    assert f"fitted to {values['num_rows']} micro-batches (the first 3 steps of each start" in fit
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path), "--fit-cost", "--steps", "1:4"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out.startswith("odb, 2 replicas")
    assert "no cost model: " in told.err
