"""Inside a replica: the source rank's bytes to its other ranks, over the CPU.

Per step two broadcasts, however many micro-batches it has: a header to every rank of the replica,
and a payload to those that use it; steps with images have a second payload, the attachment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from odb_megatron.comm.deadline import Deadline
from odb_megatron.comm.gloo_group import Bytes, Channel, ControlError, GlooGroup, numbered

__all__ = ["ControlError", "ReplicaGroup"]

_LENGTH_BYTES = 8
_FIRST_CAPACITY = 4096
_MAX_BYTES = 1 << 28
"""Largest header that is taken: some ten million samples in a step."""


class ReplicaGroup(Channel):
    """One loader's channel from the source rank of a replica to its other ranks.

    Every rank of the replica makes one, in the same order for each loader. All methods raise
    ControlError where a rank is gone or did not come in time.

    Args:
        ranks: global ranks of the replica, the source rank first.
        payload_ranks: those that get payloads, the source rank first; a subset of `ranks`.
        name: the loader's, such as "train".
        timeout_s: seconds a broadcast may take.
        deadline: see `SourceGroup`.
        attachment_ranks: those that get attachments, the source rank first; a subset of `ranks`.

    Attributes:
        is_source: whether this rank sends.
        has_payload: whether it takes part in broadcasts of payloads.
        has_attachment: whether it takes part in broadcasts of attachments.
        num_collectives: broadcasts that it has taken part in.
        num_bytes: bytes that it has sent (source rank) or received by them.
        num_reports: `report`s that it has taken part in.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        payload_ranks: Sequence[int],
        name: str,
        timeout_s: float,
        deadline: Deadline | None = None,
        attachment_ranks: Sequence[int] = (),
    ) -> None:
        for chosen in (payload_ranks, attachment_ranks):
            assert not chosen or (chosen[0] == ranks[0] and set(chosen) <= set(ranks)), chosen
        rank = dist.get_rank()
        super().__init__(ranks, who=f"rank {rank}", timeout_s=timeout_s, deadline=deadline)
        own_name = numbered(f"{name} delivery", ranks)
        self._headers = self._join(ranks, f"{own_name}/headers")
        self._payloads = self._attachments = None
        if len(payload_ranks) > 1 and rank in payload_ranks:
            self._payloads = self._join(payload_ranks, f"{own_name}/payloads")
        if len(attachment_ranks) > 1 and rank in attachment_ranks:
            self._attachments = self._join(attachment_ranks, f"{own_name}/attachments")
        self._what = f"{name} broadcast from rank {ranks[0]}:"
        self._expect(self._what)
        self._capacity = _FIRST_CAPACITY
        self.is_source, self.has_payload = rank == ranks[0], rank in payload_ranks
        self.has_attachment = self._attachments is not None
        self.num_collectives = self.num_bytes = self.num_reports = 0

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the source rank passes it, the others get it.

        One broadcast of `_capacity` bytes, which grows on all ranks to hold twice the last header:
        only one of more than twice the size of all before it needs a second broadcast.
        """
        data = data or b""
        room = self._capacity - _LENGTH_BYTES
        first = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        first = self._broadcast(_buffer(first, self._capacity), self._headers).tobytes()
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if length > _MAX_BYTES:
            self.close()
            raise ControlError(
                f"{self._who}: {self._what} a header of {length} bytes was announced; at most "
                f"{_MAX_BYTES} are taken: ranks of the replica run different code"
            )
        found = first[_LENGTH_BYTES:][:length]
        if length > room:
            found += self._broadcast(_buffer(data[room:], length - room), self._headers).tobytes()
        while self._capacity - _LENGTH_BYTES < 2 * length:
            self._capacity *= 2
        return found

    def payload(self, data: Bytes) -> Bytes:
        """Broadcast a payload; the others pass a buffer of its size, which is filled and returned.

        Args:
            data: uint8 [bytes], contiguous.
        """
        assert self.has_payload, f"{self._who} gets no payloads"
        return self._broadcast(data, self._payloads)

    def attachment(self, data: Bytes) -> Bytes:
        """Broadcast a second payload, as `payload`."""
        assert self.has_attachment, f"{self._who} gets no attachments"
        return self._broadcast(data, self._attachments)

    def report(self, values: Sequence[float]) -> list[float]:
        """Send numbers from the last rank of the group to the source rank; both get them.

        For a group of two; both call it, with equally many values.
        """
        data = np.array(values, np.float64)
        with self._operation(f"report to rank {self._ranks[0]}", self.num_reports):
            self._headers.broadcast(data.view(np.uint8), source=1)
        self.num_reports += 1
        found: list[float] = data.tolist()
        return found

    def _broadcast(self, data: Bytes, group: GlooGroup | None) -> Bytes:
        if group is not None and data.size:
            with self._operation(self._what, self.num_collectives):
                group.broadcast(data)
            self.num_collectives += 1
            self.num_bytes += data.nbytes
        return data


def _buffer(data: bytes, size: int) -> Bytes:
    return np.frombuffer(bytearray(data.ljust(size, b"\0")), np.uint8)
