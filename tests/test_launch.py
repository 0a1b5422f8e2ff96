"""`odb_megatron.elastic` and `.cpu`: reasons of failures, exit codes, gloo on the CPU, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from odb_megatron import cpu, elastic

ROOT = Path(__file__).resolve().parents[1]

ALL_REDUCE = """
import sys
import torch
from pathlib import Path
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
total = torch.tensor([rank + 1.0], device=torch.cuda.current_device())
torch.distributed.all_reduce(total)
Path(sys.argv[1], f"rank{rank}").write_text(f"{total.item()} {sys.argv[2:]} {__name__}")
torch.distributed.destroy_process_group()
"""


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **more}


def _launch(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "odb_megatron.elastic", "--standalone", *argv],
        capture_output=True,
        text=True,
        timeout=90,
        env=_environment(),
        check=False,
    )


@pytest.mark.parametrize(
    ("run", "argv", "text"),
    [
        (
            elastic.pretrain,
            ["--nproc-per-node", "0"],
            "--nproc-per-node 0 is no number",
        ),
        (elastic.pretrain, ["--device", "gpu"], "invalid choice: 'gpu'"),
        (cpu.main, [], "usage: python -m"),
        (cpu.main, ["/nowhere/script.py"], "no such script: /nowhere/script.py"),
    ],
)
def test_wrong_arguments(capsys: Any, run: Any, argv: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(argv)
    assert text in f"{caught.value.code} {capsys.readouterr().err}"


def test_two_processes_all_reduce_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALL_REDUCE)
    command = ["-m", "odb_megatron.cpu", str(script), str(tmp_path), "--a", "b"]
    done = _launch("--nproc-per-node", "2", *command)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "3.0 ['--a', 'b'] __main__"
    assert done.stdout.count("Megatron runs on CPU with gloo") == 1


FAILURES = """
import atexit, os, signal, sys, time
from odb_megatron.elastic import leave_reason
from odb_megatron.errors import usage_errors
rank, how = int(os.environ["RANK"]), sys.argv[1]
if how == "code":
    sys.exit(3)
if how in ("signal", "silent") and rank == 0:
    time.sleep((0.96 - time.time()) % 1)  # the launcher looks every 0.1 s: in the next second
    if how == "silent":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("signal", "silent"):
    time.sleep((0.97 - time.time()) % 1)
    leave_reason("a peer is gone", is_told=True)
    time.sleep(600)
if how == "usage":
    if rank == 0:
        atexit.register(time.sleep, 600)  # the launcher ends it before it has ended itself
    else:
        time.sleep(1.5)
    with usage_errors():
        raise ValueError("--odb-token-budget 2 is too small: raise it")
if rank == 1:
    leave_reason("BadRecordError: chats.jsonl:7: not JSON")
    leave_reason("and a consequence of it")
    time.sleep(600)
time.sleep(1)
leave_reason("ReplicaFailedError: replica 1 failed: BadRec...", is_told=True)
raise RuntimeError("replica 1 failed")
"""


SILENT = "and left no reason: see what it printed above"


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("code", 3, rf"rank \d ended with exit code 3 {SILENT}"),
        ("signal", 137, f"rank 0 was ended by SIGKILL {SILENT}, and whether the machine .*"),
        ("silent", 3, f"rank 0 ended with exit code 3 {SILENT}"),
        ("usage", 2, "error: --odb-token-budget 2 is too small: raise it"),
        (
            "told",
            1,
            "rank 1 failed, its traceback is above: BadRecordError: chats.*: not JSON",
        ),
    ],
)
def test_the_last_line_is_the_first_failures_reason(
    tmp_path: Path, how: str, code: int, last: str
) -> None:
    """Both ranks fail; the reason of one is printed, once and last, without torch's traceback."""
    script = tmp_path / "script.py"
    script.write_text(FAILURES)
    done = _launch("--nproc-per-node", "2", str(script), how)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(f"odb: {last}", done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count("odb: ") == 1
    assert "ChildFailedError" not in done.stderr
    assert ("Traceback" in done.stderr) == (how == "told")


def test_a_script_that_fails_as_it_is_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from os import no_such_name")
    done = _launch("-m", "odb_megatron.cpu", str(tmp_path / "script.py"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("odb: rank 0 failed, its traceback is above: ImportError: cannot import")


def test_without_a_launcher_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, os.devnull, "/nowhere/error.json"):
        if value is None:
            monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
        assert not elastic.leave_reason("why")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time; from pathlib import Path\n"
        "Path(sys.argv[1], f'pid{os.getpid()}').touch(); time.sleep(600)"
    )
    argv = ["--nproc-per-node", "2", str(script), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "odb_megatron.elastic", "--standalone", *argv],
        env=_environment(),
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "two workers"
        process.send_signal(number)
        assert process.wait(timeout=40) != 0
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == []


def test_pretrain_is_the_packages_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the launcher may stand between Megatron's; behind `--` all are Megatron's."""
    commands: list[list[str]] = []
    monkeypatch.setattr(elastic, "main", lambda command: commands.append(command) or 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    flags = ["--odb", "--data-path", "a b.jsonl", "--odb-epochs=4"]
    ours = ["--nproc-per-node", "2", "--device", "cpu"]
    assert elastic.pretrain([*flags, *ours, "--lr", "-1", "--", "--device"]) == 7
    module = ["-m", "odb_megatron.cpu", "-m", "odb_megatron.megatron.pretrain"]
    start = ["--standalone", "--nproc-per-node=2", *module]
    assert commands == [[*start, *flags, "--lr", "-1", "--device"]]
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_the_cpu_runner_runs_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_module_to_run.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(cpu.cpu_device, "activate", lambda: None)
    cpu.main(["-m", "a_module_to_run", "--x", "-m"])
    assert capsys.readouterr().out == "__main__ ['--x', '-m']\n"


def test_the_cpu_runner_refuses_cuda_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "path", sys.path[:])  # of which the script's folder becomes the first
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('must not run')")
    with pytest.raises(SystemExit, match=r"torch sees a CUDA device: drop --device cpu"):
        cpu.main([str(script)])
