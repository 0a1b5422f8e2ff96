"""The job scripts of launch/ on a real Slurm: two nodes on this machine, ranks on the CPU.

The cluster is started for these tests, beside any that is installed, and stopped after them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from readme import command

pytest_plugins = ["megatron_fixtures"]

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "tools" / "slurm_cluster.sh"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_NEEDED = ("slurmctld", "slurmd", "munged", "srun", "ip")
_MISSING = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(_MISSING),
        reason=f"not installed: {', '.join(_MISSING)} (make test-slurm installs them)",
    ),
]

NUM_STEPS = 120
FLAGS = shlex.split(f"""
    --odb --micro-batch-size 1 --calculate-per-token-loss --global-batch-size 8
    --train-samples {8 * NUM_STEPS} --num-layers 1 --hidden-size 32 --num-attention-heads 2
    --ffn-hidden-size 64 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --make-vocab-size-divisible-by 64 --seq-length 64 --max-position-embeddings 64
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --distributed-backend gloo --seed 1234 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --eval-interval 100000 --eval-iters 0 --log-interval 1 --ckpt-format torch --save-interval 25
    --tokenizer-type HuggingFaceTokenizer
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that was submitted."""

    number: str
    folder: Path
    cluster: Cluster

    @property
    def log(self) -> str:
        """What it has printed."""
        (path,) = self.folder.glob(f"*-{self.number}.log")
        return path.read_text(errors="replace")

    def state(self) -> str:
        """Slurm's word for what it does."""
        return self.fields()["JobState"]

    def fields(self) -> dict[str, str]:
        """What Slurm knows of it."""
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S+)", shown))

    def steps(self, replica: int = 0) -> list[tuple[int, list[str], float]]:
        """(Iteration, ids, loss) in the step log, without a line that is half written."""
        path = self.folder / "steps" / f"steps-{replica:05d}.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_text().split("\n")[:-1] if line]
        records = [record for record in map(json.loads, lines) if "format" not in record]
        return [(r["iteration"], r["ids"], r["loss"]) for r in records]

    def wait(self, what: str, until: Callable[[], Any], *, timeout_s: float = 300) -> None:
        """Wait for something; a job that has ended before it came fails the test with its log."""
        end = time.monotonic() + timeout_s
        while not until():
            state = self.state()
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") and not until():
                pytest.fail(f"job is {state} before {what}; {self._logs()}")
            if time.monotonic() > end:
                pytest.fail(f"{what}: not within {timeout_s} s; {state}; {self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        folder = Path(self.cluster.environment["SLURM_CONF"]).parent
        controller = (folder / "slurmctld.log").read_text(errors="replace")
        return f"the controller's log:\n{controller[-3000:]}\nthe job's:\n{self.log[-6000:]}"

    def ends(self, state: str, *, timeout_s: float = 300) -> None:
        """Wait until it has ended, in this state."""
        self.wait(state, lambda: self.state() == state, timeout_s=timeout_s)

    def ranks(self) -> list[psutil.Process]:
        """Processes that train, in the order of their ranks."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment, command = process.environ(), process.cmdline()
            except psutil.Error:
                continue
            trains = "odb_megatron.cpu" in command and "RANK" in environment
            if environment.get("SLURM_JOB_ID") == self.number and trains:
                found[int(environment["RANK"])] = process
        return [found[rank] for rank in sorted(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The running cluster."""

    environment: dict[str, str]
    data_flags: tuple[str, ...]

    def run(self, *command: str | Path, cwd: Path = ROOT) -> str:
        """Run a command of Slurm; return what it printed."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(
        self, script: str, folder: Path, *flags: str, home: Path = ROOT, export: str = "ALL"
    ) -> Job:
        """Submit a script of launch/ as a user would, for the CPU; `home` has launch/."""
        resources = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
        options = (*resources, "--parsable", f"--export={export}")
        submit = ("sbatch", *options, f"--output={folder}/%x-%j.log", home / "launch" / script)
        extra = {"ODB_CHECKPOINTS": str(folder / "checkpoints")}
        logs = ("--odb-log-dir", str(folder / "steps"))
        cluster = Cluster(environment=self.environment | extra, data_flags=self.data_flags)
        number = cluster.run(*submit, *FLAGS, *self.data_flags, *logs, *flags, cwd=home)
        number = number.strip()
        return Job(number=number, folder=folder, cluster=self)


@pytest.fixture(scope="module")
def cluster(data_flags: tuple[str, ...], tokenizer_folder: Path) -> Iterator[Cluster]:
    """Two nodes, until the tests of this file have ended."""
    folder = Path(tempfile.mkdtemp(prefix="odb-slurm-", dir="/tmp"))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ODB_"))
    } | {
        "PATH": _PATH,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ODB_PYTHON": sys.executable,
        "ODB_SCRIPT": "-m odb_megatron.cpu examples/pretrain_gpt_odb.py",
        "ODB_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [CLUSTER, "start", folder],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        data = (*data_flags[:4], "--tokenizer-model", str(tokenizer_folder))
        yield Cluster(
            environment=environment | {"SLURM_CONF": str(folder / "slurm.conf")}, data_flags=data
        )
    finally:
        subprocess.run([CLUSTER, "stop", folder], env=environment, timeout=60, check=True)
        left = [p for p in psutil.process_iter() if str(folder) in " ".join(_words(p))]
        shutil.rmtree(folder)
    assert left == []


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run under odb_pretrain.sbatch that nothing interrupts."""
    job = cluster.submit("odb_pretrain.sbatch", tmp_path_factory.mktemp("whole"))
    job.ends("COMPLETED")
    return job


def test_a_run_over_two_nodes(whole: Job) -> None:
    assert [step[0] for step in whole.steps()] == list(range(1, NUM_STEPS + 1))
    assert [step[0] for step in whole.steps(1)] == list(range(1, NUM_STEPS + 1))
    assert "start 1, on odb[1-2], rank 0 at 127.0.0.1:2" in whole.log
    assert "interface lo\n" in whole.log


def test_a_signalled_job_saves_requeues_itself_and_goes_on(
    cluster: Cluster, whole: Job, tmp_path: Path
) -> None:
    """What Slurm does before the time limit; odb_pretrain_srun.sbatch, with data workers."""
    job = cluster.submit("odb_pretrain_srun.sbatch", tmp_path, "--num-workers", "1")
    job.wait("step 30", lambda: len(job.steps()) >= 30)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait("the requeue", lambda: job.fields()["Restarts"] == "1")
    trained = len(job.steps())
    assert trained < NUM_STEPS
    assert "odb: SIGUSR1: the ranks save and end" in job.log
    assert "has saved, and goes back into the queue" in job.log
    job.wait("the queue", lambda: job.state() in ("PENDING", "RUNNING"))
    time.sleep(3)  # slurmd takes what starts in the second of the requeue for the job that it ended
    cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # in two minutes else
    job.ends("COMPLETED")
    for replica in range(2):  # no step was trained twice
        found, expected = job.steps(replica), whole.steps(replica)
        assert [step[:2] for step in found] == [step[:2] for step in expected]
        assert [step[2] for step in found] == pytest.approx([s[2] for s in expected], abs=1e-6)


def test_a_killed_rank_ends_the_job_with_its_cause(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("odb_pretrain.sbatch", tmp_path, "--train-samples", "1000000")
    job.wait("step 3", lambda: len(job.steps()) >= 3)
    ranks = job.ranks()
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    job.ends("FAILED", timeout_s=60)
    log = job.log
    assert "1: odb: rank 1 was ended by SIGKILL" in log
    assert f"odb: job {job.number} failed: the step ended with exit code " in log
    assert job.ranks() == []


def test_the_command_of_the_readme(cluster: Cluster, tmp_path: Path) -> None:
    words = command("sbatch", "launch/odb_pretrain.sbatch")
    flags = words[words.index("launch/odb_pretrain.sbatch") + 1 :]
    job = cluster.submit("odb_pretrain.sbatch", tmp_path, *flags, "--train-samples", "16")
    job.ends("COMPLETED")
    assert len(job.steps()) == 2


def test_a_job_that_gets_no_environment(cluster: Cluster, tmp_path: Path) -> None:
    """`sbatch --export=NONE`, as many sites have it: all settings stand in launch/env.sh."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    settings = {**cluster.environment, "ODB_CHECKPOINTS": str(tmp_path / "checkpoints")}
    names = ("ODB_PYTHON", "ODB_SCRIPT", "ODB_CACHE", "ODB_CHECKPOINTS", "PYTHONPATH")
    lines = [f"export {name}={shlex.quote(settings[name])}\n" for name in names]
    env = tmp_path / "launch" / "env.sh"
    env.write_text("".join(lines) + env.read_text())
    job = cluster.submit(
        "odb_pretrain.sbatch", tmp_path, "--train-samples", "16", home=tmp_path, export="NONE"
    )
    job.ends("COMPLETED")
    assert len(job.steps()) == 2


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
