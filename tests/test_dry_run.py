"""`--odb-dry-run`: what it reads and says, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_world import _FLAGS, ChatFile, Megatron
from parallel_runs import TP

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parents[1]
DRY = ("--odb", "--odb-dry-run", "--train-samples", 64)


@pytest.mark.parametrize("parallel", ["", TP], ids=["two replicas", "tensor parallel"])
def test_three_steps_are_read_and_nothing_written(
    parallel: str, megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    own = ("--save", tmp_path / "saved", "--save-interval", 1, "--log-progress")
    boards = ("--tensorboard-dir", tmp_path / "boards", *parallel.split())
    run = megatron.run(*DRY, *data_flags, *own, *boards)
    assert [outcome.error for outcome in run.replicas] == ["", ""]
    assert all(outcome.exited and outcome.restored for outcome in run.replicas)
    assert not any(outcome.forwards for outcome in run.replicas)
    output = run.replicas[0].output
    steps = [line for line in output.splitlines() if line.startswith("odb step")]
    assert len(steps) == 3
    assert all(word in steps[2] for word in ("samples 8", "tokens ", "M ", "fill ", "balance "))
    assert "odb: reproduce with --odb --odb-token-budget" in output
    assert "odb: the first record, " in output
    assert "odb: the longest sample of these steps has " in output
    assert "odb dry run: 3 optimizer steps, 24 samples" in output
    assert "left out: 0 bad records, 0 overlong; truncated: 0" in output
    assert not list(megatron.log_folder.glob("*"))
    assert not (tmp_path / "boards").exists()
    assert not list((tmp_path / "saved").glob("*"))


def test_data_that_does_not_fit(megatron: Megatron, chats: ChatFile, tmp_path: Path) -> None:
    """One replica reads the record; both end with exit code 2."""
    lines = Path(chats.path).read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines[:3], "nonsense", *lines[3:6]]) + "\n")
    flags = ("--train-data-path", bad, "--eval-iters", 0)
    run = megatron.run(*DRY, *flags)
    assert {outcome.error for outcome in run.replicas} == {"SystemExit: 2"}
    assert any("bad.jsonl" in outcome.output for outcome in run.replicas)
    left_out = megatron.run(*DRY, *flags, "--odb-max-bad-records", 99)
    assert [outcome.error for outcome in left_out.replicas] == ["", ""]
    assert "first left out: " in left_out.replicas[0].output


def test_a_machine_that_does_not_fit(chats: ChatFile, tokenizer_folder: Path) -> None:
    """From the command line: the launcher names what fails, once and last."""
    done = subprocess.run(
        [
            *("bash", "-c", 'ulimit -n 120; exec "$@"', "_"),
            *(sys.executable, "-m", "odb_megatron", "pretrain", "--device", "cpu"),
            *(*_FLAGS, "--seq-length", "64", "--max-position-embeddings", "64"),
            *("--global-batch-size", "8", "--eval-iters", "0", *map(str, DRY)),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--train-data-path", chats.path),
            *("--tokenizer-model", str(tokenizer_folder)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "failure  open files" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("odb: error: open files: ulimit -n is 120, expected about 256")
    assert "Traceback" not in done.stderr
