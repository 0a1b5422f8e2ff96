"""Charts of the data: how long samples are, and which of them hold the tokens.

Only draws what was read; each chart repeats its numbers as a table.
"""

from __future__ import annotations

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

_NUM_BINS = 32


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
    ordered = np.sort(lengths)
    samples = np.arange(1, len(ordered) + 1) / len(ordered)
    tokens = np.cumsum(ordered) / ordered.sum()
    marks = sorted({*np.linspace(0, len(ordered) - 1, 200).astype(int).tolist()})

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        for values, colour, style, name in (
            (samples, BLUE, "-", "of samples"),
            (tokens, ORANGE, "--", "of tokens"),
        ):
            axes.step(
                ordered[marks],
                100 * values[marks],
                where="post",
                color=colour,
                linestyle=style,
                label=name,
            )
        _length_axis(axes, lengths, is_narrow=form.is_narrow)
        axes.set_xlabel("samples up to so many tokens")
        axes.set_ylabel("per cent")
        axes.set_ylim(0, 101)
        axes.grid(axis="y")
        axes.legend(loc="upper left")
        _mark_limit(axes, limit, lengths)

    rows = []
    for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        at = min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)
        rows.append([f"{share:.0%}", str(ordered[at]), f"{tokens[at]:.1%}"])
    return Chart(
        title="Where the tokens are",
        draw=draw,
        caption="The share of samples and of tokens in samples up to a length. The wider apart the "
        "lines, the more a batch padded to its longest sample wastes.",
        table=Table(columns=("of samples", "up to tokens", "of tokens"), rows=rows),
        height=300,
        narrow_height=260,
    )


def _bins(lengths: Integers) -> npt.NDArray[np.float64]:
    low, high = int(lengths.min()), int(lengths.max()) + 1
    edges = np.geomspace(low, high, _NUM_BINS + 1)
    return np.unique(np.round(edges)) if high - low > 1 else np.array([low, high], dtype=np.float64)


def _length_axis(axes: Axes, lengths: Integers, *, is_narrow: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    low, high = int(lengths.min()), int(lengths.max()) + 1
    powers = [1 << bits for bits in range(41) if low <= 1 << bits <= high]
    most = 5 if is_narrow else 10
    axes.xaxis.set_major_locator(FixedLocator(powers[:: -(-len(powers) // most)] or [low]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a sample")


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
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"
