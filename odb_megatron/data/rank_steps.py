"""The steps of one rank of a replica, one per call: the leader makes and sends, others receive.

Must not plan and must not know when it is called (`step_queue`). What fails on the leader, or ends
it, is told to the others in place of a step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.context_parallel import slice_micro_batch
from odb_megatron.data.finished_step import FinishedStep, StepHeader
from odb_megatron.data.step_images import encode_pixels, pixel_bytes, with_pixels
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.step_wire import (
    Ending,
    StepMetadata,
    decode_header,
    decode_payload,
    encode_header,
    encode_payload,
    payload_bytes,
)
from odb_megatron.data.thd import MicroBatch
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.plan.termination import LoaderClosedError

__all__ = ["Channel", "ContextPart", "RankSteps"]


class Channel(Protocol):
    """What `comm.delivery.ReplicaGroup` does."""

    num_collectives: int
    num_bytes: int

    @property
    def has_payload(self) -> bool:
        """Whether this rank takes part in payload broadcasts."""

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the leader passes it."""

    def payload(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Broadcast a payload into a buffer of its size."""

    @property
    def has_attachment(self) -> bool:
        """Whether this rank takes part in broadcasts of a second payload, the patches of images."""

    def attachment(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """As `payload`, for the second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """Which part of a context-parallel group's tokens a rank holds."""

    size: int = 1
    rank: int = 0


class RankSteps:
    """Steps as one rank uses them; a `step_queue.Steps`.

    Args:
        loader: the leader's; None on other ranks.
        channel: to the replica's other ranks; None for a replica of one rank.
        part: this rank's context-parallel part.

    Raises:
        ValueError: neither loader nor channel.
    """

    def __init__(
        self, loader: StepLoader | None, *, channel: Channel | None, part: ContextPart
    ) -> None:
        if loader is None and channel is None:
            raise ValueError("a rank without a loader needs a channel to its leader")
        self._loader = loader
        self._channel = channel
        self._part = part
        self._has_device = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._has_device else 0
        self._has_ended = False  # the other ranks of the replica know that no step follows

    def begin(self) -> None:
        """Use the trainer's device: a new thread would take up memory on the first one."""
        if self._has_device:
            torch.cuda.set_device(self._device)

    def make(self, until_trained: Callable[[], None]) -> FinishedStep | None:
        """Return the next step; None when there is none.

        Args:
            until_trained: see `StepLoader.make_step`.

        Raises:
            ReplicaFailedError: the leader failed; it raises its own error.
            LoaderClosedError: a replica closed its loader.
        """
        before = self._counts()
        loader = self._loader
        step = self._receive() if loader is None else self._send(loader, until_trained)
        if step is None:
            return None
        part = self._part
        micro_batches = tuple(
            slice_micro_batch(item, size=part.size, rank=part.rank)
            if isinstance(item, MicroBatch)
            else item
            for item in step.micro_batches
        )
        collectives, num_bytes = (
            now - then for now, then in zip(self._counts(), before, strict=True)
        )
        step = replace(
            step, micro_batches=micro_batches, collectives=collectives, bytes_delivered=num_bytes
        )
        return step.pinned() if self._has_device else step

    def request_end(self) -> None:
        """Make no further step; see `StepLoader.close`."""
        if self._loader is not None:
            self._loader.close()

    def end(self) -> None:
        """Tell the other replicas (leader), or receive until the leader ends; drop what comes.

        Never raises: whoever ends has an error of its own, or none.
        """
        if self._loader is not None and not self._loader.is_over:
            with contextlib.suppress(Exception):
                self._loader.make_step()
        with contextlib.suppress(Exception):
            if self._loader is not None:
                self._tell(Ending(closed="it closed its loader"))
            while not self._has_ended:  # on the others; the leader has told them
                self._receive()

    def _send(self, loader: StepLoader, until_trained: Callable[[], None]) -> FinishedStep | None:
        try:
            started = time.perf_counter()
            step = loader.make_step(until_trained)
            payload = None
            if step is not None:
                step = replace(step, plan_us=round((time.perf_counter() - started) * 1e6))
            if step is not None and self._channel is not None:
                items = _whole(step)
                rule = loader.config.size_rule
                metadata = StepMetadata.of(step.header.totals, items, rule=rule)
                metadata = replace(metadata, window_bytes=step.window_bytes, plan_us=step.plan_us)
                payload = encode_payload(items)
        except LoaderClosedError as error:
            self._tell(Ending(closed=str(error)))
            raise
        except BaseException as error:
            self._tell(Ending(error=f"{type(error).__name__}: {error}"))
            raise
        if step is None:
            self._tell(Ending())
        elif self._channel is not None and payload is not None:
            self._channel.header(encode_header(metadata))
            self._channel.payload(payload)
            if metadata.pixels is not None and self._channel.has_attachment:
                self._channel.attachment(encode_pixels(items))
        return step

    def _receive(self) -> FinishedStep | None:
        assert self._channel is not None, "checked in the constructor"
        if self._has_ended:
            return None
        try:
            content = decode_header(self._channel.header())
        except BaseException:
            self._has_ended = True
            raise
        if isinstance(content, Ending):
            self._has_ended = True
            if content.error:
                raise ReplicaFailedError(f"the leader of this replica failed: {content.error}")
            if content.closed:
                raise LoaderClosedError(f"the leader of this replica stopped: {content.closed}")
            return None
        header = StepHeader(totals=content.totals, micro_batches=content.positions)
        step = FinishedStep(
            header=header,
            micro_batches=(),
            window_bytes=content.window_bytes,
            plan_us=content.plan_us,
        )
        if not self._channel.has_payload:
            return replace(step, micro_batches=tuple(content.layouts()))
        buffer = np.zeros(payload_bytes(content), dtype=np.uint8)
        items = decode_payload(content, self._channel.payload(buffer))
        if content.pixels is not None and self._channel.has_attachment:
            data = np.zeros(pixel_bytes(content.images, content.pixels), dtype=np.uint8)
            items = with_pixels(items, self._channel.attachment(data), content.pixels)
        return replace(step, micro_batches=tuple(items))

    def _tell(self, ending: Ending) -> None:
        if not self._has_ended:
            self._has_ended = True
            if self._channel is not None:
                self._channel.header(encode_header(ending))

    def _counts(self) -> tuple[int, int]:
        channel = self._channel
        return (0, 0) if channel is None else (channel.num_collectives, channel.num_bytes)


def _whole(step: FinishedStep) -> list[MicroBatch]:
    found = [item for item in step.micro_batches if isinstance(item, MicroBatch)]
    assert len(found) == len(step.micro_batches), "the leader assembles whole micro-batches"
    return found
