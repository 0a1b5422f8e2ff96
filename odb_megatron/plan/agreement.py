"""What must hold of all replicas' records before a step is decided from them.

Pure: every replica checks the same records, so all raise the same error in the same exchange.
Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from odb_megatron.plan.records import RecordTable, ReplicaFailedError, check_agreement
from odb_megatron.plan.step import StepTotals
from odb_megatron.plan.termination import LoaderClosedError, Termination

__all__ = ["agreed_table", "check_none_lost"]


def agreed_table(
    records: Any, *, names: Sequence[str], step: int, termination: Termination
) -> RecordTable[Any]:
    """Return gathered records as a table; an error beats closing, and closing beats a mismatch.

    Args:
        records: one per replica, in replica order, or their table.
        names: fields that must be equal.
        step: the step being planned.
        termination: closed when a replica closes.

    Raises:
        ReplicaFailedError: a replica reported an error, or they do not agree.
        LoaderClosedError: a replica closed its loader.
    """
    if not isinstance(records, RecordTable):
        records = RecordTable.from_records(records)
    check_agreement(records, names=())
    closing = records.column("closing")
    if closing.any():
        termination.close()
        raise LoaderClosedError(f"replica {int(closing.argmax())} closed its loader in step {step}")
    check_agreement(records, names=names)
    table: RecordTable[Any] = records
    return table


def check_none_lost(totals: StepTotals, *, remaining: int, total: int) -> None:
    """Raise unless every position is consumed or remaining after a step.

    Args:
        totals: the step's.
        remaining: positions that no replica has consumed after it.
        total: positions of the run.

    Raises:
        ReplicaFailedError: the sum is another.
    """
    if totals.consumed_before + totals.num_consumed + remaining != total:
        raise ReplicaFailedError(
            f"step {totals.step} loses samples: {totals.consumed_before} consumed before, "
            f"{totals.num_samples} emitted, {totals.num_left_out} left out and {remaining} "
            f"remaining are not the {total} of the run; this is a defect of "
            "odb_megatron, please report"
        )
