"""Charts of the steps: micro-batches before and after, speed-up, balance over the replicas.

Only draws what was planned; each chart repeats its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.prediction import RIVALS, Run, replica_costs
from odb_megatron.pages import Chart, Form, Table
from odb_megatron.pages.pictures import set_tooltip
from odb_megatron.pages.theme import BLUE, FAINT, GREEN, GREY, RED, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

__all__ = ["balance_chart", "micro_batch_chart", "speed_chart"]

_MOST_SHOWN = 8  # micro-batches of a panel
_MOST_REPLICAS = 16
_WASTE = "////"


def micro_batch_chart(findings: Findings) -> Chart:
    after = findings.planned
    names = ("standard-safe", after)
    step = min(len(findings.runs[name].schedule) for name in names) // 2
    shown = [_micro_batches(findings, name, step)[:_MOST_SHOWN] for name in names]

    def draw(figure: FigureBase, form: Form) -> None:
        shape = (2, 1) if form.is_narrow else (1, 2)
        panels = figure.subplots(*shape, sharex=True, squeeze=False)
        for axes, batches, name in zip(panels.flat, shown, names, strict=True):
            is_padded = findings.runs[name].schedule.is_padded
            for row, lengths in enumerate(batches):
                _draw_micro_batch(axes, row, lengths, is_padded=is_padded)
            axes.axvline(
                findings.runs[name].setting.token_budget, color=RED, linestyle="--", linewidth=1.5
            )
            axes.set_title(
                f"{'before' if is_padded else 'after'}: {name}", loc="left", fontweight="bold"
            )
            axes.set_yticks(range(len(batches)), [str(row + 1) for row in range(len(batches))])
            axes.set_ylim(_MOST_SHOWN - 0.4, -0.6)
            axes.set_ylabel("micro-batch")
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=4)
        for axes in panels[-1, :]:
            axes.set_xlabel("tokens computed")

    rows = []
    for name, batches in zip(names, shown, strict=True):
        is_padded = findings.runs[name].schedule.is_padded
        for row, lengths in enumerate(batches):
            computed = max(lengths, default=0) * len(lengths) if is_padded else sum(lengths)
            num = sum(length > 0 for length in lengths)
            rows.append([f"{name} {row + 1}", str(num), str(sum(lengths)), str(computed)])
    before = findings.runs["standard-safe"].method
    planned = findings.runs[after].method
    return Chart(
        title="Padding before and after",
        draw=draw,
        caption=f"The first micro-batches of step {step + 1}. Filled: a sample's tokens; hatched: "
        f"padding to the longest of the micro-batch; dashed: the token budget. Over the "
        f"whole run {before.padding:.1%} of what a fixed batch computes is padding and its "
        f"micro-batches are {before.fill:.0%} full of tokens; packed, {planned.padding:.1%} is "
        f"padding and they are {planned.fill:.0%} full.",
        table=Table(columns=("micro-batch", "samples", "tokens", "computed"), rows=rows),
        height=300,
        narrow_height=520,
    )


def speed_chart(findings: Findings) -> Chart:
    base = findings.runs["standard-safe"].method.rate
    names = list(findings.runs)
    speeds = [findings.runs[name].method.rate / base for name in names]

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        colours = [GREY if name in RIVALS else BLUE for name in names]
        bars = axes.barh(range(len(names)), speeds, color=colours, height=0.7)
        for bar, name, speed in zip(bars, names, speeds, strict=True):
            if name in RIVALS:
                bar.set_hatch("//")
            set_tooltip(bar, f"{name}: {speed:.2f}")
            axes.annotate(
                f"{speed:.2f}",
                xy=(speed, bar.get_y() + bar.get_height() / 2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.15 * max(speeds))
        axes.axvline(1.0, color=TEXT, linewidth=0.8)
        axes.set_xlabel("times as fast as standard-safe")
        axes.grid(axis="x")

    return Chart(
        title="Predicted speed",
        draw=draw,
        caption="Samples per second relative to a fixed batch whose worst case fits the budget. "
        "Plain: ODB; hatched: other ways. Predicted from the cost model: kernels, network and "
        "reading are not in it.",
        table=Table(
            columns=("method", "speed", "padding", "fill"),
            rows=[
                [
                    name,
                    f"{speed:.2f}",
                    f"{findings.runs[name].method.padding:.1%}",
                    f"{findings.runs[name].method.fill:.1%}",
                ]
                for name, speed in zip(names, speeds, strict=True)
            ],
        ),
        height=270,
        narrow_height=270,
    )


def balance_chart(findings: Findings) -> Chart:
    names = ("standard-safe", "dp-balanced", findings.planned)
    loads = {name: _typical_loads(findings.runs[name]) for name in names}
    num = min(findings.setting.dp, _MOST_REPLICAS)
    highest = max(max(own) for own in loads.values())

    def draw(figure: FigureBase, form: Form) -> None:
        shape = (len(names), 1) if form.is_narrow else (1, len(names))
        panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
        for axes, name in zip(panels.flat, names, strict=True):
            own = loads[name]
            slowest = max(own)
            rows = range(len(own))
            bars = axes.barh(rows, own, color=BLUE, height=0.76)
            waits = axes.barh(
                rows,
                [slowest - load for load in own],
                left=own,
                facecolor=FAINT,
                edgecolor=GREY,
                hatch=_WASTE,
                height=0.76,
                linewidth=0.8,
            )
            for replica, (bar, wait) in enumerate(zip(bars, waits, strict=True)):
                set_tooltip(bar, f"replica {replica}: cost {own[replica]:.2f} of the mean")
                set_tooltip(wait, f"replica {replica} waits {slowest - own[replica]:.2f}")
            axes.set_title(name, loc="left", fontweight="bold")
            axes.set_yticks(list(rows)[:: -(-len(own) // 8)])
            axes.set_ylim(len(own) - 0.4, -0.6)
            axes.set_xlim(0, 1.03 * highest)
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=4)
        for axes in panels[:, 0]:
            axes.set_ylabel("replica" if num == findings.setting.dp else "replica, most first")
        for axes in panels[-1, :]:
            axes.set_xlabel("cost, 1 = mean of replicas")

    rows = [
        [str(replica), *(f"{loads[name][replica]:.3f}" for name in names)] for replica in range(num)
    ]
    means = ", ".join(f"{name} {findings.runs[name].method.balance:.3f}" for name in names)
    some = "" if num == findings.setting.dp else f" The {num} replicas with the most are shown."
    return Chart(
        title="Balance over replicas",
        draw=draw,
        caption="What a step costs each replica, in the step whose balance is the median of the "
        f"run; hatched: waiting for the slowest.{some} Mean over largest cost, over all steps: "
        f"{means}.",
        table=Table(columns=("replica", *names), rows=rows),
        height=90 + 26 * min(num, 8),
        narrow_height=(90 + 16 * min(num, 8)) * 3,
    )


def _micro_batches(findings: Findings, name: str, step: int) -> list[list[int]]:
    """Return the lengths of each micro-batch of a step, replica by replica."""
    run = findings.runs[name]
    schedule = run.schedule
    first, last = schedule.micro_batch_starts[step : step + 2]
    starts = schedule.sample_starts
    return [
        run.stream.lengths[schedule.positions[starts[at] : starts[at + 1]]].tolist()
        for at in range(int(first), int(last))
    ]


def _draw_micro_batch(axes: Axes, row: int, lengths: Sequence[int], *, is_padded: bool) -> None:
    """Draw a micro-batch as a bar: its samples, each followed by its padding."""
    longest = max(lengths, default=0)
    at = 0
    for index, length in enumerate(lengths):
        colour = BLUE if index % 2 == 0 else GREEN
        if length:  # else a bad record, of which a padded batch has the padding
            (bar,) = axes.barh(row, length, left=at, height=0.72, color=colour, linewidth=0.8)
            set_tooltip(bar, f"micro-batch {row + 1}, sample {index + 1}: {length} tokens")
        at += length
        if is_padded and longest > length:
            (bar,) = axes.barh(
                row,
                longest - length,
                left=at,
                height=0.72,
                facecolor=FAINT,
                edgecolor=GREY,
                hatch=_WASTE,
                linewidth=0.8,
            )
            set_tooltip(bar, f"padding: {longest - length} tokens")
            at += longest - length


def _typical_loads(run: Run) -> list[float]:
    """Return each replica's cost in the step of median balance, most first where some are cut."""
    balances = run.times.balance_step
    step = int(np.argsort(balances, kind="stable")[len(balances) // 2])
    loads = list(replica_costs(run, step=step))
    if len(loads) > _MOST_REPLICAS:
        loads = sorted(loads, reverse=True)[:_MOST_REPLICAS]
    return loads
