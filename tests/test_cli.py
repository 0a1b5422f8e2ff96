"""The `odb-megatron` command: what it prints, its exit codes, and that it starts fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odb_megatron import __version__, elastic
from odb_megatron.cli import main
from odb_megatron.command import check_output

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": ""}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "usage: odb-megatron"),
        ("", "usage: odb-megatron"),
        ("--version", f"odb-megatron {__version__}\n"),
        ("pretrain --help", "usage: odb-megatron pretrain"),
        ("doctor --help", "usage: odb-megatron doctor"),
        ("simulate --help", "usage: odb-megatron simulate"),  # their parsers name the planner's
        ("inspect --help", "usage: odb-megatron inspect"),  # defaults, which needs numpy
    ],
)
def test_help_imports_nothing_heavy(arguments: str, said: str) -> None:
    allowed = {"numpy"} if arguments[:3] in ("sim", "ins") else set()
    heavy = {"torch", "numpy", "megatron", "transformers", "tqdm"} - allowed
    code = f"""
import sys
from odb_megatron.cli import main
try:
    ended = main({arguments.split()!r})
except SystemExit as error:
    ended = error.code
sys.exit(ended or str({heavy!r} & set(sys.modules) or ""))
"""
    start = time.monotonic()
    _run("-c", "pass")
    quiet, start = time.monotonic() - start, time.monotonic()
    done = _run("-c", code)
    assert done.stderr.strip() == ""
    assert done.stdout.startswith(said)
    # Python alone starts in about 0.02 s on a quiet machine.
    assert time.monotonic() - start < max(1.0, quiet / 0.05)


def test_the_module_is_the_command() -> None:
    done = _run("-m", "odb_megatron", "trian", "--x")
    assert done.returncode == 2
    assert "trian" in done.stderr


def test_a_command_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(elastic, "pretrain", lambda argv: seen.append(argv) or 7)
    assert main(["pretrain", "--nproc-per-node", "2", "--help", "--version"]) == 7
    monkeypatch.setattr(sys, "argv", ["odb-megatron", "pretrain", "--odb"])
    assert main() == 7
    assert seen == [["--nproc-per-node", "2", "--help", "--version"], ["--odb"]]


@pytest.mark.parametrize("arguments", [["--help"], ["trace", "--help"], ["simulate", "--help"]])
def test_a_reader_that_has_left_is_no_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in `odb-megatron trace DIR | head`: no traceback, also none as Python flushes last."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(arguments) == 141
        print("more", flush=True)
    assert capfd.readouterr().err == ""


def test_output_files_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    for path in (there, absent, os.devnull, tmp_path / "pipe"):  # no wait for a reader
        check_output("--json", str(path))
    assert (there.read_text(), absent.exists()) == ("kept", False)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/dev/full", "simulate: error: [Errno 28] No space left on device"),
        ("no/a.json", "--json no/a.json cannot be written (No such file or directory): name a"),
        (".", "--json . cannot be written (Is a directory): name a file"),
    ],
)
def test_what_cannot_be_written(out: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "lognormal:mean=50,cv=1,max=99,n=99", "--token-budget", "99"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *flags, "--policy", "bound", "--json", out])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
