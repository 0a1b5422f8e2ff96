"""Payload groups: bytes that leaders hand to each other in the background, over gloo.

Must not interpret the bytes, and must not use the device or NCCL. Both sides know every size from
the plan; a mismatch or a lost peer is an error that names replica and step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from odb_megatron.comm.blocks import ControlError
from odb_megatron.comm.gloo_group import GlooGroup, numbered

__all__ = ["PayloadGroup", "PayloadTransfer", "check_frame", "frame"]

_HEADER = struct.Struct("<qqq")
_TAGS = 1 << 20


class PayloadGroup:
    """One loader's channel for payloads between the leaders of all replicas.

    All leaders must call the constructor, equally often for each name (see `ControlGroup`).

    Args:
        ranks: global ranks of the leaders, in replica order.
        name: shown in errors, such as "train".
        timeout_s: seconds a transfer may take.
    """

    def __init__(self, ranks: Sequence[int], *, name: str, timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._name = name
        rank = dist.get_rank()
        self._replica = self._ranks.index(rank) if rank in self._ranks else -1
        own_name = numbered(f"{name} payload group", self._ranks)
        self._group: GlooGroup | None = None
        if self._replica >= 0:
            self._group = GlooGroup(self._ranks, name=own_name, timeout_s=timeout_s)

    def post(
        self, step: int, *, sends: Mapping[int, bytes], receives: Mapping[int, int]
    ) -> PayloadTransfer:
        """Start the transfers of a step and return at once.

        Args:
            step: equal on both sides.
            sends: bytes for each peer.
            receives: number of bytes expected from each peer.

        Raises:
            ControlError: a peer is gone.
        """
        if self._group is None:
            raise ControlError(f"rank {dist.get_rank()} is no leader of payload group {self._name}")
        transfer = PayloadTransfer(self._name, replica=self._replica, step=step)
        for peer, size in receives.items():
            buffer = torch.empty(_HEADER.size + size, dtype=torch.uint8)
            with _named(self._name, self._replica, peer, step):
                work = self._group._group.recv([buffer], peer, step % _TAGS)
            transfer.add(peer, buffer, work, is_send=False)
        for peer, data in sends.items():
            framed = frame(data, step=step, replica=self._replica)
            buffer = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
            with _named(self._name, self._replica, peer, step):
                work = self._group._group.send([buffer], peer, step % _TAGS)
            transfer.add(peer, buffer, work, is_send=True)
        return transfer


class PayloadTransfer:
    """The transfers of one step; keeps the buffers alive until they are done.

    Args:
        name: of the loader.
        replica: this one.
        step: the step.
    """

    def __init__(self, name: str, *, replica: int, step: int) -> None:
        self._name, self._replica, self._step = name, replica, step
        self._receives: dict[int, tuple[torch.Tensor, Any]] = {}
        self._sends: dict[int, tuple[torch.Tensor, Any]] = {}

    def add(self, peer: int, buffer: torch.Tensor, work: Any, *, is_send: bool) -> None:
        """Take a transfer that was started."""
        (self._sends if is_send else self._receives)[peer] = buffer, work

    def receive(self, peer: int) -> memoryview:
        """Wait for a peer's bytes and return them; once per peer.

        Raises:
            ControlError: the peer is gone, did not send in time, or sent something else.
        """
        buffer, work = self._receives.pop(peer)
        self._wait(work, peer)
        data = memoryview(buffer.numpy()).cast("B")
        return check_frame(data, step=self._step, replica=self._replica, peer=peer)

    def finish(self) -> None:
        """Wait until everything that was sent has left.

        Raises:
            ControlError: a peer is gone or does not receive.
        """
        while self._sends:
            peer = next(iter(self._sends))
            self._wait(self._sends[peer][1], peer)
            del self._sends[peer]

    def _wait(self, work: Any, peer: int) -> None:
        with _named(self._name, self._replica, peer, self._step):
            work.wait()


def frame(data: bytes, *, step: int, replica: int) -> bytes:
    """Return bytes with a header that says which step and replica they are of."""
    return _HEADER.pack(step, replica, len(data)) + data


def check_frame(data: memoryview, *, step: int, replica: int, peer: int) -> memoryview:
    """Return the bytes behind a header.

    Args:
        data: what arrived.
        step: the step expected.
        replica: who received it.
        peer: who should have sent it.

    Raises:
        ControlError: it is of another step, replica or size.
    """
    if len(data) < _HEADER.size:
        raise ControlError(f"replica {replica}: {len(data)} bytes arrived, less than their header")
    expected = (step, peer, len(data) - _HEADER.size)
    found = _HEADER.unpack_from(data)
    if found != expected:
        raise ControlError(
            f"replica {replica}: expected {expected[2]} bytes of step {step} from replica {peer}; "
            f"{found[2]} bytes of step {found[0]} from replica {found[1]} arrived. Start every "
            "rank with the same flags, data and code version"
        )
    return data[_HEADER.size :]


@contextmanager
def _named(name: str, replica: int, peer: int, step: int) -> Iterator[None]:
    """Raise errors of the transport as one that names replicas and step."""
    try:
        yield
    except RuntimeError as error:
        raise ControlError(
            f"replica {replica}: handing samples of step {step} of the {name} loader to or from "
            f"replica {peer} failed ({error}). That replica has stopped, is stuck or planned "
            "another step; its own output says why"
        ) from error
