"""The order of micro-batches in a pipeline, against Megatron's schedules and all other orders."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from odb_megatron.plan.pipeline import Pipeline, best_order, in_best_order, stage_queue, step_times
from odb_megatron.plan.step_planner import plan_step

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
    """Of all orders of up to 7 micro-batches."""
    for seed, num in enumerate((2, 3, 4, 5, 6, 6, 7)):
        if pipeline.chunks > 1 and num % (pipeline.group or pipeline.stages):
            continue
        costs = _costs(num, cv, seed)
        every = step_times(costs[np.array(list(permutations(range(num))))], pipeline)
        order = best_order(costs, pipeline)
        assert sorted(order) == list(range(num))
        assert step_times([costs[order]], pipeline)[0] <= 1.03 * every.min()


def test_long_steps_of_plans() -> None:
    """PP 8 and 64 micro-batches of samples of CV 1: near what a stage that never waits takes."""
    pipeline = Pipeline(stages=8)
    lengths = np.minimum(_costs(8 * 64 * 4, 1.0, 3), 8192)
    plan = plan_step(lengths, num_replicas=8, token_budget=8192, sync="microbatch")
    ordered = in_best_order(plan, pipeline)
    costs = np.array(ordered.loads).max(axis=0) + plan.overhead
    bound = 3 * (costs.sum() + 7 * costs.min())
    assert step_times([costs], pipeline)[0] <= 1.05 * bound
    for before, after in zip(plan.micro_batches, ordered.micro_batches, strict=True):
        assert sorted(before) == sorted(after)
    together = {frozenset(column) for column in zip(*plan.micro_batches, strict=True)}
    assert {frozenset(column) for column in zip(*ordered.micro_batches, strict=True)} == together
