"""Charts of logged runs over their steps; several runs lie over each other.

Must not compute figures (`run_figures`) or know where they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from odb_megatron.pages import Chart, Form, Table, theme
from odb_megatron.report.run_figures import Bins, RunFigures, bins_of

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

__all__ = ["NamedRun", "Panel", "step_chart"]

_MAX_BINS = 100
_TABLE_ROWS = 20
_STYLES = ("-", "--", "-.", ":")
_FEW_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run and how it is called in a legend."""

    name: str
    figures: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What a chart shows.

    Attributes:
        title: heading.
        caption: see `Chart`.
        unit: label of the vertical axis.
        names: of the figures, with what a legend calls them.
        scale: factor of all values.
        bounds: of the vertical axis; None where they follow from the values.
        by_samples: over the samples consumed in place of the iteration.
        whole: values are whole numbers.
    """

    title: str
    caption: str
    unit: str
    names: Sequence[tuple[str, str]]
    scale: float = 1.0
    bounds: tuple[float, float] | None = None
    by_samples: bool = False
    whole: bool = False


def step_chart(panel: Panel, runs: Sequence[NamedRun]) -> Chart | None:
    """Return the chart of a panel; None where no run has one of its figures.

    Args:
        panel: what to show.
        runs: to lay over each other; several of them only with one figure each.
    """
    lines = [
        (label if len(runs) == 1 else run.name, run, name)
        for run in runs
        for name, label in panel.names
        if not np.isnan(run.figures.per_step[name]).all()
    ]
    if not lines:
        return None
    found = [(label, _binned(panel, run, name, _MAX_BINS)) for label, run, name in lines]
    is_binned = any(bins.is_binned for _, bins in found)
    band = " Lines are means over stretches of steps, bands go from least to most."
    return Chart(
        title=panel.title,
        caption=panel.caption + (band if is_binned else ""),
        draw=_draw(panel, found),
        table=_table(panel, lines),
        height=300,
        narrow_height=280,
    )


def _binned(panel: Panel, run: NamedRun, name: str, most: int) -> Bins:
    figures = run.figures
    x = figures.per_step["consumed_samples"] if panel.by_samples else figures.iterations
    return bins_of(x, figures.per_step[name] * panel.scale, most=most)


def _draw(panel: Panel, found: Sequence[tuple[str, Bins]]) -> Callable[[FigureBase, Form], None]:
    def draw(figure: FigureBase, form: Form) -> None:
        from matplotlib.ticker import MaxNLocator

        axes: Any = figure.subplots()
        styles = zip(theme.SERIES, _STYLES, theme.MARKERS, strict=False)
        for (label, bins), (colour, style, marker) in zip(found, styles, strict=False):
            if bins.is_binned:
                axes.fill_between(
                    bins.middle, bins.least, bins.most, color=colour, alpha=0.25, linewidth=0
                )
            own = marker if len(bins.first) <= _FEW_STEPS else ""
            axes.plot(
                bins.middle, bins.mean, style, color=colour, label=label, marker=own, markersize=5
            )
        if panel.bounds is not None:
            axes.set_ylim(*panel.bounds)
        elif panel.whole:  # from 0: one value in all steps would else have an axis of fractions
            axes.set_ylim(0, 1.1 * max(1.0, *(float(np.nanmax(bins.most)) for _, bins in found)))
        axes.set_ylabel(panel.unit)
        axes.set_xlabel("samples consumed" if panel.by_samples else "iteration")
        axes.xaxis.set_major_locator(MaxNLocator(4 if form.is_narrow else 9, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=panel.whole))
        axes.grid(axis="y")
        if len(found) > 1:
            columns = 1 if form.is_narrow else len(found)
            figure.legend(loc="outside upper left", ncols=columns)

    return draw


def _table(panel: Panel, lines: Sequence[tuple[str, NamedRun, str]]) -> Table:
    """Figures side by side where they have the same stretches, else each run below the other."""
    head = "samples consumed" if panel.by_samples else "iteration"
    found = [(label, _binned(panel, run, name, _TABLE_ROWS)) for label, run, name in lines]
    keys = [_keys(bins) for _, bins in found]
    if all(own == keys[0] for own in keys):
        heads: list[str] = []
        rows = [[key] for key in keys[0]]
        for label, bins in found:
            heads += [f"{label}, mean", "least", "most"] if bins.is_binned else [label]
            for row, at in zip(rows, range(len(rows)), strict=True):
                row += _cells(bins, at, is_binned=bins.is_binned)
        return Table(columns=(head, *heads), rows=tuple(map(tuple, rows)))
    is_binned = any(bins.is_binned for _, bins in found)
    return Table(
        columns=("run", head, *(("mean", "least", "most") if is_binned else (panel.unit,))),
        rows=tuple(
            (label, key, *_cells(bins, at, is_binned=is_binned))
            for (label, bins), own in zip(found, keys, strict=True)
            for at, key in enumerate(own)
        ),
    )


def _keys(bins: Bins) -> list[str]:
    """Return the names of the stretches."""
    ends = zip(bins.first.astype(int).tolist(), bins.last.astype(int).tolist(), strict=True)
    return [str(first) if first == last else f"{first} to {last}" for first, last in ends]


def _cells(bins: Bins, at: int, *, is_binned: bool) -> list[str]:
    values = (bins.mean[at], bins.least[at], bins.most[at])[: 3 if is_binned else 1]
    return [_number(value) for value in values]


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.5g}"
