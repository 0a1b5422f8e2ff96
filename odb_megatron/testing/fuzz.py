"""Fuzzer of the step loop: many random worlds, every invariant.

    python -m odb_megatron.testing.fuzz --worlds 10000 --seed 0 --json fuzz.json

Each world is a run of 1 to 16 replicas, in one block or several, over random lengths, budgets and
sources, whose loops go on in a random order. In some a replica closes its loader or raises in the
middle of a step, and all have to end. Exit status 1 when a violation was found or, in 100 worlds or
more, a case never occurred. A world is a function of the seed and its number alone: `--first N
--worlds 1` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from odb_megatron.command import check_output
from odb_megatron.plan.record import LoaderClosedError, ReplicaFailedError
from odb_megatron.testing.replicas import Lockstep
from odb_megatron.testing.worlds import (
    Fault,
    InjectedError,
    Tally,
    World,
    check_run,
    decoded,
    random_world,
)

__all__ = ["fuzz_command", "main", "run_world"]

_ENOUGH = 100  # fewer need not have had every case


def run_world(
    world: World, fault: Fault | None = None, *, rng: random.Random | None = None
) -> Tally:
    """Run a world to its end and check it.

    Raises:
        AssertionError: the loops wait for each other for ever, or do not end as they should.
    """
    lockstep = Lockstep(world.loops(fault=fault), world.config, rng=rng)
    lockstep.run()
    errors = lockstep.errors
    is_whole = not any(errors)
    if not is_whole:
        assert fault is not None, f"errors {errors}"
        assert all(errors), f"only some replicas have ended with an error: {errors}"
        if fault.where == "close":
            assert all(isinstance(one, LoaderClosedError) for one in errors), errors
        else:
            assert isinstance(errors[fault.replica], InjectedError), errors
            others = [one for at, one in enumerate(errors) if at != fault.replica]
            assert all(isinstance(one, ReplicaFailedError) for one in others), others
            assert all(f"replica {fault.replica}" in str(one) for one in others), others
    least = min(map(len, lockstep.steps))
    assert max(map(len, lockstep.steps)) <= least + 1, "replicas are steps apart at the end"
    steps = [list(step) for step in zip(*(own[:least] for own in lockstep.steps), strict=True)]
    is_over = bool(steps) and decoded(steps[-1][0]).totals.is_final  # what comes later is too late
    tally = check_run(world, steps, is_whole=is_whole or is_over)
    if not is_whole and fault is not None:
        tally["closed_early" if fault.where == "close" else "failed"] += 1
    return tally


def fuzz_command(
    argv: Sequence[str] | None,
    *,
    name: str,
    description: str,
    unit: str,
    run: Callable[[int, int], Tally],
    total: Tally,
) -> int:
    """Run what is asked for in processes, print and write the tally; return the exit status.

    Args:
        argv: the arguments; None for the process's own.
        name: the module.
        description: for the help.
        unit: what is numbered, "world" or "trial"; names the flag and the key of a failure.
        run: importable; returns the tally of a number under a seed.
        total: an empty tally.
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

    failures: list[dict[str, Any]] = []
    one = partial(_run, run, type(total), args.seed)
    numbers = range(args.first, args.first + args.count)
    with contextlib.ExitStack() as stack:
        found: Iterator[tuple[int, Tally, str]] = map(one, numbers)
        if args.processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(args.processes))
            found = pool.imap_unordered(one, numbers, chunksize=max(1, min(20, args.count // 50)))
        for done, (number, tally, what) in enumerate(found, start=1):
            total.update(tally)
            failures += [{unit: number, "what": what}] if what else []
            if done % max(100, args.count // 10) == 0:
                print(f"{done} {unit}s", file=sys.stderr, flush=True)
    result: dict[str, object] = {f"{unit}s": args.count, "seed": args.seed}
    result |= {name: total[name] for name in (*total.VIOLATIONS, *total.CASES)}
    print(json.dumps(result))
    for failure in failures[:10]:
        again = f"--seed {args.seed} --first {failure[unit]} --{unit}s 1"
        print(f"{unit} {failure[unit]} ({again}): {failure['what']}", file=sys.stderr)
    missing = [case for case in total.CASES if not total[case] and args.count >= _ENOUGH]
    if missing:
        text = f"never occurred in {args.count} {unit}s: {', '.join(missing)}; run more of them"
        print(text, file=sys.stderr)
    if args.json:
        result["failures"] = failures
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failures or missing else 0


def _run(
    run: Callable[[int, int], Tally], kind: type[Tally], seed: int, number: int
) -> tuple[int, Tally, str]:
    try:
        tally = run(number, seed)
        return number, tally, str(tally) if tally.num_violations else ""
    except Exception:  # the fuzzer goes on; the case is named and its error shown
        return number, kind([kind.VIOLATIONS[-1]]), traceback.format_exc(limit=-3)


def _world(number: int, seed: int) -> Tally:
    rng = random.Random(f"{seed} {number}")
    return run_world(*random_world(rng), rng=rng)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worlds asked for, print and write the tally; return the exit status."""
    return fuzz_command(
        argv,
        name="odb_megatron.testing.fuzz",
        description=__doc__.split("\n", 1)[0],
        unit="world",
        run=_world,
        total=Tally(),
    )


if __name__ == "__main__":
    sys.exit(main())
