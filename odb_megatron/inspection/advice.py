"""Which token budget to use, and why: trials of the planner, and a stated rule.

Decides by the simulated rate alone; memory is shown beside it and limits it only where the user
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.logits import LogitsMemory
from odb_megatron.inspection.prediction import ADVISED, ODB, Method, Run, run_method
from odb_megatron.inspection.setting import TrainingSetting, require_samples
from odb_megatron.plan.cost import CostModel
from odb_megatron.simulation.schedules import Stream

__all__ = ["TOLERANCE", "Advice", "Trial", "advise", "run_advised"]

Integers = npt.NDArray[np.int64]

TOLERANCE = 0.02
BUDGET_FACTORS = (1, 2, 3, 4, 6, 8)
MAX_TRIED = 8192
FEW_MICRO_BATCHES, POOR_BALANCE = 2, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the planner.

    Attributes:
        token_budget: of a micro-batch.
        method: its figures.
        logits: memory of its logits; None where the vocabulary is not known.
    """

    token_budget: int
    method: Method
    logits: LogitsMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The budget advised, and what it rests on.

    Attributes:
        advised: the trial with the budget advised.
        reason: for it, with figures.
        trials: of budgets, ascending.
        warnings: what no budget changes.
        num_samples: that each trial planned.
        gain: rate of the budget advised over that of the budget asked for.
    """

    advised: Trial
    reason: str
    trials: Sequence[Trial]
    warnings: Sequence[str]
    num_samples: int
    gain: float

    @property
    def flags(self) -> str:
        """The recommended flags."""
        return f"--odb-token-budget {self.advised.token_budget}"


def advise(
    lengths: Integers,
    setting: TrainingSetting,
    cost: CostModel,
    *,
    vocab: int = 0,
    max_logits_gib: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Try budgets and choose the smallest within `TOLERANCE` of the fastest.

    Args:
        lengths: of the positions, kept and padded, in the order of the training; 0 for none.
        setting: what the user asked for.
        cost: cost model; the same for every budget.
        vocab: padded vocabulary, 0 where it is not known.
        max_logits_gib: budgets whose logits need more are not advised.
        progress: told each trial before its turn.

    Raises:
        ValueError: no sample, or no budget is within `max_logits_gib`.
    """
    lengths = require_samples(lengths[: max(MAX_TRIED, 2 * setting.global_batch_size)])
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=setting.seed)

    def attempt(budget: int) -> Trial:
        progress(f"budget {budget}")
        simulated = replace(setting.simulated(cost), token_budget=budget)
        logits = None
        if vocab:
            logits = LogitsMemory(token_budget=budget, vocab=vocab, tp=setting.tp, cp=setting.cp)
        return Trial(
            token_budget=budget,
            method=run_method(ODB, stream, simulated).method,
            logits=logits,
        )

    least = max(setting.seq_length, int(lengths.max()))
    share = float(lengths.mean()) * setting.global_batch_size / setting.dp
    asked = attempt(setting.token_budget)
    trials = []
    for budget in sorted({*(least * factor for factor in BUDGET_FACTORS), asked.token_budget}):
        if budget > 2 * share and budget not in (least, asked.token_budget):
            continue  # no step could fill half of it
        if vocab and max_logits_gib is not None:
            logits = LogitsMemory(token_budget=budget, vocab=vocab, tp=setting.tp, cp=setting.cp)
            if logits.peak_gib > max_logits_gib:
                continue
        trials.append(asked if budget == asked.token_budget else attempt(budget))
    if not trials:
        raise ValueError(
            f"--max-logits-gib {max_logits_gib:g} is below what the logits of any budget from "
            f"{least} tokens need: raise it, raise --tp, or lower --seq-length"
        )
    best = max(trial.method.rate for trial in trials)
    advised = next(trial for trial in trials if trial.method.rate >= best * (1 - TOLERANCE))
    gain = advised.method.rate / asked.method.rate
    return Advice(
        advised=advised,
        reason=_reason(trials, advised, asked),
        trials=trials,
        warnings=_warnings(setting, advised.method),
        num_samples=len(stream),
        gain=gain,
    )


def run_advised(
    advice: Advice, lengths: Integers, setting: TrainingSetting, cost: CostModel
) -> Run:
    """Run what was recommended on the samples that the other methods ran on."""
    simulated = replace(setting.simulated(cost), token_budget=advice.advised.token_budget)
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=setting.seed)
    return run_method(ODB, stream, simulated, label=ADVISED)


def _reason(trials: Sequence[Trial], advised: Trial, asked: Trial) -> str:
    rates = ", ".join(f"{trial.token_budget}: {trial.method.rate:.3f}" for trial in trials)
    text = f"the smallest within {TOLERANCE:.0%} of the fastest (rate by budget: {rates})"
    if advised.logits is not None:
        text += f"; its logits peak at {advised.logits.peak_gib:.2f} GiB"
    if advised is not asked:
        gain = advised.method.rate / asked.method.rate - 1
        text += f"; {gain:+.1%} against the {asked.token_budget} asked for"
    return text


def _warnings(setting: TrainingSetting, method: Method) -> list[str]:
    found = []
    if setting.global_batch_size < setting.dp:
        found.append(
            f"--global-batch-size {setting.global_batch_size} is below the {setting.dp} "
            "replicas: in every step some of them idle"
        )
    elif method.micro_batches[0] < FEW_MICRO_BATCHES and method.balance < POOR_BALANCE:
        found.append(
            f"a step has {method.micro_batches[0]:.1f} micro-batches and balance "
            f"{method.balance:.3f}: so few are hard to balance; a larger --global-batch-size "
            "helps more than any flag here"
        )
    return found
