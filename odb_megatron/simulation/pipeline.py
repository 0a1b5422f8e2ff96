"""How long a step takes in a pipeline: the critical path of Megatron's 1F1B schedules.

Pure. Stages are alike, transfers are free, and a micro-batch's backward pass takes twice its
forward pass. The order of passes on a stage is that of `forward_backward_pipelining_without_-`
and `_with_interleaving` (megatron-core 0.19.2, `pipeline_parallel/schedules.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["FORWARD_SHARE", "Pass", "critical_path", "stage_order"]

Floats = npt.NDArray[np.float64]

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a micro-batch's time."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage."""

    is_backward: bool
    chunk: int
    micro_batch: int


def stage_order(
    stage: int, *, num_stages: int, num_chunks: int, num_micro_batches: int
) -> list[Pass]:
    """Return the passes of a stage in the order in which it runs them.

    Args:
        stage: 0 is the first.
        num_stages: of the pipeline.
        num_chunks: virtual chunks per stage; with more than one, `num_micro_batches` must be a
            multiple of `num_stages`.
        num_micro_batches: M.
    """
    assert num_chunks == 1 or num_micro_batches % num_stages == 0
    total = num_micro_batches * num_chunks
    if num_chunks == 1:
        warm_up = num_stages - stage - 1
    else:
        warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    warm_up = min(warm_up, total)
    virtual = [
        (chunk, micro_batch)
        for start in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for micro_batch in range(start, min(start + num_stages, num_micro_batches))
    ]
    forward = [Pass(False, chunk, micro_batch) for chunk, micro_batch in virtual]
    backward = [Pass(True, num_chunks - 1 - chunk, micro_batch) for chunk, micro_batch in virtual]
    order = forward[:warm_up]
    for index in range(total - warm_up):
        order += [forward[warm_up + index], backward[index]]
    return order + backward[total - warm_up :]


def critical_path(times: Floats, *, num_stages: int, num_chunks: int = 1) -> Floats:
    """Return when each replica's pipeline is done.

    Args:
        times: of each micro-batch over all stages, forward and backward, float64
            [replicas, micro-batches].
        num_stages: of the pipeline.
        num_chunks: see `stage_order`.

    Returns:
        float64 [replicas]
    """
    num_micro_batches = times.shape[1]
    part = times / (num_stages * num_chunks)
    spent = {False: part * FORWARD_SHARE, True: part * (1 - FORWARD_SHARE)}
    clock = [np.zeros(len(times)) for _ in range(num_stages)]
    done: dict[tuple[int, Pass], Floats] = {}
    for stage, task in _evaluation_order(num_stages, num_chunks, num_micro_batches):
        start = clock[stage]
        needed = _needs(stage, task, num_stages, num_chunks)
        if needed is not None:
            start = np.maximum(start, done[needed])
        end = start + spent[task.is_backward][:, task.micro_batch]
        clock[stage] = done[stage, task] = end
    latest: Floats = np.max(clock, axis=0)
    return latest


def _needs(stage: int, task: Pass, num_stages: int, num_chunks: int) -> tuple[int, Pass] | None:
    """Return the pass that must come first, where the stage's own order does not see to it."""
    if task.is_backward:
        if stage < num_stages - 1:
            return stage + 1, task
        return (0, task._replace(chunk=task.chunk + 1)) if task.chunk < num_chunks - 1 else None
    if stage > 0:
        return stage - 1, task
    return (num_stages - 1, task._replace(chunk=task.chunk - 1)) if task.chunk > 0 else None


@lru_cache(maxsize=256)
def _evaluation_order(
    num_stages: int, num_chunks: int, num_micro_batches: int
) -> tuple[tuple[int, Pass], ...]:
    """Return all passes so that each comes after what it needs."""
    orders = [
        stage_order(
            stage,
            num_stages=num_stages,
            num_chunks=num_chunks,
            num_micro_batches=num_micro_batches,
        )
        for stage in range(num_stages)
    ]
    at = [0] * num_stages
    found: list[tuple[int, Pass]] = []
    known: set[tuple[int, Pass]] = set()
    while len(found) < sum(map(len, orders)):
        before = len(found)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                task = order[at[stage]]
                needed = _needs(stage, task, num_stages, num_chunks)
                if needed is not None and needed not in known:
                    break
                found.append((stage, task))
                known.add((stage, task))
                at[stage] += 1
        assert len(found) > before, "the schedule waits for itself"
    return tuple(found)
