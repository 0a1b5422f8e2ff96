"""Rivals that pad: the standard sampler, and offline sorting with all lengths known beforehand.

Pure. Their micro-batches are computed at the length of their longest sample.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["bucketed_batches", "sorted_batches", "sorted_buckets", "standard", "standard_safe"]

Integers = npt.NDArray[np.int64]

_NUM_BUCKETS = 32


def standard(stream: Stream, setting: Setting) -> Schedule:
    """Return the stream in order, `token_budget // mean length` samples per micro-batch.

    Its micro-batches fit the budget on average only.
    """
    return _fixed_size(stream, setting, typical=max(1, round(float(stream.lengths.mean()))))


def standard_safe(stream: Stream, setting: Setting) -> Schedule:
    """Return the stream in order, `token_budget // longest` samples per micro-batch."""
    return _fixed_size(stream, setting, typical=int(stream.lengths.max()))


def sorted_batches(stream: Stream, setting: Setting) -> Schedule:
    """Return micro-batches of like lengths, longest * number <= budget, shuffled.

    All samples of the run are sorted; neighbours in that order run at the same time on the
    replicas, and these groups are in random order.
    """
    order = np.argsort(-stream.lengths, kind="stable")
    return _shuffled(_cut(order, stream.lengths, setting.token_budget), setting)


def sorted_buckets(stream: Stream, setting: Setting) -> Schedule:
    """Return micro-batches from buckets of like lengths, longest * number <= budget, shuffled.

    Buckets hold equal numbers of samples, in random order, and are cut into micro-batches; those
    of a bucket run at the same time on the replicas, and these groups are in random order.
    """
    return _shuffled(bucketed_batches(stream, setting), setting)


def bucketed_batches(stream: Stream, setting: Setting) -> list[list[int]]:
    """Return the micro-batches of `sorted_buckets`, bucket after bucket, longest first."""
    random = np.random.default_rng([setting.seed, 3])
    buckets = np.array_split(np.argsort(-stream.lengths, kind="stable"), _NUM_BUCKETS)
    return [
        batch
        for bucket in buckets
        for batch in _cut(random.permutation(bucket), stream.lengths, setting.token_budget)
    ]


def _fixed_size(stream: Stream, setting: Setting, *, typical: int) -> Schedule:
    size = max(1, setting.token_budget // typical)
    batches = [
        range(start, min(start + size, len(stream))) for start in range(0, len(stream), size)
    ]
    return Schedule.build(
        rectangular(
            batches,
            num_replicas=setting.num_replicas,
            count=setting.num_micro_batches(size),
        ),
        num_replicas=setting.num_replicas,
        is_padded=True,
    )


def _cut(order: Integers, lengths: Integers, token_budget: int) -> list[list[int]]:
    """Cut samples in this order into micro-batches whose longest * number fits the budget."""
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for position, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        longest = max(longest, length)
        if batch and longest * (len(batch) + 1) > token_budget:
            batches.append(batch)
            batch, longest = [], length
        batch.append(position)
    return [*batches, batch] if batch else batches


def _shuffled(batches: list[list[int]], setting: Setting) -> Schedule:
    """Return groups of one neighbour per replica, in random order; a rest comes last."""
    num = setting.num_replicas
    whole = len(batches) // num
    order = np.random.default_rng([setting.seed, 4]).permutation(whole).tolist()
    dealt = [batch for group in order for batch in batches[group * num : (group + 1) * num]]
    dealt += batches[whole * num :]
    mean = sum(map(len, batches)) / len(batches)
    return Schedule.build(
        rectangular(dealt, num_replicas=num, count=setting.num_micro_batches(mean)),
        num_replicas=num,
        is_padded=True,
    )
