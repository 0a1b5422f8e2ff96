"""Charts of an inspection, in the order of its page; each repeats its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.prediction import RIVALS, Run, replica_costs
from odb_megatron.inspection.text import speed_notes
from odb_megatron.pages import Chart, Form, Table
from odb_megatron.pages.pictures import set_tooltip
from odb_megatron.pages.theme import BLUE, FAINT, GREEN, GREY, ORANGE, RED, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

__all__ = [
    "all_charts",
    "balance_chart",
    "lengths_chart",
    "micro_batch_chart",
    "speed_chart",
    "tokens_chart",
]

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NUM_BINS = 32
_NUM_MARKS = 200  # of each line
_MARGIN = 1.04  # of an axis, on either side
_NEAREST_TICKS = 0.09  # as a share of the axis
_MAX_SHOWN = 8  # micro-batches of ours
_MAX_ROWS = 24  # fixed batches of a panel
_FEWEST_ROWS = 3  # that a panel has room for
_MIN_FILLED = 0.25  # of the axis, else the token budget is not on it
_MAX_REPLICAS = 16
_WASTE = "////"


def all_charts(findings: Findings) -> list[Chart]:
    """Return the charts in the order of the page."""
    charts = [
        lengths_chart(findings),
        tokens_chart(findings),
        micro_batch_chart(findings),
        speed_chart(findings),
    ]
    if findings.setting.dp > 1:
        charts.append(balance_chart(findings))
    return charts


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


def micro_batch_chart(findings: Findings) -> Chart:
    name = findings.planned
    run, fixed = findings.runs[name], findings.fixed
    size = int(fixed.schedule.sizes.max())
    step, packed = _some_micro_batches(run, most=_MAX_ROWS * size)
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
    near = [budget for budget in budgets if longest >= _MIN_FILLED * budget]

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
    num = min(findings.setting.dp, _MAX_REPLICAS)
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
        if found and (num + len(batch) > most or len(found) == _MAX_SHOWN):
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
    if len(loads) > _MAX_REPLICAS:
        loads = sorted(loads, reverse=True)[:_MAX_REPLICAS]
    return loads
