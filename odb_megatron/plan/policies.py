"""Which step policy is in force.

Pure.
"""

from __future__ import annotations

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost_policy import CostPolicy
from odb_megatron.plan.exchange_policy import OldestFirstPolicy
from odb_megatron.plan.policy import ExchangeMode, PolicyName, SamplesPolicy, StepPolicy

__all__ = ["build_policy"]


def build_policy(config: PlanConfig, *, exchanges: bool | None = None) -> StepPolicy:
    """Return the step policy in force.

    Args:
        config: what all replicas agree on.
        exchanges: whether replicas hand samples to each other under policy `cost`; None for what
            the configuration says, "not yet" for mode `auto`.

    Raises:
        ValueError: see `CostPolicy`.
    """
    if config.policy is PolicyName.SAMPLES:
        return SamplesPolicy(
            total=config.total,
            global_batch_size=config.global_batch_size,
            from_front=config.has_unknown_end,
        )
    if exchanges is None:
        exchanges = config.exchange is ExchangeMode.TOKENS and config.num_replicas > 1
    return OldestFirstPolicy(config) if exchanges else CostPolicy(config)
