"""Charts of the data: how long samples are, and which of them hold the tokens.

Only draws what was read; each chart repeats its numbers as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.findings import Findings
from odb_megatron.pages import Chart, Form, Table
from odb_megatron.pages.pictures import set_tooltip
from odb_megatron.pages.theme import BLUE, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

__all__ = ["lengths_chart", "tokens_chart"]

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NUM_BINS = 32
_NUM_MARKS = 200  # of each line
_MARGIN = 1.04  # of an axis, on either side
_NEAREST_TICKS = 0.09  # as a share of the axis


def lengths_chart(findings: Findings) -> Chart:
    lengths, limit = findings.reading.lengths, findings.setting.limit
    edges = _bins(lengths)
    counts, _ = np.histogram(lengths, bins=edges)

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        bars = axes.bar(
            edges[:-1], counts, width=np.diff(edges), align="edge", color=BLUE, linewidth=0.8
        )
        for bar, low, high, count in zip(bars, edges, edges[1:], counts, strict=False):
            set_tooltip(bar, f"{low:.0f} to {high - 1:.0f} tokens: {count} samples")
        _length_axis(axes, lengths, is_narrow=form.is_narrow)
        axes.set_ylabel("samples")
        axes.locator_params(axis="y", integer=True)
        axes.grid(axis="y")
        _mark_limit(axes, limit, lengths)

    rows = [
        [f"{low:.0f} to {high - 1:.0f}", str(count)]
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    return Chart(
        title="How long samples are",
        draw=draw,
        caption=f"{len(lengths)} samples, tokens after templating and tokenization, before any "
        f"cut; mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, coefficient of "
        f"variation {lengths.std() / lengths.mean():.2f}. The axis is logarithmic.",
        table=Table(columns=("tokens", "samples"), rows=rows),
        height=300,
        narrow_height=260,
    )


def tokens_chart(findings: Findings) -> Chart:
    lengths, limit = findings.reading.lengths, findings.setting.limit
    share = _Shares(lengths)
    marks = share.marks(limit)
    left, right = _span(lengths)
    at = [left, *marks, right]

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        for values, colour, style, name in (
            (share.of_samples(marks), BLUE, "-", "of samples"),
            (share.of_tokens(marks), ORANGE, "--", "of tokens"),
        ):
            axes.step(
                at,
                100 * np.array([0, *values, 1]),
                where="post",
                color=colour,
                linestyle=style,
                label=name,
            )
        _length_axis(axes, lengths, is_narrow=form.is_narrow)
        axes.set_xlabel("samples up to so many tokens")
        axes.set_ylabel("per cent")
        axes.set_ylim(-1, 101)
        axes.grid(axis="y")
        axes.legend(loc="upper left")
        _mark_limit(axes, limit, lengths)

    shown = share.quantiles((0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0))
    rows = [
        [str(length), f"{samples:.1%}", f"{tokens:.1%}"]
        for length, samples, tokens in zip(
            shown, share.of_samples(shown), share.of_tokens(shown), strict=True
        )
    ]
    return Chart(
        title="Where the tokens are",
        draw=draw,
        caption="The share of samples and of tokens in samples up to a length. The wider apart the "
        "lines, the more a batch padded to its longest sample wastes.",
        table=Table(columns=("up to tokens", "of samples", "of tokens"), rows=rows),
        height=300,
        narrow_height=260,
    )


class _Shares:
    """Which shares of all samples and of all tokens samples up to a length hold, exactly."""

    def __init__(self, lengths: Integers) -> None:
        self._ordered = np.sort(lengths)
        self._tokens = np.concatenate(([0], np.cumsum(self._ordered)))

    def of_samples(self, at: Sequence[int]) -> Floats:
        return self._num(at) / len(self._ordered)

    def of_tokens(self, at: Sequence[int]) -> Floats:
        shares: Floats = self._tokens[self._num(at)] / self._tokens[-1]
        return shares

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Return the lengths up to which these shares of the samples are."""
        num = len(self._ordered)
        return sorted({int(self._ordered[max(0, math.ceil(share * num) - 1)]) for share in shares})

    def marks(self, limit: int) -> list[int]:
        """Return lengths to draw a line at: all, or so many that it rises a little between them."""
        ordered = self._ordered
        every = np.unique(ordered)
        if len(every) <= _NUM_MARKS:
            return [int(length) for length in every]
        by_samples = np.linspace(0, len(ordered) - 1, _NUM_MARKS).astype(np.int64)
        wanted = np.linspace(0, int(self._tokens[-1]), _NUM_MARKS)
        by_tokens = np.searchsorted(self._tokens[1:], wanted).clip(max=len(ordered) - 1)
        round_ones = [at for at in (limit, *_powers(every[0], every[-1])) if at <= every[-1]]
        drawn = {*ordered[by_samples].tolist(), *ordered[by_tokens].tolist(), *round_ones}
        return sorted(at for at in drawn if at >= every[0])

    def _num(self, at: Sequence[int]) -> Integers:
        return np.searchsorted(self._ordered, np.array(at, dtype=np.int64), side="right")


def _bins(lengths: Integers) -> npt.NDArray[np.float64]:
    low, high = int(lengths.min()), int(lengths.max()) + 1
    edges = np.geomspace(low, high, _NUM_BINS + 1)
    return np.unique(np.round(edges)) if high - low > 1 else np.array([low, high], dtype=np.float64)


def _length_axis(axes: Axes, lengths: Integers, *, is_narrow: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(*_span(lengths))
    axes.xaxis.set_major_locator(FixedLocator(_ticks(lengths, most=5 if is_narrow else 10)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a sample")


def _span(lengths: Integers) -> tuple[float, float]:
    """Return the ends of the axis: beyond the data, and never so near that one bar fills it."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    if high - low == 1:
        return low / 2, high * 2
    margin = max(_MARGIN, (high / low) ** 0.05)
    return low / margin, high * margin


def _ticks(lengths: Integers, *, most: int) -> list[int]:
    """Return where the axis is labelled: at powers of two, or at lengths where they are too few."""
    low, high = int(lengths.min()), int(lengths.max())
    found = _powers(low, high)
    if len(found) < 3:
        between = np.geomspace(low, high, 4).round().astype(int).tolist()
        left, right = _span(lengths)
        nearest = (right / left) ** max(_NEAREST_TICKS, 0.8 / most)
        found = [low]
        for tick in between:
            if tick >= found[-1] * nearest:
                found.append(tick)
    return found[:: -(-len(found) // most)]


def _powers(low: int, high: int) -> list[int]:
    return [1 << bits for bits in range(41) if low <= 1 << bits <= high]


def _mark_limit(axes: Axes, limit: int, lengths: Integers) -> None:
    """Mark the limit in force, its label on the side that has room."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    if not low < limit < high:
        return
    axes.axvline(limit, color=RED, linestyle="--", linewidth=1.5)
    is_right = (limit / low) > (high / low) ** 0.5
    axes.annotate(
        f"limit {limit}",
        xy=(limit, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if is_right else 4, 2),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
        color=RED,
    )


def _short(value: float) -> str:
    return f"{value / 1024:.0f}k" if value and value % 1024 == 0 else f"{value:.0f}"
