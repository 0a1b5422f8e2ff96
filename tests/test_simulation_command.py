"""`odb-megatron simulate` end to end: its table, its JSON, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odb_megatron import __version__
from odb_megatron.cli import main
from odb_megatron.simulation.names import POLICY_NAMES

SPEC = "lognormal:mean=100,cv=1.0,max=1000,n=3000"
FLAGS = ["--lengths", SPEC, "--dp", "2", "--token-budget", "1000", "--window", "128"]
KEYS = {
    "fraction_of_bound",
    "fraction_of_reachable",
    "samples_per_step",
    "ks_ratio",
    "long_sample_weight",
    "outlier_share_p99_ratio",
    "mean_length_lag1",
    "balance_step",
    "balance_microbatch",
    "fill",
    "padding_fraction",
    "samples_per_s_rel",
    "over_budget",
    "max_delay_steps",
    "mean_M",
    "bytes_moved_per_step",
}


def _run(*flags: str, folder: Path) -> dict[str, Any]:
    target = folder / "out.json"
    assert main(["simulate", *FLAGS, *flags, "--json", str(target)]) == 0
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return report


def test_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _run(folder=tmp_path)
    policies = report["policies"]
    assert {*policies, *report["left_out"]} == set(POLICY_NAMES)
    for name, figures in policies.items():
        if name.startswith("bound"):
            continue
        assert set(figures) >= KEYS, name
        assert set(figures["steady"]) >= KEYS, name
        assert 0 < figures["fraction_of_bound"] <= 1
    assert (
        policies["bound"]["fraction_of_bound"] == policies["bound"]["steady"]["fraction_of_bound"]
    )
    assert policies["cost"]["padding_fraction"] == policies["cost"]["over_budget"] == 0
    assert report["config"]["dp"] == 2
    assert report["config"]["sync"] == "step"
    assert report["config"]["global_batch_size"] > 2
    assert report["lengths"]["num_samples"] == 3000
    assert report["versions"]["odb_megatron"] == __version__
    out = capsys.readouterr().out
    assert f"global batch size {report['config']['global_batch_size']} (what M = 8 holds)" in out
    lines = [line.split() for line in out.splitlines()]
    for name in policies:
        parts = 1 if name == "bound-online" else 2
        assert sum(line[:1] == [name] for line in lines) == parts, name
    for name in report["left_out"]:
        assert f"{name} is left out: not importable" in out


def test_a_batch_size_sync_and_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "cost,ffd,samples", "--global-batch-size", "64", "--epochs", "2")
    report = _run(*flags, "--pp", "2", "--vpp", "2", folder=tmp_path)
    assert list(report["policies"]) == ["ffd", "samples", "cost"]
    assert report["config"]["sync"] == "microbatch"
    for figures in report["policies"].values():
        assert figures["samples_per_step"] == pytest.approx(64, rel=0.1)
        assert 0 < figures["pipeline_efficiency"] < 1
        assert figures["pipeline_samples_per_s_rel"] > 0
        assert figures["mean_M"] >= 2
    out = capsys.readouterr().out
    assert "2 epoch(s)" in out
    assert "global batch size 64," in out
    assert "pipe speed" in out


def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *FLAGS, "--policy", "ffd", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["policies"]) == ["ffd"]
    assert "policy" in captured.err


def test_the_same_command_gives_the_same_figures(tmp_path: Path) -> None:
    first, second = (_run("--policy", "cost,sorted", folder=tmp_path) for _ in range(2))
    assert first == second
    other = _run("--policy", "cost,sorted", "--seed", "1", folder=tmp_path)
    assert other["policies"]["sorted"] != first["policies"]["sorted"]


def test_lengths_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps({"mine": [50, 60, 70, 80] * 100}))
    spec = f"file:{tmp_path / 'lengths.json'}#mine"
    report = _run("--lengths", spec, "--policy", "ffd", folder=tmp_path)
    assert report["lengths"]["num_samples"] == 400


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--policy", "best"],
            "--policy best: there is no policy 'best': expected all, or some of",
        ),
        (
            ["--policy", "all,cost"],
            "--policy all,cost: all stands for every policy, cost included: give all alone, or",
        ),
        (["--policy", "all,all"], "all stands for every policy, itself included"),
        (["--policy", ","], "--policy ',' names no policy: expected all, or some of standard,"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number of at least 0"),
        (["--seed", "x"], "argument --seed: 'x' is not a whole number of at least 0"),
        (["--window", "99999"], "error: --window 99999 is not between 0 and 65536"),
        (["--dp", "99999"], "--dp 99999 is above the 65536 that are simulated: lower it"),
        (
            ["--epochs", "999999999"],
            "--epochs 999999999 of 3000 samples are more than the 268435456 samples that are",
        ),
        (
            ["--global-batch-size", "1"],
            "error: --global-batch-size 1 is below the 2 replicas, each of which trains at least "
            "one sample per step under policy cost: raise it to 2 at least, or use --policy "
            "samples, under which the others idle",
        ),
        (["--tokenizer", "t"], "--tokenizer 't' would do nothing: --lengths 'lognormal:"),
        (["--json", "."], "--json . is a folder: name a file in it"),
        (["--json", "/proc/foo"], "--json /proc/foo cannot be written ("),
        (["--json", "none/out.json"], "--json none/out.json: there is no folder 'none'"),
        (["--dp", "0"], "--dp must be at least 1, got 0"),
        (["--token-budget", "0"], "the token budget is 0"),
        (["--token-budget", "500"], "tokens; the token budget is 500: raise --token-budget"),
        (["--window", "0"], "--window must be at least 1"),
        (["--window", "8"], "error: --window 8 is below the"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--global-batch-size", "0"], "--global-batch-size must be at least 1"),
        (["--fixed-cost", "1"], "--fixed-cost 1.0 is not in [0, 1)"),
        (["--attention-share", "-1"], "--attention-share -1.0 is not in [0, 1)"),
        (["--max-delay-steps", "0"], "--max-delay-steps must be at least 1"),
        (["--pp", "0"], "--pp must be at least 1"),
        (["--vpp", "2"], "--vpp 2 needs a pipeline"),
        (["--lengths", "normal:1"], "'normal:1' is not understood"),
        (["--sync", "never"], "invalid choice: 'never'"),
    ],
)
def test_a_wrong_argument(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *FLAGS, *flags])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_few_samples_per_replica_and_none_steady_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--policy", "cost,samples,bound", "--global-batch-size", "8")
    _run(*few, "--lengths", "lognormal:mean=100,cv=1,max=999,n=400", folder=tmp_path)
    out = capsys.readouterr().out
    assert out.count("warning: ") == 2
    assert (
        "warning: --global-batch-size 8 gives each of 2 replicas 4 samples per step; with fewer "
        "than 16, policy cost without an exchange may train many more samples per step than "
        "asked: raise it, or use --exchange auto\n"
    ) in out
    assert (
        "warning: no steady steps: 400 samples, and the first and last windows of 2 replicas are "
        "512: give more samples or --epochs, or lower --window\n"
    ) in out
    for flags in (("--exchange", "auto"), ("--policy", "samples,bound")):
        _run(*few, *flags, folder=tmp_path)
        assert "warning: " not in capsys.readouterr().out


def test_samples_holds_a_batch_below_the_replicas(tmp_path: Path) -> None:
    flags = ("--policy", "samples", "--global-batch-size", "3", "--dp", "8", "--window", "16")
    figures = _run(*flags, folder=tmp_path)["policies"]["samples"]
    assert figures["samples_per_step"] == figures["steady"]["samples_per_step"] == 3
    assert figures["num_steps"] == 1000


def test_steady_bytes_are_those_of_the_steady_steps(tmp_path: Path) -> None:
    flags = ("--policy", "cost,ffd", "--exchange", "tokens", "--global-batch-size", "32")
    policies = _run(*flags, folder=tmp_path)["policies"]
    whole, steady = policies["cost"], policies["cost"]["steady"]
    assert 0 < steady["bytes_moved_per_step"] != whole["bytes_moved_per_step"] > 0
    assert policies["ffd"]["bytes_moved_per_step"] == 0
    assert policies["ffd"]["steady"]["bytes_moved_per_step"] == 0
