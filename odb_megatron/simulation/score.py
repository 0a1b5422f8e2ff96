"""One scoring for every policy: time, balance, fill, composition and delay of a schedule.

Pure. A policy never scores itself; padding is charged where a schedule says it pads. What each
figure means is in `docs/simulator.md`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.policy import BalanceScope
from odb_megatron.simulation.composition import compare_composition
from odb_megatron.simulation.delay import max_delay_steps
from odb_megatron.simulation.pipeline import critical_path
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["Times", "bound_time", "measure_times", "online_time", "score", "steady_steps"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a schedule's steps, in cost units; float64 [steps] each.

    Attributes:
        work: cost of the step's samples at their own lengths.
        tokens: their tokens (int64).
        step: time of the step under the setting's sync.
        pipeline: the slowest replica's 1F1B critical path; None without a pipeline.
        balance_step: mean over largest cost of the replicas.
        balance_microbatch: the same per micro-batch index, weighted by its time.
        computed: tokens computed, padding included (int64).
        over_budget: micro-batches that compute more tokens than the budget (int64).
    """

    work: Floats
    tokens: Integers
    step: Floats
    pipeline: Floats | None
    balance_step: Floats
    balance_microbatch: Floats
    computed: Integers
    over_budget: Integers


def measure_times(schedule: Schedule, stream: Stream, setting: Setting) -> Times:
    """Return the times of all steps of a schedule."""
    lengths, costs = stream.lengths[schedule.positions], stream.costs[schedule.positions]
    starts = schedule.sample_starts
    tokens = _sums(lengths, starts)
    own = _sums(costs, starts)
    computed, charged = tokens, own
    if schedule.is_padded:
        longest = _longest(lengths, starts)
        computed = longest * schedule.sizes
        charged = setting.cost.samples(longest, np.zeros_like(longest)) * schedule.sizes
    spent = (charged + setting.cost.fixed).astype(np.float64)
    over = (computed > setting.token_budget).astype(np.int64)
    bounds = schedule.micro_batch_starts
    steps, pipelines, balances, aligned = [], [], [], []
    for index, count in enumerate(schedule.counts.tolist()):
        part = spent[bounds[index] : bounds[index + 1]].reshape(schedule.num_replicas, count)
        per_replica = part.sum(axis=1)
        slowest, highest = per_replica.max(), part.max(axis=0).sum()
        steps.append(slowest if setting.sync is BalanceScope.STEP else highest)
        balances.append(per_replica.mean() / slowest if slowest else 1.0)
        aligned.append(part.mean(axis=0).sum() / highest if highest else 1.0)
        if setting.num_stages > 1:
            paths = critical_path(
                part, num_stages=setting.num_stages, num_chunks=setting.num_chunks
            )
            pipelines.append(paths.max())
    return Times(
        work=_sums(own, bounds).astype(np.float64),
        tokens=_sums(tokens, bounds),
        step=np.array(steps, dtype=np.float64),
        pipeline=np.array(pipelines, dtype=np.float64) if setting.num_stages > 1 else None,
        balance_step=np.array(balances, dtype=np.float64),
        balance_microbatch=np.array(aligned, dtype=np.float64),
        computed=_sums(computed, bounds),
        over_budget=_sums(over, bounds),
    )


def bound_time(*, work: float, tokens: int, setting: Setting) -> float:
    """Return the time below which no schedule can stay.

    All samples' cost and the fixed price of ceil(tokens / token_budget) micro-batches, the fewest
    that hold them, shared evenly by all replicas.
    """
    fewest = -(-tokens // setting.token_budget)
    return (work + fewest * setting.cost.fixed) / setting.num_replicas


def online_time(stream: Stream, setting: Setting) -> float:
    """Return the time of a run in which replicas wait for each other at its end alone.

    Each position goes to the replica with the least cost so far, before its length is known, and
    stays there: an estimate of what online assignment without exchange can come to, by one greedy
    assignment. A costly sample among the last ones is what it cannot make up for.
    """
    loads = [(0, replica) for replica in range(setting.num_replicas)]
    for cost in stream.costs.tolist():
        load, replica = loads[0]
        heapq.heapreplace(loads, (load + cost, replica))
    largest, _ = max(loads)
    fewest = -(-int(stream.lengths.sum()) // setting.token_budget)
    return largest + fewest * setting.cost.fixed / setting.num_replicas


def steady_steps(schedule: Schedule, stream: Stream, setting: Setting) -> tuple[int, int]:
    """Return the steps (first, last + 1) between the first and the last windows of the run.

    A step counts where all replicas' windows' worth of samples was emitted before it, and is left
    after it.
    """
    depth = setting.window * setting.num_replicas
    ends = np.cumsum(schedule.step_samples)
    first = int(np.searchsorted(ends - schedule.step_samples, depth, side="left"))
    last = int(np.searchsorted(ends, len(stream) - depth, side="right"))
    return (first, last) if last > first else (0, 0)


def score(
    schedule: Schedule, times: Times, stream: Stream, setting: Setting, *, steps: tuple[int, int]
) -> dict[str, float | int | None]:
    """Return the figures of some steps; None for what is not defined there.

    `fraction_of_reachable` and the `_rel` figures compare policies and are added by the caller;
    `max_delay_steps` is that of the whole run.

    Args:
        schedule: the whole run.
        times: of all its steps.
        stream: the samples.
        setting: what the policies have in common.
        steps: first step, and the one after the last.
    """
    first, last = steps
    part = schedule.within(first, last)
    span = slice(first, last)
    tokens, computed = int(times.tokens[span].sum()), int(times.computed[span].sum())
    time, work = float(times.step[span].sum()), float(times.work[span].sum())
    figures: dict[str, float | int | None] = {
        "fraction_of_bound": _over(bound_time(work=work, tokens=tokens, setting=setting), time),
        "samples_per_step": _mean(part.step_samples),
        **compare_composition(
            stream.lengths[part.positions], sizes=part.step_samples, seed=setting.seed
        ),
        "balance_step": _mean(times.balance_step[span]),
        "balance_microbatch": _mean(times.balance_microbatch[span]),
        "fill": _over(tokens, len(part.sizes) * setting.token_budget),
        "padding_fraction": _over(computed - tokens, computed),
        "over_budget": int(times.over_budget[span].sum()),
        "max_delay_steps": max_delay_steps(schedule),
        "mean_M": _mean(part.counts),
        "bytes_moved_per_step": 0.0 if part.bytes_moved is None else _mean(part.bytes_moved),
        "num_steps": len(part),
    }
    if times.pipeline is not None:
        needed = work + len(part.sizes) * setting.cost.fixed
        busy = needed / (schedule.num_replicas * setting.num_stages)
        figures["pipeline_efficiency"] = _over(busy, float(times.pipeline[span].sum()))
    return figures


def _over(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _mean(values: npt.NDArray[np.int64] | Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _sums(values: Integers, starts: Integers) -> Integers:
    total = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)))
    found: Integers = total[starts[1:]] - total[starts[:-1]]
    return found


def _longest(values: Integers, starts: Integers) -> Integers:
    filled = np.flatnonzero(np.diff(starts))
    found = np.zeros(len(starts) - 1, dtype=np.int64)
    if len(filled):
        found[filled] = np.maximum.reduceat(values, starts[filled])
    return found
