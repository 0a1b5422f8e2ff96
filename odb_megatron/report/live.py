"""Live output of a run: a progress bar on a terminal, plain lines otherwise, a summary at the end.

Must not know Megatron or replicas; it prints what it is given, on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from tqdm import tqdm

from odb_megatron.report.step_record import StepRecord

__all__ = ["LiveReport", "RunTotals", "SourceTotals"]


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


@dataclass(slots=True)
class RunTotals:
    """Sums over the steps of this process's run."""

    steps: int = 0
    samples: int = 0
    left_out: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    loss_tokens: int = 0
    idle: int = 0
    micro_batches: int = 0
    wait_s: float = 0.0
    fetch_wait_s: float = 0.0
    max_queue_bytes: int = 0
    step_s: float = 0.0
    balance: float = 0.0
    moved: int = 0
    bytes_moved: int = 0
    fill: float = 0.0
    collectives: int = 0
    max_collectives: int = 0
    bytes_delivered: int = 0
    reports: int = 0
    context_balances: list[float] = field(default_factory=list)
    idle_router_shares: list[float] = field(default_factory=list)
    counts_of_m: set[int] = field(default_factory=set)
    samples_per_step: list[int] = field(default_factory=list)
    first_loss: float | None = None
    last_loss: float | None = None

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += record.samples
        self.left_out += record.left_out
        self.tokens += record.tokens
        self.computed_tokens += record.computed_tokens
        self.loss_tokens += record.loss_tokens
        self.idle += record.idle
        self.micro_batches += record.num_micro_batches
        self.wait_s += record.wait_s
        self.fetch_wait_s += record.fetch_wait_s
        self.max_queue_bytes = max(self.max_queue_bytes, record.queue_bytes)
        self.step_s += record.step_s
        self.balance += record.balance or 0.0
        self.fill += record.fill or 0.0
        self.moved += record.moved
        self.bytes_moved += record.bytes_moved
        self.collectives += record.collectives
        self.max_collectives = max(self.max_collectives, record.collectives)
        self.bytes_delivered += record.bytes_delivered
        self.reports += record.reports
        if record.context_balance is not None:
            self.context_balances.append(record.context_balance)
        if record.idle_router_share is not None:
            self.idle_router_shares.append(record.idle_router_share)
        self.counts_of_m.add(record.num_micro_batches)
        self.samples_per_step.append(record.samples + record.left_out)
        if record.loss is not None:
            self.first_loss = record.loss if self.first_loss is None else self.first_loss
            self.last_loss = record.loss


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
        self.totals = RunTotals()
        self._total_samples = total_samples
        self._consumed = consumed_before
        self._global_batch_size = global_batch_size
        self._sequence_length = sequence_length
        self._title = title
        self._stream = stream or sys.stdout
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_samples, initial=consumed_before, unit="sample", file=self._stream
            )

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        self.totals.add(record)
        self._consumed = record.consumed_samples
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
        lines = self._summary()
        lines += [f"  {name:<20}{text}" for name, text in (chosen or {}).items()]
        lines += self._not_reached() + _source_lines(sources, scope)
        print("\n".join(lines), file=self._stream, flush=True)

    def _line(self, record: StepRecord) -> str:
        parts = [f"odb step {record.iteration}"]
        if record.loss is not None:
            parts.append(f"loss {record.loss:.4f}")
        samples = record.samples + record.left_out
        left_out = f" + {record.left_out} left out" if record.left_out else ""
        total = "?" if self._total_samples is None else self._total_samples
        reached = f"({record.consumed_samples}/{total})"
        parts.append(f"samples {record.samples}{left_out} {reached}")
        parts.append(f"tokens {record.tokens}")
        parts.append(f"M {record.num_micro_batches}")
        if record.fill is not None:
            parts.append(f"fill {record.fill:.2f}")
        if record.balance is not None:
            parts.append(f"balance {record.balance:.3f}")
        if record.moved:
            parts.append(f"moved {record.moved} ({record.bytes_moved / 1e6:.2f} MB)")
        parts.append(f"padding avoided {self._avoided(samples, record.computed_tokens):.0%}")
        parts.append(f"wait {record.wait_s * 1e3:.0f} ms")
        return " | ".join(parts)

    def _avoided(self, samples: int, computed_tokens: int) -> float:
        padded = samples * self._sequence_length
        return 1 - computed_tokens / padded if padded else 0.0

    def _summary(self) -> list[str]:
        totals = self.totals
        if totals.steps == 0:
            return [f"{self._title}: no optimizer step was run"]
        consumed = totals.samples + totals.left_out
        padded = consumed * self._sequence_length
        mean = consumed / totals.steps
        left_out = f" and {totals.left_out} left out" if totals.left_out else ""
        few, many = min(totals.samples_per_step), max(totals.samples_per_step)
        reached = (
            f"{self._consumed} with those before"
            if self._total_samples is None
            else f"{self._consumed} of {self._total_samples} requested"
        )
        lines = [
            f"{self._title}: {totals.steps} optimizer steps, {totals.samples} samples{left_out} "
            f"({reached})",
            f"  samples per step    mean {mean:.1f}, {few} to {many} "
            f"(--global-batch-size {self._global_batch_size})",
            f"  tokens              padded to [1, {self._sequence_length}]: {padded}; computed: "
            f"{totals.computed_tokens}; real: {totals.tokens} "
            f"(padding avoided {self._avoided(consumed, totals.computed_tokens):.1%})",
            f"  loss tokens         {totals.loss_tokens}",
            f"  micro-batches       {totals.micro_batches} per replica, M from "
            f"{min(totals.counts_of_m)} to {max(totals.counts_of_m)}; {totals.idle} idle",
        ]
        if totals.fill:
            lines.append(
                f"  mean per step       fill {totals.fill / totals.steps:.3f}, balance "
                f"{totals.balance / totals.steps:.3f}"
            )
        if totals.moved:
            lines.append(
                f"  samples moved       {totals.moved} of {totals.samples} "
                f"({totals.moved / totals.samples:.1%}), "
                f"{totals.bytes_moved / totals.steps / 1e6:.3f} MB per step"
            )
        lines += _parallelism_lines(totals)
        lines.append(
            f"  time                {totals.step_s:.1f} s in steps, {totals.wait_s:.1f} s of it "
            f"waiting for data; {totals.samples / max(totals.step_s, 1e-9):.2f} samples/s"
        )
        if totals.fill:
            lines.append(
                f"  data path           planner waited {totals.fetch_wait_s:.1f} s for samples; "
                f"finished steps up to {totals.max_queue_bytes / 1e6:.1f} MB"
            )
        if totals.first_loss is not None and totals.last_loss is not None:
            lines.append(f"  loss                {totals.first_loss:.4f} -> {totals.last_loss:.4f}")
        return lines

    def _not_reached(self) -> list[str]:
        missing = (self._total_samples or 0) - self._consumed
        return [f"  not reached         {missing} requested samples"] if missing > 0 else []


def _parallelism_lines(totals: RunTotals) -> list[str]:
    lines = []
    if totals.collectives:
        reports = f" and {totals.reports / totals.steps:.1f} reports" if totals.reports else ""
        lines.append(
            f"  delivery            {totals.collectives / totals.steps:.2f} broadcasts (at most "
            f"{totals.max_collectives}){reports} per step inside a replica, "
            f"{totals.bytes_delivered / totals.steps / 1e3:.1f} kB per step to each rank"
        )
    if totals.context_balances:
        found = totals.context_balances
        lines.append(
            f"  context parallel    attention balance {sum(found) / len(found):.3f}, lowest "
            f"{min(found):.3f}"
        )
    if totals.idle_router_shares:
        shares = totals.idle_router_shares
        lines.append(
            f"  router losses       tokens of idle micro-batches {sum(shares) / len(shares):.2%}, "
            f"at most {max(shares):.2%}"
        )
    return lines


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
