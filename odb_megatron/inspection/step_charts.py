"""Charts of the steps: micro-batches before and after, speed-up, balance over the replicas.

Only draws what was planned; each chart repeats its numbers as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.prediction import RIVALS, Run, replica_costs
from odb_megatron.inspection.text import speed_notes
from odb_megatron.pages import Chart, Form, Table
from odb_megatron.pages.pictures import set_tooltip
from odb_megatron.pages.theme import BLUE, FAINT, GREEN, GREY, RED, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

__all__ = ["balance_chart", "micro_batch_chart", "speed_chart"]

_MOST_SHOWN = 8  # micro-batches of ours
_MOST_ROWS = 24  # fixed batches of a panel
_FEWEST_ROWS = 3  # that a panel has room for
_LEAST_FILLED = 0.25  # of the axis, else the token budget is not on it
_MOST_REPLICAS = 16
_WASTE = "////"


def micro_batch_chart(findings: Findings) -> Chart:
    name = findings.planned
    run, fixed = findings.runs[name], findings.fixed
    size = int(fixed.schedule.sizes.max())
    step, packed = _some_micro_batches(run, most=_MOST_ROWS * size)
    positions = sorted(position for batch in packed for position in batch)
    shown = [
        [positions[at : at + size] for at in range(0, len(positions), size)],
        packed,
    ]
    titles = [f"before: fixed batch of {size}", f"after: {name}"]
    lengths = run.stream.lengths
    batches = [[lengths[batch].tolist() for batch in side] for side in shown]
    computed = [[max(batch) * len(batch) for batch in batches[0]], list(map(sum, batches[1]))]
    budgets = [fixed.setting.token_budget, run.setting.token_budget]
    longest = max(max(side) for side in computed)
    near = [budget for budget in budgets if longest >= _LEAST_FILLED * budget]

    def draw(figure: FigureBase, form: Form) -> None:
        shape = (2, 1) if form.is_narrow else (1, 2)
        panels = figure.subplots(*shape, sharex=True, squeeze=False)
        num_rows = max(map(len, batches))
        for side, axes in enumerate(panels.flat):
            for row, own in enumerate(batches[side]):
                _draw_micro_batch(axes, row, own, is_padded=side == 0)
            if budgets[side] in near:
                axes.axvline(budgets[side], color=RED, linestyle="--", linewidth=1.5)
            axes.set_title(titles[side], loc="left", fontweight="bold")
            rows = range(0, len(batches[side]), -(-num_rows // 8))
            axes.set_yticks(rows, [str(row + 1) for row in rows])
            axes.set_ylim(max(num_rows, _FEWEST_ROWS) - 0.4, -0.6)
            axes.set_xlim(0, 1.04 * max([longest, *near]))
            axes.set_ylabel("micro-batch")
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=4, integer=True)
        for axes in panels[-1, :]:
            axes.set_xlabel("tokens computed")

    rows = [
        [f"{side} {row + 1}", str(len(own)), str(sum(own)), str(num)]
        for side, sides, nums in zip(("before", "after"), batches, computed, strict=True)
        for row, (own, num) in enumerate(zip(sides, nums, strict=True))
    ]
    return Chart(
        title="Padding before and after",
        draw=draw,
        caption=_micro_batch_caption(findings, num=len(positions), step=step, size=size, near=near),
        table=Table(columns=("micro-batch", "samples", "tokens", "computed"), rows=rows),
        height=300,
        narrow_height=520,
    )


def _micro_batch_caption(
    findings: Findings, *, num: int, step: int, size: int, near: Sequence[int]
) -> str:
    run, fixed = findings.runs[findings.planned], findings.fixed
    budgets = sorted({run.setting.token_budget, fixed.setting.token_budget})
    dashed = "".join(f"; dashed: the token budget {one}" for one in budgets if one in near)
    far = "".join(
        f"; far beyond the axis: the token budget {one}" for one in budgets if one not in near
    )
    context = findings.setting.seq_length
    text = (
        f"{'The same sample' if num == 1 else f'The same {num} samples'} of step {step + 1} on "
        "both sides: in the order read, in fixed batches whose worst case fits the budget, and as "
        "ODB packs them. Filled: a sample's tokens; hatched: padding to the longest of the "
        f"micro-batch{dashed}{far}. Over the whole run {fixed.method.padding:.1%} of what such "
        f"fixed batches compute is padding and their micro-batches are "
        f"{fixed.method.fill:.0%} full of tokens; packed, "
        f"{run.method.padding:.1%} is padding and they are {run.method.fill:.0%} full. "
    )
    if size == 1:
        text += "A fixed batch of one sample has no padding to a longest, but is far from full. "
    return text + (
        f"The {findings.avoided():.1%} of padding avoided are another figure: against padding "
        f"each sample to the context, {context}."
    )


def speed_chart(findings: Findings) -> Chart:
    base = findings.runs["standard-safe"].method.rate
    budget = findings.setting.token_budget
    notes = speed_notes(findings)[1:]
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
        f"reading are not in it. The token budget is {budget}."
        + "".join(f" {note[0].upper()}{note[1:]}." for note in notes),
        table=Table(
            columns=("method", "budget", "speed", "padding", "fill", "samples/step"),
            rows=[
                [
                    name,
                    str(findings.runs[name].setting.token_budget),
                    f"{speed:.2f}",
                    f"{findings.runs[name].method.padding:.1%}",
                    f"{findings.runs[name].method.fill:.1%}",
                    f"{findings.runs[name].method.samples_per_step:.1f}",
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


def _some_micro_batches(run: Run, *, most: int) -> tuple[int, list[list[int]]]:
    """Return a step, the middle one or the next with samples, and its first micro-batches.

    Args:
        run: of ours.
        most: samples wanted; only of the first micro-batch are some left out for that.

    Returns:
        The step, and the stream positions of each micro-batch, those without a sample left out.
    """
    schedule = run.schedule
    filled = np.flatnonzero(schedule.step_samples)
    step = int(filled[np.searchsorted(filled, len(schedule) // 2).clip(max=len(filled) - 1)])
    first, last = schedule.micro_batch_starts[step : step + 2]
    starts = schedule.sample_starts
    found: list[list[int]] = []
    num = 0
    for at in range(int(first), int(last)):
        batch = schedule.positions[starts[at] : starts[at + 1]].tolist()
        if found and (num + len(batch) > most or len(found) == _MOST_SHOWN):
            break
        if batch:
            found.append(batch[:most])
            num += len(found[-1])
    return step, found


def _draw_micro_batch(axes: Axes, row: int, lengths: Sequence[int], *, is_padded: bool) -> None:
    """Draw a micro-batch as a bar: its samples, each followed by its padding."""
    longest = max(lengths, default=0)
    at = 0
    for index, length in enumerate(lengths):
        colour = BLUE if index % 2 == 0 else GREEN
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
