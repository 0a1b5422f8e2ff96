"""Exchange mode `auto`: whether handing samples over is worth it.

Pure, integers only, from gathered records, so that all replicas choose alike. Policy `samples`
chooses in every step; policy `cost` once, because its selection differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.placement import step_cost_bound
from odb_megatron.plan.policy import BalanceScope
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord

__all__ = ["LEAST_SHARE", "ExchangeChoice", "choose_for_run", "is_worth_it"]

LEAST_SHARE = 16
"""Samples per replica and step; of fewer no step is composed without drifting off the batch size"""

_PPM = 1_000_000
_LEAST_GAIN = 10_000
_LEAST_STEPS = 2  # a window below two steps' share balances little


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeChoice:
    """What mode `auto` chose under policy `cost`, and from what.

    Attributes:
        exchanges: whether replicas hand samples to each other.
        num_micro_batches: micro-batches expected per step and replica, in hundredths.
        window: samples each replica looks ahead.
        share: samples of a replica's share of a step.
    """

    exchanges: bool
    num_micro_batches: int
    window: int
    share: int

    def reason(self) -> str:
        """Return the choice in words, with the flag that reproduces it."""
        mode = "tokens" if self.exchanges else "none"
        return (
            f"exchange {mode}: {self.num_micro_batches / 100:.1f} micro-batches per step and "
            f"replica; window {self.window} for a share of {self.share} samples (with a window "
            f"below {_LEAST_STEPS} shares replicas differ, with a share below {LEAST_SHARE} "
            "samples steps can be even only by varying much in size: then samples are exchanged, "
            "and a step takes as long as its costliest sample); "
            f"--odb-exchange {mode} reproduces it"
        )


def choose_for_run(table: RecordTable[WindowRecord], config: PlanConfig) -> ExchangeChoice:
    """Choose for policy `cost`, when the windows have been filled for the first time.

    A window of two steps or more evens replicas out, because in a step with a costly sample all of
    them do more. With few samples per share that takes steps of so unequal size that the batch
    size cannot be kept (measured, see `docs/dgap.md`): then, and with a short window, samples are
    exchanged.

    Args:
        table: first records of the step.
        config: batch size, replicas, budget, window.
    """
    observed = max(1, table.total("num_observed"))
    batch, num = config.global_batch_size, config.num_replicas
    tokens = 100 * batch * table.total("tokens_observed") // (observed * num)
    is_short = config.window * num < _LEAST_STEPS * batch
    is_small = batch < LEAST_SHARE * num
    return ExchangeChoice(
        exchanges=num > 1 and (is_short or is_small),
        num_micro_batches=tokens // config.token_budget,
        window=config.window,
        share=-(-batch // num),
    )


def is_worth_it(table: RecordTable[PlanRecord], config: PlanConfig, *, local_count: int) -> bool:
    """Choose for a step of policy `samples`: whether an exchange could shorten it by 1 %.

    Under scope `microbatch` records do not tell what each micro-batch costs; steps of more than
    one are always evened.

    Args:
        table: second records of the step.
        config: batch size, replicas, budget, prices.
        local_count: micro-batches of the step without an exchange.
    """
    if config.balance is BalanceScope.MICROBATCH and local_count > 1:
        return True
    num, multiple = config.num_replicas, config.count_multiple
    local = table.largest("cost") + local_count * config.cost.fixed
    needed = max(1, -(-table.total("num_padded_tokens") // (num * config.token_budget)))
    bound = step_cost_bound(table.total("cost"), table.largest("cost_largest"), num_replicas=num)
    bound += -(-needed // multiple) * multiple * config.cost.fixed
    return (local - bound) * _PPM > local * _LEAST_GAIN
