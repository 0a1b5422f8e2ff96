"""Fits the cost model to the micro-batch times of a logged run (`trace --fit-cost`).

Least squares with coefficients of at least 0, on relative errors. What the times cannot tell apart
keeps the ratio that the run planned with, which is said; a fit that says nothing is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostCoefficients
from odb_megatron.report.steps import RunLog

__all__ = ["CostFit", "fit_cost"]

Values = npt.NDArray[np.float64]

_WARM_UP_STEPS = 3  # of each process start
_MIN_ROWS = 16
_REWEIGHTINGS = 20
_CUT = 3 * 1.4826  # times the median deviation: three standard deviations of a normal one
_MIN_DEVIATION = 1e-3
_PRECISION = 0.1  # a price is known when its standard error is below so much of the times
_MAX_INFLATION = 1e6  # of its variance by other columns
_RIDGE = 1e-9  # inflates the variance of columns that others make up, and lets a matrix be inverted
_SIGNIFICANT = 3.0  # standard errors of the linear price
_MAX_ERROR = 0.2  # median relative error
_TOKENS, _SQUARES, _PATCHES, _ONE, _FIRST = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A fitted cost model.

    Attributes:
        prices: in microseconds.
        num_rows: micro-batches that it rests on.
        num_outliers: those left out.
        median_error: of their times, relative.
        explained: share of the times' variance.
        notes: what the times do not tell.
    """

    prices: CostCoefficients
    num_rows: int
    num_outliers: int
    median_error: float
    explained: float
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return it as text; the first line is the flag."""
        return [
            f"--odb-cost {self.prices}",
            f"  microseconds, fitted to {self.num_rows} micro-batches (the first {_WARM_UP_STEPS} "
            f"steps of each start and {self.num_outliers} outliers left out): median error "
            f"{self.median_error:.1%}, {self.explained:.1%} of the variance explained",
            *(f"  note: {note}" for note in self.notes),
        ]


def fit_cost(run: RunLog) -> CostFit:
    """Fit the cost model of a run.

    Raises:
        ValueError: its times do not support one; says why.
    """
    columns, seconds = _rows(run)
    if len(seconds) < _MIN_ROWS:
        raise ValueError(f"no cost model: {_why_few(run, len(seconds))}")
    prior = CostCoefficients.parse(run.headers[-1].cost)
    scale = np.maximum(columns.max(axis=0), 1.0)
    kept, fitted = _trimmed(columns / scale, seconds)
    columns, seconds = columns[kept], seconds[kept]
    found, notes = _prices(columns / fitted[kept, None], seconds / fitted[kept], prior)
    expected = columns @ found
    error = float(np.median(np.abs(expected / seconds - 1)))
    if error > _MAX_ERROR:
        raise ValueError(
            f"no cost model: the median micro-batch's time is {error:.0%} off the best fit, so "
            "times depend on something else than lengths; time a run on an otherwise idle machine"
        )
    rest, spread = seconds - expected, seconds - seconds.mean()
    linear, quadratic, patch, overhead, _ = (float(f"{price * 1e6:.5g}") for price in found)
    if run.headers[-1].sizes.get("ep", 1) > 1:
        notes += ("with expert parallelism times have waits for other replicas in them",)
    return CostFit(
        prices=CostCoefficients(linear=linear, quadratic=quadratic, overhead=overhead, patch=patch),
        num_rows=len(seconds),
        num_outliers=int((~kept).sum()),
        median_error=error,
        explained=max(0.0, 1 - float(rest @ rest) / max(float(spread @ spread), 1e-300)),
        notes=notes,
    )


def _rows(run: RunLog) -> tuple[Values, Values]:
    """Return what the times of micro-batches are made of, and the times [n].

    The columns are tokens, sum of squared lengths, patches, 1, and whether it is the first of a
    step, whose time has waits in it; float64 [n, 5].
    """
    columns, seconds = [], []
    for step in run.steps:
        header = run.headers[step.part]
        if step.iteration <= header.iteration + _WARM_UP_STEPS:
            continue
        for record in step.records.values():
            patches = record.patches or (0,) * len(record.lengths)
            times = record.micro_batch_s
            for at, time in enumerate(times[:-1] or times):  # the last has the gradients' reduction
                is_shared = bool(record.shares) and record.shares[at] > 1
                if not record.lengths[at] or is_shared or time <= 0:
                    continue  # idle, or not this replica's alone
                lengths = np.array(record.lengths[at], dtype=np.float64)
                padded = -(-lengths // header.multiple) * header.multiple
                columns.append((record.widths[at], padded @ padded, patches[at], 1, at == 0))
                seconds.append(time)
    return np.array(columns, dtype=np.float64).reshape(-1, 5), np.array(seconds, dtype=np.float64)


def _why_few(run: RunLog, num_rows: int) -> str:
    header = run.headers[-1]
    if header.batches == "padded":
        return "the padded baseline times no micro-batch; give the log of a run with --odb"
    if header.sizes.get("pp", 1) > 1:
        return (
            "micro-batches of pipelined runs overlap and are not timed; fit to a run with "
            "--pipeline-model-parallel-size 1 and the same layers per stage"
        )
    return (
        f"{num_rows} micro-batches were timed after the first {_WARM_UP_STEPS} steps, and "
        f"{_MIN_ROWS} are needed; log a longer run"
    )


def _trimmed(columns: Values, seconds: Values) -> tuple[npt.NDArray[np.bool_], Values]:
    """Return which rows are no outliers, and the fitted time of each.

    Least absolute relative deviations, by reweighting.
    """
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        prices, *_ = np.linalg.lstsq(relative * weights[:, None], weights, rcond=1e-9)
        deviations = np.abs(relative @ prices - 1)
        weights = 1 / np.sqrt(np.maximum(deviations, _MIN_DEVIATION))
    kept = deviations <= max(_CUT * float(np.median(deviations)), _MIN_DEVIATION)
    return kept, np.maximum(columns @ prices, seconds.min() / 2)


def _prices(
    columns: Values, seconds: Values, prior: CostCoefficients
) -> tuple[Values, tuple[str, ...]]:
    """Return the price of each column, and what the times do not tell."""
    ratios = np.array([0.0, prior.quadratic, prior.patch, prior.overhead, 0.0]) / prior.linear
    free = [_TOKENS, _SQUARES, _ONE]
    has_patches = bool(columns[:, _PATCHES].any())
    free += [_PATCHES] * has_patches
    firsts = columns[:, _FIRST] > 0
    free += [_FIRST] * bool(firsts.any() and not firsts.all())
    found, known = _solved(columns, seconds, free, ratios)
    if known.all():
        return found, ()
    held, note = _ONE, "a micro-batch's overhead is not told apart from its tokens'"
    if not known[free.index(_SQUARES)]:
        held, note = _SQUARES, "lengths vary too little to tell the quadratic price"
    free.remove(held)
    found, known = _solved(columns, seconds, free, ratios)
    if not known.all():
        raise ValueError(
            "no cost model: micro-batches are too much alike, or their times too noisy, to tell "
            "the price of a token; log a longer run, or one on an otherwise idle machine"
        )
    return found, (f"{note}: it keeps its old ratio to a token's",)


def _solved(
    columns: Values, seconds: Values, free: list[int], ratios: Values
) -> tuple[Values, npt.NDArray[np.bool_]]:
    """Fit prices; those that are not free keep their ratio to a token's.

    Returns:
        The price of each column, and whether each free one is known.
    """
    design = columns[:, free].copy()
    held = [at for at in range(len(ratios)) if at not in free]
    design[:, 0] += columns[:, held] @ ratios[held]
    scale = np.sqrt((design**2).mean(axis=0))
    design /= scale
    gram, right = design.T @ design, design.T @ seconds
    found = _non_negative(gram, right)
    rest = seconds - design @ found
    variance = float(rest @ rest) / max(1, len(seconds) - len(free))
    inverse = np.linalg.inv(gram + _RIDGE * np.diag(np.diag(gram)))
    errors = np.sqrt(variance * np.diag(inverse))
    known = (errors <= _PRECISION) & (np.diag(inverse) * np.diag(gram) <= _MAX_INFLATION)
    known |= np.array(free) == _FIRST  # no price: what a step's first micro-batch waits for
    known[0] &= found[0] >= _SIGNIFICANT * errors[0]
    prices = np.zeros(len(ratios))
    prices[free] = found / scale
    prices[held] = ratios[held] * prices[_TOKENS]
    return prices, known


def _non_negative(gram: Values, right: Values) -> Values:
    """Return the non-negative least-squares solution: the best of all sets of positive ones."""
    size, best, most = len(right), np.zeros(len(right)), 0.0
    for count in range(1, size + 1):
        for chosen in map(list, combinations(range(size), count)):
            found, *_ = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], right[chosen], rcond=1e-12)
            explained = float(found @ right[chosen])
            if found.min() >= 0 and explained > most * (1 + 1e-12):
                best, most = np.zeros(size), explained
                best[chosen] = found
    return best
