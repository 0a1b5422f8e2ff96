"""Trials of the planner, and in words why one of them is preferred.

Pure. Runs nothing; the rule by which one is chosen is `advice`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_megatron.inspection.logits import LogitsMemory
from odb_megatron.inspection.prediction import Method
from odb_megatron.plan.policy import ExchangeMode, PolicyName

__all__ = [
    "TOLERANCE",
    "WINDOW_TOLERANCE",
    "Trial",
    "budget_reason",
    "exchange_reason",
    "first_within",
    "way_reason",
    "window_reason",
]

TOLERANCE = 0.02
WINDOW_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the planner.

    Attributes:
        policy: step policy.
        exchange: exchange mode.
        token_budget: of a micro-batch.
        window: in force under `cost`, else 0.
        method: its figures.
        logits: memory of its logits; None where the vocabulary is not known.
    """

    policy: PolicyName
    exchange: ExchangeMode
    token_budget: int
    window: int
    method: Method
    logits: LogitsMemory | None = None


def first_within(trials: Sequence[Trial], tolerance: float) -> Trial:
    best = max(trial.method.rate for trial in trials)
    return next(trial for trial in trials if trial.method.rate >= best * (1 - tolerance))


def way_reason(trials: Sequence[Trial], chosen: Trial) -> str:
    best = max(trials, key=lambda trial: trial.method.rate)
    if chosen.policy is PolicyName.SAMPLES:
        others = [trial for trial in trials if trial.policy is PolicyName.COST]
        if not others:
            return "keeps the baseline's samples in every step"
        other = max(others, key=lambda trial: trial.method.rate)
        return (
            f"keeps the baseline's samples in every step; cost, exchange {other.exchange.value}, "
            f"is {_gain(other, chosen)} against it, and below +{TOLERANCE:.0%} that decides"
        )
    same = [trial for trial in trials if trial.policy is PolicyName.SAMPLES]
    other = max(same, key=lambda trial: trial.method.rate)
    what = "the fastest" if chosen is best else f"within {TOLERANCE:.0%} of the fastest"
    return (
        f"{what}: {_gain(chosen, other)} against samples, exchange {other.exchange.value} (steps "
        "are composed anew, around the same global batch size)"
    )


def exchange_reason(trials: Sequence[Trial], chosen: Trial, *, num_replicas: int) -> str:
    if num_replicas == 1:
        return "one replica has nobody to hand samples to"
    pair = {trial.exchange: trial for trial in trials if trial.policy is chosen.policy}
    none, tokens = pair[ExchangeMode.NONE], pair[ExchangeMode.TOKENS]
    moved = tokens.method.bytes_moved_per_step / 1e6
    return (
        f"tokens is {_gain(tokens, none)} against none: balance {none.method.balance:.3f} to "
        f"{tokens.method.balance:.3f}, for {moved:.2f} MB per step on the CPU network"
    )


def window_reason(trials: Sequence[Trial], chosen: Trial) -> str:
    rates = ", ".join(f"{trial.window}: {trial.method.rate:.3f}" for trial in trials)
    return f"the smallest within {WINDOW_TOLERANCE:.0%} of the fastest (rate by window: {rates})"


def budget_reason(trials: Sequence[Trial], chosen: Trial, asked: int) -> str:
    rates = ", ".join(f"{trial.token_budget}: {trial.method.rate:.3f}" for trial in trials)
    text = f"the smallest within {TOLERANCE:.0%} of the fastest (rate by budget: {rates})"
    if chosen.logits is not None:
        text += f"; its logits peak at {chosen.logits.peak_gib:.2f} GiB"
    used = next((trial for trial in trials if trial.token_budget == asked), None)
    if used is not None and used is not chosen:
        text += f"; {_gain(chosen, used)} against the {asked} asked for"
    return text


def _gain(over: Trial, under: Trial) -> str:
    return f"{over.method.rate / under.method.rate - 1:+.1%}"
