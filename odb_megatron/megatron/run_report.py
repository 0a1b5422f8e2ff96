"""What a run tells: lines at its start, each step, the log folder, and the summary at the end.

Must not decide anything. Counts are added up over replicas where the run has ended cleanly.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch

from odb_megatron.data.feed import Delivered, StepFeed, StepHeader
from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.stream import SampleStream
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.compat import describe_megatron
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.device_memory import MemoryUse
from odb_megatron.megatron.images import image_flags
from odb_megatron.megatron.recorder import (
    CudaClock,
    Gathers,
    StepRecorder,
    WallClock,
    gather_counts,
)
from odb_megatron.megatron.series_writers import SeriesWriters
from odb_megatron.megatron.setup import total_samples
from odb_megatron.megatron.topology import padding_multiple, sync_of
from odb_megatron.plan.cost import CostModel, CostPrices
from odb_megatron.plan.record import OPEN_TOTAL
from odb_megatron.report.live import LiveReport, SourceTotals
from odb_megatron.report.steps import LogHeader, StepLog, StepRecord, write_run

__all__ = ["Evaluated", "RunReport", "source_totals", "start_lines"]

_MESSAGE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Counts of evaluations."""

    samples: int = 0
    loss_tokens: int = 0
    left_out: int = 0
    truncated: int = 0

    def plus(self, other: Evaluated) -> Evaluated:
        """Return both together."""
        return Evaluated(*map(sum, zip(astuple(self), astuple(other), strict=True)))


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
        is_open: whether this is a source rank, and its data is open.
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
        self._args = args
        self._config = config
        self._stream: SampleStream | ItemStream | None = None
        self._group: Gathers | None = None
        self._cost: CostModel | None = None
        self._live: LiveReport | None = None
        self._log: StepLog | None = None
        self._find_writers = None if config.dry_run else writers
        self._writers: SeriesWriters | None = None
        self.is_open = False
        self._memory: MemoryUse | None = None
        self._num_shapes = self._most_patches = 0
        self._goes_on = False
        self._evaluated = Evaluated()
        if args.rank == 0:
            reason = f"attention backend {backend.name}: {backend.reason}"
            said = start_lines(args, config) if lines is None else lines
            for line in (describe_megatron(), reason, *said):
                print(f"odb: {line}", flush=True)

    def open(self, stream: SampleStream | ItemStream, group: Gathers) -> None:
        """Training data is there: begin to record. On source ranks.

        Args:
            stream: names the samples.
            group: to the other replicas, for the main thread.
        """
        args, config = self._args, self._config
        self._stream, self._group = stream, group
        self.is_open = True
        clock = None
        if config.log_dir is not None and config.enabled and args.pipeline_model_parallel_size == 1:
            clock = CudaClock() if torch.cuda.is_available() else WallClock()
        self.recorder = StepRecorder(args, config, stream, group=group, clock=clock)
        if config.enabled:
            self._cost = config.cost_model(args)
            if args.rank == 0:
                print(f"odb: cost model {self._described(self._cost)}", flush=True)
        if args.rank == 0:
            if isinstance(stream, SampleStream) and stream.repeats():
                print(f"odb: {stream.repeats()}", flush=True)
            title = "odb" if config.enabled else "padded baseline"
            self._live = LiveReport(
                total_samples=_told_total(args),
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
        delivered: Delivered | None,
        reports: int,
    ) -> StepRecord:
        """Record the step, show and return it; see `StepRecorder.end_step`."""
        assert self.recorder is not None
        self._memory = memory
        record = self.recorder.end_step(
            values,
            memory=memory,
            delivered=delivered,
            reports=reports,
            cost=self._cost,
        )
        if self._log is not None:
            self._log.write(record)
        if self._live is not None:
            self._live.step(record)
        if self._writers is None and self._find_writers is not None:  # padded baseline
            self._writers = self._find_writers()
        if self._writers is not None:
            self._writers.step(record)
        return record

    def evaluated(self, step: Evaluated) -> None:
        """Count a step, or a padded micro-batch, of an evaluation."""
        self._evaluated = self._evaluated.plus(step)

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
                parts = gather_counts(self._group, list(astuple(self._evaluated)))
                self._evaluated = Evaluated(*map(sum, zip(*parts, strict=True)))
            if self._live is not None:
                self._summarize(self._live, sources, together=together)
        finally:
            if self._log is not None:
                self._log.close()
        left_out = sum(source.bad_records + source.overlong for source in sources)
        if together and left_out and not any(source.samples for source in sources):
            raise ValueError(
                f"nothing was trained: all {left_out} samples were left out, the first because of "
                f"{next(filter(None, (source.first_message for source in sources)), '?')}"
            )
        evaluated = self._evaluated
        for verb, samples, loss_tokens in (
            ("trained", sum(s.samples for s in sources), sum(s.loss_tokens for s in sources)),
            ("evaluated", evaluated.samples, evaluated.loss_tokens),
        ):
            if together and samples and not loss_tokens:
                raise ValueError(
                    f"nothing was learnt: none of the {samples} samples {verb} has a loss token, "
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
        left_out, truncated = self._evaluated.left_out, self._evaluated.truncated
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
        return f"--odb-cost {given or CostPrices.of(cost)} ({origin})"

    def _header(self, run: int, group: Gathers) -> LogHeader:
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
            cost=str(CostPrices.of(self._cost)) if self._cost is not None else "",
            multiple=padding_multiple(args),
            token_budget=config.token_budget if config.enabled else args.seq_length,
            seq_length=args.seq_length,
            global_batch_size=args.global_batch_size,
            sizes=sizes,
        )

    def _share_memory(self, *, together: bool) -> None:
        """Take the most of all replicas."""
        if self.recorder is None or self._memory is None or not self.is_open:
            return
        self._num_shapes, self._most_patches = len(self.recorder.shapes), self.recorder.most_patches
        if together and self._group is not None:
            memory = self._memory
            own = [memory.peak, memory.reserved, self._num_shapes, self._most_patches]
            found = map(max, *gather_counts(self._group, own), own)
            peak, reserved, self._num_shapes, self._most_patches = found
            self._memory = replace(memory, peak=peak, reserved=reserved)

    def _sources(self, feed: StepFeed | None, *, together: bool) -> list[SourceTotals]:
        if self._stream is None or self.recorder is None or self._group is None:
            return []
        counted = self.recorder.source_counts
        if feed is not None:
            counted = list(feed.progress.source_counts) or counted  # none before the first step
        return source_totals(
            self._stream.source_names, counted, group=self._group if together else None
        )


def source_totals(
    sources: Sequence[str], counted: Sequence[SourceCounts], *, group: Gathers | None
) -> list[SourceTotals]:
    """Return what a run consumed of each source, over all replicas.

    Args:
        sources: their names.
        counted: what this replica has consumed of each.
        group: to the other replicas, all of which must call this; None for this one alone.
    """
    names = SourceCounts.names()
    numbers = [getattr(counts, name) for counts in counted for name in names]
    messages = [counts.first_message for counts in counted]
    if group is not None:
        numbers = [sum(values) for values in zip(*gather_counts(group, numbers), strict=True)]
        messages = _first_messages(messages, group)
    return [
        SourceTotals(
            name=source,
            first_message=message,
            **dict(zip(names, numbers[at * len(names) :], strict=False)),
        )
        for at, (source, message) in enumerate(zip(sources, messages, strict=True))
    ]


def _first_messages(own: Sequence[str], group: Gathers) -> list[str]:
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


def _told_total(args: argparse.Namespace) -> int | None:
    """Return the run's length in samples; None while nobody knows it."""
    total = total_samples(args)
    return None if total == OPEN_TOTAL else total
