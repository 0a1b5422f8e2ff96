"""Every figure of the documentation in one run: one JSON, and one page with each goal beside it.

    python benchmarks/bench.py                    # build/bench/bench.json, index.html
    python benchmarks/bench.py --only planner verify
    python benchmarks/bench.py --full             # the sizes that the docs quote; hours

Each part is a benchmark of its own, in a process of its own with a time limit. A part that fails or
runs out of time is shown as such; its goals then have no value and are not met. Parts that are not
asked for keep what bench.json has of them, with the commit that they ran on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "numpy", "online-dynamic-batching")
VERSION = 1
_TAIL_LINES = 25

# --- what is run -----------------------------------------------------------------------------

Result = Mapping[str, Any]
Read = Callable[[Result], Any]
_LIMITS = {"at least": operator.ge, "at most": operator.le, "is": operator.eq}


@dataclass(frozen=True, slots=True)
class Goal:
    """One measured value and what it is to be.

    Attributes:
        what: is measured, with its unit.
        read: the keys that lead to it, or takes it out of the result; no such key is no value.
        limit: of `_LIMITS`; empty where the value is reported only.
        value: of the limit.
    """

    what: str
    read: str | Read
    limit: str = ""
    value: Any = None

    def judge(self, result: Result | None) -> dict[str, Any]:
        """Return the goal, what was measured, and whether it is met (null without a limit)."""
        found: Any = result
        try:
            if callable(self.read):
                found = self.read(result or {})
            else:
                for key in self.read.split("."):
                    found = found[int(key) if key.lstrip("-").isdecimal() else key]
        except (LookupError, TypeError, ValueError):
            found = None  # the part did not get that far, or the figure needs what is missing
        is_there = found is not None and found == found
        is_met = is_there and bool(_LIMITS[self.limit](found, self.value)) if self.limit else None
        value = "yes" if self.value is True else str(self.value)
        text = value if self.limit == "is" else f"{self.limit} {value}"
        goal = text if self.limit else ""
        return {"what": self.what, "goal": goal, "measured": found, "is_met": is_met}


@dataclass(frozen=True, slots=True)
class Part:
    """One command and its goals.

    Attributes:
        name: of `--only`, and of the JSON that it writes.
        title: what it answers.
        command: behind the interpreter; `--json FILE` is added.
        goals: what its result is held against.
        full: the flags with `--full` in place of those of `command`; None for the same.
        timeout_s: of `command`.
        full_timeout_s: with `--full`.
        is_full_only: it takes too long to be run without `--full`.
        needs: a program without which it is skipped.
    """

    name: str
    title: str
    command: str
    goals: tuple[Goal, ...]
    full: str | None = None
    timeout_s: float = 300.0
    full_timeout_s: float = 7200.0
    is_full_only: bool = False
    needs: str = ""

    def words(self, *, full: bool) -> list[str]:
        """Return the command line behind the interpreter."""
        words = shlex.split(self.command)
        if not full or self.full is None:
            return words
        script = words[: 2 if words[0] == "-m" else 1]
        return [*script, *shlex.split(self.full)]


def _steady(name: str) -> Callable[[Result], dict[str, Any]]:
    """Return what takes the steady steps of each policy of a row of `simulate_table.py`."""

    def read(result: Result) -> dict[str, Any]:
        (row,) = (row for row in result["rows"] if row["name"] == name)
        policies = row["policies"].items()
        return {policy: one["steady"]["fraction_of_bound"] for policy, one in policies}

    return read


def _simulated(spread: str) -> tuple[Goal, Goal]:
    read = _steady(f"step/dp8/share1/cv{spread}")
    rival = lambda r: max(value for name, value in read(r).items() if name != "odb")  # noqa: E731
    ours = f"CV {spread}: odb, fraction of the bound"
    best = f"CV {spread}: the best rival's fraction of the bound"
    return Goal(ours, lambda r: read(r)["odb"], "at least", 0.994), Goal(best, rival)


def _planner(replicas: int, key: str) -> Callable[[Result], float]:
    def read(result: Result) -> float:
        rows = {row["replicas"]: row for row in result["rows"] if row["sync"] == "step"}
        return float(rows[replicas][key])

    return read


def _of_all(items: str, key: str, choose: Callable[[list[Any]], Any]) -> Read:
    return lambda result: choose([one[key] for one in result[items].values()])


_SPREADS = ("0.29", "0.48", "1.0", "2.0")
_NONE = ("is", 0)
_YES = ("is", True)
PARTS = (
    Part(
        "loss_parity",
        "Is the loss that of the padded run?",
        "benchmarks/loss_parity.py --steps 50 --dp 2",
        (
            Goal("largest difference of a step's loss", "max_abs_loss_diff", "at most", 1e-5),
            Goal("largest difference of a step's gradient norm", "max_abs_grad_norm_diff"),
            Goal("the same samples in every step", "same_samples", *_YES),
            Goal("learning rates equal", "learning_rate_equal", *_YES),
            Goal("consumed samples equal", "consumed_samples_equal", *_YES),
            Goal("distinct numbers of micro-batches", lambda r: len(r["m_values"]), "at least", 3),
        ),
    ),
    Part(
        "train_throughput",
        "How many samples per second are trained?",
        "benchmarks/train_throughput.py --repeats 3 --samples 320",
        (
            Goal("ODB over padded, worst case fits", "variants.odb.speedup_vs_standard.mean"),
            Goal("ODB over the sorted oracle", "ratios.odb_over_sorted.mean"),
            Goal(
                "ODB over sorted, lower end of the 95 % interval",
                "ratios.odb_over_sorted.ci95.0",
                "at least",
                0.97,
            ),
            Goal("all variants trained the same samples", "same_samples", *_YES),
        ),
        full="--repeats 5",
        timeout_s=480.0,
    ),
    Part(
        "parallel_parity",
        "Is parallelism invisible?",
        "benchmarks/parallel_parity.py --cases dp2,tp2_sp,pp2,cp2",
        (
            Goal(
                "largest difference of a step's loss",
                _of_all("cases", "max_abs_loss_diff", max),
                "at most",
                1e-5,
            ),
            Goal(
                "largest relative difference of a parameter's gradient",
                _of_all("cases", "max_rel_grad_diff", max),
                "at most",
                1e-4,
            ),
            Goal("the same samples in every step", _of_all("cases", "ids_equal", all), *_YES),
            Goal(
                "most collectives per step inside a replica",
                _of_all("cases", "collectives_per_step", max),
                "at most",
                2,
            ),
            Goal(
                "fewest idle micro-batches of a case",
                _of_all("cases", "idle_microbatches", min),
                "at least",
                1,
            ),
        ),
        full="",
        timeout_s=420.0,
    ),
    Part(
        "pipeline_shapes",
        "Do pipelines do without shape messages?",
        "benchmarks/pipeline_shapes.py",
        (
            Goal("messages about shapes", _of_all("cases", "shape_messages", max), "at most", 0),
            Goal(
                "largest difference of a step's loss",
                _of_all("cases", "max_abs_loss_diff", max),
                "at most",
                1e-5,
            ),
            Goal(
                "largest relative difference of a parameter's gradient",
                _of_all("cases", "max_rel_grad_diff", max),
                "at most",
                1e-4,
            ),
        ),
        is_full_only=True,
    ),
    Part(
        "simulate_stream",
        "How evenly and fully are 8 replicas loaded? Replicas meet once per step",
        "benchmarks/simulate_table.py --only 'step/dp8/*'",
        tuple(goal for spread in _SPREADS for goal in _simulated(spread)),
        full="",
        timeout_s=600.0,
        full_timeout_s=14400.0,
    ),
    Part(
        "inspect",
        "Does odb-megatron inspect predict what training then measures?",
        "benchmarks/inspect_against_training.py --dp 2 --methods odb",
        (
            Goal(
                "largest relative error of padding, micro-batches and steps",
                lambda r: max(
                    one["error"] for dp in r["results"].values() for one in dp["figures"]
                ),
                "at most",
                0.05,
            ),
        ),
        full="",
    ),
    Part(
        "planner",
        "What does planning cost?",
        "benchmarks/planner.py --replicas 8 64 1024 --steps 8",
        (
            Goal("µs per sample, 8 replicas", _planner(8, "us_per_sample"), "at most", 10),
            Goal(
                "µs per sample of the block, 64 replicas",
                _planner(64, "us_per_sample"),
                "at most",
                10,
            ),
            Goal(
                "1024 replicas over 64, per step",
                lambda r: _planner(1024, "us_per_step")(r) / _planner(64, "us_per_step")(r),
                "at most",
                1.2,
            ),
            Goal("bytes of a sample in a record", "rows.0.bytes_per_sample", "at most", 16),
        ),
        full="",
        timeout_s=120.0,
    ),
    Part(
        "control_plane",
        "What does a gather between source ranks cost?",
        "benchmarks/control_plane.py --ranks 4 --rounds 50",
        (
            Goal("ms per gather, 4 source ranks on this machine", "rows.-1.gather_ms"),
            Goal("sockets of a source rank's channel, 4 ranks", "rows.-1.sockets"),
        ),
        full="",
        timeout_s=180.0,
    ),
    Part(
        "data_path",
        "Does a trainer wait for data?",
        "benchmarks/data_path.py --repeats 3 --samples 1000",
        (
            Goal("share of the time that the trainer waited", "wait_fraction", "at most", 0.01),
            Goal("99th percentile of next(), µs", "p99_next_us"),
            Goal("longest wait of a step, µs", "worst_step_wait_us"),
            Goal(
                "samples per second over those of a plain DataLoader",
                "relative_to_dataloader",
                "at least",
                0.95,
            ),
            Goal(
                "samples per second over those of online-dynamic-batching 0.1.2",
                "relative_to_online_dynamic_batching",
            ),
        ),
        full="",
    ),
    Part(
        "interference",
        "What does the data side take from the trainer's thread?",
        "benchmarks/interference.py",
        (Goal("slowdown of a thread that only launches work", "slowdown", "at most", 0.02),),
    ),
    Part(
        "faults",
        "What becomes of a run when something goes wrong?",
        "benchmarks/faults.py --quick",
        (
            Goal(
                "most seconds from the fault to the last rank's end",
                _of_all("faults", "seconds_to_exit", max),
            ),
            Goal("every case names its cause", _of_all("faults", "names_the_cause", all), *_YES),
            Goal("processes left behind", _of_all("faults", "orphans", sum), *_NONE),
            Goal(
                "every case ended as it has to (15 s after a dead rank)",
                _of_all("faults", "passed", all),
                *_YES,
            ),
        ),
        full="",
    ),
    Part(
        "fuzz",
        "Do the planner's invariants hold in random worlds?",
        "-m odb_megatron.testing.fuzz --worlds 150 --processes 2",
        tuple(
            Goal(name, name, *_NONE) for name in ("lost", "duplicated", "over_budget", "misaligned")
        ),
        full="--worlds 10000",
    ),
    Part(
        "resume_fuzz",
        "Are resumed runs the uninterrupted ones?",
        "-m odb_megatron.testing.resume_fuzz --trials 40 --processes 2",
        (Goal("differences", "differences", *_NONE),),
        full="--trials 1000",
    ),
    Part(
        "verify",
        "Does the protocol's model hold?",
        "verification/run.py --quick",
        (
            Goal(
                "states searched",
                lambda r: sum(one["num_states"] for one in r["checks"] if not one["expected"]),
            ),
            Goal("searches and negative checks with the wrong outcome", "failed", *_NONE),
        ),
        full="",
        timeout_s=180.0,
        needs="spin",
    ),
    Part(
        "backends",
        "Which attention backends are checked here?",
        "-m odb_megatron.testing.backends",
        (
            Goal(
                "backends that ran, or whose contract was checked",
                lambda r: ", ".join(
                    name for name, one in r["backends"].items() if one["checked"] != "skipped"
                ),
            ),
            Goal("every backend is right", _of_all("backends", "ok", all), *_YES),
        ),
        timeout_s=180.0,
    ),
    Part(
        "gpu_script",
        "Does the script for a GPU run? Tiny model on the CPU; its speeds mean nothing",
        "benchmarks/gpu_throughput.py --device cpu --tiny",
        (Goal("it ran to its end", "complete", *_YES),),
    ),
    Part(
        "long_run",
        "Does anything grow over 20 epochs?",
        "benchmarks/long_run.py",
        (Goal("quantities that grow", lambda r: len(r["grows"]), *_NONE),),
        is_full_only=True,
    ),
)
"""Parts in the order in which they are run."""

# --- running ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return 1 if one failed or a goal was missed."""
    options = _parse(arguments)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "bench.json"
    parts = _earlier(target)
    started = time.monotonic()
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    for number, part in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {part.name}: {part.title}", flush=True)
        left = math.inf if options.full else options.minutes * 60 - (time.monotonic() - started)
        reason = "" if left > 0 else "the time is used up"
        if part.is_full_only and not options.full:
            reason = "takes too long; --full runs it"
        if part.needs and shutil.which(part.needs) is None:
            reason = f"{part.needs} is not installed"
        if reason:
            print(f"    not run: {reason}", flush=True)
            parts.setdefault(part.name, _not_run(part, reason))
        else:
            parts[part.name] = run_part(part, folder, full=options.full, most_s=left)
        report = {
            "version": VERSION,
            "commit": commit(),
            "machine": machine(),
            "seconds": round(time.monotonic() - started, 1),
            "parts": {part.name: parts[part.name] for part in PARTS if part.name in parts},
        }
        target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(target, flush=True)
    if not options.no_page:
        write_bench_page(folder / "index.html", report)
    done = [parts[part.name] for part in chosen]
    failed = [part["name"] for part in done if part.get("exit_code", 0) != 0]
    missed = [
        f"{part['name']}: {goal['what']}: {goal['measured']} ({goal['goal']})"
        for part in done
        for goal in part["goals"]
        if goal["is_met"] is False
    ]
    print("\n".join(f"missed: {text}" for text in missed))
    print(f"{len(done)} parts; failed: {', '.join(failed) or 'none'}; {len(missed)} goals missed")
    return 1 if failed or missed else 0


def run_part(part: Part, folder: Path, *, full: bool, most_s: float = math.inf) -> dict[str, Any]:
    """Run a part in a process of its own and hold its result against its goals.

    Args:
        part: what to run.
        folder: its JSON and output go here, as NAME.json and NAME.txt.
        full: its full size.
        most_s: seconds after which it is ended, if its own limit is not less.
    """
    target, log = folder / f"{part.name}.json", folder / f"{part.name}.txt"
    target.unlink(missing_ok=True)
    words = [*part.words(full=full), "--json", str(target)]
    limit = min(part.full_timeout_s if full else part.timeout_s, most_s)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    load, started = os.getloadavg()[0], time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also what it has left, in its process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    seconds = round(time.monotonic() - started, 1)
    result, unreadable = _read(target)
    status = "ran" + (f"; exit code {code}" if code else "")
    if code is None:
        status = f"ended after {limit:.0f} s, its time limit"
    elif result is None:
        status = f"failed: exit code {code}, {unreadable}"
    goals = [goal.judge(result) for goal in part.goals]
    print(f"    {status}, {seconds} s", flush=True)
    for goal in goals:
        met = {True: "met", False: "MISSED", None: ""}[goal["is_met"]]
        print(f"    {goal['what']}: {goal['measured']}  {goal['goal']} {met}".rstrip(), flush=True)
    return {
        "name": part.name,
        "title": part.title,
        "command": shlex.join(["python", *words[:-2]]),
        "is_full": full,
        "status": status,
        "exit_code": code,
        "seconds": seconds,
        "load_before": round(load, 1),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "goals": goals,
        "output": log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:],
        "result": result,
    }


def commit() -> str:
    """Return the commit, with a mark where files differ from it; `unknown` without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return shown.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory, versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        versions[name] = next((one.version for one in metadata.distributions(name=name)), "-")
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        processor = line.partition(":")[2].strip()
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--full", action="store_true", help="full sizes: hours, a quiet machine")
    minutes = "most time without --full (default 20)"
    parser.add_argument("--minutes", type=float, default=20.0, help=minutes)
    parser.add_argument("--no-page", action="store_true", help="the JSON alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER")
    return parser.parse_args(arguments)


def _not_run(part: Part, reason: str) -> dict[str, Any]:
    return {
        "name": part.name,
        "title": part.title,
        "command": shlex.join(["python", *part.words(full=True)]),
        "status": f"not run: {reason}",
        "goals": [goal.judge(None) | {"is_met": None} for goal in part.goals],
    }


def _earlier(target: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of an earlier run that still exist, in our order."""
    report, _ = _read(target)
    found = report["parts"] if report and report.get("version") == VERSION else {}
    return {part.name: found[part.name] for part in PARTS if part.name in found}


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "it wrote no result"
    except ValueError as error:
        return None, f"its result cannot be read ({error})"
    return found, ""


# --- the page --------------------------------------------------------------------------------

_VARIANTS = {
    "standard": "padded, worst case fits",
    "standard_mean": "padded, by mean length",
    "sorted": "padded, sorted oracle",
    "odb": "ODB",
}


def write_bench_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report.

    Raises:
        ValueError: matplotlib or jinja2 is missing; it says what to install.
    """
    sys.path.append(str(ROOT))
    from odb_megatron.report.page import write_page

    parts = list(report["parts"].values())
    ran = [part for part in parts if "exit_code" in part]
    write_page(
        str(path),
        "bench.html.j2",
        folder=Path(__file__).parent,
        title="Benchmarks: goals and measured values",
        summary="Every value was measured by the command named with it, on the machine described "
        "below. A goal without a value is not met.",
        report=report,
        ran=ran,
        failed=[part for part in ran if part["exit_code"] != 0],
        met=[goal["is_met"] for part in parts for goal in part["goals"]],
        charts=_charts(report["parts"]),
        shown=shown,
        notes=[f"commit {report['commit']}; make bench"],
    )
    print(path, flush=True)


def shown(value: Any) -> str:
    """A measured value as text: four significant digits, yes and no, a dash for none."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _charts(parts: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    from odb_megatron.report.page import STYLES, Axis, Chart, Line, Panel, row_bar

    charts = []
    stream = (parts.get("simulate_stream") or {}).get("result")
    with contextlib.suppress(ValueError, TypeError):  # rows that were not run
        found = [_steady(f"step/dp8/share1/cv{spread}")(stream) for spread in _SPREADS]
        names = [name for name in found[0] if name != "standard-safe"]
        lines = [
            Line(
                x=list(range(len(_SPREADS))),
                y=[one[name] for one in found],
                label=name,
                colour=colour,
                style=style,
                marker=marker,
            )
            for name, (colour, style, marker) in zip(names, STYLES, strict=False)
        ]
        x = "coefficient of variation of the lengths"
        charts.append(
            Chart(
                title="Simulated: how much of the best possible speed is reached",
                caption="8 replicas, lognormal lengths of mean 500, token budget 8192, an overhead "
                "of 5 % per micro-batch; steady steps. 1 is no schedule's: all cost shared evenly, "
                "no padding.",
                panels=[
                    Panel(
                        lines=lines,
                        x=Axis(label=x, ticks=dict(enumerate(_SPREADS))),
                        y=Axis(label="fraction of the bound", has_grid=True),
                    )
                ],
                columns=["policy", *(f"CV {spread}" for spread in _SPREADS)],
                rows=[[name, *(f"{one[name]:.4f}" for one in found)] for name in names],
                height=340,
                narrow_height=420,
            )
        )
    speed = (parts.get("train_throughput") or {}).get("result") or {}
    variants = {name: one for name, one in speed.get("variants", {}).items() if name in _VARIANTS}
    if variants:
        bars, rows = [], []
        for row, (name, one) in enumerate(variants.items()):
            rate, ratio = one["samples_per_s"], one["speedup_vs_standard"]
            look = "blue" if name == "odb" else "rival"
            bars.append(row_bar(row, 0, rate, look, _VARIANTS[name], f"{rate:.1f}"))
            cells = [_VARIANTS[name], f"{rate:.1f}", f"{ratio['mean']:.2f}"]
            rows.append([*cells, f"{one['padding_fraction']:.1%}"])
        most = max(bar.width for bar in bars)
        ticks = {float(row): name for row, name in enumerate(variants)}
        charts.append(
            Chart(
                title="Trained samples per second, real runs on this CPU",
                caption="The same samples, model and global batch size; chat data, two replicas. "
                "Padded by mean length overruns the token budget. What a CPU computes faster or "
                "slower than a GPU shifts these ratios.",
                panels=[
                    Panel(
                        bars=bars,
                        x=Axis(label="samples per second", ends=(0, 1.15 * most)),
                        y=Axis(ends=(len(bars) - 0.5, -0.5), ticks=ticks),
                    )
                ],
                columns=["batches", "samples/s", "over padded, worst case fits", "padding"],
                rows=rows,
                height=280,
            )
        )
    return charts


if __name__ == "__main__":
    sys.exit(main())
