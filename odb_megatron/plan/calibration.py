"""A cost model fitted to measured micro-batch times: `linear * L + quadratic * L**2 + fixed`.

Pure; nothing here measures. Each replica trims its own outliers (in floats: that decides nothing
jointly) and sends integer sums of its normal equations; the fit is exact rational arithmetic on the
gathered sums, so all replicas find the same integers. What the data cannot tell keeps the value it
has in the model that was in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.least_squares import Matrix, Vector, dot, form, inverse, non_negative
from odb_megatron.plan.records import CalibrationRecord, RecordTable

__all__ = [
    "CALIBRATION_STEPS",
    "WARM_UP_STEPS",
    "CostFit",
    "MicroBatchTime",
    "Row",
    "calibration_record",
    "fit_cost",
    "median_error",
    "trim",
]

WARM_UP_STEPS = 3
"""First steps of a run, which are not measured."""

CALIBRATION_STEPS = 20
"""Steps before the fit, warm-up included."""

_LEAST_ROWS = 16
_MOST_ROWS = 1 << 14
_ROW_BITS = 22
_PATCH_BITS = 6
_LARGEST = 1 << 24  # products of two sum to less than 2**63 over _MOST_ROWS rows
_HEAVIEST, _LIGHTEST = 4.0, 1 / 16
_REWEIGHTINGS = 20
_CUT = 3 * 1.4826  # times the median deviation: three standard deviations of a normal one
_LEAST_SPREAD = 1e-3
_PRECISION = Fraction(1, 10)  # a price is known when its error is below so much of the times
_MOST_INFLATION = 10**6  # of a price's variance by other columns; beyond, rows' rounding decides
_RIDGE = Fraction(1, 1 << 30)
_SIGNIFICANT = 3  # standard errors of the linear price
_MOST_BUDGET_COST = 1 << 38  # far below `cost.MAX_SAMPLE_COST`, for samples over the budget
_NAMES = ("tokens", "squares", "patches", "one")
_TOKENS, _SQUARES, _PATCHES, _ONE = range(4)
_NOT_CLEAR = "the measured times do not follow the lengths clearly enough"
_SHAPE_FIXED = "a micro-batch's price is not told apart from its tokens' and keeps its old ratio"
_SHAPE_QUADRATIC = "lengths vary too little to tell the quadratic price, which keeps its old ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTime:
    """One measured micro-batch.

    Attributes:
        tokens: padded tokens.
        squares: sum of squared padded lengths.
        patches: patches.
        time_ns: forward and backward pass, nanoseconds.
    """

    tokens: int
    squares: int
    patches: int = 0
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One micro-batch in the normal equations, weighted so that relative errors count alike.

    With w = (median time / its own fitted time): tokens * w / budget, squares * w / budget**2 and
    w itself have 22 fractional bits, patches * w has 6, and time * w is in nanoseconds.
    """

    tokens: int
    squares: int
    patches: int
    one: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """What came of a calibration.

    Attributes:
        cost: the model to go on with.
        linear_ps: picoseconds per token; 0 where the old model was kept.
        note: what was not told by the measured times and why; empty where all was.
        num_rows: micro-batches of all replicas that it rests on, outliers left out.
    """

    cost: CostModel
    linear_ps: int = 0
    note: str = ""
    num_rows: int = 0


def trim(times: Sequence[MicroBatchTime]) -> tuple[list[MicroBatchTime], list[float]]:
    """Leave out what a fit to this replica's own times calls outliers.

    Least absolute relative deviations (by reweighting), then a cut at three standard deviations
    estimated from the median deviation. At least half of the times stay.

    Returns:
        What stays, and the fitted time of each in nanoseconds.
    """
    usable = [time for time in times if time.time_ns > 0 and time.tokens > 0]
    if not usable:
        return [], []
    measured = np.array([time.time_ns for time in usable], dtype=np.float64)
    columns = np.array(
        [[time.tokens, time.squares, time.patches, 1] for time in usable], dtype=np.float64
    )
    columns /= np.maximum(columns.max(axis=0), 1.0)
    relative = columns / measured[:, None]
    weights = np.ones(len(usable))
    for _ in range(_REWEIGHTINGS):
        prices, *_ = np.linalg.lstsq(relative * weights[:, None], weights, rcond=1e-9)
        deviations = np.abs(relative @ prices - 1)
        weights = 1 / np.sqrt(np.maximum(deviations, _LEAST_SPREAD))
    kept = deviations <= max(_CUT * float(np.median(deviations)), _LEAST_SPREAD)
    fitted = np.maximum(columns @ prices, measured.min() / 2)
    return (
        [time for time, keep in zip(usable, kept, strict=True) if keep],
        fitted[kept].tolist(),
    )


def calibration_record(
    times: Sequence[MicroBatchTime], *, token_budget: int, step: int, closing: bool = False
) -> CalibrationRecord:
    """Return a replica's sums.

    Args:
        times: what it has measured, idle micro-batches and warm-up left out.
        token_budget: of the run; scales the rows.
        step: step about to be planned.
        closing: see `CalibrationRecord`.
    """
    rows = _rows(*trim(times), token_budget=token_budget)
    shift = max([0, *(row.time.bit_length() - _LARGEST.bit_length() + 1 for row in rows)])
    sums: dict[str, int] = {}
    for at, first in enumerate(_NAMES):
        for second in _NAMES[at:]:
            sums[f"{first}_{second}"] = sum(getattr(r, first) * getattr(r, second) for r in rows)
        sums[f"{first}_time"] = sum(getattr(row, first) * (row.time >> shift) for row in rows)
    sums["time_time"] = sum((row.time >> shift) ** 2 for row in rows)
    record = CalibrationRecord(step=step, num_rows=len(rows), time_shift=shift, closing=closing)
    return replace(record, **sums)  # type: ignore[arg-type]


def fit_cost(
    table: RecordTable[CalibrationRecord], *, prior: CostModel, token_budget: int
) -> CostFit:
    """Fit a model to all replicas' sums; the same records give the same integers everywhere.

    Non-negative least squares. A price is known when its standard error is at most 10 % of the
    times. If all are, they are taken; if the quadratic one is not, it keeps the prior's ratio to
    the linear one, else the fixed one does, and the rest is fitted again. What is then not known,
    or a linear price that is not significant, leaves the prior.

    Args:
        table: the records.
        prior: the model in force.
        token_budget: as in `calibration_record`.
    """
    num_rows = table.total("num_rows")
    if num_rows < _LEAST_ROWS:
        note = f"only {num_rows} micro-batches were measured, {_LEAST_ROWS} are needed"
        return CostFit(cost=prior, note=note)
    sums = _Sums.gather(table, token_budget=token_budget)
    prices, note = _prices(sums, prior)
    if prices is None:
        return CostFit(cost=prior, note=note)
    linear = prices[_TOKENS]
    quadratic = round(prices[_SQUARES] / linear * (1 << 32))
    fixed = round(prices[_ONE] / linear * COST_UNIT)
    per_patch = round(prices[_PATCHES] / linear * COST_UNIT)
    if fixed + per_patch + (quadratic * token_budget**2 >> 16) >= _MOST_BUDGET_COST:
        return CostFit(cost=prior, note=_NOT_CLEAR)
    cost = CostModel(quadratic=quadratic, fixed=fixed, per_patch=per_patch)
    linear_ps = max(1, round(linear * 1000))
    return CostFit(cost=cost, linear_ps=linear_ps, note=note, num_rows=num_rows)


def median_error(times: Sequence[MicroBatchTime], fit: CostFit) -> float:
    """Return the median relative error of a fit on a replica's own times, for its report."""
    kept, _ = trim(times)
    errors = [abs(_predicted_ns(time, fit) / time.time_ns - 1) for time in kept]
    return float(np.median(errors)) if errors else 0.0


def _predicted_ns(time: MicroBatchTime, fit: CostFit) -> float:
    cost = fit.cost
    units = time.tokens * COST_UNIT + (cost.quadratic * time.squares >> 16)
    units += time.patches * cost.per_patch + cost.fixed
    return units / COST_UNIT * fit.linear_ps / 1000


def _rows(
    times: Sequence[MicroBatchTime], fitted: Sequence[float], *, token_budget: int
) -> list[Row]:
    if not times:
        return []
    middle = float(np.median(fitted))
    rows = []
    for time, expected in zip(times[:_MOST_ROWS], fitted[:_MOST_ROWS], strict=True):
        weight = Fraction(min(_HEAVIEST, max(_LIGHTEST, middle / expected)))
        unit = weight * (1 << _ROW_BITS)
        row = Row(
            tokens=round(time.tokens * unit / token_budget),
            squares=round(time.squares * unit / token_budget**2),
            patches=round(time.patches * weight * (1 << _PATCH_BITS)),
            one=min(round(unit), _LARGEST - 1),
            time=round(time.time_ns * weight),
        )
        if max(row.tokens, row.squares, row.patches) < _LARGEST:
            rows.append(row)
    return rows


def _prices(sums: _Sums, prior: CostModel) -> tuple[Vector | None, str]:
    """Return prices per (token, token squared, patch, micro-batch), and what they do not tell."""
    quadratic = Fraction(prior.quadratic, 1 << 32)
    fixed = Fraction(prior.fixed, COST_UNIT)
    has_patches = sums.products[_PATCHES][_PATCHES] > 0
    patch = 0 if has_patches else Fraction(prior.per_patch, COST_UNIT)
    squares, one = _column(squares=1), _column(one=1)
    patches = (_column(patches=1),) if has_patches else ()
    columns = (_column(tokens=1, patches=patch), squares, one, *patches)
    prices, are_known = sums.solve(columns)
    if all(are_known):
        return prices, "" if prices else _NOT_CLEAR
    if are_known[1]:
        note = _SHAPE_FIXED
        columns = (_column(tokens=1, patches=patch, one=fixed), squares, *patches)
    else:
        note = _SHAPE_QUADRATIC
        columns = (_column(tokens=1, patches=patch, squares=quadratic), one, *patches)
    prices, are_known = sums.solve(columns)
    return (prices, note) if prices and all(are_known) else (None, _NOT_CLEAR)


def _column(**parts: Fraction | int) -> Vector:
    return tuple(Fraction(parts.get(name, 0)) for name in _NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Normal equations in tokens, tokens squared, patches, micro-batches and nanoseconds."""

    products: Matrix
    times: Vector
    time_time: Fraction
    num_rows: int

    @classmethod
    def gather(cls, table: RecordTable[CalibrationRecord], *, token_budget: int) -> _Sums:
        rows = 1 << _ROW_BITS
        units = (
            Fraction(token_budget, rows),
            Fraction(token_budget**2, rows),
            Fraction(1, 1 << _PATCH_BITS),
            Fraction(1, rows),
        )
        shifts: list[int] = table.column("time_shift").tolist()

        def total(name: str, power: int) -> int:
            values: list[int] = table.column(name).tolist()
            return sum(value << power * shift for value, shift in zip(values, shifts, strict=True))

        def product(i: int, j: int) -> Fraction:
            i, j = min(i, j), max(i, j)
            return total(f"{_NAMES[i]}_{_NAMES[j]}", 0) * units[i] * units[j]

        return cls(
            products=tuple(tuple(product(i, j) for j in range(4)) for i in range(4)),
            times=tuple(total(f"{name}_time", 1) * units[i] for i, name in enumerate(_NAMES)),
            time_time=Fraction(total("time_time", 2)),
            num_rows=table.total("num_rows"),
        )

    def solve(self, columns: Matrix) -> tuple[Vector | None, list[bool]]:
        """Fit a price to each column.

        Returns:
            The prices per (token, token squared, patch, micro-batch), None where the first
            column's is not significant; and for each column whether its price is known.
        """
        size = len(columns)
        gram = tuple(tuple(form(a, self.products, b) for b in columns) for a in columns)
        right = tuple(dot(column, self.times) for column in columns)
        found, explained = non_negative(gram, right)
        variance = max(Fraction(0), self.time_time - explained) / (self.num_rows - size)
        inverted = inverse(
            tuple(
                tuple(value * (1 + _RIDGE) if i == j else value for j, value in enumerate(row))
                for i, row in enumerate(gram)
            )
        )
        if inverted is None:  # a column of zeros
            return None, [False] * size
        inflations = [inverted[at][at] * gram[at][at] for at in range(size)]
        are_known = [
            inflation <= _MOST_INFLATION and variance * inflation <= _PRECISION**2 * self.time_time
            for inflation in inflations
        ]
        if found[0] <= 0 or found[0] ** 2 < _SIGNIFICANT**2 * variance * inverted[0][0]:
            return None, are_known
        prices = tuple(dot(found, [column[i] for column in columns]) for i in range(4))
        return prices, are_known
