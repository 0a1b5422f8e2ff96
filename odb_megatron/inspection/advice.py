"""Which budget, window, policy and exchange to use, and why: trials of the planner, a stated rule.

Pure. Decides by the simulated rate alone; memory is shown beside it and limits it only where the
user says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.logits import LogitsMemory
from odb_megatron.inspection.prediction import ADVISED, Run, run_policy, simulable
from odb_megatron.inspection.setting import TrainingSetting, require_samples
from odb_megatron.inspection.trials import (
    TOLERANCE,
    WINDOW_TOLERANCE,
    Trial,
    budget_reason,
    exchange_reason,
    first_within,
    way_reason,
    window_reason,
)
from odb_megatron.plan.batch_size import batch_size_warning
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.simulation.setting import Stream

__all__ = ["Advice", "Choice", "advise", "run_advised"]

Integers = npt.NDArray[np.int64]

_WINDOW_FACTORS = (1, 2, 4, 8, 16)
_BUDGET_FACTORS = (1, 2, 3, 4, 6, 8)
_MOST_TRIED = 8192
_MOST_EXCHANGED = 150_000  # samples x replicas
_FEW_MICRO_BATCHES, _POOR_BALANCE = 2, 0.95
_LARGEST_WINDOW = 1 << 16

_WAYS = (
    (PolicyName.SAMPLES, ExchangeMode.NONE),
    (PolicyName.SAMPLES, ExchangeMode.TOKENS),
    (PolicyName.COST, ExchangeMode.NONE),
    (PolicyName.COST, ExchangeMode.TOKENS),
)
"""From what changes a padded baseline least to what changes it most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A recommendation for one flag.

    Attributes:
        flag: the training's flag.
        value: recommended.
        reason: with figures.
    """

    flag: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """All of them.

    Attributes:
        choices: in the order of the flags.
        trials: what they rest on, by subject (`policy`, `window`, `token_budget`).
        warnings: what does not depend on a trial.
        num_samples: that each trial planned.
        gain: rate of the recommended setting over that of the setting asked for (policy samples).
        advised: the trial that the recommended flags are those of.
    """

    choices: Sequence[Choice]
    trials: dict[str, Sequence[Trial]]
    warnings: Sequence[str]
    num_samples: int
    gain: float
    advised: Trial

    @property
    def flags(self) -> str:
        """The recommended flags."""
        return " ".join(f"{choice.flag} {choice.value}" for choice in self.choices)


def advise(
    lengths: Integers,
    setting: TrainingSetting,
    cost: CostModel,
    *,
    vocab: int = 0,
    max_logits_gib: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Try settings and choose.

    Args:
        lengths: of the positions, kept and padded, in the order of the training; 0 for none.
        setting: what the user asked for.
        cost: cost model; the same for every budget.
        vocab: padded vocabulary, 0 where it is not known.
        max_logits_gib: budgets whose logits need more are not tried.
        progress: told each trial before its turn.
    """
    return _Adviser(
        lengths, setting, cost, vocab=vocab, max_logits_gib=max_logits_gib, progress=progress
    ).advise()


def run_advised(
    advice: Advice, lengths: Integers, setting: TrainingSetting, cost: CostModel
) -> Run:
    """Run what was recommended on the samples that the other methods ran on.

    Args:
        advice: recommended.
        lengths: of those positions; where all replicas plan an exchange, their beginning.
        setting: what the user asked for.
        cost: cost model.
    """
    trial = advice.advised
    simulated = replace(
        setting.simulated(cost),
        token_budget=trial.token_budget,
        window=trial.window or setting.window_in_force,
        exchange=trial.exchange,
    )
    part = lengths[: simulable(simulated, len(lengths))]
    stream = Stream.of_epochs(part, epochs=1, cost=cost, seed=setting.seed)
    return run_policy(trial.policy, stream, simulated, name=ADVISED)


class _Adviser:
    def __init__(
        self,
        lengths: Integers,
        setting: TrainingSetting,
        cost: CostModel,
        *,
        vocab: int,
        max_logits_gib: float | None,
        progress: Callable[[str], None],
    ) -> None:
        most = min(_MOST_TRIED, _MOST_EXCHANGED // setting.dp)
        lengths = require_samples(lengths[: max(most, 2 * setting.global_batch_size)])
        self._stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=setting.seed)
        self._setting, self._cost = setting, cost
        self._vocab, self._max_logits_gib, self._progress = vocab, max_logits_gib, progress

    def advise(self) -> Advice:
        setting = self._setting
        ways = [
            (policy, exchange)
            for policy, exchange in _WAYS
            if (setting.dp > 1 or exchange is ExchangeMode.NONE)
            and (policy is PolicyName.SAMPLES or setting.global_batch_size >= setting.dp)
        ]
        trials = [self._try(policy, exchange) for policy, exchange in ways]
        first, chosen = trials[0], first_within(trials, TOLERANCE)
        windows = self._windows(chosen) if chosen.policy is PolicyName.COST else []
        if windows:
            chosen = first_within(windows, WINDOW_TOLERANCE)
        budgets = self._budgets(chosen)
        final = first_within(budgets, TOLERANCE)
        choices = [
            Choice(
                flag="--odb-policy", value=chosen.policy.value, reason=way_reason(trials, chosen)
            ),
            Choice(
                flag="--odb-exchange",
                value=chosen.exchange.value,
                reason=exchange_reason(trials, chosen, num_replicas=setting.dp),
            ),
        ]
        if windows:
            choices.append(
                Choice(
                    flag="--odb-window",
                    value=str(chosen.window),
                    reason=window_reason(windows, chosen),
                )
            )
        choices.append(
            Choice(
                flag="--odb-token-budget",
                value=str(final.token_budget),
                reason=budget_reason(budgets, final, setting.token_budget),
            )
        )
        return Advice(
            choices=choices,
            trials={"policy": trials, "window": windows, "token_budget": budgets},
            warnings=self._warnings(chosen, final),
            num_samples=len(self._stream),
            gain=final.method.rate / first.method.rate,
            advised=final,
        )

    def _try(
        self,
        policy: PolicyName,
        exchange: ExchangeMode,
        *,
        token_budget: int = 0,
        window: int = 0,
    ) -> Trial:
        budget = token_budget or self._setting.token_budget
        window = window or self._setting.window_in_force
        is_cost = policy is PolicyName.COST
        shown = f", window {window}" if is_cost else ""
        self._progress(f"{policy.value}, exchange {exchange.value}, budget {budget}{shown}")
        simulated = replace(
            self._setting.simulated(self._cost),
            token_budget=budget,
            window=window,
            exchange=exchange,
        )
        return Trial(
            policy=policy,
            exchange=exchange,
            token_budget=budget,
            window=window if is_cost else 0,
            method=run_policy(policy, self._stream, simulated).method,
            logits=self._logits(budget),
        )

    def _windows(self, chosen: Trial) -> list[Trial]:
        share = -(-self._setting.global_batch_size // self._setting.dp)
        sizes = {min(share * factor, _LARGEST_WINDOW) for factor in _WINDOW_FACTORS}
        return [
            self._try(chosen.policy, chosen.exchange, window=size)
            for size in sorted({*sizes, self._setting.window_in_force})
        ]

    def _budgets(self, chosen: Trial) -> list[Trial]:
        setting = self._setting
        least = max(setting.seq_length, int(self._stream.lengths.max()))
        budgets = sorted({*(least * factor for factor in _BUDGET_FACTORS), setting.token_budget})
        tokens = float(self._stream.lengths.mean()) * setting.global_batch_size / setting.dp
        found = []
        for budget in budgets:
            logits = self._logits(budget)
            too_large = (
                logits is not None
                and self._max_logits_gib is not None
                and logits.peak_gib > self._max_logits_gib
            )
            if too_large or (budget > 2 * tokens and budget not in (least, setting.token_budget)):
                continue  # does not fit, or no step could fill half of it
            found.append(
                self._try(chosen.policy, chosen.exchange, token_budget=budget, window=chosen.window)
            )
        if not found:
            raise ValueError(
                f"--max-logits-gib {self._max_logits_gib:g} is below what the logits of any budget "
                f"from {least} tokens need: raise it, raise --tp, or lower --seq-length"
            )
        return found

    def _logits(self, budget: int) -> LogitsMemory | None:
        if not self._vocab:
            return None
        setting = self._setting
        return LogitsMemory(token_budget=budget, vocab=self._vocab, tp=setting.tp, cp=setting.cp)

    def _warnings(self, chosen: Trial, final: Trial) -> list[str]:
        setting = self._setting
        found = []
        few = batch_size_warning(
            chosen.policy,
            chosen.exchange,
            global_batch_size=setting.global_batch_size,
            num_replicas=setting.dp,
        )
        if few:
            found.append(few)
        if setting.global_batch_size < setting.dp:
            found.append(
                f"--global-batch-size {setting.global_batch_size} is below the {setting.dp} "
                "replicas: in every step some of them idle; policy cost was not tried, which "
                "needs a sample for each"
            )
        method = final.method
        if method.micro_batches[0] < _FEW_MICRO_BATCHES and method.balance < _POOR_BALANCE:
            found.append(
                f"a step has {method.micro_batches[0]:.1f} micro-batches and balance "
                f"{method.balance:.3f}: so few are hard to balance; a larger --global-batch-size "
                "helps more than any flag here"
            )
        return found
