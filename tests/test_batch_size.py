"""`odb_megatron.plan.batch_size`."""

from __future__ import annotations

import numpy as np
import pytest

from odb_megatron.plan.batch_size import batch_size_for
from odb_megatron.plan.cost import CostModel

MODEL = CostModel.from_ratios(quadratic=0.3 / 0.7 / 500, fixed_tokens=0.05 * 8192)


@pytest.mark.parametrize(("cv", "fill"), [(0.29, 0.98), (0.48, 0.97), (1.0, 0.90), (2.0, 0.81)])
def test_fill_falls_with_the_spread(cv: float, fill: float) -> None:
    sigma2 = np.log(1 + cv * cv)
    drawn = np.random.RandomState(0).lognormal(np.log(500) - sigma2 / 2, sigma2**0.5, size=100_000)
    lengths = np.clip(np.round(drawn), 1, 8192).astype(np.int64)
    size = batch_size_for(8, lengths, cost=MODEL, token_budget=8192, num_replicas=8)
    assert size * float(lengths.mean()) / (8 * 8 * 8192) == pytest.approx(fill, abs=0.015)


def test_equal_lengths_and_tiny_ones() -> None:
    lengths = np.full(10, 100, dtype=np.int64)
    assert batch_size_for(2, lengths, cost=MODEL, token_budget=1000, num_replicas=4) == 79
    whole = np.full(3, 4096, dtype=np.int64)
    assert batch_size_for(1, whole, cost=MODEL, token_budget=64, num_replicas=4) == 4
