"""What each way to form steps makes of the samples, by the simulator's planner and rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_megatron.simulation.schedules import POLICIES, Schedule, Setting, Stream, Times, measure

__all__ = [
    "ADVISED",
    "METHODS",
    "ODB",
    "RIVALS",
    "Method",
    "Run",
    "fixed_batch_like",
    "predict",
    "replica_costs",
    "run_method",
    "simulable",
]

ODB, ADVISED = "odb", "advised"
METHODS = {
    "standard-safe": "the fastest fixed batch whose worst case fits the budget, padded",
    "sorted-bucketed": "32 buckets of like lengths, known beforehand; padded",
    "dp-balanced": "Megatron's dp_balanced: each global batch packed by next fit",
    ODB: "ODB",
    ADVISED: "ODB with the token budget advised",
}
RIVALS = tuple(name for name in METHODS if name not in (ODB, ADVISED))

MAX_PLANNED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Figures of one way to form steps, over the whole simulated run.

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
        rate: work per replica and time; 1.0 without padding, idling or overhead.
        bytes_moved_per_step: payload that replicas send each other.
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
    bytes_moved_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A simulated run: figures, and what pictures need of it."""

    method: Method
    schedule: Schedule
    times: Times
    stream: Stream
    setting: Setting


def simulable(setting: Setting, num_samples: int) -> int:
    """Return how many samples are simulated."""
    return min(num_samples, max(MAX_PLANNED, 2 * setting.global_batch_size))


def predict(
    stream: Stream, setting: Setting, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Run]:
    """Run ODB and its rivals; `progress` is told each name before its turn."""
    runs = {}
    for name in (*RIVALS, ODB):
        progress(name)
        runs[name] = run_method(name, stream, setting)
    return runs


def run_method(name: str, stream: Stream, setting: Setting, *, label: str = "") -> Run:
    """Run and score one of the simulator's policies; `label` is another name for it."""
    schedule = POLICIES[name](stream, setting)
    times = measure(schedule, stream, setting)
    tokens, computed = float(times.tokens.sum()), int(times.computed.sum())
    balances = times.balance_step if setting.sync == "step" else times.balance_microbatch
    spent = times.step if setting.num_stages == 1 else times.pipeline * setting.num_stages
    counts = schedule.counts
    method = Method(
        name=label or name,
        padding=1 - tokens / computed,
        fill=tokens / (len(schedule.sizes) * setting.token_budget),
        balance=float(balances.mean()),
        micro_batches=(float(counts.mean()), int(counts.min()), int(counts.max())),
        samples_per_step=int(np.count_nonzero(stream.lengths)) / len(schedule),
        num_steps=len(schedule),
        over_budget=int(times.over_budget.sum()),
        rate=float(times.work.sum()) / (float(spent.sum()) * setting.num_replicas),
        bytes_moved_per_step=float(times.bytes_moved.mean()),
    )
    return Run(method=method, schedule=schedule, times=times, stream=stream, setting=setting)


def fixed_batch_like(run: Run, *, token_budget: int) -> Run:
    """Return `standard-safe` on the samples of another run, with its budget or a larger one."""
    budget = max(run.setting.token_budget, token_budget)
    return run_method("standard-safe", run.stream, replace(run.setting, token_budget=budget))


def replica_costs(run: Run, *, step: int) -> Sequence[float]:
    """Return what a step costs each replica, over the mean of the replicas."""
    first, last = run.schedule.micro_batch_starts[step : step + 2]
    own = run.times.costs[first:last].reshape(run.setting.num_replicas, -1).sum(axis=1)
    relative: list[float] = (own / own.mean()).tolist()
    return relative
