"""What `odb-megatron trace` and `compare` show of logged runs: as text, as values, as a page.

Must not read files or parse arguments (`trace_command`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from odb_megatron.pages import Chart, Page, Section, Table, Tile
from odb_megatron.report.run_charts import NamedRun, Panel, step_chart
from odb_megatron.report.run_figures import ChosenSteps, RunFigures, choose_steps
from odb_megatron.report.steps import LoggedStep, RunLog
from odb_megatron.report.timeline import composition_chart, timeline_chart

__all__ = ["compare_page", "compare_rows", "run_values", "summary_lines", "trace_page"]

_BALANCE = "Balance is the mean over the largest cost of the replicas, so 1 where all finish "
PANELS = (
    Panel(
        title="Balance of the replicas",
        caption=_BALANCE + "together; predicted by the cost model, and measured where each "
        "micro-batch was timed.",
        unit="mean / max",
        names=(("balance", "predicted"), ("balance_measured", "measured")),
    ),
    Panel(
        title="Fill and padding",
        caption="Fill is tokens over the room of all micro-batches; padding is the share of "
        "computed tokens that are no sample's.",
        unit="% of tokens",
        names=(("fill", "fill"), ("padding", "padding")),
        scale=100,
        bounds=(0, 105),
    ),
    Panel(
        title="Micro-batches per step",
        caption="M, the same on all replicas of a step.",
        unit="micro-batches",
        names=(("micro_batches", "M"),),
        whole=True,
    ),
    Panel(
        title="Time and waits",
        caption="A step's time, what the trainer waited for its data (the longest of all "
        "replicas), and what making the step took in the background.",
        unit="seconds",
        names=(("step_s", "step"), ("wait_s", "wait for data"), ("plan_s", "making the step")),
    ),
    Panel(
        title="Steps made ahead",
        caption="Finished steps that wait behind the one in training, on the replica with the "
        "fewest: at 0 the trainer has to wait next.",
        unit="steps",
        names=(("queue_steps", "steps ahead"),),
        whole=True,
    ),
    Panel(
        title="Bytes held ahead",
        caption="Finished steps that wait, on the replica with the most.",
        unit="MB",
        names=(("queue_bytes", "finished steps"),),
        scale=1e-6,
    ),
    Panel(
        title="Samples that moved",
        caption="Samples that another replica trained than the one that had read them, of all "
        "replicas.",
        unit="samples",
        names=(("moved", "samples moved"),),
        whole=True,
    ),
    Panel(
        title="Tokens per step",
        caption="Tokens of all replicas before padding.",
        unit="tokens",
        names=(("tokens", "tokens"),),
    ),
    Panel(
        title="Loss",
        caption="Mean over the loss tokens of all replicas.",
        unit="loss",
        names=(("loss", "loss"),),
        by_samples=True,
    ),
)
"""Charts over the steps of a run."""

_COMPARED = {
    "balance": "Balance predicted",
    "fill": "Fill",
    "micro_batches": "Micro-batches per step",
    "step_s": "Time per step",
    "tokens": "Tokens per step",
    "loss": "Loss",
}
"""Figures that are laid over each other, and the headings."""

_LABELS = {
    "steps": ("steps", "{:.0f}"),
    "replicas": ("replicas", "{:.0f}"),
    "samples": ("samples", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "tokens_per_step": ("tokens per step", "{:,.0f}"),
    "micro_batches_mean": ("micro-batches per step, mean", "{:.2f}"),
    "micro_batches_max": ("micro-batches per step, most", "{:.0f}"),
    "fill": ("fill, mean", "{:.2%}"),
    "padding": ("padding", "{:.2%}"),
    "balance": ("balance predicted, mean", "{:.4f}"),
    "balance_lowest": ("balance predicted, lowest", "{:.4f}"),
    "balance_measured": ("balance measured, mean", "{:.4f}"),
    "idle": ("idle micro-batches", "{:.0f}"),
    "patches_max": ("patches per micro-batch, most", "{:,.0f}"),
    "seconds_per_step": ("seconds per step", "{:.4g}"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "wait_share": ("time spent waiting for data", "{:.2%}"),
    "plan_seconds_per_step": ("seconds to make a step", "{:.4g}"),
    "moved": ("samples moved", "{:,.0f}"),
    "queue_bytes_max": ("bytes in finished steps, most", "{:,.0f}"),
    "peak_memory_bytes": ("peak memory, bytes", "{:,.0f}"),
    "left_out": ("samples left out", "{:.0f}"),
    "bad_records": ("bad records", "{:.0f}"),
    "truncated": ("truncated samples", "{:.0f}"),
    "loss_first": ("loss, first", "{:.4f}"),
    "loss_last": ("loss, last", "{:.4f}"),
}


def summary_lines(run: RunLog, figures: RunFigures) -> list[str]:
    """Return the run as text."""
    lines = [_headline(run)]
    lines += [
        f"  {_LABELS[name][0]:<30}{_shown(name, value)}"
        for name, value in figures.summary().items()
        if value is not None
    ]
    return [*lines, *(f"  note: {note}" for note in run.notes)]


def run_values(run: RunLog, figures: RunFigures) -> dict[str, Any]:
    """Return the run for JSON: process starts, summary, and the figures of each step."""
    steps = [
        {"iteration": step.iteration}
        | {
            name: float(values[at]) if math.isfinite(values[at]) else None
            for name, values in figures.per_step.items()
        }
        for at, step in enumerate(run.steps)
    ]
    starts = [
        {
            "iteration": header.iteration,
            "started": header.started,
            "replicas": header.num_replicas,
            "batches": header.batches,
            "cost": header.cost,
            "token_budget": header.token_budget,
            "flags": header.flags,
        }
        for header in run.headers
    ]
    summary = figures.summary()
    return {"starts": starts, "summary": summary, "steps": steps, "notes": list(run.notes)}


def trace_page(run: RunLog, *, title: str, command: str) -> Page:
    """Return the page of a run.

    Args:
        run: what was read.
        title: heading.
        command: that made the page.
    """
    figures = RunFigures.of(run)
    charts: list[Chart | Section] = [*_timelines(run, figures)]
    own = NamedRun(name=title, figures=figures)
    charts += [chart for panel in PANELS if (chart := step_chart(panel, [own])) is not None]
    return Page(
        title=title,
        summary=_headline(run),
        tiles=_tiles(figures),
        sections=[*charts, _whole_run(figures), *_starts(run)],
        notes=[*run.notes, command],
    )


def compare_rows(one: RunFigures, other: RunFigures) -> list[tuple[str, str, str, str]]:
    """Return (figure, of one run, of the other, difference) for what either has."""
    first, second = one.summary(), other.summary()
    rows = []
    for name, (label, _) in _LABELS.items():
        a, b = first[name], second[name]
        if a is None and b is None:
            continue
        texts = (_shown(name, a), _shown(name, b))
        rows.append((label, *texts, "equal" if texts[0] == texts[1] else _difference(a, b)))
    return rows


def compare_page(runs: Sequence[tuple[str, RunLog]], *, command: str) -> Page:
    """Return the page that lays two runs over each other.

    Args:
        runs: two, with their names.
        command: that made the page.
    """
    named = [NamedRun(name=name, figures=RunFigures.of(run)) for name, run in runs]
    sections: list[Chart | Section] = [
        Section(
            title="Differences",
            paragraphs=[
                "Rates leave out the first step of each start. The difference is B over A."
            ],
            table=Table(
                columns=("figure", f"A: {named[0].name}", f"B: {named[1].name}", "difference"),
                rows=compare_rows(named[0].figures, named[1].figures),
            ),
        )
    ]
    for name, title in _COMPARED.items():
        (panel,) = (panel for panel in PANELS if name in dict(panel.names))
        chart = step_chart(
            Panel(
                title=title,
                caption="",
                unit=panel.unit,
                names=((name, dict(panel.names)[name]),),
                scale=panel.scale,
                bounds=panel.bounds,
                by_samples=panel.by_samples,
                whole=panel.whole,
            ),
            named,
        )
        if chart is not None:
            sections.append(chart)
    notes = [f"{name}: {note}" for name, run in runs for note in run.notes]
    return Page(
        title=f"{runs[0][0]} and {runs[1][0]}",
        summary=" ".join(
            f"{letter}: {_headline(run)}." for letter, (_, run) in zip("AB", runs, strict=True)
        ),
        sections=[*sections, *(part for name, run in runs for part in _starts(run, of=name))],
        notes=[*notes, command],
    )


def _headline(run: RunLog) -> str:
    header, steps = run.headers[-1], run.steps
    batches = "padded baseline" if header.batches == "padded" else "odb"
    resumed = len(run.headers) - 1
    starts = f", resumed {resumed} time{'s' if resumed > 1 else ''}" if resumed else ""
    span = f"{steps[0].iteration} to {steps[-1].iteration}"
    replicas = f"{header.num_replicas} replica{'s' if header.num_replicas > 1 else ''}"
    return (
        f"{batches}, {replicas}, iterations {span}, token budget {header.token_budget}, global "
        f"batch size {header.global_batch_size}{starts}"
    )


def _tiles(figures: RunFigures) -> list[Tile]:
    names = {
        "steps": "steps",
        "samples": "samples",
        "tokens_per_second": "tokens per second",
        "fill": "fill",
        "padding": "padding",
        "balance": "balance",
        "balance_measured": "balance measured",
        "wait_share": "waiting for data",
    }
    found = figures.summary()
    return [
        Tile(label=label, value=_shown(name, found[name]))
        for name, label in names.items()
        if found[name] is not None
    ]


def _timelines(run: RunLog, figures: RunFigures) -> list[Chart]:
    """Steps of median balance, and the one in which replicas differ most."""
    chosen = choose_steps(figures)
    usual = [run.steps[at] for at in chosen.usual]
    charts = [timeline_chart(usual, title=_titled(usual), caption=_said(chosen))]
    if chosen.worst is not None and len(run.steps[chosen.worst].records) > 1:
        worst = run.steps[chosen.worst]
        charts.append(
            timeline_chart(
                [worst],
                title=f"Timeline of the least balanced step, {worst.iteration}",
                caption=f"The step in which replicas differ most: balance {chosen.kind} "
                f"{chosen.values[chosen.worst]:.4f}{_aside(chosen)}.",
            )
        )
    if any(lengths for record in usual[0].records.values() for lengths in record.lengths):
        charts.append(composition_chart(usual[0]))
    return charts


def _titled(steps: Sequence[LoggedStep]) -> str:
    names = " and ".join(str(step.iteration) for step in steps)
    return f"Timeline of step{'s' if len(steps) > 1 else ''} {names}"


def _said(chosen: ChosenSteps) -> str:
    many = len(chosen.usual) > 1
    if math.isnan(chosen.median):
        return f"{'Steps' if many else 'A step'} in the middle of the run; balance is not known."
    own = " and ".join(f"{chosen.values[at]:.4f}" for at in chosen.usual)
    return (
        f"{'Steps' if many else 'The step'} nearest the median balance, {chosen.kind} {own}; the "
        f"median of all steps is {chosen.median:.4f}{_aside(chosen)}."
    )


def _aside(chosen: ChosenSteps) -> str:
    return " (the first step of each start aside)" if chosen.has_aside else ""


def _whole_run(figures: RunFigures) -> Section:
    found = figures.summary()
    rows = [
        (_LABELS[name][0], _shown(name, value))
        for name, value in found.items()
        if value is not None
    ]
    return Section(
        title="The run as a whole",
        paragraphs=[
            "Rates leave out the first step of each start, which pays for what is done once."
        ],
        table=Table(columns=("figure", "value"), rows=rows),
    )


def _starts(run: RunLog, *, of: str = "") -> list[Section]:
    found = []
    for header in run.headers:
        sizes = ", ".join(f"{name} {size}" for name, size in header.sizes.items() if size > 1)
        found.append(
            Section(
                title=(f"{of}: " if of else "")
                + (f"Resumed after {header.iteration}" if header.iteration else "Start"),
                paragraphs=[
                    f"{header.started}; {header.num_replicas} data-parallel replicas"
                    + (f"; {sizes}" if sizes else "")
                ],
                code=header.flags,
            )
        )
    return found


def _shown(name: str, value: float | None) -> str:
    return "" if value is None else _LABELS[name][1].format(value)


def _difference(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return "only in one"
    return f"{b / a - 1:+.1%}" if a else f"{b - a:+.4g}"
