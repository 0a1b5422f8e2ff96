"""Ways to form batches that the GPU benchmark compares, as steps of stream positions.

Pure: lengths in, positions out, from the real planners and from the rivals of the simulator. Must
not time or score anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_megatron.plan.policy import PolicyName
from odb_megatron.simulation.drive import run_planners
from odb_megatron.simulation.rivals.padded import sorted_aligned
from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.score import steady_steps
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["ARMS", "ArmSteps", "MicroBatch", "StepBatches", "arm_steps", "num_samples_needed"]

MicroBatch = tuple[int, ...]
"""Stream positions of a micro-batch; none if idle."""

StepBatches = tuple[tuple[MicroBatch, ...], ...]
"""`step[replica][m]` is that replica's micro-batch m."""

ARMS = {
    "standard": "padded to the longest of the micro-batch; token budget // context samples each, "
    "so that the worst case fits the budget",
    "standard_mean": "padded to the longest of the micro-batch; token budget // mean length "
    "samples each, so that a micro-batch may exceed the budget",
    "sorted": "padded, all lengths known beforehand (an offline oracle): like lengths together, "
    "longest * number within the budget, neighbours on the replicas",
    "odb_samples": "ODB, policy samples",
    "odb_cost": "ODB, policy cost",
}

_SPARE_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSteps:
    """Consecutive steps of one arm, in the steady part of its run.

    Attributes:
        is_padded: each sample is computed at the length of its micro-batch's longest.
        steps: at least as many as were asked for.
        exchange: what `--odb-exchange auto` chose and why, where it did.
    """

    is_padded: bool
    steps: Sequence[StepBatches]
    exchange: str = ""


def num_samples_needed(num_steps: int, setting: Setting) -> int:
    """Return the length of a stream in which every arm has so many steady steps."""
    depth = setting.window * setting.num_replicas
    return setting.global_batch_size * (num_steps + _SPARE_STEPS) + 2 * depth


def arm_steps(
    arm: str, stream: Stream, setting: Setting, *, context: int, num_steps: int
) -> ArmSteps:
    """Form the batches of one arm.

    Args:
        arm: a name of `ARMS`.
        stream: the samples.
        setting: topology, limits and cost model.
        context: longest possible sample.
        num_steps: steps wanted.

    Raises:
        ValueError: the stream is too short for so many steps.
    """
    schedule = _schedule(arm, stream, setting, context)
    first, last = 0, len(schedule) - 1  # the last step may be a part of one
    if arm == "odb_cost":
        first, last = steady_steps(schedule, stream, setting)
    if last - first < num_steps:
        raise ValueError(
            f"arm {arm} has {last - first} steady steps of {len(stream)} samples, {num_steps} are "
            "wanted: lower --rounds, or --global-batch-size"
        )
    return ArmSteps(
        is_padded=schedule.is_padded,
        steps=_nested(schedule.within(first, first + num_steps)),
        exchange=schedule.exchange,
    )


def _schedule(arm: str, stream: Stream, setting: Setting, context: int) -> Schedule:
    if arm == "sorted":
        return sorted_aligned(stream, setting)
    if arm.startswith("odb_"):
        return run_planners(PolicyName(arm.removeprefix("odb_")), stream, setting)
    typical = context if arm == "standard" else float(stream.lengths.mean())
    size = max(1, int(setting.token_budget // typical))
    positions = range(len(stream) // size * size)
    batches = [positions[start : start + size] for start in range(0, len(positions), size)]
    steps = rectangular(
        batches, num_replicas=setting.num_replicas, count=setting.num_micro_batches(size)
    )
    return Schedule.build(steps, num_replicas=setting.num_replicas, is_padded=True)


def _nested(schedule: Schedule) -> tuple[StepBatches, ...]:
    parts = [
        tuple(part.tolist())
        for part in np.split(schedule.positions, schedule.sample_starts[1:-1].tolist())
    ]
    steps, at = [], 0
    for count in schedule.counts.tolist():
        replicas = []
        for _ in range(schedule.num_replicas):
            replicas.append(tuple(parts[at : at + count]))
            at += count
        steps.append(tuple(replicas))
    return tuple(steps)
