"""The ways in of the README, as they stand there, on the CPU and at a small size.

The job script's is in test_slurm_jobs.py, NeMo's in test_bridge_config.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_world import _FLAGS, SEQ_LENGTH, ChatFile
from readme import README, command
from test_patch_checkout import INSTALLED

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = README.parent
SMALL = [
    *_FLAGS,
    *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
    *("--global-batch-size", "8", "--train-samples", "21", "--eval-iters", "1"),
]
LAUNCH = [sys.executable, "-m", "odb_megatron", "launch", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path: Path, chats: ChatFile, valid_chats: ChatFile) -> Path:
    """Where the commands run: with the files that they name."""
    shutil.copy(chats.path, tmp_path / "chats.jsonl")
    shutil.copy(valid_chats.path, tmp_path / "held_out.jsonl")
    (tmp_path / "pretrain_gpt.py").write_text(INSTALLED)
    return tmp_path


def _run(words: list[str], folder: Path, tokenizer: Path, *more: str) -> str:
    at = words.index("--nproc-per-node")
    words[at + 1] = "2"  # two cores instead of eight GPUs
    words = [str(tokenizer) if word == "/path/to/hf-tokenizer" else word for word in words]
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    done = subprocess.run(
        [*words, *SMALL, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "21 samples (21 of 21 requested)" in done.stdout, done.stdout[-3000:]
    return done.stdout


def _tokenizer(folder: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def test_in_a_checkout(folder: Path, tokenizer_folder: Path) -> None:
    words = command("odb_megatron.run", "--odb")
    assert words[0] == "torchrun"
    output = _run([*LAUNCH, *words[1:]], folder, tokenizer_folder, *_tokenizer(tokenizer_folder))
    assert "odb: in place of pretrain_gpt.py's own data sets" in output


def test_with_the_package_alone(folder: Path, tokenizer_folder: Path) -> None:
    words = command("odb-megatron", "pretrain", "--odb")
    ours = [sys.executable, "-m", "odb_megatron", "pretrain", "--device", "cpu", *words[2:]]
    _run(ours, folder, tokenizer_folder, "--tokenizer-type", "HuggingFaceTokenizer")


def test_on_one_machine(folder: Path, tokenizer_folder: Path) -> None:
    words = command("odb-megatron", "launch", "--odb")
    ours = [sys.executable, "-m", "odb_megatron", *words[1:]]
    data = shlex.split("--data-path chats.jsonl --split 90,10,0 --odb-token-budget 96")
    _run(ours, folder, tokenizer_folder, *_tokenizer(tokenizer_folder), *data)
