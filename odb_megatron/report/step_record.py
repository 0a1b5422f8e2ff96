"""The record of one optimizer step, and how it is read back from what was written.

Must not compute what a plan already knows; numbers are taken from `StepTotals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

__all__ = ["StepRecord", "record_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as one replica saw it; fields marked (all) are sums over replicas.

    Attributes:
        iteration: 1-based iteration, as Megatron logs it.
        loss: sum of weighted token losses over `loss_weight` (all); None where this rank has none.
        grad_norm: gradient norm before clipping, or None.
        learning_rate: learning rate of the step.
        consumed_samples: samples consumed after the step (all).
        samples: samples trained (all).
        left_out: samples skipped, by `--odb-overlong` or `--odb-max-bad-records` (all).
        tokens: tokens before padding (all).
        computed_tokens: tokens the model ran, padding included (all).
        loss_tokens: positions that carried loss (all).
        loss_weight: sum of their weights (all): `loss_tokens` where all are 1, the samples that
            have any with `--odb-loss-per sample`.
        num_micro_batches: M.
        idle: idle micro-batches (all).
        fill: tokens over M * replicas * token budget; None for the padded baseline.
        balance: mean over max cost of the replicas; None for the padded baseline.
        moved: samples that another replica trained than the one that had read them (all).
        bytes_moved: their bytes on the wire (all).
        wait_s: seconds this replica's trainer waited for the step; 0 for the padded baseline.
        step_s: wall-clock seconds since the previous step ended, evaluation and saving excluded.
        lengths: tokens of this replica's samples, per micro-batch; an empty one is idle.
        ids: the same samples as "source:record@epoch"; empty in a dry run.
        collectives: broadcasts inside this replica that brought the step to its ranks.
        bytes_delivered: bytes of one copy of what they brought.
        reports: point-to-point transfers of the loss to this replica's source rank.
        context_balance: mean over max of the attention cost of this replica's context-parallel
            ranks; None without context parallelism.
        idle_router_share: share of the tokens that routers' losses see which are those of idle
            micro-batches (all); None for dense models.
        fetch_wait_s: longest that a replica's planner waited for samples of the step, seconds.
        queue_bytes: bytes of the finished steps that wait behind this one.
        peak_memory_bytes: most device memory that tensors have taken so far on this replica's first
            or last pipeline stage; without a device, that the process has.
        reserved_memory_bytes: the same of torch's allocator, 0 without a device.
        num_shapes: different lengths of micro-batches on this replica so far.
        widths: tokens that this replica's micro-batches computed, padding included.
        costs: their predicted cost, in that of one token that attends to nothing; empty for the
            padded baseline.
        micro_batch_s: seconds from one micro-batch's arrival to the next one's, of the last one to
            the end of its backward pass; empty where that is not known (pipelining, padded
            baseline).
        plan_s: seconds that making the step took this replica, in the background: the waits for
            samples and for other replicas are in it.
        queue_steps: finished steps that wait behind this one.
        truncated: samples that were cut (all).
        bad_records: samples skipped because their records are bad (all).
        patches: image patches of this replica's micro-batches; empty where none has any.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    consumed_samples: int
    samples: int
    left_out: int
    tokens: int
    computed_tokens: int
    loss_tokens: int
    num_micro_batches: int
    idle: int
    fill: float | None
    balance: float | None
    moved: int
    bytes_moved: int
    wait_s: float
    step_s: float
    lengths: tuple[tuple[int, ...], ...]
    ids: tuple[tuple[str, ...], ...] = ()
    collectives: int = 0
    bytes_delivered: int = 0
    reports: int = 0
    context_balance: float | None = None
    idle_router_share: float | None = None
    fetch_wait_s: float = 0.0
    queue_bytes: int = 0
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    num_shapes: int = 0
    widths: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    micro_batch_s: tuple[float, ...] = ()
    plan_s: float = 0.0
    queue_steps: int = 0
    truncated: int = 0
    bad_records: int = 0
    patches: tuple[int, ...] = ()
    loss_weight: float = 0.0


def record_of(values: Mapping[str, Any]) -> StepRecord:
    """Return the record that `dataclasses.asdict` and JSON made these values of.

    Raises:
        ValueError: a field that is missing, unknown or of another type.
    """
    unknown = sorted(values.keys() - _READERS.keys())
    if unknown:
        raise ValueError(f"there is no field {unknown[0]!r}: another version wrote it")
    missing = sorted(_NEEDED - values.keys())
    if missing:
        raise ValueError(f"field {missing[0]!r} is missing")
    return StepRecord(**{name: _READERS[name](name, value) for name, value in values.items()})


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"field {name!r} is {value!r:.80}: a whole number was expected")
    return value


def _real(name: str, value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"field {name!r} is {value!r:.80}: a number was expected")
    return float(value)


def _real_or_none(name: str, value: Any) -> float | None:
    return None if value is None else _real(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} holds {value!r:.80}: a text was expected")
    return value


def _row_of(read: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
    def row(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"field {name!r} is {value!r:.80}: a list was expected")
        return tuple(read(name, one) for one in value)

    return row


_BY_TYPE: dict[str, Callable[[str, Any], Any]] = {
    "int": _whole,
    "float": _real,
    "float | None": _real_or_none,
    "tuple[int, ...]": _row_of(_whole),
    "tuple[float, ...]": _row_of(_real),
    "tuple[tuple[int, ...], ...]": _row_of(_row_of(_whole)),
    "tuple[tuple[str, ...], ...]": _row_of(_row_of(_text)),
}
_READERS = {field.name: _BY_TYPE[str(field.type)] for field in fields(StepRecord)}
_NEEDED = {field.name for field in fields(StepRecord) if field.default is MISSING}
