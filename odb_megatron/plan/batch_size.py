"""What a global batch size permits, and the one that steps of a given micro-batch count hold.

Pure. For refusals, simulations and advice; a run's batch size is the user's.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.exchange_choice import LEAST_SHARE
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.target import squared_tokens

__all__ = ["batch_size_for", "batch_size_warning", "check_batch_size"]

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


def check_batch_size(policy: PolicyName, *, global_batch_size: int, num_replicas: int) -> None:
    """Refuse a batch size that the policy cannot hold.

    Under `samples` a step has exactly the batch size, and replicas without a sample idle. Under
    `cost` every replica that holds samples trains one at least.

    Args:
        policy: step policy.
        global_batch_size: samples per step asked for.
        num_replicas: data-parallel size.

    Raises:
        ValueError: fewer samples than replicas under `cost`.
    """
    if policy is PolicyName.COST and global_batch_size < num_replicas:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is below the {num_replicas} replicas, each "
            "of which trains at least one sample per step under policy cost: raise it to "
            f"{num_replicas} at least, or use --odb-policy samples, under which the others idle"
        )


def batch_size_warning(
    policy: PolicyName, mode: ExchangeMode, *, global_batch_size: int, num_replicas: int
) -> str:
    """Return why steps may be larger than the batch size asked for; empty where they are not.

    Measured (8 replicas, lognormal lengths, CV 1, window 128): 42 samples per step for a batch
    size of 8, 49 for 32, 64 for 64.

    Args:
        policy: step policy.
        mode: whether replicas hand samples to each other.
        global_batch_size: samples per step asked for.
        num_replicas: data-parallel size.
    """
    share = global_batch_size / num_replicas
    is_held = policy is PolicyName.SAMPLES or mode is not ExchangeMode.NONE or num_replicas == 1
    if is_held or share >= LEAST_SHARE:
        return ""
    return (
        f"--global-batch-size {global_batch_size} gives each of {num_replicas} replicas "
        f"{share:.3g} samples per step; with fewer than {LEAST_SHARE}, policy cost without an "
        "exchange may train many more samples per step than asked: raise it, or use "
        "--odb-exchange auto"
    )
