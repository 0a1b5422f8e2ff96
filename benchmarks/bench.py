"""Every figure of the documentation in one run: one JSON, and one page with each goal beside it.

    python benchmarks/bench.py                    # build/bench/bench.json, index.html
    python benchmarks/bench.py --only planner verify
    python benchmarks/bench.py --full             # the sizes that the docs quote; hours

Each part is a benchmark of its own, in a process of its own with a time limit. A part that fails or
runs out of time is shown as such; its goals then have no value and are not met. Must not measure
anything itself, and must not hide a part: those that were not run are listed with the reason.

Parts that are not asked for keep what bench.json has of them, with the commit that they ran on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_parts import PARTS, Goal, Part

__all__ = ["commit", "judge", "machine", "main", "run_part"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "numpy", "online-dynamic-batching")
VERSION = 1
_TAIL_LINES = 25


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
        reason = _why_not(part, full=options.full) if left > 0 else "the time is used up"
        if reason is None:
            parts[part.name] = run_part(part, folder, full=options.full, most_s=left)
            _print_part(parts[part.name])
        else:
            print(f"    not run: {reason}", flush=True)
            parts.setdefault(part.name, _not_run(part, reason))
        report = _report(parts, seconds=time.monotonic() - started)
        target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{target}", flush=True)
    if not options.no_page:
        from bench_page import write_bench_page

        page = folder / "index.html"
        write_bench_page(page, report)
        print(f"{page}", flush=True)
    return _verdict([parts[part.name] for part in chosen])


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
    words = [*(part.full if full and part.full else part.command), "--json", str(target)]
    limit = min(part.full_timeout_s if full else part.timeout_s, most_s)
    load, started = os.getloadavg()[0], time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path()},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - started
    result, unreadable = _read(target)
    if code is None:
        status = f"ended after {limit:.0f} s, its time limit"
    elif result is None:
        status = f"failed: exit code {code}, {unreadable}"
    elif code:
        status = f"ran; exit code {code}"
    else:
        status = "ran"
    return {
        "name": part.name,
        "title": part.title,
        "command": shlex.join(["python", *words[:-2]]),
        "is_full": full,
        "status": status,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "load_before": round(load, 1),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "goals": [judge(goal, result) for goal in part.goals],
        "output": log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:],
        "result": result,
    }


def judge(goal: Goal, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a goal is, what was measured, and whether it is met (null without a limit)."""
    try:
        value = None if result is None else goal.read(result)
    except (LookupError, TypeError, ValueError):
        value = None  # the part did not get that far, or the figure needs what is not installed
    return {
        "what": goal.what,
        "goal": goal.text,
        "measured": value,
        "is_met": goal.is_met(value),
    }


def commit() -> str:
    """Return the commit, with a mark where files differ from it; `unknown` without git."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return shown.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory, versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--full", action="store_true", help="full sizes: hours, a quiet machine")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="most time without --full (default 20)"
    )
    parser.add_argument("--no-page", action="store_true", help="the JSON alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER")
    return parser.parse_args(arguments)


def _why_not(part: Part, *, full: bool) -> str | None:
    if part.is_full_only and not full:
        return "takes too long; --full runs it"
    if part.needs and shutil.which(part.needs) is None:
        return f"{part.needs} is not installed"
    return None


def _not_run(part: Part, reason: str) -> dict[str, Any]:
    command = part.full or part.command
    return {
        "name": part.name,
        "title": part.title,
        "command": shlex.join(["python", *command]),
        "status": f"not run: {reason}",
        "goals": [judge(goal, None) | {"is_met": None} for goal in part.goals],
    }


def _earlier(target: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of an earlier run that still exist, in our order."""
    report, _ = _read(target)
    found = report["parts"] if report and report.get("version") == VERSION else {}
    return {part.name: found[part.name] for part in PARTS if part.name in found}


def _report(parts: Mapping[str, dict[str, Any]], *, seconds: float) -> dict[str, Any]:
    return {
        "version": VERSION,
        "commit": commit(),
        "machine": machine(),
        "seconds": round(seconds, 1),
        "parts": {part.name: parts[part.name] for part in PARTS if part.name in parts},
    }


def _verdict(parts: Sequence[Mapping[str, Any]]) -> int:
    failed = [part["name"] for part in parts if part.get("exit_code", 0) != 0]
    missed = [
        f"{part['name']}: {goal['what']}: {goal['measured']} ({goal['goal']})"
        for part in parts
        for goal in part["goals"]
        if goal["is_met"] is False
    ]
    for text in missed:
        print(f"missed: {text}")
    print(f"{len(parts)} parts; failed: {', '.join(failed) or 'none'}; {len(missed)} goals missed")
    return 1 if failed or missed else 0


def _print_part(part: Mapping[str, Any]) -> None:
    print(f"    {part['status']}, {part['seconds']} s", flush=True)
    for goal in part["goals"]:
        met = {True: "met", False: "MISSED", None: ""}[goal["is_met"]]
        print(f"    {goal['what']}: {goal['measured']}  {goal['goal']} {met}".rstrip(), flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a part has left: its process group, which is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "it wrote no result"
    except ValueError as error:
        return None, f"its result cannot be read ({error})"
    return found, ""


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
