"""What a run tells: lines at its start, the record of each step, the log folder, and the summary.

Counts are added up over replicas where the run has ended cleanly.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.data.feed import StepFeed
from odb_megatron.data.iterable import ItemStream
from odb_megatron.data.loop import SourceCounts
from odb_megatron.data.sample import SkipReason
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatchLayout, cost_balance
from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron.checkpoint import gather_json
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.images import image_flags
from odb_megatron.megatron.setup import total_samples
from odb_megatron.megatron.topology import padding_multiple, sync_of
from odb_megatron.plan.cost import COST_UNIT, CostCoefficients, CostModel
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.record import OPEN_TOTAL
from odb_megatron.report.live import LiveReport, SourceTotals, series_of
from odb_megatron.report.steps import LogHeader, StepLog, StepRecord, write_run

__all__ = ["Clock", "CudaClock", "RunReport", "WallClock", "Writers"]
__all__ += ["logged_loss", "megatron_writers", "memory_use", "start_lines"]

_MESSAGE_LENGTH = 1024

Writers = tuple[Any, Any, int]
"""A rank's `SummaryWriter` and module `wandb`, None where it has none, and the iterations between
the host's own writes: they get the series `odb/...`.
"""


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


Clock = WallClock | CudaClock


def megatron_writers(args: argparse.Namespace) -> Writers:
    """Return Megatron's own, which its last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer(), get_wandb_writer(), args.tensorboard_log_interval


def logged_loss(losses: Mapping[str, Any]) -> Callable[[], float | None]:
    """Begin to copy the loss that Megatron logs to the host; return what waits for it.

    It gives None on ranks that have no loss. Where a student is trained by its teacher alone, the
    loss is the distillation's.
    """
    loss = losses.get("lm loss", losses.get("total loss"))
    if not isinstance(loss, torch.Tensor):
        return lambda: loss
    copy = torch.empty(1, dtype=torch.float32, pin_memory=loss.is_cuda)
    copy.copy_(loss.detach().reshape(1), non_blocking=True)
    copied = CudaClock().mark() if loss.is_cuda else None

    def value() -> float:
        if copied is not None:
            copied.synchronize()
        return float(copy.numpy()[0])

    return value


def memory_use() -> tuple[int, int]:
    """Return the most bytes that tensors have taken on the device, and that torch's allocator held.

    Without a device: the most that the process ever had resident, and 0.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        # Not by `getrusage`, which would show the peak of a parent before exec.
        kilobytes = [int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
    return sum(kilobytes) * 1024, 0


class RunReport:
    """The reports of one rank; prints on rank 0 only.

    A rank records steps where it is a source rank whose data is open, and in a packed run where it
    has writers, with what that rank knows.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        lines: to print at the start.
        writers: returns the host's, on the rank that has them; called with the first step.

    Attributes:
        records: whether this rank records steps.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: OdbConfig,
        *,
        lines: Sequence[str],
        writers: Callable[[], Writers],
    ) -> None:
        self.records = False
        self._args, self._config = args, config
        self._multiple = padding_multiple(args)
        self._stream: SampleStream | ItemStream | None = None
        self._group: SourceGroup | None = None
        self._cost: CostModel | None = None
        self._clock: Clock | None = None
        self._live: LiveReport | None = None
        self._log: StepLog | None = None
        self._find_writers = None if config.dry_run else writers
        self._writers: Writers = (None, None, 1)
        self._goes_on = False
        self._memory = (0, 0)
        self._shapes: set[tuple[int, int]] = set()  # rows and tokens of micro-batches
        self._most_patches = 0
        self._counts: list[SourceCounts] = []  # of the padded baseline; the loader counts its own
        self._evaluated = np.zeros(4, dtype=np.int64)  # see `evaluated`
        self._header: StepHeader | None = None
        self._started: float | None = None
        self._clear()
        if args.rank == 0:
            for line in lines:
                print(f"odb: {line}", flush=True)

    def open(self, stream: SampleStream | ItemStream, group: SourceGroup) -> None:
        """Training data is there: begin to record. On source ranks.

        Args:
            stream: names the samples.
            group: to the other replicas, for the main thread.
        """
        args, config = self._args, self._config
        self.records, self._stream, self._group = True, stream, group
        self._counts = [SourceCounts() for _ in stream.source_names]
        if config.enabled:
            self._cost = config.cost_model(args)
            if config.log_dir is not None and args.pipeline_model_parallel_size == 1:
                self._clock = CudaClock() if torch.cuda.is_available() else WallClock()
        if args.rank == 0:
            if self._cost is not None:
                print(f"odb: cost model {self._described(self._cost)}", flush=True)
            if isinstance(stream, SampleStream) and stream.repeats():
                print(f"odb: {stream.repeats()}", flush=True)
            title = "odb" if config.enabled else "padded baseline"
            total = total_samples(args)
            self._live = LiveReport(
                total_samples=None if total == OPEN_TOTAL else total,
                consumed_before=args.consumed_train_samples,
                global_batch_size=args.global_batch_size,
                sequence_length=args.seq_length,
                title="odb dry run" if config.dry_run else title,
            )
        if config.log_dir is not None:
            run, *_ = gather_json(group, secrets.randbits(62))
            self._log = StepLog(config.log_dir, header=self._log_header(run, group))

    def goes_on(self) -> None:
        """The run is a resumed one: counts of sources are of what follows."""
        self._goes_on = True

    # --- a step, from the start of its schedule to Megatron's log call --------------------------

    def start_clock(self) -> None:
        """The trainer is about to fetch a training step."""
        if self._started is None:
            self._started = time.perf_counter()

    def begin_step(self, header: StepHeader) -> None:
        """The schedule of a packed step starts (again, if Megatron replays it)."""
        self._header = header
        self._take_writers()
        self._clear()

    def on_batch(self, item: Any) -> None:
        """A micro-batch was taken for training."""
        if not self.records:
            return
        self.mark()
        patches = 0
        if isinstance(item, MicroBatchLayout):
            share, place = item.share
            lengths = tuple(np.diff(item.cu_seqlens.numpy())[: len(item.positions)].tolist())
            self._shares.append((share, lengths))
            # Named is a sample once, over all replicas.
            positions, lengths = ((), ()) if place else (item.positions, lengths)
            rows, width = 1, int(item.cu_seqlens_padded.numpy()[-1]) // share
            patches = item.num_patches
        else:
            kept = item["length"] > 0
            positions, lengths = (tuple(item[n][kept].tolist()) for n in ("position", "length"))
            rows = len(kept)
            width = padded_length(max(1, int(item["length"].max())), self._multiple)
            self._count_padded(item, left_out=rows - len(lengths))
        self._widths.append(rows * width)
        self._shapes.add((rows, width))
        if self._config.log_dir is not None and self._stream is not None:
            places = map(self._stream.locate, positions)
            self._ids.append(tuple(f"{at.source}:{at.record}@{at.epoch}" for at in places))
        self._lengths.append(lengths)
        self._patches.append(patches)
        self._most_patches = max(self._most_patches, patches)

    def mark(self) -> None:
        """A micro-batch begins, or the schedule has launched all its work."""
        if self._clock is not None:
            self._marks.append(self._clock.mark())

    def end_step(
        self, values: Mapping[str, Any], *, delivered: Mapping[str, Any] | None
    ) -> Callable[[float | None, tuple[int, int], int], StepRecord]:
        """Record a step that Megatron has logged.

        Args:
            values: `training_log`'s arguments.
            delivered: how a packed step came to the trainer.

        Returns:
            What completes the record, shows and returns it, given what comes later: the loss,
            `memory_use` of the replica's first and last pipeline stage (the larger one), and
            `ReplicaData.num_reported`.
        """
        grad_norm = values["grad_norm"]
        totals = self._padded_totals() if self._header is None else self._packed_totals()
        shares = tuple(k for k, _ in self._shares)
        build = partial(
            StepRecord,
            iteration=int(values["iteration"]),
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=values["learning_rate"],
            consumed_samples=int(self._args.consumed_train_samples),
            num_micro_batches=len(self._lengths),
            step_s=time.perf_counter() - (self._started or time.perf_counter()),
            ids=tuple(self._ids),
            lengths=tuple(self._lengths),
            widths=tuple(self._widths),
            patches=tuple(self._patches) if any(self._patches) else (),
            shares=shares if any(k > 1 for k in shares) else (),
            costs=self._costs(),
            **{"wait_s": 0.0, **(delivered or {})},
            num_shapes=len(self._shapes),
            **totals,
        )
        marks = self._marks if len(self._marks) == len(self._lengths) + 1 else []
        self._started = None
        self._clear()

        def show(loss: float | None, memory: tuple[int, int], reports: int) -> StepRecord:
            self._memory = memory
            record = build(
                loss=loss,
                micro_batch_s=self._times(marks),
                reports=reports,
                peak_memory_bytes=memory[0],
                reserved_memory_bytes=memory[1],
            )
            if self._log is not None:
                self._log.write(record)
            if self._live is not None:
                self._live.step(record)
            self._take_writers()
            self._write_series(record)
            return record

        return show

    def _clear(self) -> None:
        self._ids: list[tuple[str, ...]] = []
        self._lengths: list[tuple[int, ...]] = []
        self._widths: list[int] = []
        self._patches: list[int] = []
        self._shares: list[tuple[int, tuple[int, ...]]] = []  # replicas, and their samples' tokens
        self._marks: list[Any] = []
        # Of the padded baseline: left out, loss tokens, truncated, bad records, loss weight.
        self._padded = np.zeros(5)

    def _take_writers(self) -> None:
        if self._find_writers is not None:
            self._writers, self._find_writers = self._find_writers(), None
            has_any = any(one is not None for one in self._writers[:2])
            self.records = self.records or (has_any and self._config.enabled)

    def _write_series(self, record: StepRecord) -> None:
        tensorboard, wandb, interval = self._writers
        if record.iteration % max(1, interval):
            return
        values = {f"odb/{name}": value for name, value in series_of(record).items()}
        if tensorboard is not None:
            for name, value in values.items():
                tensorboard.add_scalar(name, value, record.iteration)
        if wandb is not None:
            wandb.log(values, record.iteration)

    def _count_padded(self, item: Any, *, left_out: int) -> None:
        """Count a padded micro-batch; a packed one is counted by its loader."""
        assert self._stream is not None, "the padded baseline is recorded on source ranks alone"
        is_bad = item["skipped"] == SkipReason.BAD_RECORD
        parts = (item["loss_mask"] > 0, item["truncated"], is_bad, item["loss_mask"])
        self._padded += [left_out, *(float(part.sum()) for part in parts)]
        for row, position in enumerate(item["position"].tolist()):
            counts = self._counts[self._stream.locate(position).source]
            if item["skipped"][row]:
                counts.add_skipped(SkipReason(int(item["skipped"][row])), item["message"][row])
            else:
                counts.add_sample(
                    num_tokens=int(item["length"][row]),
                    num_loss_tokens=int((item["loss_mask"][row] > 0).sum()),
                    truncated=bool(item["truncated"][row]),
                    solo=False,
                )

    def _costs(self) -> tuple[float, ...]:
        """Return the predicted cost of each micro-batch, where the cost model is known."""
        if (cost := self._cost) is None:
            return ()
        rule, sums = self._config.size_rule(self._multiple), []
        for (share, lengths), patches in zip(self._shares, self._patches, strict=True):
            padded = map(rule.shared(share).padded, lengths)
            price = sum(map(cost.sample, padded)) + patches * cost.per_patch
            sums.append(cost.fixed + cost.part(price, share))
        return tuple(round(one / COST_UNIT, 3) for one in sums)

    def _times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        """Return the seconds of each micro-batch, of which not all may be known."""
        if self._clock is None:
            return ()
        return tuple(self._clock.elapsed_s(start, end) for start, end in pairwise(marks))

    def _packed_totals(self) -> dict[str, Any]:
        assert self._header is not None
        totals = self._header.totals
        num_bins = totals.num_micro_batches * totals.num_replicas
        router_share = None
        if getattr(self._args, "num_experts", None) is not None:
            # One token of each idle micro-batch counts; see `data.thd.padding_mask`.
            router_share = totals.num_idle / max(1, totals.num_idle + totals.num_tokens)
        computed = totals.num_padded_tokens + totals.num_idle * self._multiple
        if length := self._config.micro_batch_length(self._multiple):
            computed = num_bins * length
        elif self._config.pad_to:  # which of the sizes, each replica knows for itself
            computed = self._sum([sum(self._widths)])[0] if self._group is not None else 0
        return {
            "samples": totals.num_samples,
            "left_out": totals.num_left_out,
            "tokens": totals.num_tokens,
            "computed_tokens": computed,
            "loss_tokens": totals.num_loss_tokens,
            "loss_weight": totals.loss_weight / self._config.count_scale,
            "truncated": totals.num_truncated,
            "bad_records": totals.num_bad,
            "idle": totals.num_idle,
            "shared": totals.num_shared,
            "fill": totals.num_tokens / (num_bins * self._config.token_budget),
            "balance": totals.balance,
            "moved": totals.num_moved,
            "bytes_moved": totals.bytes_moved,
            "fetch_wait_s": totals.wait_us / 1e6,
            "context_balance": self._context_balance(),
            "idle_router_share": router_share,
        }

    def _context_balance(self) -> float | None:
        size, multiple = self._args.context_parallel_size, self._multiple
        if size == 1:
            return None
        lengths = np.array([length for batch in self._lengths for length in batch], dtype=np.int64)
        return cost_balance(lengths, -(-lengths // multiple) * multiple, size=size)

    def _padded_totals(self) -> dict[str, Any]:
        left_out, loss_tokens, truncated, bad, weight = self._padded.tolist()
        own = {
            "samples": sum(map(len, self._lengths)),
            "left_out": int(left_out),
            "tokens": sum(map(sum, self._lengths)),
            "computed_tokens": sum(self._widths),
            "loss_tokens": int(loss_tokens),
            "truncated": int(truncated),
            "bad_records": int(bad),
            "loss_weight": round(weight),
        }
        found: dict[str, Any] = dict(zip(own, self._sum(list(own.values())), strict=True))
        found["loss_weight"] /= self._config.count_scale
        return found | {"idle": 0, "fill": None, "balance": None, "moved": 0, "bytes_moved": 0}

    def _sum(self, counts: list[int]) -> list[int]:
        """Return the sums over all replicas."""
        assert self._group is not None, "on source ranks alone"
        found = gather_json(self._group, counts)
        return [sum(values) for values in zip(*found, strict=True)]

    # --- the end --------------------------------------------------------------------------------

    def evaluated(self, counts: Sequence[int]) -> None:
        """Count a step, or a padded micro-batch, of an evaluation.

        Args:
            counts: of samples, loss tokens, samples left out, and truncated.
        """
        self._evaluated += counts

    def finish(self, feed: StepFeed | None, *, together: bool) -> None:
        """Print the summary and close the log.

        Args:
            feed: of the training data, None for the padded baseline and where this is no source
                rank.
            together: the run ended cleanly, so that all replicas can add up their counts.

        Raises:
            ValueError: every sample was left out, or none had a loss token.
        """
        try:
            counts = self._counts
            if feed is not None:
                counts = list(feed.progress.source_counts) or counts  # none before the first step
            sources = self._add_up(counts, together=together)
            if self._live is not None:
                self._summarize(self._live, sources, together=together)
        finally:
            if self._log is not None:
                self._log.close()
        if together:
            self._require_learning(sources)

    def _add_up(self, counts: Sequence[SourceCounts], *, together: bool) -> list[SourceTotals]:
        """Return what the run consumed of each source, and take the most of what was measured; over
        all replicas if together.
        """
        if self._stream is None or self._group is None:
            return []
        own = [asdict(one) for one in counts]
        for one in own:
            one["first_message"] = one["first_message"][:_MESSAGE_LENGTH]
        figures = [*self._memory, len(self._shapes), self._most_patches]
        replicas = [(own, figures, self._evaluated.tolist())]
        if together:
            replicas = gather_json(self._group, replicas[0])
        by_source, measured, evaluated = zip(*replicas, strict=True)
        peak, reserved, self._num_shapes, self._most_patches = map(max, zip(*measured, strict=True))
        self._memory = (peak, reserved)
        if not self._config.enabled:  # else each rank has seen the totals
            self._evaluated = np.array(evaluated).sum(axis=0)
        totals = []
        for name, parts in zip(
            self._stream.source_names, zip(*by_source, strict=True), strict=True
        ):
            message = next(filter(None, (part.pop("first_message") for part in parts)), "")
            sums = {field: sum(part[field] for part in parts) for field in parts[0]}
            totals.append(SourceTotals(name=name, first_message=message, **sums))
        return totals

    def _require_learning(self, sources: list[SourceTotals]) -> None:
        left_out = sum(source.bad_records + source.overlong for source in sources)
        if left_out and not any(source.samples for source in sources):
            raise ValueError(
                f"nothing was trained: all {left_out} samples were left out, the first because of "
                f"{next(filter(None, (source.first_message for source in sources)), '?')}"
            )
        trained = (sum(s.samples for s in sources), sum(s.loss_tokens for s in sources))
        pairs = {"trained": trained, "evaluated": self._evaluated[:2].tolist()}
        for verb, (num, num_loss) in pairs.items():
            if num and not num_loss:
                raise ValueError(
                    f"nothing was learnt: none of the {num} samples {verb} has a loss token, "
                    "so every loss was 0; answers may lie beyond where --odb-overlong truncate "
                    "cuts (raise --seq-length), or the data marks no token for loss"
                )

    def _summarize(self, live: LiveReport, sources: list[SourceTotals], *, together: bool) -> None:
        chosen: dict[str, str] = {}
        peak, reserved = self._memory
        total = _memory_there()
        if peak:
            gigabytes = [f"{num / 2**30:.2f} GiB" for num in (peak, reserved, total)]
            text = "peak {}, reserved {} of {}" if reserved else "process peak {0} of {2}"
            shapes = f"{self._num_shapes} shapes of micro-batches"
            chosen["memory"] = f"{text.format(*gigabytes)}; {shapes}"
        if self._most_patches:
            cap = self._config.max_patches
            limit = f"--odb-max-patches {cap}" if cap else "no --odb-max-patches"
            chosen["patches"] = f"at most {self._most_patches} in a micro-batch ({limit})"
        if self._cost is not None:
            chosen["cost model"] = self._described(self._cost)
        scope = " since the resume" if self._goes_on else ""
        if not together:
            scope += " (this replica only: the run did not end cleanly)"
        live.finish(sources, scope=scope, chosen=chosen)
        left_out, truncated = self._evaluated.tolist()[2:]
        if left_out or truncated:
            print(
                f"odb: evaluations left out {left_out} samples and truncated {truncated}",
                flush=True,
            )
        if self._config.log_dir is not None and self._log is not None:
            flags = _flags(self._args, self._config)
            values: dict[str, Any] = {"flags": flags, **chosen, "ended_cleanly": together}
            if peak:
                memory = {"peak": peak, "reserved": reserved, "total": total}
                values |= {"memory_bytes": memory, "num_shapes": self._num_shapes}
            if self._most_patches:
                values["most_patches"] = self._most_patches
            write_run(self._config.log_dir, values)

    def _described(self, cost: CostModel) -> str:
        given = self._config.cost
        origin = "the model's shape" if given is None else "as given"
        return f"--odb-cost {given or CostCoefficients.of(cost)} ({origin})"

    def _log_header(self, run: int, group: SourceGroup) -> LogHeader:
        args, config = self._args, self._config
        sizes = {
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "vpp": args.virtual_pipeline_model_parallel_size or 1,
            "cp": args.context_parallel_size,
            "ep": getattr(args, "expert_model_parallel_size", None) or 1,
        }
        return LogHeader(
            run=run,
            replica=group.replica,
            num_replicas=group.num_replicas,
            iteration=args.iteration,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            flags=_flags(args, config),
            batches="odb" if config.enabled else "padded",
            cost=str(CostCoefficients.of(self._cost)) if self._cost is not None else "",
            multiple=self._multiple,
            token_budget=config.token_budget if config.enabled else args.seq_length,
            seq_length=args.seq_length,
            global_batch_size=args.global_batch_size,
            sizes=sizes,
        )


def _memory_there() -> int:
    """Return the bytes of the device or, without one, of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def start_lines(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    """Return what is said of the flags when a run starts."""
    if not config.enabled:
        return ["--odb is off: padded baseline"]
    sync, reason = sync_of(args)
    return [
        f"reproduce with {_flags(args, config)}",
        f"replicas are balanced in each {sync.value}: {reason}",
    ]


def _flags(args: argparse.Namespace, config: OdbConfig) -> str:
    flags = [config.describe(), *image_flags(args)] if config.enabled else []
    return " ".join([*flags, f"--seed {args.seed}"])
