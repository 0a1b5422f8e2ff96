"""Makes the steps of one replica, one per call: draws samples, runs the planner, assembles.

Must not know Megatron's globals, or who takes the steps and when (`step_feed`, `step_queue`); other
replicas are reached only through the `Exchange` it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from odb_megatron.data.bad_records import BadRecords
from odb_megatron.data.draws import Draws
from odb_megatron.data.finished_step import FinishedStep, Progress, StepHeader
from odb_megatron.data.held_samples import HeldSamples
from odb_megatron.data.item_stream import ItemStream, compare_heads
from odb_megatron.data.sample import Skipped, SkipReason, Sample
from odb_megatron.data.sample_hand_over import Payloads
from odb_megatron.data.sample_wire import wire_size
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import Workers, WorkerStart
from odb_megatron.plan.calibration import CostFit, MicroBatchTime
from odb_megatron.plan.config import PlanConfig, config_differences
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import ExchangeMode
from odb_megatron.plan.records import (
    AnyRecord,
    CalibrationRecord,
    PlanRecord,
    RecordTable,
    ReplicaFailedError,
    WindowRecord,
)
from odb_megatron.plan.sample_list import failed_list
from odb_megatron.plan.state import NOT_CALIBRATED, saved_cost
from odb_megatron.plan.step import StepPlan

__all__ = ["Exchange", "StepHeader", "StepLoader"]


class Exchange(Protocol):
    """All-gather of equal-sized byte strings over the leaders of all replicas."""

    @property
    def replica(self) -> int:
        """This replica."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    @property
    def payloads(self) -> Payloads | None:
        """Channel for samples that replicas hand to each other; None where they never do."""

    def exchange(self, record: bytes) -> list[bytes]:
        """Send `record`, return everybody's, in replica order."""


@dataclass(slots=True, kw_only=True)
class _Calibration:
    measure: Callable[[], Sequence[MicroBatchTime]]
    left: int


class StepLoader:
    """Makes steps.

    Args:
        stream: the run's stream.
        config: plan configuration; `num_replicas` must be that of `exchange`.
        exchange: this loader's own channel to the other replicas; with `payloads` where
            `config.exchange` is not `none`.
        num_workers: data-loader workers.
        worker_start: how they are started.
        consumed: stream positions consumed before (resume).

    Attributes:
        fetch_limit_s: seconds that a worker has for a sample, 0 for any time; set before the first
            step.
        bad_records: those that were left out.

    Raises:
        ValueError: `config.exchange` needs a channel for samples.
    """

    def __init__(
        self,
        stream: SampleStream | ItemStream,
        config: PlanConfig,
        *,
        exchange: Exchange,
        num_workers: int = 0,
        worker_start: WorkerStart = WorkerStart.FORKSERVER,
        consumed: int = 0,
    ) -> None:
        moves = config.exchange is not ExchangeMode.NONE and config.num_replicas > 1
        if moves and exchange.payloads is None:
            raise ValueError(
                f"exchange mode {config.exchange.value} needs a channel for samples: give the "
                "loader's exchange its payloads, or use mode none"
            )
        self._stream = stream
        self._config = config
        self._exchange = exchange
        self._moves = moves
        self._workers = Workers(num=num_workers, start=worker_start)
        self._first_consumed = consumed
        self._held = HeldSamples(config, num_sources=len(stream.source_names))
        self._planner = ReplicaPlanner(config, replica=exchange.replica, consumed=consumed)
        self._draws = Draws(stream, config, replica=exchange.replica)
        self._compares_heads = config.has_own_iterators
        self._wait_s = 0.0
        self.fetch_limit_s = 0.0
        self.bad_records = BadRecords(config.max_bad_records)
        self._calibration: _Calibration | None = None
        self._fit: CostFit | None = None
        self._on_fit: Callable[[CostFit], None] | None = None
        self._is_over = False
        self._untold = ""  # an error that other replicas have not been told of
        self._until_trained: Callable[[], None] = _at_once

    @property
    def config(self) -> PlanConfig:
        """Plan configuration in force."""
        return self._planner.config

    @property
    def is_calibrated(self) -> bool:
        """Whether a calibration has decided the cost model."""
        return self._planner.is_calibrated

    def calibrate(
        self,
        measure: Callable[[], Sequence[MicroBatchTime]],
        *,
        after: int,
        on_fit: Callable[[CostFit], None],
    ) -> None:
        """Fit the cost model to measured times, once; all replicas must ask for it alike.

        A state that is loaded later and has a calibrated model makes this void. A run that is
        resumed before its fit measures anew.

        Args:
            measure: returns this replica's times when they are needed.
            after: steps of this loader before the fit.
            on_fit: called by `tell_fit`.
        """
        self._calibration = _Calibration(measure=measure, left=after)
        self._on_fit = on_fit

    def tell_fit(self, fit: CostFit) -> None:
        """Tell whoever asked to calibrate that the trainer is about to get the first step of it."""
        if self._on_fit is not None:
            self._on_fit(fit)

    @property
    def stream(self) -> SampleStream | ItemStream:
        """The stream the samples come from."""
        return self._stream

    def __len__(self) -> int:
        """Steps of one pass over the stream, for loaders with the policy `samples`."""
        if self._planner.is_finished:
            return 0
        left = self._config.total - self._first_consumed
        return -(-left // self._config.global_batch_size)

    def count_from(self, counts: Sequence[SourceCounts]) -> None:
        """Count what is consumed of each source from a saved run's counts on."""
        self._held.count_from(counts)

    def restarted(self) -> StepLoader:
        """Return a loader that starts where this one was made (Megatron's full validation)."""
        again = type(self)(
            self._stream,
            self._config,
            exchange=self._exchange,
            num_workers=self._workers.num,
            worker_start=self._workers.start,
            consumed=self._first_consumed,
        )
        again.fetch_limit_s = self.fetch_limit_s
        return again

    @property
    def is_over(self) -> bool:
        """Whether no further step can be made."""
        return self._is_over

    def close(self) -> None:
        """Make no further step: the next call of `make_step` tells the other replicas.

        The only method that may be called while another thread is in one.
        """
        self._planner.close()

    def make_step(self, until_trained: Callable[[], None] | None = None) -> FinishedStep | None:
        """Plan the next step with all other replicas and assemble it; None after the last.

        Args:
            until_trained: called before measured times are read; returns when the trainer has
                finished all steps made so far, or `close` was called. None: it has.

        Raises:
            LoaderClosedError: a replica has closed its loader; it may be this one.
            ReplicaFailedError, ControlError: another replica has failed, or is gone.
            BadRecordError, OverlongError, ChatTemplateError: by policy.
            TooManyBadRecordsError: on all replicas, in the same step.
        """
        if self._is_over or self._planner.is_finished:
            self._is_over = True
            return None
        try:
            self._until_trained = until_trained or _at_once
            plan = self._plan_step()
        except BaseException:
            self._is_over = True
            self._draws.end()
            raise
        finally:
            self._until_trained = _at_once  # not kept: workers should not wait for a cycle's end
        if plan.totals.is_final:
            self._draws.end()  # all is drawn
        try:
            return self._finish_step(plan)
        except BaseException as error:
            self._untold = f"{type(error).__name__}: {error}"
            raise

    def progress(self) -> Progress:
        """Return where the loader stands after the last step made."""
        snapshot = self._planner.snapshot()
        return Progress(
            snapshot=snapshot,
            source=self._draws.state(snapshot["window"], workers=self._in_force()),
            source_counts=self._held.counted(),
            exchange_choice=self._planner.exchange_choice,
            window_bytes=self._held.num_bytes,
            num_bad=self.bad_records.num,
            bad_records=self.bad_records,
        )

    def state_dict(self) -> dict[str, object]:
        """Planner state after the last step made; see `ReplicaPlanner.state_dict`."""
        return self._planner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, source: Any = None) -> None:
        """Continue from `state`: the window's samples are preprocessed again.

        Args:
            state: of the planner.
            source: `Progress.source`, where the stream is of an iterable source.

        Raises:
            ValueError: see `ReplicaPlanner.load_state_dict` and `ReplicaItems.restore`.
        """
        fetched: dict[int, tuple[int, ...]] = {}
        window = [position for position, _, _ in state.get("window", [])]
        items = self._draws.restored(window, source=source, workers=self._in_force())
        self._compares_heads = False
        if source is not None and self._draws.has_other_end(source):
            state = {**state, "deadline": -1}
        for position, item in zip(window, items, strict=True):
            if isinstance(item, Skipped):
                fetched[position] = (0, 0, 0)
            else:
                self._held.add(position, item)
                fetched[position] = (
                    len(item),
                    item.num_loss_tokens,
                    int(item.truncated > 0),
                    item.num_patches,
                    self._wire_size(item),
                )
        self._planner.load_state_dict(state, fetched=fetched)
        self.load_cost(state)

    def load_cost(self, state: Mapping[str, Any]) -> None:
        """Continue with the cost model that a saved run has calibrated, if this one would too.

        Otherwise the model is the one this loader was made with.
        """
        cost, linear_ps = saved_cost(state)
        if self._calibration is not None and linear_ps != NOT_CALIBRATED:
            self._calibration = None
            self._planner.set_cost(cost, linear_ps=linear_ps)
        else:
            self._planner.set_cost(self._config.cost)

    def _plan_step(self) -> StepPlan:
        if self._calibration is not None:
            self._count_down(self._calibration)
        windows = self._share(self._window_record, WindowRecord(config=0, step=0, position=0))
        table = RecordTable(WindowRecord, windows)
        self._require_one_config(table)
        self._require_own_shards(table)
        self._planner.set_target(table)
        plans = self._share(self._plan_record, PlanRecord(target=0))
        selected = RecordTable(PlanRecord, plans)
        lists = self._share_lists(selected) if self._planner.wants_exchange(selected) else []
        plan = self._planner.commit(selected, lists)
        self.bad_records.add_up(plan.totals)
        return plan

    def _require_one_config(self, table: RecordTable[WindowRecord]) -> None:
        """Name the fields in which configurations differ; one more exchange, if they do."""
        configs = table.column("config")
        if (configs == configs[0]).all() or table.largest("failed") or table.largest("closing"):
            return
        texts = self._exchange.exchange(self.config.to_text())
        raise ReplicaFailedError(config_differences(texts))

    def _require_own_shards(self, table: RecordTable[WindowRecord]) -> None:
        """Notice replicas that read the same items; one more exchange, before the first step."""
        if not self._compares_heads or table.largest("failed") or table.largest("closing"):
            return
        self._compares_heads = False
        compare_heads(self._exchange.exchange(self._draws.head()))

    def _finish_step(self, plan: StepPlan) -> FinishedStep:
        micro_batches = self._held.emit(plan, payloads=self._exchange.payloads)
        fit, self._fit = self._fit, None
        header = StepHeader(totals=plan.totals, micro_batches=plan.micro_batches)
        progress = self.progress()
        return FinishedStep(
            header=header,
            micro_batches=micro_batches,
            progress=progress,
            fit=fit,
            window_bytes=progress.window_bytes,
        )

    def _share(
        self,
        build: Callable[[], AnyRecord],
        blank: AnyRecord,
    ) -> list[bytes]:
        """Exchange a record; when it cannot be built, tell the others before raising."""
        if self._planner.is_closing:  # nothing more is drawn or measured
            failed, message = bool(self._untold), self._untold
            last = replace(blank, closing=True, failed=failed, message=message)
            return self._exchange.exchange(last.to_bytes())
        try:
            record = build().to_bytes()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._exchange.exchange(replace(blank, failed=True, message=message).to_bytes())
            raise
        return self._exchange.exchange(record)

    def _count_down(self, calibration: _Calibration) -> None:
        """Fit the cost model when its step has come: one exchange, entered by all replicas."""
        calibration.left -= 1
        if calibration.left >= 0:
            return
        self._calibration = None
        self._until_trained()
        sums = self._share(
            lambda: self._planner.calibration_record(calibration.measure()),
            CalibrationRecord(step=0),
        )
        self._fit = self._planner.fit_cost(RecordTable(CalibrationRecord, sums))

    def _share_lists(self, table: RecordTable[PlanRecord]) -> list[bytes]:
        """Exchange sample lists; see `_share`."""
        try:
            own = self._planner.sample_list(table)
        except Exception:
            self._exchange.exchange(failed_list(room=table.largest("num_samples")))
            raise
        return self._exchange.exchange(own)

    def _window_record(self) -> WindowRecord:
        if self._fit is not None:  # here, so that others are told if a cost does not fit
            self._planner.set_cost(self._fit.cost, linear_ps=self._fit.linear_ps)
        self._draw()
        return self._planner.window_record()

    def _plan_record(self) -> PlanRecord:
        self._draw()
        wait_us, self._wait_s = round(self._wait_s * 1e6), 0.0
        return self._planner.plan_record(wait_us=wait_us)

    def _draw(self) -> None:
        started = time.perf_counter()
        self._draws.known_bad = self.bad_records.known
        for position, item in self._draws.drawn(self._planner, workers=self._in_force()):
            self._observe(position, item)
        self._wait_s += time.perf_counter() - started

    def _in_force(self) -> Workers:
        return replace(self._workers, timeout_s=self.fetch_limit_s)

    def _observe(self, position: int, item: Sample | Skipped) -> None:
        if isinstance(item, Skipped):
            self._held.leave_out(item)
            self.bad_records.note(position, item)
            self._planner.leave_out(is_bad=item.reason is SkipReason.BAD_RECORD)
            return
        self._held.add(position, item)
        self._planner.observe(
            position,
            num_tokens=len(item),
            num_loss_tokens=item.num_loss_tokens,
            truncated=item.truncated > 0,
            num_patches=item.num_patches,
            num_bytes=self._wire_size(item),
        )

    def _wire_size(self, sample: Sample) -> int:
        return wire_size(sample) if self._moves else 0


def _at_once() -> None:
    """In place of `until_trained` where steps are not made ahead."""
