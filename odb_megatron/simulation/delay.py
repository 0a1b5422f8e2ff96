"""How many steps later than first-in-first-out order a sample was emitted.

Pure, and independent of what planners note about delay: it goes by the order of arrival and the
step of each sample alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.schedule import Schedule

__all__ = ["max_delay_steps"]

Integers = npt.NDArray[np.int64]


def max_delay_steps(schedule: Schedule) -> int:
    """Return the largest delay of any sample beyond first-in-first-out order, at least 0.

    First-in-first-out order emits as many samples per step as the policy did, oldest first: per
    replica by what that replica drew (also where another one trained it), or, without `arrivals`,
    over all replicas in the stream's order. A sample that waits in a deep window is late by depth,
    not by delay.
    """
    arrivals = schedule.arrivals
    if arrivals is None:
        arrivals = [np.sort(schedule.positions)]
    step_of = np.full(_end(schedule, arrivals), -1, dtype=np.int64)
    steps = np.arange(len(schedule), dtype=np.int64)
    step_of[schedule.positions] = np.repeat(steps, schedule.step_samples)
    return max((_largest(step_of[arrived]) for arrived in arrivals), default=0)


def _largest(steps: Integers) -> int:
    """Return the largest delay among a replica's samples, given their steps in arrival order."""
    emitted = steps[steps >= 0]
    return int((emitted - np.sort(emitted)).max()) if len(emitted) else 0


def _end(schedule: Schedule, arrivals: Sequence[Integers]) -> int:
    parts = [schedule.positions, *arrivals]
    return 1 + max((int(part.max()) for part in parts if len(part)), default=-1)
