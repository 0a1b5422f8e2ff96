"""What a run tells while it runs: a line per step, the `odb/...` series, a summary at the end.

Knows neither Megatron nor replicas: it shows what it is given, on one rank.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import IO, Any

from tqdm import tqdm

from odb_megatron.report.steps import StepRecord

__all__ = ["LiveReport", "SourceTotals", "series_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotals:
    """What was consumed of one data source."""

    name: str
    samples: int
    tokens: int
    loss_tokens: int
    truncated: int
    bad_records: int
    overlong: int
    unlabelled: int = 0
    solo: int = 0
    first_message: str = ""


_NUMBERS = [one.name for one in fields(StepRecord) if str(one.type).startswith(("int", "float"))]


class _Number:
    """Sum, count, least and most of a number of the records, where it is known."""

    def __init__(self) -> None:
        self.sum, self.count, self.least, self.most = 0.0, 0, math.inf, -math.inf

    def add(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.least, self.most = min(value, self.least), max(value, self.most)

    @property
    def mean(self) -> float:
        return self.sum / self.count


_ROWS = {
    "samples per step": "mean {step_samples.mean:.1f}, {step_samples.least} to {step_samples.most} "
    "(--global-batch-size {batch_size})",
    "tokens": "padded to [1, {context}]: {padded:.0f}; computed: {computed_tokens.sum:.0f}; real: "
    "{tokens.sum:.0f} (padding avoided {avoided:.1%})",
    "loss tokens": "{loss_tokens.sum:.0f}",
    "micro-batches": "{num_micro_batches.sum:.0f} per replica, M from {num_micro_batches.least} to "
    "{num_micro_batches.most}; {idle.sum:.0f} idle",
    "mean per step": "fill {fill.mean:.3f}, balance {balance.mean:.3f}",
    "samples moved": "{moved.sum:.0f} of {samples.sum:.0f} ({moved_share:.1%}), "
    "{bytes_moved.mean:,.0f} bytes per step",
    "delivery": "{collectives.mean:.2f} broadcasts (at most {collectives.most}) and "
    "{reports.mean:.1f} reports per step inside a replica, {bytes_delivered.mean:,.0f} bytes "
    "per step to each rank",
    "context parallel": "attention balance {context_balance.mean:.3f}, lowest "
    "{context_balance.least:.3f}",
    "router losses": "tokens of idle micro-batches {idle_router_share.mean:.2%}, at most "
    "{idle_router_share.most:.2%}",
    "time": "{step_s.sum:.1f} s in steps, {wait_s.sum:.1f} s of it waiting for data; {rate:.2f} "
    "samples/s",
    "data path": "planner waited {fetch_wait_s.sum:.1f} s for samples; finished steps up to "
    "{queue_bytes.most:,} bytes",
    "loss": "{losses[0]:.4f} -> {losses[1]:.4f}",
}
"""The summary; a row of which a number is not known is left out."""


class LiveReport:
    """Prints a run's progress and summary.

    Args:
        total_samples: samples of the whole run; None while nobody knows.
        consumed_before: samples consumed before this process started (resume).
        global_batch_size: `--global-batch-size`.
        sequence_length: `--seq-length`; what Megatron's padded batch computes per sample.
        title: first words of the summary.
        stream: where to print; a terminal gets a progress bar.
    """

    def __init__(
        self,
        *,
        total_samples: int | None,
        consumed_before: int = 0,
        global_batch_size: int,
        sequence_length: int,
        title: str,
        stream: IO[str] | None = None,
    ) -> None:
        self._numbers: defaultdict[str, _Number] = defaultdict(_Number)
        self._total_samples = total_samples
        self._consumed = consumed_before
        self._global_batch_size = global_batch_size
        self._sequence_length = sequence_length
        self._title = title
        self._stream = stream or sys.stdout
        self._losses: list[float] = []  # the first and the last
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_samples, initial=consumed_before, unit="sample", file=self._stream
            )

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        for name in _NUMBERS:
            if (value := getattr(record, name)) is not None:
                self._numbers[name].add(value)
        self._numbers["step_samples"].add(record.samples + record.left_out)
        self._consumed = record.consumed_samples
        if record.loss is not None:
            self._losses = [(self._losses or [record.loss])[0], record.loss]
        line = self._line(record)
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update(record.consumed_samples - self._bar.n)

    def finish(
        self,
        sources: Sequence[SourceTotals],
        *,
        scope: str = "",
        chosen: Mapping[str, str] | None = None,
    ) -> None:
        """Print the summary.

        Args:
            sources: per data source; left out of the text when empty.
            scope: says what the per-source figures cover, when not the whole run.
            chosen: by name, what the run chose for itself, such as the cost model in force.
        """
        if self._bar is not None:
            self._bar.close()
        headline, rows = self._summary() if self._numbers else ("no optimizer step was run", {})
        rows |= chosen or {}
        missing = (self._total_samples or 0) - self._consumed
        if missing > 0:
            rows["not reached"] = f"{missing} requested samples"
        lines = [f"{self._title}: {headline}"]
        lines += [f"  {name:<20}{text}" for name, text in rows.items()]
        print("\n".join(lines + _source_lines(sources, scope)), file=self._stream, flush=True)

    def _line(self, record: StepRecord) -> str:
        samples = record.samples + record.left_out
        total = "?" if self._total_samples is None else self._total_samples
        moved = f"moved {record.moved} ({record.bytes_moved / 1e6:.2f} MB)" if record.moved else ""
        parts = [
            f"odb step {record.iteration}",
            "" if record.loss is None else f"loss {record.loss:.4f}",
            f"samples {record.samples}{_left_out(' + ', record.left_out)} "
            f"({record.consumed_samples}/{total})",
            f"tokens {record.tokens}",
            f"M {record.num_micro_batches}",
            "" if record.fill is None else f"fill {record.fill:.2f}",
            "" if record.balance is None else f"balance {record.balance:.3f}",
            moved,
            f"padding avoided {self._avoided(samples, record.computed_tokens):.0%}",
            f"wait {record.wait_s * 1e3:.0f} ms",
        ]
        return " | ".join(filter(None, parts))

    def _avoided(self, samples: float, computed_tokens: float) -> float:
        padded = samples * self._sequence_length
        return 1 - computed_tokens / padded if padded else 0.0

    def _summary(self) -> tuple[str, dict[str, str]]:
        """Return the headline, and texts by name."""
        of, total = self._numbers, self._total_samples
        samples, consumed = of["samples"].sum, of["step_samples"].sum
        reached = "with those before" if total is None else f"of {total} requested"
        headline = f"{of['samples'].count} optimizer steps, {samples:.0f} samples"
        headline += f"{_left_out(' and ', of['left_out'].sum)} ({self._consumed} {reached})"
        known: dict[str, Any] = {name: own for name, own in of.items() if own.count}
        known |= {
            "batch_size": self._global_batch_size,
            "context": self._sequence_length,
            "padded": consumed * self._sequence_length,
            "avoided": self._avoided(consumed, of["computed_tokens"].sum),
            "moved_share": of["moved"].sum / max(samples, 1),
            "rate": samples / max(of["step_s"].sum, 1e-9),
        }
        if self._losses:
            known["losses"] = self._losses
        for name in ("moved", "collectives"):
            if not of[name].sum:
                del known[name]
        if "fill" not in known:  # the padded baseline plans nothing
            del known["fetch_wait_s"]
        rows = {}
        for name, text in _ROWS.items():
            with contextlib.suppress(KeyError):
                rows[name] = text.format_map(known)
        return headline, rows


def _left_out(joint: str, count: float) -> str:
    return f"{joint}{count:.0f} left out" if count else ""


def _source_lines(sources: Sequence[SourceTotals], scope: str) -> list[str]:
    lines = [f"  sources{scope}:"] if sources else []
    for source in sources:
        lines.append(
            f"    {source.name}: {source.samples} samples, {source.tokens} tokens, "
            f"{source.loss_tokens} loss tokens; left out: {source.bad_records} bad records, "
            f"{source.overlong} overlong; truncated: {source.truncated}"
            + (f" ({source.unlabelled} kept no loss token)" if source.unlabelled else "")
            + (f"; over the budget or patch cap, alone: {source.solo}" if source.solo else "")
        )
        if source.first_message:
            lines.append(f"      first left out: {source.first_message}")
    return lines


# --- series ----------------------------------------------------------------------------------

# By name behind `odb/`, the field of a record. docs/reports.md says what each is.
_SERIES = {
    **{"micro-batches": "num_micro_batches", "samples": "samples", "tokens": "tokens"},
    **{"loss-tokens": "loss_tokens", "fill": "fill", "balance": "balance", "left-out": "left_out"},
    **{"bad-records": "bad_records", "truncated": "truncated", "step-seconds": "step_s"},
    **{"peak-memory-bytes": "peak_memory_bytes", "shapes": "num_shapes"},
}
_PACKED_SERIES = {
    **{"idle": "idle", "moved-samples": "moved", "moved-bytes": "bytes_moved"},
    **{"wait-seconds": "wait_s", "plan-seconds": "plan_s", "fetch-wait-seconds": "fetch_wait_s"},
    **{"queue-steps": "queue_steps", "queue-bytes": "queue_bytes"},
}


def series_of(record: StepRecord) -> dict[str, float]:
    """Return what TensorBoard and W&B get of a step; what a rank does not know is left out."""
    names = _SERIES | (_PACKED_SERIES if record.fill is not None else {})
    values = {name: getattr(record, field) for name, field in names.items()}
    if record.step_s > 0:
        values["tokens-per-second"] = record.tokens / record.step_s
    if record.computed_tokens:
        values["padding"] = 1 - record.tokens / record.computed_tokens
    values["reserved-memory-bytes"] = record.reserved_memory_bytes or None
    return {name: float(value) for name, value in values.items() if value is not None}
