"""A finished step on its way to the trainer, and where the loader stood when it was finished.

Values only: whatever belongs to a step travels with it, so that the trainer's side never asks a
planner that is already some steps further.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from odb_megatron.data.bad_records import BadRecords
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.thd import MicroBatchLayout
from odb_megatron.plan.calibration import CostFit
from odb_megatron.plan.exchange_choice import ExchangeChoice
from odb_megatron.plan.state import plain_state
from odb_megatron.plan.step import StepTotals

__all__ = ["FinishedStep", "Progress", "StepHeader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """First item of a step.

    Attributes:
        totals: the step, summed over replicas.
        micro_batches: this replica's stream positions per micro-batch.
    """

    totals: StepTotals
    micro_batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a leader's loader stands after a step, or before the first.

    Attributes:
        snapshot: see `ReplicaPlanner.snapshot`.
        source_counts: what the replica has consumed of each source.
        exchange_choice: see `ReplicaPlanner.exchange_choice`.
        window_bytes: bytes of the samples that are preprocessed and not emitted.
        num_bad: bad records of all replicas since the run's start.
        bad_records: the loader's own, which go on.
        source: state of an iterable source, see `ReplicaItems.state`; None for random access.
    """

    snapshot: dict[str, Any]
    source_counts: tuple[SourceCounts, ...]
    exchange_choice: ExchangeChoice | None
    window_bytes: int
    num_bad: int = 0
    bad_records: BadRecords = field(default_factory=lambda: BadRecords(None))
    source: dict[str, Any] | None = None

    @property
    def exchanges(self) -> bool | None:
        """Whether replicas hand samples to each other; None while `auto` may choose otherwise."""
        state = self.snapshot["exchanges"]
        return None if state < 0 else bool(state)

    def state_dict(self) -> dict[str, object]:
        """See `ReplicaPlanner.state_dict`."""
        return plain_state(self.snapshot)

    def bad_records_state(self) -> dict[str, object]:
        """Return what a resumed run has to know of bad records; see `BadRecords`."""
        positions = self.bad_records.after(self.snapshot["step"])
        return {"num": self.num_bad, "positions": positions}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step as one rank trains it.

    Attributes:
        header: first item for the trainer.
        micro_batches: the others.
        progress: the loader's after this step; None on ranks that do not lead their replica.
        fit: the cost model that is in force from this step on, if it was fitted right before it.
        collectives: broadcasts that brought it to this rank.
        bytes_delivered: their bytes.
        window_bytes: the leader's, see `Progress`; on all ranks of the replica.
        plan_us: microseconds that the leader took to make it, waits included.
    """

    header: StepHeader
    micro_batches: tuple[MicroBatchLayout, ...]
    progress: Progress | None = None
    fit: CostFit | None = None
    collectives: int = 0
    bytes_delivered: int = 0
    window_bytes: int = 0
    plan_us: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        own = sum(value.nbytes for item in self.micro_batches for value in _tensors(item).values())
        layouts = (item.images for item in self.micro_batches)
        return own + sum(images.nbytes for images in layouts if images is not None)

    def pinned(self) -> FinishedStep:
        """Return it in page-locked memory, which the device copies from without waiting."""
        return replace(self, micro_batches=tuple(map(_pinned, self.micro_batches)))


def _pinned(item: MicroBatchLayout) -> MicroBatchLayout:
    pinned: dict[str, Any] = {name: value.pin_memory() for name, value in _tensors(item).items()}
    return replace(item, **pinned)


def _tensors(item: MicroBatchLayout) -> dict[str, Tensor]:
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
