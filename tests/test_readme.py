"""The commands of README and quickstart, as they stand there, on the CPU and at a small size.

What another test runs already is not run again here; `RUN_BY` says which test that is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_world import _FLAGS, SEQ_LENGTH, ChatFile
from readme import QUICKSTART, README, command, commands
from test_patch_checkout import INSTALLED

from odb_megatron.cli import main

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = README.parent
SMALL = [
    *_FLAGS,
    *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
    *("--global-batch-size", "8", "--train-samples", "21", "--eval-iters", "1"),
]
# Every command: words that tell it from the others, and the test that runs it.
RUN_BY = (
    (("make", "train"), "test_readme.py::test_make_train"),
    (("odb_megatron.run",), "test_readme.py::test_in_a_checkout"),
    (("pretrain", "--odb-log-dir"), "test_readme.py::test_quickstart"),
    (("odb-megatron", "doctor"), "test_doctor.py::test_this_machine"),
    (("odb-megatron", "trace"), "test_readme.py::test_quickstart"),
    (("odb-megatron", "compare"), "test_readme.py::test_quickstart"),
    (("pretrain", "16384"), "test_readme.py::test_with_the_package_alone"),
    (("odb_megatron.cpu",), "test_readme.py::test_without_a_gpu"),
    (("odb-megatron", "simulate"), "test_readme.py::test_simulate"),
    (("odb-megatron", "inspect", "--html"), "test_readme.py::test_inspect"),
    (
        ("odb-megatron", "inspect", "--show"),
        "test_inspect.py::test_records_are_shown_token_by_token",
    ),
    (("sbatch",), "test_slurm_jobs.py::test_the_command_of_the_readme"),
    (("odb_megatron.bridge.run_recipe",), "test_bridge_config.py::test_the_command_of_the_readme"),
    (
        ("benchmarks/train_throughput.py",),
        "test_benchmarks.py::test_the_throughput_benchmark_measures_every_variant",
    ),
    (
        ("benchmarks/loss_parity.py",),
        "test_benchmarks.py::test_packed_training_has_the_padded_baselines_losses",
    ),
    (
        ("benchmarks/parallel_parity.py",),
        "test_benchmarks.py::test_a_topology_trains_as_one_process",
    ),
    (("odb_megatron.testing.fuzz",), "test_fuzz.py::test_result"),
)
# What runs the tests cannot be run by one.
THE_CHECKS = ("test", "test-matrix", "test-slurm", "test-bridge", "verify", "bench", "docs")

LAUNCH = [sys.executable, "-m", "odb_megatron.elastic", "--standalone"]


@pytest.fixture
def folder(tmp_path: Path, chats: ChatFile, valid_chats: ChatFile) -> Path:
    """Where the commands run: with the files that they name."""
    shutil.copy(chats.path, tmp_path / "chats.jsonl")
    shutil.copy(valid_chats.path, tmp_path / "held_out.jsonl")
    (tmp_path / "pretrain_gpt.py").write_text(INSTALLED)
    return tmp_path


def _run(words: list[str], folder: Path, tokenizer: Path, *more: str) -> str:
    at = words.index("--nproc-per-node")
    words[at + 1] = "1"  # in place of eight GPUs
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
    on_cpu = [*LAUNCH, *words[1:3], "-m", "odb_megatron.cpu", *words[3:]]
    output = _run(on_cpu, folder, tokenizer_folder, *_tokenizer(tokenizer_folder))
    assert "odb: in place of pretrain_gpt.py's own data sets" in output


def test_with_the_package_alone(folder: Path, tokenizer_folder: Path) -> None:
    words = command("odb-megatron", "pretrain", "--odb")
    ours = [sys.executable, "-m", "odb_megatron", "pretrain", "--device", "cpu", *words[2:]]
    _run(ours, folder, tokenizer_folder, "--tokenizer-type", "HuggingFaceTokenizer")


def test_without_a_gpu(folder: Path, tokenizer_folder: Path) -> None:
    words = command("odb_megatron.cpu", "--odb")
    ours = [*LAUNCH, *words[1:]]
    data = shlex.split("--data-path chats.jsonl --split 90,10,0 --odb-token-budget 96")
    _run(ours, folder, tokenizer_folder, *_tokenizer(tokenizer_folder), *data)


@pytest.mark.parametrize("page", [README, QUICKSTART], ids=lambda page: page.name)
def test_every_command_is_run_by_a_test(page: Path) -> None:
    found = commands(page)
    assert len(found) >= 3
    for words in found:
        if words[0] == ".ci/run" or (words[0] == "make" and words[1] in THE_CHECKS):
            continue
        tests = [test for marks, test in RUN_BY if set(marks) <= set(words)]
        assert len(tests) == 1, f"{' '.join(words)}: run by {tests or 'no test'}"


@pytest.mark.parametrize(("marks", "test"), RUN_BY)
def test_the_tests_that_run_them_exist(marks: tuple[str, ...], test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert f"def {name}(" in text
    assert any(
        set(marks) <= set(words) for page in (README, QUICKSTART) for words in commands(page)
    )
    # A benchmark's command is run by a test that names the same script.
    scripts = [mark for mark in marks if mark.startswith("benchmarks/")]
    assert all(Path(script).name in text for script in scripts)


def test_flags_of_the_benchmarks_are_theirs() -> None:
    common = (ROOT / "benchmarks" / "common.py").read_text()
    for words in (words for page in (README, QUICKSTART) for words in commands(page)):
        if len(words) > 1 and words[1].startswith("benchmarks/"):
            text = (ROOT / words[1]).read_text(encoding="utf-8") + common
            for flag in (word for word in words if word.startswith("--")):
                assert f'"{flag}"' in text, f"{words[1]} has no {flag}"


def test_targets_of_make() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        words[1] for page in (README, QUICKSTART) for words in commands(page) if words[0] == "make"
    }
    assert named
    for target in named:
        assert f"\n{target}: venv" in text, target


def test_make_train(folder: Path) -> None:
    """The README's line for one's own data, in this environment in place of .venv."""
    words = command("make", "train", "DATA=chats.jsonl")
    words = [word.replace("DATA=", f"DATA={folder}/") for word in words]
    printed = _trained([*words, "--assume-old", "venv", f"PYTHON={sys.executable}"], folder=ROOT)
    assert "samples (122 of 122 requested)" in printed, printed[-3000:]
    assert re.search(r"^ +memory +process peak [.0-9]+ GiB of [.0-9]+ GiB; ", printed, re.MULTILINE)


def _trained(words: Sequence[str], *, folder: Path) -> str:
    """Run a command that trains; return what it prints."""
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "\nodb: " in done.stdout
    return done.stdout


def test_quickstart(
    folder: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The training, and what looks at its log; the other run to compare it with is a copy."""
    words = command("odb-megatron", "pretrain", "--odb-log-dir", page=QUICKSTART)
    words = [str(tokenizer_folder) if word == "/path/to/hf-tokenizer" else word for word in words]
    _trained([sys.executable, "-m", "odb_megatron", *words[1:]], folder=folder)
    assert list((folder / "checkpoints").glob("iter_*"))
    pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")
    monkeypatch.chdir(folder)
    assert main(command("odb-megatron", "trace", page=QUICKSTART)[1:]) == 0
    assert "odb, 2 replicas" in capsys.readouterr().out
    shutil.copytree("logs", "logs-64")
    assert main(command("odb-megatron", "compare", page=QUICKSTART)[1:]) == 0
    assert re.search("^samples .* equal$", capsys.readouterr().out, re.MULTILINE)
    for page in ("run.html", "both.html"):
        assert "<title>" in (folder / page).read_text(encoding="utf-8")


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    words = command("odb-megatron", "simulate", page=QUICKSTART)
    at = words.index("--lengths") + 1
    words[at] = words[at].partition(",n=")[0] + ",n=1024"  # the page's own number takes a minute
    assert main(words[1:]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("odb", "dp-balanced", "ffd", "standard-safe"))


@pytest.mark.parametrize("page", [README, QUICKSTART], ids=lambda page: page.name)
def test_inspect(
    page: Path,
    folder: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")
    monkeypatch.chdir(folder)
    words = command("odb-megatron", "inspect", "--html", page=page)
    words = [str(tokenizer_folder) if word == "/path/to/hf-tokenizer" else word for word in words]
    assert main([*words[1:], "--workers", "1"]) == 0
    assert "61" in capsys.readouterr().out
    assert "<title>" in (folder / "inspect.html").read_text(encoding="utf-8")
