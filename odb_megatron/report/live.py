"""What a run tells while it runs: a line per step, the `odb/...` series, a summary at the end.

Knows neither Megatron nor replicas: it shows what it is given, on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import IO

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


class _Totals:
    """Sum, count, least and most of every number of the records; a number may be unknown."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: dict[str, float] = dict.fromkeys(_NUMBERS, 0)
        self._counts = dict.fromkeys(_NUMBERS, 0)
        self.least: dict[str, float] = {}
        self.most: dict[str, float] = {}

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        for name in _NUMBERS:
            value = getattr(record, name)
            if value is not None:
                self._sums[name] += value
                self._counts[name] += 1
                self.least[name] = min(value, self.least.get(name, value))
                self.most[name] = max(value, self.most.get(name, value))

    def __getitem__(self, name: str) -> float:
        """Return the sum."""
        return self._sums[name]

    def mean(self, name: str) -> float | None:
        count = self._counts[name]
        return self._sums[name] / count if count else None


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
        self._totals = _Totals()
        self._total_samples = total_samples
        self._consumed = consumed_before
        self._global_batch_size = global_batch_size
        self._sequence_length = sequence_length
        self._title = title
        self._stream = stream or sys.stdout
        self._losses: list[float] = []  # the first and the last
        self._step_samples: set[int] = set()
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_samples, initial=consumed_before, unit="sample", file=self._stream
            )

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        self._totals.add(record)
        self._step_samples.add(record.samples + record.left_out)
        self._consumed = record.consumed_samples
        if record.loss is not None:
            self._losses = [*self._losses[:1], record.loss]
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
        rows = self._summary() if self._totals.steps else {"": "no optimizer step was run"}
        rows |= chosen or {}
        missing = (self._total_samples or 0) - self._consumed
        if missing > 0:
            rows["not reached"] = f"{missing} requested samples"
        lines = [f"{self._title}: {rows.pop('')}"]
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

    def _summary(self) -> dict[str, str]:
        """Return texts by name; the headline has none."""
        of, least, most = self._totals, self._totals.least, self._totals.most
        steps, samples, moved = of.steps, int(of["samples"]), int(of["moved"])
        consumed = samples + int(of["left_out"])
        computed, fill = int(of["computed_tokens"]), of.mean("fill")
        total = self._total_samples
        reached = "with those before" if total is None else f"of {total} requested"
        rows = {
            "": f"{steps} optimizer steps, {samples} samples"
            f"{_left_out(' and ', int(of['left_out']))} ({self._consumed} {reached})",
            "samples per step": f"mean {consumed / steps:.1f}, {min(self._step_samples)} to "
            f"{max(self._step_samples)} (--global-batch-size {self._global_batch_size})",
            "tokens": f"padded to [1, {self._sequence_length}]: "
            f"{consumed * self._sequence_length}; computed: {computed}; real: {of['tokens']:.0f} "
            f"(padding avoided {self._avoided(consumed, computed):.1%})",
            "loss tokens": f"{of['loss_tokens']:.0f}",
            "micro-batches": f"{of['num_micro_batches']:.0f} per replica, M from "
            f"{least['num_micro_batches']} to {most['num_micro_batches']}; {of['idle']:.0f} idle",
        }
        if fill:
            rows["mean per step"] = f"fill {fill:.3f}, balance {of.mean('balance') or 0:.3f}"
        if moved:
            rows["samples moved"] = (
                f"{moved} of {samples} ({moved / samples:.1%}), "
                f"{of['bytes_moved'] / steps / 1e6:.3f} MB per step"
            )
        if of["collectives"]:
            reports = f" and {of['reports'] / steps:.1f} reports" if of["reports"] else ""
            rows["delivery"] = (
                f"{of['collectives'] / steps:.2f} broadcasts (at most {most['collectives']})"
                f"{reports} per step inside a replica, "
                f"{of['bytes_delivered'] / steps / 1e3:.1f} kB per step to each rank"
            )
        if (balance := of.mean("context_balance")) is not None:
            lowest = least["context_balance"]
            rows["context parallel"] = f"attention balance {balance:.3f}, lowest {lowest:.3f}"
        if (share := of.mean("idle_router_share")) is not None:
            largest = most["idle_router_share"]
            rows["router losses"] = (
                f"tokens of idle micro-batches {share:.2%}, at most {largest:.2%}"
            )
        rows["time"] = (
            f"{of['step_s']:.1f} s in steps, {of['wait_s']:.1f} s of it waiting for data; "
            f"{samples / max(of['step_s'], 1e-9):.2f} samples/s"
        )
        if fill:
            rows["data path"] = (
                f"planner waited {of['fetch_wait_s']:.1f} s for samples; finished steps up to "
                f"{most['queue_bytes'] / 1e6:.1f} MB"
            )
        if self._losses:
            rows["loss"] = f"{self._losses[0]:.4f} -> {self._losses[-1]:.4f}"
        return rows


def _left_out(joint: str, count: int) -> str:
    return f"{joint}{count} left out" if count else ""


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
