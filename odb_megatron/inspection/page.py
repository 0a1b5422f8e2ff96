"""An inspection as a page: the figures that decide in tiles, then charts and tables.

Must not compute: what it shows is what the text output shows.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.text import (
    advised_logits,
    bad_lines,
    cut_rows,
    length_rows,
    overlong_line,
    prediction_rows,
    read_line,
    setting_line,
    speed_notes,
)
from odb_megatron.pages import Chart, Page, Section, Table, Tile

__all__ = ["page_of"]


def page_of(findings: Findings, charts: Sequence[Chart], argv: Sequence[str]) -> Page:
    """Return the page.

    Args:
        findings: what was found.
        charts: of `charts.all_charts`.
        argv: the command's arguments, for the small print.
    """
    sections: list[Chart | Section] = []
    if findings.advice is not None:
        sections.append(_advice(findings))
    by_title = list(charts)
    sections += [*by_title[:2], _data(findings), by_title[2], _prediction(findings), *by_title[3:]]
    sections.append(_memory(findings))
    return Page(
        title=f"Inspection of {_base(findings.reading.name)}",
        summary=f"{read_line(findings)}. Predicted for {setting_line(findings)}.",
        tiles=_tiles(findings),
        sections=sections,
        notes=[f"odb-megatron inspect {shlex.join(argv)}".strip()],
    )


def _tiles(findings: Findings) -> list[Tile]:
    lengths = findings.reading.lengths
    name = findings.planned
    planned = findings.runs[name].method
    own = findings.runs[name].setting.token_budget
    fixed = findings.fixed.setting.token_budget
    budgets = f"budget {own} for both" if own == fixed else f"budget {own} over {fixed}"
    mean, least, most = planned.micro_batches
    tiles = [
        Tile(
            label="samples",
            value=f"{len(lengths)}",
            note=f"{findings.reading.num_bad} bad records",
        ),
        Tile(
            label="mean length",
            value=f"{lengths.mean():.0f}",
            note=f"CV {lengths.std() / lengths.mean():.2f}, longest {lengths.max()}",
        ),
        Tile(
            label="padding avoided",
            value=f"{findings.avoided():.1%}",
            note=f"of a batch padded to the context, {findings.setting.seq_length}",
        ),
        Tile(
            label="predicted speed-up",
            value=f"{findings.fair_speedup():.2f}",
            note=f"{name} over a fixed batch, {budgets}",
        ),
        Tile(
            label="balance",
            value=f"{planned.balance:.3f}",
            note=f"mean over largest replica, {name}",
        ),
        Tile(
            label="micro-batches per step",
            value=f"{mean:.2f}",
            note=f"{least} to {most}; {findings.steps_per_epoch(name)} steps "
            f"{'of the run' if findings.is_run else 'per epoch'}",
        ),
    ]
    logits = findings.logits if findings.advice is None else findings.advice.advised.logits
    asked = "given" if findings.advice is None else "advised"
    if logits is not None:
        tiles.append(
            Tile(
                label="logits, peak",
                value=f"{logits.peak_gib:.2f} GiB",
                note=f"{asked} budget {logits.token_budget}, vocabulary {logits.vocab}, "
                f"TP {logits.tp}",
            )
        )
    return tiles


def _advice(findings: Findings) -> Section:
    advice = findings.advice
    assert advice is not None
    return Section(
        title="Advice",
        paragraphs=[
            f"{advice.flags}: {advice.reason}.",
            *(f"Warning: {warning}." for warning in advice.warnings),
            f"Planned on {advice.num_samples} samples; rates are work per time, 1 is ideal.",
        ],
        code=f"--odb {advice.flags}",
    )


def _data(findings: Findings) -> Section:
    head, values = length_rows(findings)
    cuts = cut_rows(findings)
    columns = [str(cut) for cut in cuts[0]]
    bad = bad_lines(findings)
    return Section(
        title="Lengths and bad records",
        paragraphs=[
            ", ".join(f"{name} {value}" for name, value in zip(head, values, strict=True)) + ".",
            f"{overlong_line(findings)}.".removeprefix("* ").capitalize(),
            bad[0],
        ],
        table=Table(columns=columns, rows=cuts[1:]),
        code="\n".join(line.strip() for line in bad[1:]),
    )


def _prediction(findings: Findings) -> Section:
    rows = prediction_rows(findings)
    return Section(
        title="Prediction",
        paragraphs=[
            f"Cost model: {findings.setting.cost_origin()}.",
            *(f"{note[0].upper()}{note[1:]}." for note in speed_notes(findings)),
        ],
        table=Table(columns=rows[0], rows=rows[1:]),
    )


def _memory(findings: Findings) -> Section:
    logits = findings.logits
    if logits is None:
        text = "Unknown without a tokenizer, or vocab in --model-shape."
        return Section(title="Memory of the logits", paragraphs=[text])
    trials = findings.advice.trials if findings.advice is not None else ()
    table = Table(
        columns=("token budget", "logits peak", "rate", "M", "balance"),
        rows=[
            [
                str(trial.token_budget),
                f"{trial.logits.peak_gib:.2f} GiB" if trial.logits else "-",
                f"{trial.method.rate:.3f}",
                f"{trial.method.micro_batches[0]:.2f}",
                f"{trial.method.balance:.3f}",
            ]
            for trial in trials
        ],
    )
    return Section(
        title="Memory of the logits",
        paragraphs=[
            f"At the given budget, {logits.token_budget} tokens times {logits.vocab} entries over "
            f"TP {logits.tp}: {logits.logits_gib:.2f} GiB, peak {logits.peak_gib:.2f} GiB"
            f"{advised_logits(findings)}.",
            str(logits.as_json()["note"]),
        ],
        table=table if trials else None,
    )


def _base(name: str) -> str:
    return " ".join(part.rpartition("/")[2] for part in name.split())
