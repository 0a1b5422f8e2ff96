"""The benchmarks: their arithmetic, their data, and short real runs of both."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.report.steps import StepRecord

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def module(name: str) -> ModuleType:
    """Import a benchmark's module as its scripts do: from the scripts' own folder."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


def _run(script: str, *flags: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run a benchmark from another folder than the repository; return its JSON and output."""
    target = folder / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *flags, "--json", str(target)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return result, done.stdout


# --- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags", "text"),
    [
        ("planner", "--steps x", "argument --steps: 'x' is not a whole number of at least 1"),
        ("planner", "--json .", "argument --json: '.' is a folder: name a file in it"),
        ("planner", "--json /dev/null/a", "argument --json: '/dev/null/a' cannot be written: "),
        ("control_plane", "--ranks 1", "--ranks: '1' is not a whole number of at least 2"),
        ("simulate_table", "--seed -1", "'-1' is not a whole number from 0 to 4294967295"),
        ("simulate_table", "--only none", "--only 'none' matches no row; rows are like step/dp8"),
        ("simulate_table", "--policy best", "--policy 'best': expected all, or some of stan"),
        ("loss_parity", "--data none", "'none' is neither chitchat nor chat-mix nor a file"),
        ("train_throughput", "--repeats 0", "--repeats: '0' is not a whole number of at least 1"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    script: str,
    flags: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [script, "--json", str(tmp_path / "out.json"), *flags.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        module(script).main()
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


# --- intervals ---------------------------------------------------------------------------------


def test_the_interval_of_known_ratios() -> None:
    ratio = module("common").ratio_interval([1.0, math.e, math.e**2])
    half = 4.303 / math.sqrt(3)  # logs 0, 1, 2: mean 1, standard deviation 1, 2 degrees of freedom
    assert ratio.mean == pytest.approx(math.e)
    assert ratio.low == pytest.approx(math.exp(1 - half))
    assert ratio.high == pytest.approx(math.exp(1 + half))
    assert ratio.as_json() == {"mean": ratio.mean, "ci95": [ratio.low, ratio.high]}


# --- control plane -----------------------------------------------------------------------------


@pytest.mark.slow
def test_control_plane(tmp_path: Path) -> None:
    flags = ("--ranks", "3", "--blocks", "2", "64", "--rounds", "5")
    result, _ = _run("control_plane.py", *flags, folder=tmp_path)
    rows = {row["block"]: row for row in result["rows"]}
    assert [row["source_ranks"] for row in rows.values()] == [3, 3]
    for row in rows.values():
        assert min(row["gather_ms"], row["exchange_ms"], row["cpu_ms"], row["sockets"]) > 0
    assert rows[2]["gather_blocks_ms"] > rows[3]["gather_blocks_ms"]  # one block has none


# --- data path ---------------------------------------------------------------------------------


def test_figures_of_a_trainers_waits() -> None:
    figures = module("data_path").wait_figures([[10.0, 20.0], [30.0, 940.0]], total_s=0.1)
    assert figures["wait_fraction"] == pytest.approx(0.01)
    assert figures["worst_step_wait_us"] == 970.0
    assert figures["p50_next_us"] == 25.0
    assert 900 < figures["p99_next_us"] <= 940.0
    assert figures["step_ms"] == pytest.approx(50.0)


@pytest.mark.slow
def test_data_path(tmp_path: Path) -> None:
    flags = ("--steps", "5", "--share", "2", "--batch", "4", "--repeats", "1", "--samples", "60")
    data = tmp_path / "chats.jsonl"
    turns = [("user", "What is it?"), ("assistant", "It is what it is, and more of it.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    data.write_text((json.dumps({"messages": messages}) + "\n") * 400, encoding="utf-8")
    result, output = _run("data_path.py", *flags, "--data", str(data), folder=tmp_path)
    assert len(result["by_replica"]) == 2
    assert 0 < result["p50_next_us"] <= result["p99_next_us"] <= result["worst_step_wait_us"]
    assert 0 < result["wait_fraction"] < 1
    assert result["step_ms"] >= 50
    assert result["queue_bytes"] >= 0
    rates = result["samples_per_s"]
    ratio = rates["whole_path"] / rates["dataloader"]
    assert result["relative_to_dataloader"] == pytest.approx(ratio)
    assert f"relative_to_dataloader {result['relative_to_dataloader']}" in output


# --- sorted batches ----------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 100), min_size=4, max_size=200),
    num_replicas=st.integers(1, 4),
    max_samples=st.integers(1, 20),
    seed=st.integers(0, 10),
)
def test_sorted_batches_keep_the_budget_and_every_sample(
    lengths: list[int], num_replicas: int, max_samples: int, seed: int
) -> None:
    script = module("sorted_padded")
    lengths = lengths[: len(lengths) // num_replicas * num_replicas]
    rounds = script.sorted_rounds(
        lengths, token_budget=100, max_samples=max_samples, num_replicas=num_replicas
    )
    batch_size = max_samples * num_replicas
    steps = script.sorted_steps(rounds, global_batch_size=batch_size, seed=seed)
    assert steps == script.sorted_steps(rounds, global_batch_size=batch_size, seed=seed)
    batches = [batch for step in steps for one in step for batch in one]
    assert all(len(one) == num_replicas for step in steps for one in step)
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_samples
        assert script.num_padded(batch, lengths) <= 100
    emitted = 0
    for number, step in enumerate(steps[:-1], start=1):
        emitted += sum(len(batch) for one in step for batch in one)
        assert abs(emitted - number * batch_size) <= batch_size / 2


# --- data --------------------------------------------------------------------------------------


def _node(name: str, role: str, *replies: dict[str, Any]) -> dict[str, Any]:
    return {"message_id": name, "role": role, "text": f"text {name}", "replies": list(replies)}


def test_a_tree_gives_each_conversation_that_ends_in_an_answer_once(tmp_path: Path) -> None:
    follow_ups = [_node("c", "prompter"), _node("d", "prompter", _node("e", "assistant"))]
    answer = _node("b", "assistant", *follow_ups, _node("f", "prompter"))
    trees = [_node("a", "prompter", answer, _node("g", "assistant")), _node("h", "prompter")]
    path = tmp_path / "trees.jsonl"
    path.write_text("".join(json.dumps({"prompt": tree}) + "\n" for tree in trees))
    found = list(module("common").oasst_conversations(path))
    assert [[message["content"][-1] for message in messages] for messages in found] == [
        ["a", "b"],  # cut before c; not again for f
        ["a", "b", "d", "e"],
        ["a", "g"],
    ]
    assert [message["role"] for message in found[1]] == ["user", "assistant"] * 2


def test_without_the_chat_mix_the_benchmark_says_so_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODB_CHAT_DATA", str(tmp_path / "absent"))
    result, output = _run("train_throughput.py", "--data", "chat-mix", folder=tmp_path)
    assert "set ODB_CHAT_DATA to the folder that holds them" in result["skipped"]
    assert result["skipped"] in output


# --- real runs ---------------------------------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.slow
def test_packed_training_has_the_padded_baselines_losses(tmp_path: Path) -> None:
    flags = ("--steps", "8", "--loss-per", "sample")
    result, _ = _run("loss_parity.py", *flags, folder=tmp_path)
    assert result["steps"] == 8
    assert 0 <= result["max_abs_loss_diff"] < 1e-5
    assert 0 <= result["max_abs_grad_norm_diff"] < 1e-3
    for name in ("same_samples", "consumed_samples_equal", "learning_rate_equal", "all_finite"):
        assert result[name] is True
    assert len(result["m_values"]) >= 2
    assert result["samples_left_out"] > 0
    padded, *packed = result["runs"]
    assert padded["computed_tokens"] > padded["tokens"]  # the baseline did pad
    assert len(packed) == 2
    assert all("--odb" in run["command"] for run in packed)


@pytest.mark.megatron
@pytest.mark.slow
def test_the_throughput_benchmark_measures_every_variant(tmp_path: Path) -> None:
    flags = ("--quick", "--dp", "1", "--data", "chitchat")
    result, output = _run("train_throughput.py", *flags, folder=tmp_path)
    variants = result["variants"]
    assert list(variants) == ["standard", "standard_mean", "sorted", "odb"]
    assert result["same_samples"] is True
    budget = result["setting"]["batching"]["token_budget"]
    for name, variant in variants.items():
        assert variant["samples_per_s"] > 0
        assert variant["tokens_per_s"] > 0
        assert 0 <= variant["padding_fraction"] < 1
        assert len(variant["runs"]) == 1
        assert variant["speedup_vs_standard"]["ci95"] == [None, None]
        if name != "standard_mean":
            assert variant["max_micro_batch_tokens"] <= budget
        assert name in output
    assert variants["odb"]["padding_fraction"] < 0.01
    assert variants["standard"]["padding_fraction"] > variants["sorted"]["padding_fraction"]
    batch = result["setting"]["batching"]["global_batch_size"]
    for name in ("standard", "standard_mean", "odb"):
        assert variants[name]["samples_per_step"] == batch
    assert set(result["ratios"]) == {"odb_over_sorted", "odb_over_standard_mean"}


# --- every parallelism -------------------------------------------------------------------------


def _step(**values: Any) -> StepRecord:
    shared: dict[str, Any] = {
        "iteration": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3,
        "consumed_samples": 2, "samples": 2, "left_out": 0, "tokens": 5, "computed_tokens": 5,
        "loss_tokens": 5, "num_micro_batches": 2, "idle": 1, "fill": 1.0,
        "balance": 1.0, "moved": 0, "bytes_moved": 0, "wait_s": 0.0,
        "step_s": 0.1, "ids": (("0:1@0",), ("0:2@0",)), "lengths": ((2,), (3,)),
        "collectives": 2, "bytes_delivered": 100,
    }  # fmt: skip
    return StepRecord(**{**shared, **values})


def test_what_the_comparison_of_topologies_finds() -> None:
    parity = module("parallel_parity")
    counts = (1, 2, 3)
    steps = (tuple(_step(num_micro_batches=count) for count in counts),)
    same = {**parity.compare(steps, steps), "max_rel_grad_diff": 0.0}
    assert parity.find_problems("case", same) == []
    assert (same["m_values"], same["idle_microbatches"]) == ([1, 2, 3], 3)
    assert (same["collectives_per_step"], same["bytes_per_step"]) == (2, 100)
    other = _step(loss=2.1, grad_norm=1.01, ids=(("0:1@0",),), collectives=3, idle=0)
    differs = {**parity.compare(((other,),), steps), "max_rel_grad_diff": 0.1}
    found = parity.find_problems("case", differs)
    assert [problem.partition(": ")[2][:20] for problem in found] == [
        "max_abs_loss_diff is",
        "max_rel_grad_diff is",
        "max_rel_grad_norm_di",
        "collectives_per_step",
        "1 steps, of its refe",
        "the runs trained dif",
        "M took only the valu",
        "no micro-batch was i",
    ]
    token = {"margins": [1e-3, 2e-7]}
    (found,) = parity.find_problems("case", {**same, "routed_otherwise": [token]})
    assert found.startswith("case: 1 tokens go to other experts, by margins of up to 0.001;")
    missing = {**same, **parity.compare(((_step(loss=None), *steps[0][1:]),), steps)}
    assert math.isnan(missing["max_abs_loss_diff"])
    assert len(parity.find_problems("case", missing)) == 2  # and M 1 is gone with that step


def _write_gradients(folder: Path, *ranks: list[tuple[Any, ...]]) -> Path:
    """Shards as (key, whole shape, offset, axes of stacked layers, values), by rank; one step."""
    folder.mkdir()
    for rank, shards in enumerate(ranks):
        where = json.dumps([shard[:4] for shard in shards])
        arrays = {str(at): np.array(shard[4]) for at, shard in enumerate(shards)}
        np.savez(folder / f"0-{rank}.npz", where=np.array(where), **arrays)
    return folder


def test_gradients_are_compared_parameter_by_parameter(tmp_path: Path) -> None:
    log = module("parallel_parity")
    whole = _write_gradients(
        tmp_path / "whole",
        [("w", (2, 4), (0, 0), 1, [1.0, 2, 2, 0]), ("w", (2, 4), (1, 0), 1, [0.0, 0, 3, 4])],
    )
    parts = _write_gradients(
        tmp_path / "parts",
        [("w", (2, 4), (0, 0), 1, [1.0, 2]), ("w", (2, 4), (1, 0), 1, [0.0, 0])],
        [("w", (2, 4), (0, 2), 1, [2.0, 0]), ("w", (2, 4), (1, 2), 1, [3.0, 4])],
    )
    assert log.compare_gradients(parts, whole) == (0, "")
    off = _write_gradients(
        tmp_path / "off",
        [("w", (2, 4), (0, 0), 1, [1.0, 2]), ("w", (2, 4), (1, 0), 1, [0.3, 0])],
        [("w", (2, 4), (0, 2), 1, [2.0, 0]), ("w", (2, 4), (1, 2), 1, [3.0, 4.4])],
    )
    found, whose = log.compare_gradients(off, whole)
    assert found == pytest.approx(0.5 / 5)  # of the second layer, whose norm is 5
    assert whose == "w[1], step 1"


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        (("w", (4,), (0,), 0, [3.0, 4]), "shards that do not cover"),
        (("w", (2,), (0,), 0, [3.0, math.nan]), "NaN, or shards"),
        (("v", (2,), (0,), 0, [3.0, 4]), "parameters in one run only"),
        (None, "steps with gradients: []"),
    ],
)
def test_gradients_that_cannot_be_compared(tmp_path: Path, shard: Any, text: str) -> None:
    log = module("parallel_parity")
    whole = _write_gradients(tmp_path / "whole", [("w", (2,), (0,), 0, [3.0, 4])])
    found = _write_gradients(tmp_path / "found", *([] if shard is None else [[shard]]))
    with pytest.raises(ValueError, match=re.escape(text)):
        log.compare_gradients(found, whole)


@pytest.mark.megatron
@pytest.mark.slow
def test_a_topology_trains_as_one_process(tmp_path: Path) -> None:
    """Of a dense model as an ordinary run, of one with several losses as its own micro-batches."""
    result, output = _run("parallel_parity.py", "--cases", "tp2,ep2_bias", folder=tmp_path)
    assert list(result["cases"]) == ["tp2", "ep2_bias"]
    for case in result["cases"].values():
        assert case["max_abs_loss_diff"] <= 1e-5
        assert case["max_rel_grad_diff"] <= 1e-4
        assert case["max_rel_grad_norm_diff"] <= 1e-4
        assert case["ids_equal"] is True
    assert result["cases"]["tp2"]["collectives_per_step"] == 2
    assert "--replay" in result["cases"]["ep2_bias"]["reference_command"]
    assert result["cases"]["ep2_bias"]["routed_tokens"] > 1000
    assert "tp2: {'steps': 7" in output


# --- the simulator's table ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, []),
        ({"fraction_of_bound": 0.9915}, ["0.9915 < 0.992"]),
        ({"fraction_of_bound": 0.99}, ["0.9900 < 0.992", "ffd is better"]),
        ({"over_budget": 2}, ["2 micro-batches over the budget"]),
    ],
)
def test_what_misses_a_target(figures: dict[str, float], missed: list[str]) -> None:
    table = module("simulate_table")
    row = table.Row(name="a", flags=(), target=0.992)
    own = {"fraction_of_bound": 0.995, "over_budget": 0} | figures
    policies = {"odb": {"steady": own}, "ffd": {"steady": {"fraction_of_bound": 0.99}}}
    assert table.judge(row, {"policies": policies})["missed"] == missed


def test_a_row_of_the_table(tmp_path: Path) -> None:
    flags = ("--only", "step/dp8/share1/cv0.29", "--policy", "odb,dp-balanced")
    result, output = _run("simulate_table.py", *flags, folder=tmp_path)
    (row,) = result["rows"]
    assert row["name"] == "step/dp8/share1/cv0.29"
    assert "odb 0." in output
    assert "1 rows, 0 with a target missed: -" in output
