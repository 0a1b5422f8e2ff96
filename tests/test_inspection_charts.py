"""What an inspection's charts, table and page show: any lengths, the same samples, true shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from odb_megatron.inspection.command import inspect, parse
from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.report import as_json
from odb_megatron.inspection.text import as_text

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")

from odb_megatron.inspection.charts import (
    _Shares,
    _ticks,
    all_charts,
    micro_batch_chart,
    tokens_chart,
)
from odb_megatron.inspection.page import page_of
from odb_megatron.pages import Form
from odb_megatron.pages.pictures import chart_svg

LENGTHS = {
    "all equal": [70] * 40,
    "one record": [15],
    "one token": [1],
    "two records": [100, 101],
    "no power of two": list(range(70, 121)),
    "huge range": [1, 2, 5, 900, 33390, 1 << 20],
}
TAIL = np.clip(np.random.default_rng(0).lognormal(4.6, 1.9, 3000), 1, 33390).astype(np.int64)


def _found(folder: Path, lengths: Sequence[int], *flags: str) -> Findings:
    path = folder / "a.txt"
    path.write_text("\n".join(map(str, lengths)))
    return inspect(parse(["--lengths", str(path), "--overlong", "truncate", *flags]))


@pytest.mark.parametrize("name", LENGTHS)
def test_every_chart_survives_any_lengths(tmp_path: Path, name: str) -> None:
    found = _found(tmp_path, LENGTHS[name], "--dp", "2", "--token-budget", "8192", "--no-advice")
    for chart in all_charts(found):
        for form in Form:
            assert "</svg>" in chart_svg(chart, form, prefix="a")
    page_of(found, all_charts(found), [])


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("most", [5, 10])
def test_ticks_are_on_the_data_and_apart(name: str, most: int) -> None:
    lengths = np.array(LENGTHS[name], dtype=np.int64)
    ticks = _ticks(lengths, most=most)
    assert 1 <= len(ticks) <= most
    assert all(lengths.min() <= tick <= lengths.max() for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_lines_are_exact_where_drawn_and_rise_little_between() -> None:
    share = _Shares(TAIL)
    marks = share.marks(2048)
    assert len(set(TAIL.tolist())) > 200, "guard: not every length is a mark"
    assert {2048, 16384, int(TAIL.max())} <= set(marks)
    for values, weights in (
        (share.of_samples(marks), np.ones_like(TAIL)),
        (share.of_tokens(marks), TAIL),
    ):
        exact = [weights[mark >= TAIL].sum() / weights.sum() for mark in marks]
        assert values.tolist() == pytest.approx(exact)
        assert values[-1] == 1
        # The samples of one length alone may hold more than one part in 199.
        most = np.bincount(TAIL, weights=weights).max() / weights.sum()
        assert np.diff(values).max() <= 1 / 199 + most


def test_shares_of_the_table_count_ties(tmp_path: Path) -> None:
    chart = tokens_chart(_found(tmp_path, [10] * 9 + [30], "--dp", "1", "--no-advice"))
    assert chart.table is not None
    assert [list(row) for row in chart.table.rows] == [
        ["10", "90.0%", "75.0%"],
        ["30", "100.0%", "100.0%"],
    ]


@pytest.mark.parametrize(
    ("flags", "longest", "size"),
    [
        ("--token-budget 4096 --seq-length 2048 --global-batch-size 32", 4096, 1),
        ("--token-budget 8192 --seq-length 2048 --global-batch-size 64 --no-advice", 80, 32),
        ("--token-budget 8192 --seq-length 64 --global-batch-size 512 --no-advice", 4096, 128),
    ],
)
def test_before_and_after_are_the_same_samples(
    tmp_path: Path, flags: str, longest: int, size: int
) -> None:
    lengths = TAIL.clip(max=longest).tolist()
    found = _found(tmp_path, lengths, "--dp", "2", *flags.split())
    chart = micro_batch_chart(found)
    assert chart.table is not None
    sides = {"before": [0, 0], "after": [0, 0]}
    for name, samples, tokens, computed in chart.table.rows:
        side = name.partition(" ")[0]
        sides[side][0] += int(samples)
        sides[side][1] += int(tokens)
        assert int(computed) >= int(tokens)
        assert side == "before" or computed == tokens
    assert sides["before"] == sides["after"]
    assert sum(row[0].startswith("before") for row in chart.table.rows) <= 24
    assert chart.table.rows[0][1] == str(min(size, sides["before"][0]))
    assert f"same {sides['before'][0]} samples" in chart.caption
    assert "against padding each sample to the context" in chart.caption
    assert ("has no padding to a longest" in chart.caption) == (size == 1)


def test_rivals_keep_to_the_global_batch_size(tmp_path: Path) -> None:
    flags = "--token-budget 16384 --seq-length 512 --dp 8 --global-batch-size 64 --no-advice"
    lengths = np.clip(np.random.default_rng(0).normal(150, 45, 2000), 1, 400).astype(int)
    found = _found(tmp_path, lengths.tolist(), *flags.split())
    for name, run in found.runs.items():
        assert 60 < run.method.samples_per_step <= 64, name
    assert found.other_step_sizes() == {}
    text = as_text(found)
    assert "samples/step" in text
    assert "samples per step differ" not in text


def test_other_step_sizes_are_said(tmp_path: Path) -> None:
    """Fewer samples than replicas: a padded step has one for each."""
    flags = "--token-budget 512 --seq-length 512 --dp 8 --global-batch-size 4 --no-advice"
    found = _found(tmp_path, list(range(20, 420)), *flags.split())
    assert found.other_step_sizes()["standard-safe"] == 8
    said = "samples per step differ from the 4.0 that ODB has: standard-safe 8.0"
    assert said in as_text(found)


def test_a_runs_samples_are_what_is_read_and_avoided(tmp_path: Path) -> None:
    flags = ("--dp", "2", "--token-budget", "4096", "--seq-length", "2048", "--no-advice")
    run = _found(tmp_path, TAIL.tolist(), *flags, "--train-samples", "500")
    assert run.reading.num_read == 500
    kept = np.minimum(TAIL[:500], 2048)
    assert run.avoided() == pytest.approx(1 - kept.sum() / (500 * 2048))
    text = as_text(run)
    assert "500 of 3000 records read (those that the run takes)" in text
    assert "steps/epoch" not in text
    assert any("of the run" in tile.note for tile in page_of(run, all_charts(run), []).tiles)
    whole = _found(tmp_path, TAIL.tolist(), *flags)
    assert "steps/epoch" in as_text(whole)
    assert whole.avoided() != run.avoided()


@pytest.mark.parametrize(("asked", "is_larger"), [(2048, True), (65536, False)])
def test_the_speed_up_is_over_a_budget_no_smaller(
    tmp_path: Path, asked: int, is_larger: bool
) -> None:
    flags = ("--dp", "2", "--seq-length", "2048", "--global-batch-size", "32")
    shape = "layers=2,hidden=64,heads=4,vocab=1024"
    found = _found(
        tmp_path, TAIL.tolist(), *flags, "--token-budget", str(asked), "--model-shape", shape
    )
    advised = found.runs["advised"].setting.token_budget
    assert (advised > asked) == is_larger, "guard"
    assert advised != asked
    assert found.fixed.setting.token_budget == max(advised, asked)
    fair = as_json(found)["prediction"]["fair_speedup"]
    rate = found.runs["advised"].method.rate / found.fixed.method.rate
    assert fair == {
        "method": "advised",
        "token_budget": advised,
        "fixed_token_budget": max(advised, asked),
        "value": rate,
    }
    page = page_of(found, all_charts(found), [])
    tiles = {tile.label: tile for tile in page.tiles}
    assert tiles["predicted speed-up"].value == f"{rate:.2f}"
    both = f"budget {advised} for both" if is_larger else f"budget {advised} over {asked}"
    assert both in tiles["predicted speed-up"].note
    assert f"advised budget {advised}" in tiles["logits, peak"].note
    text = as_text(found)
    assert f"; at the advised budget {advised}, peak" in text
    assert (f"over standard-safe at {advised} too it is {rate:.2f}" in text) == is_larger
