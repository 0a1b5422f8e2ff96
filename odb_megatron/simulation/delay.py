"""How many steps later than first-in-first-out order a sample was emitted.

Pure, and independent of what planners note about delay: it goes by the order of arrival and the
step of each sample alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.schedule import Schedule

__all__ = ["max_delay_steps"]

Integers = npt.NDArray[np.int64]


def max_delay_steps(schedule: Schedule) -> int:
    """Return the largest delay of any sample beyond first-in-first-out order, at least 0.

    First-in-first-out order emits as many samples per step as the policy did, oldest first: per
    replica by what that replica drew and emitted, or, without `arrivals`, over all replicas in the
    stream's order. A sample that waits in a deep window is late by depth, not by delay.
    """
    step_of = np.repeat(np.arange(len(schedule), dtype=np.int64), schedule.step_samples)
    if schedule.arrivals is None:
        return _largest(schedule.positions, step_of, np.sort(schedule.positions))
    replicas = _replica_of(schedule)
    return max(
        _largest(schedule.positions[replicas == replica], step_of[replicas == replica], arrived)
        for replica, arrived in enumerate(schedule.arrivals)
    )


def _largest(positions: Integers, steps: Integers, arrived: Integers) -> int:
    """Return the largest delay among samples that lie in the order of their steps."""
    if not len(positions):
        return 0
    order = np.argsort(arrived, kind="stable")
    ranks = order[np.searchsorted(arrived[order], positions)]
    return max(0, int((steps - steps[ranks]).max()))


def _replica_of(schedule: Schedule) -> Integers:
    """Return the replica of each sample."""
    per_micro_batch = [
        np.repeat(np.arange(schedule.num_replicas, dtype=np.int64), count)
        for count in schedule.counts.tolist()
    ]
    found: Integers = np.repeat(np.concatenate(per_micro_batch), schedule.sizes)
    return found
