"""Charts of single steps: replicas × micro-batches laid out in time, and samples by replica.

Must not choose which steps are worth showing (`run_figures`). A chart shows at most a dozen
replicas, and the same ones at each width: those of the highest and lowest cost of its first step,
and others between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from odb_megatron.pages import Chart, Form, Table, theme
from odb_megatron.pages.pictures import set_tooltip
from odb_megatron.report.steps import LoggedStep, StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

__all__ = ["composition_chart", "timeline_chart"]

_MAX_REPLICAS = 12
_MANY_MICRO_BATCHES = 24
_GAP = 0.03  # between steps, of the mean step


def timeline_chart(steps: Sequence[LoggedStep], *, title: str, caption: str) -> Chart:
    """Return micro-batches as bars, replica below replica and step after step.

    Bars are as wide as the measured times where all of them are known, else as the predicted cost,
    else as the computed tokens.

    Args:
        steps: to show, all of them at each width: few.
        title: heading.
        caption: goes before what the widths mean.
    """
    unit, name = _width_of(steps)
    replicas = _chosen(steps[0], _MAX_REPLICAS)
    return Chart(
        title=title,
        caption=f"{caption} A bar is a micro-batch, as wide as its {name}; what is dotted behind "
        "the last one is what the replica waits for the slowest one of the step."
        + _some(replicas, steps),
        draw=lambda figure, form: _draw_timeline(figure, form, (steps, replicas), unit),
        table=_timeline_table(steps, replicas, unit),
        height=110 + 26 * len(replicas),
    )


def composition_chart(step: LoggedStep) -> Chart:
    """Return the lengths of a step's samples, replica by replica."""
    replicas = [at for at in _chosen(step, _MAX_REPLICAS) if _lengths(step.records[at])]
    rows: list[tuple[str, ...]] = []
    for replica in replicas:
        lengths = np.array(_lengths(step.records[replica]))
        quarter, half, most = np.percentile(lengths, (25, 50, 75)).round().astype(int)
        rows.append(
            tuple(
                map(
                    str,
                    (replica, len(lengths), lengths.sum(), lengths.min(), quarter, half, most,
                     lengths.max()),
                )
            )
        )  # fmt: skip
    heads = ("replica", "samples", "tokens", "least", "quartile", "median", "quartile", "longest")
    return Chart(
        title=f"Samples of step {step.iteration} by replica",
        caption="A dot is a sample at its length in tokens; the line is the replica's median. "
        "Replicas may differ in number and length of samples and still cost the same."
        + _some(replicas, [step]),
        draw=lambda figure, form: _draw_composition(figure, form, step, replicas),
        table=Table(columns=heads, rows=tuple(rows)),
        height=110 + 30 * len(replicas),
    )


def _some(replicas: Sequence[int], steps: Sequence[LoggedStep]) -> str:
    """Say that replicas are left out, where some are."""
    num = len({replica for step in steps for replica in step.records})
    return "" if len(replicas) == num else f" {len(replicas)} of {num} replicas are shown."


def _draw_timeline(
    figure: FigureBase, form: Form, shown: tuple[Sequence[LoggedStep], Sequence[int]], unit: str
) -> None:
    """Draw `shown`: steps, and the replicas of each."""
    from matplotlib.ticker import MaxNLocator

    axes: Any = figure.subplots()
    steps, replicas = shown
    spans = [max(sum(_widths(r, unit)) for r in step.records.values()) for step in steps]
    start, gap = 0.0, _GAP * sum(spans) / len(spans)
    marks = []
    for step, span in zip(steps, spans, strict=True):
        for row, replica in enumerate(replicas):
            if replica in step.records:
                _draw_row(axes, step.records[replica], (row, start, span), unit)
        marks.append((start + span / 2, step.iteration))
        start += span + gap
        if step is not steps[-1]:
            axes.axvline(start - gap / 2, color=theme.GREY, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(replicas)), [str(replica) for replica in replicas])
    axes.set_ylim(len(replicas) - 0.4, -0.6)
    axes.set_xlim(0, max(start - gap, 1e-9))
    axes.set_ylabel("replica")
    axes.set_xlabel(_AXIS[unit])
    axes.xaxis.set_major_locator(MaxNLocator(4 if form.is_narrow else 8))
    axes.tick_params(axis="y", length=0)
    top = axes.secondary_xaxis("top")
    top.set_xticks([at for at, _ in marks], [f"step {iteration}" for _, iteration in marks])
    top.tick_params(length=0)
    top.spines[:].set_visible(False)


_MANY_SECONDS = 2.0
_PER_SECOND = {"ms": 1e3, "s": 1.0}


def _draw_row(axes: Any, record: StepRecord, place: tuple[int, float, float], unit: str) -> None:
    """Draw a replica's step; `place` is its row, where the step starts, and how long it is."""
    row, start, span = place
    widths = _widths(record, unit)
    few = len(widths) <= _MANY_MICRO_BATCHES
    colours = (theme.BLUE, theme.BLUE if few else theme.GREEN)  # without edges they alternate
    if span > sum(widths):
        rest = axes.barh(
            row,
            span - sum(widths),
            left=start + sum(widths),
            height=0.7,
            color=theme.FAINT,
            hatch="...",
            edgecolor=theme.GRID,
            linewidth=0,
        )
        share = 1 - sum(widths) / span
        set_tooltip(
            rest.patches[0], f"step {record.iteration}: {share:.1%} free, behind the slowest"
        )
    for at, width in enumerate(widths):
        is_idle = not record.lengths[at]
        bars = axes.barh(
            row,
            width,
            left=start,
            height=0.7,
            color=theme.GREY if is_idle else colours[at % 2],
            hatch="///" if is_idle else "",
            edgecolor=theme.SURFACE if few else None,
            linewidth=1 if few else 0,
        )
        lengths = record.lengths[at]
        what = f"{len(lengths)} samples, {sum(lengths)} tokens" if lengths else "idle"
        set_tooltip(
            bars.patches[0],
            f"step {record.iteration}, micro-batch {at}: {what}, {width:.4g} {unit}",
        )
        start += width


def _draw_composition(
    figure: FigureBase, form: Form, step: LoggedStep, replicas: Sequence[int]
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes: Any = figure.subplots()
    for row, replica in enumerate(replicas):
        lengths = np.array(sorted(_lengths(step.records[replica])))
        places = row + 0.28 * np.array([((at * 7) % 11 - 5) / 5 for at in range(len(lengths))])
        axes.plot(
            lengths, places, linestyle="", marker="o", markersize=5, color=theme.BLUE, alpha=0.6
        )
        axes.plot([np.median(lengths)] * 2, [row - 0.4, row + 0.4], color=theme.ORANGE, linewidth=3)
    axes.set_yticks(range(len(replicas)), [str(replica) for replica in replicas])
    axes.set_ylim(len(replicas) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_ylabel("replica")
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(4 if form.is_narrow else 8, integer=True))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


_AXIS = {
    "ms": "measured time, ms",
    "s": "measured time, s",
    "cost": "predicted cost, tokens",
    "tokens": "computed tokens",
}


def _width_of(steps: Sequence[LoggedStep]) -> tuple[str, str]:
    """Return the unit of the widths, a key of `_AXIS`, and its name."""
    records = [record for step in steps for record in step.records.values()]
    if all(record.micro_batch_s for record in records):
        longest = max(sum(record.micro_batch_s) for record in records)
        return ("ms" if longest < _MANY_SECONDS else "s"), "measured time"
    if all(record.costs for record in records):
        return "cost", "predicted cost (in tokens that attend to nothing)"
    return "tokens", "computed tokens"


def _widths(record: StepRecord, unit: str) -> list[float]:
    if unit in _PER_SECOND:
        return [_PER_SECOND[unit] * seconds for seconds in record.micro_batch_s]
    if unit == "cost":
        return list(record.costs)
    return [float(width) for width in record.widths]


def _lengths(record: StepRecord) -> list[int]:
    return [length for lengths in record.lengths for length in lengths]


def _chosen(step: LoggedStep, most: int) -> list[int]:
    """Return at most `most` replicas, from the cheapest to the dearest evenly, in their order."""
    replicas = sorted(step.records, key=lambda at: sum(step.records[at].widths))
    if len(replicas) <= most:
        return sorted(replicas)
    places = np.linspace(0, len(replicas) - 1, most).round().astype(int)
    return sorted(replicas[place] for place in places.tolist())


def _timeline_table(steps: Sequence[LoggedStep], replicas: Sequence[int], unit: str) -> Table:
    rows = []
    for replica in replicas:
        cells = []
        for step in steps:
            record = step.records.get(replica)
            cells.append("" if record is None else f"{sum(_widths(record, unit)):.4g}")
        rows.append((str(replica), *cells))
    heads = (f"step {step.iteration}, {unit}" for step in steps)
    return Table(columns=("replica", *heads), rows=tuple(rows))
