"""Rivals that pad: the standard sampler, and offline sorting with all lengths known beforehand.

Pure. Their micro-batches are computed at the length of their longest sample. A position without a
sample keeps its place in a fixed batch, as padding, and is left out by those who know all lengths.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["sorted_aligned", "sorted_batches", "sorted_buckets", "standard", "standard_safe"]

Integers = npt.NDArray[np.int64]

_NUM_BUCKETS = 32
_SLACK = 1.05  # of the mean step over the global batch size


def standard(stream: Stream, setting: Setting, *, is_within: bool = False) -> Schedule:
    """Return the stream in order, `token_budget // mean length` samples per micro-batch.

    Its micro-batches fit the budget on average only.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        is_within: a micro-batch is no larger than a step of the global batch size leaves it, and
            a step at most that size; else a step is what comes nearest to it.
    """
    typical = max(1, round(float(_filled(stream).mean())))
    return _fixed_size(stream, setting, typical=typical, is_within=is_within)


def standard_safe(stream: Stream, setting: Setting, *, is_within: bool = False) -> Schedule:
    """Return the stream in order, `token_budget // longest` samples per micro-batch.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        is_within: see `standard`.
    """
    typical = int(stream.lengths.max())
    return _fixed_size(stream, setting, typical=typical, is_within=is_within)


def sorted_batches(stream: Stream, setting: Setting) -> Schedule:
    """Return micro-batches of like lengths, longest * number <= budget, in random order.

    Each epoch is sorted as a whole; its micro-batches are dealt to the replicas as they come.
    """
    return _shuffled(stream, setting, buckets=0, group=1)


def sorted_buckets(stream: Stream, setting: Setting, *, is_within: bool = False) -> Schedule:
    """Return micro-batches from buckets of like lengths; replicas run the same bucket at a time.

    An epoch's samples fall into 32 buckets of equal number, in random order, and are cut into
    micro-batches, longest * number <= budget; groups of one per replica are in random order.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        is_within: a step has on average at most 5 % more than the global batch size: micro-batches
            are cut to an equal part of it where that comes nearer than what the budget holds.
    """
    group = setting.num_replicas
    return _shuffled(stream, setting, buckets=_NUM_BUCKETS, group=group, is_within=is_within)


def sorted_aligned(stream: Stream, setting: Setting) -> Schedule:
    """Return the micro-batches of `sorted_batches`, neighbours in length at the same time.

    The least padding and the best balance that sorting can give, and the least random steps.
    """
    return _shuffled(stream, setting, buckets=0, group=setting.num_replicas)


def _fixed_size(stream: Stream, setting: Setting, *, typical: int, is_within: bool) -> Schedule:
    size = max(1, setting.token_budget // typical)
    count = setting.num_micro_batches(size)
    if is_within:
        share = _most_samples(setting)
        size = _size_within(size, share)
        count = share // size * setting.count_multiple
    batches = [
        range(start, min(start + size, len(stream))) for start in range(0, len(stream), size)
    ]
    return Schedule.build(
        rectangular(
            batches,
            num_replicas=setting.num_replicas,
            count=count,
            multiple=setting.count_multiple,
        ),
        num_replicas=setting.num_replicas,
        is_padded=True,
    )


def _most_samples(setting: Setting) -> int:
    """Return how many samples a micro-batch may have so that a step is no larger than asked for."""
    rows = setting.num_replicas * setting.count_multiple
    return max(1, setting.global_batch_size // rows)


def _size_within(size: int, share: int) -> int:
    """Return the size, or a smaller one, whose whole multiple comes nearest to `share` from below.

    Either as many of this size as fit, or the fewest of an equal part of `share`.
    """
    size = min(size, share)
    even = share // -(-share // size)
    return even if share // even * even > share // size * size else size


def _cut(
    order: Integers, lengths: Integers, *, token_budget: int, most: int | None
) -> list[list[int]]:
    """Cut samples in this order into micro-batches whose longest * number fits the budget.

    Args:
        order: stream positions.
        lengths: of the stream.
        token_budget: tokens computed at most.
        most: samples at most; None for any number.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for position, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        longest = max(longest, length)
        if batch and (longest * (len(batch) + 1) > token_budget or len(batch) == most):
            batches.append(batch)
            batch, longest = [], length
        batch.append(position)
    return [*batches, batch] if batch else batches


def _shuffled(
    stream: Stream, setting: Setting, *, buckets: int, group: int, is_within: bool = False
) -> Schedule:
    """Deal each epoch's micro-batches in random order; a rest of no whole row comes last.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        buckets: see `sorted_buckets`; 0 for one sorted whole.
        group: so many neighbours stay together.
        is_within: see `sorted_buckets`.
    """
    num, num_samples = setting.num_replicas, len(_filled(stream))
    dealt = _dealt(stream, setting, buckets=buckets, group=group, most=None)
    count = setting.num_micro_batches(num_samples / len(dealt))
    if is_within:
        share = _most_samples(setting)
        parts = max(1, math.ceil(share * len(dealt) / num_samples))  # micro-batches of a step
        cut = _dealt(stream, setting, buckets=buckets, group=group, most=share // parts)
        # Whichever comes nearer to the global batch size; as they are where both do.
        dealt, rows, _ = max(
            (_rows_within(own, share, num_samples) for own in (dealt, cut)),
            key=lambda own: own[2],
        )
        count = rows * setting.count_multiple
    steps = rectangular(dealt, num_replicas=num, count=count, multiple=setting.count_multiple)
    return Schedule.build(steps, num_replicas=num, is_padded=True)


def _rows_within(
    dealt: list[list[int]], share: int, num_samples: int
) -> tuple[list[list[int]], int, float]:
    """Return micro-batches, how many of them make a replica's share, and how nearly (1 at best)."""
    rows = max(1, math.floor(_SLACK * share * len(dealt) / num_samples))
    ratio = rows * num_samples / len(dealt) / share
    return dealt, rows, min(ratio, 1 / ratio)


def _dealt(
    stream: Stream, setting: Setting, *, buckets: int, group: int, most: int | None
) -> list[list[int]]:
    random = np.random.default_rng([setting.seed, 3])
    num = setting.num_replicas
    dealt: list[list[int]] = []
    for positions in stream.epochs():
        positions = positions[stream.lengths[positions] > 0]
        order = positions[np.argsort(-stream.lengths[positions], kind="stable")]
        parts = [order]
        if buckets:
            parts = [random.permutation(part) for part in np.array_split(order, buckets)]
        batches = [
            batch
            for part in parts
            for batch in _cut(part, stream.lengths, token_budget=setting.token_budget, most=most)
        ]
        whole = len(batches) // num * num
        for first in random.permutation(range(0, whole, group)).tolist():
            dealt += batches[first : first + group]
        rest = batches[whole:]
        dealt += rest + [[]] * (-len(rest) % num)
    return dealt


def _filled(stream: Stream) -> Integers:
    return stream.lengths[stream.lengths > 0]
