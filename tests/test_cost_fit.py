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
    prices: CostCoefficients = TRUE,
    *,
    steps: int = 40,
    lengths: tuple[int, int] = (20, 2000),
    samples: tuple[int, int] = (1, 8),
    noise: float = 0.02,
    first_waits_us: float = 0.0,
    has_patches: bool = True,
    seed: int = 0,
    **header: Any,
) -> RunLog:
    """A run of two replicas whose micro-batches take what the prices say, in microseconds."""
    generator = np.random.default_rng(seed)
    head = replace(
        HEADER, num_replicas=2, cost="linear=1.0,quadratic=0.001,overhead=500.0", **header
    )
    found = []
    for iteration in range(1, steps + 1):
        records = {}
        for replica in range(2):
            count = int(generator.integers(2, 6))
            batches = [
                generator.integers(*lengths, int(generator.integers(*samples))).tolist()
                for _ in range(count)
            ]
            batches[-1] = batches[-1] if replica else []  # idle
            patches = [int(generator.integers(0, 4000)) * has_patches for _ in batches]
            widths, times = [], []
            for at, (batch, num_patches) in enumerate(zip(batches, patches, strict=True)):
                padded = -(-np.array(batch, dtype=float) // head.multiple) * head.multiple
                time = prices.linear * padded.sum() + prices.quadratic * (padded**2).sum()
                time += prices.overhead + prices.patch * num_patches
                time *= 1 + noise * generator.normal()
                time += first_waits_us if at == 0 else 0
                time *= 10 if iteration <= 3 else 1  # warm-up
                widths.append(int(padded.sum()))
                times.append(time / 1e6)
            records[replica] = replace(
                RECORD,
                iteration=iteration,
                num_micro_batches=count,
                lengths=tuple(map(tuple, batches)),
                widths=tuple(widths),
                patches=tuple(patches) if has_patches else (),
                micro_batch_s=tuple(times),
            )
        found.append(LoggedStep(iteration=iteration, part=0, records=records))
    return RunLog(headers=(head,), steps=tuple(found))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"multiple": 32},
        {"first_waits_us": 20_000.0},
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
    full = _run(replace(TRUE, patch=0.0), has_patches=False)
    full = replace(full, steps=tuple(map(_filled, full.steps)))
    fit = fit_cost(full)
    assert "a micro-batch's overhead is not told apart from its tokens'" in fit.notes[0]
    assert fit.prices.overhead == pytest.approx(fit.prices.linear * 500, rel=1e-3)
    assert fit.prices.quadratic == pytest.approx(TRUE.quadratic, rel=0.2)


def _filled(step: LoggedStep) -> LoggedStep:
    """Every micro-batch has 4000 tokens."""
    generator = np.random.default_rng(step.iteration)
    records = {}
    for replica, record in step.records.items():
        lengths, times = [], []
        for _ in record.lengths:
            cuts = np.sort(generator.integers(1, 4000, int(generator.integers(1, 12))))
            batch = np.diff([0, *cuts, 4000])
            batch = batch[batch > 0]
            time = TRUE.linear * 4000 + TRUE.quadratic * float((batch**2).sum()) + TRUE.overhead
            lengths.append(tuple(batch.tolist()))
            times.append(time * (1 + 0.02 * generator.normal()) / 1e6)
        records[replica] = replace(
            record, lengths=tuple(lengths), widths=(4000,) * len(times), micro_batch_s=tuple(times)
        )
    return replace(step, records=records)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": 3}, "0 micro-batches were timed after the first 3 steps, and 16 are needed"),
        ({"steps": 5}, r"1\d micro-batches were timed"),
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
