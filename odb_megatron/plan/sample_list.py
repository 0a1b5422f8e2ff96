"""The third exchange of a step: what its samples are, so that all replicas can assign them.

Pure: rows of numbers and their byte form. A list has room for as many samples as any replica
selected, which all know from the second exchange, so all lists of a step have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.plan.window import Column

__all__ = [
    "LIST_HEADER_BYTES",
    "SAMPLE_ENTRY_BYTES",
    "StepSamples",
    "failed_list",
    "pack_list",
    "unpack_lists",
]

Integers = npt.NDArray[np.int64]

LIST_HEADER_BYTES = 16
"""First position and a failure mark."""

SAMPLE_ENTRY_BYTES = 16
"""Per sample: position above the first, tokens, patches and payload bytes, 32 bits each."""

_COLUMNS = (Column.POSITION, Column.NUM_TOKENS, Column.PATCHES, Column.PAYLOAD)
_LIMIT = 1 << 32
_MOST_POSITION = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The samples of one step over all replicas, int64 [samples] each.

    In replica order, and within a replica in the order of its window.

    Attributes:
        owner: replica that holds the sample.
        position: stream position.
        padded: tokens after padding.
        patches: patches.
        payload: bytes of the sample on the wire.
        cost: predicted cost.
    """

    owner: Integers
    position: Integers
    padded: Integers
    patches: Integers
    payload: Integers
    cost: Integers

    def __len__(self) -> int:
        return len(self.owner)


def pack_list(rows: Integers, *, room: int) -> bytes:
    """Return a replica's list.

    Args:
        rows: its selected samples, int64 [len(Column), samples].
        room: samples that a list of this step has room for.

    Raises:
        ValueError: a number does not fit 32 bits.
    """
    first = int(rows[Column.POSITION].min()) if rows.shape[1] else 0
    values = rows[list(_COLUMNS)]
    values[0] -= first
    if values.size and int(values.max()) >= _LIMIT:
        at = int(values.max(axis=0).argmax())
        raise ValueError(
            f"position {rows[Column.POSITION, at]} has {rows[Column.NUM_TOKENS, at]} tokens, "
            f"{rows[Column.PATCHES, at]} patches and {rows[Column.PAYLOAD, at]} bytes; what "
            f"replicas hand to each other must stay below {_LIMIT}: use --odb-exchange none"
        )
    entries = np.zeros((len(_COLUMNS), room), dtype="<u4")
    entries[:, : values.shape[1]] = values
    header = np.array([first, 0], dtype="<i8")
    return header.tobytes() + entries.tobytes()


def failed_list(*, room: int) -> bytes:
    """Return the list of a replica that met an error and will raise."""
    size = LIST_HEADER_BYTES + SAMPLE_ENTRY_BYTES * room
    return np.array([0, 1], dtype="<i8").tobytes().ljust(size, b"\0")


def unpack_lists(parts: Sequence[bytes], counts: Integers, *, config: PlanConfig) -> StepSamples:
    """Return the samples of all replicas' lists.

    Args:
        parts: the lists, in replica order.
        counts: samples each replica selected, int64 [replicas].
        config: padding multiple and cost model.

    Raises:
        ReplicaFailedError: a replica could not build its list, or a list has another size or
            numbers that are none.
    """
    if len(counts) != len(parts) or not len(counts) or int(counts.min()) < 0:
        raise ReplicaFailedError(
            f"{len(parts)} sample lists arrived, for {counts.tolist()[:8]} selected samples"
        )
    room = int(counts.max())
    size = LIST_HEADER_BYTES + SAMPLE_ENTRY_BYTES * room
    sizes = [len(part) for part in parts]
    if sizes != [size] * len(counts):
        replica = next((at for at, found in enumerate(sizes) if found != size), len(sizes))
        raise ReplicaFailedError(
            f"replica {replica} sent a sample list of {(*sizes, 0)[replica]} bytes; expected {size}"
        )
    whole = np.frombuffer(b"".join(parts), dtype="<u4").reshape(len(parts), -1)
    headers = np.ascontiguousarray(whole[:, : LIST_HEADER_BYTES // 4]).view("<i8")
    failed = headers[:, 1] != 0
    if failed.any():
        raise ReplicaFailedError(
            f"replica {int(failed.argmax())} failed while listing its samples; its own output "
            "says why"
        )
    first = headers[:, 0]
    if ((first < 0) | (first >= _MOST_POSITION)).any():
        raise ReplicaFailedError(
            f"sample lists begin at positions {first.tolist()[:8]}; expected 0 or more, below 2**62"
        )
    entries = whole[:, LIST_HEADER_BYTES // 4 :].reshape(len(parts), len(_COLUMNS), room)
    present = np.arange(room) < counts[:, None]
    offset, tokens, patches, payload = (
        entries[:, column][present].astype(np.int64) for column in range(len(_COLUMNS))
    )
    owner = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
    padded = config.size_rule.padded_all(tokens)
    return StepSamples(
        owner=owner,
        position=first[owner] + offset,
        padded=padded,
        patches=patches,
        payload=payload,
        cost=config.cost.samples(padded, patches),
    )
