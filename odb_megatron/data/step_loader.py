"""The data iterator of one replica: per step a header, then its micro-batches.

Draws samples, runs the planner, assembles. Must not know Megatron's globals; other replicas are
reached only through the `Exchange` it is given. A step's header travels through the iterator like
any item, so whoever replays the iterator replays the step's M with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from odb_megatron.data.replica_stream import PositionFeed, ReplicaStream
from odb_megatron.data.sample import Hole, Sample
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatch, assemble, assemble_idle
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
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


class StepLoader:
    """Iterator (and, for evaluation, re-iterable) over step headers and micro-batches.

    Args:
        stream: the run's stream.
        config: plan configuration; `num_replicas` must be that of `exchange`.
        exchange: this loader's own channel to the other replicas.
        num_workers: data-loader workers.
        consumed: stream positions consumed before (resume).
        on_step: called with each header before it is handed out.
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
        self._stream = stream
        self._config = config
        self._exchange = exchange
        self._num_workers = num_workers
        self._on_step = on_step
        self._first_consumed = consumed
        self.source_counts = [SourceCounts() for _ in stream.source_names]
        self._planner = ReplicaPlanner(config, replica=exchange.replica, consumed=consumed)
        self._source: ReplicaStream | None = None
        self._feed = PositionFeed()
        self._held: dict[int, Sample] = {}
        self._wait_s = 0.0
        self._pending: deque[tuple[int, ...]] = deque()  # micro-batches of the current step

    @property
    def config(self) -> PlanConfig:
        """Plan configuration in force."""
        return self._config

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
            return self._assemble(self._pending.popleft())
        if self._planner.is_finished:
            raise StopIteration
        plan = self._plan_step()
        header = StepHeader(totals=plan.totals, micro_batches=plan.micro_batches)
        if self._on_step is not None:
            self._on_step(header)
        self._pending.extend(plan.micro_batches)
        return header

    def state_dict(self) -> dict[str, object]:
        """Planner state after the last step handed out; see `ReplicaPlanner.state_dict`."""
        return self._planner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: the window's samples are preprocessed again.

        Raises:
            ValueError: see `ReplicaPlanner.load_state_dict`.
        """
        fetched: dict[int, tuple[int, int, bool]] = {}
        for position, _, _ in state.get("window", []):
            item = self._stream.fetch(position)
            if isinstance(item, Hole):
                fetched[position] = (0, 0, False)
            else:
                self._held[position] = item
                fetched[position] = (len(item), item.num_loss_tokens, item.truncated > 0)
        self._planner.load_state_dict(state, fetched=fetched)

    def _plan_step(self) -> StepPlan:
        windows = self._share(self._window_record, WindowRecord(config=0, step=0, position=0))
        self._planner.set_target(RecordTable(WindowRecord, windows))
        plans = self._share(self._plan_record, PlanRecord(target=0))
        plan = self._planner.commit(RecordTable(PlanRecord, plans))
        if self._planner.is_finished:
            self._source = None  # all is drawn: its workers end here
        return plan

    def _share(
        self,
        build: Callable[[], WindowRecord | PlanRecord],
        blank: WindowRecord | PlanRecord,
    ) -> list[bytes]:
        """Exchange a record; when it cannot be built, tell the others before raising."""
        try:
            record = build().to_bytes()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._exchange.exchange(replace(blank, failed=True, message=message).to_bytes())
            raise
        return self._exchange.exchange(record)

    def _window_record(self) -> WindowRecord:
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
        )

    def _assemble(self, positions: tuple[int, ...]) -> MicroBatch:
        multiple = self._config.multiple
        if not positions:
            return assemble_idle(multiple=multiple)
        samples = [self._held.pop(position) for position in positions]
        for sample in samples:
            self.source_counts[sample.source].add_sample(
                num_tokens=len(sample),
                num_loss_tokens=sample.num_loss_tokens,
                truncated=sample.truncated > 0,
                solo=padded_length(len(sample), multiple) > self._config.token_budget,
            )
        return assemble(samples, positions=positions, multiple=multiple)
