"""Starts real `pretrain()` runs on the CPU in processes of their own and reads their step logs.

Must not interpret what a run measured, and must not import torch or Megatron: each run pays for its
own start, and nothing of one run lives on in the next.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odb_megatron.report.steps import StepRecord, read_run

__all__ = [
    "EXAMPLE_SCRIPT",
    "ROOT",
    "Launch",
    "ModelSize",
    "TrainingRun",
    "data_flags",
    "read_steps",
    "run_batch",
    "run_training",
    "write_json",
]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE_SCRIPT = ROOT / "examples" / "pretrain_gpt_odb.py"

_HOST_FLAGS = shlex.split(
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--distributed-backend gloo --calculate-per-token-loss --num-workers 0 "
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1000000"
)
_SHAPE_FLAGS = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64"
)
_GRACE_S = 60.0
_SHOWN_LINES = 150


def launcher(num_processes: int) -> list[str]:
    """Return what runs a script in processes on the CPU."""
    elastic = ["-m", "odb_megatron.elastic", "--standalone", f"--nproc-per-node={num_processes}"]
    return [sys.executable, *elastic, "-m", "odb_megatron.cpu"]


def read_steps(folder: str, replica: int) -> tuple[StepRecord, ...]:
    """Return the records of one replica, in order."""
    return tuple(step.records[replica] for step in read_run(folder).steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the trained GPT (RoPE, RMSNorm, SwiGLU, no dropout, fp32)."""

    num_layers: int
    hidden: int
    num_heads: int
    ffn_hidden: int
    seq_length: int

    def flags(self) -> list[str]:
        """Megatron's flags for it, those of the CPU included."""
        sizes = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden,
            "--num-attention-heads": self.num_heads,
            "--ffn-hidden-size": self.ffn_hidden,
            "--seq-length": self.seq_length,
            "--max-position-embeddings": self.seq_length,
        }
        pairs = [part for flag, size in sizes.items() for part in (flag, str(size))]
        return [*pairs, *_SHAPE_FLAGS, *_HOST_FLAGS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run.

    Attributes:
        name: shown while it runs and in the results.
        flags: the script's flags, without `--odb-log-dir`.
        num_replicas: data-parallel size.
        num_ranks: processes of each replica.
        script: a pretrain script.
        num_threads: threads of each process.
        timeout_s: the run is ended and reported as failed after this many seconds.
    """

    name: str
    flags: Sequence[str]
    num_replicas: int
    num_ranks: int = 1
    script: Path = EXAMPLE_SCRIPT
    num_threads: int = 1
    timeout_s: float = 900.0

    def command(self, log_dir: str) -> list[str]:
        """The command line."""
        num_processes = self.num_replicas * self.num_ranks
        head = [*launcher(num_processes), str(self.script)]
        return [*head, *self.flags, "--odb-log-dir", log_dir]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What a finished run left.

    Attributes:
        name: of the launch.
        command: the exact command line.
        wall_s: seconds from start to end of the processes.
        load_average: the machine's 1-minute load before the run started.
        steps: step records, `[replica][step]`.
        output: what the processes printed.
    """

    name: str
    command: tuple[str, ...]
    wall_s: float
    load_average: float
    steps: tuple[tuple[StepRecord, ...], ...] = field(repr=False)
    output: str = field(default="", repr=False)


def data_flags(data: Path, tokenizer: Path, *, split: str = "100,0,0") -> list[str]:
    """Flags that train on `data`, by default on all of it."""
    tokenizer_flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    return [*tokenizer_flags, str(tokenizer), "--data-path", str(data), "--split", split]


def run_training(launch: Launch) -> TrainingRun:
    """Run to the end and read the step logs.

    Raises:
        RuntimeError: it failed or took too long; the end of its output is in the message.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as folder:
        log_dir, output = os.path.join(folder, "log"), os.path.join(folder, "output.txt")
        command = launch.command(log_dir)
        environment = dict(os.environ, OMP_NUM_THREADS=str(launch.num_threads))
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the CPU device layer refuses a visible GPU
        started = time.perf_counter()
        problem = _run(command, environment, output=output, timeout_s=launch.timeout_s)
        wall_s = time.perf_counter() - started
        printed = Path(output).read_text(encoding="utf-8", errors="replace")
        if problem is not None:
            shown = "".join(printed.splitlines(keepends=True)[-_SHOWN_LINES:])
            raise RuntimeError(f"the run {launch.name} {problem}; its output ends with:\n{shown}")
        steps = tuple(read_steps(log_dir, replica) for replica in range(launch.num_replicas))
    print(f"  {launch.name}: {len(steps[0])} steps, {wall_s:.0f} s in all", flush=True)
    return TrainingRun(
        name=launch.name,
        command=tuple(command),
        wall_s=wall_s,
        load_average=load,
        steps=steps,
        output=printed,
    )


def run_batch(
    runs: Sequence[Sequence[str]], *, script: Path, num_processes: int, timeout_s: float
) -> None:
    """Run a script that takes `--batch FILE` on a list of command lines, one after the other.

    Args:
        runs: flags of each run.
        script: runs them all in the same processes, which saves starting them anew.
        num_processes: how many.
        timeout_s: for all runs together.

    Raises:
        RuntimeError: one failed, or it took too long; the end of the output is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as folder:
        file, output = Path(folder) / "runs.json", os.path.join(folder, "output.txt")
        file.write_text(json.dumps([list(run) for run in runs]), encoding="utf-8")
        command = [*launcher(num_processes), str(script), "--batch", str(file)]
        environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        started = time.perf_counter()
        problem = _run(command, environment, output=output, timeout_s=timeout_s)
        printed = Path(output).read_text(encoding="utf-8", errors="replace")
        if problem is not None:
            shown = "".join(printed.splitlines(keepends=True)[-_SHOWN_LINES:])
            raise RuntimeError(f"{len(runs)} runs in {num_processes} processes {problem}:\n{shown}")
        print(
            f"  {len(runs)} runs in {num_processes} processes: "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )


def write_json(path: Path | None, values: Mapping[str, object]) -> None:
    """Write `values`; None writes nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)


def _run(
    command: Sequence[str], environment: Mapping[str, str], *, output: str, timeout_s: float
) -> str | None:
    """Return None, or what went wrong. The launcher passes SIGTERM on to its processes."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"was ended after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    return None if code == 0 else f"ended with exit code {code}"
