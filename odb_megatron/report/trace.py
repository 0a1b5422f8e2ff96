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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.output_files import check_output, write_json
from odb_megatron.report.cost_fit import fit_cost
from odb_megatron.report.page import (
    STYLES,
    Axis,
    Bar,
    Chart,
    Line,
    Panel,
    need_pages,
    row_bar,
    write_page,
)
from odb_megatron.report.steps import LoggedStep, RunLog, StepRecord, read_run

__all__ = ["CURVES", "RunFigures", "choose_steps", "compare", "curve_chart", "measured_balance"]
__all__ += ["timelines", "trace"]

Values = npt.NDArray[np.float64]

# --- figures ---------------------------------------------------------------------------------

# Figures of a step: sums over replicas, or the largest of any replica.
_OF_ALL = (
    *("samples", "consumed_samples", "tokens", "computed_tokens", "fill", "balance", "idle"),
    *("moved", "bytes_moved", "left_out", "bad_records", "truncated", "grad_norm"),
)
_LARGEST = ("step_s", "wait_s", "plan_s", "queue_bytes", "peak_memory_bytes")


def measured_balance(step: LoggedStep) -> float:
    """Return mean over max of the replicas' measured time; NaN where one is not known."""
    times = [sum(record.micro_batch_s) for record in step.records.values()]
    return sum(times) / len(times) / max(times) if min(times) > 0 else math.nan


def _figures_of(step: LoggedStep) -> dict[str, float]:
    first, records = step.first, step.records.values()
    computed = first.computed_tokens
    found: dict[str, float | None] = {name: getattr(first, name) for name in _OF_ALL}
    found |= {name: max(getattr(record, name) for record in records) for name in _LARGEST}
    found |= {
        "micro_batches": first.num_micro_batches,
        "padding": 1 - first.tokens / computed if computed else None,
        "balance_measured": measured_balance(step),
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


def _over(name: str, take: Callable[[Values], Any], *, is_late: bool = False) -> Any:
    """Return what takes a figure of the steps that have it; None where none has."""

    def of(figures: RunFigures) -> float | None:
        values = figures.per_step[name][figures.is_late if is_late else slice(None)]
        known = values[~np.isnan(values)]
        return float(take(known)) if len(known) else None

    return of


def _share(
    over: str, under: str, *, is_late: bool = True, one_less: bool = False
) -> Callable[[RunFigures], float | None]:
    def of(figures: RunFigures) -> float | None:
        steps = figures.is_late if is_late else slice(None)
        below = float(figures.per_step[under][steps].sum())
        share = float(figures.per_step[over][steps].sum()) / below if below else None
        return 1 - share if one_less and share is not None else share

    return of


# Labels, formats, and what they are of all steps; rates leave out the first step of each start,
# which pays for what is done once.
_SUMMARY: dict[str, tuple[str, str, Callable[[RunFigures], float | None]]] = {
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
        "padding", "{:.2%}", _share("tokens", "computed_tokens", is_late=False, one_less=True),
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


def _shown(name: str, value: float | None) -> str:
    return "" if value is None else _SUMMARY[name][1].format(value)


def _rows(figures: RunFigures) -> list[tuple[str, str]]:
    found = figures.summary().items()
    return [(_SUMMARY[name][0], _shown(name, value)) for name, value in found if value is not None]


def _differences(one: RunFigures, other: RunFigures) -> list[tuple[str, str, str, str]]:
    """Return (figure, of one run, of the other, difference) for what either has."""
    rows = []
    for name, (label, _, take) in _SUMMARY.items():
        a, b = take(one), take(other)
        texts = (_shown(name, a), _shown(name, b))
        if a is None or b is None:
            change = "only in one"
        elif texts[0] == texts[1]:
            change = "equal"
        else:
            change = f"{b / a - 1:+.1%}" if a else f"{b - a:+.4g}"
        if any(texts):
            rows.append((label, *texts, change))
    return rows


# --- charts over the steps -------------------------------------------------------------------

_MAX_BINS, _TABLE_ROWS, _FEW_STEPS = 100, 20, 30


@dataclass(frozen=True, slots=True)
class Curves:
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
_COMPARED = {"balance": "Balance predicted", "fill": "Fill", "step_s": "Time per step"}
"""Curves of one figure among others that are laid over each other, and their headings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bins:
    """A figure over stretches of steps; where there are few steps, each is one of its own."""

    label: str
    first: Values
    last: Values
    mean: Values
    least: Values
    most: Values

    @classmethod
    def of(cls, label: str, x: Values, values: Values, most: int) -> _Bins:
        parts = np.array_split(np.arange(len(x)), min(most, len(x)))
        known = [values[part][~np.isnan(values[part])] for part in parts]

        def over(take: Callable[[Values], Any]) -> Values:
            return np.array([take(part) if len(part) else math.nan for part in known])

        return cls(
            label=label,
            first=np.array([x[part[0]] for part in parts]),
            last=np.array([x[part[-1]] for part in parts]),
            mean=over(np.mean),
            least=over(np.min),
            most=over(np.max),
        )

    @property
    def is_binned(self) -> bool:
        return bool((self.first != self.last).any())

    def rows(self) -> list[tuple[str, list[str]]]:
        """Return the name and the cells of each stretch."""
        columns = (self.mean, self.least, self.most) if self.is_binned else (self.mean,)
        cells = [
            ["" if np.isnan(value) else f"{value:.5g}" for value in row]
            for row in zip(*columns, strict=True)
        ]
        ends = zip(self.first.astype(int).tolist(), self.last.astype(int).tolist(), strict=True)
        names = [str(first) if first == last else f"{first} to {last}" for first, last in ends]
        return list(zip(names, cells, strict=True))


def curve_chart(curves: Curves, runs: Mapping[str, RunFigures]) -> Chart | None:
    """Return the chart of some figures, of several runs over each other; None where none has one.

    Args:
        curves: what to show; of one figure where there are several runs.
        runs: by the names that a legend has.
    """

    def binned(most: int) -> list[_Bins]:
        return [
            _Bins.of(
                label if len(runs) == 1 else run,
                figures.per_step["consumed_samples"] if curves.by_samples else figures.iterations,
                figures.per_step[name] * curves.scale,
                most,
            )
            for run, figures in runs.items()
            for name, label in curves.names.items()
            if not np.isnan(figures.per_step[name]).all()
        ]

    found = binned(_MAX_BINS)
    if not found:
        return None
    ends = curves.ends
    if curves.is_whole:  # from 0: one value in all steps would else have an axis of fractions
        ends = (0, 1.1 * max(1.0, *(float(np.nanmax(one.most)) for one in found)))
    head = "samples consumed" if curves.by_samples else "iteration"
    band = "Lines are means over stretches of steps, bands go from least to most."
    columns, rows = _table(binned(_TABLE_ROWS), head, curves.unit)
    lines = [
        Line(
            x=(one.first + one.last) / 2,
            y=one.mean,
            colour=colour,
            label=one.label,
            style=style,
            marker=marker if len(one.first) <= _FEW_STEPS else "",
            low=one.least if one.is_binned else None,
            high=one.most if one.is_binned else None,
        )
        for one, (colour, style, marker) in zip(found, STYLES, strict=False)
    ]
    y = Axis(label=curves.unit, ends=ends, most=5, is_whole=curves.is_whole, has_grid=True)
    return Chart(
        title=curves.title,
        caption=band if any(one.is_binned for one in found) else "",
        panels=[Panel(lines=lines, x=Axis(label=head, most=9, is_whole=True), y=y)],
        columns=columns,
        rows=rows,
        narrow_height=280,
    )


def _table(found: Sequence[_Bins], head: str, unit: str) -> tuple[list[str], list[list[str]]]:
    """Figures side by side where they have the same stretches, else each run below the other."""
    parts = [one.rows() for one in found]
    names = [[name for name, _ in part] for part in parts]
    if all(own == names[0] for own in names):
        heads = [
            text
            for one in found
            for text in ([f"{one.label}, mean", "least", "most"] if one.is_binned else [one.label])
        ]
        rows = zip(*parts, strict=True)
        return [head, *heads], [
            [row[0][0], *(cell for _, cells in row for cell in cells)] for row in rows
        ]
    heads = ["mean", "least", "most"] if any(one.is_binned for one in found) else [unit]
    return ["run", head, *heads], [
        [one.label, name, *cells, *[""] * (len(heads) - len(cells))]
        for one, part in zip(found, parts, strict=True)
        for name, cells in part
    ]


# --- charts of single steps ------------------------------------------------------------------

_NUM_USUAL = 2  # what a phone's width has room for
_MAX_REPLICAS = 12
_MANY_MICRO_BATCHES = 24
_GAP = 0.03  # between steps, of the mean step
_AXES = {
    "ms": "measured time, ms",
    "s": "measured time, s",
    "cost": "predicted cost, tokens",
    "tokens": "computed tokens",
}


def choose_steps(figures: RunFigures) -> tuple[tuple[int, ...], int | None, str, str]:
    """Choose steps that are worth showing, by their places in the run.

    The first one of each start is looked at only where there is no other.

    Returns:
        One or two steps whose balance is nearest the median, or of the middle where none has one;
        the one of least balance, None where none is below the median; what is said of both.
    """
    measured = figures.per_step["balance_measured"]
    kind = "predicted" if np.isnan(measured).all() else "measured"
    balance = figures.per_step["balance"] if kind == "predicted" else measured
    values = np.where(figures.is_late, balance, math.nan)
    has_aside = not figures.is_late.all() and not np.isnan(values).all()
    if not has_aside:
        values = balance
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        middle = max(0, len(values) // 2 - 1)
        usual = tuple(range(middle, min(middle + _NUM_USUAL, len(values))))
        steps = "Steps" if len(usual) > 1 else "A step"
        return usual, None, f"{steps} in the middle of the run; balance is not known.", ""
    median = float(np.median(values[known]))
    lowest = int(known[np.argmin(values[known])])
    worst = lowest if values[lowest] < median else None
    nearest = known[np.argsort(np.abs(values[known] - median), kind="stable")[:_NUM_USUAL]]
    usual = tuple(sorted(int(at) for at in nearest if at != worst))
    aside = " (the first step of each start aside)" if has_aside else ""
    own = " and ".join(f"{values[at]:.4f}" for at in usual)
    return (
        usual,
        worst,
        f"{'Steps' if len(usual) > 1 else 'The step'} nearest the median balance, {kind} {own}; "
        f"the median of all steps is {median:.4f}{aside}.",
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
    unit, name, scale = "tokens", "computed tokens", 1.0
    if all(record.micro_batch_s for record in records):
        longest = max(sum(record.micro_batch_s) for record in records)
        unit, name, scale = ("ms" if longest < 2 else "s"), "measured time", 1e3
        scale = 1e3 if unit == "ms" else 1.0
    elif all(record.costs for record in records):
        unit, name = "cost", "predicted cost (in tokens that attend to nothing)"

    def widths(record: StepRecord) -> list[float]:
        times, costs = record.micro_batch_s, record.costs
        found = {"cost": costs, "tokens": record.widths}.get(unit, times)
        return [scale * width for width in found]

    replicas, num = _chosen(steps[0])
    spans = [max(sum(widths(record)) for record in step.records.values()) for step in steps]
    start, gap = 0.0, _GAP * sum(spans) / len(spans)
    bars: list[Bar] = []
    top, table = {}, [[str(replica)] for replica in replicas]
    for step, span in zip(steps, spans, strict=True):
        for row, replica in enumerate(replicas):
            record = step.records.get(replica)
            table[row].append("" if record is None else f"{sum(widths(record)):.4g}")
            if record is not None:
                bars += _step_bars(record, widths(record), row, start, span, unit)
        top[start + span / 2] = f"step {step.iteration}"
        start += span + gap
    return Chart(
        title=title,
        caption=f"{caption} A bar is a micro-batch, as wide as its {name}; what is hatched behind "
        f"the last one is what the replica waits for the slowest one of the step.{num}",
        panels=[
            Panel(
                bars=bars,
                top=top,
                x=Axis(label=_AXES[unit], ends=(0, max(start - gap, 1e-9))),
                y=_replica_rows(replicas),
            )
        ],
        columns=["replica", *(f"step {step.iteration}, {unit}" for step in steps)],
        rows=table,
        height=110 + 26 * len(replicas),
    )


def _step_bars(
    record: StepRecord, widths: Sequence[float], row: int, left: float, span: float, unit: str
) -> Iterator[Bar]:
    few = len(widths) <= _MANY_MICRO_BATCHES
    at = left
    for index, (width, lengths) in enumerate(zip(widths, record.lengths, strict=True)):
        look = "blue" if few else ("blue thin", "green thin")[index % 2]  # without edges
        what = f"{len(lengths)} samples, {sum(lengths)} tokens" if lengths else "idle"
        tip = f"step {record.iteration}, micro-batch {index}: {what}, {width:.4g} {unit}"
        yield row_bar(row, at, width, look if lengths else "idle", tip)
        at += width
    rest = left + span - at
    if rest > 1e-9 * span:
        tip = f"step {record.iteration}: {rest / span:.1%} free, behind the slowest"
        yield row_bar(row, at, rest, "waste", tip)


def _composition(step: LoggedStep) -> Chart:
    """Return the lengths of a step's samples, replica by replica."""
    replicas, num = _chosen(step)
    replicas = [replica for replica in replicas if _lengths(step.records[replica])]
    lines: list[Line] = []
    rows = []
    for row, replica in enumerate(replicas):
        lengths = np.array(sorted(_lengths(step.records[replica])))
        median = float(np.median(lengths))
        places = [row + 0.28 * ((at * 7) % 11 - 5) / 5 for at in range(len(lengths))]
        lines += [
            Line(x=lengths, y=places, colour="blue", style="", marker="o", alpha=0.6),
            Line(x=[median] * 2, y=[row - 0.4, row + 0.4], colour="orange", width=3),
        ]
        quartiles = np.percentile(lengths, (0, 25, 50, 75, 100)).round().astype(int)
        rows.append(list(map(str, (replica, len(lengths), lengths.sum(), *quartiles))))
    return Chart(
        title=f"Samples of step {step.iteration} by replica",
        caption="A dot is a sample at its length in tokens; the line is the replica's median. "
        f"Replicas may differ in number and length of samples and still cost the same.{num}",
        panels=[
            Panel(
                lines=lines,
                x=Axis(label="tokens", ends=(0, None), is_whole=True, has_grid=True),
                y=_replica_rows(replicas),
            )
        ],
        columns=[
            "replica",
            "samples",
            "tokens",
            "least",
            "quartile",
            "median",
            "quartile",
            "longest",
        ],
        rows=rows,
        height=110 + 30 * len(replicas),
    )


def _replica_rows(replicas: Sequence[int]) -> Axis:
    ticks = {float(row): str(replica) for row, replica in enumerate(replicas)}
    return Axis(label="replica", ends=(len(replicas) - 0.4, -0.6), ticks=ticks)


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


def trace(argv: Sequence[str]) -> int:
    """Show one run.

    Raises:
        SystemExit: arguments or logs that cannot be used (2), or `--help` (0).
    """
    parser = _parser(
        "trace",
        "Show a run from its step logs (--odb-log-dir): a summary, and with --html a page with "
        "the timeline of replicas and micro-batches, balance, fill, waits, and the samples of a "
        "step.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder given to --odb-log-dir")
    fit = "fit the cost model to the times of the run's micro-batches, and print its flag"
    parser.add_argument("--fit-cost", action="store_true", help=f"{fit}, --odb-cost")
    options = parser.parse_args(argv)
    refused = ""
    try:
        steps = _check(options)
        run = read_run(options.run, steps=steps)
        figures = RunFigures.of(run)
        values = _run_values(run, figures)
        lines = [_headline(run), *(f"  {label:<30}{text}" for label, text in _rows(figures))]
        lines += [f"  note: {note}" for note in run.notes]
        title = f"Run {_name(options.run)}"
        if options.html:
            tiles = figures.summary()
            charts = [*timelines(run, figures)]
            charts += filter(None, (curve_chart(curves, {title: figures}) for curves in CURVES))
            write_page(
                options.html,
                "run.html.j2",
                title=title,
                summary=_headline(run),
                tiles=[(label, _shown(name, tiles[name])) for name, label in _TILES.items()
                       if tiles[name] is not None],
                differences=(),
                charts=charts,
                whole=_rows(figures),
                starts=[("", header) for header in run.headers],
                notes=[*run.notes, f"odb-megatron trace {shlex.join(argv)}"],
            )  # fmt: skip
        if options.fit_cost:
            try:
                fitted = fit_cost(run)
                values["cost_fit"] = asdict(fitted)
                lines += fitted.lines()
            except ValueError as error:
                refused = str(error)
        _tell(options.json, values, lines)
        if refused:
            raise ValueError(refused)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


_TILES = {
    "steps": "steps",
    "samples": "samples",
    "tokens_per_second": "tokens per second",
    "fill": "fill",
    "padding": "padding",
    "balance": "balance",
    "balance_measured": "balance measured",
    "wait_share": "waiting for data",
}


def compare(argv: Sequence[str]) -> int:
    """Show two runs and what differs.

    Raises:
        SystemExit: arguments or logs that cannot be used (2), or `--help` (0).
    """
    parser = _parser(
        "compare",
        "Lay two runs over each other, from their step logs (--odb-log-dir), and print what "
        "differs.",
    )
    parser.add_argument("runs", metavar="RUN", nargs=2, help="the folder given to --odb-log-dir")
    options = parser.parse_args(argv)
    try:
        steps = _check(options)
        if Path(options.runs[0]).resolve() == Path(options.runs[1]).resolve():
            raise ValueError(
                f"{options.runs[0]} and {options.runs[1]} are one folder: name two runs"
            )
        names = [_name(run) for run in options.runs]
        if names[0] == names[1]:
            names = list(options.runs)
        runs = {
            name: read_run(run, steps=steps) for name, run in zip(names, options.runs, strict=True)
        }
        figures = {name: RunFigures.of(run) for name, run in runs.items()}
        rows = _differences(*figures.values())
        values = {
            "runs": {name: _run_values(run, figures[name]) for name, run in runs.items()},
            "differences": [
                dict(zip(("figure", "a", "b", "difference"), row, strict=True)) for row in rows
            ],
        }
        lines = [f"{'':<30}{'A':>16}{'B':>16}{'difference':>14}"]
        lines += [f"{label:<30}{a:>16}{b:>16}{change:>14}" for label, a, b, change in rows]
        letters = dict(zip("AB", runs.items(), strict=True))
        lines += [f"{letter}: {name}" for letter, (name, _) in letters.items()]
        lines += [f"note: {own}: {note}" for own, (_, run) in letters.items() for note in run.notes]
        if options.html:
            heads = [f"{letter}: {name}" for letter, (name, _) in letters.items()]
            write_page(
                options.html,
                "run.html.j2",
                title=" and ".join(names),
                summary=" ".join(f"{own}: {_headline(run)}." for own, (_, run) in letters.items()),
                tiles=(),
                differences=[["figure", *heads, "difference"], *rows],
                charts=list(_compared(figures)),
                whole=(),
                starts=[(f"{name}: ", own) for name, run in runs.items() for own in run.headers],
                notes=[
                    *(f"{name}: {note}" for name, run in runs.items() for note in run.notes),
                    f"odb-megatron compare {shlex.join(argv)}",
                ],
            )
        _tell(options.json, values, lines)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _compared(figures: Mapping[str, RunFigures]) -> Iterator[Chart]:
    for name in ("balance", "fill", "micro_batches", "step_s", "tokens", "loss"):
        (curves,) = (curves for curves in CURVES if name in curves.names)
        title = _COMPARED.get(name, curves.title)
        own = replace(curves, title=title, names={name: curves.names[name]})
        chart = curve_chart(own, figures)
        if chart is not None:
            yield chart


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"odb-megatron {name}", description=description)
    add = parser.add_argument
    add("--html", metavar="FILE", help="write a page; needs pip install 'odb-megatron[pages]'")
    figures = "write all figures of each step; - is standard output, the text then goes to"
    add("--json", metavar="FILE", help=f"{figures} standard error")
    steps = "only iterations A to B, both included; A: or :B leaves an end open"
    add("--steps", metavar="A:B", help=steps)
    return parser


def _check(options: argparse.Namespace) -> tuple[int, int] | None:
    """Refuse what cannot be written; return the first and the last step that are wanted."""
    if options.json not in (None, "-"):
        check_output("--json", options.json)
    if options.html == "-":
        raise ValueError("--html - : a page goes to a file: name one")
    if options.html is not None:
        check_output("--html", options.html)
        need_pages("--html")
    if options.steps is None:
        return None
    found = re.fullmatch(r"(\d*):(\d*)", options.steps)
    first, last = (int(found[1] or 1), int(found[2] or sys.maxsize)) if found else (1, 0)
    if first > last or options.steps == ":":
        raise ValueError(
            f"--steps {options.steps}: give the first and the last iteration, like 100:200"
        )
    return first, last


def _tell(target: str | None, values: dict[str, Any], lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stderr if target == "-" else sys.stdout)
    write_json(target, values)


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
