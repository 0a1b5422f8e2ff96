"""Blocks of replicas that plan together, and samples that move between them to even them out.

Pure. Planning and sample exchange stay within a block, so that neither grows with the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "MAX_OFFERS", "blocks_of", "even_blocks", "offered"]

BLOCK = 64
"""Replicas of a block, at most."""

MAX_OFFERS = 32
"""Samples of a block that may move to others in a step."""

_COSTLIEST = 24


def blocks_of(num_replicas: int, most: int = BLOCK) -> list[range]:
    """Return the replicas of each block; blocks are as even as can be."""
    count = -(-num_replicas // most)
    edges = [at * num_replicas // count for at in range(count + 1)]
    return list(map(range, edges, edges[1:]))


def offered(costs: npt.NDArray[np.int64]) -> list[int]:
    """Return which of a block's samples may move: the costliest, and some of all other sizes."""
    order: list[int] = np.argsort(-costs, kind="stable").tolist()
    step = -(-len(order[_COSTLIEST:]) // (MAX_OFFERS - _COSTLIEST)) or 1
    return order[:_COSTLIEST] + order[_COSTLIEST::step]


def even_blocks(
    sums: Sequence[int], sizes: Sequence[int], offers: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Return samples that move from heavy to light blocks, so that blocks finish together.

    Args:
        sums: cost of each block's samples.
        sizes: replicas of each block.
        offers: costs of the samples that each block offers, costliest first.

    Returns:
        Block, number of the offer, and block it moves to, of each.
    """
    total, replicas, loads = sum(sums), sum(sizes), list(sums)
    fair = [total * size // replicas for size in sizes]
    moves = []
    for block in sorted(range(len(loads)), key=lambda at: (fair[at] - loads[at], at)):
        for number, cost in enumerate(offers[block]):
            to = min(range(len(loads)), key=lambda at: (loads[at] - fair[at], at))
            if 0 < cost <= min(loads[block] - fair[block], fair[to] - loads[to]):
                moves.append((block, number, to))
                loads[block] -= cost
                loads[to] += cost
    return moves
