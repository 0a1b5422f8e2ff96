"""What each way to form steps makes of the samples, by the simulator's planners, rivals and scores.

Pure. Simulates nothing of its own: it picks what is compared and says it in the words of a training
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from odb_megatron.plan.batch_size import check_batch_size
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.simulation.drive import check_plannable, run_planners
from odb_megatron.simulation.rivals.packed import dp_balanced
from odb_megatron.simulation.rivals.padded import sorted_buckets, standard, standard_safe
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.score import Times, measure_times
from odb_megatron.simulation.setting import Setting, Stream

__all__ = [
    "ADVISED",
    "METHODS",
    "RIVALS",
    "Method",
    "Run",
    "fixed_batch_like",
    "predict",
    "replica_costs",
    "run_policy",
    "simulable",
]

ADVISED = "advised"

RIVALS: dict[str, Callable[[Stream, Setting], Schedule]] = {
    "standard-safe": partial(standard_safe, is_within=True),
    "standard": partial(standard, is_within=True),
    "sorted-bucketed": partial(sorted_buckets, is_within=True),
    "dp-balanced": dp_balanced,
}

METHODS = {
    "standard-safe": "fixed batch whose worst case fits the budget, padded",
    "standard": "fixed batch whose mean fits the budget, padded; overruns it",
    "sorted-bucketed": "32 buckets of like lengths, known beforehand; padded",
    "dp-balanced": "Megatron's dp_balanced: each global batch packed by next fit",
    "samples": "ODB, policy samples",
    "cost": "ODB, policy cost",
    ADVISED: "ODB as advised",
}

_MOST_PLANNED = 1 << 16
_MOST_EXCHANGED = 400_000  # samples x replicas: all replicas' planners run in this one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Figures of one way to form steps; over the whole simulated run.

    Attributes:
        name: of `METHODS`.
        padding: share of the computed tokens that is padding.
        fill: tokens over micro-batches times budget.
        balance: mean over largest cost of the replicas, mean over steps (of each micro-batch index,
            where replicas wait in each).
        micro_batches: per replica and step: mean, least, most.
        samples_per_step: mean; without bad records and dropped samples.
        num_steps: of the simulated samples.
        over_budget: micro-batches that compute more tokens than the budget.
        rate: work per replica and time; 1.0 without padding, idling or fixed prices.
        bytes_moved_per_step: payload handed over between replicas.
        exchange: what `--exchange auto` chose, where it did.
    """

    name: str
    padding: float
    fill: float
    balance: float
    micro_batches: tuple[float, int, int]
    samples_per_step: float
    num_steps: int
    over_budget: int
    rate: float
    bytes_moved_per_step: float = 0.0
    exchange: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A simulated run: figures, and what pictures need of it.

    Attributes:
        method: figures.
        schedule: its steps.
        times: of them.
        stream: the samples.
        setting: what it ran under.
    """

    method: Method
    schedule: Schedule
    times: Times
    stream: Stream
    setting: Setting


def simulable(setting: Setting, num_samples: int) -> int:
    """Return how many samples are simulated: fewer where all replicas plan an exchange."""
    most = _MOST_PLANNED
    if setting.exchange is not ExchangeMode.NONE:
        most = min(most, _MOST_EXCHANGED // setting.num_replicas)
    return min(num_samples, max(most, 2 * setting.global_batch_size))


def predict(
    stream: Stream, setting: Setting, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Run]:
    """Run every method that the setting permits.

    Args:
        stream: the samples, in the order of the training.
        setting: what the methods have in common.
        progress: told each name before its turn.

    Raises:
        ValueError: the planner refuses the setting.
    """
    runs: dict[str, Run] = {}
    for name, make in RIVALS.items():
        progress(name)
        runs[name] = _scored(name, make(stream, setting), stream, setting)
    for policy in PolicyName:
        if policy is PolicyName.COST and setting.global_batch_size < setting.num_replicas:
            continue  # the planner refuses it; advice says why
        progress(policy.value)
        runs[policy.value] = run_policy(policy, stream, setting)
    return runs


def run_policy(policy: PolicyName, stream: Stream, setting: Setting, *, name: str = "") -> Run:
    """Run one of the product's policies; `name` is another than the policy's.

    Raises:
        ValueError: the planner refuses the setting.
    """
    check_batch_size(
        policy,
        global_batch_size=setting.global_batch_size,
        num_replicas=setting.num_replicas,
    )
    check_plannable(policy, stream, setting)
    return _scored(name or policy.value, run_planners(policy, stream, setting), stream, setting)


def fixed_batch_like(run: Run, *, token_budget: int) -> Run:
    """Return `standard-safe` on the samples of another run, with its budget or a larger one.

    Args:
        run: compared with.
        token_budget: that a fixed batch could have as well.
    """
    setting = replace(run.setting, token_budget=max(run.setting.token_budget, token_budget))
    schedule = RIVALS["standard-safe"](run.stream, setting)
    return _scored("standard-safe", schedule, run.stream, setting)


def _scored(name: str, schedule: Schedule, stream: Stream, setting: Setting) -> Run:
    """Score a schedule."""
    times = measure_times(schedule, stream, setting)
    tokens, computed = int(times.tokens.sum()), int(times.computed.sum())
    waits_in_each = setting.sync.value == "microbatch"
    balances = times.balance_microbatch if waits_in_each else times.balance_step
    spent = times.step if times.pipeline is None else times.pipeline * setting.num_stages
    moved = schedule.bytes_moved
    method = Method(
        name=name,
        padding=1 - tokens / computed,
        fill=tokens / (len(schedule.sizes) * setting.token_budget),
        balance=float(balances.mean()),
        micro_batches=(
            float(schedule.counts.mean()),
            int(schedule.counts.min()),
            int(schedule.counts.max()),
        ),
        samples_per_step=int(np.count_nonzero(stream.lengths[schedule.positions])) / len(schedule),
        num_steps=len(schedule),
        over_budget=int(times.over_budget.sum()),
        rate=float(times.work.sum()) / (float(spent.sum()) * setting.num_replicas),
        bytes_moved_per_step=0.0 if moved is None else float(moved.mean()),
        exchange=schedule.exchange,
    )
    return Run(method=method, schedule=schedule, times=times, stream=stream, setting=setting)


def replica_costs(run: Run, *, step: int) -> Sequence[float]:
    """Return what a step costs each replica, over the mean of the replicas."""
    schedule, stream, setting = run.schedule, run.stream, run.setting
    lengths, sizes = stream.lengths[schedule.positions], schedule.sizes
    first, last = schedule.micro_batch_starts[step : step + 2]
    starts = schedule.sample_starts
    costs = []
    for index in range(int(first), int(last)):
        own = lengths[starts[index] : starts[index + 1]]
        if schedule.is_padded and len(own):
            own = np.full_like(own, own.max())
        cost = int(setting.cost.samples(own, np.zeros_like(own)).sum()) if sizes[index] else 0
        costs.append(cost + setting.cost.fixed)
    per_replica = np.array(costs, dtype=np.float64).reshape(setting.num_replicas, -1).sum(axis=1)
    relative: list[float] = (per_replica / per_replica.mean()).tolist()
    return relative
