"""Every figure of the documentation in one run, each beside its goal: build/bench/bench.json.

    python benchmarks/bench.py
    python benchmarks/bench.py --only planner verify
    python benchmarks/bench.py --full             # the sizes that the docs quote; hours

Each part is a benchmark of its own, in a process of its own with a time limit. A part that fails or
runs out of time is shown as such; its goals then have no value and are not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS: list[dict[str, Any]] = tomllib.loads((HERE / "bench.toml").read_text())["part"]
PACKAGES = ("torch", "megatron-core", "numpy", "online-dynamic-batching")
TIMEOUT_S, FULL_TIMEOUT_S = 300.0, 14400.0
_TAIL_LINES = 25
_TAKES: Mapping[str, Any] = {"max": max, "min": min, "sum": sum, "all": all, "len": len}
_LIMITS = {
    "least": lambda value, bound: value >= bound,
    "most": lambda value, bound: value <= bound,
    "is": lambda value, bound: value == bound,
}


def read_value(result: Any, keys: Sequence[str | int]) -> Any:
    """Return what `keys` lead to; bench.toml says how.

    Raises:
        LookupError, TypeError, ValueError: nothing, or several values.
    """
    take, path = (keys[0], keys[1:]) if len(keys) > 1 and keys[0] in _TAKES else (None, keys)
    found = [result]
    for key in path:
        name, is_filter, value = str(key).partition("=")
        step: list[Any] = []
        for one in found:
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


def judge(goal: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Return a goal, what was measured, and whether it is met (null without a limit)."""
    try:
        value = read_value(result, goal["read"])
    except (LookupError, TypeError, ValueError):
        value = None  # the part did not get that far, or the figure needs what is missing
    limits = {name: goal[name] for name in _LIMITS if name in goal}
    is_met = None
    for name, bound in limits.items():
        is_met = value is not None and bool(_LIMITS[name](value, bound))
    return {"what": goal["what"], **limits, "measured": value, "is_met": is_met}


def words_of(part: Mapping[str, Any], *, full: bool) -> list[str]:
    """Return a part's command line behind the interpreter."""
    words = shlex.split(part["command"])
    if not full or "full" not in part:
        return words
    return [*words[: 2 if words[0] == "-m" else 1], *shlex.split(part["full"])]


def run_part(
    part: Mapping[str, Any], folder: Path, *, full: bool = False, most_s: float = FULL_TIMEOUT_S
) -> dict[str, Any]:
    """Run a part in a process of its own and hold its result against its goals.

    Args:
        part: of bench.toml.
        folder: its JSON and output go here, as NAME.json and NAME.txt.
        full: its full size.
        most_s: seconds after which it is ended, if its own limit is not less.
    """
    target, log = (folder / f"{part['name']}.{kind}" for kind in ("json", "txt"))
    target.unlink(missing_ok=True)
    words = words_of(part, full=full)
    limit = min(FULL_TIMEOUT_S if full else part.get("timeout_s", TIMEOUT_S), most_s)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    load, started = os.getloadavg()[0], time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *words, "--json", str(target)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also what it has left, in its process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, result = round(time.monotonic() - started, 1), None
    status = f"exit code {code}" if code is not None else f"ended after {limit:.0f} s"
    try:
        result = json.loads(target.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        status += f"; no result: {error}"
    goals = [judge(goal, result) for goal in part["goals"]]
    print(f"    {status}, {seconds} s", flush=True)
    for goal in goals:
        limits = ", ".join(f"{name} {goal[name]}" for name in _LIMITS if name in goal)
        met = {True: "met", False: "MISSED", None: ""}[goal["is_met"]]
        print(f"    {goal['what']}: {goal['measured']}  {limits} {met}".rstrip(), flush=True)
    return {
        "command": shlex.join(["python", *words]),
        "status": status,
        "exit_code": code,
        "seconds": seconds,
        "load_before": round(load, 1),
        "goals": goals,
        "output": log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:],
        "result": result,
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on: commit, processor, memory, versions."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    versions = {
        name: next((one.version for one in metadata.distributions(name=name)), "-")
        for name in PACKAGES
    }
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        processor = line.partition(":")[2].strip()
    git = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return {
        "commit": git.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "versions": versions | {"python": platform.python_version()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return 1 if one failed or a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    names = [part["name"] for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--full", action="store_true", help="full sizes: hours, a quiet machine")
    minutes = "most time without --full (default 20)"
    parser.add_argument("--minutes", type=float, default=20.0, help=minutes)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "bench.json"
    started, parts = time.monotonic(), dict[str, dict[str, Any]]()
    chosen = [part for part in PARTS if not options.only or part["name"] in options.only]
    for number, part in enumerate(chosen, start=1):
        name = part["name"]
        print(f"[{number}/{len(chosen)}] {name}: {part['title']}", flush=True)
        left = FULL_TIMEOUT_S if options.full else 60 * options.minutes
        left -= 0 if options.full else time.monotonic() - started
        reason = "" if left > 0 else "the time is used up"
        if part.get("is_full_only") and not options.full:
            reason = "takes too long; --full runs it"
        if shutil.which(part.get("needs", "sh")) is None:
            reason = f"{part['needs']} is not installed"
        if reason:
            print(f"    not run: {reason}", flush=True)
            parts[name] = {"status": f"not run: {reason}", "exit_code": 0, "goals": []}
        else:
            parts[name] = run_part(part, options.out, full=options.full, most_s=left)
        values = {"machine": machine(), "is_full": options.full, "parts": parts}
        target.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, part in parts.items() if part["exit_code"] != 0]
    missed = [
        f"{name}: {goal['what']}: {goal['measured']}"
        for name, part in parts.items()
        for goal in part["goals"]
        if goal["is_met"] is False
    ]
    print("\n".join(f"missed: {text}" for text in missed))
    print(f"{target}: {len(parts)} parts; failed: {', '.join(failed) or 'none'}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
