"""Fuzzer of resuming: many random runs, killed and resumed at random steps.

    python -m odb_megatron.testing.resume_fuzz --trials 1000 --seed 0 --json resume.json

Each trial is one of the planner fuzzer's worlds, planned once without a stop and once with one to
three, at each of which every replica's state goes through JSON text into a new planner while the
old ones plan on in vain. With the same replicas, every step that follows must equal the one of the
uninterrupted run, all of it; with others (or another window or batch size) every sample must still
be emitted exactly once, and exactly the requested number be consumed. Exit status 1 when a run
differed or, in 100 trials or more, a case never occurred. `--first N --trials 1` repeats trial N.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.elastic import elastic_state
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import PolicyName
from odb_megatron.testing.fuzz import random_world
from odb_megatron.testing.fuzz_command import Failures, fuzz_command, run_parts
from odb_megatron.testing.resume_checks import (
    Steps,
    check_coverage,
    check_delay,
    check_equal,
    check_same_samples,
)
from odb_megatron.testing.worlds import World, plan_step

__all__ = ["Kill", "ResumeTally", "Trial", "main", "random_trial", "run_trial"]

_MOST_STEPS = 100_000
_BATCH = 20  # trials per task of a worker process


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A point at which the run is killed, and what it goes on with.

    Attributes:
        share: where it is killed, in thousandths of the uninterrupted run's steps.
        num_replicas: replicas that go on; None for the same, with which steps must be the same.
        window: their window, where it is another.
        global_batch_size: their batch size, where it is another.
        planned_ahead: steps that the killed planners had planned beyond the state.
    """

    share: int
    num_replicas: int | None = None
    window: int | None = None
    global_batch_size: int | None = None
    planned_ahead: int = 0

    @property
    def changes(self) -> bool:
        """Whether the steps that follow may be others."""
        return any((self.num_replicas, self.window, self.global_batch_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run, its kills, and the step (in thousandths) at which its cost model is decided."""

    world: World
    kills: tuple[Kill, ...]
    calibrated_at: int | None = None


@dataclass(slots=True, kw_only=True)
class ResumeTally:
    """What was found (`differences` must be 0), and cases that occurred.

    Attributes:
        differences: trials in which something differed, was lost or came twice.
        same_topology: resumes with the same replicas.
        elastic: resumes with another number of them.
        reshaped: resumes with another window or batch size.
        mid_window: resumes with samples in a window.
        in_flight: resumes with positions assigned and not drawn.
        draining: resumes of a run that had begun to drain.
        second_epoch: resumes with samples of one epoch left while the next had begun.
        resumed_twice: runs resumed more than once.
        calibrated: resumes after a calibration.
        refused: runs with shards of their own or fixed shards that refused other replicas.
        quota: resumes of runs that end within an epoch.
        left_out: resumes of runs in which positions emit nothing.
    """

    differences: int = 0
    same_topology: int = 0
    elastic: int = 0
    reshaped: int = 0
    mid_window: int = 0
    in_flight: int = 0
    draining: int = 0
    second_epoch: int = 0
    resumed_twice: int = 0
    calibrated: int = 0
    refused: int = 0
    quota: int = 0
    left_out: int = 0

    def add(self, other: ResumeTally) -> None:
        """Add another tally to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def random_trial(rng: random.Random) -> Trial:
    """Return a trial; a function of the generator's state alone."""
    world, _ = random_world(rng)
    while not any(world.lengths):
        world, _ = random_world(rng)
    kills = []
    for share in sorted(rng.randrange(1001) for _ in range(rng.choice([1, 1, 1, 2, 3]))):
        kind = rng.choice(["same", "same", "same", "elastic", "elastic", "window", "batch"])
        others = [n for n in (1, 2, 3, 4, 8, 16) if n != world.config.num_replicas]
        batch = rng.randint(1, 2 * world.config.global_batch_size) if kind == "batch" else None
        kills.append(
            Kill(
                share=share,
                num_replicas=rng.choice(others) if kind == "elastic" else None,
                window=rng.randint(1, 64) if kind == "window" else None,
                global_batch_size=batch,
                planned_ahead=rng.randint(0, 3),
            )
        )
    calibrated_at = rng.randrange(1001) if rng.random() < 0.3 else None
    return Trial(world=world, kills=tuple(kills), calibrated_at=calibrated_at)


def run_trial(trial: Trial) -> ResumeTally:
    """Run a trial.

    Raises:
        AssertionError: the interrupted run differs from the other, or loses samples; with what.
    """
    whole, calibrated_step = _uninterrupted(trial)
    tally = ResumeTally()
    world, planners = trial.world, trial.world.planners()
    steps: Steps = []
    drawn: list[list[int]] = [[] for _ in planners]
    first, is_fresh = 0, world.config.policy is PolicyName.COST  # windows were empty then
    is_same, is_calibrated, num_resumed = True, False, 0
    kills = [(kill.share * len(whole) // 1000, kill) for kill in trial.kills]
    while True:
        if not is_calibrated and len(steps) == calibrated_step:
            is_calibrated = True
            _calibrate(planners)
        while kills and kills[0][0] <= len(steps):
            _, kill = kills.pop(0)
            texts = [json.dumps(planner.state_dict()) for planner in planners]
            _plan_in_vain(planners, world, most=kill.planned_ahead)
            _count(tally, [json.loads(text) for text in texts], world, whole)
            if is_fresh:
                check_delay(world, steps[first:], drawn)
            world, planners, is_changed = _resumed(texts, world, kill, tally)
            is_same = is_same and not is_changed
            is_fresh = is_changed and bool(kill.num_replicas)
            is_fresh = is_fresh and world.config.policy is PolicyName.COST
            drawn, first = [[] for _ in planners], len(steps)
            num_resumed += 1
        if planners[0].is_finished:
            break
        assert len(steps) < _MOST_STEPS, "the run does not end"
        steps.append(plan_step(planners, world.lengths, patches=world.patches, drawn=drawn))
        if is_same:
            assert len(steps) <= len(whole), f"step {len(steps) - 1} is beyond the run's end"
            check_equal(steps[-1], whole[len(steps) - 1])
        elif _composes_alike(world, trial.world):
            check_same_samples(steps[-1], whole[len(steps) - 1])
    assert all(planner.is_finished for planner in planners), "not all replicas have finished"
    check_coverage(trial.world, steps)
    if is_fresh:
        check_delay(world, steps[first:], drawn)
    if is_same:
        assert len(steps) == len(whole), f"{len(steps)} steps instead of {len(whole)}"
    tally.resumed_twice += num_resumed > 1
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials asked for, print and write the tally; return the exit status."""
    return fuzz_command(
        argv,
        name="odb_megatron.testing.resume_fuzz",
        description=__doc__.split("\n", 1)[0],
        unit="trial",
        run_all=_run_all,
        cases=[field.name for field in fields(ResumeTally) if field.name != "differences"],
    )


def _run_all(numbers: range, *, seed: int, processes: int) -> tuple[ResumeTally, Failures]:
    parts = [(numbers[at : at + _BATCH], seed) for at in range(0, len(numbers), _BATCH)]
    return run_parts(_run_part, parts, total=ResumeTally(), processes=processes, unit="trial")


def _run_part(part: tuple[range, int]) -> tuple[ResumeTally, Failures]:
    numbers, seed = part
    total, failures = ResumeTally(), []
    for number in numbers:
        try:
            total.add(run_trial(random_trial(random.Random(f"resume {seed} {number}"))))
        except Exception:  # the fuzzer goes on; the trial is named and its error shown
            total.differences += 1
            failures.append({"trial": number, "what": traceback.format_exc(limit=-3)})
    return total, failures


def _uninterrupted(trial: Trial) -> tuple[Steps, int | None]:
    """Return the steps, and the one before which the cost model is decided, if one is."""
    world = trial.world
    steps = world.run()
    if trial.calibrated_at is None or world.config.policy is PolicyName.SAMPLES:
        return steps, None
    at = trial.calibrated_at * len(steps) // 1000
    planners = world.planners()
    calibrated: Steps = []
    while not planners[0].is_finished:
        if len(calibrated) == at:
            _calibrate(planners)
        calibrated.append(plan_step(planners, world.lengths, patches=world.patches))
    return calibrated, at


def _calibrate(planners: Sequence[ReplicaPlanner]) -> None:
    """Put another cost model in force, as `--odb-cost auto` does between two steps."""
    budget = planners[0].config.token_budget
    cost = CostModel.from_ratios(quadratic=3 / budget, fixed_tokens=budget / 10)
    for planner in planners:
        planner.set_cost(cost, linear_ps=1_000_000)


def _plan_in_vain(planners: Sequence[ReplicaPlanner], world: World, *, most: int) -> None:
    """Let planners go on after their state was taken: it must not change, and be lost."""
    for _ in range(most):
        if planners[0].is_finished:
            return
        plan_step(planners, world.lengths, patches=world.patches)


def _resumed(
    texts: Sequence[str], world: World, kill: Kill, tally: ResumeTally
) -> tuple[World, list[ReplicaPlanner], bool]:
    """Return the world and planners that go on, and whether they are as the kill wants them."""
    states: list[dict[str, Any]] = [json.loads(text) for text in texts]
    changed = _changed(world, kill)
    is_cost = world.config.policy is PolicyName.COST
    if kill.num_replicas and is_cost:
        try:
            others = [elastic_state(states, changed.config, replica=r) for r in _replicas(changed)]
        except ValueError as error:
            if world.config.is_online or "cannot be dealt anew" not in str(error):
                raise
            tally.refused += 1
            changed, others = world, states
        else:
            tally.elastic += 1
            assert sum(len(s["upcoming"]) for s in others) == sum(  # type: ignore[arg-type, misc]
                len(s["upcoming"]) + len(s["window"]) for s in states
            )
            others = [json.loads(json.dumps(state)) for state in others]
    elif kill.num_replicas:  # Megatron's own count is all that the policy samples needs
        tally.elastic += 1
        changed = replace(changed, consumed=states[0]["consumed"])
        return changed, changed.planners(), True
    else:
        others = states
        tally.reshaped += kill.changes
        tally.same_topology += not kill.changes
    planners = changed.planners()
    for planner, state in zip(planners, others, strict=True):
        planner.load_state_dict(state, fetched=changed.fetched(state))
        if not kill.changes and planner.state_dict() != state:
            raise AssertionError(f"state {planner.state_dict()} instead of {state}")
    return replace(changed, consumed=world.consumed), planners, changed is not world


def _changed(world: World, kill: Kill) -> World:
    config = world.config
    replicas = kill.num_replicas or config.num_replicas
    batch = kill.global_batch_size or config.global_batch_size
    window = max(kill.window or config.window, -(-batch // replicas))
    if not kill.changes:
        return world
    shards = config.shards if replicas == config.num_replicas else ()
    config = replace(
        config, num_replicas=replicas, global_batch_size=batch, window=window, shards=shards
    )
    return replace(world, config=config)


def _replicas(world: World) -> range:
    return range(world.config.num_replicas)


def _composes_alike(world: World, other: World) -> bool:
    """Whether steps have the samples of the other's, whatever the replicas."""
    is_samples = world.config.policy is PolicyName.SAMPLES
    return is_samples and world.config.global_batch_size == other.config.global_batch_size


def _count(tally: ResumeTally, states: Sequence[Any], world: World, whole: Steps) -> None:
    """Count the cases of one resume."""
    held = [row[0] for state in states for row in state["window"]]
    upcoming = [position for state in states for position in state["upcoming"]]
    is_over = states[0]["consumed"] >= world.config.total
    tally.mid_window += bool(held)
    tally.in_flight += bool(upcoming)
    tally.draining += states[0]["deadline"] >= 0 and not is_over
    tally.calibrated += states[0]["cost"][-1] > 0
    tally.left_out += any(plans[0].totals.num_left_out for plans in whole)
    epochs = world.epochs
    if epochs and not world.config.shards:
        tally.quota += epochs.count(epochs[-1]) < epochs.count(0)
        last = min(max(state["cursor"] for state in states), len(epochs)) - 1
        oldest = min((epochs[position] for position in held + upcoming), default=None)
        tally.second_epoch += oldest is not None and oldest < epochs[last]


if __name__ == "__main__":
    sys.exit(main())
