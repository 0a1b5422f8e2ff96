"""Mean and 95 % interval of paired differences, and of paired ratios, by Student's t.

Pure. Must not pair anything: the caller passes ratios of runs that belong together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interval", "difference_interval", "rate_ratio_interval", "ratio_interval"]

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval; None where one value gives none."""

    mean: float
    low: float | None
    high: float | None

    def as_json(self) -> dict[str, object]:
        """Return `{"mean": ..., "ci95": [low, high]}`."""
        return {"mean": self.mean, "ci95": [self.low, self.high]}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f} (one run: no interval)"
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


def difference_interval(differences: Sequence[float]) -> Interval:
    """Return the mean of `differences` and its 95 % interval.

    Past 31 values the quantile of 30 degrees of freedom is used: slightly too wide, never too
    narrow.

    Raises:
        ValueError: no value.
    """
    if not differences:
        raise ValueError("there must be at least one value; got none")
    count = len(differences)
    mean = sum(differences) / count
    if count == 1:
        return Interval(mean=mean, low=None, high=None)
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    quantile = _T_975[min(count - 1, len(_T_975)) - 1]
    half = quantile * math.sqrt(variance / count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of `ratios` and its 95 % interval, from their logarithms.

    Raises:
        ValueError: no ratio, or one that is not positive.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios must be positive and at least one; got {list(ratios)}")
    logs = difference_interval([math.log(ratio) for ratio in ratios])
    bounds = [None if value is None else math.exp(value) for value in (logs.low, logs.high)]
    return Interval(mean=math.exp(logs.mean), low=bounds[0], high=bounds[1])


def rate_ratio_interval(
    over: Sequence[tuple[float, float]], under: Sequence[tuple[float, float]]
) -> Interval:
    """Return the ratio of two rates, each total work over total time, and its 95 % interval.

    The interval is the jackknife's: each round is left out in turn, of both, and Student's t is
    taken of the logarithms' pseudo-values. A round's own ratio is not used, because rounds whose
    work differs do not count alike.

    Args:
        over: (work, time) of each round.
        under: (work, time) of the same rounds.

    Raises:
        ValueError: rounds that do not pair, none, or work or time that is not positive.
    """
    values = [value for pair in (*over, *under) for value in pair]
    if not over or len(over) != len(under) or min(values) <= 0:
        raise ValueError(
            "work and time must be positive, of the same rounds and at least one; got "
            f"{list(over)} and {list(under)}"
        )

    def log_ratio(left_out: int | None) -> float:
        sums = [
            sum(pair[part] for index, pair in enumerate(rounds) if index != left_out)
            for rounds in (over, under)
            for part in (0, 1)
        ]
        return math.log(sums[0] / sums[1] / (sums[2] / sums[3]))

    count, whole = len(over), log_ratio(None)
    if count == 1:
        return Interval(mean=math.exp(whole), low=None, high=None)
    pseudo = [count * whole - (count - 1) * log_ratio(index) for index in range(count)]
    spread = difference_interval(pseudo)
    assert spread.low is not None
    half = spread.mean - spread.low
    return Interval(mean=math.exp(whole), low=math.exp(whole - half), high=math.exp(whole + half))
