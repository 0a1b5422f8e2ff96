"""Fuzzer of the step loop: many random worlds, every invariant.

    python -m odb_megatron.testing.fuzz --worlds 10000 --seed 0 --json fuzz.json

Each world is a run of 1 to 16 replicas, in one block or several, over random lengths, budgets and
sources, whose loops go on in a random order. In some a replica closes its loader or raises in the
middle of a step, and all have to end. Exit status 1 when a violation was found or, in 100 worlds or
more, a case never occurred. A world is a function of the seed and its number alone: `--first N
--worlds 1` repeats it.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, fields

from odb_megatron.plan.record import LoaderClosedError, ReplicaFailedError
from odb_megatron.testing.fuzz_command import Failures, fuzz_command, run_parts
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

__all__ = ["main", "run_world"]

_BATCH = 25  # worlds per task of a worker process
_VIOLATIONS = {"lost", "duplicated", "over_budget", "misaligned"}


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
    tally.closed_early = int(not is_whole and fault is not None and fault.where == "close")
    tally.failed = int(not is_whole) - tally.closed_early
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worlds asked for, print and write the tally; return the exit status."""
    return fuzz_command(
        argv,
        name="odb_megatron.testing.fuzz",
        description=__doc__.split("\n", 1)[0],
        unit="world",
        run_all=_run_all,
        cases=[one.name for one in fields(Tally) if one.name not in _VIOLATIONS],
    )


def _run_all(numbers: range, *, seed: int, processes: int) -> tuple[Tally, Failures]:
    parts = [(numbers[at : at + _BATCH], seed) for at in range(0, len(numbers), _BATCH)]
    return run_parts(_run_part, parts, total=Tally(), processes=processes, unit="world")


def _run_part(part: tuple[range, int]) -> tuple[Tally, Failures]:
    numbers, seed = part
    total, failures = Tally(), []
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        try:
            tally = run_world(*random_world(rng), rng=rng)
        except Exception:  # the fuzzer goes on; the world is named and its error shown
            what = traceback.format_exc(limit=-3)
            tally = Tally(misaligned=1)
        else:
            what = str(asdict(tally)) if tally.num_violations else ""
        total.add(tally)
        if what:
            failures.append({"world": number, "what": what})
    return total, failures


if __name__ == "__main__":
    sys.exit(main())
