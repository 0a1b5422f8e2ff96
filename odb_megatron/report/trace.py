"""`odb-megatron trace` and `compare`: what the step logs of runs say, as text, JSON and a page.

A figure that the log does not have is NaN per step and None in a summary, never zero.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odb_megatron.command import Report, new_parser, run_command
from odb_megatron.report.cost_fit import fit_cost
from odb_megatron.report.page import (
    STYLES,
    Axis,
    Bar,
    Chart,
    Line,
    Panel,
    replica_axis,
    row_bars,
    write_page,
)
from odb_megatron.report.steps import LoggedStep, RunLog, StepRecord, read_run

__all__ = ["CURVES", "RunFigures", "choose_steps", "compare", "curve_chart", "timelines", "trace"]

Values = npt.NDArray[np.float64]

# --- figures ---------------------------------------------------------------------------------

# Figures of a step: sums over replicas, or the largest of any replica.
_OF_ALL = (
    *("samples", "consumed_samples", "tokens", "computed_tokens", "fill", "balance", "idle"),
    *("moved", "bytes_moved", "left_out", "bad_records", "truncated", "grad_norm"),
)
_LARGEST = ("step_s", "wait_s", "plan_s", "queue_bytes", "peak_memory_bytes")


def _figures_of(step: LoggedStep) -> dict[str, float]:
    first, records = step.first, step.records.values()
    computed, times = first.computed_tokens, [sum(record.micro_batch_s) for record in records]
    found: dict[str, float | None] = {name: getattr(first, name) for name in _OF_ALL}
    found |= {name: max(getattr(record, name) for record in records) for name in _LARGEST}
    found |= {
        "micro_batches": first.num_micro_batches,
        "padding": 1 - first.tokens / computed if computed else None,
        "balance_measured": sum(times) / len(times) / max(times) if min(times) > 0 else None,
        "patches": max((max(r.patches) for r in records if r.patches), default=None),
        "queue_steps": min(record.queue_steps for record in records),
        "loss": next((r.loss for r in records if r.loss is not None), None),
    }
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run's figures.

    Attributes:
        iterations: of the steps.
        per_step: by name, float64 [steps].
        num_replicas: of the last process start.
        is_late: steps that are not the first one of a process start, bool [steps]; all where every
            step is.
    """

    iterations: Values
    per_step: Mapping[str, Values]
    num_replicas: int
    is_late: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, run: RunLog) -> RunFigures:
        """Take the figures of a run."""
        rows = [_figures_of(step) for step in run.steps]
        is_late = np.diff([step.part for step in run.steps], prepend=-1) == 0
        return cls(
            iterations=np.array([step.iteration for step in run.steps], dtype=np.float64),
            per_step={name: np.array([row[name] for row in rows]) for name in rows[0]},
            num_replicas=run.headers[-1].num_replicas,
            is_late=is_late if is_late.any() else ~is_late,
        )

    def summary(self) -> dict[str, float | None]:
        """Return the run as a whole, by name of `_SUMMARY`."""
        return {name: take(self) for name, (_, _, take) in _SUMMARY.items()}


Taken = Callable[[RunFigures], float | None]


def _over(name: str, take: Callable[[Values], Any], *, is_late: bool = False) -> Taken:
    """Return what takes a figure of the steps that have it; None where none has."""

    def of(figures: RunFigures) -> float | None:
        values = figures.per_step[name][figures.is_late if is_late else slice(None)]
        known = values[~np.isnan(values)]
        return float(take(known)) if len(known) else None

    return of


def _share(over: str, under: str, *, is_late: bool = True, is_rest: bool = False) -> Taken:
    """Return what takes the ratio of two sums, or what it lacks to 1."""

    def of(figures: RunFigures) -> float | None:
        steps = figures.is_late if is_late else slice(None)
        above, below = (float(figures.per_step[name][steps].sum()) for name in (over, under))
        if not below:
            return None
        return 1 - above / below if is_rest else above / below

    return of


# Labels, formats, and what they are of all steps; rates leave out the first step of each start,
# which pays for what is done once.
_SUMMARY: dict[str, tuple[str, str, Taken]] = {
    "steps": ("steps", "{:.0f}", lambda figures: float(len(figures.iterations))),
    "replicas": ("replicas", "{:.0f}", lambda figures: float(figures.num_replicas)),
    "samples": ("samples", "{:,.0f}", _over("samples", np.sum)),
    "tokens": ("tokens", "{:,.0f}", _over("tokens", np.sum)),
    "tokens_per_step": ("tokens per step", "{:,.0f}", _over("tokens", np.mean)),
    "micro_batches_mean": (
        "micro-batches per step, mean", "{:.2f}", _over("micro_batches", np.mean),
    ),
    "micro_batches_max": ("micro-batches per step, most", "{:.0f}", _over("micro_batches", np.max)),
    "fill": ("fill, mean", "{:.2%}", _over("fill", np.mean)),
    "padding": (
        "padding", "{:.2%}", _share("tokens", "computed_tokens", is_late=False, is_rest=True),
    ),
    "balance": ("balance predicted, mean", "{:.4f}", _over("balance", np.mean)),
    "balance_lowest": ("balance predicted, lowest", "{:.4f}", _over("balance", np.min)),
    "balance_measured": ("balance measured, mean", "{:.4f}", _over("balance_measured", np.mean)),
    "idle": ("idle micro-batches", "{:.0f}", _over("idle", np.sum)),
    "patches_max": ("patches per micro-batch, most", "{:,.0f}", _over("patches", np.max)),
    "seconds_per_step": ("seconds per step", "{:.4g}", _over("step_s", np.mean, is_late=True)),
    "tokens_per_second": ("tokens per second", "{:,.0f}", _share("tokens", "step_s")),
    "wait_share": ("time spent waiting for data", "{:.2%}", _share("wait_s", "step_s")),
    "plan_seconds_per_step": (
        "seconds to make a step", "{:.4g}", _over("plan_s", np.mean, is_late=True),
    ),
    "moved": ("samples moved", "{:,.0f}", _over("moved", np.sum)),
    "queue_bytes_max": ("bytes in finished steps, most", "{:,.0f}", _over("queue_bytes", np.max)),
    "peak_memory_bytes": ("peak memory, bytes", "{:,.0f}", _over("peak_memory_bytes", np.max)),
    "left_out": ("samples left out", "{:.0f}", _over("left_out", np.sum)),
    "bad_records": ("bad records", "{:.0f}", _over("bad_records", np.sum)),
    "truncated": ("truncated samples", "{:.0f}", _over("truncated", np.sum)),
    "loss_first": ("loss, first", "{:.4f}", _over("loss", lambda values: values[0])),
    "loss_last": ("loss, last", "{:.4f}", _over("loss", lambda values: values[-1])),
}  # fmt: skip
_TILES = (
    *("steps", "samples", "tokens_per_second", "fill", "padding", "balance", "balance_measured"),
    "wait_share",
)


def _shown(figures: RunFigures) -> dict[str, tuple[str, str]]:
    """Return label and text of each figure that the run has."""
    return {
        name: (_SUMMARY[name][0], _SUMMARY[name][1].format(value))
        for name, value in figures.summary().items()
        if value is not None
    }


def _differences(one: RunFigures, other: RunFigures) -> list[tuple[str, ...]]:
    """Return (figure, of one run, of the other, difference) for what either has."""
    rows = []
    shown, other_shown = _shown(one), _shown(other)
    for name, (label, _, take) in _SUMMARY.items():
        texts = [own.get(name, ("", ""))[1] for own in (shown, other_shown)]
        if all(texts):
            a, b = take(one) or 0.0, take(other) or 0.0
            change = f"{b / a - 1:+.1%}" if a else f"{b - a:+.4g}"
            rows.append((label, *texts, "equal" if texts[0] == texts[1] else change))
        elif any(texts):
            rows.append((label, *texts, "only in one"))
    return rows


# --- charts over the steps -------------------------------------------------------------------

_MAX_STRETCHES, _TABLE_ROWS, _FEW_STEPS = 100, 20, 30


class Curves(NamedTuple):
    """A chart of figures over the steps; run.html.j2 has its caption.

    Attributes:
        title: heading.
        unit: label of the vertical axis.
        names: of the figures, with what a legend calls them.
        scale: factor of all values.
        ends: of the vertical axis.
        by_samples: over the samples consumed in place of the iteration.
        is_whole: values are whole numbers.
    """

    title: str
    unit: str
    names: Mapping[str, str]
    scale: float = 1.0
    ends: tuple[float | None, float | None] = (None, None)
    by_samples: bool = False
    is_whole: bool = False


_TIMES = {"step_s": "step", "wait_s": "wait for data", "plan_s": "making the step"}
_BALANCES = {"balance": "predicted", "balance_measured": "measured"}
_SHARES = {"fill": "fill", "padding": "padding"}
CURVES = (
    Curves("Balance of the replicas", "mean / max", _BALANCES),
    Curves("Fill and padding", "% of tokens", _SHARES, scale=100, ends=(0, 105)),
    Curves("Micro-batches per step", "micro-batches", {"micro_batches": "M"}, is_whole=True),
    Curves("Time and waits", "seconds", _TIMES),
    Curves("Steps made ahead", "steps", {"queue_steps": "steps ahead"}, is_whole=True),
    Curves("Bytes held ahead", "MB", {"queue_bytes": "finished steps"}, scale=1e-6),
    Curves("Samples that moved", "samples", {"moved": "samples moved"}, is_whole=True),
    Curves("Tokens per step", "tokens", {"tokens": "tokens"}),
    Curves("Loss", "loss", {"loss": "loss"}, by_samples=True),
)
_COMPARED = {
    "balance": "Balance predicted", "fill": "Fill", "micro_batches": "Micro-batches per step",
    "step_s": "Time per step", "tokens": "Tokens per step", "loss": "Loss",
}  # fmt: skip
"""Figures of two runs that are laid over each other, and their headings."""


def curve_chart(curves: Curves, runs: Mapping[str, RunFigures]) -> Chart | None:
    """Return the chart of some figures, of several runs over each other; None where none has one.

    Args:
        curves: what to show; of one figure where there are several runs.
        runs: by the names that a legend has.
    """
    series = {}
    for run, figures in runs.items():
        x = figures.per_step["consumed_samples"] if curves.by_samples else figures.iterations
        for name, label in curves.names.items():
            if not np.isnan(figures.per_step[name]).all():
                own = label if len(runs) == 1 else run
                series[own] = x, figures.per_step[name] * curves.scale
    if not series:
        return None
    ends = curves.ends
    if curves.is_whole:  # from 0: one value in all steps would else have an axis of fractions
        ends = (0, 1.1 * max(1.0, *(float(np.nanmax(y)) for _, y in series.values())))
    first, last, found = _stretches(series.values(), _MAX_STRETCHES)
    is_cut = bool((first != last).any())
    lines = [
        Line(
            x=(first + last) / 2,
            y=own[0],
            colour=colour,
            label=label,
            style=style,
            marker=marker if len(first) <= _FEW_STEPS else "",
            low=own[1] if is_cut else None,
            high=own[2] if is_cut else None,
        )
        for label, own, (colour, style, marker) in zip(series, found, STYLES, strict=False)
    ]
    head = "samples consumed" if curves.by_samples else "iteration"
    x_axis = Axis(label=head, most=9, is_whole=True)
    y_axis = Axis(label=curves.unit, ends=ends, most=5, is_whole=curves.is_whole, has_grid=True)
    first, last, found = _stretches(series.values(), _TABLE_ROWS)
    in_ranges = bool((first != last).any())
    heads = [[f"{label}, mean", "least", "most"] if in_ranges else [label] for label in series]
    names = [
        f"{a:.0f}" if a == b else f"{a:.0f} to {b:.0f}" for a, b in zip(first, last, strict=True)
    ]
    cells = [row for own in found for row in (own if in_ranges else own[:1])]
    return Chart(
        title=curves.title,
        caption="Lines are means over stretches of steps, bands go from least to most." * is_cut,
        panels=[Panel(lines=lines, x=x_axis, y=y_axis)],
        columns=[head, *(text for own in heads for text in own)],
        rows=[
            [name, *("" if np.isnan(value) else f"{value:.5g}" for value in row)]
            for name, row in zip(names, np.transpose(cells), strict=True)
        ],
        narrow_height=280,
    )


def _stretches(series: Any, most: int) -> tuple[Values, Values, list[Values]]:
    """Cut what series have on their x axis into stretches; where there are few steps, each is one.

    Returns:
        First and last place of each, and of each series mean, least and most there [3, stretches].
    """
    every = np.unique(np.concatenate([x for x, _ in series]))
    parts = np.array_split(every, min(most, len(every)))
    found = []
    for x, y in series:
        within = [y[(x >= part[0]) & (x <= part[-1]) & ~np.isnan(y)] for part in parts]
        takes = (np.mean, np.min, np.max)
        rows = [[take(own) if len(own) else math.nan for own in within] for take in takes]
        found.append(np.array(rows))
    return np.array([part[0] for part in parts]), np.array([part[-1] for part in parts]), found


# --- charts of single steps ------------------------------------------------------------------

_NUM_USUAL = 2  # what a phone's width has room for
_MAX_REPLICAS = 12
_MANY_MICRO_BATCHES = 24
_GAP = 0.03  # between steps, of the mean step
_UNITS = {  # scale, axis, what the caption calls it
    "ms": (1e3, "measured time, ms", "measured time"),
    "s": (1.0, "measured time, s", "measured time"),
    "cost": (1.0, "predicted cost, tokens", "predicted cost (in tokens that attend to nothing)"),
    "tokens": (1.0, "computed tokens", "computed tokens"),
}


def choose_steps(figures: RunFigures) -> tuple[tuple[int, ...], int | None, str, str]:
    """Choose steps that are worth showing, by their places in the run.

    The first one of each start is looked at only where there is no other.

    Returns:
        One or two steps whose balance is nearest the median, or of the middle where none has one;
        the one of least balance, None where none is below the median; what is said of both.
    """
    kind, values = "measured", figures.per_step["balance_measured"]
    if np.isnan(values).all():
        kind, values = "predicted", figures.per_step["balance"]
    aside = ""
    late = np.where(figures.is_late, values, math.nan)
    if not figures.is_late.all() and not np.isnan(late).all():
        values, aside = late, " (the first step of each start aside)"
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        middle = max(0, len(values) // 2 - 1)
        usual = tuple(range(middle, min(middle + _NUM_USUAL, len(values))))
        return usual, None, "From the middle of the run; balance is not known.", ""
    median = float(np.median(values[known]))
    lowest = int(known[np.argmin(values[known])])
    worst = lowest if values[lowest] < median else None
    nearest = known[np.argsort(np.abs(values[known] - median), kind="stable")[:_NUM_USUAL]]
    usual = tuple(sorted(int(at) for at in nearest if at != worst))
    own = " and ".join(f"{values[at]:.4f}" for at in usual)
    return (
        usual,
        worst,
        f"Nearest the median balance, {kind} {own}; the median of all is {median:.4f}{aside}.",
        f"The step in which replicas differ most: balance {kind} {values[lowest]:.4f}{aside}.",
    )


def timelines(run: RunLog, figures: RunFigures) -> Iterator[Chart]:
    """Steps of median balance, the one in which replicas differ most, and samples by replica."""
    places, worst, said, said_of_worst = choose_steps(figures)
    usual = [run.steps[at] for at in places]
    names = " and ".join(str(step.iteration) for step in usual)
    yield _timeline(usual, f"Timeline of step{'s' if len(usual) > 1 else ''} {names}", said)
    if worst is not None and len(run.steps[worst].records) > 1:
        step = run.steps[worst]
        title = f"Timeline of the least balanced step, {step.iteration}"
        yield _timeline([step], title, said_of_worst)
    if any(map(_lengths, usual[0].records.values())):
        yield _composition(usual[0])


def _timeline(steps: Sequence[LoggedStep], title: str, caption: str) -> Chart:
    """Return micro-batches as bars, replica below replica and step after step.

    Bars are as wide as the measured times where all of them are known, else as the predicted cost,
    else as the computed tokens.
    """
    records = [record for step in steps for record in step.records.values()]
    unit, field = "tokens", "widths"
    if all(record.micro_batch_s for record in records):
        longest = max(sum(record.micro_batch_s) for record in records)
        unit, field = ("ms" if longest < 2 else "s"), "micro_batch_s"
    elif all(record.costs for record in records):
        unit, field = "cost", "costs"
    scale, label, name = _UNITS[unit]
    replicas, num = _chosen(steps[0])
    spans = [
        scale * max(sum(getattr(record, field)) for record in step.records.values())
        for step in steps
    ]
    start, gap = 0.0, _GAP * sum(spans) / len(spans)
    bars: list[Bar] = []
    top, table = {}, [[str(replica)] for replica in replicas]
    for step, span in zip(steps, spans, strict=True):
        for row, replica in enumerate(replicas):
            record = step.records.get(replica)
            if record is None:
                table[row].append("")
                continue
            widths = [scale * width for width in getattr(record, field)]
            table[row].append(f"{sum(widths):.4g}")
            parts = [*_micro_batches(record, widths, unit)]
            rest = span - sum(widths)
            if rest > 1e-9 * span:
                tip = f"step {step.iteration}: {rest / span:.1%} free, behind the slowest"
                parts.append((rest, "waste", tip))
            bars += row_bars(row, parts, start)
        top[start + span / 2] = f"step {step.iteration}"
        start += span + gap
    x = Axis(label=label, ends=(0, max(start - gap, 1e-9)))
    return Chart(
        title=title,
        caption=f"{caption} A bar is a micro-batch, as wide as its {name}; what is hatched behind "
        f"the last one is what the replica waits for the slowest one of the step.{num}",
        panels=[Panel(bars=bars, top=top, x=x, y=replica_axis(replicas))],
        columns=["replica", *(f"step {step.iteration}, {unit}" for step in steps)],
        rows=table,
        height=110 + 26 * len(replicas),
    )


def _micro_batches(
    record: StepRecord, widths: Sequence[float], unit: str
) -> Iterator[tuple[float, str, str]]:
    """Return width, look and tooltip of each micro-batch."""
    looks = ("blue",) if len(widths) <= _MANY_MICRO_BATCHES else ("blue thin", "green thin")
    for index, (width, lengths) in enumerate(zip(widths, record.lengths, strict=True)):
        what = f"{len(lengths)} samples, {sum(lengths)} tokens" if lengths else "idle"
        tip = f"step {record.iteration}, micro-batch {index}: {what}, {width:.4g} {unit}"
        yield width, looks[index % len(looks)] if lengths else "idle", tip


def _composition(step: LoggedStep) -> Chart:
    """Return the lengths of a step's samples, replica by replica."""
    replicas, num = _chosen(step)
    replicas = [replica for replica in replicas if _lengths(step.records[replica])]
    lines: list[Line] = []
    rows = []
    for row, replica in enumerate(replicas):
        lengths = np.array(sorted(_lengths(step.records[replica])))
        least, low, median, high, most = np.percentile(lengths, (0, 25, 50, 75, 100))
        places = [row + 0.28 * ((at * 7) % 11 - 5) / 5 for at in range(len(lengths))]
        lines += [
            Line(x=lengths, y=places, colour="blue", style="", marker="o", alpha=0.6),
            Line(x=[median] * 2, y=[row - 0.4, row + 0.4], colour="orange", width=3),
        ]
        quartiles = (f"{at:.0f}" for at in (least, low, median, high, most))
        rows.append([str(replica), str(len(lengths)), str(lengths.sum()), *quartiles])
    x = Axis(label="tokens", ends=(0, None), is_whole=True, has_grid=True)
    return Chart(
        title=f"Samples of step {step.iteration} by replica",
        caption="A dot is a sample at its length in tokens; the line is the replica's median. "
        f"Replicas may differ in number and length of samples and still cost the same.{num}",
        panels=[Panel(lines=lines, x=x, y=replica_axis(replicas))],
        columns=["replica", "samples", "tokens", "least", "25 %", "median", "75 %", "longest"],
        rows=rows,
        height=110 + 30 * len(replicas),
    )


def _lengths(record: StepRecord) -> list[int]:
    return [length for lengths in record.lengths for length in lengths]


def _chosen(step: LoggedStep) -> tuple[list[int], str]:
    """Return a dozen replicas, evenly from the cheapest to the dearest, and say so."""
    replicas = sorted(step.records, key=lambda at: sum(step.records[at].widths))
    if len(replicas) <= _MAX_REPLICAS:
        return sorted(replicas), ""
    places = np.linspace(0, len(replicas) - 1, _MAX_REPLICAS).round().astype(int).tolist()
    said = f" {_MAX_REPLICAS} of {len(replicas)} replicas are shown."
    return sorted(replicas[place] for place in places), said


# --- the commands ----------------------------------------------------------------------------


def trace(argv: list[str]) -> int:
    """Show one run."""
    parser = _parser(
        "trace",
        "Show a run from its step logs (--odb-log-dir): a summary, and with --html a page with "
        "the timeline of replicas and micro-batches, balance, fill, waits, and the samples of a "
        "step.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder given to --odb-log-dir")
    fit = "fit the cost model to the times of the run's micro-batches, and print its flag"
    parser.add_argument("--fit-cost", action="store_true", help=f"{fit}, --odb-cost")

    def work(options: argparse.Namespace) -> Report:
        run = read_run(options.run, steps=options.steps)
        figures, title, refused = RunFigures.of(run), f"Run {_name(options.run)}", ""
        values, shown = _run_values(run, figures), _shown(figures)
        lines = [_headline(run), *(f"  {label:<30}{text}" for label, text in shown.values())]
        lines += [f"  note: {note}" for note in run.notes]
        if options.fit_cost:
            try:
                fitted = fit_cost(run)
                values["cost_fit"] = asdict(fitted)
                lines += fitted.lines()
            except ValueError as error:
                refused = str(error)

        def page(path: str) -> None:
            curves = (curve_chart(curves, {title: figures}) for curves in CURVES)
            write_page(
                path,
                "run.html.j2",
                title=title,
                summary=_headline(run),
                tiles=[shown[name] for name in _TILES if name in shown],
                differences=(),
                charts=[*timelines(run, figures), *filter(None, curves)],
                whole=list(shown.values()),
                starts=[("", header) for header in run.headers],
                notes=[*run.notes, f"odb-megatron trace {shlex.join(argv)}"],
            )

        return Report(values=values, text="\n".join(lines), write_page=page, refused=refused)

    return run_command(parser, argv, work)


def compare(argv: list[str]) -> int:
    """Show two runs and what differs."""
    parser = _parser(
        "compare",
        "Lay two runs over each other, from their step logs (--odb-log-dir), and print what "
        "differs.",
    )
    parser.add_argument("runs", metavar="RUN", nargs=2, help="the folder given to --odb-log-dir")

    def work(options: argparse.Namespace) -> Report:
        if Path(options.runs[0]).resolve() == Path(options.runs[1]).resolve():
            raise ValueError(f"{' and '.join(options.runs)} are one folder: name two runs")
        names = list(map(_name, options.runs))
        names = options.runs if names[0] == names[1] else names
        both = map(partial(read_run, steps=options.steps), options.runs)
        runs = dict(zip(names, both, strict=True))
        figures = {name: RunFigures.of(run) for name, run in runs.items()}
        rows = _differences(*figures.values())
        heads = ("figure", "a", "b", "difference")
        values = {
            "runs": {name: _run_values(run, figures[name]) for name, run in runs.items()},
            "differences": [dict(zip(heads, row, strict=True)) for row in rows],
        }
        own = [f"{letter}: {name}" for letter, name in zip("AB", runs, strict=True)]
        notes = [f"{name}: {note}" for name, run in runs.items() for note in run.notes]
        table = [("", "A", "B", "difference"), *rows]
        lines = [f"{label:<30}{a:>16}{b:>16}{change:>14}" for label, a, b, change in table]
        lines += [*own, *(f"note: {note}" for note in notes)]

        def page(path: str) -> None:
            write_page(
                path,
                "run.html.j2",
                title=" and ".join(names),
                summary=" ".join(f"{name}: {_headline(run)}." for name, run in runs.items()),
                tiles=(),
                differences=[["figure", *own, "difference"], *rows],
                charts=list(_compared(figures)),
                whole=(),
                starts=[
                    (f"{name}: ", start) for name, run in runs.items() for start in run.headers
                ],
                notes=[*notes, f"odb-megatron compare {shlex.join(argv)}"],
            )

        return Report(values=values, text="\n".join(lines), write_page=page)

    return run_command(parser, argv, work)


def _compared(figures: Mapping[str, RunFigures]) -> Iterator[Chart]:
    for name, title in _COMPARED.items():
        curves = next(curves for curves in CURVES if name in curves.names)
        chart = curve_chart(curves._replace(title=title, names={name: ""}), figures)
        if chart is not None:
            yield chart


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = new_parser(name, description)
    page = "write a page; needs pip install 'odb-megatron[pages]'"
    parser.add_argument("--html", metavar="FILE", help=page)
    steps = "only iterations A to B, both included; A: or :B leaves an end open"
    parser.add_argument("--steps", type=_steps, metavar="A:B", help=steps)
    return parser


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d*):(\d*)", text)
    first, last = (int(found[1] or 1), int(found[2] or sys.maxsize)) if found else (1, 0)
    if first > last or text == ":":
        hint = "give the first and the last iteration, like 100:200"
        raise argparse.ArgumentTypeError(f"{text}: {hint}")
    return first, last


def _name(folder: str) -> str:
    return Path(folder).resolve().name or folder


def _headline(run: RunLog) -> str:
    header, steps, resumed = run.headers[-1], run.steps, len(run.headers) - 1
    batches = "padded baseline" if header.batches == "padded" else "odb"
    starts = f", resumed {resumed} time{'s' if resumed > 1 else ''}" if resumed else ""
    replicas = f"{header.num_replicas} replica{'s' if header.num_replicas > 1 else ''}"
    return (
        f"{batches}, {replicas}, iterations {steps[0].iteration} to {steps[-1].iteration}, token "
        f"budget {header.token_budget}, global batch size {header.global_batch_size}{starts}"
    )


def _run_values(run: RunLog, figures: RunFigures) -> dict[str, Any]:
    """Return the run for JSON: process starts, summary, and the figures of each step."""
    fields = ("iteration", "started", "batches", "cost", "token_budget", "flags")
    return {
        "starts": [
            {"replicas": header.num_replicas} | {name: getattr(header, name) for name in fields}
            for header in run.headers
        ],
        "summary": figures.summary(),
        "steps": [
            {"iteration": step.iteration}
            | {
                name: float(values[at]) if math.isfinite(values[at]) else None
                for name, values in figures.per_step.items()
            }
            for at, step in enumerate(run.steps)
        ],
        "notes": list(run.notes),
    }
