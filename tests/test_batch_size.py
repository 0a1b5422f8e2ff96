"""`odb_megatron.plan.batch_size`."""

from __future__ import annotations

import numpy as np
import pytest

from odb_megatron.plan.batch_size import batch_size_for, batch_size_warning, check_batch_size
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import ExchangeMode, PolicyName

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


@pytest.mark.parametrize(
    ("policy", "batch", "is_refused"),
    [
        (PolicyName.COST, 7, True),
        (PolicyName.COST, 8, False),
        (PolicyName.SAMPLES, 7, False),
        (PolicyName.SAMPLES, 1, False),
    ],
)
def test_a_batch_below_the_replicas(policy: PolicyName, batch: int, is_refused: bool) -> None:
    if not is_refused:
        check_batch_size(policy, global_batch_size=batch, num_replicas=8)
        return
    text = (
        "--global-batch-size 7 is below the 8 replicas, each of which trains at least one sample "
        "per step under policy cost: raise it to 8 at least, or use --odb-policy samples, under "
        "which the others idle"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        check_batch_size(policy, global_batch_size=batch, num_replicas=8)


@pytest.mark.parametrize(
    ("policy", "mode", "batch", "replicas", "is_warned"),
    [
        (PolicyName.COST, ExchangeMode.NONE, 127, 8, True),
        (PolicyName.COST, ExchangeMode.NONE, 128, 8, False),
        (PolicyName.COST, ExchangeMode.AUTO, 8, 8, False),
        (PolicyName.COST, ExchangeMode.TOKENS, 8, 8, False),
        (PolicyName.COST, ExchangeMode.NONE, 8, 1, False),
        (PolicyName.SAMPLES, ExchangeMode.NONE, 8, 8, False),
    ],
)
def test_a_batch_that_gives_few_samples_each(
    policy: PolicyName, mode: ExchangeMode, batch: int, replicas: int, is_warned: bool
) -> None:
    text = batch_size_warning(policy, mode, global_batch_size=batch, num_replicas=replicas)
    assert text == (
        "--global-batch-size 127 gives each of 8 replicas 15.9 samples per step; with fewer than "
        "16, policy cost without an exchange may train many more samples per step than asked: "
        "raise it, or use --odb-exchange auto"
        if is_warned
        else ""
    )
