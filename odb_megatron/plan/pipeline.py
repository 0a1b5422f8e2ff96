"""How long a pipeline takes for micro-batches that differ in cost, and the order that takes least.

Pure, and integers only. The schedules are Megatron's 1F1B and interleaved ones (schedules.py
`get_pp_rank_microbatches`, `get_schedule_table`, core 0.19.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.step_planner import StepPlan

__all__ = ["Pipeline", "best_order", "in_best_order", "stage_queue", "step_times"]

Integers = npt.NDArray[np.int64]

_MAX_ROUNDS = 8  # of exchanges; most orders of few micro-batches are at their best after four
_MAX_OPERATIONS = 1 << 19  # of a round, passes times orders: about ten milliseconds
_MAX_PEAKS = 64  # orders to begin with
_MAX_SEARCHED = 128  # micro-batches; an order of more is one of those it begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a model is cut into stages.

    Attributes:
        stages: pipeline-parallel size.
        chunks: virtual stages of each.
        group: micro-batches that a virtual stage takes in turn; 0 for the number of stages.
    """

    stages: int = 1
    chunks: int = 1
    group: int = 0

    @property
    def count_multiple(self) -> int:
        """What M must be a multiple of: the interleaved schedule's group of micro-batches."""
        return (self.group or self.stages) if self.chunks > 1 else 1


def step_times(costs: npt.ArrayLike, pipeline: Pipeline) -> Integers:
    """Return the time that each order of micro-batches takes, int64 [orders].

    A micro-batch of cost c takes c for a forward pass of a virtual stage, 2 c for a backward pass,
    so that a stage which never waits takes 3 * chunks * the sum of costs.

    Args:
        costs: of the micro-batches in each order, int64 [orders, micro-batches].
    """
    units = np.ascontiguousarray(np.asarray(costs, dtype=np.int64).T)
    ends: list[Integers] = []
    for before, needed, micro_batch, weight in _passes(len(units), pipeline):
        end = weight * units[micro_batch]
        if before >= 0 and needed >= 0:
            end += np.maximum(ends[before], ends[needed])
        elif max(before, needed) >= 0:
            end += ends[max(before, needed)]
        ends.append(end)
    times: Integers = np.max(ends, axis=0)
    return times


def best_order(costs: npt.ArrayLike, pipeline: Pipeline) -> list[int]:
    """Return the order of micro-batches of these costs, int64 [micro-batches], that takes least.

    The best of those that have the costliest at some place and cheaper ones the farther from it
    (neighbours alike, since a stage works at one while the next works at the other; cheap ones at
    an end, where stages wait), improved by exchanging two, or moving one, as long as that helps.
    """
    given = np.asarray(costs, dtype=np.int64)
    num = len(given)
    if num < 2 or given.max() - given.min() <= given.max() // 128:  # nothing to gain
        return list(range(num))
    places = np.arange(num)
    peaks = places[:: 1 + num // _MAX_PEAKS, None]
    starts = np.empty((len(peaks), num), dtype=np.int64)
    nearest = np.argsort(abs(places - peaks), axis=1, kind="stable")
    np.put_along_axis(starts, nearest, np.argsort(-given, kind="stable")[None], axis=1)
    starts = np.concatenate([places[None], starts])
    times = step_times(given[starts], pipeline)
    ranks = np.argsort(times, kind="stable")
    found, best = starts[ranks[0]], int(times[ranks[0]])
    # Where there are too many neighbours for a round, each round tries others of them.
    stride = 1 + 2 * num**3 * pipeline.stages * pipeline.chunks // _MAX_OPERATIONS
    for rank in ranks[: 3 if num <= 8 else int(num <= _MAX_SEARCHED)]:
        order, time = starts[rank], int(times[rank])
        for turn in range(_MAX_ROUNDS):
            others = order[_neighbours(num)[turn % stride :: stride]]
            others_times = step_times(given[others], pipeline)
            at = int(others_times.argmin())
            if others_times[at] < time:
                order, time = others[at], int(others_times[at])
            elif stride == 1:
                break
        if time < best:
            found, best = order, time
    return list(map(int, found))


def in_best_order(plan: StepPlan, pipeline: Pipeline) -> StepPlan:
    """Return the same plan with its micro-batches in the order in which the pipeline idles least.

    One order for all replicas: those that meet in a micro-batch still do.
    """
    if pipeline.stages == 1:
        return plan
    costs = np.array(plan.loads, dtype=np.int64).max(axis=0) + plan.overhead
    order = best_order(costs, pipeline)
    return replace(
        plan,
        micro_batches=tuple(tuple(row[at] for at in order) for row in plan.micro_batches),
        loads=tuple(tuple(row[at] for at in order) for row in plan.loads),
    )


@lru_cache(maxsize=16)
def _neighbours(num: int) -> Integers:
    """Return the orders that differ from 0, 1, ... by an exchange or a move [orders, num]."""
    given, found = np.arange(num), []
    for a, b in combinations(range(num), 2):
        swapped = given.copy()
        swapped[[a, b]] = b, a
        found.append(swapped)
        if b > a + 1:
            found.append(np.insert(np.delete(given, a), b, a))
            found.append(np.insert(np.delete(given, b), a, b))
    return np.stack(found)


def stage_queue(num: int, pipeline: Pipeline, stage: int) -> list[tuple[bool, int, int]]:
    """Return (is forward, micro-batch, virtual stage) of each pass of a stage, in order."""
    chunks, group = pipeline.chunks, pipeline.group or pipeline.stages
    table = [
        (micro_batch, chunk)
        for first in range(0, num, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, num))
    ]
    behind = pipeline.stages - stage - 1
    warmup = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * group, len(table))
    forward = [(True, *one) for one in table]
    backward = [(False, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    queue = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        queue += pair
    return queue + backward[len(table) - warmup :]


@lru_cache(maxsize=64)
def _passes(num: int, pipeline: Pipeline) -> tuple[tuple[int, int, int, int], ...]:
    """Return (pass before it on its stage, pass it waits for, micro-batch, weight) of each pass.

    Passes are named by their place, -1 for none; each stands behind those it needs.
    """
    stages, deepest = pipeline.stages, pipeline.stages * pipeline.chunks - 1
    queues = [iter(stage_queue(num, pipeline, stage)) for stage in range(stages)]
    heads = [next(queue, None) for queue in queues]
    places: dict[tuple[bool, int, int], int] = {}
    before = [-1] * stages
    passes: list[tuple[int, int, int, int]] = []
    while any(heads):
        for stage, queue in enumerate(queues):
            while head := heads[stage]:
                is_forward, micro_batch, chunk = head
                depth = chunk * stages + stage
                if is_forward or depth == deepest:
                    source = (True, micro_batch, depth - is_forward)
                else:
                    source = (False, micro_batch, depth + 1)
                needs = source[2] >= 0
                if needs and source not in places:
                    break
                number = len(passes)
                needed = places[source] if needs else -1
                passes.append((before[stage], needed, micro_batch, 1 if is_forward else 2))
                before[stage] = places[is_forward, micro_batch, depth] = number
                heads[stage] = next(queue, None)
    return tuple(passes)
