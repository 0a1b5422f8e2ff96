"""The global batch size that steps of a given micro-batch count hold, from sample lengths.

Pure. For simulations and advice; a run's batch size is the user's.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.target import squared_tokens

__all__ = ["batch_size_for"]

_PPM = 1_000_000
_ALWAYS_FREE = 10_000
_FREE_PER_SPREAD = (9, 10)
_LEAST_FILL = 500_000


def batch_size_for(
    count: int,
    lengths: npt.NDArray[np.int64],
    *,
    cost: CostModel,
    token_budget: int,
    num_replicas: int,
) -> int:
    """Return the samples per step that fill `count` micro-batches as far as balance permits.

    A replica whose window happens to hold cheap samples needs more tokens for the same cost, so
    the token budget can be used the less, the more a step's cost per token varies: one percent and
    nine tenths of its relative deviation stay free (measured, lognormal lengths, windows of two to
    eight steps, policy `cost`).

    Args:
        count: micro-batches per step and replica.
        lengths: padded lengths of a sample of the data, int64, at least one.
        cost: cost model.
        token_budget: most tokens of a micro-batch.
        num_replicas: data-parallel size.
    """
    tokens, num = int(lengths.sum()), len(lengths)
    costs = cost.samples(lengths, np.zeros_like(lengths))
    total = int(costs.sum())
    rate = max(1, total // tokens)
    spread = squared_tokens(costs - float(rate) * lengths, unit=COST_UNIT) // num
    share = max(1, count * token_budget * num // tokens)
    relative = _PPM * isqrt(share * spread) * COST_UNIT // max(1, share * total // num)
    free = _ALWAYS_FREE + relative * _FREE_PER_SPREAD[0] // _FREE_PER_SPREAD[1]
    fill = max(_LEAST_FILL, _PPM - free)
    return max(num_replicas, num_replicas * count * token_budget * num * fill // (tokens * _PPM))
