"""`odb-megatron launch`: the command it builds, exit codes, gloo on the CPU, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from odb_megatron import launch
from odb_megatron.launch import build_command, build_environment
from odb_megatron.testing import run_script

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
        [sys.executable, "-m", "odb_megatron.launch", *argv],
        capture_output=True,
        text=True,
        timeout=90,
        env=_environment(),
        check=False,
    )


@pytest.mark.parametrize(
    ("device", "torchrun_args", "expected"),
    [
        ("auto", [], ["--standalone", "--nproc-per-node=2", "s.py", "--x"]),
        (
            "cpu",
            [],
            [
                "--standalone",
                "--nproc-per-node=2",
                "-m",
                "odb_megatron.testing.run_script",
                "s.py",
                "--x",
            ],
        ),
        (
            "auto",
            ["--nnodes=2", "--rdzv_endpoint=host:1"],
            ["--nproc-per-node=2", "--nnodes=2", "--rdzv_endpoint=host:1", "s.py", "--x"],
        ),
        (
            "auto",
            ["--max-restarts=1"],
            ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "s.py", "--x"],
        ),
    ],
)
def test_command(device: str, torchrun_args: list[str], expected: list[str]) -> None:
    command = build_command(
        ["s.py", "--x"], device=device, num_processes=2, torchrun_args=torchrun_args
    )
    assert command == [sys.executable, "-m", "torch.distributed.run", *expected]


@pytest.mark.parametrize(
    ("cores", "num_processes", "before", "device", "after"),
    [
        (8, 2, {}, "cpu", {"OMP_NUM_THREADS": "4"}),
        (2, 4, {}, "cpu", {"OMP_NUM_THREADS": "1"}),
        (8, 2, {"OMP_NUM_THREADS": "3"}, "cpu", {"OMP_NUM_THREADS": "3"}),
        (8, 2, {"CUDA_VISIBLE_DEVICES": "0"}, "auto", {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    num_processes: int,
    before: dict[str, str],
    device: str,
    after: dict[str, str],
) -> None:
    monkeypatch.setattr(launch, "_num_cores", lambda: cores)
    assert build_environment(before, device=device, num_processes=num_processes) == after


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["--device", "cpu", "s.py", "--device", "x"], ["s.py", "--device", "x"]),
        (["--nproc-per-node", "2", "--", "s.py", "--", "y"], ["s.py", "--", "y"]),
        (["--torchrun-args=--nnodes=2", "s.py"], ["s.py"]),
    ],
)
def test_arguments_of_the_script_are_its_own(argv: list[str], script: list[str]) -> None:
    assert launch._parse(argv).script == script


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "no SCRIPT was named"),
        (["--nproc-per-node", "0", "s.py"], "'0' is not a whole number of at least 1"),
        (["--devcie", "cpu", "s.py"], "unrecognized arguments: --devcie"),
        (["--dev", "cpu", "s.py"], "unrecognized arguments: --dev"),
        (["--", "--x", "s.py"], "SCRIPT expected, got --x: its options come after it"),
        (["--device", "gpu", "s.py"], "invalid choice: 'gpu'"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_import_and_help_need_no_torch() -> None:
    code = "import sys, odb_megatron.launch as l; l._parse(['s.py']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=_environment(),
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_two_processes_all_reduce_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALL_REDUCE)
    argv = [
        "--device",
        "cpu",
        "--nproc-per-node",
        "2",
        "--",
        str(script),
        str(tmp_path),
        "--a",
        "b",
    ]
    done = _launch(*argv)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "3.0 ['--a', 'b'] __main__"
    assert done.stdout.count("Megatron runs on CPU with gloo") == 1


def test_a_failing_script_fails_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(3)")
    assert _launch(str(script)).returncode == 1


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("import sys; sys.exit(5)", 5),
        ("pass", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_exit_code_is_the_launchers(child: str, expected: int) -> None:
    assert launch._run([sys.executable, "-c", child], os.environ) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time; from pathlib import Path\n"
        "Path(sys.argv[1], f'pid{os.getpid()}').touch(); time.sleep(600)"
    )
    argv = ["--nproc-per-node", "2", str(script), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "odb_megatron.launch", *argv],
        env=_environment(),
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3, "torch's launcher and two workers"
        process.send_signal(number)
        assert process.wait(timeout=40) != 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [([], "usage: python -m"), (["/nowhere/script.py"], "no such script: /nowhere/script.py")],
)
def test_run_script_refuses(argv: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        run_script.main(argv)


def test_run_script_refuses_cuda_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('must not run')")
    with pytest.raises(SystemExit, match=r"torch sees a CUDA device: drop --device cpu"):
        run_script.main([str(script)])
