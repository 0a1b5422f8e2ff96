"""Ways to form batches that the GPU benchmark compares, as steps of stream positions.

Pure: lengths in, positions out, from the real planners and from the rivals of the simulator. Must
not time or score anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_megatron.simulation.schedules import POLICIES, Schedule, Setting, Stream, steps_like

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
    "sorted": "padded, all lengths known beforehand (an offline oracle): 32 buckets of like "
    "lengths, longest * number within the budget, one bucket at a time on all replicas",
    "odb": "ODB",
}

_SPARE_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSteps:
    """Consecutive steps of one arm, in the steady part of its run.

    Attributes:
        is_padded: each sample is computed at the length of its micro-batch's longest.
        steps: at least as many as were asked for.
    """

    is_padded: bool
    steps: Sequence[StepBatches]


def num_samples_needed(num_steps: int, setting: Setting) -> int:
    """Return the length of a stream in which every arm has so many steady steps."""
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
    if len(schedule) - 1 < num_steps:  # the last step may be a part of one
        raise ValueError(
            f"arm {arm} has {len(schedule) - 1} whole steps of {len(stream)} samples, {num_steps} "
            "are wanted: lower --rounds, or --global-batch-size"
        )
    steps = (schedule.step(index) for index in range(num_steps))
    return ArmSteps(
        is_padded=schedule.is_padded,
        steps=[tuple(tuple(map(tuple, row)) for row in step) for step in steps],
    )


def _schedule(arm: str, stream: Stream, setting: Setting, context: int) -> Schedule:
    if arm in ("odb", "sorted"):
        return POLICIES["odb" if arm == "odb" else "sorted-bucketed"](stream, setting)
    typical = context if arm == "standard" else float(stream.lengths.mean())
    size = max(1, int(setting.token_budget // typical))
    positions = range(len(stream) // size * size)
    batches = [positions[start : start + size] for start in range(0, len(positions), size)]
    count = max(1, round(setting.global_batch_size / (setting.num_replicas * size)))
    steps = steps_like(batches, setting.num_replicas, count=count)
    return Schedule.of_steps(steps, is_padded=True)
