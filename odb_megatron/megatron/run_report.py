"""What a run tells: lines at its start, each step, the log folder, and the summary at the end.

Must not decide anything. Counts are added up over replicas where the run has ended cleanly.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import torch

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.step_feed import HandedOut, StepFeed
from odb_megatron.data.stream import SampleStream
from odb_megatron.megatron.attention.registry import AttentionBackend
from odb_megatron.megatron.compat import describe_megatron
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.cost_model import RunCost
from odb_megatron.megatron.device_memory import MemoryUse
from odb_megatron.megatron.multimodal.arguments import image_flags
from odb_megatron.megatron.recorder import StepRecorder
from odb_megatron.megatron.replica_data import ReplicaData
from odb_megatron.megatron.series_writers import SeriesWriters
from odb_megatron.megatron.setup import total_samples
from odb_megatron.megatron.source_totals import source_totals
from odb_megatron.megatron.step_timer import CudaClock, WallClock
from odb_megatron.megatron.topology import balance_scope
from odb_megatron.megatron.warmup import WarmUp
from odb_megatron.plan.batch_size import batch_size_warning
from odb_megatron.plan.config import OPEN_TOTAL
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.report.live import LiveReport, SourceTotals
from odb_megatron.report.prometheus import Metrics
from odb_megatron.report.step_log import LogHeader, StepLog, write_run

__all__ = ["RunReport", "start_lines"]


class RunReport:
    """The reports of one rank; prints on rank 0 only.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        backend: the attention backend chosen.
        lines: to print at the start in place of Megatron's flags.
        writers: the host's, on the rank that has them; asked for with the first step.

    Attributes:
        recorder: builds the step records; on leaders, once data is open. Of a packed run also on
            the rank that has writers, with what that rank knows.
        leads: whether this rank leads a replica, and its data is open.
        cost: the cost model of the training loader, once there is one.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: OdbConfig,
        *,
        backend: AttentionBackend,
        lines: Sequence[str] | None = None,
        writers: Callable[[], SeriesWriters] | None = None,
    ) -> None:
        self.recorder: StepRecorder | None = None
        self.cost: RunCost | None = None
        self._args = args
        self._config = config
        self._stream: SampleStream | ItemStream | None = None
        self._exchange: ControlGroup | None = None
        self._live: LiveReport | None = None
        self._log: StepLog | None = None
        self._metrics: Metrics | None = None
        self._find_writers = writers
        self._writers: SeriesWriters | None = None
        self.leads = False
        self._memory: MemoryUse | None = None
        self._num_shapes = self._most_patches = 0
        self._goes_on = False
        self._choice = ""  # what mode `auto` chose for the run
        self._eval_left_out = self._eval_truncated = 0
        if args.rank == 0:
            reason = f"attention backend {backend.name}: {backend.reason}"
            said = start_lines(args, config) if lines is None else lines
            for line in (describe_megatron(), reason, *said):
                print(f"odb: {line}", flush=True)

    def open(self, stream: SampleStream | ItemStream, exchange: ControlGroup) -> None:
        """Training data is there: begin to record. On leaders.

        Args:
            stream: names the samples.
            exchange: to the other replicas.
        """
        args, config = self._args, self._config
        self._stream, self._exchange = stream, exchange
        self.leads = True
        clock = None
        if config.log_dir is not None and config.enabled and args.pipeline_model_parallel_size == 1:
            clock = CudaClock() if torch.cuda.is_available() else WallClock()
        self.recorder = StepRecorder(args, config, stream, exchange=exchange, clock=clock)
        if args.rank == 0:
            self._live = LiveReport(
                total_samples=_told_total(args),
                consumed_before=args.consumed_train_samples,
                global_batch_size=args.global_batch_size,
                sequence_length=args.seq_length,
                title=f"odb, policy {config.policy.value}" if config.enabled else "padded baseline",
            )
        if config.log_dir is not None:
            run, *_ = (own for (own,) in exchange.gather_counts([secrets.randbits(62)]))
            self._log = StepLog(config.log_dir, header=self._header(run, exchange))
        if config.metrics and args.rank == 0:
            self._metrics = Metrics(**asdict(config.metrics))

    def goes_on(self) -> None:
        """Counts of sources are those of the saved run and this one together."""
        self._goes_on = True

    def warmed_up(
        self, warm_up: WarmUp, *, replica: ReplicaData, exchange: ControlGroup | None
    ) -> None:
        """Print what the worst micro-batches took, at most on any leader or last stage.

        Args:
            warm_up: on this rank.
            replica: brings the last pipeline stage's to its leader.
            exchange: between leaders, for the main thread; None on other ranks.
        """
        own = warm_up.numbers()
        numbers = list(map(max, own, replica.report(own)))
        replica.num_reported()  # these are of no step
        if exchange is not None:
            gathered = exchange.gather_counts([int(number) for number in numbers])
            numbers = list(map(max, *gathered, numbers))
        if self._args.rank == 0:
            print(f"odb: {warm_up.with_numbers(numbers)}", flush=True)

    def begin_step(self, header: StepHeader, feed: StepFeed | None) -> None:
        """A training step starts; say once what `--odb-exchange auto` chose for the run."""
        if self._writers is None and self._find_writers is not None:
            self._writers = self._find_writers()
            if self._writers and self.recorder is None:
                self.recorder = StepRecorder(self._args, self._config, None, exchange=None)
                self.recorder.start_clock()
        if self.recorder is not None:
            self.recorder.begin_step(header)
        choice = None if feed is None else feed.progress.exchange_choice
        if choice is not None and not self._choice:
            self._choice = choice.reason()
            if self._args.rank == 0:
                print(f"odb: {self._choice}", flush=True)

    def on_batch(self, item: Any) -> None:
        """A micro-batch was taken for training."""
        if self.recorder is not None:
            self.recorder.on_batch(item)

    @property
    def times_backward(self) -> bool:
        """Whether `end_backward` should be called."""
        return self.recorder is not None and self.recorder.has_clock

    def end_backward(self) -> None:
        """The step's last backward pass was launched."""
        if self.recorder is not None:
            self.recorder.end_backward()

    def end_step(
        self,
        values: dict[str, Any],
        *,
        memory: MemoryUse,
        handed_out: HandedOut | None,
        reports: int,
    ) -> None:
        """Record the step and show it; see `StepRecorder.end_step`."""
        assert self.recorder is not None
        self._memory = memory
        record = self.recorder.end_step(
            values,
            memory=memory,
            handed_out=handed_out,
            reports=reports,
            cost=None if self.cost is None else self.cost.model,
        )
        if self._log is not None:
            self._log.write(record)
        if self._live is not None:
            self._live.step(record)
        if self._metrics is not None:
            self._metrics.step(record)
        if self._writers is None and self._find_writers is not None:  # padded baseline
            self._writers = self._find_writers()
        if self._writers is not None:
            self._writers.step(record)

    def evaluated(self, *, left_out: int, truncated: int) -> None:
        """Count what an evaluation left out and truncated."""
        self._eval_left_out += left_out
        self._eval_truncated += truncated

    def finish(self, feed: StepFeed | None, *, together: bool) -> None:
        """Print the summary and close the log.

        Args:
            feed: of the training data, None for the padded baseline and on ranks that lead none.
            together: the run ended cleanly, so that all replicas can add up their counts.

        Raises:
            ValueError: every sample was left out.
        """
        try:
            sources = self._sources(feed, together=together)
            self._share_memory(together=together)
            if together and not self._config.enabled and self._exchange is not None:
                own = [self._eval_left_out, self._eval_truncated]
                sums = zip(*self._exchange.gather_counts(own), strict=True)
                self._eval_left_out, self._eval_truncated = map(sum, sums)
            if self._live is not None:
                self._summarize(self._live, sources, feed, together=together)
        finally:
            if self._log is not None:
                self._log.close()
            if self._metrics is not None:
                self._metrics.close()
        left_out = sum(source.bad_records + source.overlong for source in sources)
        if together and left_out and not any(source.samples for source in sources):
            raise ValueError(
                f"nothing was trained: all {left_out} samples were left out, the first because of "
                f"{next(filter(None, (source.first_message for source in sources)), '?')}"
            )

    def _summarize(
        self,
        live: LiveReport,
        sources: list[SourceTotals],
        feed: StepFeed | None,
        *,
        together: bool,
    ) -> None:
        chosen = {}
        if self._memory is not None:
            chosen["memory"] = f"{self._memory}; {self._num_shapes} shapes of micro-batches"
        if self._most_patches:
            cap = self._config.max_patches
            limit = f"--odb-max-patches {cap}" if cap else "no --odb-max-patches"
            chosen["patches"] = f"at most {self._most_patches} in a micro-batch ({limit})"
        if self.cost is not None:
            chosen["cost model"] = self.cost.describe()
        if self._config.exchange is ExchangeMode.AUTO and feed is not None:
            chosen["exchange auto"] = self._choice or self._chosen_otherwise(live, feed)
        scope = " since the start, before the resume too" if self._goes_on else ""
        if not together:
            scope += " (this replica only: the run did not end cleanly)"
        live.finish(sources, scope=scope, chosen=chosen)
        if self._eval_left_out or self._eval_truncated:
            print(
                f"odb: evaluations left out {self._eval_left_out} samples and truncated "
                f"{self._eval_truncated}",
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

    def _header(self, run: int, exchange: ControlGroup) -> LogHeader:
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
            replica=exchange.replica,
            num_replicas=exchange.num_replicas,
            iteration=args.iteration,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            flags=_flags(args, config),
            policy=config.policy.value if config.enabled else "padded",
            token_budget=config.token_budget if config.enabled else args.seq_length,
            seq_length=args.seq_length,
            global_batch_size=args.global_batch_size,
            sizes=sizes,
        )

    def _share_memory(self, *, together: bool) -> None:
        """Take the most of all replicas."""
        if self.recorder is None or self._memory is None or not self.leads:
            return
        self._num_shapes, self._most_patches = len(self.recorder.shapes), self.recorder.most_patches
        if together and self._exchange is not None:
            memory = self._memory
            own = [memory.peak, memory.reserved, self._num_shapes, self._most_patches]
            found = map(max, *self._exchange.gather_counts(own), own)
            peak, reserved, self._num_shapes, self._most_patches = found
            self._memory = replace(memory, peak=peak, reserved=reserved)

    def _chosen_otherwise(self, live: LiveReport, feed: StepFeed) -> str:
        """Return what mode `auto` did where it made no choice for the run in this process."""
        if self._args.data_parallel_size == 1:
            return "none: one replica has nobody to hand samples to"
        if self._config.policy is PolicyName.SAMPLES:
            totals = live.totals
            return f"step by step: samples moved in {totals.exchanged} of {totals.steps} steps"
        exchanges = feed.progress.exchanges
        if exchanges is None:
            return "nothing chosen yet"
        return f"{'tokens' if exchanges else 'none'}, chosen before the resume"

    def _sources(self, feed: StepFeed | None, *, together: bool) -> list[SourceTotals]:
        if self._stream is None or self.recorder is None or self._exchange is None:
            return []
        counted = self.recorder.source_counts
        if feed is not None:
            counted = list(feed.progress.source_counts)
        return source_totals(
            self._stream.source_names, counted, exchange=self._exchange if together else None
        )


def start_lines(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    """Return what is said of the flags when a run starts."""
    if not config.enabled:
        return ["--odb is off: padded baseline"]
    scope, reason = balance_scope(args)
    lines = [
        f"reproduce with {_flags(args, config)}",
        f"balance scope {scope.value}: {reason}",
    ]
    if config.exchange is not ExchangeMode.NONE and args.data_parallel_size == 1:
        lines.append(
            f"warning: --odb-exchange {config.exchange.value} does nothing with one data-parallel "
            "replica, which has nobody to hand samples to: drop it, or train on more replicas"
        )
    kind = getattr(args, "ckpt_format", None)  # Megatron-Bridge writes torch_dist alone
    if args.save and kind == "torch" and args.context_parallel_size > 1:
        lines.append(
            "warning: with --ckpt-format torch the ranks of a context-parallel group write the "
            "same file at once (megatron-core 0.18 and later), which may damage it: use torch_dist"
        )
    few = batch_size_warning(
        config.policy,
        config.exchange,
        global_batch_size=args.global_batch_size,
        num_replicas=args.data_parallel_size,
    )
    return [*lines, f"warning: {few}"] if few else lines


def _flags(args: argparse.Namespace, config: OdbConfig) -> str:
    flags = [config.describe(), *image_flags(args)] if config.enabled else []
    return " ".join([*flags, f"--seed {args.seed}"])


def _told_total(args: argparse.Namespace) -> int | None:
    """Return the run's length in samples; None while nobody knows it."""
    total = total_samples(args)
    return None if total == OPEN_TOTAL else total
