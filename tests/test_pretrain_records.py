"""Records that cannot become samples, and samples that are too long, inside `pretrain()`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_world import ChatFile, Megatron, Run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFile:
    """The training file with two bad lines.

    Attributes:
        path: the file.
        lines: 1-based line numbers of the bad records.
        places: their places in the first epoch.
    """

    path: str
    lines: tuple[int, ...]
    places: tuple[int, ...]


@pytest.fixture(scope="module")
def bad(chats: ChatFile) -> BadFile:
    """Bad lines come at places 13 (replica 1, second step) and 26 (replica 0, fourth step)."""
    order = np.random.RandomState([1234, 0]).permutation(len(chats)).tolist()
    places = (13, 26)
    lines = Path(chats.path).read_text().splitlines()
    lines[order[places[0]]] = '{"messages": [{"role": "user", "content": 7}]}'
    lines[order[places[1]]] = '{"messages": ['
    path = Path(chats.path).with_name("bad.jsonl")
    path.write_text("\n".join(lines) + "\n")
    return BadFile(path=str(path), lines=tuple(order[p] + 1 for p in places), places=places)


def test_a_bad_record_ends_every_replica(megatron: Megatron, bad: BadFile) -> None:
    """The replica that met it names file and line, the other one names the replica."""
    run = megatron.run("--odb", *_training(bad.path, 40))
    errors = [replica.error for replica in run.replicas]
    _assert_failed_together(errors, "BadRecordError")
    own = [error for error in errors if error.startswith("BadRecordError")]
    named = (
        rf"BadRecordError: {re.escape(bad.path)}:({'|'.join(map(str, bad.lines))}): .*bad-records N"
    )
    assert all(re.match(named, error) for error in own)
    assert all(replica.seconds < 60 for replica in run.replicas)  # not for Megatron's timeout
    assert f"{bad.path}:{bad.lines[0]}: " in errors[1]
    assert len(run.steps) == 1
    assert "not reached         32 requested samples" in run.summary
    assert "this replica only: the run did not end cleanly" in run.summary


@pytest.mark.slow
def test_the_real_script_exits_promptly(megatron: Megatron, bad: BadFile, tmp_path: Path) -> None:
    """Both processes print their error, and the launcher's exit code is not 0."""
    flags = [str(flag) for flag in megatron.command_line("--odb", *_training(bad.path, 40))]
    done = _script(flags, num_processes=2)
    assert done.returncode != 0
    assert f"BadRecordError: {bad.path}:{bad.lines[0]}: " in done.stderr
    assert "ReplicaFailedError: replica 1 failed: BadRecordError" in done.stderr
    last = f"rank 1 failed, its traceback is above: BadRecordError: {bad.path}:{bad.lines[0]}: "
    assert done.stderr.splitlines()[-1].startswith(f"odb: {last}")
    assert "odb step 1 " in done.stdout
    assert "odb step 2 " not in done.stdout


@pytest.mark.parametrize("odb", [("--odb",), ()], ids=" ".join)
def test_skipped_records_are_counted(
    megatron: Megatron, bad: BadFile, odb: tuple[str, ...]
) -> None:
    run = megatron.train(*odb, "--odb-max-bad-records", 99, *_training(bad.path, 40))
    assert len(set(run.all_ids)) == len(run.all_ids) == 38
    assert not {f"0:{line - 1}@0" for line in bad.lines} & set(run.all_ids)
    assert _emitted_and_left_out(run) == (38, 2)
    assert run.steps[-1].record["consumed_samples"] == 40
    assert "38 samples and 2 left out (40 of 40 requested)" in run.summary
    assert [line.global_batch_size for line in run.lines] == [
        step.record["samples"] + step.record["left_out"] for step in run.steps
    ]
    if odb == ("--odb",):
        assert [step.record["left_out"] for step in run.steps] == [0, 1, 0, 1, 0]
    assert "left out: 2 bad records, 0 overlong; truncated: 0" in run.summary
    assert f"first left out: {bad.path}:" in run.summary


@pytest.mark.parametrize("odb", [("--odb",), ()], ids=" ".join)
def test_a_run_that_trains_nothing_fails(
    megatron: Megatron, tmp_path: Path, odb: tuple[str, ...]
) -> None:
    path = tmp_path / "unknown.jsonl"
    path.write_text('{"colour": "blue"}\n' * 16)
    errors = megatron.refused(*odb, "--odb-max-bad-records", 99, *_training(str(path), 16))
    for error in errors:
        assert error.startswith("ValueError: nothing was trained: all 16 samples were left out")
        assert "colour" in error


def test_what_evaluation_leaves_out_is_said(
    megatron: Megatron, chats: ChatFile, bad: BadFile
) -> None:
    run = megatron.train(
        *("--odb", "--odb-max-bad-records", 99, "--train-data-path", chats.path),
        *("--valid-data-path", bad.path, "--eval-iters", 4, "--train-samples", 8),
    )
    assert "odb: evaluations left out 2 samples and truncated 0" in run.replicas[0].output
    padded = megatron.train(
        *("--odb-max-bad-records", 99, "--train-data-path", chats.path, "--valid-data-path"),
        *(bad.path, "--eval-iters", 4, "--train-samples", 8),
    )
    assert "odb: evaluations left out 2 samples and truncated 0" in padded.replicas[0].output
    assert len(run.evaluations) == 1


def test_overlong_error_names_the_sample(megatron: Megatron, chats: ChatFile) -> None:
    """40 tokens are the context here, and some records are longer."""
    flags = ("--seq-length", 40, "--odb-token-budget", 80, *_training(chats.path, 61))
    errors = megatron.refused("--odb", *flags)
    _assert_failed_together(errors, "OverlongError")
    for error in errors:
        if error.startswith("OverlongError"):
            found = re.match(rf"OverlongError: {re.escape(chats.path)}:(\d+): (\d+) tokens", error)
            assert found
            assert chats.lengths[int(found[1]) - 1] == int(found[2]) > 40
            assert "--odb-overlong truncate" in error


def test_overlong_solo(megatron: Megatron, chats: ChatFile) -> None:
    run = _overlong_run(megatron, chats, "solo")
    assert len(set(run.all_ids)) == len(chats)
    alone = 0
    longer = sum(length > BUDGET for length in chats.lengths)
    assert f"; over the budget or patch cap, alone: {longer}\n" in run.summary
    for replica in run.replicas:
        for step in replica.steps:
            for lengths in step["lengths"]:
                assert sum(lengths) <= BUDGET or len(lengths) == 1
                alone += sum(lengths) > BUDGET
    assert alone == longer
    assert all(length == chats.lengths[_record(name)] for name, length in _lengths(run).items())


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_overlong_packed_and_padded(megatron: Megatron, chats: ChatFile, overlong: str) -> None:
    """The same policy leaves the same samples and losses."""
    longer = {record for record, length in enumerate(chats.lengths) if length > BUDGET}
    flags = ("--seq-length", BUDGET, "--odb-overlong", overlong, *_training(chats.path, 56))
    packed, padded = megatron.train("--odb", *flags), megatron.train(*flags)
    assert packed.losses == pytest.approx(padded.losses, abs=1e-5)
    for name in ("samples", "left_out", "tokens", "loss_tokens"):
        assert [step.record[name] for step in packed.steps] == [
            step.record[name] for step in padded.steps
        ]
    assert packed.summary.split("sources:")[1] == padded.summary.split("sources:")[1]
    trained = {_record(name) for name in packed.all_ids}
    assert bool(trained & longer) == (overlong == "truncate")
    for name, length in _lengths(packed).items():
        assert length == min(BUDGET, chats.lengths[_record(name)])


def _assert_failed_together(errors: list[str], kind: str) -> None:
    """Each replica met an error of this kind itself, or names the other one that did."""
    met = [error.startswith(f"{kind}: ") for error in errors]
    assert any(met)
    for replica, error in enumerate(errors):
        other = f"ReplicaFailedError: replica {1 - replica} failed: {kind}: "
        assert met[replica] or error.startswith(other)


def _training(path: str, num_samples: int) -> tuple[Any, ...]:
    return "--train-data-path", path, "--eval-iters", 0, "--train-samples", num_samples


def _overlong_run(megatron: Megatron, chats: ChatFile, overlong: str) -> Run:
    return megatron.train(
        *("--odb", "--odb-token-budget", BUDGET, "--odb-overlong", overlong),
        *_training(chats.path, len(chats)),
    )


def _emitted_and_left_out(run: Run) -> tuple[int, int]:
    records = [step.record for step in run.steps]
    assert sum(record["samples"] for record in records) == len(run.all_ids)
    return len(run.all_ids), sum(record["left_out"] for record in records)


def _lengths(run: Run) -> dict[str, int]:
    """Length of each sample, by name."""
    found: dict[str, int] = {}
    for replica in run.replicas:
        for step in replica.steps:
            for ids, lengths in zip(step["ids"], step["lengths"], strict=True):
                found |= dict(zip(ids, lengths, strict=True))
    return found


def _record(name: str) -> int:
    return int(name.partition(":")[2].partition("@")[0])


def _script(flags: list[str], *, num_processes: int) -> subprocess.CompletedProcess[str]:
    """Run examples/pretrain_gpt_odb.py as `make train` does."""
    launch = ["-m", "odb_megatron.elastic", "--standalone", f"--nproc-per-node={num_processes}"]
    launch += ["-m", "odb_megatron.cpu"]
    return subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / "pretrain_gpt_odb.py"), *flags],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
