"""What benchmarks share: flags, data, real training runs in processes of their own, intervals.

Imports neither torch nor Megatron, which are the runs' own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from odb_megatron.command import whole
from odb_megatron.report.steps import StepRecord, read_run

if TYPE_CHECKING:
    from odb_megatron.data.stream import SampleStream

__all__ = ["ROOT", "ChatData", "MissingDataError", "ModelSize", "Steps", "TrainingRun"]
__all__ += ["chat_stream", "data_flags", "data_name", "mean_length", "output_file", "parser_of"]
__all__ += ["prepare", "ratio_interval", "read_steps", "run_batch"]
__all__ += ["run_training", "sample_ids", "whole", "write_json"]

Steps = Sequence[Sequence[StepRecord]]
"""Step records, `[replica][step]`."""

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"

# --- flags and results -----------------------------------------------------------------------

_NAMED_DATA = ("chitchat", "chat-mix")


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json`; its description is the first line of the module's text."""
    first = (text or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=first, allow_abbrev=False)
    parser.add_argument("--json", type=output_file, help="write the result here")
    return parser


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written; its folder is made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error}") from None
    return path


def data_name(text: str) -> str:
    """An argparse type: the name of data that is prepared, or a file."""
    if text not in _NAMED_DATA and not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {' nor '.join(_NAMED_DATA)} nor a file"
        )
    return text


def write_json(path: Path | None, values: Mapping[str, object]) -> None:
    """Write `values`; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


# --- data ------------------------------------------------------------------------------------

OASST_FILE = "oasst_en_100_tree.jsonl"
CHAT_MIX_FILES = (
    OASST_FILE,
    "glaive_toolcall_en_demo.json",
    "self_instruct_seed_tasks.jsonl",
    "longchat_5_topics.jsonl",
    "longchat_10_topics.jsonl",
)


class MissingDataError(RuntimeError):
    """The files a data set is made of are not on this machine."""


class ChatData(NamedTuple):
    """A chat file and the tokenizer trained on it."""

    path: Path
    tokenizer: Path


def prepare(name: str) -> ChatData:
    """Prepare `chitchat`, `chat-mix` or the file at path `name`, once; kept in `.cache/`.

    Raises:
        MissingDataError: the chat mix's files are absent.
    """
    example = runpy.run_path(str(ROOT / "examples" / "train_chat.py"))
    if name == "chitchat":
        path: Path = example["chitchat"](CACHE)
    elif name == "chat-mix":
        path = _write_chat_mix()
    else:
        path = Path(name).resolve()
    return ChatData(path, example["tokenizer_for"](path, CACHE))


def chat_mix_folder() -> Path:
    """Where the chat mix's files are looked for: `ODB_CHAT_DATA`, or beside the repository."""
    return Path(os.environ.get("ODB_CHAT_DATA") or ROOT.parent / "shared" / "data")


def _write_chat_mix() -> Path:
    from odb_megatron.data.records import open_records

    folder, target = chat_mix_folder(), CACHE / "chat-mix.jsonl"
    missing = [name for name in CHAT_MIX_FILES if not (folder / name).is_file()]
    if missing:
        raise MissingDataError(
            f"the chat mix needs {', '.join(missing)} in {folder}: set ODB_CHAT_DATA to the folder "
            "that holds them, or use --data chitchat"
        )
    records: list[Mapping[str, Any]] = [
        {"messages": one} for one in oasst_conversations(folder / OASST_FILE)
    ]
    records += [one for name in CHAT_MIX_FILES[1:] for one in open_records(str(folder / name))]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".part{os.getpid()}")
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    part.write_text("".join(lines), encoding="utf-8")
    part.replace(target)
    return target


def oasst_conversations(trees: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the root-to-leaf conversations of OASST message trees.

    A path that ends in a user's turn is cut before it; what remains is yielded once.
    """
    roles = {"prompter": "user", "assistant": "assistant"}
    for line in trees.read_text(encoding="utf-8").splitlines():
        seen: set[tuple[str, ...]] = set()
        stack = [[json.loads(line)["prompt"]]]
        while stack:
            path = stack.pop()
            replies = path[-1].get("replies") or []
            stack += [[*path, reply] for reply in reversed(replies)]
            while path and path[-1]["role"] != "assistant":
                path = path[:-1]
            key = tuple(node["message_id"] for node in path)
            if path and not replies and key not in seen:
                seen.add(key)
                yield [{"role": roles[node["role"]], "content": node["text"]} for node in path]


def mean_length(data: ChatData, *, seq_length: int) -> float:
    """Mean tokens of a sample cut to `seq_length`, over up to 1000 records of a random order."""
    from odb_megatron.report.lengths import DataRequest, read_data

    request = DataRequest(paths=(str(data.path),), tokenizer=str(data.tokenizer), max_samples=1000)
    found = read_data(request).positions  # 0 for a bad record
    return float(found[found > 0].clip(max=seq_length).mean())


def chat_stream(data: ChatData, *, context: int, budget: int, num_samples: int) -> SampleStream:
    """Return a stream over the file; what does not fit is cut, bad records are skipped."""
    import numpy as np

    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.order import PassOrder
    from odb_megatron.data.sample import SampleRules
    from odb_megatron.data.sources import ChatSource
    from odb_megatron.data.stream import SampleStream, SourcePart
    from odb_megatron.data.tokenizer import load_tokenizer
    from odb_megatron.plan.padding import OverlongPolicy

    rules = SampleRules(
        context=context, token_budget=budget, overlong=OverlongPolicy.TRUNCATE, skip_bad=True
    )
    renderer = ChatRenderer(load_tokenizer(data.tokenizer))
    source = ChatSource(str(data.path), rules=rules, renderer=renderer)
    order = PassOrder(np.arange(len(source)), seed=1)
    return SampleStream([SourcePart(source=source, order=order)], num_samples=num_samples)


# --- training runs ---------------------------------------------------------------------------

_MODEL_FLAGS = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--distributed-backend gloo --calculate-per-token-loss --num-workers 0 "
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1000000"
)
_GRACE_S = 60.0
_SHOWN_LINES = 150


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
        return [
            *(part for flag, size in sizes.items() for part in (flag, str(size))),
            *_MODEL_FLAGS,
        ]


class TrainingRun(NamedTuple):
    """What a finished run left.

    Attributes:
        command: the exact command line.
        wall_s: seconds from start to end of the processes.
        load_average: the machine's 1-minute load before the run started.
        steps: step records.
    """

    command: list[str]
    wall_s: float
    load_average: float
    steps: Steps


def data_flags(data: Path, tokenizer: Path, *, split: str = "100,0,0") -> list[str]:
    """Flags that train on `data`, by default on all of it."""
    tokenizer_flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    return [*tokenizer_flags, str(tokenizer), "--data-path", str(data), "--split", split]


def run_training(
    name: str, flags: Sequence[str], *, num_replicas: int, script: Path, timeout_s: float = 900.0
) -> TrainingRun:
    """Run a pretrain script to its end and read the step logs.

    Raises:
        RuntimeError: it failed or took too long; the end of its output is in the message.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as folder:
        log = os.path.join(folder, "log")
        command = [*_launcher(num_replicas), str(script), *flags, "--odb-log-dir", log]
        wall_s = _run(command, f"the run {name}", folder, timeout_s=timeout_s)
        steps = [read_steps(log, replica) for replica in range(num_replicas)]
    print(f"  {name}: {len(steps[0])} steps, {wall_s:.0f} s in all", flush=True)
    return TrainingRun(command, wall_s, load, steps)


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
    what = f"{len(runs)} runs in {num_processes} processes"
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as folder:
        file = Path(folder) / "runs.json"
        file.write_text(json.dumps([list(run) for run in runs]), encoding="utf-8")
        command = [*_launcher(num_processes), str(script), "--batch", str(file)]
        print(f"  {what}: {_run(command, what, folder, timeout_s=timeout_s):.0f} s", flush=True)


def read_steps(folder: str, replica: int) -> tuple[StepRecord, ...]:
    """Return the records of one replica, in order."""
    return tuple(step.records[replica] for step in read_run(folder).steps)


def sample_ids(steps: Steps) -> list[list[str]]:
    """Return the sorted sample ids of each step, over all replicas."""
    return [
        sorted(name for record in records for ids in record.ids for name in ids)
        for records in zip(*steps, strict=True)
    ]


def _launcher(num_processes: int) -> list[str]:
    elastic = ["-m", "odb_megatron.elastic", "--standalone", f"--nproc-per-node={num_processes}"]
    return [sys.executable, *elastic, "-m", "odb_megatron.cpu"]


def _run(command: Sequence[str], what: str, folder: str, *, timeout_s: float) -> float:
    """Run to the end, which the launcher passes on to its processes; return the seconds."""
    output, started = Path(folder) / "output.txt", time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
        try:
            code = process.wait(timeout=timeout_s)
            problem = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"was ended after {timeout_s:.0f} s"
        finally:
            process.terminate()  # nothing, if it has ended
            try:
                process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if problem:
        printed = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        shown = "".join(printed[-_SHOWN_LINES:])
        raise RuntimeError(f"{what} {problem}; the output ends with:\n{shown}")
    return time.perf_counter() - started


# --- intervals -------------------------------------------------------------------------------

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom. Past them that of 30 is
# used: slightly too wide, never too narrow.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval; None where one value gives none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, object]:
        """Return `{"mean": ..., "ci95": [low, high]}`."""
        return {"mean": self.mean, "ci95": [self.low, self.high]}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f} (one run: no interval)"
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of paired ratios and its 95 % interval, from their logarithms.

    Raises:
        ValueError: no ratio, or one that is not positive.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios must be positive and at least one; got {list(ratios)}")
    logs = [math.log(ratio) for ratio in ratios]
    count, mean = len(logs), statistics.mean(logs)
    if count == 1:
        return Interval(mean=math.exp(mean))
    half = _T_975[min(count - 1, len(_T_975)) - 1] * statistics.stdev(logs) / math.sqrt(count)
    low, high = math.exp(mean - half), math.exp(mean + half)
    return Interval(mean=math.exp(mean), low=low, high=high)
