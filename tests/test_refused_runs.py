"""Runs that cannot be made: `odb: error:` and exit code 2 before Megatron starts, no traceback.

All are tried in one process, on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_world import _FLAGS, ChatFile

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parents[1]

TRY_ALL = """
import contextlib, io, json, os, sys
from pathlib import Path
from megatron.training import training
from megatron.training.global_vars import destroy_global_vars
from odb_megatron.megatron.pretrain import pretrain_gpt
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

os.environ.pop("TORCHELASTIC_ERROR_FILE")  # else the launcher prints what is left there

def pretrain(
    cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, **more
):
    print("it would train", file=sys.stderr)

training.pretrain = pretrain
ended = []
for flags in json.loads(Path(sys.argv[1]).read_text()):
    sys.argv = ["pretrain.py", *flags]
    code, printed = 0, io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            pretrain_gpt()
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = repr(error)
    ended.append((code, printed.getvalue()))
    destroy_global_vars()
    unset_num_microbatches_calculator()
Path(os.environ["ENDED"]).write_text(json.dumps(ended))
"""

LENGTH = ["--train-iters", "2"]
SET = "odb: set --calculate-per-token-loss --micro-batch-size 1 --eval-micro-batch-size 1\n"
DATA = ["--train-data-path", "CHATS", "--valid-data-path", "CHATS"]

CASES: list[tuple[list[str], str]] = [
    (
        [*DATA, *LENGTH, "--odb-cots", "linear=1"],
        "unrecognized arguments: --odb-cots linear=1: did you mean --odb-cost? (--help lists all",
    ),
    (DATA, "the run has no length: give --train-samples N, --train-iters N or (with --odb) --odb-"),
    ([*DATA, "--train-iters", "0"], "--train-iters must be at least 1, got 0"),
    ([*DATA, "--train-iters", "-3"], "--train-iters must be at least 1, got -3"),
    ([*DATA, *LENGTH, "--train-samples", "8"], "each give the run's length: keep one"),
    ([*DATA, "--odb-epochs", "0"], "--odb-epochs must be at least 1, got 0"),
    ([*DATA, *LENGTH, "--tokenizer-model", "/nope"], "--tokenizer-model /nope is no folder of a"),
    ([*DATA, *LENGTH, "--tokenizer-model", "CHATS"], "is no folder of a Hugging Face tokenizer"),
    (["--without-odb", *DATA, *LENGTH], "--micro-batch-size is not given, and without --odb"),
    (LENGTH, "no data: give --data-path FILE.jsonl"),
    ([*LENGTH, "--data-path", "/nope.jsonl"], "/nope.jsonl does not exist"),
    ([*LENGTH, "--train-data-path", "/nope.jsonl"], "/nope.jsonl does not exist"),
    (
        [*LENGTH, "--train-data-path", "CHATS", "--valid-data-path", "1", "/nope.jsonl.gz"],
        "/nope.jsonl.gz does not exist",
    ),
    ([*LENGTH, "--data-path", "/nope"], "no data at '/nope': expected a file ending in"),
    ([*DATA, *LENGTH, "--odb-log-dir", "/proc/nope"], "--odb-log-dir /proc/nope cannot be written"),
    ([*DATA, *LENGTH, "--odb-log-dir", "CHATS"], "cannot be written (["),
    ([*DATA, *LENGTH, "--use-megatron-fsdp"], "FSDP is not in this version"),
    ([*DATA, *LENGTH, "--use-torch-fsdp2"], "FSDP is not in this version"),
    ([*DATA, *LENGTH, "--non-persistent-ckpt-type", "local"], "--non-persistent-ckpt-type global"),
    ([*DATA, *LENGTH, "--mock-data"], "real samples are trained: give --data-path"),
    (
        [*DATA, *LENGTH, "--save", "/proc/nope", "--save-interval", "1"],
        "--save /proc/nope: /proc cannot be written",
    ),
]


@pytest.fixture(scope="module")
def ended(
    chats: ChatFile, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[Any]]:
    """Exit code and standard error of each case, and of one that is not refused."""
    folder = tmp_path_factory.mktemp("refused")
    flags = " ".join(_FLAGS).replace("--micro-batch-size 1 --calculate-per-token-loss", "")
    common = ["--odb", *flags.split(), "--seq-length", "64", "--max-position-embeddings", "64"]
    common += ["--global-batch-size", "8", "--tokenizer-type", "HuggingFaceTokenizer"]
    common += ["--tokenizer-model", str(tokenizer_folder)]
    good = [*DATA, *LENGTH, "--odb-log-dir", str(folder / "new" / "log")]
    every = [
        [*common, *(str(chats.path) if word == "CHATS" else word for word in flags)]
        for flags in (*(flags for flags, _ in CASES), ["--help"], good)
    ]
    every = [
        [word for word in flags if word not in ("--odb", "--without-odb")]
        if "--without-odb" in flags
        else flags
        for flags in every
    ]
    (folder / "try.py").write_text(TRY_ALL)
    (folder / "flags.json").write_text(json.dumps(every))
    launch = [sys.executable, "-m", "odb_megatron.elastic", "--standalone"]
    done = subprocess.run(
        [*launch, "-m", "odb_megatron.cpu", "try.py", "flags.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ENDED": str(folder / "ended.json")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[Any]] = json.loads((folder / "ended.json").read_text())
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_refused(ended: list[list[Any]], number: int) -> None:
    code, error = ended[number]
    assert code == 2, error
    assert "odb: error: " in error
    assert CASES[number][1] in error
    assert "Traceback" not in error
    assert "it would train" not in error


def test_what_can_be_used_is_not_refused(ended: list[list[Any]]) -> None:
    code, error = ended[-1]
    assert code == 0, error
    assert "it would train" in error
    assert SET in error


def test_help(ended: list[list[Any]]) -> None:
    """Megatron's own help texts hold bare percent signs, on which argparse fails."""
    code, printed = ended[-2]
    assert code == 0, printed
    assert "--odb-token-budget" in printed
    assert "--num-layers" in printed
