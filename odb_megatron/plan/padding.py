"""What lengths are padded to: each sample, and each micro-batch where shapes are fixed.

Pure: planner and assembler both call this module; neither may round a length on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_SEGMENTS", "OverlongError", "OverlongPolicy", "SizeRule", "budget_length"]
__all__ += ["judge_length", "length_multiple", "padded_length", "shared_length", "size_rule"]

MAX_SEGMENTS = 256
"""Samples of a micro-batch of a fixed shape, at most. Kernels look at each entry of the cumulative
lengths, used or not, so that the one bound that always holds (one sample per token) is too many."""

_PIECE = 128
"""Tokens of a segment of padding, at most: a tile of the attention kernels. They attend within it
like within a sample, so that one long segment would cost the square of its length."""


@dataclass(frozen=True, kw_only=True)
class SizeRule:
    """Which lengths micro-batches have: those of their samples, or the nearest of a few.

    With sizes every tensor of a micro-batch has a shape that follows from its size alone, the
    cumulative lengths too: what the samples leave is segments of padding, and the entries that are
    left over repeat the last one.

    Attributes:
        sizes: token counts of a micro-batch, ascending; empty where each is as long as its samples.
        least: fewest tokens of a sample after padding; bounds how many there can be.
        longest: most tokens of a sample after padding, which is told as `max_seqlen`; 0 for the
            size.
        multiple: see `length_multiple`.
    """

    sizes: tuple[int, ...] = ()
    least: int = 1
    longest: int = 0
    multiple: int = 1

    def shared(self, width: int) -> SizeRule:
        """Return the rule for samples that so many replicas share, each of them in 2 chunks."""
        if width == 1:
            return self
        return SizeRule(multiple=width * math.lcm(2, self.multiple))

    def padded(self, length: int) -> int:
        """Return what a sample of `length` tokens takes up."""
        return padded_length(max(length, self.least, 1), self.multiple)

    def padded_all(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the same for many samples."""
        taken = np.maximum(lengths, max(self.least, 1))
        rounded: npt.NDArray[np.int64] = -(-taken // self.multiple) * self.multiple
        return rounded

    def size_of(self, num_tokens: int) -> int:
        """Return the size of a micro-batch whose samples take up `num_tokens`."""
        assert not self.sizes or num_tokens <= self.sizes[-1], f"{num_tokens} tokens for {self}"
        return next((size for size in self.sizes if num_tokens <= size), num_tokens)

    def num_segments(self, size: int) -> int:
        """Return how many segments the cumulative lengths of a micro-batch have room for.

        Samples take up `least` tokens each, so that they and segments of padding, none of them but
        the last one shorter, are at most this many.
        """
        return size // max(self.least, self.multiple) + 1

    def padding(self, num_tokens: int) -> list[int]:
        """Return the segments of padding of `num_tokens` in all."""
        piece = max(self.least, padded_length(_PIECE, self.multiple))
        piece = min(piece, self.longest or piece)
        whole, rest = divmod(num_tokens, piece)
        return [piece] * whole + [rest] * (rest > 0)


class OverlongPolicy(Enum):
    """What happens to a sample that is longer than min(sequence length, token budget)."""

    ERROR = "error"
    TRUNCATE = "truncate"
    DROP = "drop"
    SOLO = "solo"


class OverlongError(ValueError):
    """A sample is too long and the policy does not allow it."""


def length_multiple(
    *, context_parallel_size: int = 1, sequence_parallel_size: int = 1, rank_multiple: int = 1
) -> int:
    """Return the multiple that every sample is padded to.

    Context parallelism cuts each sample into 2 * cp zigzag pieces; sequence parallelism splits a
    rank's tokens over tp ranks. Padding every sample to the least common multiple satisfies both,
    and the kernels, for every micro-batch.

    Args:
        context_parallel_size: cp.
        sequence_parallel_size: tp when sequence parallelism is on, else 1.
        rank_multiple: of each rank's token count: 16 for FP8 kernels, 32 for those of MXFP8.
    """
    zigzag = 2 * context_parallel_size if context_parallel_size > 1 else 1
    return math.lcm(zigzag, context_parallel_size * sequence_parallel_size * rank_multiple)


def padded_length(length: int, multiple: int) -> int:
    """Round `length` up to `multiple`."""
    return -(-length // multiple) * multiple


def budget_length(token_budget: int, multiple: int) -> int:
    """Return the longest that a micro-batch within the budget can be."""
    return token_budget // multiple * multiple


def shared_length(token_budget: int, multiple: int, max_share: int) -> int:
    """Return the longest sample within the budget of so many replicas, a power of two of them."""
    if max_share == 1:
        return token_budget
    return max_share * budget_length(token_budget, math.lcm(2, multiple))


@lru_cache
def size_rule(
    sizes: tuple[int, ...], *, token_budget: int, context: int, multiple: int
) -> SizeRule:
    """Return the rule for micro-batches of fixed sizes; without sizes, for those of any length.

    Args:
        sizes: token counts wanted; rounded down to the multiple. The budget is one always.
        token_budget: most padded tokens of a micro-batch.
        context: most tokens of one sample, 0 for the budget.
        multiple: see `length_multiple`.
    """
    if not sizes:
        return SizeRule(multiple=multiple)
    largest = budget_length(token_budget, multiple)
    rounded = {budget_length(min(size, token_budget), multiple) for size in sizes} | {largest}
    longest = budget_length(min(context or token_budget, token_budget), multiple)
    return SizeRule(
        sizes=tuple(sorted(rounded - {0})),
        least=min(padded_length(-(-largest // MAX_SEGMENTS), multiple), longest),
        longest=longest,
        multiple=multiple,
    )


def judge_length(
    length: int, *, multiple: int, token_budget: int, context: int, policy: OverlongPolicy
) -> tuple[int, str]:
    """Decide what happens to a sample of `length` tokens.

    Args:
        length: tokens of the sample before padding.
        multiple: see `length_multiple`.
        token_budget: most padded tokens of a micro-batch.
        context: most tokens of one sample (`--seq-length`).
        policy: rule for a padded length above min(context, token_budget).

    Returns:
        How many tokens are kept, 0 when it is dropped; why it is not as any other, or "".

    Raises:
        OverlongError: the policy is `error`, or it is `solo` and the sample exceeds the context.
    """
    limit, padded = min(context, token_budget), padded_length(length, multiple)
    if padded <= limit:
        return length, ""
    seen = f"{length} tokens" + (f" ({padded} after padding to {multiple})" if multiple > 1 else "")
    message = f"{seen}; the limit is {limit} (seq-length {context}, token budget {token_budget})"
    if policy is OverlongPolicy.SOLO and padded <= context:
        return length, message
    if policy is OverlongPolicy.DROP:
        return 0, message
    if policy is OverlongPolicy.TRUNCATE and limit >= multiple:
        return budget_length(limit, multiple), message
    raise OverlongError(message)
