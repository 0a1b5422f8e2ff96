"""A planned step: one replica's micro-batches, and what all replicas know of the step.

Pure values, and how they follow from the gathered records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odb_megatron.plan.records import PlanRecord, RecordTable

__all__ = ["StepPlan", "StepTotals"]


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

    @property
    def balance(self) -> float:
        """Mean over max cost of the replicas; 1.0 when there is no cost."""
        most = max(self.costs)
        return sum(self.costs) / len(self.costs) / most if most else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One replica's share of a step.

    Attributes:
        totals: see `StepTotals`.
        micro_batches: stream positions per micro-batch; an empty one is idle.
    """

    totals: StepTotals
    micro_batches: tuple[tuple[int, ...], ...]
