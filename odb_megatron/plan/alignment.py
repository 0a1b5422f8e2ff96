"""The common micro-batch count of a step, and how one replica meets it.

Pure. Splitting comes before idling: a replica idles only when it has fewer samples than the
step has micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.packing import Caps, pack, spread
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.window import Column

__all__ = [
    "common_count",
    "fit_to_count",
    "meet_count",
    "needed_count",
    "num_idle",
    "num_split",
]


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


def needed_count(found: Selection, rows: npt.NDArray[np.int64], *, caps: Caps) -> int:
    """Return the micro-batches a selection needs.

    Args:
        found: the selection.
        rows: the selected samples, int64 [len(Column), samples].
        caps: limits of a micro-batch.
    """
    if found.micro_batches is not None:
        return len(found.micro_batches)
    bins = pack(
        rows[Column.PADDED].tolist(),
        token_budget=caps.token_budget,
        patches=rows[Column.PATCHES].tolist() if caps.max_patches else (),
        max_patches=caps.max_patches,
    )
    return len(bins)


def meet_count(
    found: Selection, rows: npt.NDArray[np.int64], *, count: int, caps: Caps, by_cost: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the stream positions of exactly `count` micro-batches.

    Args:
        found: the selection.
        rows: the window's samples that it chose from, int64 [len(Column), samples].
        count: micro-batches of the step.
        caps: limits of a micro-batch.
        by_cost: order them by falling cost, so that equal ones meet on all replicas.
    """
    bins = found.micro_batches
    if bins is None or len(bins) != count:
        rows = rows[:, found.chosen]
        bins = fit_to_count(
            rows[Column.PADDED].tolist(),
            rows[Column.COST].tolist(),
            count=count,
            token_budget=caps.token_budget,
            patches=rows[Column.PATCHES].tolist() if caps.max_patches else (),
            max_patches=caps.max_patches,
        )
    if by_cost:
        costs = rows[Column.COST].tolist()
        bins = sorted(bins, key=lambda slots: -sum(costs[slot] for slot in slots))
    positions = rows[Column.POSITION]
    return tuple(tuple(positions[slots].tolist()) for slots in bins)


def num_idle(num_samples: int, *, count: int) -> int:
    """Idle micro-batches of a replica that selected `num_samples` samples."""
    return max(0, count - num_samples)


def num_split(num_samples: int, num_micro_batches: int, *, count: int) -> int:
    """Micro-batches a replica adds by splitting beyond what its packing needs."""
    return min(count, num_samples) - num_micro_batches
