"""Builds the record of each optimizer step, packed or padded.

Must not print or write; `report` does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from odb_megatron.data.context_parallel import cost_balance
from odb_megatron.data.feed import Delivered, StepHeader
from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.sample import SkipReason
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatchLayout
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.device_memory import MemoryUse
from odb_megatron.megatron.topology import padding_multiple
from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.record import StepTotals
from odb_megatron.report.steps import StepRecord

__all__ = ["Clock", "CudaClock", "Gathers", "StepRecorder", "WallClock", "gather_counts"]
__all__ += ["logged_loss"]


class Gathers(Protocol):
    """What `comm.blocks.SourceGroup` does."""

    @property
    def replica(self) -> int:
        """This replica."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    def gather_all(self, record: bytes) -> list[bytes]:
        """All-gather equal-sized records of all replicas, in replica order."""


def gather_counts(group: Gathers, counts: Sequence[int]) -> list[list[int]]:
    """Return equally many whole numbers of each replica."""
    found = group.gather_all(np.array(counts, dtype="<i8").tobytes())
    return [np.frombuffer(one, dtype="<i8").tolist() for one in found]


class Clock(Protocol):
    """Marks moments and tells how far apart they are."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""


class WallClock:
    """The wall clock of this process, where there is no device."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events of the current stream: nothing waits for the device meanwhile."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Waits for the event, which is past once its optimizer step has ended."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def logged_loss(losses: Mapping[str, Any]) -> Any:
    """Return the loss of what Megatron logs; None on ranks that do not have it.

    Where a student is trained by its teacher alone, that is the distillation's.
    """
    return losses.get("lm loss", losses.get("total loss"))


class StepRecorder:
    """Collects one step between the start of its schedule and Megatron's log call.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        stream: names the samples; None on ranks that are no source ranks.
        group: sums the padded baseline's counts over replicas, and what a packed step with shape
            buckets has computed; the plan knows all else. For the main thread. None on ranks that
            are no source ranks: such a step's computed tokens are 0 there.
        clock: times micro-batches; None where they overlap, or nobody asks.

    Attributes:
        num_tokens: real tokens trained so far, over all replicas.
        source_counts: what this replica has consumed of each source, padded baseline only.
        shapes: rows and padded tokens of the micro-batches that this replica has trained.
        most_patches: most image patches of one of them.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: OdbConfig,
        stream: SampleStream | ItemStream | None,
        *,
        group: Gathers | None,
        clock: Clock | None = None,
    ) -> None:
        self.num_tokens = self.most_patches = 0
        self.shapes: set[tuple[int, int]] = set()
        self._args = args
        self._config = config
        self._stream = stream
        self._group = group
        self.source_counts = [SourceCounts() for _ in (stream.source_names if stream else ())]
        self._clock = clock
        self._multiple = padding_multiple(args)
        self._header: StepHeader | None = None
        self._started: float | None = None
        self._clear()

    @property
    def has_clock(self) -> bool:
        """Whether micro-batches are timed."""
        return self._clock is not None

    def start_clock(self) -> None:
        """The trainer is about to fetch the step."""
        if self._started is None:
            self._started = time.perf_counter()

    def begin_step(self, header: StepHeader) -> None:
        """The schedule of a packed step starts (again, if Megatron replays it)."""
        self._header = header
        self._clear()

    def on_batch(self, item: Any) -> None:
        """A micro-batch was taken for training."""
        if self._clock is not None:
            self._marks.append(self._clock.mark())
        patches = 0
        if isinstance(item, MicroBatchLayout):
            positions = item.positions
            lengths = tuple(item.cu_seqlens.diff().tolist()[: len(positions)])
            width = int(item.cu_seqlens_padded[-1])
            self._widths.append(width)
            self.shapes.add((1, width))
            patches = item.num_patches
        else:
            rows = zip(item["position"].tolist(), item["length"].tolist(), strict=True)
            present = [row for row in rows if row[1]]
            positions = tuple(position for position, _ in present)
            lengths = tuple(length for _, length in present)
            self._count_sources(item)
            self._left_out += len(item["length"]) - len(present)
            width = padded_length(max(1, int(item["length"].max())), self._multiple)
            self._widths.append(len(item["length"]) * width)
            self.shapes.add((len(item["length"]), width))
            self._loss_tokens += int((item["loss_mask"] > 0).sum())
            self._loss_weight += float(item["loss_mask"].sum())
            self._truncated += int(item["truncated"].sum())
            self._bad += int((item["skipped"] == SkipReason.BAD_RECORD).sum())
        if self._config.log_dir is not None and self._stream is not None:
            self._ids.append(tuple(_name(self._stream, position) for position in positions))
        self._lengths.append(lengths)
        self._patches.append(patches)
        self.most_patches = max(self.most_patches, patches)

    def end_backward(self) -> None:
        """The step's last backward pass was launched."""
        if self._clock is not None and len(self._marks) == len(self._lengths):
            self._marks.append(self._clock.mark())

    def end_step(
        self,
        values: dict[str, Any],
        *,
        memory: MemoryUse,
        delivered: Delivered | None = None,
        reports: int = 0,
        cost: CostModel | None = None,
    ) -> StepRecord:
        """Megatron has logged the iteration.

        Args:
            values: `training_log`'s arguments.
            memory: of the replica's first and last pipeline stage, the larger one.
            delivered: how a packed step came to the trainer.
            reports: see `ReplicaData.num_reported`.
            cost: model of the step; None for the padded baseline and where it is not known.
        """
        delivered = delivered or Delivered()
        elapsed = time.perf_counter() - (self._started or time.perf_counter())
        loss, grad_norm = logged_loss(values["loss_dict"]), values["grad_norm"]
        record = StepRecord(
            iteration=int(values["iteration"]),
            loss=None if loss is None else float(loss),
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=values["learning_rate"],
            consumed_samples=int(self._args.consumed_train_samples),
            num_micro_batches=len(self._lengths),
            step_s=elapsed,
            ids=tuple(self._ids),
            lengths=tuple(self._lengths),
            widths=tuple(self._widths),
            patches=tuple(self._patches) if any(self._patches) else (),
            costs=() if cost is None else self._costs(cost),
            micro_batch_s=self._times(),
            **asdict(delivered),
            reports=reports,
            peak_memory_bytes=memory.peak,
            reserved_memory_bytes=memory.reserved,
            num_shapes=len(self.shapes),
            **(
                self._padded_totals() if self._header is None else self._packed_totals(self._header)
            ),
        )
        self.num_tokens += record.tokens
        self._started = None
        self._clear()
        return record

    def _count_sources(self, item: Any) -> None:
        """Count a padded micro-batch; a packed one is counted by its loader."""
        assert self._stream is not None, "the padded baseline is recorded on source ranks alone"
        for row, position in enumerate(item["position"].tolist()):
            counts = self.source_counts[self._stream.locate(position).source]
            if item["skipped"][row]:
                counts.add_skipped(SkipReason(int(item["skipped"][row])), item["message"][row])
            else:
                counts.add_sample(
                    num_tokens=int(item["length"][row]),
                    num_loss_tokens=int((item["loss_mask"][row] > 0).sum()),
                    truncated=bool(item["truncated"][row]),
                    solo=False,
                )

    def _clear(self) -> None:
        self._ids: list[tuple[str, ...]] = []
        self._lengths: list[tuple[int, ...]] = []
        self._widths: list[int] = []
        self._patches: list[int] = []
        self._marks: list[Any] = []
        self._loss_tokens = self._left_out = self._truncated = self._bad = 0
        self._loss_weight = 0.0

    def _costs(self, cost: CostModel) -> tuple[float, ...]:
        rule = self._config.size_rule(self._multiple)
        return tuple(
            round(
                sum((cost.sample(rule.padded(length)) for length in lengths), cost.fixed)
                / COST_UNIT
                + patches * (cost.per_patch / COST_UNIT),
                3,
            )
            for lengths, patches in zip(self._lengths, self._patches, strict=True)
        )

    def _times(self) -> tuple[float, ...]:
        """Return the seconds of each micro-batch; nothing where not all are known."""
        if self._clock is None or len(self._marks) != len(self._lengths) + 1:
            return ()
        return tuple(self._clock.elapsed_s(start, end) for start, end in pairwise(self._marks))

    def _packed_totals(self, header: StepHeader) -> dict[str, Any]:
        totals = header.totals
        room = totals.num_micro_batches * totals.num_replicas * self._config.token_budget
        return {
            "samples": totals.num_samples,
            "left_out": totals.num_left_out,
            "tokens": totals.num_tokens,
            "computed_tokens": self._computed_tokens(totals),
            "loss_tokens": totals.num_loss_tokens,
            "loss_weight": totals.loss_weight / self._config.count_scale,
            "truncated": totals.num_truncated,
            "bad_records": totals.num_bad,
            "idle": totals.num_idle,
            "fill": totals.num_tokens / room,
            "balance": totals.balance,
            "moved": totals.num_moved,
            "bytes_moved": totals.bytes_moved,
            "fetch_wait_s": totals.wait_us / 1e6,
            "context_balance": self._context_balance(),
            "idle_router_share": self._idle_router_share(totals),
        }

    def _computed_tokens(self, totals: StepTotals) -> int:
        if length := self._config.micro_batch_length(self._multiple):
            return totals.num_micro_batches * totals.num_replicas * length
        if self._config.pad_to:
            if self._group is None:
                return 0
            return sum(own for (own,) in gather_counts(self._group, [sum(self._widths)]))
        return totals.num_padded_tokens + totals.num_idle * self._multiple

    def _context_balance(self) -> float | None:
        size = self._args.context_parallel_size
        lengths = np.array([length for batch in self._lengths for length in batch], dtype=np.int64)
        if size == 1:
            return None
        multiple = padding_multiple(self._args)
        return cost_balance(lengths, -(-lengths // multiple) * multiple, size=size)

    def _idle_router_share(self, totals: StepTotals) -> float | None:
        """One token of each idle micro-batch counts; see `data.context_parallel.padding_mask`."""
        if getattr(self._args, "num_experts", None) is None:
            return None
        return totals.num_idle / max(1, totals.num_idle + totals.num_tokens)

    def _padded_totals(self) -> dict[str, Any]:
        own = [
            sum(map(len, self._lengths)),
            self._left_out,
            sum(map(sum, self._lengths)),
            sum(self._widths),
            self._loss_tokens,
            self._truncated,
            self._bad,
            round(self._loss_weight),
        ]
        assert self._group is not None, "the padded baseline is recorded on source ranks alone"
        sums = [sum(values) for values in zip(*gather_counts(self._group, own), strict=True)]
        names: tuple[str, ...] = ("samples", "left_out", "tokens", "computed_tokens")
        names += ("loss_tokens", "truncated", "bad_records")
        *sums, weight = sums
        weights = {"loss_weight": weight / self._config.count_scale}
        absent = {"idle": 0, "fill": None, "balance": None, "moved": 0, "bytes_moved": 0}
        return dict(zip(names, sums, strict=True)) | weights | absent


def _name(stream: SampleStream | ItemStream, position: int) -> str:
    where = stream.locate(position)
    return f"{where.source}:{where.record}@{where.epoch}"
