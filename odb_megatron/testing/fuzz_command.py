"""The command line of the fuzzers, and the processes they run in.

Must not know what is fuzzed: a part of the numbers gives a tally and failures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from odb_megatron.output_files import check_output

__all__ = ["Failures", "fuzz_command", "run_parts"]

_ENOUGH = 100  # fewer need not have had every case


class _Tally(Protocol):
    def add(self, other: Any) -> None:
        """Add the counts of another."""


Total = TypeVar("Total", bound=_Tally)
Failures = list[dict[str, object]]


def fuzz_command(
    argv: Sequence[str] | None,
    *,
    name: str,
    description: str,
    unit: str,
    run_all: Callable[..., tuple[Any, Failures]],
    cases: Sequence[str],
) -> int:
    """Run what is asked for, print and write the tally; return the exit status.

    Args:
        argv: the arguments; None for the process's own.
        name: the module.
        description: for the help.
        unit: what is numbered, "world" or "trial"; names the flag and the key of a failure.
        run_all: called with the numbers, `seed` and `processes`; returns tally and failures.
        cases: counts of the tally of which none may be 0 when there are enough.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument(f"--{unit}s", dest="count", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    if args.count < 1 or args.first < 0 or args.processes < 1:
        parser.error(f"--{unit}s and --processes must be at least 1, --first at least 0")
    if args.json:
        try:
            check_output("--json", str(args.json))
        except ValueError as error:
            parser.error(str(error))

    numbers = range(args.first, args.first + args.count)
    total, failures = run_all(numbers, seed=args.seed, processes=args.processes)
    result: dict[str, object] = {f"{unit}s": args.count, "seed": args.seed, **asdict(total)}
    print(json.dumps(result))
    result["failures"] = failures
    for failure in failures[:10]:
        again = f"--seed {args.seed} --first {failure[unit]} --{unit}s 1"
        print(f"{unit} {failure[unit]} ({again}): {failure['what']}", file=sys.stderr)
    missing = [case for case in cases if not getattr(total, case)]
    if args.count < _ENOUGH:
        missing = []
    if missing:
        print(
            f"never occurred in {args.count} {unit}s: {', '.join(missing)}; run more of them",
            file=sys.stderr,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failures or missing else 0


def run_parts(
    run_part: Callable[[tuple[range, int]], tuple[Total, Failures]],
    parts: Sequence[tuple[range, int]],
    *,
    total: Total,
    processes: int,
    unit: str,
) -> tuple[Total, Failures]:
    """Run parts in processes of their own and add up what they return.

    Args:
        run_part: importable; gets numbers and seed.
        parts: numbers and seed of each.
        total: an empty tally, which is filled.
        processes: how many at once.
        unit: for the progress.
    """
    failures: Failures = []
    num_done = 0
    with multiprocessing.get_context("spawn").Pool(min(processes, len(parts))) as pool:
        for done, (tally, failed) in enumerate(pool.imap_unordered(run_part, parts), start=1):
            total.add(tally)
            failures += failed
            num_done = min(num_done + len(parts[0][0]), sum(len(part) for part, _ in parts))
            if done % max(1, len(parts) // 10) == 0:
                print(f"{num_done} {unit}s", file=sys.stderr, flush=True)
    return total, failures
