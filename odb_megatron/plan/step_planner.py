"""Which replica trains which samples of a step in which of M micro-batches.

Pure, integers only: from the same lengths every replica computes the same plan, on any CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["StepPlan", "plan_step"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step of all replicas.

    Attributes:
        num_micro_batches: M, the same on every replica.
        micro_batches: `micro_batches[replica][m]` are indices of samples; () is idle.
        shares: of each shared sample, over how many replicas it is cut.
        loads: `loads[replica][m]` is the cost of that micro-batch's samples, without overhead.
        overhead: cost of a micro-batch beside its samples.
    """

    num_micro_batches: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    shares: Mapping[int, int]
    loads: tuple[tuple[int, ...], ...]
    overhead: int

    @property
    def costs(self) -> tuple[int, ...]:
        """Cost of each replica's step, the overhead of its micro-batches included."""
        fixed = self.num_micro_batches * self.overhead
        return tuple(sum(load) + fixed for load in self.loads)


def plan_step(
    lengths: npt.ArrayLike,
    *,
    num_replicas: int,
    token_budget: int,
    sync: str = "step",
    alignment: int = 1,
    patches: npt.ArrayLike | None = None,
    max_patches: int | None = None,
    cost: CostModel | None = None,
    count_multiple: int = 1,
    min_micro_batches: int = 1,
    max_share: int = 1,
    groups: npt.ArrayLike | None = None,
    owner: npt.ArrayLike | None = None,
    solo: npt.ArrayLike | None = None,
) -> StepPlan:
    """Plan a step."""
    cost = cost or CostModel()
    real = np.asarray(lengths, dtype=np.int64)
    padded = -(-real // alignment) * alignment
    images = np.zeros_like(real) if patches is None else np.asarray(patches, dtype=np.int64)
    costs = cost.samples(padded, images)
    alone = np.zeros(len(real), dtype=np.bool_) if solo is None else np.asarray(solo)
    for index in np.flatnonzero((padded > token_budget) & ~alone).tolist():
        raise ValueError(f"sample {index} has {padded[index]} tokens over {token_budget}")
    count = max(min_micro_batches, -(-int(padded.sum()) // (num_replicas * token_budget)), 1)
    count = -(-count // count_multiple) * count_multiple
    order = np.lexsort((np.arange(len(real)), -costs)).tolist()
    toks, price = padded.tolist(), costs.tolist()
    while True:
        bins = _fill(order, price, toks, num_replicas * count, token_budget)
        if bins is not None:
            break
        count += count_multiple
    bins.sort(key=lambda b: (-sum(price[i] for i in b), b))
    rows = [[tuple(b) for b in bins[r::num_replicas]] for r in range(num_replicas)]
    return StepPlan(
        num_micro_batches=count,
        micro_batches=tuple(map(tuple, rows)),
        shares={},
        loads=tuple(tuple(sum(price[i] for i in b) for b in row) for row in rows),
        overhead=cost.fixed,
    )


def _fill(
    order: Sequence[int], price: Sequence[int], toks: Sequence[int], count: int, budget: int
) -> list[list[int]] | None:
    heap = [(0, b) for b in range(count)]
    room = [budget] * count
    out: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        skipped = []
        while heap and room[heap[0][1]] < toks[i] and out[heap[0][1]]:
            skipped.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b = heap[0]
        heapq.heapreplace(heap, (load + price[i], b))
        room[b] -= toks[i]
        out[b].append(i)
        for item in skipped:
            heapq.heappush(heap, item)
    return out
