"""How a policy's steps are composed, against random steps of equal size.

Pure. The comparison is with the same samples in random order, cut into steps of the same sizes, so
that what any composition by chance does to a figure cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["compare_composition"]

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_RANDOM_STEPS = 1000
_MOST_ORDERS = 16
_DECILE, _OUTLIERS = 0.9, 0.99


def compare_composition(
    lengths: Integers, *, sizes: Integers, seed: int
) -> dict[str, float | None]:
    """Return the composition figures of a run's steps.

    * `ks_ratio`: mean over steps of the Kolmogorov-Smirnov distance between the step's lengths and
      all lengths; over that of random steps.
    * `long_sample_weight`: mean of 1 / (tokens of the step) over the longest tenth of the samples,
      relative to all samples; over that of random steps. It is the weight of a long sample's token
      in its step's mean loss.
    * `outlier_share_p99_ratio`: 99th percentile over steps of the share of the step's tokens that
      the longest 1 % of the samples have; over that of random steps.
    * `mean_length_lag1`: correlation of the mean lengths of successive steps (plain).

    Args:
        lengths: of the samples in the order of steps, int64.
        sizes: samples of each step, int64; none of them 0.
        seed: of the random orders.

    Returns:
        None for a figure that is not defined: no steps, or nothing varies.
    """
    if not len(sizes):
        return dict.fromkeys(_NAMES)
    found = _Population(lengths, sizes)
    own = found.measure(lengths)
    random = np.random.default_rng([seed, 2])
    orders = min(_MOST_ORDERS, -(-_RANDOM_STEPS // len(sizes)))
    chance = [found.measure(random.permutation(lengths)) for _ in range(orders)]
    p99 = float(np.quantile(np.concatenate([one.outlier_shares for one in chance]), _OUTLIERS))
    return {
        "ks_ratio": _ratio(own.distance, float(np.mean([one.distance for one in chance]))),
        "long_sample_weight": _ratio(
            own.long_weight, float(np.mean([one.long_weight for one in chance]))
        ),
        "outlier_share_p99_ratio": _ratio(float(np.quantile(own.outlier_shares, _OUTLIERS)), p99),
        "mean_length_lag1": _lag1(own.mean_lengths),
    }


_NAMES = ("ks_ratio", "long_sample_weight", "outlier_share_p99_ratio", "mean_length_lag1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composition:
    """Figures of one order of the samples."""

    distance: float
    long_weight: float
    outlier_shares: Floats
    mean_lengths: Floats


class _Population:
    """The samples, and the steps they are cut into."""

    def __init__(self, lengths: Integers, sizes: Integers) -> None:
        self._sizes = sizes
        self._starts = np.concatenate(([0], np.cumsum(sizes)))
        self._values, counts = np.unique(lengths, return_counts=True)
        self._cumulated = np.cumsum(counts) / len(lengths)
        ordered = np.repeat(self._values, counts)
        self._long = int(ordered[int(_DECILE * (len(ordered) - 1))])
        self._outlier = int(ordered[int(_OUTLIERS * (len(ordered) - 1))])

    def measure(self, lengths: Integers) -> _Composition:
        """Return the figures of the samples in this order."""
        ranks = np.searchsorted(self._values, lengths)
        tokens = np.add.reduceat(lengths, self._starts[:-1])
        weights = np.repeat(1 / tokens, self._sizes)
        outliers = np.where(lengths >= self._outlier, lengths, 0)
        return _Composition(
            distance=float(np.mean([self._distance(ranks, step) for step in range(len(tokens))])),
            long_weight=float(weights[lengths >= self._long].mean() / weights.mean()),
            outlier_shares=np.add.reduceat(outliers, self._starts[:-1]) / tokens,
            mean_lengths=tokens / self._sizes,
        )

    def _distance(self, ranks: npt.NDArray[np.intp], step: int) -> float:
        part = ranks[self._starts[step] : self._starts[step + 1]]
        counts = np.bincount(part, minlength=len(self._values))
        return float(np.abs(np.cumsum(counts) / len(part) - self._cumulated).max())


def _ratio(value: float, chance: float) -> float | None:
    return value / chance if chance > 0 else None


def _lag1(values: Floats) -> float | None:
    if len(values) < 4 or not values[:-1].std() or not values[1:].std():
        return None
    return float(np.corrcoef(values[1:], values[:-1])[0, 1])
