"""Samples on their way between replicas in one step.

Must not decide who trains what (that is the plan). What is sent leaves in the background; what is
received is waited for when the first micro-batch that holds it is assembled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from odb_megatron.data.sample import Sample
from odb_megatron.data.sample_wire import SampleWireError, decode_sample, encode_sample
from odb_megatron.plan.step import Parcel, StepPlan

__all__ = ["HandOver", "Payloads", "Transfer"]


class Transfer(Protocol):
    """The transfers of one step."""

    def receive(self, peer: int) -> memoryview:
        """Wait for a peer's bytes; once per peer."""

    def finish(self) -> None:
        """Wait until everything that was sent has left."""


class Payloads(Protocol):
    """Point-to-point bytes between the leaders of all replicas."""

    def post(
        self, step: int, *, sends: Mapping[int, bytes], receives: Mapping[int, int]
    ) -> Transfer:
        """Start sending to peers and receiving so many bytes from peers; return at once."""


class HandOver:
    """What one replica gives and gets in a step.

    Args:
        transfer: started by `start`.
        step: the step.
        receives: what comes from whom.
    """

    def __init__(self, transfer: Transfer, *, step: int, receives: tuple[Parcel, ...]) -> None:
        self._transfer = transfer
        self._step = step
        self._parcel_of = {position: parcel for parcel in receives for position in parcel.positions}
        self._arrived: dict[int, Sample] = {}

    @classmethod
    def start(cls, plan: StepPlan, held: dict[int, Sample], *, payloads: Payloads) -> HandOver:
        """Take what others will train out of `held`, send it, and expect what they give.

        Raises:
            RuntimeError: a sample has another size than was announced.
        """
        sends = {parcel.peer: _encode(parcel, held) for parcel in plan.sends}
        receives = {parcel.peer: sum(parcel.sizes) for parcel in plan.receives}
        step = plan.totals.step
        transfer = payloads.post(step, sends=sends, receives=receives)
        return cls(transfer, step=step, receives=plan.receives)

    def take(self, position: int) -> Sample:
        """Return a sample that another replica gives, waiting for it if need be.

        Raises:
            RuntimeError: something else arrived.
        """
        if position not in self._arrived:
            self._receive(self._parcel_of[position])
        return self._arrived.pop(position)

    def finish(self) -> None:
        """Wait until everything that was given has left."""
        self._transfer.finish()

    def _receive(self, parcel: Parcel) -> None:
        data, at = self._transfer.receive(parcel.peer), 0
        for position, size in zip(parcel.positions, parcel.sizes, strict=True):
            try:
                self._arrived[position] = decode_sample(data[at : at + size])
            except SampleWireError as error:
                raise RuntimeError(
                    f"position {position} of step {self._step} did not arrive whole from replica "
                    f"{parcel.peer}: {error}"
                ) from error
            at += size


def _encode(parcel: Parcel, held: dict[int, Sample]) -> bytes:
    parts = [encode_sample(held.pop(position)) for position in parcel.positions]
    for part, position, size in zip(parts, parcel.positions, parcel.sizes, strict=True):
        if len(part) != size:
            raise RuntimeError(
                f"position {position} has {len(part)} bytes; {size} were announced to replica "
                f"{parcel.peer}: this is a defect of odb_megatron, please report"
            )
    return b"".join(parts)
