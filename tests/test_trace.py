"""`odb-megatron trace` and `compare`: figures against hand counts, errors, pages in a browser."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_run_log import HEADER, RECORD

from odb_megatron.cli import main
from odb_megatron.report.page import svg
from odb_megatron.report.steps import LoggedStep, RunLog, StepLog, read_run
from odb_megatron.report.trace import CURVES, RunFigures, choose_steps, curve_chart, timelines
from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]


def _write(folder: Path, *, steps: int, replicas: int, batches: str = "odb", **how: Any) -> None:
    """A log of random lengths whose totals fit each other; `how` goes into every record."""
    random, consumed = np.random.default_rng(steps), 0
    head = replace(HEADER, num_replicas=replicas, batches=batches, run=steps)
    logs = [StepLog(str(folder), header=replace(head, replica=at)) for at in range(replicas)]
    for iteration in range(1, steps + 1):
        count = int(random.integers(1, 5))
        lengths = [
            [(random.lognormal(5, 1, 3).astype(int) + 1).tolist() for _ in range(count)]
            for _ in logs
        ]
        lengths[-1][-1] = []  # idle
        costs = [[sum(batch) * 1.2 + 20 for batch in own] for own in lengths]
        loads, tokens = list(map(sum, costs)), sum(sum(map(sum, own)) for own in lengths)
        consumed += 3 * count * replicas
        for at, log in enumerate(logs):
            record = replace(
                RECORD,
                iteration=iteration,
                loss=2 + 3 * math.exp(-iteration / 50),
                consumed_samples=consumed,
                tokens=tokens,
                computed_tokens=tokens + 50,
                num_micro_batches=count,
                fill=tokens / (count * replicas * 2048),
                balance=sum(loads) / len(loads) / max(loads),
                lengths=tuple(map(tuple, lengths[at])),
                widths=tuple(sum(batch) + 1 for batch in lengths[at]),
                costs=tuple(costs[at]),
                micro_batch_s=tuple(cost * 1e-3 for cost in costs[at]),
                step_s=max(loads) * 1e-3 + 0.05,
                wait_s=0.01 * at,
                queue_steps=iteration % 3,
            )
            log.write(replace(record, **how))
    for log in logs:
        log.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    _write(folder / "cost run", steps=40, replicas=4)
    _write(folder / "samples", steps=55, replicas=2)
    none = {"fill": None, "balance": None, "costs": (), "micro_batch_s": (), "loss": None}
    _write(folder / "padded", steps=3, replicas=1, batches="padded", **none)
    _write(folder / "long", steps=250, replicas=14)
    return folder


def _step(*records: dict[str, Any]) -> LoggedStep:
    own = {at: replace(RECORD, **values) for at, values in enumerate(records)}
    return LoggedStep(iteration=own[0].iteration, part=0, records=own)


def test_figures_are_those_of_a_hand_count() -> None:
    """The first step is warm-up; waits are the longest, steps ahead the fewest of a replica."""
    warm = {"iteration": 1, "step_s": 9.0, "micro_batch_s": (), "balance": 0.5}
    late = {"iteration": 2, "tokens": 500, "computed_tokens": 600, "balance": 1.0}
    slow = {"step_s": 2.0, "wait_s": 0.1, "micro_batch_s": (1.0, 1.0), "queue_steps": 2}
    fast = {"step_s": 1.5, "wait_s": 0.5, "micro_batch_s": (0.5, 0.5), "queue_steps": 1}
    steps = (_step(warm, {**warm, "step_s": 8.0}), _step({**late, **slow}, {**late, **fast}))
    run = RunLog(headers=(replace(HEADER, num_replicas=2),), steps=steps)
    figures = RunFigures.of(run)
    np.testing.assert_equal(figures.per_step["balance_measured"], [math.nan, 0.75])
    assert figures.per_step["wait_s"].tolist() == [0.25, 0.5]
    assert figures.per_step["queue_steps"].tolist() == [0, 1]
    found = figures.summary()
    assert found.pop("padding") == pytest.approx(1 - 800 / 920)
    assert found.items() >= {
        "tokens": 800, "balance": 0.75, "balance_lowest": 0.5, "balance_measured": 0.75,
        "tokens_per_second": 250, "wait_share": 0.25, "seconds_per_step": 2,
    }.items()  # fmt: skip


def test_the_first_step_after_a_resume_is_no_part_of_rates() -> None:
    steps = [
        replace(_step({"iteration": at, "step_s": seconds, "tokens": 10}), part=part)
        for at, seconds, part in ((1, 9.0, 0), (2, 1.0, 0), (3, 99.0, 1), (4, 2.0, 1))
    ]
    headers = (HEADER, replace(HEADER, iteration=2, run=6))
    figures = RunFigures.of(RunLog(headers=headers, steps=tuple(steps)))
    assert figures.is_late.tolist() == [False, True, False, True]
    found = figures.summary()
    assert (found["seconds_per_step"], found["tokens_per_second"]) == (1.5, 20 / 3)
    only = RunFigures.of(RunLog(headers=headers[:1], steps=tuple(steps[:1])))
    assert only.summary()["seconds_per_step"] == 9


def test_trace_prints_and_writes(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    assert main(["trace", str(logs / "cost run"), "--json", str(target), "--steps", "5:9"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("odb, 4 replicas, iterations 5 to 9, token budget 512")
    values = json.loads(target.read_text())
    assert [step["iteration"] for step in values["steps"]] == [5, 6, 7, 8, 9]
    run = read_run(str(logs / "cost run"), steps=(5, 9))
    assert values["summary"]["tokens"] == sum(step.first.tokens for step in run.steps)
    assert values["starts"][0]["batches"] == "odb"
    assert f"tokens                        {values['summary']['tokens']:,.0f}\n" in text
    assert main(["trace", str(logs / "padded"), "--json", "-"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("padded baseline, 1 replica, iterations 1 to 3")
    padded = json.loads(told.out)
    assert padded["steps"][0]["balance"] is None
    assert padded["summary"]["fill"] is None


def test_compare_prints_what_differs(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "compare.json"
    runs = [str(logs / "cost run"), str(logs / "samples")]
    assert main(["compare", *runs, "--json", str(target)]) == 0
    text = capsys.readouterr().out
    assert (
        "\nsteps                                       40              55        +37.5%\n" in text
    )
    assert "A: cost run\nB: samples\n" in text
    values = json.loads(target.read_text())
    assert set(values["runs"]) == {"cost run", "samples"}
    (row,) = (row for row in values["differences"] if row["figure"] == "replicas")
    assert row == {"figure": "replicas", "a": "4", "b": "2", "difference": "-50.0%"}
    assert main(["compare", runs[0], str(logs / "padded")]) == 0
    assert "only in one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trace", "nope"], "nope is no folder with step logs (steps-00000.jsonl and so on): give"),
        (["trace", "samples", "--steps", "7"], "--steps: 7: give the first and the last iteration"),
        (["trace", "samples", "--steps", "9:7"], "--steps: 9:7: give the first and the last"),
        (["trace", "samples", "--html", "-"], "--html - : it goes to a file, name one"),
        (["trace", "samples", "--json", "/proc/foo"], "--json /proc/foo cannot be written ("),
        (["compare", "samples", "./samples"], "are one folder: name two runs"),
    ],
)
def test_what_cannot_be_used_is_named(
    logs: Path,
    argv: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(logs)
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def _figures(*balance: float | None, timed: bool = False, starts: tuple[int, ...] = ()) -> Any:
    """Figures of steps of these balances, predicted or measured; a start at each of `starts`."""
    steps = []
    for at, value in enumerate(balance):
        how: dict[str, Any] = {"balance": None if timed else value, "iteration": at + 1}
        times = ((1.0,), (2 * value - 1,)) if timed and value is not None else ((), ())
        own = _step(*({**how, "micro_batch_s": time} for time in times))
        steps.append(replace(own, part=sum(at >= start for start in starts)))
    run = RunLog(headers=(HEADER,), steps=tuple(steps))
    return RunFigures.of(run)


@pytest.mark.parametrize(
    ("figures", "usual", "worst"),
    [
        (_figures(0.1, 0.9, 0.8, 0.7, 0.95), (1, 2), 3),  # the first step is left aside
        (_figures(0.1, 0.9, 0.8, 0.7, 0.95, timed=True), (1, 2), 3),
        (_figures(0.1, 0.9, 0.3, 0.31), (3,), 2),  # the worst is next to the median
        (_figures(0.1, 0.9, 0.2, 0.9, 0.9, starts=(2,)), (1, 3), None),
        (_figures(0.1, 0.9, 0.7), (1,), 2),
        (_figures(0.1, 0.9), (1,), None),
        (_figures(0.1), (0,), None),
        (_figures(0.1, 1.0, 1.0, 1.0), (1, 2), None),  # one replica
        (_figures(*[None] * 5), (1, 2), None),
        (_figures(None), (0,), None),
        (_figures(0.9, None, None, None), (0,), None),
    ],
)
def test_steps_that_are_shown(figures: Any, usual: tuple[int, ...], worst: int | None) -> None:
    assert choose_steps(figures)[:2] == (usual, worst)
    assert worst not in usual


def test_what_timelines_say_is_what_they_draw_at_each_width(logs: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'odb-megatron[pages]'")
    for name in ("cost run", "padded", "long"):
        run = read_run(str(logs / name))
        found = list(timelines(run, RunFigures.of(run)))
        charts = [chart for chart in found if chart.title.startswith("Timeline of")]
        assert len(charts) == (1 if name == "padded" else 2)
        seen = []
        for chart in charts:
            steps = {int(head.split()[1].strip(",")) for head in chart.columns[1:]}
            assert {int(text) for text in re.findall(r"\d+", chart.title)} == steps
            seen.append(steps)
            rows = [row[0] for row in chart.rows]
            for is_narrow in (False, True):
                text = svg(chart, is_narrow=is_narrow)
                assert {*map(int, re.findall(r">step (\d+)</text>", text))} == steps
                assert {*rows} <= {*re.findall(r">(\d+)</text>", text)}
            said = re.search(r"(\d+) of (\d+) replicas are shown", chart.caption)
            assert bool(said) is (name == "long")
            assert not said or said.groups() == (str(len(rows)), "14")
        assert not set.intersection(*seen) or len(seen) == 1


def test_runs_are_laid_over_the_same_stretches() -> None:
    """Also where one has more steps; a cell is empty where a run has none."""
    curves = next(curves for curves in CURVES if curves.title == "Tokens per step")
    short, long = _figures(0.5, 0.5), _figures(*[0.5] * 50)
    same = curve_chart(curves, {"short": short, "other": _figures(0.5, 0.5)})
    differ = curve_chart(curves, {"short": short, "long": long})
    assert same is not None
    assert differ is not None
    assert (same.columns, same.rows) == (
        ["iteration", "short", "other"], [["1", "300", "300"], ["2", "300", "300"]],
    )  # fmt: skip
    ends = ["mean", "least", "most"]
    assert differ.columns == ["iteration", "short, mean", *ends[1:], "long, mean", *ends[1:]]
    assert differ.rows[0] == ["1 to 3", *["300"] * 6]
    assert differ.rows[-1] == ["49 to 50", *[""] * 3, *["300"] * 3], "every step once"


PAGES = {
    "trace-padded": ["trace", "padded"],
    "trace-one": ["trace", "samples", "--steps", "3:3"],
    "trace-long": ["trace", "long"],
    "compare": ["compare", "cost run", "long"],
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_look_well_in_a_browser(
    logs: Path, browser: Browser, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'odb-megatron[pages]'")
    monkeypatch.chdir(logs)
    path = tmp_path / f"{name}.html"
    assert main([*PAGES[name], "--html", str(path)]) == 0
    assert path.stat().st_size < 3_000_000
    assert page_problems(browser, path) == []
    heads = re.findall("<h2>(.*?)</h2>", path.read_text())
    if name == "compare":
        assert heads[:7] == [
            *("Differences", "Balance predicted", "Fill", "Micro-batches per step"),
            *("Time per step", "Tokens per step", "Loss"),
        ]
