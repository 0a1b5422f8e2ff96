"""A planned step: one replica's micro-batches, and what all replicas know of the step.

Pure values, and how they follow from the gathered records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.exchange import Assignment
from odb_megatron.plan.records import PlanRecord, RecordTable

__all__ = ["Parcel", "Reassigned", "StepPlan", "StepTotals", "parcels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """What all replicas know of a step, summed over them.

    Attributes:
        step: 0-based step of the run.
        num_micro_batches: M, equal everywhere.
        num_consumed: stream positions consumed; `num_samples + num_left_out`.
        consumed_before: positions consumed before this step.
        num_samples: samples emitted.
        num_left_out: positions that emitted nothing.
        num_bad: those of them whose records are bad.
        num_truncated: samples that were cut.
        num_tokens: tokens before padding.
        num_padded_tokens: tokens after padding each sample to the length multiple.
        num_squared_tokens: sum of squared lengths.
        num_loss_tokens: positions that carry loss.
        num_idle: idle micro-batches.
        num_split: micro-batches that were split to meet M.
        costs: cost per replica, micro-batch prices included.
        wait_us: longest wait for data of any replica, microseconds.
        is_final: no sample is left on any replica after this step.
        num_reassigned: positions that one replica held and another fetches anew.
        num_moved: samples that another replica trains than the one that drew them.
        bytes_moved: their bytes on the wire.
        costs_before: `costs` without the exchange; empty where there was none.
    """

    step: int
    num_micro_batches: int
    num_consumed: int
    consumed_before: int
    num_samples: int
    num_left_out: int
    num_truncated: int
    num_tokens: int
    num_padded_tokens: int
    num_squared_tokens: int
    num_loss_tokens: int
    num_idle: int
    num_split: int
    costs: tuple[int, ...]
    wait_us: int
    is_final: bool
    num_bad: int = 0
    num_reassigned: int = 0
    num_moved: int = 0
    bytes_moved: int = 0
    costs_before: tuple[int, ...] = ()

    @classmethod
    def add_up(
        cls,
        table: RecordTable[PlanRecord],
        *,
        step: int,
        consumed: int,
        num_unassigned: int,
        count: int,
        fixed: int,
    ) -> StepTotals:
        """Sum all replicas' second records.

        Args:
            table: the records.
            step: 0-based step of the run.
            consumed: positions consumed before it.
            num_unassigned: positions no replica has been given yet.
            count: micro-batches of the step.
            fixed: price of a micro-batch.
        """
        filled = np.minimum(table.column("num_samples"), count)
        num_samples, num_left_out = table.total("num_samples"), table.total("num_left_out")
        return cls(
            step=step,
            num_micro_batches=count,
            num_consumed=num_samples + num_left_out,
            consumed_before=consumed,
            num_samples=num_samples,
            num_left_out=num_left_out,
            num_bad=table.total("num_bad"),
            num_truncated=table.total("num_truncated"),
            num_tokens=table.total("num_tokens"),
            num_padded_tokens=table.total("num_padded_tokens"),
            num_squared_tokens=table.total("num_squared_tokens"),
            num_loss_tokens=table.total("num_loss_tokens"),
            num_idle=int((count - filled).sum()),
            num_split=int((filled - table.column("num_micro_batches")).sum()),
            costs=tuple((table.column("cost") + count * fixed).tolist()),
            wait_us=table.largest("wait_us"),
            is_final=table.total("num_remaining") + num_unassigned == 0,
        )

    def exchanged(self, assignment: Assignment, *, fixed: int) -> StepTotals:
        """Return the totals of the same step after an exchange.

        Args:
            assignment: who trains what.
            fixed: price of a micro-batch.
        """
        count, num_replicas = assignment.count, len(self.costs)
        if assignment.is_local:
            return replace(self, costs_before=self.costs)
        num_samples = np.bincount(assignment.replica_of, minlength=num_replicas)
        filled = np.minimum(num_samples, count)
        return replace(
            self,
            num_micro_batches=count,
            num_idle=int((count - filled).sum()),
            num_split=int(np.maximum(filled - assignment.needed, 0).sum()),
            costs=tuple(cost + count * fixed for cost in assignment.costs(num_replicas)),
            num_moved=int(assignment.moved.sum()),
            bytes_moved=assignment.bytes_moved,
            costs_before=self.costs,
        )

    @property
    def balance(self) -> float:
        """Mean over max cost of the replicas; 1.0 when there is no cost."""
        return _balance(self.costs)

    @property
    def balance_before(self) -> float:
        """`balance` without the exchange."""
        return _balance(self.costs_before or self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one replica hands to another in a step.

    Attributes:
        peer: the other replica.
        positions: stream positions, ascending.
        sizes: bytes of each on the wire.
    """

    peer: int
    positions: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassigned:
    """Positions that changed replicas in a step, before it was selected; see `reassign`.

    Attributes:
        given: positions this replica held; others fetch them.
        taken: positions others held; this replica fetches them, before any from `cursor` on.
        cursor: first position that was not assigned to anyone.
        num_all: positions that changed replicas anywhere.
    """

    given: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    cursor: int = 0
    num_all: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One replica's share of a step.

    Attributes:
        totals: see `StepTotals`.
        micro_batches: stream positions per micro-batch; an empty one is idle.
        sends: parcels for other replicas, by peer.
        receives: parcels from other replicas, by peer.
        reassigned: positions that this replica gave to others, or took over.
    """

    totals: StepTotals
    micro_batches: tuple[tuple[int, ...], ...]
    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()
    reassigned: Reassigned = Reassigned()


def parcels(assignment: Assignment, replica: int) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
    """Return what a replica sends and what it receives."""
    samples, target = assignment.samples, assignment.replica_of
    moved = assignment.moved
    return (
        _parcels(assignment, np.flatnonzero(moved & (samples.owner == replica)), target),
        _parcels(assignment, np.flatnonzero(moved & (target == replica)), samples.owner),
    )


def _parcels(
    assignment: Assignment, chosen: npt.NDArray[np.intp], peers: npt.NDArray[np.int64]
) -> tuple[Parcel, ...]:
    positions, sizes = assignment.samples.position, assignment.samples.payload
    found = []
    for peer in np.unique(peers[chosen]).tolist():
        own = chosen[peers[chosen] == peer]
        own = own[np.argsort(positions[own], kind="stable")]
        found.append(
            Parcel(
                peer=peer,
                positions=tuple(positions[own].tolist()),
                sizes=tuple(sizes[own].tolist()),
            )
        )
    return tuple(found)


def _balance(costs: tuple[int, ...]) -> float:
    most = max(costs)
    return sum(costs) / len(costs) / most if most else 1.0
