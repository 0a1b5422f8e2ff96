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

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = ("torch", "megatron-core", "numpy", "online-dynamic-batching")
VERSION = 1
_TAIL_LINES = 25

# --- what is run -----------------------------------------------------------------------------

Result = Mapping[str, Any]
_TAKES: dict[str, Callable[[list[Any]], Any]] = {
    **{"max": max, "min": min, "sum": sum, "all": all, "len": len}
}


def read_value(result: Any, keys: Sequence[str | int]) -> Any:
    """Return what `keys` lead to; bench.toml says how.

    Raises:
        LookupError, TypeError, ValueError: nothing, or several values.
    """
    take, path = (keys[0], keys[1:]) if len(keys) > 1 and keys[0] in _TAKES else (None, keys)
    found = [result]
    for key in path:
        step: list[Any] = []
        for one in found:
            name, is_filter, value = str(key).partition("=")
            items = one.items() if isinstance(one, Mapping) else list(enumerate(one))
            if key == "*":
                step += [item for _, item in items]
            elif name.startswith("!"):
                step += [item for other, item in items if other != name[1:]]
            elif is_filter:
                step += [item for _, item in items if str(item[name] or "") == value]
            else:
                step.append(one[key])
        found = step
    if take is not None:
        return _TAKES[str(take)](found)
    (value,) = found
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command and its goals, as bench.toml has them.

    Attributes:
        name: of `--only`, and of the JSON that it writes.
        title: what it answers.
        command: behind the interpreter; `--json FILE` is added.
        goals: `what` is measured, how to `read` it, and `least`, `most` or what it `is` to be.
        full: the flags with `--full` in place of those of `command`; None for the same.
        timeout_s: of `command`.
        full_timeout_s: with `--full`.
        is_full_only: it takes too long to be run without `--full`.
        needs: a program without which it is skipped.
    """

    name: str
    title: str
    command: str
    goals: Sequence[Mapping[str, Any]]
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


PARTS = [Part(**part) for part in tomllib.loads((HERE / "bench.toml").read_text())["part"]]


def judge(goal: Mapping[str, Any], result: Result | None) -> dict[str, Any]:
    """Return a goal, what was measured, and whether it is met (null without a limit)."""
    try:
        value = read_value(result, goal["read"])
    except (LookupError, TypeError, ValueError):
        value = None  # the part did not get that far, or the figure needs what is missing
    is_there = value is not None and value == value
    text, is_met = "", None
    for limit, words, holds in (
        ("least", "at least ", operator.ge),
        ("most", "at most ", operator.le),
        ("is", "", operator.eq),
    ):
        if limit in goal:
            bound = goal[limit]
            text = words + ("yes" if bound is True else str(bound))
            is_met = is_there and bool(holds(value, bound))
    return {"what": goal["what"], "goal": text, "measured": value, "is_met": is_met}


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
    goals = [judge(goal, result) for goal in part.goals]
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
        "goals": [judge(goal, None) | {"is_met": None} for goal in part.goals],
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

_SPREADS = ("0.29", "0.48", "1.0", "2.0")
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
        folder=HERE,
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
    with contextlib.suppress(LookupError, TypeError, ValueError):  # rows that were not run
        found = []
        for spread in _SPREADS:
            row = read_value(stream, ["rows", f"name=step/dp8/share1/cv{spread}", "policies"])
            found.append({name: one["steady"]["fraction_of_bound"] for name, one in row.items()})
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
