"""The data iterator of one replica: per step a header, then its micro-batches.

Draws samples, runs the planner, assembles. Must not know Megatron's globals; other replicas are
reached only through the `Exchange` it is given. A step's header travels through the iterator like
any item, so whoever replays the iterator replays the step's M with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from odb_megatron.data.replica_stream import PositionFeed, ReplicaStream
from odb_megatron.data.sample import Hole, Sample
from odb_megatron.data.sample_hand_over import HandOver, Payloads
from odb_megatron.data.sample_wire import wire_size
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatch, assemble, assemble_idle
from odb_megatron.plan.calibration import CostFit, MicroBatchTime
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.exchange_choice import ExchangeChoice
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import ExchangeMode
from odb_megatron.plan.records import (
    AnyRecord,
    CalibrationRecord,
    PlanRecord,
    RecordTable,
    WindowRecord,
)
from odb_megatron.plan.sample_list import failed_list
from odb_megatron.plan.state import NOT_CALIBRATED, saved_cost
from odb_megatron.plan.step import StepPlan, StepTotals

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """First item of a step.

    Attributes:
        totals: the step, summed over replicas.
        micro_batches: this replica's stream positions per micro-batch.
    """

    totals: StepTotals
    micro_batches: tuple[tuple[int, ...], ...]


@dataclass(slots=True, kw_only=True)
class _Calibration:
    measure: Callable[[], Sequence[MicroBatchTime]]
    left: int
    on_fit: Callable[[CostFit], None]


class StepLoader:
    """Iterator (and, for evaluation, re-iterable) over step headers and micro-batches.

    Args:
        stream: the run's stream.
        config: plan configuration; `num_replicas` must be that of `exchange`.
        exchange: this loader's own channel to the other replicas; with `payloads` where
            `config.exchange` is not `none`.
        num_workers: data-loader workers.
        consumed: stream positions consumed before (resume).
        on_step: called with each header before it is handed out.

    Raises:
        ValueError: `config.exchange` needs a channel for samples.
    """

    def __init__(
        self,
        stream: SampleStream,
        config: PlanConfig,
        *,
        exchange: Exchange,
        num_workers: int = 0,
        consumed: int = 0,
        on_step: Callable[[StepHeader], None] | None = None,
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
        self._hand_over: HandOver | None = None
        self._num_workers = num_workers
        self._on_step = on_step
        self._first_consumed = consumed
        self.source_counts = [SourceCounts() for _ in stream.source_names]
        self._planner = ReplicaPlanner(config, replica=exchange.replica, consumed=consumed)
        self._source: ReplicaStream | None = None
        self._feed = PositionFeed()
        self._held: dict[int, Sample] = {}
        self._wait_s = 0.0
        self._calibration: _Calibration | None = None
        self._fit: CostFit | None = None
        self._pending: deque[tuple[int, ...]] = deque()  # micro-batches of the current step

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
            on_fit: called when the model has been decided, before the next step's header.
        """
        self._calibration = _Calibration(measure=measure, left=after, on_fit=on_fit)

    @property
    def stream(self) -> SampleStream:
        """The stream the samples come from."""
        return self._stream

    def __len__(self) -> int:
        """Steps of one pass over the stream, for loaders with the policy `samples`."""
        left = self._config.total - self._first_consumed
        return -(-left // self._config.global_batch_size)

    def __iter__(self) -> StepLoader:
        """Start again from where the loader was made (Megatron's full validation iterates so)."""
        return StepLoader(
            self._stream,
            self._config,
            exchange=self._exchange,
            num_workers=self._num_workers,
            consumed=self._first_consumed,
            on_step=self._on_step,
        )

    def __next__(self) -> StepHeader | MicroBatch:
        # No generator: it would tie this object into a cycle, and data-loader workers that wait
        # for the garbage collector stop only after torch's time-out of 5 s.
        if self._pending:
            micro_batch = self._assemble(self._pending.popleft())
            if not self._pending and self._hand_over is not None:
                self._hand_over.finish()
                self._hand_over = None
            return micro_batch
        if self._planner.is_finished:
            raise StopIteration
        plan = self._plan_step()
        header = StepHeader(totals=plan.totals, micro_batches=plan.micro_batches)
        if self._on_step is not None:
            self._on_step(header)
        self._pending.extend(plan.micro_batches)
        return header

    @property
    def exchange_choice(self) -> ExchangeChoice | None:
        """See `ReplicaPlanner.exchange_choice`."""
        return self._planner.exchange_choice

    @property
    def exchanges(self) -> bool | None:
        """Whether replicas hand samples to each other; None while `auto` may choose otherwise."""
        state: Mapping[str, Any] = self._planner.state_dict()
        return None if state["exchanges"] < 0 else bool(state["exchanges"])

    def state_dict(self) -> dict[str, object]:
        """Planner state after the last step handed out; see `ReplicaPlanner.state_dict`."""
        return self._planner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: the window's samples are preprocessed again.

        Raises:
            ValueError: see `ReplicaPlanner.load_state_dict`.
        """
        fetched: dict[int, tuple[int, ...]] = {}
        for position, _, _ in state.get("window", []):
            item = self._stream.fetch(position)
            if isinstance(item, Hole):
                fetched[position] = (0, 0, 0)
            else:
                self._held[position] = item
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
        self._planner.set_target(RecordTable(WindowRecord, windows))
        plans = self._share(self._plan_record, PlanRecord(target=0))
        table = RecordTable(PlanRecord, plans)
        lists = self._share_lists(table) if self._planner.wants_exchange(table) else []
        plan = self._planner.commit(table, lists)
        for position in plan.reassigned.given:
            del self._held[position]
        if plan.sends or plan.receives:
            payloads = self._exchange.payloads
            assert payloads is not None, "checked in the constructor"
            self._hand_over = HandOver.start(plan, self._held, payloads=payloads)
        if self._planner.is_finished:
            self._source = None  # all is drawn: its workers end here
        return plan

    def _share(
        self,
        build: Callable[[], AnyRecord],
        blank: AnyRecord,
    ) -> list[bytes]:
        """Exchange a record; when it cannot be built, tell the others before raising."""
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
        sums = self._share(
            lambda: self._planner.calibration_record(calibration.measure()),
            CalibrationRecord(step=0),
        )
        self._fit = self._planner.fit_cost(RecordTable(CalibrationRecord, sums))
        calibration.on_fit(self._fit)

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
            fit, self._fit = self._fit, None
            self._planner.set_cost(fit.cost, linear_ps=fit.linear_ps)
        self._draw()
        return self._planner.window_record()

    def _plan_record(self) -> PlanRecord:
        self._draw()
        wait_us, self._wait_s = round(self._wait_s * 1e6), 0.0
        return self._planner.plan_record(wait_us=wait_us)

    def _draw(self) -> None:
        started = time.perf_counter()
        self._feed.extend(self._planner.upcoming())
        while positions := self._planner.draw():
            source = self._open(positions[0])
            for position in positions:
                self._observe(position, source.take(position))
        self._wait_s += time.perf_counter() - started

    def _open(self, first: int) -> ReplicaStream:
        """Return this replica's samples; opened when the first position is drawn."""
        if self._source is None:
            config = self._config
            if config.is_online:
                self._source = ReplicaStream(
                    self._stream, self._feed, num_workers=self._num_workers, lead=config.lead
                )
            else:
                own = config.own_positions(self._exchange.replica)
                shard = range(first, own.stop, own.step)
                self._source = ReplicaStream(self._stream, shard, num_workers=self._num_workers)
        return self._source

    def _observe(self, position: int, item: Sample | Hole) -> None:
        if isinstance(item, Hole):
            self.source_counts[item.source].add_hole(item.reason, item.message)
            self._planner.observe(position, num_tokens=0, num_loss_tokens=0)
            return
        self._held[position] = item
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

    def _assemble(self, positions: tuple[int, ...]) -> MicroBatch:
        multiple, total = self._config.multiple, self._config.micro_batch_length
        if not positions:
            return assemble_idle(multiple=multiple, total=total)
        samples = [self._take(position) for position in positions]
        for sample in samples:
            self.source_counts[sample.source].add_sample(
                num_tokens=len(sample),
                num_loss_tokens=sample.num_loss_tokens,
                truncated=sample.truncated > 0,
                solo=padded_length(len(sample), multiple) > self._config.token_budget
                or sample.num_patches > self._config.max_patches > 0,
            )
        return assemble(samples, positions=positions, multiple=multiple, total=total)

    def _take(self, position: int) -> Sample:
        """Return a sample of the current step: this replica's own, or handed over."""
        if position not in self._held and self._hand_over is not None:
            return self._hand_over.take(position)
        return self._held.pop(position)
