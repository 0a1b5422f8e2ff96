"""Measures micro-batches to calibrate the cost model, and checks predictions against times.

Must not plan: the fit is the package's own (`report.cost_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gpu_arms import MicroBatch
from gpu_measure import MicroBatchTime, StepMaker, Steps, microbatch_cost, run_step

from odb_megatron.plan.cost import CostModel, CostPrices, ModelShape
from odb_megatron.report.cost_fit import fit_times

__all__ = ["CostCheck", "calibrate", "check_cost", "shape_cost", "varied_micro_batches"]

_FIXED_SHARE = 0.05
"""As `megatron.cost_model` has it where nothing was measured."""


def shape_cost(shape: ModelShape, *, token_budget: int) -> CostModel:
    """The cost model that follows from the model's shape, as without `--odb-cost`."""
    return CostModel.from_ratios(
        quadratic=shape.quadratic_ratio, fixed_tokens=_FIXED_SHARE * token_budget
    )


def varied_micro_batches(
    lengths: Sequence[int], *, count: int, token_budget: int, seed: int
) -> list[MicroBatch]:
    """Choose micro-batches that differ in tokens and in how long their samples are.

    Each has a share of the budget of its own, from a tenth to all of it, and is filled at random
    from one part of the samples sorted by length.
    """
    random = np.random.default_rng([seed, 5])
    order = np.argsort(np.array(lengths), kind="stable")
    found: list[MicroBatch] = []
    for index in range(count):
        room = int(token_budget * (0.1 + 0.9 * random.random()))
        low = [0.0, 0.25, 0.5, 0.9][index % 4]
        part = order[int(low * len(order)) :]
        chosen: list[int] = []
        for position in random.permutation(part).tolist():
            if lengths[position] > room:
                if chosen:
                    break
                continue
            chosen.append(position)
            room -= lengths[position]
        found.append(tuple(chosen) or (int(order[0]),))
    return found


def calibrate(
    trainer: Steps,
    maker: StepMaker,
    batches: Sequence[MicroBatch],
    *,
    shape: ModelShape,
    token_budget: int,
) -> tuple[CostModel, str, list[MicroBatchTime]]:
    """Train the micro-batches and fit a cost model to their times, as `--fit-cost` does.

    The first quarter is warm-up.

    Returns:
        The model, why it is the shape's or what of it is (else ""), and the times.
    """
    warm_up = len(batches) // 4
    run_step(trainer, (tuple(batches[:warm_up]),), maker, is_padded=False, shape=shape)
    step = run_step(trainer, (tuple(batches[warm_up:]),), maker, is_padded=False, shape=shape)
    times = list(step.times[0])
    prior = shape_cost(shape, token_budget=token_budget)
    columns = [(one.tokens, one.squares, 0, 1, 0) for one in times]
    seconds = np.array([one.time_ns / 1e9 for one in times])
    try:
        fit = fit_times(np.array(columns, dtype=float), seconds, prior=CostPrices.of(prior))
    except ValueError as error:
        return prior, str(error), times
    return fit.prices.model(), "; ".join(fit.notes), times


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCheck:
    """How well predicted costs follow measured times, one scale factor being fitted.

    Attributes:
        num: micro-batches.
        r2: 1 - residual / total variance; None for fewer than three micro-batches.
        median_relative_error: of predicted against measured.
        worst_relative_error: likewise.
        worst: the micro-batch that has it: tokens and sum of squares.
    """

    num: int
    r2: float | None
    median_relative_error: float
    worst_relative_error: float
    worst: tuple[int, int]

    def as_json(self) -> dict[str, object]:
        """Return what the report has."""
        return {
            "num_micro_batches": self.num,
            "r2": self.r2,
            "median_relative_error": self.median_relative_error,
            "worst_relative_error": self.worst_relative_error,
            "worst_tokens": self.worst[0],
            "worst_squares": self.worst[1],
        }


def check_cost(times: Sequence[MicroBatchTime], cost: CostModel) -> CostCheck | None:
    """Compare costs with times; None where nothing was measured."""
    usable = [time for time in times if time.time_ns > 0]
    if not usable:
        return None
    measured = np.array([time.time_ns for time in usable], dtype=np.float64)
    predicted = np.array([microbatch_cost(time, cost) for time in usable], dtype=np.float64)
    predicted *= float(measured @ predicted) / float(predicted @ predicted)
    errors = np.abs(predicted / measured - 1)
    total = float(((measured - measured.mean()) ** 2).sum())
    residual = float(((measured - predicted) ** 2).sum())
    at = int(errors.argmax())
    return CostCheck(
        num=len(usable),
        r2=1 - residual / total if len(usable) > 2 and total > 0 else None,
        median_relative_error=float(np.median(errors)),
        worst_relative_error=float(errors[at]),
        worst=(usable[at].tokens, usable[at].squares),
    )
