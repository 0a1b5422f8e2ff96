"""Delivery inside a replica: the leader's bytes to its other ranks, over the CPU.

Must not know what the bytes mean. Per step two broadcasts, however many micro-batches it has: a
header to every rank of the replica, and a payload to those that use it; some steps have a second
payload, the attachment, for fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from odb_megatron.comm.control import why_failed
from odb_megatron.comm.gloo_group import GlooGroup, numbered

if TYPE_CHECKING:
    from odb_megatron.comm.patience import Patience

__all__ = ["DeliveryError", "ReplicaGroup"]

Bytes = npt.NDArray[np.uint8]

_LENGTH_BYTES = 8
_FIRST_CAPACITY = 4096
"""Bytes of a header broadcast at first. It grows on all ranks to hold twice the last header: only
one of more than twice the size of all before it needs a second broadcast."""

_MOST_BYTES = 1 << 28
"""Largest header that is taken: some ten million samples in a step."""


class DeliveryError(RuntimeError):
    """A broadcast inside the replica did not complete: a rank is gone or stuck."""


class ReplicaGroup:
    """One loader's channel from the leader of a replica to its other ranks.

    Every rank of the replica must call the constructor, in the same order for each loader; ranks of
    other replicas need not (they make their own).

    Args:
        ranks: global ranks of the replica, the leader first.
        payload_ranks: those that get payloads, the leader first; a subset of `ranks`.
        name: shown in errors, such as "train".
        timeout_s: seconds a broadcast may take.
        patience: see `ControlGroup`.
        attachment_ranks: those that get attachments, the leader first; a subset of `ranks`.

    Attributes:
        num_collectives: broadcasts this rank has taken part in.
        num_bytes: bytes it has sent (leader) or received by broadcast.
        num_reports: point-to-point transfers of `report` it has taken part in.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        payload_ranks: Sequence[int],
        name: str,
        timeout_s: float,
        patience: Patience | None = None,
        attachment_ranks: Sequence[int] = (),
    ) -> None:
        self._patience = patience
        for what, chosen in (("payload", payload_ranks), ("attachment", attachment_ranks)):
            if len(chosen) and (chosen[0] != ranks[0] or not set(chosen) <= set(ranks)):
                raise ValueError(
                    f"{what} ranks {list(chosen)} must begin with the leader {ranks[0]} and be "
                    f"ranks of the replica {list(ranks)}"
                )
        self._ranks, self._name, self._timeout_s = list(ranks), name, timeout_s
        self._leader = ranks[0]
        self._rank = dist.get_rank()
        self._has_payload = self._rank in payload_ranks
        own_name = numbered(f"{name} delivery", ranks)
        self._what = f"{name} delivery from rank {ranks[0]}"
        self._headers = GlooGroup(
            ranks, name=f"{own_name}/headers", timeout_s=timeout_s, patience=patience
        )
        self._payloads = None
        if len(payload_ranks) > 1 and self._has_payload:
            self._payloads = GlooGroup(
                payload_ranks,
                name=f"{own_name}/payloads",
                timeout_s=timeout_s,
                patience=patience,
            )
        self._attachments = None
        if len(attachment_ranks) > 1 and self._rank in attachment_ranks:
            self._attachments = GlooGroup(
                attachment_ranks,
                name=f"{own_name}/attachments",
                timeout_s=timeout_s,
                patience=patience,
            )
        if patience is not None:
            patience.expect(self._what)
        self._capacity = _FIRST_CAPACITY
        self.num_collectives = 0
        self.num_bytes = 0
        self.num_reports = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank sends."""
        return self._rank == self._leader

    @property
    def has_payload(self) -> bool:
        """Whether this rank takes part in payload broadcasts."""
        return self._has_payload

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the leader passes it, the others get it.

        Raises:
            DeliveryError: a rank is gone or did not answer in time.
        """
        buffer = np.zeros(self._capacity, dtype=np.uint8)
        if data is not None:
            buffer[:_LENGTH_BYTES] = np.frombuffer(
                len(data).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8
            )
            first = data[: self._capacity - _LENGTH_BYTES]
            buffer[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = np.frombuffer(first, np.uint8)
        self._broadcast(buffer, group=self._headers)
        length = int.from_bytes(buffer[:_LENGTH_BYTES].tobytes(), "little")
        if length > _MOST_BYTES:
            self.close()
            raise DeliveryError(
                f"rank {self._rank}: a header of {length} bytes was announced to the {self._name} "
                f"loader; at most {_MOST_BYTES} are taken: ranks of the replica run different code"
            )
        room = self._capacity - _LENGTH_BYTES
        found = buffer[_LENGTH_BYTES : _LENGTH_BYTES + min(length, room)].tobytes()
        if length > room:
            rest = np.zeros(length - room, dtype=np.uint8)
            if data is not None:
                rest[:] = np.frombuffer(data[room:], dtype=np.uint8)
            self._broadcast(rest, group=self._headers)
            found += rest.tobytes()
        while self._capacity - _LENGTH_BYTES < 2 * length:
            self._capacity *= 2
        return found

    def payload(self, data: Bytes) -> Bytes:
        """Broadcast a payload; the others pass a buffer of its size, which is filled and returned.

        Args:
            data: uint8 [bytes], contiguous.

        Raises:
            DeliveryError: a rank is gone or did not answer in time.
        """
        assert self._has_payload, f"rank {self._rank} gets no payloads"
        if self._payloads is not None and data.size:
            self._broadcast(data, group=self._payloads)
        return data

    @property
    def has_attachment(self) -> bool:
        """Whether this rank takes part in broadcasts of attachments."""
        return self._attachments is not None

    def attachment(self, data: Bytes) -> Bytes:
        """Broadcast a second payload, as `payload`.

        Raises:
            DeliveryError: a rank is gone or did not answer in time.
        """
        assert self._attachments is not None, f"rank {self._rank} gets no attachments"
        if data.size:
            self._broadcast(data, group=self._attachments)
        return data

    def report(self, values: Sequence[float], *, reporter: int) -> list[float]:
        """Send numbers from the rank `reporter` to the leader, point to point.

        Both call it, with equally many values; the leader's are replaced by the reporter's.

        Raises:
            DeliveryError: the other rank is gone or did not come in time.
        """
        if reporter == self._leader:
            return list(values)
        assert self._rank in (reporter, self._leader), f"rank {self._rank} has nothing to report"
        data = torch.tensor(values, dtype=torch.float64)
        try:
            if self.is_leader:
                self._headers.receive(data, source=self._ranks.index(reporter)).wait()
            else:
                self._headers.send(data, target=0).wait()
        except RuntimeError as error:
            self.close()
            raise DeliveryError(
                f"rank {self._rank}: the report from rank {reporter} to the leader "
                f"{self._leader} failed ({error}); the other rank's own output says why"
            ) from error
        self.num_reports += 1
        found: list[float] = data.tolist()
        return found

    def close(self) -> None:
        """Close the connections; ranks that wait for this one learn it at once."""
        self._headers.close()
        for group in (self._payloads, self._attachments):
            if group is not None:
                group.close()

    def _broadcast(self, data: Bytes, *, group: GlooGroup) -> None:
        if group.is_closed:
            raise DeliveryError(f"delivery of the {self._name} loader is closed: it had failed")
        if self._patience is not None:
            self._patience.begin(self._what, self.num_collectives)
        try:
            group.broadcast(torch.from_numpy(data), source=0)
        except RuntimeError as error:
            self.close()
            raise DeliveryError(
                f"rank {self._rank}: broadcast {self.num_collectives} of the {self._name} "
                + why_failed(error, self._patience, ranks=self._ranks, timeout_s=self._timeout_s)
            ) from error
        self.num_collectives += 1
        self.num_bytes += data.nbytes
