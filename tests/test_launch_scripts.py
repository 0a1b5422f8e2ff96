"""The job scripts of launch/ without Slurm: what they would run; its commands are stand-ins."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sbatch"))

# Prints its arguments and environment as the job's srun would get them.
SRUN = f"""#!{sys.executable}
import json, os, sys, time
with open(os.environ["CALL"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
print(os.environ.get("SAYS", ""), file=sys.stderr)
while os.environ.get("STOPS_AT") and not os.path.exists(os.environ["STOPS_AT"]):
    time.sleep(0.05)
sys.exit(int(os.environ.get("STATUS", "0")))
"""
SCONTROL = """#!/bin/sh
case "$*" in
*hostnames*) seq --format=node%g 7 "${LAST_NODE:-8}" ;;
*"node node7"*) echo "NodeName=node7 NodeAddr=127.0.0.1 Port=6818" ;;
requeue*) [ "${REQUEUES:-yes}" = yes ] || exit 1; kill "$PPID" ;;
esac
"""
# Fails FAILS times; the step ends at once when it was reached, and it takes its time.
SCANCEL = """#!/bin/sh
echo >>"$STOPS_AT.tries"
[ "$(wc -l <"$STOPS_AT.tries")" -gt "${FAILS:-0}" ] || exit 1
touch "$STOPS_AT"
sleep 0.5
"""


def _run_job(
    script: str, folder: Path, *flags: str, **settings: str
) -> tuple[subprocess.CompletedProcess[str], list[str], dict[str, str]]:
    """Run a job script; return it, srun's arguments, srun's environment."""
    call = folder / "call.json"
    done = subprocess.run(
        ["bash", LAUNCH / script, *flags],
        env=_environment(folder) | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if not call.exists():
        return done, [], {}
    arguments, seen = json.loads(call.read_text())
    return done, arguments, seen


def _environment(folder: Path) -> dict[str, str]:
    """A job's environment, with stand-ins for Slurm's commands."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    call = folder / "call.json"
    return {
        "PATH": f"{tools}:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder),
        "CALL": str(call),
        "ODB_CHECKPOINTS": str(folder / "with space"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "chat",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "ODB_PYTHON": "python3.12",
    }


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    paths = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / "tools" / "slurm_cluster.sh"]
    done = subprocess.run(
        ["shellcheck", "--external-sources", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_torchs_launcher(tmp_path: Path) -> None:
    """On so many nodes that their list comes late."""
    words = ("--odb", "--name", "a b")
    done, arguments, seen = _run_job("odb_pretrain.sbatch", tmp_path, *words, LAST_NODE="9000")
    assert done.returncode == 0
    assert arguments[-18:] == [
        "python3.12",
        "--rdzv-backend=static",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--master-addr=127.0.0.1",
        "--master-port=23456",
        "--max-restarts=0",
        "examples/pretrain_gpt_odb.py",
        "--odb",
        "--name",
        "a b",
        "--save",
        f"{tmp_path}/with space",
        "--load",
        f"{tmp_path}/with space",
        "--exit-signal-handler",
        "--exit-signal",
        "SIGUSR1",
    ]
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in seen
    expected = "odb: job 123456 (chat), start 1, on node[7-8], rank 0 at 127.0.0.1:23456, interface"
    assert expected in done.stderr


def test_settings_win(tmp_path: Path) -> None:
    _, arguments, seen = _run_job(
        "odb_pretrain_srun.sbatch",
        tmp_path,
        "--odb",
        ODB_SCRIPT="-m my.pretrain",
        ODB_CHECKPOINTS="",
        MASTER_PORT="31000",
        GLOO_SOCKET_IFNAME="eth3",
        CUDA_DEVICE_MAX_CONNECTIONS="8",
        SLURM_CPUS_PER_TASK="6",
    )
    assert arguments[-4:] == ["python3.12", "-m", "my.pretrain", "--odb"]
    assert "--gpu-bind=none" in arguments
    assert seen["MASTER_PORT"] == "31000"
    assert seen["GLOO_SOCKET_IFNAME"] == "eth3"
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert seen["SRUN_CPUS_PER_TASK"] == "6"


def test_bridge(tmp_path: Path) -> None:
    override = "dataset.odb.token_budget=16384"
    _, arguments, _ = _run_job("odb_bridge.sbatch", tmp_path, override, ODB_RECIPE="some_recipe")
    at = arguments.index("odb_megatron.bridge.run_recipe")
    assert arguments[at - 1 : at + 4] == [
        *("-m", "odb_megatron.bridge.run_recipe", "--recipe", "some_recipe"),
        override,
    ]
    assert f"checkpoint.load='{tmp_path}/with space'" in arguments


def test_a_value_of_hydra() -> None:
    code = 'source "$1"; odb_hydra_value "$2"'
    for value, quoted in (("/a/lr=3(1),b", "'/a/lr=3(1),b'"), ("it's\\", "'it\\'s\\\\'")):
        command = ["bash", "-euc", code, "_", str(LAUNCH / "job.sh"), value]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == quoted


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("odb_pretrain.sbatch", ["--odb", "--save", "/my/run"]),
        ("odb_pretrain_srun.sbatch", ["--load=/my/run"]),
        ("odb_bridge.sbatch", ["checkpoint.load=/my/run"]),
        ("odb_bridge.sbatch", ["++checkpoint.save=/my/run"]),
    ],
)
def test_checkpoints_of_the_users_are_not_overridden(
    script: str, flags: list[str], tmp_path: Path
) -> None:
    done, arguments, _ = _run_job(script, tmp_path, *flags)
    assert (done.returncode, arguments) == (2, [])
    assert re.search(r"^odb: error: (--save|--load=|\+*checkpoint\.)", done.stderr, re.MULTILINE)
    assert f"goes on from ODB_CHECKPOINTS={tmp_path}/with space: set that instead" in done.stderr
    (tmp_path / "again").mkdir()
    done, arguments, _ = _run_job(script, tmp_path / "again", *flags, ODB_CHECKPOINTS="")
    assert done.returncode == 0
    assert arguments[-len(flags) :] == flags


def _signal(folder: Path, **settings: str) -> tuple[int, str]:
    """Send SIGUSR1 to a job whose step runs; return the exit code and what it said."""
    stop = {"STOPS_AT": str(folder / "stop")}
    with subprocess.Popen(
        ["bash", LAUNCH / "odb_pretrain.sbatch", "--odb"],
        env=_environment(folder) | stop | settings,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        deadline = time.monotonic() + 30
        while not (folder / "call.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=60)
    return job.returncode, said


@pytest.mark.parametrize(
    ("settings", "status", "text"),
    [
        # The step ends before `scancel` does, and the controller does not answer at once.
        ({"FAILS": "2"}, -signal.SIGTERM, "job 123456 has saved, and goes back into the queue"),
        ({"ODB_CHECKPOINTS": ""}, 0, "ODB_CHECKPOINTS is empty: the job is not req"),
        ({"REQUEUES": "no"}, 1, "was not requeued: does the cluster allow it (JobRequeue, --requ"),
        ({"STATUS": "75"}, 75, "the step ended with exit code 75 (another rank is gone"),
    ],
)
def test_a_signalled_job(settings: dict[str, str], status: int, text: str, tmp_path: Path) -> None:
    code, said = _signal(tmp_path, **settings)
    assert code == status
    assert text in said
    assert status or "into the queue" not in said


@pytest.mark.parametrize("script", SCRIPTS)
def test_container(script: str, tmp_path: Path) -> None:
    """Tasks get the job's environment, also under `sbatch --export=NONE`."""
    _, arguments, seen = _run_job(
        script,
        tmp_path,
        ODB_CONTAINER_IMAGE="/shared/m.sqsh",
        ODB_CONTAINER_MOUNTS="/shared:/shared",
        SLURM_EXPORT_ENV="NONE",
    )
    assert "--kill-on-bad-exit=1" in arguments
    assert "--container-image=/shared/m.sqsh" in arguments
    assert f"--container-mounts={ROOT}:{ROOT},/shared:/shared" in arguments
    assert "python3" in arguments
    assert "python3.12" not in arguments
    assert seen["SLURM_EXPORT_ENV"] == "ALL"
    assert (seen["HF_HUB_OFFLINE"], seen["NCCL_GRAPH_REGISTER"]) == ("1", "0")


@pytest.mark.parametrize(
    ("given", "listed", "ranks"), [("", 0, ""), ("3", 0, "3"), ("", 3, "3"), ("2", 3, "2")]
)
def test_ranks_where_slurm_counts_no_gpus(
    given: str, listed: int, ranks: str, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\n[ "$1" = --list-gpus ] || { echo 9.0; exit; }\n'
        f"seq --format='GPU %g: NVIDIA H100' {listed}\n"
    )
    smi.chmod(0o755)
    done, arguments, _ = _run_job(
        "odb_pretrain.sbatch",
        tmp_path,
        SLURM_GPUS_ON_NODE="",
        ODB_RANKS_PER_NODE=given,
        PATH=f"{tmp_path / 'tools'}:{tmp_path}:/usr/bin:/bin:/usr/sbin:/sbin",
    )
    if ranks:
        assert done.returncode == 0, done.stderr
        assert f"--nproc-per-node={ranks}" in arguments
    else:
        assert (done.returncode, arguments) == (2, [])
        assert "odb: error: how many ranks a node has is not known" in done.stderr


def test_another_folder_is_refused(tmp_path: Path) -> None:
    done, arguments, _ = _run_job(SCRIPTS[0], tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert (done.returncode, arguments) == (2, [])
    assert f"odb: {tmp_path} has no launch/job.sh: submit from the repository's" in done.stderr


@pytest.mark.parametrize(
    ("says", "status"),
    [
        ("srun: error: node7: task 0: Exited with exit code 1", 1),
        ("srun: error: node7: task 0: Exited with exit code 2", 2),
        ("srun: error: node7: tasks 0-1,3: Exited with exit code 75", 75),
        (
            "srun: error: a: task 0: Killed\nsrun: error: b: task 1: Exited with exit code 1",
            137,
        ),
        ("srun: error: a: task 0: Out Of Memory", 137),
        (
            "slurmstepd: error: execve(): bash: No such file or directory\n"
            "srun: error: a: task 0: Exited with exit code 2",
            127,
        ),
        ("srun: error: a: task 0: Segmentation fault (core dumped)", 139),
        ("srun: error: a: tasks 0-3: Aborted (core dumped)", 134),
        ("0: srun: error: node7: task 0: Exited with exit code 2", 143),
        ("srun: error: Unable to create step", 143),
    ],
)
def test_the_first_task_that_fails_is_the_cause(says: str, status: int, tmp_path: Path) -> None:
    """Tasks that srun ends after it have 143, and srun's own exit code is the highest."""
    says += "\nsrun: error: node8: task 1: Exited with exit code 143"
    done, _, _ = _run_job("odb_pretrain.sbatch", tmp_path, STATUS="143", SAYS=says)
    assert done.returncode == status
    assert says in done.stderr
    meaning = {
        1: ";",
        2: " (flags that cannot be used);",
        75: " (another rank is gone or does not answer);",
        137: " (SIGKILL: killed by hand, by Slurm, or for its memory);",
        143: " (SIGTERM: cancelled, or at its time limit);",
    }.get(status, " (")
    failed = f"odb: job 123456 failed: the step ended with exit code {status}{meaning}"
    assert failed in done.stderr


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("", "--tensor-model-parallel-size 2", ""),
        ("8.0", "", "1"),
        ("9.0", "--context-parallel-size 2", "1"),
        ("10.0", "--tensor-model-parallel-size 2", ""),
        ("12.0", "", ""),
        ("9.0", "--use-megatron-fsdp", ""),
        ("9.0", "--use-torch-fsdp2", ""),
        ("9.0", "--overlap-moe-expert-parallel-comm", "32"),
    ],
)
def test_max_connections(capability: str, flags: str, expected: str) -> None:
    code = 'source "$1"; odb_max_connections "${@:2}"'
    done = subprocess.run(
        ["bash", "-euc", code, "_", str(LAUNCH / "job.sh"), capability, *flags.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_every_variable_is_explained() -> None:
    """What job.sh and the scripts read of ODB_* is set in env.sh, or said in the scripts."""
    explained = (LAUNCH / "env.sh").read_text()
    used = set()
    for path in (*LAUNCH.glob("*.sbatch"), LAUNCH / "job.sh"):
        used |= set(re.findall(r"ODB_[A-Z_]+", path.read_text()))
    assert {name for name in used if name not in explained} <= {"ODB_HOME"}
