"""The `odb/...` series of a step: what TensorBoard and W&B are told of it.

Pure: no writer, no clock. A series that a rank cannot know is left out, not zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_megatron.report.step_record import StepRecord

__all__ = ["SERIES", "Series", "series_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series.

    Attributes:
        name: behind `odb/`.
        text: what it is. "(all)" is said of sums over replicas; the others are of the replica of
            the rank that writes.
    """

    name: str
    text: str


SERIES = (
    Series(name="micro-batches", text="micro-batches of each replica in the step (M)"),
    Series(name="samples", text="samples of the step (all)"),
    Series(name="tokens", text="tokens of the step before padding (all)"),
    Series(name="loss-tokens", text="tokens of the step that carry loss (all)"),
    Series(name="tokens-per-second", text="tokens before padding (all) over the step's seconds"),
    Series(name="fill", text="tokens over the room of all micro-batches of the step (all)"),
    Series(name="padding", text="share of computed tokens that are padding (all)"),
    Series(name="balance", text="mean over max predicted cost of the replicas"),
    Series(name="idle", text="idle micro-batches of the step (all)"),
    Series(name="moved-samples", text="samples sent to another replica than their reader (all)"),
    Series(name="moved-bytes", text="their bytes (all)"),
    Series(name="left-out", text="samples skipped, bad or overlong (all)"),
    Series(name="bad-records", text="bad records among them (all)"),
    Series(name="truncated", text="samples that were cut (all)"),
    Series(name="step-seconds", text="seconds since the previous step ended"),
    Series(name="wait-seconds", text="seconds the trainer waited for the step's data"),
    Series(name="plan-seconds", text="seconds that making the step took, in the background"),
    Series(name="fetch-wait-seconds", text="longest wait of any planner for samples of the step"),
    Series(name="queue-steps", text="finished steps that wait for the trainer"),
    Series(name="queue-bytes", text="their bytes"),
    Series(name="peak-memory-bytes", text="most memory taken so far"),
    Series(name="reserved-memory-bytes", text="most memory that torch's allocator held"),
    Series(name="shapes", text="different lengths of micro-batches so far"),
)


def series_of(record: StepRecord) -> dict[str, float]:
    """Return the values of a step, by name, in the order of `SERIES`."""
    is_packed = record.fill is not None
    values: dict[str, float | None] = {
        "micro-batches": record.num_micro_batches,
        "samples": record.samples,
        "tokens": record.tokens,
        "loss-tokens": record.loss_tokens,
        "tokens-per-second": record.tokens / record.step_s if record.step_s > 0 else None,
        "fill": record.fill,
        "padding": (1 - record.tokens / record.computed_tokens if record.computed_tokens else None),
        "balance": record.balance,
        "idle": record.idle if is_packed else None,
        "moved-samples": record.moved if is_packed else None,
        "moved-bytes": record.bytes_moved if is_packed else None,
        "left-out": record.left_out,
        "bad-records": record.bad_records,
        "truncated": record.truncated,
        "step-seconds": record.step_s,
        "wait-seconds": record.wait_s if is_packed else None,
        "plan-seconds": record.plan_s if is_packed else None,
        "fetch-wait-seconds": record.fetch_wait_s if is_packed else None,
        "queue-steps": record.queue_steps if is_packed else None,
        "queue-bytes": record.queue_bytes if is_packed else None,
        "peak-memory-bytes": record.peak_memory_bytes,
        "reserved-memory-bytes": record.reserved_memory_bytes or None,
        "shapes": record.num_shapes,
    }
    return {
        series.name: float(value) for series in SERIES if (value := values[series.name]) is not None
    }
