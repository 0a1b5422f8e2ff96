"""Fuzzer of the planner: many random worlds, every invariant.

    python -m odb_megatron.testing.fuzz --worlds 10000 --seed 0 --json fuzz.json

Each world is a run of 1 to 16 replicas over random lengths, shards, windows, budgets, epochs and
policies; the records pass through their wire form. Some worlds are stopped, saved and resumed in
mid-run, or closed by one replica. Exit status 1 when a violation was found or, in 100 worlds or
more, a case never occurred. A world is a function of the seed and its number alone: `--first N
--worlds 1` repeats it.
"""

from __future__ import annotations

import json
import math
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.plan.step import StepPlan
from odb_megatron.plan.termination import LoaderClosedError, Phase
from odb_megatron.testing.fuzz_command import Failures, fuzz_command, run_parts
from odb_megatron.testing.invariants import Tally, tally_run
from odb_megatron.testing.worlds import World, plan_step

__all__ = ["Stop", "main", "random_world", "run_world"]

_MOST_STEPS = 100_000
_CASES = ("idle", "split", "drained_early", "moved", "epochs_crossed", "closed_early")
_BATCH = 25  # worlds per task of a worker process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop in mid-run, after which the run is resumed from its state.

    Attributes:
        step: steps planned before it.
        closing: replica that closes its loader in step `step`; None for a stop between steps.
    """

    step: int
    closing: int | None = None


def random_world(rng: random.Random) -> tuple[World, Stop | None]:
    """Return a world, and where it is stopped; a function of the generator's state alone."""
    num_replicas = rng.choice([1, 2, 2, 3, 4, 5, 8, 16])
    policy = rng.choice(list(PolicyName))
    epochs = rng.choice([1, 1, 2, 3])
    sizes = [_shard_size(rng) for _ in range(num_replicas)]
    own_shards = policy is PolicyName.COST and rng.random() < 0.3
    shards = tuple(size * epochs for size in sizes) if own_shards else ()
    total = sum(sizes) * epochs
    epoch_of = [p // max(1, sum(sizes)) for p in range(total)]
    if own_shards:
        epoch_of = [k // size for size in sizes for k in range(size * epochs)]
    elif rng.random() < 0.5:  # a quota instead of whole epochs
        total = rng.randint(0, total)
        epoch_of = epoch_of[:total]
    batch = rng.randint(1, 8 * num_replicas)
    budget = rng.choice([16, 64, 512])
    longest = rng.choice([budget // 8, budget // 2, budget, budget * 3 // 2])
    skipped = rng.choice([0.0, 0.0, 0.1, 0.9])
    lengths = [0 if rng.random() < skipped else _length(rng, longest) for _ in range(total)]
    patches = [rng.randint(0, 12) for _ in range(total)] if rng.random() < 0.2 else []
    least_window = -(-batch // num_replicas)
    config = PlanConfig(
        policy=policy,
        total=total,
        global_batch_size=batch,
        num_replicas=num_replicas,
        token_budget=budget,
        multiple=rng.choice([1, 1, 2, 4, 16]),
        window=rng.choice([least_window, rng.randint(least_window, 64)]),
        max_delay_steps=rng.randint(1, 8),
        count_multiple=rng.choice([1, 1, 2, 4]),
        cost=CostModel.from_ratios(
            quadratic=rng.choice([0.0, 1 / budget, 10 / budget]),
            fixed_tokens=rng.choice([0.0, budget / 20]),
            patch_tokens=rng.choice([0.0, 2.0]),
        ),
        max_patches=10 if patches else 0,
        balance=rng.choice(list(BalanceScope)),
        assignment=Assignment.FIXED if own_shards else rng.choice(list(Assignment)),
        shards=shards,
        exchange=rng.choice(list(ExchangeMode)),
        draw_lead=rng.choice([None, 0, 3]),
    )
    stop = None
    if rng.random() < 0.3:
        closing = rng.choice([None, rng.randrange(num_replicas)])
        stop = Stop(step=rng.randint(0, max(1, total // batch)), closing=closing)
    world = World(config=config, lengths=lengths, patches=patches, epochs=epoch_of)
    return world, stop


def run_world(world: World, stop: Stop | None = None) -> Tally:
    """Run a world to its end and check it; a stop must change nothing.

    Raises:
        AssertionError: one of the planner's own checks failed, or the run does not end.
    """
    planners = world.planners()
    steps: list[list[StepPlan]] = []
    drained_at: int | None = None
    was_closed = False
    while not planners[0].is_finished:
        assert len(steps) < _MOST_STEPS, "the run does not end"
        if stop is not None and len(steps) == stop.step:
            states = [planner.state_dict() for planner in planners]
            if stop.closing is not None:
                _close(planners, world, replica=stop.closing)
                was_closed = True
            planners = _resume(states, world)
            stop = None
            continue
        steps.append(plan_step(planners, world.lengths, patches=world.patches))
        if drained_at is None and planners[0].phase is not Phase.RUNNING:
            drained_at = len(steps) - 1
    assert all(planner.is_finished for planner in planners), "not all replicas have finished"
    tally = tally_run(world, steps, drained_at=drained_at)
    tally.closed_early += was_closed
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worlds asked for, print and write the tally; return the exit status."""
    return fuzz_command(
        argv,
        name="odb_megatron.testing.fuzz",
        description=__doc__.split("\n", 1)[0],
        unit="world",
        run_all=_run_all,
        cases=_CASES,
    )


def _run_all(numbers: range, *, seed: int, processes: int) -> tuple[Tally, Failures]:
    parts = [(numbers[at : at + _BATCH], seed) for at in range(0, len(numbers), _BATCH)]
    return run_parts(_run_part, parts, total=Tally(), processes=processes, unit="world")


def _run_part(part: tuple[range, int]) -> tuple[Tally, Failures]:
    numbers, seed = part
    total, failures = Tally(), []
    for number in numbers:
        try:
            tally = run_world(*random_world(random.Random(f"{seed} {number}")))
        except Exception:  # the fuzzer goes on; the world is named and its error shown
            what = traceback.format_exc(limit=-3)
            tally = Tally(misaligned=1)
        else:
            what = str(asdict(tally)) if tally.num_violations else ""
        total.add(tally)
        if what:
            failures.append({"world": number, "what": what})
    return total, failures


def _close(planners: Sequence[ReplicaPlanner], world: World, *, replica: int) -> None:
    """Close one replica: every planner must stop within the step, and drop it."""
    planners[replica].close()
    try:
        plan_step(planners, world.lengths, patches=world.patches)
    except LoaderClosedError:
        return
    raise AssertionError("a step was planned after a replica had closed")


def _resume(states: Sequence[dict[str, object]], world: World) -> list[ReplicaPlanner]:
    """Return new planners that go on from the states of others, as a file would hold them."""
    resumed = world.planners()
    for planner, saved in zip(resumed, states, strict=True):
        state = json.loads(json.dumps(saved))
        planner.load_state_dict(state, fetched=world.fetched(state))
    return resumed


def _shard_size(rng: random.Random) -> int:
    """Return 0 to 200, small ones more often."""
    return 0 if rng.random() < 0.2 else round(math.exp(rng.uniform(0.0, math.log(200))))


def _length(rng: random.Random, longest: int) -> int:
    return max(1, min(longest, round(rng.lognormvariate(math.log(max(1, longest / 3)), 1.0))))


if __name__ == "__main__":
    sys.exit(main())
