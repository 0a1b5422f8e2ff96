"""An inspection's findings as one JSON object and as text.

Pure: figures in, figures and words out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.advice import Advice, Trial
from odb_megatron.inspection.logits import LogitsMemory
from odb_megatron.inspection.prediction import ADVISED, METHODS, RIVALS, Run
from odb_megatron.inspection.reading import Reading
from odb_megatron.inspection.setting import Kept, TrainingSetting
from odb_megatron.simulation.setting import Stream

__all__ = ["Findings", "aligned", "as_json", "as_text", "cut_offs"]

Integers = npt.NDArray[np.int64]
Rows = Sequence[Sequence[str]]

_MOST_CUT_OFFS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was found.

    Attributes:
        reading: lengths as they are.
        setting: of the training.
        kept: lengths after the overlong policy.
        stream: the samples that were simulated.
        runs: by method.
        logits: None where the vocabulary is not known.
        advice: None where none was asked for.
        epoch_samples: kept samples of an epoch, those that were not read included.
    """

    reading: Reading
    setting: TrainingSetting
    kept: Kept
    stream: Stream
    runs: Mapping[str, Run]
    logits: LogitsMemory | None
    advice: Advice | None
    epoch_samples: int

    def steps_per_epoch(self, name: str) -> int:
        """Return the optimizer steps of an epoch."""
        run = self.runs[name]
        if self.epoch_samples == len(run.stream):
            return run.method.num_steps
        return math.ceil(self.epoch_samples / run.method.samples_per_step)

    @property
    def planned(self) -> str:
        """The method that matters most: as advised, or the policy `samples`."""
        return ADVISED if ADVISED in self.runs else "samples"

    def avoided(self) -> float:
        """Return the share of the tokens of a batch padded to the context that are not computed."""
        context = self.setting.seq_length * len(self.kept.lengths)
        return 1 - int(self.kept.lengths.sum()) / context


def cut_offs(lengths: Integers, *, limit: int) -> list[dict[str, float | int]]:
    """Return what cutting samples at some lengths costs: powers of two around the data, the limit.

    Args:
        lengths: tokens of each sample, int64.
        limit: in force.
    """
    longest, total = int(lengths.max()), int(lengths.sum())
    powers = [1 << bits for bits in range(5, 40) if 1 << bits < longest]
    found = []
    for at in sorted({*powers[-(_MOST_CUT_OFFS - 1) :], limit}):
        over = lengths[lengths > at]
        found.append(
            {
                "at": at,
                "samples": len(over) / len(lengths),
                "tokens": (int(over.sum()) - at * len(over)) / total,
            }
        )
    return found


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the report; its keys are listed in docs/inspect.md."""
    reading, setting, kept = findings.reading, findings.setting, findings.kept
    lengths = reading.lengths
    tokens = int(kept.lengths.sum())
    return {
        "data": {
            "name": reading.name,
            "num_records": reading.num_records,
            "num_read": reading.num_read,
            "num_bad": reading.num_bad,
            "bad": list(reading.bad),
            "read_s": reading.read_s,
            "num_workers": reading.num_workers,
        },
        "lengths": {
            "count": len(lengths),
            "num_tokens": int(lengths.sum()),
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p95": float(np.quantile(lengths, 0.95)),
            "max": int(lengths.max()),
            "cv": float(lengths.std() / lengths.mean()),
            "cut_offs": cut_offs(lengths, limit=setting.limit),
        },
        "overlong": {
            "policy": setting.overlong.value,
            "limit": setting.limit,
            "num_truncated": kept.num_truncated,
            "num_cut_tokens": kept.num_cut_tokens,
            "num_dropped": kept.num_dropped,
            "num_solo": kept.num_solo,
        },
        "setting": {
            **{
                name: getattr(setting, name)
                for name in (
                    *("seq_length", "token_budget", "dp", "global_batch_size", "tp", "cp", "pp"),
                    *("vpp", "sequence_parallel", "max_delay_steps", "seed"),
                )
            },
            "window": setting.window_in_force,
            "exchange": setting.exchange.value,
            "model_shape": None if setting.shape is None else asdict(setting.shape),
            "cost": setting.cost_origin(),
        },
        "padding": {
            "num_tokens": kept.num_tokens,
            "context_padded": 1 - kept.num_tokens / (setting.seq_length * len(kept.lengths)),
            "avoided": findings.avoided(),
            "rounding": 1 - kept.num_tokens / tokens,
        },
        "prediction": {
            "num_samples": len(findings.stream),
            "epoch_samples": findings.epoch_samples,
            "methods": {name: _method(findings, name) for name in findings.runs},
            "speedup": {
                name: {rival: _speedup(findings, name, rival) for rival in RIVALS}
                for name in findings.runs
                if name not in RIVALS
            },
        },
        "logits": None if findings.logits is None else findings.logits.as_json(),
        "advice": None if findings.advice is None else _advice(findings.advice),
    }


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


def prediction_rows(findings: Findings) -> list[list[str]]:
    """Return the head and a row per method."""
    rows = [["method", "padding", "fill", "balance", "M", "M range", "steps/epoch", "speed"]]
    for name, run in findings.runs.items():
        method = run.method
        mean, least, most = method.micro_batches
        over = f" ({method.over_budget} over)" if method.over_budget else ""
        rows.append(
            [
                name,
                f"{method.padding:.1%}",
                f"{method.fill:.3f}{over}",
                f"{method.balance:.3f}",
                f"{mean:.2f}",
                f"{least}-{most}",
                str(findings.steps_per_epoch(name)),
                f"{_speedup(findings, name, 'standard-safe'):.2f}",
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
        f"bad records: {reading.num_bad} of {reading.num_read} ({share:.2%}). --odb-bad-record "
        "error, the default, stops at the first; skip leaves them out and counts them. The first:"
    ]
    return lines + [f"  {message}" for message in reading.bad]


def read_line(findings: Findings) -> str:
    """Return what was read, and how much of it was simulated."""
    reading = findings.reading
    part = "all" if reading.num_read == reading.num_records else "a random sample"
    text = f"{reading.name}: {reading.num_read} of {reading.num_records} records read ({part})"
    if reading.read_s is not None:
        how = f"{reading.num_workers} processes" if reading.num_workers else "one process"
        text += f" in {reading.read_s:.1f} s by {how}"
    if len(findings.stream) < len(findings.kept.lengths):
        text += f"; the first {len(findings.stream)} are planned"
    return text


def _method(findings: Findings, name: str) -> dict[str, Any]:
    method = findings.runs[name].method
    mean, least, most = method.micro_batches
    return {
        "description": METHODS[name],
        "padding_fraction": method.padding,
        "fill": method.fill,
        "balance": method.balance,
        "mean_M": mean,
        "min_M": least,
        "max_M": most,
        "samples_per_step": method.samples_per_step,
        "steps_per_epoch": findings.steps_per_epoch(name),
        "over_budget": method.over_budget,
        "rate": method.rate,
        "bytes_moved_per_step": method.bytes_moved_per_step,
        "exchange": method.exchange or None,
    }


def _speedup(findings: Findings, name: str, rival: str) -> float:
    return findings.runs[name].method.rate / findings.runs[rival].method.rate


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
        f"global batch size {setting.global_batch_size}, window {setting.window_in_force} (cost), "
        f"exchange {setting.exchange.value}"
    )


def _setting_text(findings: Findings) -> str:
    kept, setting = findings.kept, findings.setting
    padded = 1 - kept.num_tokens / (setting.seq_length * len(kept.lengths))
    return "\n".join(
        [
            f"prediction: {setting_line(findings)}",
            f"cost model: {setting.cost_origin()}",
            f"padded to the context {padded:.1%} of all tokens would be padding; ODB avoids "
            f"{findings.avoided():.1%}",
        ]
    )


def _speed_lines(findings: Findings) -> list[str]:
    lines = ["speed is relative to standard-safe, predicted from cost, kernels not measured"]
    for name in findings.runs:
        if name not in RIVALS:
            found = ", ".join(f"{rival} {_speedup(findings, name, rival):.2f}" for rival in RIVALS)
            lines.append(f"{name} over: {found}")
            choice = findings.runs[name].method.exchange
            lines += [f"{name}: {choice}"] if choice else []
    return lines


def _logits_text(findings: Findings) -> str:
    logits = findings.logits
    if logits is None:
        return "logits memory: unknown without a tokenizer, or vocab in --model-shape"
    note = str(logits.as_json()["note"])
    return (
        f"logits memory: {logits.token_budget} tokens x {logits.vocab} entries / TP {logits.tp}"
        f"{f' / CP {logits.cp}' if logits.cp > 1 else ''}: {logits.logits_gib:.2f} GiB, peak "
        f"{logits.peak_gib:.2f} GiB. {note}"
    )


def _advice_text(advice: Advice) -> str:
    lines = [f"advice (planned on {advice.num_samples} samples):"]
    width = max(len(f"{choice.flag} {choice.value}") for choice in advice.choices)
    for choice in advice.choices:
        lines.append(f"  {f'{choice.flag} {choice.value}'.ljust(width)}  {choice.reason}")
    lines += [f"  warning: {warning}" for warning in advice.warnings]
    return "\n".join(lines)


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "flags": advice.flags,
        "num_samples": advice.num_samples,
        "gain": advice.gain,
        "choices": [asdict(choice) for choice in advice.choices],
        "warnings": list(advice.warnings),
        "trials": {
            subject: [_trial(trial) for trial in trials]
            for subject, trials in advice.trials.items()
        },
    }


def _trial(trial: Trial) -> dict[str, Any]:
    method = trial.method
    return {
        "policy": trial.policy.value,
        "exchange": trial.exchange.value,
        "token_budget": trial.token_budget,
        "window": trial.window or None,
        "rate": method.rate,
        "balance": method.balance,
        "fill": method.fill,
        "mean_M": method.micro_batches[0],
        "bytes_moved_per_step": method.bytes_moved_per_step,
        "logits_peak_gib": None if trial.logits is None else trial.logits.peak_gib,
    }
