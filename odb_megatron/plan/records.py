"""The fixed-size records that replicas exchange before each step.

Pure: values and their byte form. A record's size depends on neither window, budget nor number of
replicas, so control traffic does not grow with them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["RECORD_BYTES", "PlanRecord", "ReplicaFailedError", "WindowRecord", "check_agreement"]

RECORD_BYTES = 256
"""Wire size of either record."""

_MESSAGE_BYTES = 96


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
        num_undrawn: stream positions of this replica not drawn yet.
        failed: this replica met an error and will raise after the exchange.
        message: the error, cut to fit.
    """

    config: int
    step: int
    position: int
    num_held: int = 0
    cost_held: int = 0
    num_undrawn: int = 0
    failed: bool = False
    message: str = ""

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
        num_truncated: selected samples that were cut.
        num_tokens: tokens of the selection before padding.
        num_padded_tokens: the same after padding each sample to the length multiple.
        num_squared_tokens: sum of squared lengths before padding.
        num_loss_tokens: positions that carry loss.
        cost: cost of the selection, without the price of micro-batches.
        num_remaining: positions of this replica still to be emitted after this step.
        wait_us: microseconds the replica waited for data since the previous step.
        failed: see `WindowRecord`.
        message: see `WindowRecord`.
    """

    target: int
    num_micro_batches: int = 0
    num_samples: int = 0
    num_left_out: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    num_squared_tokens: int = 0
    num_loss_tokens: int = 0
    cost: int = 0
    num_remaining: int = 0
    wait_us: int = 0
    failed: bool = False
    message: str = ""

    def to_bytes(self) -> bytes:
        """Return `RECORD_BYTES` bytes."""
        return _to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanRecord:
        """Inverse of `to_bytes`."""
        return cls(**_from_bytes(cls, data))


def check_agreement(records: Sequence[WindowRecord | PlanRecord], *, names: Sequence[str]) -> None:
    """Raise on every replica when one has failed or the named fields differ.

    Args:
        records: one per replica, in replica order.
        names: fields that must be equal.

    Raises:
        ReplicaFailedError: names the replica and what it reported, or the differing values.
    """
    for replica, record in enumerate(records):
        if record.failed:
            raise ReplicaFailedError(f"replica {replica} failed: {record.message}")
    for name in names:
        values = [getattr(record, name) for record in records]
        if len(set(values)) > 1:
            other = next(r for r, value in enumerate(values) if value != values[0])
            raise ReplicaFailedError(
                f"replicas disagree on {name}: replica 0 has {values[0]}, replica {other} has "
                f"{values[other]}. Start every rank with the same flags, data and code version"
            )


def _to_bytes(record: WindowRecord | PlanRecord) -> bytes:
    names = [field.name for field in fields(record) if field.name != "message"]
    numbers = [int(getattr(record, name)) for name in names]
    text = _fit(record.message)
    body = struct.pack(f"<{len(numbers)}q", *numbers) + text
    return body.ljust(RECORD_BYTES, b"\0")


def _from_bytes(cls: type[WindowRecord | PlanRecord], data: bytes) -> dict[str, Any]:
    if len(data) != RECORD_BYTES:
        raise ReplicaFailedError(f"a record of {len(data)} bytes arrived; expected {RECORD_BYTES}")
    names = [field.name for field in fields(cls) if field.name != "message"]
    numbers = struct.unpack_from(f"<{len(names)}q", data)
    values: dict[str, Any] = dict(zip(names, numbers, strict=True))
    values["failed"] = bool(values["failed"])
    at = 8 * len(names)
    values["message"] = data[at : at + _MESSAGE_BYTES].rstrip(b"\0").decode("utf-8", "replace")
    return values


def _fit(message: str) -> bytes:
    text = message.encode("utf-8")
    if len(text) <= _MESSAGE_BYTES:
        return text.ljust(_MESSAGE_BYTES, b"\0")
    cut = text[: _MESSAGE_BYTES - 3].decode("utf-8", "ignore").encode("utf-8")
    return (cut + b"...").ljust(_MESSAGE_BYTES, b"\0")
