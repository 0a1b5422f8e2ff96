"""Fuzzer of resuming: many random runs, killed and resumed at random steps.

    python -m odb_megatron.testing.resume_fuzz --trials 1000 --seed 0 --json resume.json

Each trial is one of the loop fuzzer's worlds, run once without a stop and once with one to three,
at each of which what a checkpoint holds goes through JSON text into new loops, while the old ones
may have gone on in vain. With the same replicas every step that follows must be the uninterrupted
run's to the byte; with others every step must have the same samples, and none may come twice or be
lost. Exit status 1 when a run differed or, in 100 trials or more, a case never occurred. `--first N
--trials 1` repeats trial N.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from odb_megatron.data.loop import PackedStep, Progress
from odb_megatron.data.wire import encode_header
from odb_megatron.testing.fuzz import fuzz_command
from odb_megatron.testing.replicas import Lockstep
from odb_megatron.testing.worlds import Tally, World, check_run, decoded, random_world

__all__ = ["Kill", "ResumeTally", "main", "run_trial"]

Steps = list[list[PackedStep]]


class Kill(NamedTuple):
    """A point at which the run is killed, and what it goes on with.

    Attributes:
        share: where it is killed, in thousandths of the uninterrupted run's steps.
        num_replicas: replicas that go on; None for the same.
        ahead: steps that the killed loops had made beyond the checkpoint.
    """

    share: int
    num_replicas: int | None = None
    ahead: int = 0


class ResumeTally(Tally):
    """Trials in which something differed, was lost or came twice; and cases that occurred.

    Resumes with the same and with other replicas, of replicas' own iterators, of loops that had
    made further steps; runs resumed more than once, and with skipped samples.
    """

    VIOLATIONS = ("differences",)
    CASES = (
        *("same_replicas", "other_replicas", "iterators", "made_ahead", "resumed_twice"),
        "skipped",
    )


def random_trial(rng: random.Random) -> tuple[World, tuple[Kill, ...]]:
    """Return a trial; a function of the generator's state alone."""
    world, _ = random_world(rng)
    kills = []
    for share in sorted(rng.randrange(1001) for _ in range(rng.choice([1, 1, 1, 2, 3]))):
        others = [n for n in (1, 2, 3, 4, 8, 16) if n != world.config.num_replicas]
        is_other = not world.shards and rng.random() < 0.5
        kills.append(Kill(share, rng.choice(others) if is_other else None, rng.randint(0, 3)))
    return world, tuple(kills)


def run_trial(world: World, kills: Sequence[Kill]) -> ResumeTally:
    """Run a trial.

    Raises:
        AssertionError: the interrupted run differs from the other; with what.
    """
    whole = world.run()
    tally = ResumeTally(resumed_twice=len(kills) > 1)
    tally["skipped"] += any(decoded(step[0]).totals.num_left_out for step in whole)
    current, starts, steps = world, [Progress(consumed=0)] * world.config.num_replicas, Steps()
    is_same = True
    for kill in (*kills, None):
        target = len(whole) if kill is None else kill.share * len(whole) // 1000
        ahead = 0 if kill is None else kill.ahead
        lockstep = Lockstep(current.loops(starts), current.config)
        lockstep.run(num_steps=None if kill is None else target - len(steps) + ahead)
        if not any(lockstep.steps) and target > len(steps):
            raise AssertionError(f"no step: {lockstep.errors}")
        own = [made[: target - len(steps)] for made in lockstep.steps]
        starts = [
            made[-1].progress if made else start for made, start in zip(own, starts, strict=True)
        ]
        for step in zip(*own, strict=True):
            _compare(list(step), whole[len(steps)], is_same=is_same)
            steps.append(list(step))
        if kill is None:
            assert not any(lockstep.errors), lockstep.errors
            assert max(map(len, lockstep.steps)) == max(map(len, own)), "steps beyond the run's end"
            break
        lockstep.close()
        starts = [replace(start, **json.loads(_saved(start))) for start in starts]
        num = kill.num_replicas or current.config.num_replicas
        is_other = num != current.config.num_replicas
        tally["other_replicas" if is_other else "same_replicas"] += 1
        tally.update(iterators=bool(world.shards), made_ahead=kill.ahead > 0)
        if is_other:
            current = replace(current, config=replace(current.config, num_replicas=num))
            starts = [Progress(consumed=starts[0].consumed)] * num
        is_same = current.config == world.config
    assert len(steps) == len(whole), f"{len(steps)} steps instead of {len(whole)}"
    if is_same and len({len(step) for step in steps}) <= 1:
        found = check_run(world, steps, is_whole=True)
        assert not found.num_violations or check_run(world, whole, is_whole=True) == found, found
    return tally


def _saved(progress: Progress) -> str:
    """Return what a checkpoint holds of it."""
    return json.dumps(
        {"consumed": progress.consumed, "num_bad": progress.num_bad, "source": progress.source}
    )


def _compare(step: list[PackedStep], expected: list[PackedStep], *, is_same: bool) -> None:
    found, other = [decoded(one) for one in step], [decoded(one) for one in expected]
    number = other[0].totals.step
    if is_same:
        for replica, (one, wanted) in enumerate(zip(found, other, strict=True)):
            totals = replace(one.totals, step=number, wait_us=wanted.totals.wait_us)
            same = replace(one, totals=totals, plan_us=wanted.plan_us)
            assert encode_header(same) == encode_header(wanted), (
                f"step {number}, replica {replica}: {one} instead of {wanted}"
            )
            assert bytes(step[replica].payload) == bytes(expected[replica].payload), "tokens"
        return
    ids = [sorted(at for o in of for row in o.own_positions for at in row) for of in (found, other)]
    assert ids[0] == ids[1], f"step {number}: samples {ids[0]} instead of {ids[1]}"
    for name in ("consumed_before", "num_consumed", "num_left_out", "num_tokens", "is_final"):
        seen, wanted_value = (getattr(of[0].totals, name) for of in (found, other))
        assert seen == wanted_value, f"step {number}: {name} {seen} instead of {wanted_value}"


def _trial(number: int, seed: int) -> ResumeTally:
    return run_trial(*random_trial(random.Random(f"resume {seed} {number}")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials asked for, print and write the tally; return the exit status."""
    return fuzz_command(
        argv,
        name="odb_megatron.testing.resume_fuzz",
        description=__doc__.split("\n", 1)[0],
        unit="trial",
        run=_trial,
        total=ResumeTally(),
    )


if __name__ == "__main__":
    sys.exit(main())
