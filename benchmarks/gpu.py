"""The first hour on GPUs: what holds there, and what it costs, in OUT and on a page beside it.

    python benchmarks/gpu.py --minutes 10 --json OUT
    torchrun --nproc-per-node 8 benchmarks/gpu.py --json OUT -- --tensor-model-parallel-size 2
    python benchmarks/gpu.py --device cpu --json OUT       # a small form, to try the script

What follows `--` are flags for every training run. Each run is a real `pretrain()` in processes of
its own (on a CPU all share one), so that a part that fails, even by a dead process, leaves the
others; without time for it a run is left out. Needs megatron-core, and no network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from odb_megatron.data.feed import StepFeed
from odb_megatron.errors import usage_errors
from odb_megatron.report.page import write_page
from odb_megatron.report.steps import read_run

STARTED = time.monotonic()
RANK, WORLD = (
    int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
)
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "deep-ep")
VARIABLES = ("CUDA_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_", "OMP_")
SHORT, WARM_UP = 8, 3
"""Steps of a run whose losses are compared, and those whose time does not count."""

CHAT_QUANTILES = (
    21, 40, 55, 74, 95, 109, 124, 137, 152, 166, 181, 203, 218, 234, 254, 274, 297, 313, 331, 355,
    392, 419, 447, 498, 553, 631, 728, 809, 1087, 1565, 2824, 5352, 11547,
)  # fmt: skip
"""Quantiles 0/32 to 32/32 of the chat mix (benchmarks/README.md) in tokens of Qwen's vocabulary."""

ALWAYS = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --clip-grad 1 "
    "--lr 1e-4 --lr-decay-style constant --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --calculate-per-token-loss --tokenizer-type NullTokenizer "
    "--num-workers 2 --eval-iters 0 --log-interval 1 --distributed-timeout-minutes 5 "
    "--odb-overlong truncate"
)


class Scale(NamedTuple):
    """What is trained.

    Attributes:
        flags: of the model.
        seq_length: context; the budget is twice as much.
        share: samples of a step for each data-parallel replica.
        limit: largest difference of a step's loss, and relative one of its gradient norm.
    """

    flags: str
    seq_length: int
    share: int
    limit: float


SCALES = {
    "cuda": Scale(
        "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 "
        "--vocab-size 32768 --bf16",
        *(4096, 64, 2e-2),
    ),
    "cpu": Scale(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
        "--vocab-size 128 --distributed-backend gloo --no-rope-fusion --no-bias-swiglu-fusion",
        *(128, 16, 1e-5),
    ),
}


class Run(NamedTuple):
    """A training run.

    Attributes:
        flags: beside those of all.
        is_long: it takes all steps, not `SHORT`.
        lengths: `chat`, `mean` (all samples as long as those on average) or `full` (the context).
        is_ready: its data side has made every step before they are timed.
    """

    flags: str
    is_long: bool = False
    lengths: str = "chat"
    is_ready: bool = False


_TE, _LOCAL = "--transformer-impl transformer_engine", "--transformer-impl local"
_FP8 = f"{_TE} --fp8-format hybrid --fp8-recipe"


def planned(seq_length: int, layers: str) -> dict[str, Run]:
    """Return all runs; `layers` has the flags of the layers that most of them use."""
    odb, one = f"{layers} --odb --odb-token-budget {2 * seq_length}", "--micro-batch-size 1"
    two = f"--odb --odb-token-budget {2 * seq_length}"
    fixed = f"{layers} --odb --odb-token-budget {seq_length} --odb-pad-to budget"
    return {
        "packed": Run(odb, is_long=True),
        "single": Run(f"{layers} {one}"),
        "flash packed": Run(f"{_LOCAL} --attention-backend flash {two}"),
        "flash single": Run(f"{_LOCAL} --attention-backend flash {one}"),
        "FP8 packed": Run(f"{_FP8} tensorwise {two}"),
        "FP8 single": Run(f"{_FP8} tensorwise {one}"),
        "MXFP8 packed": Run(f"{_FP8} mxfp8 {two}"),
        "MXFP8 single": Run(f"{_FP8} mxfp8 {one}"),
        "one size": Run(fixed),
        "local graphs": Run(f"{fixed} --cuda-graph-impl local"),
        "TE graphs": Run(f"{fixed} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp"),
        "padded": Run(f"{layers} --micro-batch-size 2", is_long=True),
        "ideal": Run(odb, is_long=True, lengths="mean"),
        "full": Run(odb, lengths="full"),
        "twice the budget": Run(f"{layers} --odb --odb-token-budget {4 * seq_length}"),
        "data made before": Run(odb, is_long=True, is_ready=True),
    }


NEEDS = "it needs"
"""Begins what is said of a run that cannot be made here."""

ON_CPU: tuple[str, ...] = (
    "packed",
    "single",
    "one size",
    "padded",
    "ideal",
    "full",
    "twice the budget",
)
ON_CPU += ("data made before",)
"""The others' kernels need a device."""

Results = Mapping[str, Mapping[str, Any]]
Seen = tuple[bool | None, dict[str, Any]]
"""Whether a part holds, None where nothing is asked of it; and what it saw."""


def _same(runs: Results, limit: float, *pairs: tuple[str, str]) -> Seen:
    """Compare losses and gradient norms, step by step."""
    seen: dict[str, Any] = {}
    for one, other in pairs:
        name, failed = (
            f"{one} against {other}",
            [each for each in (one, other) if "error" in runs[each]],
        )
        if failed:
            seen[name] = runs[failed[0]]["error"]
            continue
        losses, norms = (list(zip(runs[one][key], runs[other][key])) for key in ("losses", "norms"))  # noqa: B905
        found = {
            "steps": len(losses),
            "max_abs_loss_diff": max(abs(a - b) for a, b in losses),
            "max_rel_grad_norm_diff": max(abs(a / b - 1) for a, b in norms),
            "limit": limit,
        }
        seen[name] = {**found, "ok": max(list(found.values())[1:3]) <= limit}
    judged = [each["ok"] for each in seen.values() if isinstance(each, dict)]
    return all(judged) if judged else None, seen


def losses(runs: Results, limit: float) -> Seen:
    """Packed samples against each sample in a micro-batch of its own."""
    return _same(runs, limit, ("packed", "single"), ("flash packed", "flash single"))


def eight_bits(runs: Results, limit: float) -> Seen:
    """The same in FP8, whose scales are of the whole pack."""
    return _same(runs, 4 * limit, *((f"{one} packed", f"{one} single") for one in ("FP8", "MXFP8")))


def graphs(runs: Results, limit: float) -> Seen:
    """One shape against many, and both modes of CUDA graphs against none."""
    pairs = (("one size", "packed"), ("local graphs", "one size"), ("TE graphs", "one size"))
    holds, seen = _same(runs, limit, *pairs)
    for name in ("one size", "local graphs", "TE graphs"):
        seen[f"seconds of a step, {name}"] = runs[name].get("step_s")
    return holds, seen


def throughput(runs: Results, _limit: float) -> Seen:
    """Tokens per second: padded so that the worst case fits, packed, and without any variance."""
    seen: dict[str, Any] = {}
    for name in ("padded", "packed", "ideal"):
        keys = ("error", "tokens_per_s", "padding", "step_s", "wait_s")
        seen[name] = {key: runs[name][key] for key in keys if key in runs[name]}
    rates = [seen[name].get("tokens_per_s") for name in ("packed", "padded", "ideal")]
    if None not in rates:
        seen |= {
            "packed over padded": rates[0] / rates[1],
            "packed over ideal": rates[0] / rates[2],
        }
    return None, seen


def memory(runs: Results, _limit: float) -> Seen:
    """Peaks of ordinary steps, of steps whose every micro-batch is full, of twice the budget."""
    names = ("packed", "full", "twice the budget")
    keys = ("error", "peak", "reserved", "total", "shapes")
    seen = {name: {key: runs[name][key] for key in keys if key in runs[name]} for name in names}
    usual, full = (seen[name].get("peak", 0) for name in names[:2])
    has_device = bool(usual and full and seen["full"]["reserved"])
    return (usual <= 1.05 * full if has_device else None), seen


def interference(runs: Results, _limit: float) -> Seen:
    """A step while later ones are read, planned and packed, and when all are there."""
    on, off = (runs[name].get("all_step_s") for name in ("packed", "data made before"))
    if not on or not off:
        return None, {name: runs[name].get("error") for name in ("packed", "data made before")}
    ratio = statistics.median(on) / statistics.median(off) - 1
    seen = {"steps": len(on), "data side on, s": statistics.median(on)}
    seen |= {"data side off, s": statistics.median(off), "slowdown": ratio, "goal": 0.02}
    seen["its thread's CPU time, s"] = runs["packed"]["data_thread_s"]
    return (ratio <= 0.02 if runs["packed"]["reserved"] else None), seen


PARTS: dict[str, tuple[Callable[..., Seen] | None, tuple[str, ...], str]] = {
    "environment": (None, (), "What is there"),
    "kernels": (None, (), "Kernels against a float64 softmax"),
    "losses": (losses, ("packed", "single", "flash packed", "flash single"), "Packed losses"),
    "throughput": (throughput, ("padded", "packed", "ideal"), "Tokens per second"),
    "graphs": (graphs, ("packed", "one size", "local graphs", "TE graphs"), "CUDA graphs"),
    "fp8": (
        eight_bits,
        ("FP8 packed", "FP8 single", "MXFP8 packed", "MXFP8 single"),
        "FP8 and MXFP8",
    ),
    "memory": (memory, ("packed", "full", "twice the budget"), "Memory against the budget"),
    "interference": (interference, ("packed", "data made before"), "What the data side takes"),
}
"""In order of importance: what judges it, the runs it needs, its title."""

# --- in processes of their own ------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return versions, the device and what of the environment matters to it."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    found |= {
        name: next((one.version for one in metadata.distributions(name=name)), "-")
        for name in PACKAGES
    }
    found |= {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {"devices": torch.cuda.device_count(), "device": device.name}
        found |= {"capability": f"{device.major}.{device.minor}", "memory": device.total_memory}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    return found


def kernels() -> dict[str, Any]:
    """Return what each kernel's check says."""
    from odb_megatron.megatron.attention import absent
    from odb_megatron.testing.backends import report

    return {name: report(name) for name in absent()}


class Samples:
    """Random tokens; the length of each sample is one of a list, in its order."""

    def __init__(self, lengths: Sequence[int], vocab: int) -> None:
        self._lengths, self._vocab = lengths, vocab

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng([7, index])
        ids = random.integers(0, self._vocab, self._lengths[index] + 1)
        mask = np.ones(len(ids) - 1, dtype=np.float32)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}


def lengths_of(kind: str, count: int, seq_length: int) -> list[int]:
    """Return the lengths of a run's samples."""
    places = np.random.default_rng(7).random(count) * (len(CHAT_QUANTILES) - 1)
    drawn = np.interp(places, np.arange(len(CHAT_QUANTILES)), CHAT_QUANTILES)
    # A short context has short samples: else most would be cut to one length.
    chat = np.minimum(np.ceil(drawn * min(1.0, seq_length / 4096)), seq_length).astype(int)
    same = {"mean": round(float(chat.mean())), "full": seq_length}
    return chat.tolist() if kind == "chat" else [same[kind]] * count


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return what the step log of the first replica has."""
    from odb_megatron.megatron import replica
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import read_args

    class Ready(OdbRun):
        """The data side has made all steps before the second is trained."""

        def on_schedule(self, *, training: bool) -> None:
            feed, done = self._train_feed, self._args.curr_iteration
            while done and feed is not None and feed.num_ready < job["steps"] - done:
                time.sleep(0.01)
            super().on_schedule(training=training)

    sys.argv[1:] = job["flags"]
    args = read_args()
    samples = Samples(job["lengths"], args.vocab_size)
    kind, ahead = (Ready, job["steps"] + 1) if job["is_ready"] else (OdbRun, 2)
    # Megatron ends the process at --exit-interval.
    cpu_s = math.nan
    with (
        contextlib.suppress(SystemExit),
        mock.patch.object(replica, "StepFeed", partial(StepFeed, plan_ahead=ahead)),
        kind(args, datasets=lambda _: [samples, None, None]) as run,
    ):
        try:
            run.pretrain()
        finally:
            for thread in threading.enumerate():
                if thread.name == "the step queue" and thread.ident is not None:
                    cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    if RANK:
        return {}
    steps = [step.records[0] for step in read_run(job["log"]).steps]
    timed = steps[WARM_UP:] or steps
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "all_step_s": [step.step_s for step in timed],
        "step_s": statistics.median(step.step_s for step in timed),
        "wait_s": sum(step.wait_s for step in timed),
        "data_thread_s": cpu_s / len(steps),
        "tokens_per_s": sum(step.tokens for step in timed) / sum(step.step_s for step in timed),
        "padding": 1
        - sum(step.tokens for step in timed) / sum(step.computed_tokens for step in timed),
        "peak": steps[-1].peak_memory_bytes,
        "reserved": steps[-1].reserved_memory_bytes,
        "shapes": steps[-1].num_shapes,
    }


def work(file: Path) -> None:
    """Do the jobs of a file; each one's result is a file of its name beside it."""
    plan = json.loads(file.read_text(encoding="utf-8"))
    if plan["device"] == "cpu":
        from odb_megatron.testing import cpu_device

        cpu_device.activate()
    from odb_megatron.testing.runs_again import forget_run, keep_imports

    for at, job in enumerate(plan["jobs"]):
        try:
            if at:
                forget_run()
            if job["kind"] == "train" and plan["device"] == "cpu":
                keep_imports()
            result = train(job) if job["kind"] == "train" else globals()[job["kind"]]()
        except BaseException as error:  # of whatever package, exits too
            text = " ".join(f"{type(error).__name__}: {error}".split())
            result = {"error": text[:500]}
            print(f"{job['name']}: {text}", file=sys.stderr, flush=True)
            if not isinstance(error, (Exception, SystemExit)):
                raise
        if not RANK:
            (file.parent / f"{job['name']}.json").write_text(json.dumps(result), encoding="utf-8")


# --- what starts and judges them ------------------------------------------------------------------


class Hour:
    """The whole session.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._scale = SCALES[options.device]
        self._folder = options.json.with_suffix("")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._done: dict[str, Any] = {}
        has_te = options.device == "cuda" and importlib.util.find_spec("transformer_engine")
        self._layers = _TE if has_te else _LOCAL
        self._runs = planned(self._scale.seq_length, self._layers)
        if WORLD > 1:
            importlib.import_module("torch.distributed").init_process_group("gloo")

    def run(self) -> int:
        """Do all parts; return the exit code."""
        result: dict[str, Any] = {"command": sys.argv, "device": self._options.device}
        result["parts"] = {}
        for name in self._options.parts:
            judge, needs, title = PARTS[name]
            try:
                self._train(needs) if judge else self._call([self._job(name)])
                holds, seen = None, self._done.get(name, {})
                if judge:
                    runs = {
                        need: self._done.get(need, {"error": "it was not run"}) for need in needs
                    }
                    holds, seen = judge(runs, self._scale.limit)
                    errors = [one["error"] for one in runs.values() if "error" in one]
                    if any(not error.startswith(NEEDS) for error in errors):
                        holds = False
                elif name == "kernels":
                    holds = all(one["ok"] for one in seen.values())
            except Exception as error:  # of one part; the others go on
                holds, seen = False, {"error": f"{type(error).__name__}: {error}"}
            part = {"title": title, "holds": holds, "seen": seen}
            result["parts"][name] = part
            if not RANK:
                print(f"== {name}: {_status(part)}\n{json.dumps(seen, indent=1)}", flush=True)
                self._write(result)
        result |= {"complete": True, "seconds": time.monotonic() - STARTED, "runs": self._done}
        if not RANK:
            self._write(result)
        return int(any(part["holds"] is False for part in result["parts"].values()))

    def _write(self, result: dict[str, Any]) -> None:
        """Write what there is: the file, all or nothing, and the page."""
        target: Path = self._options.json
        part = target.with_suffix(f".part{os.getpid()}")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(target)
        parts = {
            name: {
                "title": part["title"],
                "status": _status(part),
                "seen": [(key, _text(value)) for key, value in part["seen"].items()],
            }
            for name, part in result["parts"].items()
        }
        title, summary = "ODB: the first hour on GPUs", " ".join(map(str, result["command"]))
        try:
            page, own = str(target.with_suffix(".html")), Path(__file__).parent
            write_page(
                page, "gpu.html.j2", folder=own, title=title, summary=summary, notes=(), parts=parts
            )
        except ValueError as error:
            print(f"no page: {error}", file=sys.stderr)

    def _train(self, names: Sequence[str]) -> None:
        """Train what was not trained yet: on a CPU everything at once, to start one process."""
        if self._options.device == "cpu":
            names = [need for part in self._options.parts for need in PARTS[part][1]]
        self._done |= {name: {"error": why} for name in names if (why := self._lacks(name))}
        names = [name for name in dict.fromkeys(names) if name not in self._done]
        jobs = [self._job(name, self._runs[name]) for name in names]
        for batch in [jobs] if self._options.device == "cpu" else [[job] for job in jobs]:
            self._call(batch)

    def _lacks(self, name: str) -> str:
        """Return what a run cannot do without; empty where all is there."""
        flags, find = self._runs[name].flags, importlib.util.find_spec
        if self._options.device == "cpu":
            return "" if name in ON_CPU else f"{NEEDS} a GPU"
        if _TE in flags and not find("transformer_engine"):
            return f"{NEEDS} Transformer Engine"
        if "flash" in name and not (find("flash_attn") or find("flash_attn_interface")):
            return f"{NEEDS} flash-attn"
        capability = self._done.get("environment", {}).get("capability", "10.0")
        return (
            f"{NEEDS} compute capability 10" if "mxfp8" in flags and float(capability) < 10 else ""
        )

    def _job(self, name: str, run: Run | None = None) -> dict[str, Any]:
        if run is None:
            return {"name": name, "kind": name}
        scale, log = self._scale, str(self._folder / f"{name} log")
        count = self._options.steps if run.is_long else min(SHORT, self._options.steps)
        batch = scale.share * WORLD
        given = ["--seq-length", scale.seq_length, "--max-position-embeddings", scale.seq_length]
        given += ["--global-batch-size", batch, "--train-samples", batch * self._options.steps]
        given += ["--exit-interval", count, "--odb-log-dir", log, "--seed", 1]
        lengths = lengths_of(run.lengths, batch * self._options.steps, scale.seq_length)
        if _LOCAL in run.flags and not importlib.util.find_spec("transformer_engine"):
            given += ["--no-rope-fusion"]
        own = [*shlex.split(scale.flags), *shlex.split(run.flags), *self._options.flags]
        return {
            **{"name": name, "kind": "train", "log": log, "lengths": lengths},
            **{"is_ready": run.is_ready, "steps": count},
            "flags": [*ALWAYS, *map(str, given), *own],
        }

    def _call(self, jobs: list[dict[str, Any]]) -> None:
        """Do jobs in a process of each rank; those that leave no result have failed."""
        if not jobs:
            return
        left_s = self._agreed(60 * self._options.minutes - (time.monotonic() - STARTED))
        names = [job["name"] for job in jobs]
        if left_s < 5:
            self._done |= {name: {"error": "the minutes were used up"} for name in names}
            return
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = self._agreed(probe.getsockname()[1])
        there = {"RANK": RANK, "WORLD_SIZE": WORLD, "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
        there |= {"MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": port}
        env = {**os.environ, **{key: str(value) for key, value in there.items()}}
        env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        env.setdefault("NCCL_GRAPH_REGISTER", "0")
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as launch/job.sh
        if self._options.device == "cpu":
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        file, output = self._folder / f"jobs{RANK}.json", self._folder / f"output{RANK}.txt"
        file.write_text(
            json.dumps({"device": self._options.device, "jobs": jobs}), encoding="utf-8"
        )
        for name in names:
            (self._folder / f"{name}.json").unlink(missing_ok=True)
        with output.open("ab") as printed:
            process = subprocess.Popen(
                [sys.executable, __file__, "--work", str(file)],
                **{"env": env, "stdout": printed, "stderr": subprocess.STDOUT},
            )
            try:
                code = f"exit code {process.wait(timeout=left_s)}"
            except subprocess.TimeoutExpired:
                process.kill()
                code = f"ended after {left_s:.0f} s"
                process.wait()
        for name in names:
            found = self._folder / f"{name}.json"
            text = found.read_text(encoding="utf-8") if found.is_file() else ""
            error = {"error": f"{code}, and no result: the end of {output} may say why"}
            self._done[name] = json.loads(text) if text else error
            if not RANK:
                print(f"{name}: {self._done[name].get('error', 'done')}", flush=True)

    def _agreed(self, value: Any) -> Any:
        """Return the first rank's value."""
        values = [value]
        if WORLD > 1:
            importlib.import_module("torch.distributed").broadcast_object_list(values)
        return values[0]


def _status(part: Mapping[str, Any]) -> str:
    return {None: "measured", True: "holds", False: "failed, or does not hold"}[part["holds"]]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def main(argv: list[str]) -> int:
    """Run the session, or in a process of its own a few jobs of it."""
    if argv[:1] == ["--work"]:
        work(Path(argv[1]))
        return 0
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="from start to end")
    parser.add_argument(
        "--json", type=Path, required=True, help="the result; a page goes beside it"
    )
    parser.add_argument("--device", choices=SCALES, default="cuda", help="cpu: small, to try it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    parser.add_argument("--steps", type=int, default=50, help="of a long run (default 50)")
    options = parser.parse_args(argv[:cut], argparse.Namespace(flags=argv[cut + 1 :]))
    if not options.minutes > 0 or options.steps <= WARM_UP:
        parser.error(f"--minutes must be above 0, and --steps above {WARM_UP}")
    options.json = options.json.absolute()
    with usage_errors():
        return Hour(options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
