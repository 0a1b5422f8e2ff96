"""Which single steps of a run are worth showing: of median balance, and the least balanced one.

Pure: figures in, places of steps out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.report.run_figures import RunFigures

__all__ = ["ChosenSteps", "choose_steps"]

_NUM_USUAL = 2  # what a phone's width has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSteps:
    """Steps, by their places in the run.

    Attributes:
        usual: one or two whose balance is nearest the median; where none has one, of the middle.
        worst: the one of least balance, none of `usual`; None where no step is below the median.
        kind: `measured`, or `predicted` where nothing was timed.
        values: balance of each step, NaN where it is not known or not looked at.
        median: of `values`; NaN where none is known.
        has_aside: whether the first step of each start is not looked at.
    """

    usual: tuple[int, ...]
    worst: int | None = None
    kind: str = ""
    values: npt.NDArray[np.float64]
    median: float = math.nan
    has_aside: bool = False


def choose_steps(figures: RunFigures) -> ChosenSteps:
    """Choose steps; the first one of each start is looked at only where there is no other."""
    measured = figures.per_step["balance_measured"]
    is_timed = not np.isnan(measured).all()
    balance = measured if is_timed else figures.per_step["balance"]
    values = np.where(figures.is_late, balance, math.nan)  # others pay for what is done once
    has_aside = not figures.is_late.all() and not np.isnan(values).all()
    if not has_aside:
        values = balance
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        middle = max(0, len(values) // 2 - 1)
        places = range(middle, min(middle + _NUM_USUAL, len(values)))
        return ChosenSteps(usual=tuple(places), values=values)
    median = float(np.median(values[known]))
    worst = int(known[np.argmin(values[known])])
    nearest = known[np.argsort(np.abs(values[known] - median), kind="stable")[:_NUM_USUAL]]
    has_worst = values[worst] < median
    usual = [int(at) for at in nearest if not (has_worst and at == worst)]
    return ChosenSteps(
        usual=tuple(sorted(usual)),
        worst=worst if has_worst else None,
        kind="measured" if is_timed else "predicted",
        values=values,
        median=median,
        has_aside=has_aside,
    )
