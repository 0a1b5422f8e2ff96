"""`odb-megatron launch`: the command it builds, exit codes, gloo on the CPU, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from odb_megatron import elastic, launch
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
    assert command == [sys.executable, "-m", "odb_megatron.elastic", *expected]


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
        (["--device", "cpu", "-m", "a.b", "--x", "-m"], ["-m", "a.b", "--x", "-m"]),
        (["s.py", "-m", "x"], ["s.py", "-m", "x"]),
        (["--nproc-per-node", "2", "--", "-m", "a.b", "--x"], ["-m", "a.b", "--x"]),
    ],
)
def test_arguments_of_the_script_are_its_own(argv: list[str], script: list[str]) -> None:
    assert launch._parse(argv).script == script


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "no SCRIPT was named"),
        (["-m"], "no SCRIPT was named"),
        (["--", "-m"], "no MODULE was named"),
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


FAILURES = """
import atexit, os, signal, sys, time
from odb_megatron.elastic import leave_reason
from odb_megatron.megatron.usage import usage_errors
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


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        (
            "code",
            3,
            r"rank \d ended with exit code 3 and left no reason: see what it printed above",
        ),
        (
            "signal",
            128 + signal.SIGKILL,
            r"rank 0 was ended by SIGKILL and left no reason: see what it printed above, and "
            "whether the machine ran out of memory",
        ),
        (
            "silent",
            3,
            "rank 0 ended with exit code 3 and left no reason: see what it printed above",
        ),
        ("usage", 2, r"error: --odb-token-budget 2 is too small: raise it"),
        (
            "told",
            1,
            r"rank 1 failed, its traceback is above: BadRecordError: chats\.jsonl:7: not JSON",
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


def test_without_a_launcher_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, os.devnull, "/nowhere/error.json"):
        if value is None:
            monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
        assert not elastic.leave_reason("why")


def test_files_of_others_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / str(rank) / "error.json" for rank in range(4)]
    for file in files:
        file.parent.mkdir()
    assert elastic.first_reason(str(files[0])) is None
    files[0].write_text("{")
    files[1].write_text('{"message": {"message": "torch\'s", "extraInfo": {"timestamp": "1"}}}')
    assert elastic.first_reason(str(files[0])) is None
    for rank in (3, 2):
        monkeypatch.setenv("RANK", str(8 + rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[rank]))
        assert elastic.leave_reason(f"of {rank}", is_told=rank == 3)
    found = elastic.first_reason(str(files[0]))
    assert found is not None
    assert (found.rank, found.text, found.is_told) == (10, "of 2", False)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
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
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == []


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGKILL)", "pass"])
def test_what_a_rank_leaves_is_ended(tmp_path: Path, ends: str) -> None:
    """What a rank that succeeded leaves has ten seconds to end by itself."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess, sys; from pathlib import Path\n"
        "ends = 'sleep 2; touch \"$0\"; sleep 600 & wait'\n"
        "left = subprocess.Popen(['sh', '-c', ends, sys.argv[2]], start_new_session=True)\n"
        f"Path(sys.argv[1]).write_text(str(left.pid)); {ends}"
    )
    done = _launch(str(script), str(tmp_path / "pid"), str(tmp_path / "uploaded"))
    assert done.returncode == (0 if ends == "pass" else 128 + signal.SIGKILL)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    if ends == "pass":
        assert (tmp_path / "uploaded").exists()


@pytest.mark.parametrize(
    ("argv", "text"),
    [([], "usage: python -m"), (["/nowhere/script.py"], "no such script: /nowhere/script.py")],
)
def test_run_script_refuses(argv: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        run_script.main(argv)


def test_pretrain_is_the_packages_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the launcher may stand between Megatron's; behind `--` all are Megatron's."""
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "_run", lambda command, _: commands.append(command) or 7)
    flags = ["--odb", "--data-path", "a b.jsonl", "--odb-plan-ahead=4"]
    assert launch.pretrain([*flags, "--nproc-per-node", "2", "--lr", "-1", "--", "--device"]) == 7
    ours = ["-m", "odb_megatron.megatron.pretrain"]
    assert commands[0][4:] == ["--nproc-per-node=2", *ours, *flags, "--lr", "-1", "--device"]
    launch.pretrain(["--device", "cpu", "--", "--help"])
    assert commands[1][5:] == ["-m", "odb_megatron.testing.run_script", *ours, "--help"]


def test_pretrain_help_says_how_to_list_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(["--help"])
    assert not ended.value.code
    assert "'odb-megatron pretrain --device cpu -- --help' lists" in " ".join(
        capsys.readouterr().out.split()
    )


def test_run_script_runs_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_module_to_run.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(run_script.cpu_device, "activate", lambda: None)
    run_script.main(["-m", "a_module_to_run", "--x", "-m"])
    assert capsys.readouterr().out == "__main__ ['--x', '-m']\n"


def test_run_script_refuses_cuda_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "path", sys.path[:])  # of which the script's folder becomes the first
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('must not run')")
    with pytest.raises(SystemExit, match=r"torch sees a CUDA device: drop --device cpu"):
        run_script.main([str(script)])
