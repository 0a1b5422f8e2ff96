"""The one multiple that every sample's length is padded to, and the rule for overlong samples.

Pure: planner and assembler both call this module; neither may round a length on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "OverlongError",
    "OverlongPolicy",
    "Quantization",
    "Verdict",
    "budget_length",
    "judge_length",
    "length_multiple",
    "padded_length",
]


class Quantization(Enum):
    """Token-count multiple that a low-precision recipe asks of each rank's share."""

    NONE = 1
    FP8 = 16
    MXFP8 = 32


class OverlongPolicy(Enum):
    """What happens to a sample that is longer than min(sequence length, token budget)."""

    ERROR = "error"
    TRUNCATE = "truncate"
    DROP = "drop"
    SOLO = "solo"


class OverlongError(ValueError):
    """A sample is too long and the policy does not allow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do with one sample.

    Attributes:
        keep: number of tokens to keep, 0 when the sample is dropped.
        truncated: number of tokens cut off the end.
        solo: the sample gets a micro-batch of its own, over the budget.
        message: why it is not kept whole; empty when it is.
    """

    keep: int
    truncated: int = 0
    solo: bool = False
    message: str = ""


def length_multiple(
    *,
    context_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    quantization: Quantization = Quantization.NONE,
) -> int:
    """Return the multiple that every sample is padded to.

    Context parallelism cuts each sample into 2 * cp zigzag pieces; sequence parallelism splits a
    rank's tokens over tp ranks; FP8 and MXFP8 kernels want each rank's token count divisible by
    16 or 32. Padding every sample to the least common multiple satisfies all three for every
    micro-batch.

    Args:
        context_parallel_size: cp.
        sequence_parallel_size: tp when sequence parallelism is on, else 1.
        quantization: low-precision recipe of the linear layers.
    """
    if context_parallel_size < 1 or sequence_parallel_size < 1:
        raise ValueError(
            "parallel sizes must be at least 1; got context_parallel_size="
            f"{context_parallel_size}, sequence_parallel_size={sequence_parallel_size}"
        )
    zigzag = 2 * context_parallel_size if context_parallel_size > 1 else 1
    share = context_parallel_size * sequence_parallel_size * quantization.value
    return math.lcm(zigzag, share)


def padded_length(length: int, multiple: int) -> int:
    """Round `length` up to `multiple`."""
    return -(-length // multiple) * multiple


def budget_length(token_budget: int, multiple: int) -> int:
    """Return the longest that a micro-batch within the budget can be."""
    return token_budget // multiple * multiple


def judge_length(
    length: int, *, multiple: int, token_budget: int, context: int, policy: OverlongPolicy
) -> Verdict:
    """Decide what happens to a sample of `length` tokens.

    Args:
        length: tokens of the sample before padding.
        multiple: see `length_multiple`.
        token_budget: most padded tokens of a micro-batch.
        context: most tokens of one sample (`--seq-length`).
        policy: rule for a padded length above min(context, token_budget).

    Raises:
        OverlongError: the policy is `error`, or it is `solo` and the sample exceeds the context.
        ValueError: no sample at all could fit (limit below the multiple).
    """
    limit = min(context, token_budget)
    padded = padded_length(length, multiple)
    if padded <= limit:
        return Verdict(keep=length)
    seen = f"{length} tokens" + (f" ({padded} after padding to {multiple})" if multiple > 1 else "")
    message = f"{seen}; the limit is {limit} (seq-length {context}, token budget {token_budget})"
    if policy is OverlongPolicy.SOLO and padded <= context:
        return Verdict(keep=length, solo=True, message=message)
    if policy is OverlongPolicy.DROP:
        return Verdict(keep=0, message=message)
    if policy is OverlongPolicy.TRUNCATE:
        keep = budget_length(limit, multiple)
        if keep == 0:
            raise ValueError(
                f"no sample fits: the limit {limit} is below the padding multiple {multiple}; "
                "raise --seq-length or --odb-token-budget"
            )
        return Verdict(keep=keep, truncated=length - keep, message=message)
    way_out = (
        "raise --seq-length, or use --odb-overlong truncate or drop"
        if policy is OverlongPolicy.SOLO
        else "use --odb-overlong truncate, drop or solo, or raise --odb-token-budget / --seq-length"
    )
    raise OverlongError(f"{message}: {way_out}")
