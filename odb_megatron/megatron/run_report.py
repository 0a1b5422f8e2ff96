"""What a run tells: lines at its start, the record of each step, the log folder, and the summary.

Counts are added up over replicas where the run has ended cleanly.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.data.feed import Delivered, StepFeed, StepHeader
from odb_megatron.data.iterable import ItemStream
from odb_megatron.data.loop import SourceCounts
from odb_megatron.data.sample import SkipReason
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatchLayout, cost_balance
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.checkpoint import gather_counts
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.device_memory import MemoryUse
from odb_megatron.megatron.images import image_flags
from odb_megatron.megatron.setup import total_samples
from odb_megatron.megatron.topology import padding_multiple, sync_of
from odb_megatron.megatron.versions import describe_megatron
from odb_megatron.plan.cost import COST_UNIT, CostCoefficients, CostModel
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.record import OPEN_TOTAL, StepTotals
from odb_megatron.report.live import LiveReport, SourceTotals, series_of
from odb_megatron.report.steps import LogHeader, StepLog, StepRecord, write_run

__all__ = ["Clock", "CudaClock", "RunReport", "SeriesWriters", "StepRecorder", "WallClock"]
__all__ += ["logged_loss", "megatron_writers", "start_lines"]

_MESSAGE_BYTES = 1024


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


@dataclass(frozen=True, slots=True)
class SeriesWriters:
    """A rank's TensorBoard and W&B writers, which get the series `odb/...`.

    Attributes:
        tensorboard: a `SummaryWriter`; None where this rank has none.
        wandb: the module `wandb`; None where this rank has none.
        interval: iterations between writes, as the host's own series have it.
    """

    tensorboard: Any
    wandb: Any
    interval: int

    def __bool__(self) -> bool:
        """Whether this rank has any."""
        return self.tensorboard is not None or self.wandb is not None

    def step(self, record: StepRecord) -> None:
        """Write a step, if it is one of those that are written."""
        iteration = record.iteration
        if not self or iteration % max(1, self.interval):
            return
        values = {f"odb/{name}": value for name, value in series_of(record).items()}
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, iteration)
        if self.wandb is not None:
            self.wandb.log(values, iteration)


def megatron_writers(args: argparse.Namespace) -> SeriesWriters:
    """Return Megatron's own, which its last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    interval = args.tensorboard_log_interval
    return SeriesWriters(get_tensorboard_writer(), get_wandb_writer(), interval)


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


class StepRecorder:
    """Collects one step between the start of its schedule and Megatron's log call.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        stream: names the samples; None on ranks that are no source ranks.
        group: sums the padded baseline's counts over replicas, and what a packed step that pads
            micro-batches has computed; the plan knows all else. For the main thread. None on ranks
            that are no source ranks: such a step's computed tokens are 0 there.
        clock: times micro-batches; None where they overlap, or nobody asks.

    Attributes:
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
        group: SourceGroup | None,
        clock: Clock | None = None,
    ) -> None:
        self.most_patches = 0
        self.shapes: set[tuple[int, int]] = set()
        self.source_counts = [SourceCounts() for _ in (stream.source_names if stream else ())]
        self._args, self._config, self._stream, self._group = args, config, stream, group
        self._clock = clock
        self._multiple = padding_multiple(args)
        self._header: StepHeader | None = None
        self._started: float | None = None
        self._clear()

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
        self.mark()
        patches = 0
        if isinstance(item, MicroBatchLayout):
            positions = item.positions
            lengths = tuple(np.diff(item.cu_seqlens.numpy())[: len(positions)].tolist())
            rows, width = 1, int(item.cu_seqlens_padded.numpy()[-1])
            patches = item.num_patches
        else:
            pairs = zip(item["position"].tolist(), item["length"].tolist(), strict=True)
            present = [pair for pair in pairs if pair[1]]
            positions = tuple(position for position, _ in present)
            lengths = tuple(length for _, length in present)
            rows = len(item["length"])
            width = padded_length(max(1, int(item["length"].max())), self._multiple)
            self._count_padded(item, left_out=rows - len(present))
        self._widths.append(rows * width)
        self.shapes.add((rows, width))
        if self._config.log_dir is not None and self._stream is not None:
            self._ids.append(tuple(_name(self._stream, position) for position in positions))
        self._lengths.append(lengths)
        self._patches.append(patches)
        self.most_patches = max(self.most_patches, patches)

    def mark(self) -> None:
        """A micro-batch begins, or the schedule has ended."""
        if self._clock is not None:
            self._marks.append(self._clock.mark())

    def end_step(
        self,
        values: dict[str, Any],
        *,
        delivered: Delivered | None = None,
        cost: CostModel | None = None,
    ) -> Callable[[float | None, MemoryUse, int], StepRecord]:
        """Megatron has logged the iteration.

        Args:
            values: `training_log`'s arguments.
            delivered: how a packed step came to the trainer.
            cost: model of the step; None for the padded baseline and where it is not known.

        Returns:
            What makes the record of what comes later: the step's loss, the memory of the replica's
            first and last pipeline stage (the larger one), and `ReplicaData.num_reported`.
        """
        elapsed = time.perf_counter() - (self._started or time.perf_counter())
        grad_norm = values["grad_norm"]
        build = partial(
            StepRecord,
            iteration=int(values["iteration"]),
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
            **asdict(delivered or Delivered()),
            num_shapes=len(self.shapes),
            **(
                self._padded_totals() if self._header is None else self._packed_totals(self._header)
            ),
        )
        marks = self._marks if len(self._marks) == len(self._lengths) + 1 else []
        self._started = None
        self._clear()

        def finish(loss: float | None, memory: MemoryUse, reports: int) -> StepRecord:
            return build(
                loss=loss,
                reports=reports,
                micro_batch_s=self._times(marks),
                peak_memory_bytes=memory.peak,
                reserved_memory_bytes=memory.reserved,
            )

        return finish

    def _count_padded(self, item: Any, *, left_out: int) -> None:
        """Count a padded micro-batch; a packed one is counted by its loader."""
        assert self._stream is not None, "the padded baseline is recorded on source ranks alone"
        self._left_out += left_out
        self._loss_tokens += int((item["loss_mask"] > 0).sum())
        self._loss_weight += float(item["loss_mask"].sum())
        self._truncated += int(item["truncated"].sum())
        self._bad += int((item["skipped"] == SkipReason.BAD_RECORD).sum())
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

    def _times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        """Return the seconds of each micro-batch, of which not all may be known."""
        if self._clock is None:
            return ()
        return tuple(self._clock.elapsed_s(start, end) for start, end in pairwise(marks))

    def _packed_totals(self, header: StepHeader) -> dict[str, Any]:
        totals = header.totals
        room = totals.num_micro_batches * totals.num_replicas * self._config.token_budget
        router_share = None
        if getattr(self._args, "num_experts", None) is not None:
            # One token of each idle micro-batch counts; see `data.context_parallel.padding_mask`.
            router_share = totals.num_idle / max(1, totals.num_idle + totals.num_tokens)
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
            "idle_router_share": router_share,
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
        size, multiple = self._args.context_parallel_size, self._multiple
        if size == 1:
            return None
        lengths = np.array([length for batch in self._lengths for length in batch], dtype=np.int64)
        return cost_balance(lengths, -(-lengths // multiple) * multiple, size=size)

    def _padded_totals(self) -> dict[str, Any]:
        own = {
            "samples": sum(map(len, self._lengths)),
            "left_out": self._left_out,
            "tokens": sum(map(sum, self._lengths)),
            "computed_tokens": sum(self._widths),
            "loss_tokens": self._loss_tokens,
            "truncated": self._truncated,
            "bad_records": self._bad,
            "loss_weight": round(self._loss_weight),
        }
        assert self._group is not None, "the padded baseline is recorded on source ranks alone"
        sums = _sums(self._group, list(own.values()))
        found: dict[str, Any] = dict(zip(own, sums, strict=True))
        found["loss_weight"] /= self._config.count_scale
        absent = {"idle": 0, "fill": None, "balance": None, "moved": 0, "bytes_moved": 0}
        return found | absent


def _sums(group: SourceGroup, counts: Sequence[int]) -> list[int]:
    return [sum(values) for values in zip(*gather_counts(group, counts), strict=True)]


def _name(stream: SampleStream | ItemStream, position: int) -> str:
    where = stream.locate(position)
    return f"{where.source}:{where.record}@{where.epoch}"


class RunReport:
    """The reports of one rank; prints on rank 0 only.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        backend: the attention backend chosen.
        lines: to print at the start in place of Megatron's flags.
        writers: the host's, on the rank that has them; asked for with the first step.

    Attributes:
        recorder: builds the step records; on source ranks, once data is open. Of a packed run also
            on the rank that has writers, with what that rank knows.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: OdbConfig,
        *,
        backend: Attention,
        lines: Sequence[str] | None = None,
        writers: Callable[[], SeriesWriters] | None = None,
    ) -> None:
        self.recorder: StepRecorder | None = None
        self._args, self._config = args, config
        self._stream: SampleStream | ItemStream | None = None
        self._group: SourceGroup | None = None
        self._cost: CostModel | None = None
        self._live: LiveReport | None = None
        self._log: StepLog | None = None
        self._find_writers = None if config.dry_run else writers
        self._writers: SeriesWriters | None = None
        self._memory: MemoryUse | None = None
        self._num_shapes = self._most_patches = 0
        self._goes_on = False
        # In evaluations: samples, loss tokens, left out, truncated.
        self._evaluated = np.zeros(4, dtype=np.int64)
        if args.rank == 0:
            reason = f"attention backend {backend.name}: {backend.reason}"
            said = start_lines(args, config) if lines is None else lines
            for line in (describe_megatron(), reason, *said):
                print(f"odb: {line}", flush=True)

    def open(self, stream: SampleStream | ItemStream, group: SourceGroup) -> None:
        """Training data is there: begin to record. On source ranks.

        Args:
            stream: names the samples.
            group: to the other replicas, for the main thread.
        """
        args, config = self._args, self._config
        self._stream, self._group = stream, group
        clock: Clock | None = None
        if config.log_dir is not None and config.enabled and args.pipeline_model_parallel_size == 1:
            clock = CudaClock() if torch.cuda.is_available() else WallClock()
        self.recorder = StepRecorder(args, config, stream, group=group, clock=clock)
        if config.enabled:
            self._cost = config.cost_model(args)
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
            run, *_ = (own for (own,) in gather_counts(group, [secrets.randbits(62)]))
            self._log = StepLog(config.log_dir, header=self._header(run, group))

    def goes_on(self) -> None:
        """The run is a resumed one: counts of sources are of what follows."""
        self._goes_on = True

    def start_clock(self) -> None:
        """The trainer is about to fetch a training step."""
        if self.recorder is not None:
            self.recorder.start_clock()

    def begin_step(self, header: StepHeader) -> None:
        """A training step starts."""
        if self._writers is None and self._find_writers is not None:
            self._writers = self._find_writers()
            if self._writers and self.recorder is None:
                self.recorder = StepRecorder(self._args, self._config, None, group=None)
                self.recorder.start_clock()
        if self.recorder is not None:
            self.recorder.begin_step(header)

    def on_batch(self, item: Any) -> None:
        """A micro-batch was taken for training."""
        if self.recorder is not None:
            self.recorder.on_batch(item)

    def on_trained(self) -> None:
        """A training schedule has launched all its work."""
        if self.recorder is not None:
            self.recorder.mark()

    def end_step(
        self, values: dict[str, Any], *, delivered: Delivered | None
    ) -> Callable[[float | None, MemoryUse, int], StepRecord]:
        """Return what records the step, shows and returns it; see `StepRecorder.end_step`."""
        assert self.recorder is not None
        finish = self.recorder.end_step(values, delivered=delivered, cost=self._cost)

        def show(loss: float | None, memory: MemoryUse, reports: int) -> StepRecord:
            self._memory = memory
            record = finish(loss, memory, reports)
            if self._log is not None:
                self._log.write(record)
            if self._live is not None:
                self._live.step(record)
            if self._writers is None and self._find_writers is not None:  # padded baseline
                self._writers = self._find_writers()
            if self._writers is not None:
                self._writers.step(record)
            return record

        return show

    def evaluated(self, *, samples: int, loss_tokens: int, left_out: int, truncated: int) -> None:
        """Count a step, or a padded micro-batch, of an evaluation."""
        self._evaluated += (samples, loss_tokens, left_out, truncated)

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
            sources = self._sources(feed, together=together)
            self._share_memory(together=together)
            if together and not self._config.enabled and self._group is not None:
                self._evaluated[:] = _sums(self._group, self._evaluated.tolist())
            if self._live is not None:
                self._summarize(self._live, sources, together=together)
        finally:
            if self._log is not None:
                self._log.close()
        if together:
            self._require_learning(sources)

    def _require_learning(self, sources: list[SourceTotals]) -> None:
        left_out = sum(source.bad_records + source.overlong for source in sources)
        if left_out and not any(source.samples for source in sources):
            raise ValueError(
                f"nothing was trained: all {left_out} samples were left out, the first because of "
                f"{next(filter(None, (source.first_message for source in sources)), '?')}"
            )
        samples, loss_tokens, *_ = self._evaluated.tolist()
        trained = (sum(s.samples for s in sources), sum(s.loss_tokens for s in sources))
        for verb, (num, num_loss) in {
            "trained": trained,
            "evaluated": (samples, loss_tokens),
        }.items():
            if num and not num_loss:
                raise ValueError(
                    f"nothing was learnt: none of the {num} samples {verb} has a loss token, "
                    "so every loss was 0; answers may lie beyond where --odb-overlong truncate "
                    "cuts (raise --seq-length), or the data marks no token for loss"
                )

    def _summarize(self, live: LiveReport, sources: list[SourceTotals], *, together: bool) -> None:
        chosen = {}
        if self._memory is not None:
            chosen["memory"] = f"{self._memory}; {self._num_shapes} shapes of micro-batches"
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
            values = {"flags": flags, **chosen, "ended_cleanly": together}
            if self._memory is not None:
                values |= {"memory_bytes": asdict(self._memory), "num_shapes": self._num_shapes}
            if self._most_patches:
                values["most_patches"] = self._most_patches
            write_run(self._config.log_dir, values)

    def _described(self, cost: CostModel) -> str:
        given = self._config.cost
        origin = "the model's shape" if given is None else "as given"
        return f"--odb-cost {given or CostCoefficients.of(cost)} ({origin})"

    def _header(self, run: int, group: SourceGroup) -> LogHeader:
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
            multiple=padding_multiple(args),
            token_budget=config.token_budget if config.enabled else args.seq_length,
            seq_length=args.seq_length,
            global_batch_size=args.global_batch_size,
            sizes=sizes,
        )

    def _share_memory(self, *, together: bool) -> None:
        """Take the most of all replicas."""
        if self.recorder is None or self._memory is None or self._group is None:
            return
        self._num_shapes, self._most_patches = len(self.recorder.shapes), self.recorder.most_patches
        if together:
            memory = self._memory
            own = [memory.peak, memory.reserved, self._num_shapes, self._most_patches]
            found = map(max, *gather_counts(self._group, own), own)
            peak, reserved, self._num_shapes, self._most_patches = found
            self._memory = replace(memory, peak=peak, reserved=reserved)

    def _sources(self, feed: StepFeed | None, *, together: bool) -> list[SourceTotals]:
        """Return what the run consumed of each source; over all replicas if together."""
        if self._stream is None or self.recorder is None:
            return []
        counted = self.recorder.source_counts
        if feed is not None:
            counted = list(feed.progress.source_counts) or counted  # none before the first step
        names = SourceCounts.names()
        numbers = [getattr(counts, name) for counts in counted for name in names]
        messages = [counts.first_message for counts in counted]
        if together and self._group is not None:
            numbers = _sums(self._group, numbers)
            messages = _first_messages(messages, self._group)
        return [
            SourceTotals(
                name=source,
                first_message=message,
                **dict(zip(names, numbers[at * len(names) :], strict=False)),
            )
            for at, (source, message) in enumerate(
                zip(self._stream.source_names, messages, strict=True)
            )
        ]


def _first_messages(own: Sequence[str], group: SourceGroup) -> list[str]:
    """Return, for each source, the message of the first replica that has one, cut to fit."""
    sent = b"".join(text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0") for text in own)
    found = group.gather_all(sent)
    places = [slice(at, at + _MESSAGE_BYTES) for at in range(0, len(sent), _MESSAGE_BYTES)]
    texts = [[part[at].rstrip(b"\0").decode("utf-8", "ignore") for part in found] for at in places]
    return [next(filter(None, replicas), "") for replicas in texts]


def start_lines(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    """Return what is said of the flags when a run starts."""
    if not config.enabled:
        return ["--odb is off: padded baseline"]
    sync, reason = sync_of(args)
    lines = [
        f"reproduce with {_flags(args, config)}",
        f"replicas are balanced in each {sync.value}: {reason}",
    ]
    kind = getattr(args, "ckpt_format", None)  # Megatron-Bridge writes torch_dist alone
    if args.save and kind == "torch" and args.context_parallel_size > 1:
        lines.append(
            "warning: with --ckpt-format torch the ranks of a context-parallel group write the "
            "same file at once (megatron-core 0.18 and later), which may damage it: use torch_dist"
        )
    return lines


def _flags(args: argparse.Namespace, config: OdbConfig) -> str:
    flags = [config.describe(), *image_flags(args)] if config.enabled else []
    return " ".join([*flags, f"--seed {args.seed}"])
