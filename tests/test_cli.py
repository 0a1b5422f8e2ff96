"""The `odb-megatron` command: what it prints, its exit codes, and that it starts fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odb_megatron import __version__
from odb_megatron.cli import main
from odb_megatron.command import check_output

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(sys.executable).with_name("odb-megatron")
COMMANDS = [[sys.executable, "-m", "odb_megatron"]]
if SCRIPT.exists():
    COMMANDS.append([str(SCRIPT)])


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": ""}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[0]).name)
def test_help_of_the_installed_command(command: list[str]) -> None:
    done = _run(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: odb-megatron" in done.stdout
    assert "pretrain" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["pretrain", "--help"],
        ["doctor", "--help"],
        ["simulate", "--help"],
        ["inspect", "--help"],
        ["--version"],
    ],
)
def test_no_heavy_import(arguments: list[str]) -> None:
    heavy = {"torch", "numpy", "megatron", "transformers", "tqdm"}
    if arguments[0] in ("simulate", "inspect"):  # their parsers name the planner's defaults
        heavy -= {"numpy"}
    code = (
        "import sys\n"
        "from odb_megatron.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        f"heavy = {sorted(heavy)!r}\n"
        "print('heavy:', sorted(set(heavy) & set(sys.modules)), file=sys.stderr)\n"
    )
    start = time.monotonic()
    done = _run(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert time.monotonic() - start < 1.0 * _slowness()


def _slowness() -> float:
    """How much slower than a quiet machine Python starts now (about 0.02 s there)."""
    start = time.monotonic()
    _run(sys.executable, "-c", "pass")
    return max(1.0, (time.monotonic() - start) / 0.05)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: odb-megatron")


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian", "--x"])
    assert ended.value.code == 2
    assert "trian" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"odb-megatron {__version__}\n"


def test_a_command_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from odb_megatron import elastic

    seen: list[list[str]] = []
    monkeypatch.setattr(elastic, "pretrain", lambda argv: seen.append(argv) or 7)
    assert main(["pretrain", "--nproc-per-node", "2", "--help", "--version"]) == 7
    assert seen == [["--nproc-per-node", "2", "--help", "--version"]]
    monkeypatch.setattr(sys, "argv", ["odb-megatron", "pretrain", "--odb"])
    assert main() == 7
    assert seen[1] == ["--odb"]


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
    check_output("--json", str(there))
    check_output("--json", str(absent))
    check_output("--json", os.devnull)
    assert (there.read_text(), absent.exists()) == ("kept", False)
    os.mkfifo(tmp_path / "pipe")
    check_output("--json", str(tmp_path / "pipe"))  # does not wait for a reader


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "lognormal:mean=50,cv=1,max=99,n=99", "--token-budget", "99"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *flags, "--policy", "bound", "--json", "/dev/full"])
    assert ended.value.code == 2
    assert "simulate: error: [Errno 28] No space left on device" in capsys.readouterr().err
