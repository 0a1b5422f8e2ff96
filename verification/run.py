"""Checks the protocol's models with SPIN: worlds without error, broken rules that must be noticed.

Standard library only; what ties the model to the code is tests/test_verification.py. Exit status
0: every check came out as it must.

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

__all__ = ["Check", "CheckError", "Outcome", "all_checks", "find_tools", "main", "run"]

FOLDER = Path(__file__).resolve().parent
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
        model: file of the model.
    """

    name: str
    macros: tuple[str, ...]
    expected: str = ""
    liveness: bool = False
    quick: bool = False
    model: str = "odb.pml"


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
    """Return worlds, then mutations, then the cases that must occur; then shared micro-batches."""
    return [*_worlds(), *_mutations(), *_cases(), *_sharing()]


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


def run(check: Check, *, spin: str, compiler: str) -> Outcome:
    """Generate, compile and run the verifier of one check.

    Raises:
        CheckError: it could not be carried out, or the search was not exhaustive.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="odb-spin-") as name:
        folder = Path(name)
        command = [spin, *(f"-D{macro}" for macro in check.macros), "-a", str(FOLDER / check.model)]
        text = _output(command, folder=folder, timeout_s=60)
        if not (folder / "pan.c").exists() or "Error" in text:
            raise CheckError(f"spin cannot read the model of '{check.name}':\n{text}")
        options = ["-O0" if check.expected else "-O1", "-w", f"-DMEMLIM={MEMORY_MIB}"]
        options += [] if check.liveness else ["-DNOCLAIM", "-DSAFETY"]
        text = _output([compiler, *options, "-o", "pan", "pan.c"], folder=folder, timeout_s=600)
        if not (folder / "pan").exists():
            raise CheckError(f"{compiler} cannot compile the verifier:\n{text}")
        arguments = [f"-m{MAX_DEPTH}", "-n", *(["-a"] if check.liveness else [])]
        text = _output(["./pan", *arguments], folder=folder, timeout_s=MAX_SECONDS)
    return _judge(check, text, seconds=time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print a table; return the exit status."""
    parser = argparse.ArgumentParser(description="Check the protocol's model with SPIN.")
    parser.add_argument("--quick", action="store_true", help="a selection, two minutes of one core")
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
    table = (
        ("no fault", "N=2 TOTAL=6 BATCH=3 AHEAD=2 FIT=2"),
        ("no fault", "N=3 TOTAL=5 BATCH=3"),
        ("no fault", "N=2 BLOCKS=2 TOTAL=6 BATCH=5 MULTIPLE=2"),
        ("no fault", "N=3 BLOCKS=2 TOTAL=5 BATCH=3"),
        ("no fault", "N=4 BLOCKS=2 LEAST=3 TOTAL=3 BATCH=3 KEPT"),
        ("iterators", "N=2 OPEN TOTAL=5 BATCH=3"),
        ("iterators", "N=3 OPEN TOTAL=4 BATCH=4 KEPT"),
        ("iterators", "N=2 BLOCKS=2 OPEN TOTAL=5 BATCH=3"),
        ("iterators", "N=3 BLOCKS=2 OPEN TOTAL=3 BATCH=4 KEPT"),
        ("iterators, ends unseen", "N=2 OPEN UNSEEN TOTAL=4 BATCH=3"),
        ("iterators, ends unseen", "N=3 OPEN UNSEEN TOTAL=2 BATCH=3 KEPT"),
        ("iterators, quota", "N=2 OPEN QUOTA TOTAL=4 BATCH=3"),
        ("iterators, quota", "N=2 BLOCKS=2 OPEN QUOTA TOTAL=4 BATCH=3"),
        ("errors", "N=2 FAULT=ERROR TOTAL=4"),
        ("errors", "N=3 FAULT=ERROR TOTAL=2"),
        ("errors", "N=2 BLOCKS=2 FAULT=ERROR TOTAL=4"),
        ("errors", "N=3 BLOCKS=2 FAULT=ERROR TOTAL=2"),
        ("errors, iterators", "N=2 OPEN FAULT=ERROR TOTAL=3"),
        ("errors, iterators", "N=2 BLOCKS=2 OPEN FAULT=ERROR TOTAL=3"),
        ("errors, heartbeat at once", "N=2 FAULT=ERROR TOTAL=4 AT_ONCE"),
        ("a loop closes", "N=2 FAULT=CLOSE TOTAL=4"),
        ("a loop closes", "N=3 FAULT=CLOSE TOTAL=2"),
        ("a loop closes", "N=2 BLOCKS=2 FAULT=CLOSE TOTAL=4"),
        ("a loop closes", "N=3 BLOCKS=2 FAULT=CLOSE TOTAL=2"),
        ("errors, stop requests", "N=2 FAULT=ERROR TOTAL=2 STOPS"),
        ("a loop hangs", "N=2 FAULT=HANG TOTAL=4"),
        ("a loop hangs", "N=3 FAULT=HANG TOTAL=2"),
        ("a loop hangs", "N=2 BLOCKS=2 FAULT=HANG TOTAL=4"),
        ("a loop hangs", "N=3 BLOCKS=2 FAULT=HANG TOTAL=2"),
        ("a loop hangs, stop requests", "N=2 FAULT=HANG TOTAL=2 STOPS"),
        ("a process dies", "N=2 FAULT=CRASH TOTAL=3"),
        ("a process dies", "N=3 FAULT=CRASH TOTAL=2 KEPT"),
        ("a process dies", "N=2 BLOCKS=2 FAULT=CRASH TOTAL=3"),
        ("a process dies", "N=3 BLOCKS=2 FAULT=CRASH TOTAL=2 KEPT"),
        ("a trainer raises", "N=2 FAULT=RAISE TOTAL=4"),
        ("a trainer raises", "N=3 FAULT=RAISE TOTAL=2 KEPT"),
        ("a trainer raises", "N=2 BLOCKS=2 FAULT=RAISE TOTAL=4"),
        ("trainers leave", "N=2 FAULT=LEAVE TOTAL=5"),
        ("trainers leave", "N=3 FAULT=LEAVE TOTAL=3"),
        ("trainers leave", "N=3 BLOCKS=2 FAULT=LEAVE TOTAL=3"),
        ("trainers leave, stop requests", "N=2 FAULT=LEAVE TOTAL=3 STOPS"),
        ("trainers leave", "N=2 FAULT=LEAVE TOTAL=5 BATCH=1 AHEAD=2"),
        ("stop requests", "N=2 TOTAL=4 STOPS"),
        ("stop requests", "N=3 TOTAL=2 STOPS KEPT"),
        ("stop requests", "N=2 BLOCKS=2 TOTAL=4 STOPS"),
        ("stop requests", "N=3 BLOCKS=2 TOTAL=2 STOPS KEPT"),
        ("stop requests, iterators", "N=2 OPEN TOTAL=3 STOPS KEPT"),
        ("stop requests", "N=2 TOTAL=5 BATCH=1 AHEAD=2 STOPS"),
    )
    return [
        Check(
            name=f"{name}{': ends' if liveness else ''}: {macros}",
            macros=tuple(macros.split()),
            liveness=liveness,
            quick="N=2" in macros and not liveness and "," not in name,
        )
        for name, macros in table
        for liveness in ((False, True) if "N=2 " in macros else (False,))
    ]


def _mutations() -> list[Check]:
    table = (
        ("END_EARLY", DEADLOCK, ""),
        ("PLAN_PAST_END", "missing", ""),
        ("QUOTA_OFF_BY_ONE", "emitted", "OPEN QUOTA"),
        ("SHARES_OVERLAP", "emitted", ""),
        ("STATE_OF_READ", "emitted", "OPEN STOPS"),
        ("COUNT_NOT_MULTIPLE", "planned_m[r]%2", "MULTIPLE=2"),
        ("COUNT_OF_BLOCK", "planned_m", "BLOCKS=2 BATCH=3"),
        ("COUNT_AGAIN_ONCE", "planned_m", "BLOCKS=2 BATCH=5 TOTAL=5"),
        ("ROUND_TOO_FEW", "committed", "OPEN BATCH=3"),
        ("ROUND_BY_OWN_END", "kind", "OPEN BATCH=3"),
        ("ENDED_READ_ON", "extra", "OPEN"),
        ("NO_SENDS", DEADLOCK, ""),
        ("SKIP_UNMOVED", "kind", "N=3"),
        ("ERROR_UNTOLD", "missing", "FAULT=ERROR"),
        ("SKIP_GATHER_AFTER_ERROR", DEADLOCK, "FAULT=ERROR"),
        ("SKIP_EXCHANGE_AFTER_ERROR", "kind", "FAULT=ERROR"),
        ("SKIP_COUNTS_AFTER_ERROR", "kind", "FAULT=ERROR BLOCKS=2"),
        ("SKIP_HANDED_AFTER_ERROR", "kind", "FAULT=ERROR N=3 BLOCKS=2"),
        ("FAILED_BY_OWN", "kind", "FAULT=ERROR"),
        ("NO_LAST_GATHER", DEADLOCK, "FAULT=ERROR"),
        ("NOT_CLOSED", DEADLOCK, "FAULT=CLOSE"),
        ("SKIP_CLOSING_GATHER", DEADLOCK, "STOPS"),
        ("DECIDE_IN_BLOCK", DEADLOCK, "STOPS N=3 BLOCKS=2"),
        ("STOP_AT_ONCE", DEADLOCK, "STOPS"),
        ("NOT_WOKEN", DEADLOCK, "FAULT=LEAVE"),
        ("NOT_WOKEN", NO_END, "FAULT=LEAVE"),
        ("NO_DEADLINE", DEADLOCK, "FAULT=HANG"),
        ("NO_DEADLINE", DEADLOCK, "FAULT=CRASH"),
        ("NO_HEARTBEAT", DEADLOCK, "FAULT=CRASH"),
        ("NO_HEARTBEAT", DEADLOCK, "FAULT=ERROR"),
        ("CLOSE_WAITS_FOREVER", DEADLOCK, "FAULT=RAISE TOTAL=6"),
    )
    return [
        Check(
            name=f"mutation {name} {macros}".rstrip(),
            macros=("N=2",) * ("N=" not in macros) + (*macros.split(), f"MUTATE={name}"),
            expected=expected,
            liveness=expected == NO_END,
            quick=True,
        )
        for name, expected, macros in table
    ]


def _cases() -> list[Check]:
    table = (
        ("IDLE_REPLICA", ""),
        ("STAYS_OUT", "N=3"),
        ("MORE_MICRO_BATCHES", "BLOCKS=2 BATCH=3"),
        ("ONE_MORE", "BLOCKS=2 BATCH=5 TOTAL=5"),
        ("MOST_ROUNDS", "N=3 OPEN UNSEEN LEAST=3 TOTAL=3 BATCH=3 KEPT"),
        ("SAMPLE_LOST", "FAULT=ERROR"),
        ("ERROR_ALONE", "FAULT=ERROR"),
        ("ERROR_IN_LAST_STEP", "FAULT=ERROR"),
        ("ALL_FAIL", "FAULT=ERROR"),
        ("ERROR_AND_STOP", "FAULT=ERROR STOPS"),
        ("PEER_SHUT", "FAULT=CLOSE"),
        ("PEERS_DEADLINE", "FAULT=HANG"),
        ("HEARTBEAT_NEEDED", "FAULT=CRASH"),
        ("FULL_WHEN_CLOSED", "FAULT=LEAVE"),
        ("LATEST_STOP", "STOPS TOTAL=6"),
    )
    return [
        Check(
            name=f"occurs: {name} {macros}".rstrip(),
            macros=("N=2",) * ("N=" not in macros) + (*macros.split(), f"OCCURS={name}"),
            expected="assertion violated",
        )
        for name, macros in table
    ]


def _sharing() -> list[Check]:
    table = (
        ("REPLICAS=4 M=2", ""),
        ("REPLICAS=2 STAGES=2 M=3", ""),
        ("REPLICAS=2 STAGES=3 M=2", ""),
        ("MUTATE=OTHER_ORDER", "doing"),
        ("MUTATE=OTHER_COUNT", DEADLOCK),
        ("MUTATE=NOT_ALIGNED", DEADLOCK),
        ("MUTATE=LARGEST_FIRST", DEADLOCK),
        ("MUTATE=GROUP_OF_OWN", DEADLOCK),
    )
    return [
        Check(
            name=f"sharing {macros}",
            macros=tuple(macros.split()),
            expected=expected,
            quick=True,
            model="sharing.pml",
        )
        for macros, expected in table
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
