"""Checks the protocol's model with SPIN: worlds without error, broken rules that must be noticed.

Standard library only. Must not import odb_megatron: what ties the model to the code is
tests/test_verification.py. Exit status 0: every check came out as it must.

    python verification/run.py [--quick] [--jobs N] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Check", "CheckError", "Outcome", "all_checks", "find_tools", "generate", "main", "run"]

MODEL = Path(__file__).resolve().parent / "odb.pml"
MEMORY_MIB = 1800
"""Most memory of one verifier; two run at a time."""

MAX_DEPTH = 20_000
MAX_SECONDS = 900

DEADLOCK = "invalid end state"
NO_END = "acceptance cycle"


class CheckError(RuntimeError):
    """The check could not be carried out: a tool is missing, or SPIN or the compiler failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One run of a verifier.

    Attributes:
        name: shown in the table.
        macros: of the model, as `NAME` or `NAME=VALUE`.
        expected: part of the violation that must be found; empty when there must be none.
        liveness: check that every run ends (`<> done`) instead of deadlock.
        quick: belongs to the short selection.
    """

    name: str
    macros: tuple[str, ...]
    expected: str = ""
    liveness: bool = False
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a check.

    Attributes:
        name: see `Check`.
        passed: no violation, or the expected one.
        violation: what the verifier reported; empty when nothing.
        expected: see `Check`.
        num_states: distinct states.
        depth: longest run, in transitions.
        seconds: compilation included.
    """

    name: str
    passed: bool
    violation: str
    expected: str
    num_states: int
    depth: int
    seconds: float


def all_checks() -> list[Check]:
    """Return worlds, then mutations, then the cases that must occur."""
    return [*_worlds(), *_mutations(), *_cases()]


def find_tools() -> tuple[str, str]:
    """Return the paths of `spin` and a C compiler.

    Raises:
        CheckError: names what is missing and how to install it.
    """
    spin = shutil.which("spin")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    missing = [name for name, found in (("spin", spin), ("gcc", compiler)) if not found]
    if spin is None or compiler is None:
        raise CheckError(
            f"missing: {', '.join(missing)}. On Debian and Ubuntu: apt-get update && apt-get "
            f"install -y {' '.join(missing)} (SPIN's sources: https://spinroot.com)"
        )
    return spin, compiler


def generate(macros: Sequence[str], *, spin: str, folder: Path) -> None:
    """Write the verifier's C sources for the model with `macros` into `folder`.

    Raises:
        CheckError: SPIN refuses the model.
    """
    command = [spin, *(f"-D{macro}" for macro in macros), "-a", str(MODEL)]
    text = _output(command, folder=folder, timeout_s=60)
    if not (folder / "pan.c").exists() or "Error" in text:
        raise CheckError(f"spin cannot read the model with {' '.join(macros)}:\n{text}")


def run(check: Check, *, spin: str, compiler: str) -> Outcome:
    """Generate, compile and run the verifier of one check.

    Raises:
        CheckError: it could not be carried out, or the search was not exhaustive.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="odb-spin-") as name:
        folder = Path(name)
        generate(check.macros, spin=spin, folder=folder)
        options = ["-O1", "-w", f"-DMEMLIM={MEMORY_MIB}"]
        options += [] if check.liveness else ["-DNOCLAIM", "-DSAFETY"]
        text = _output([compiler, *options, "-o", "pan", "pan.c"], folder=folder, timeout_s=120)
        if not (folder / "pan").exists():
            raise CheckError(f"{compiler} cannot compile the verifier:\n{text}")
        arguments = [f"-m{MAX_DEPTH}", "-n", *(["-a"] if check.liveness else [])]
        text = _output(["./pan", *arguments], folder=folder, timeout_s=MAX_SECONDS)
    return _judge(check, text, seconds=time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print a table; return the exit status."""
    parser = argparse.ArgumentParser(description="Check the protocol's model with SPIN.")
    parser.add_argument("--quick", action="store_true", help="a selection, under half a minute")
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time (default 2)")
    parser.add_argument("--json", metavar="OUT", help="write the outcomes as JSON")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    target = Path(options.json or "outcomes.json")
    if target.is_dir() or not target.parent.is_dir():
        parser.error(f"--json {options.json}: name a file in a folder that exists")
    started = time.monotonic()
    checks = [check for check in all_checks() if check.quick or not options.quick]
    outcomes: list[Outcome] = []
    try:
        spin, compiler = find_tools()
        print(f"{'check':<52} {'states':>10} {'depth':>6} {'s':>6}  result")
        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(lambda c: run(c, spin=spin, compiler=compiler), checks):
                outcomes.append(outcome)
                print(_row(outcome), flush=True)
    except CheckError as error:
        print(f"verification: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    num_failed = sum(not outcome.passed for outcome in outcomes)
    num_caught = sum(outcome.passed for outcome in outcomes if outcome.expected)
    num_negative = sum(bool(outcome.expected) for outcome in outcomes)
    print(
        f"{len(outcomes) - num_negative} checks of the protocol with "
        f"{sum(o.num_states for o in outcomes if not o.expected)} states; {num_caught} of "
        f"{num_negative} negative checks caught; {num_failed} failed; {seconds:.0f} s, "
        f"{usage.ru_utime + usage.ru_stime:.0f} s of CPU"
    )
    if options.json:
        report = {
            "checks": [asdict(outcome) for outcome in outcomes],
            "failed": num_failed,
            "seconds": seconds,
        }
        target.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if num_failed else 0


def _worlds() -> list[Check]:
    two, three = ("N=2",), ("N=3",)
    worlds: list[tuple[str, tuple[str, ...]]] = [
        ("fixed shards", (*two, "MOST=4", "WINDOW=3")),
        ("fixed shards", (*three, "MOST=3", "TOTAL=6")),
        ("some replica emits", (*two, "MOST=3", "RULE=SOME")),
        ("some replica emits", (*three, "MOST=2", "TOTAL=5", "RULE=SOME")),
        ("positions that emit nothing", (*two, "MOST=3", "HOLES")),
        ("virtual pipeline, two samples fit", (*two, "MOST=4", "FIT=2", "MULTIPLE=2")),
        ("online assignment", (*two, "DRAW=ONLINE", "TOTAL=8")),
        ("online assignment", (*three, "DRAW=ONLINE", "TOTAL=8")),
        ("drain by deadline", (*two, "MOST=4", "TOTAL=7", "RULE=SOME", "DRAIN")),
        ("drain by deadline", (*three, "MOST=3", "TOTAL=4", "RULE=SOME", "DRAIN")),
        ("drain by deadline, online", (*two, "DRAW=ONLINE", "TOTAL=7", "RULE=SOME", "DRAIN")),
        ("drain by deadline, online", (*three, "DRAW=ONLINE", "TOTAL=5", "RULE=SOME", "DRAIN")),
        ("policy samples", (*two, "DRAW=BATCH", "TOTAL=9")),
        ("policy samples", (*three, "DRAW=BATCH", "TOTAL=9")),
        ("quota", (*two, "DRAW=QUOTA", "TOTAL=8")),
        ("quota", (*three, "DRAW=QUOTA", "TOTAL=8")),
    ]
    long_two, long_three = (*two, "MOST=4", "TOTAL=5"), (*three, "MOST=4", "TOTAL=4", "WINDOW=1")
    five = (*two, "MOST=5", "TOTAL=5", "WINDOW=1")
    short_three = (*three, "MOST=3", "TOTAL=3", "WINDOW=1")
    worlds += [
        ("trainers leave", (*long_two, "FAULT=LEAVE")),
        ("trainers leave", (*long_three, "FAULT=LEAVE")),
        ("an error", (*long_two, "FAULT=ERROR")),
        ("an error", (*long_three, "FAULT=ERROR")),
        ("a planner hangs", (*long_two, "FAULT=HANG")),
        ("a planner hangs", (*long_three, "FAULT=HANG")),
        ("a process dies", (*two, "MOST=4", "TOTAL=4", "FAULT=CRASH")),
        ("a process dies", (*short_three, "FAULT=CRASH")),
        ("a trainer raises", (*two, "MOST=4", "TOTAL=4", "FAULT=RAISE")),
        ("a trainer raises", (*short_three, "FAULT=RAISE")),
        ("stop requests", (*two, "MOST=4", "TOTAL=4", "STOPS")),
        ("stop requests", (*short_three, "STOPS")),
        ("stop requests, online assignment", (*two, "DRAW=ONLINE", "TOTAL=5", "STOPS")),
        ("stop requests, policy samples", (*two, "DRAW=BATCH", "TOTAL=6", "STOPS")),
        ("stop requests, quota", (*two, "DRAW=QUOTA", "TOTAL=6", "STOPS")),
        ("stop requests, plan_ahead 3", (*five, "AHEAD=3", "STOPS")),
        ("stop requests, back-pressure after", (*long_two, "WINDOW=1", "PUT_AFTER", "STOPS")),
        ("trainers leave, plan_ahead 3", (*two, "MOST=5", "TOTAL=6", "AHEAD=3", "FAULT=LEAVE")),
        ("trainers leave, back-pressure after", (*long_two, "PUT_AFTER", "FAULT=LEAVE")),
        ("trainers leave, stop requests", (*two, "TOTAL=3", "FAULT=LEAVE", "STOPS")),
        ("an error, stop requests", (*two, "TOTAL=3", "FAULT=ERROR", "STOPS")),
        ("a planner hangs, stop requests", (*two, "TOTAL=3", "FAULT=HANG", "STOPS")),
        ("a process dies, stop requests", (*two, "TOTAL=3", "FAULT=CRASH", "STOPS")),
        ("a trainer raises, stop requests", (*two, "TOTAL=3", "FAULT=RAISE", "STOPS")),
    ]
    worlds += [
        (f"third exchange{name}", ("THIRD", *macros))
        for name, macros in (
            ("", (*two, "MOST=4", "FIT=2", "MULTIPLE=2")),
            ("", (*three, "MOST=2", "TOTAL=4")),
            (", some replica emits", (*two, "MOST=3", "RULE=SOME")),
            (", policy samples", (*two, "DRAW=BATCH", "TOTAL=9")),
            (", trainers leave", (*two, "MOST=3", "TOTAL=4", "FAULT=LEAVE")),
            (", an error", (*two, "MOST=3", "TOTAL=4", "FAULT=ERROR")),
            (", an error", (*short_three, "FAULT=ERROR")),
            (", a planner hangs", (*two, "MOST=3", "TOTAL=4", "FAULT=HANG")),
            (", a process dies", (*two, "TOTAL=3", "FAULT=CRASH")),
            (", a trainer raises", (*two, "TOTAL=3", "FAULT=RAISE")),
            (", stop requests", (*two, "MOST=3", "TOTAL=3", "STOPS")),
            (", stop requests", (*three, "MOST=2", "TOTAL=2", "WINDOW=1", "STOPS")),
        )
    ]
    return [
        Check(
            name=f"{3 if 'N=3' in macros else 2} replicas, {name}{': ends' if liveness else ''}",
            macros=macros,
            liveness=liveness,
            quick="N=2" in macros and not liveness and not name.count(","),
        )
        for name, macros in worlds
        for liveness in (False, True)
    ]


def _mutations() -> list[Check]:
    table: list[tuple[str, str, tuple[str, ...]]] = [
        ("STOP_WHEN_DRAINED", DEADLOCK, ()),
        ("NO_IDLE_STEP", "gone", ()),
        ("COUNT_MIN", "common>=p_need", ()),
        ("COUNT_OWN", "planned_m", ()),
        ("COUNT_NOT_MULTIPLE", "common%2", ("MULTIPLE=2",)),
        ("SELECT_NOTHING", "p_samples", ()),
        ("DEADLINE_MOVES", "max_drain", ("MOST=4", "RULE=SOME", "DRAIN")),
        ("FINAL_BY_REPLICA", DEADLOCK, ()),
        ("PLAN_PAST_FINAL", "w_held", ()),
        ("EMIT_BEFORE_COMMIT", "left_out", ("STOPS",)),
        ("DRAW_TWICE", "emitted&chosen", ("DRAW=ONLINE",)),
        ("QUOTA_NOT_SHARED", "num_emitted", ("DRAW=QUOTA",)),
        ("SKIP_CLOSING_EXCHANGE", DEADLOCK, ("STOPS",)),
        ("PLAN_BIT_UNSEEN", "gone", ("STOPS",)),
        ("STOP_AT_ONCE", "gone", ("STOPS",)),
        ("NOT_WOKEN", DEADLOCK, ("FAULT=LEAVE", "MOST=4")),
        ("NOT_WOKEN", NO_END, ("FAULT=LEAVE", "MOST=4")),
        ("ERROR_UNTOLD", DEADLOCK, ("FAULT=ERROR",)),
        ("NO_DEADLINE", DEADLOCK, ("FAULT=HANG",)),
        ("NO_DEADLINE", DEADLOCK, ("FAULT=CRASH",)),
        ("NO_WATCHDOG", DEADLOCK, ("FAULT=CRASH",)),
        ("CLOSE_WAITS_FOREVER", DEADLOCK, ("FAULT=RAISE", "MOST=4", "TOTAL=4")),
        ("SKIP_EMPTY_LIST", DEADLOCK, ("THIRD",)),
        ("SKIP_WHEN_DRAINED", DEADLOCK, ("THIRD",)),
    ]
    return [
        Check(
            name=f"mutation {name} {' '.join(macros)}".rstrip(),
            macros=("N=2", *macros, f"MUTATE_{name}"),
            expected=expected,
            liveness=expected == NO_END,
            quick=True,
        )
        for name, expected, macros in table
    ]


def _cases() -> list[Check]:
    table: list[tuple[str, tuple[str, ...]]] = [
        ("IDLE_MICRO_BATCH", ()),
        ("DRAINED_EARLY", ()),
        ("LATEST_END", ()),
        ("ALL_IDLE_STEP", ("HOLES",)),
        ("FULL_WHEN_CLOSED", ("FAULT=LEAVE", "MOST=4")),
        ("CLOSING_IN_PLAN_RECORD", ("STOPS",)),
        ("LATEST_STOP", ("STOPS", "MOST=4", "TOTAL=5")),
        ("PEERS_DEADLINE", ("FAULT=HANG",)),
        ("WATCHDOG_NEEDED", ("FAULT=CRASH",)),
        ("EMPTY_LIST", ("THIRD",)),
        ("FAILED_LIST", ("THIRD", "FAULT=ERROR")),
        ("ASKED_IN_THIRD", ("THIRD", "STOPS")),
    ]
    return [
        Check(
            name=f"occurs: {name} {' '.join(macros)}".rstrip(),
            macros=("N=2", *macros, f"OCCURS={name}"),
            expected="assertion violated",
        )
        for name, macros in table
    ]


def _output(command: Sequence[str], *, folder: Path, timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{' '.join(command)} took more than {timeout_s:.0f} s") from error
    return done.stdout + done.stderr


def _judge(check: Check, text: str, *, seconds: float) -> Outcome:
    found = re.search(r"depth reached (\d+)", text), re.search(r"(\d+) states, stored", text)
    if not all(found) or "errors: " not in text:
        raise CheckError(f"the verifier of '{check.name}' did not finish:\n{text}")
    reported = re.search(r"pan:\d+: (.*?) \(at depth", text)
    violation = reported.group(1) if reported else ""
    exhausted = "max search depth too small" in text or "out of memory" in text
    if not check.expected and exhausted:
        raise CheckError(f"the search of '{check.name}' was not exhaustive:\n{text}")
    expected = check.expected
    return Outcome(
        name=check.name,
        passed=expected in violation and bool(violation) if expected else "errors: 0" in text,
        violation=violation,
        expected=expected,
        num_states=int(found[1].group(1)) if found[1] else 0,
        depth=int(found[0].group(1)) if found[0] else 0,
        seconds=seconds,
    )


def _row(outcome: Outcome) -> str:
    if outcome.passed:
        result = f"caught: {outcome.violation[:60]}" if outcome.expected else "no error"
    else:
        result = f"FAILED: expected '{outcome.expected}', found '{outcome.violation}'"
    return (
        f"{outcome.name:<52} {outcome.num_states:>10} {outcome.depth:>6} "
        f"{outcome.seconds:>6.1f}  {result}"
    )


if __name__ == "__main__":
    sys.exit(main())
