"""The fixed-size records that replicas exchange before each step.

Pure: values, their byte form, and a table of all replicas' records that is read column by column.
A record's size depends on neither window, budget nor number of replicas.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "RECORD_BYTES",
    "AnyRecord",
    "CalibrationRecord",
    "PlanRecord",
    "RecordTable",
    "ReplicaFailedError",
    "WindowRecord",
    "check_agreement",
]

RECORD_BYTES = 256
"""Wire size of every record."""

_FEW = 128  # so many numbers are summed as Python integers faster than by numpy


class ReplicaFailedError(RuntimeError):
    """Another replica reported an error, or the replicas do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """First exchange of a step: what a replica holds, before anything is selected.

    Attributes:
        config: digest of everything that must be equal on all replicas (signed 64 bit).
        step: step being planned, counted from the start of the run.
        position: first stream position of the step (all replicas' consumed positions so far).
        num_held: samples in the window.
        cost_held: their cost.
        num_undrawn: positions of this replica that are known to be its own and not drawn yet.
        num_observed: samples observed since the last record.
        tokens_observed: their padded tokens.
        cost_observed: their cost.
        spread_observed: sum of their squared excess cost (`target.excess`), in tokens squared.
        cost_due: cost of the samples that must be emitted in this step.
        micro_batches_due: micro-batches they need.
        cost_per_token: cost per padded token that this replica can sustain in this step.
        num_large: samples that cost more than an ordinary micro-batch (scope `microbatch`).
        large_wait_0, large_wait_1: for the two of them that arrived first, how many samples this
            replica has emitted beyond them (negative: it has not come to them yet).
        large_cost_0, large_cost_1: what they cost, 0 for none.
        failed: this replica met an error and will raise after the exchange.
        closing: this replica ends its loader with this exchange.
        message: the error, cut to fit; it takes the room of the fields below.
        offer_0, offer_1, offer_2, offer_3: samples that another replica may take over, as
            `reassign.offers` writes them; 0 for none.
    """

    config: int
    step: int
    position: int
    num_held: int = 0
    cost_held: int = 0
    num_undrawn: int = 0
    num_observed: int = 0
    tokens_observed: int = 0
    cost_observed: int = 0
    spread_observed: int = 0
    cost_due: int = 0
    micro_batches_due: int = 0
    cost_per_token: int = 0
    num_large: int = 0
    large_wait_0: int = 0
    large_wait_1: int = 0
    large_cost_0: int = 0
    large_cost_1: int = 0
    failed: bool = False
    closing: bool = False
    message: str = ""
    offer_0: int = 0
    offer_1: int = 0
    offer_2: int = 0
    offer_3: int = 0

    def to_bytes(self) -> bytes:
        """Return `RECORD_BYTES` bytes."""
        return _to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> WindowRecord:
        """Inverse of `to_bytes`."""
        return cls(**_from_bytes(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Second exchange of a step: what a replica has selected and how it packs.

    Attributes:
        target: digest of what the replica derived from the first exchange.
        num_micro_batches: micro-batches its selection needs, 0 when it selected nothing.
        num_samples: samples selected.
        num_left_out: positions consumed that emit nothing (bad record or overlong, by policy).
        num_bad: bad records among them.
        num_truncated: selected samples that were cut.
        num_tokens: tokens of the selection before padding.
        num_padded_tokens: the same after padding each sample to the length multiple.
        num_squared_tokens: sum of squared lengths before padding.
        num_loss_tokens: positions that carry loss.
        cost: cost of the selection, without the price of micro-batches.
        cost_largest: cost of its costliest sample.
        num_remaining: positions of this replica still to be emitted after this step.
        num_kept: samples left in the window.
        cost_kept: their cost.
        cost_missing: cost by which its micro-batches stay below the target (scope `microbatch`).
        num_large: samples in micro-batches of agreed heights (scope `microbatch`).
        cost_large: what they cost.
        wait_us: microseconds the replica waited for data since the previous step.
        failed: see `WindowRecord`.
        closing: see `WindowRecord`.
        message: see `WindowRecord`.
    """

    target: int
    num_micro_batches: int = 0
    num_samples: int = 0
    num_left_out: int = 0
    num_bad: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    num_squared_tokens: int = 0
    num_loss_tokens: int = 0
    cost: int = 0
    cost_largest: int = 0
    num_remaining: int = 0
    num_kept: int = 0
    cost_kept: int = 0
    cost_missing: int = 0
    num_large: int = 0
    cost_large: int = 0
    wait_us: int = 0
    failed: bool = False
    closing: bool = False
    message: str = ""

    def to_bytes(self) -> bytes:
        """Return `RECORD_BYTES` bytes."""
        return _to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanRecord:
        """Inverse of `to_bytes`."""
        return cls(**_from_bytes(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """The one exchange of a run in which a cost model is fitted: sums over measured micro-batches.

    Each micro-batch is a row of `calibration.Row`, and a field `a_b` the sum of a * b over rows.

    Attributes:
        step: step about to be planned.
        num_rows: micro-batches summed.
        time_shift: times are in 2**time_shift nanoseconds.
        failed: see `WindowRecord`.
        closing: see `WindowRecord`.
        message: see `WindowRecord`.
    """

    step: int
    num_rows: int = 0
    time_shift: int = 0
    tokens_tokens: int = 0
    tokens_squares: int = 0
    tokens_patches: int = 0
    tokens_one: int = 0
    squares_squares: int = 0
    squares_patches: int = 0
    squares_one: int = 0
    patches_patches: int = 0
    patches_one: int = 0
    one_one: int = 0
    tokens_time: int = 0
    squares_time: int = 0
    patches_time: int = 0
    one_time: int = 0
    time_time: int = 0
    failed: bool = False
    closing: bool = False
    message: str = ""

    def to_bytes(self) -> bytes:
        """Return `RECORD_BYTES` bytes."""
        return _to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationRecord:
        """Inverse of `to_bytes`."""
        return cls(**_from_bytes(cls, data))


AnyRecord = WindowRecord | PlanRecord | CalibrationRecord
Record = TypeVar("Record", WindowRecord, PlanRecord, CalibrationRecord)


class RecordTable(Generic[Record]):
    """All replicas' records of one exchange, in replica order, read by column.

    Args:
        kind: the record class.
        parts: each replica's bytes; joined bytes of all are taken as they are.

    Raises:
        ReplicaFailedError: a part has another size than a record.
    """

    def __init__(self, kind: type[Record], parts: Sequence[bytes] | bytes) -> None:
        if not isinstance(parts, bytes):
            joined = b"".join(parts)
            if len(joined) != RECORD_BYTES * len(parts):
                for part in parts:
                    _check_size(part)
            parts = joined
        if not parts or len(parts) % RECORD_BYTES:
            raise ReplicaFailedError(f"{len(parts)} bytes are no whole number of records")
        self._kind: type[Record] = kind
        self._data = parts
        self._index = _COLUMNS[kind]
        self._rows = np.frombuffer(parts, dtype="<i8").reshape(-1, RECORD_BYTES // 8)
        self._columns: dict[str, npt.NDArray[np.int64]] = {}

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> RecordTable[Record]:
        """Build from records, at least one."""
        return cls(type(records[0]), [record.to_bytes() for record in records])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, replica: int) -> Record:
        """Return one replica's record."""
        at = replica * RECORD_BYTES
        record: Record = self._kind.from_bytes(self._data[at : at + RECORD_BYTES])
        return record

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return a field of all records, int64 [replicas]."""
        values = self._columns.get(name)
        if values is None:
            values = np.ascontiguousarray(self._rows[:, self._index[name]], dtype=np.int64)
            self._columns[name] = values
        return values

    def total(self, name: str) -> int:
        """Return the exact sum of a field over all replicas."""
        values = self.column(name)
        if len(values) <= _FEW:
            return sum(values.tolist())
        if max(int(values.max()), -int(values.min())) < (1 << 62) // len(values):
            return int(values.sum())
        return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())

    def largest(self, name: str) -> int:
        """Return the largest value of a field."""
        return int(self.column(name).max())


def check_agreement(
    records: Sequence[AnyRecord] | RecordTable[Any], *, names: Sequence[str]
) -> None:
    """Raise on every replica when one has failed or the named fields differ.

    Args:
        records: one per replica, in replica order.
        names: fields that must be equal.

    Raises:
        ReplicaFailedError: names the replica and what it reported, or the differing values.
    """
    table = records if isinstance(records, RecordTable) else RecordTable.from_records(records)  # type: ignore[type-var]
    failed = table.column("failed")
    if failed.any():
        replica = int(failed.argmax())
        raise ReplicaFailedError(f"replica {replica} failed: {table[replica].message}")
    for name in names:
        values = table.column(name)
        differs = values != values[0]
        if differs.any():
            other = int(differs.argmax())
            raise ReplicaFailedError(
                f"replicas disagree on {name}: replica 0 has {values[0]}, replica {other} has "
                f"{values[other]}. Start every rank with the same flags, data and code version"
            )


_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if field.name != "message")
    for kind in (WindowRecord, PlanRecord, CalibrationRecord)
}


_COLUMNS: dict[type, dict[str, int]] = {
    kind: {name: column for column, name in enumerate(names)} for kind, names in _NAMES.items()
}


def _to_bytes(record: AnyRecord) -> bytes:
    names = _told(type(record), failed=record.failed)
    numbers = struct.pack(f"<{len(names)}q", *(int(getattr(record, name)) for name in names))
    return numbers + _fit(record.message, room=RECORD_BYTES - len(numbers))


def _told(kind: type, *, failed: bool) -> tuple[str, ...]:
    """Return the numbers of a record; nobody reads those behind the flags of a failed one."""
    names = _NAMES[kind]
    return names[: names.index("closing") + 1] if failed else names


def _check_size(data: bytes) -> None:
    if len(data) != RECORD_BYTES:
        raise ReplicaFailedError(f"a record of {len(data)} bytes arrived; expected {RECORD_BYTES}")


def _from_bytes(cls: type[AnyRecord], data: bytes) -> dict[str, Any]:
    _check_size(data)
    (failed,) = struct.unpack_from("<q", data, 8 * _COLUMNS[cls]["failed"])
    names = _told(cls, failed=bool(failed))
    numbers = struct.unpack_from(f"<{len(names)}q", data)
    values: dict[str, Any] = dict(zip(names, numbers, strict=True))
    values["failed"], values["closing"] = bool(values["failed"]), bool(values["closing"])
    values["message"] = data[8 * len(names) :].rstrip(b"\0").decode("utf-8", "replace")
    return values


def _fit(message: str, *, room: int) -> bytes:
    text = message.encode("utf-8")
    if len(text) <= room:
        return text.ljust(room, b"\0")
    cut = text[: room - 3].decode("utf-8", "ignore").encode("utf-8")
    return (cut + b"...").ljust(room, b"\0")
