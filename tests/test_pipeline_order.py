"""The order of micro-batches in a pipeline, against Megatron's schedules and all other orders."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from odb_megatron.plan.pipeline import Pipeline, best_order, in_best_order, stage_queue, step_times
from odb_megatron.plan.step_planner import plan_step
from odb_megatron.report.schedules import shares_model

PIPELINES = [
    Pipeline(stages=2),
    Pipeline(stages=4),
    Pipeline(stages=8),
    Pipeline(stages=2, chunks=2),
    Pipeline(stages=4, chunks=2),
    Pipeline(stages=2, chunks=3, group=4),
]


def _costs(num: int, cv: float, seed: int) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + cv * cv))
    return (np.random.default_rng(seed).lognormal(0, sigma, num) * 1000).astype(np.int64) + 20


@pytest.mark.parametrize(
    ("pipeline", "costs", "time"),
    [
        (Pipeline(), [1, 5], 18),
        # Forward 1, 1 of the first stage; the second stage has 3 + 3 behind the first forward pass.
        (Pipeline(stages=2), [1, 1], 1 + 6 + 2),
        (Pipeline(stages=4), [1, 1, 1, 1], 3 + 12 + 6),
        # The costly one last: its way there and back is waited for.
        (Pipeline(stages=2), [1, 5], 6 + 15 + 10),
        (Pipeline(stages=2, chunks=2), [1, 1], 1 + 12 + 2),
    ],
)
def test_times_by_hand(pipeline: Pipeline, costs: list[int], time: int) -> None:
    assert step_times([costs], pipeline).tolist() == [time]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("num", [1, 3, 4, 8, 13])
def test_each_stage_runs_what_megatrons_does(pipeline: Pipeline, num: int) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    chunks, group = pipeline.chunks, pipeline.group or pipeline.stages
    if chunks > 1 and num % group and num % group < pipeline.stages:
        pytest.skip("Megatron refuses this number of micro-batches")
    table = schedules.get_schedule_table(num, chunks, group if chunks > 1 else num)
    for stage in range(pipeline.stages):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pipeline.stages, rank=lambda at=stage: at),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        total, _, warmup, left = schedules.get_pp_rank_microbatches(
            num, chunks, group, p2p_communicator=communicator
        )
        assert total == len(table)
        backward = [(False, at, chunks - 1 - chunk) for at, chunk in table]
        expected = [(True, *one) for one in table[:warmup]]
        for at in range(left):
            expected += [(True, *table[warmup + at]), backward[at]]
        assert stage_queue(num, pipeline, stage) == expected + backward[left:]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("cv", [0.2, 1.0])
def test_an_order_is_as_good_as_any(pipeline: Pipeline, cv: float) -> None:
    """Of all orders of up to 8 micro-batches."""
    for seed, num in enumerate((2, 3, 4, 5, 6, 7, 8)):
        if pipeline.chunks > 1 and num % (pipeline.group or pipeline.stages):
            continue
        costs = _costs(num, cv, seed)
        every = step_times(costs[np.array(list(permutations(range(num))))], pipeline)
        order = best_order(costs, pipeline)
        assert sorted(order) == list(range(num))
        assert step_times([costs[order]], pipeline)[0] <= 1.03 * every.min()


def _least_time(costs: np.ndarray, stages: int) -> int:
    """Return what no order of 4 * stages - 1 or more micro-batches takes less than under 1F1B.

    From the forward to the backward pass of one of cost c the first stage has 3 * stages * c, and
    works at stages - 1 forward and as many backward passes of others. Two such times are apart and
    have different others: of the costliest, and of either the first or the last.
    """
    most, *others, least = np.sort(costs)[::-1].tolist()
    behind = stages - 1
    travel = 3 * behind * (most + least) - 2 * sum(others[: 2 * behind])
    travel -= sum(others[2 * behind : 3 * behind])
    return int(3 * costs.sum() + max(3 * behind * least, travel))


def test_no_order_takes_less_than_the_least_time() -> None:
    """The bound below is one."""
    for cv in (0.3, 1.0, 3.0):
        costs = _costs(7, cv, 1)
        every = step_times(costs[np.array(list(permutations(range(7))))], Pipeline(stages=2))
        assert every.min() >= _least_time(costs, 2)


@pytest.mark.parametrize("seed", range(3))
def test_long_steps_of_plans(seed: int) -> None:
    """PP 8 and 64 micro-batches of samples of CV 1, the slowest replica's."""
    pipeline = Pipeline(stages=8)
    lengths = np.minimum(_costs(8 * 64 * 11, 1.0, seed) // 2, 8192)
    cost = shares_model(lengths, token_budget=8192)
    plan = plan_step(lengths, num_replicas=8, token_budget=8192, sync="microbatch", cost=cost)
    assert plan.num_micro_batches in range(60, 70)
    ordered = in_best_order(plan, pipeline)
    costs = np.array(ordered.loads) + plan.overhead
    bound = max(_least_time(row, 8) for row in costs)
    assert step_times(costs, pipeline).max() <= 1.05 * bound
    for before, after in zip(plan.micro_batches, ordered.micro_batches, strict=True):
        assert sorted(before) == sorted(after)
    together = {frozenset(column) for column in zip(*plan.micro_batches, strict=True)}
    assert {frozenset(column) for column in zip(*ordered.micro_batches, strict=True)} == together
