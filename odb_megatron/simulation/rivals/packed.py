"""Rivals that pack each global batch by itself: Megatron's `dp_balanced`, first-fit decreasing.

Pure. Written from their descriptions; they know the lengths of the whole global batch and may
place a sample on any replica, which costs them nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["dp_balanced", "ffd", "first_fit_decreasing", "next_fit", "raise_to_multiple"]


def dp_balanced(stream: Stream, setting: Setting) -> Schedule:
    """Return Megatron's `dp_balanced` (`DpBalancedScheduler`, core/datasets/data_schedule.py).

    Each global batch goes in order into bins by next fit; samples move from the last bins into
    bins of their own until the number of bins is a multiple of the replicas (times the group size
    under virtual pipelining). Bin `k * replicas + r` is micro-batch k of replica r.
    """
    return _per_global_batch(next_fit, stream, setting)


def ffd(stream: Stream, setting: Setting) -> Schedule:
    """Return first-fit decreasing per global batch, as SkyRL and NeMo-RL pack.

    Bins are dealt round robin to the replicas; counts are made even as in `dp_balanced`.
    """
    return _per_global_batch(first_fit_decreasing, stream, setting)


def next_fit(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Return bins of slots: in order, a new bin whenever the last has no room."""
    bins: list[list[int]] = []
    room = -1
    for slot, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = token_budget
        bins[-1].append(slot)
        room -= length
    return bins


def first_fit_decreasing(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Return bins of slots: longest first, each into the first bin that has room."""
    bins: list[list[int]] = []
    rooms = np.zeros(max(1, len(lengths)), dtype=np.int64)
    for slot in sorted(range(len(lengths)), key=lambda slot: -lengths[slot]):
        length = lengths[slot]
        at = int((rooms[: len(bins)] >= length).argmax()) if bins else 0
        if not bins or rooms[at] < length:
            at = len(bins)
            bins.append([])
            rooms[at] = token_budget
        bins[at].append(slot)
        rooms[at] -= length
    return bins


def raise_to_multiple(bins: Sequence[Sequence[int]], multiple: int) -> list[list[int]]:
    """Move the last samples of the last bins into bins of their own until the count is a multiple.

    Where there are too few samples for that (upstream stops there), empty bins are added.
    """
    found = [list(slots) for slots in bins]
    index = len(found) - 1
    while len(found) % multiple and index >= 0:
        if len(found[index]) > 1:
            found.append([found[index].pop()])
        else:
            index -= 1
    return found + [[] for _ in range(-len(found) % multiple)]


def _per_global_batch(
    pack: Callable[..., list[list[int]]], stream: Stream, setting: Setting
) -> Schedule:
    num, steps = setting.num_replicas, []
    for start in range(0, len(stream), setting.global_batch_size):
        batch = stream.lengths[start : start + setting.global_batch_size]
        filled = np.flatnonzero(batch)
        multiple = num * setting.count_multiple
        bins = raise_to_multiple(
            pack(batch[filled].tolist(), token_budget=setting.token_budget), multiple
        ) or [[] for _ in range(multiple)]
        positions = [(start + filled[slots]).tolist() if slots else [] for slots in bins]
        steps += rectangular(positions, num_replicas=num, count=len(bins) // num)
    return Schedule.build(steps, num_replicas=num)
