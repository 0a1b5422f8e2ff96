"""An inspection's findings as text, and the lines and rows that its page shows as well.

Pure: figures in, words out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_megatron.inspection.advice import Advice
from odb_megatron.inspection.findings import Findings, cut_offs
from odb_megatron.inspection.prediction import ODB, RIVALS

__all__ = [
    "advised_logits",
    "as_text",
    "bad_lines",
    "cut_rows",
    "length_rows",
    "overlong_line",
    "prediction_rows",
    "read_line",
    "setting_line",
    "speed_notes",
]

Rows = Sequence[Sequence[str]]


def as_text(findings: Findings) -> str:
    """Return what is printed."""
    parts = [
        _data_text(findings),
        _setting_text(findings),
        aligned(prediction_rows(findings), names=1),
        "\n".join(_speed_lines(findings)),
        _logits_text(findings),
    ]
    if findings.advice is not None:
        parts.append(_advice_text(findings.advice))
    return "\n\n".join(part for part in parts if part)


def prediction_rows(findings: Findings) -> list[list[str]]:
    """Return the head and a row per method."""
    steps = "steps" if findings.is_run else "steps/epoch"
    rows = [
        [
            *("method", "budget", "speed", "padding", "fill", "balance", "M", "M range"),
            *("samples/step", steps),
        ]
    ]
    for name, run in findings.runs.items():
        method = run.method
        mean, least, most = method.micro_batches
        over = f" ({method.over_budget} over)" if method.over_budget else ""
        rows.append(
            [
                name,
                str(run.setting.token_budget),
                f"{findings.speedup(name, 'standard-safe'):.2f}",
                f"{method.padding:.1%}",
                f"{method.fill:.3f}{over}",
                f"{method.balance:.3f}",
                f"{mean:.2f}",
                f"{least}-{most}",
                f"{method.samples_per_step:.1f}",
                str(findings.steps_per_epoch(name)),
            ]
        )
    return rows


def length_rows(findings: Findings) -> list[list[str]]:
    """Return what describes the lengths."""
    lengths = findings.reading.lengths
    return [
        ["samples", "tokens", "mean", "median", "p95", "max", "CV"],
        [
            str(len(lengths)),
            str(int(lengths.sum())),
            f"{lengths.mean():.1f}",
            f"{np.median(lengths):.0f}",
            f"{np.quantile(lengths, 0.95):.0f}",
            str(int(lengths.max())),
            f"{lengths.std() / lengths.mean():.2f}",
        ],
    ]


def cut_rows(findings: Findings) -> list[list[str]]:
    """Return what cutting would cost."""
    limit = findings.setting.limit
    found = cut_offs(findings.reading.lengths, limit=limit)
    return [
        ["cut at", *(f"{cut['at']}{'*' if cut['at'] == limit else ''}" for cut in found)],
        ["samples cut", *(f"{cut['samples']:.1%}" for cut in found)],
        ["tokens lost", *(f"{cut['tokens']:.1%}" for cut in found)],
    ]


def bad_lines(findings: Findings) -> list[str]:
    """Return what is said of bad records."""
    reading = findings.reading
    if not reading.num_bad:
        return ["bad records: none"]
    share = reading.num_bad / reading.num_read
    lines = [
        f"bad records: {reading.num_bad} of {reading.num_read} ({share:.2%}). A run "
        "stops at the first; --odb-max-bad-records N leaves up to N out of their steps, as "
        "predicted here. Mend them, or pass it. The first of the files:"
    ]
    return lines + [f"  {message}" for message in reading.bad]


def read_line(findings: Findings) -> str:
    """Return what was read, and how much of it was simulated."""
    reading = findings.reading
    part = "a random sample"
    if reading.num_read == reading.num_records:
        part = "all"
    elif findings.is_run and reading.num_read == findings.epoch_samples:
        part = "those that the run takes"
    text = f"{reading.name}: {reading.num_read} of {reading.num_records} records read ({part})"
    if reading.read_s is not None:
        how = f"{reading.num_workers} processes" if reading.num_workers else "one process"
        text += f" in {reading.read_s:.1f} s by {how}"
    if len(findings.stream) < len(findings.kept.positions):
        text += f"; the first {len(findings.stream)} are planned"
    return text


def overlong_line(findings: Findings) -> str:
    """Return what the overlong policy does."""
    kept, setting = findings.kept, findings.setting
    what = "no sample is longer"
    if kept.num_truncated:
        what = f"{kept.num_truncated} samples lose {kept.num_cut_tokens} tokens"
    elif kept.num_dropped:
        what = f"{kept.num_dropped} samples are left out"
    elif kept.num_solo:
        what = f"{kept.num_solo} samples run alone, over the budget"
    return f"* the limit in force, {setting.limit}; --overlong {setting.overlong.value}: {what}"


def setting_line(findings: Findings) -> str:
    """Return what was predicted for."""
    setting = findings.setting
    return (
        f"DP {setting.dp}, token budget {setting.token_budget}, context {setting.seq_length}, "
        f"global batch size {setting.global_batch_size}"
    )


def aligned(rows: Rows, *, names: int) -> str:
    """Return a table as text: the first columns to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _data_text(findings: Findings) -> str:
    lines = [
        read_line(findings),
        *bad_lines(findings),
        "",
        aligned(length_rows(findings), names=0),
        "",
        aligned(cut_rows(findings), names=1),
        overlong_line(findings),
    ]
    return "\n".join(lines)


def _setting_text(findings: Findings) -> str:
    kept, setting = findings.kept, findings.setting
    padded = 1 - kept.num_tokens / findings.context_tokens
    return "\n".join(
        [
            f"prediction: {setting_line(findings)}",
            f"cost model: {setting.cost_origin()}",
            f"padded to the context {padded:.1%} of all tokens would be padding; ODB avoids "
            f"{findings.avoided():.1%}",
        ]
    )


def _speed_lines(findings: Findings) -> list[str]:
    lines = speed_notes(findings)
    for name in findings.runs:
        if name not in RIVALS:
            found = ", ".join(f"{rival} {findings.speedup(name, rival):.2f}" for rival in RIVALS)
            lines.append(f"{name} over: {found}")
    return lines


def speed_notes(findings: Findings) -> list[str]:
    """Return what the predicted speeds should not be read without."""
    budget = findings.setting.token_budget
    planned = findings.runs[findings.planned].setting.token_budget
    notes = [
        f"speed is relative to standard-safe at the token budget {budget}, predicted from cost, "
        "kernels not measured"
    ]
    if planned > budget:
        notes.append(
            f"{findings.planned} has the token budget {planned}: over standard-safe at {planned} "
            f"too it is {findings.fair_speedup():.2f}"
        )
    elif planned < budget:
        notes.append(f"{findings.planned} has the smaller token budget {planned}")
    others = findings.other_step_sizes()
    if others:
        shown = ", ".join(f"{name} {num:.1f}" for name, num in others.items())
        asked = findings.runs[ODB].method.samples_per_step
        notes.append(
            f"samples per step differ from the {asked:.1f} that ODB has: {shown}; larger steps "
            "are easier to balance"
        )
    return notes


def _logits_text(findings: Findings) -> str:
    logits = findings.logits
    if logits is None:
        return "logits memory: unknown without a tokenizer, or vocab in --model-shape"
    note = str(logits.as_json()["note"])
    return (
        f"logits memory: {logits.token_budget} tokens x {logits.vocab} entries / TP {logits.tp}"
        f"{f' / CP {logits.cp}' if logits.cp > 1 else ''}: {logits.logits_gib:.2f} GiB, peak "
        f"{logits.peak_gib:.2f} GiB{advised_logits(findings)}. {note}"
    )


def advised_logits(findings: Findings) -> str:
    """Return the peak at the advised budget, where it is another than the one asked for."""
    advised = findings.advice.advised.logits if findings.advice is not None else None
    if advised is None or advised.token_budget == findings.setting.token_budget:
        return ""
    return f"; at the advised budget {advised.token_budget}, peak {advised.peak_gib:.2f} GiB"


def _advice_text(advice: Advice) -> str:
    lines = [f"advice (planned on {advice.num_samples} samples):"]
    lines.append(f"  {advice.flags}  {advice.reason}")
    lines += [f"  warning: {warning}" for warning in advice.warnings]
    return "\n".join(lines)
