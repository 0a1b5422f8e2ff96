"""The common micro-batch count of a step, and how one replica meets it.

Pure. Splitting comes before idling: a replica idles only when it has fewer samples than the
step has micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from odb_megatron.plan.packing import spread

__all__ = ["common_count", "fit_to_count", "num_idle", "num_split"]


def common_count(counts: Sequence[int], *, multiple: int = 1) -> int:
    """Return M, the number of micro-batches every replica runs.

    Args:
        counts: micro-batches each replica's selection needs.
        multiple: M is a multiple of this (virtual pipelining's group size).
    """
    needed = max(1, *counts)
    return -(-needed // multiple) * multiple


def fit_to_count(
    lengths: Sequence[int],
    costs: Sequence[int],
    *,
    count: int,
    token_budget: int,
    patches: Sequence[int] = (),
    max_patches: int = 0,
) -> list[list[int]]:
    """Return exactly `count` micro-batches of slots into `lengths`; empty (idle) ones are last.

    The arguments are those of `packing.spread`.
    """
    bins = spread(
        lengths,
        costs,
        count=count,
        token_budget=token_budget,
        patches=patches,
        max_patches=max_patches,
    )
    return bins + [[] for _ in range(count - len(bins))]


def num_idle(num_samples: int, *, count: int) -> int:
    """Idle micro-batches of a replica that selected `num_samples` samples."""
    return max(0, count - num_samples)


def num_split(num_samples: int, num_micro_batches: int, *, count: int) -> int:
    """Micro-batches a replica adds by splitting beyond what its packing needs."""
    return min(count, num_samples) - num_micro_batches
