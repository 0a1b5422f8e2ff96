"""Ways to form batches that the GPU benchmark compares, as steps of stream positions.

Pure: lengths in, positions out, from the real planner and from the rivals of the simulator. Must
not time or score anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_megatron.simulation.schedules import (
    Schedule,
    Setting,
    Stream,
    odb,
    sorted_buckets,
    steps_like,
)

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
    "odb": "ODB",
}

_SPARE_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSteps:
    """Consecutive steps of one arm.

    Attributes:
        is_padded: each sample is computed at the length of its micro-batch's longest.
        steps: at least as many as were asked for.
    """

    is_padded: bool
    steps: Sequence[StepBatches]


def num_samples_needed(num_steps: int, setting: Setting) -> int:
    """Return the length of a stream in which every arm has so many steps."""
    return setting.global_batch_size * (num_steps + _SPARE_STEPS)


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
    most = len(schedule) - 1  # the last step may be a part of one
    if most < num_steps:
        raise ValueError(
            f"arm {arm} has {most} steps of {len(stream)} samples, {num_steps} are wanted: lower "
            "--rounds, or --global-batch-size"
        )
    steps = [schedule.step(at) for at in range(num_steps)]
    return ArmSteps(
        is_padded=schedule.is_padded,
        steps=[tuple(tuple(map(tuple, replica)) for replica in step) for step in steps],
    )


def _schedule(arm: str, stream: Stream, setting: Setting, context: int) -> Schedule:
    if arm == "sorted":
        return sorted_buckets(stream, setting)
    if arm == "odb":
        return odb(stream, setting)
    typical = context if arm == "standard" else float(stream.lengths.mean())
    size = max(1, int(setting.token_budget // typical))
    positions = range(len(stream) // size * size)
    batches = [positions[start : start + size] for start in range(0, len(positions), size)]
    count = max(1, round(setting.global_batch_size / (size * setting.num_replicas)))
    return Schedule.of_steps(steps_like(batches, setting.num_replicas, count=count), is_padded=True)
