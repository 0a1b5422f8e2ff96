"""The data iterators of one rank of a replica: the leader's steps, as this rank uses them.

Must not plan: the leader's step loader does. The leader takes a whole step from it and hands it to
the other ranks; each rank cuts its context-parallel part. Virtual pipeline chunks get an iterator
each, over the same steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from odb_megatron.data.context_parallel import slice_micro_batch
from odb_megatron.data.step_loader import StepHeader, StepLoader
from odb_megatron.data.step_wire import (
    Ending,
    StepMetadata,
    decode_header,
    decode_payload,
    encode_header,
    encode_payload,
    payload_bytes,
)
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.plan.records import ReplicaFailedError

__all__ = ["Channel", "ChunkIterator", "ContextPart", "StepFeed"]

Item = StepHeader | MicroBatchLayout


class Channel(Protocol):
    """What `comm.delivery.ReplicaGroup` does."""

    @property
    def has_payload(self) -> bool:
        """Whether this rank takes part in payload broadcasts."""

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the leader passes it."""

    def payload(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Broadcast a payload into a buffer of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """Which part of a context-parallel group's tokens a rank holds."""

    size: int = 1
    rank: int = 0


class StepFeed:
    """Steps of one loader on one rank of a replica.

    Args:
        loader: the leader's; None on other ranks.
        channel: to the replica's other ranks; None for a replica of one rank.
        part: this rank's context-parallel part.
        num_chunks: virtual pipeline chunks of this rank.
        multiple: padded lengths are multiples of this.
        num_steps: steps of one pass over the stream.

    Attributes:
        num_steps: see above.
        iterators: one for each chunk; all give the same items.
    """

    def __init__(
        self,
        loader: StepLoader | None,
        *,
        channel: Channel | None,
        part: ContextPart | None = None,
        num_chunks: int = 1,
        multiple: int = 1,
        num_steps: int = 0,
    ) -> None:
        if loader is None and channel is None:
            raise ValueError("a rank without a loader needs a channel to its leader")
        self._loader = loader
        self._channel = channel
        self._part = part or ContextPart()
        self._multiple = multiple
        self.num_steps = num_steps
        self.iterators = [ChunkIterator(self) for _ in range(num_chunks)]

    def restart(self) -> None:
        """Begin the loader's stream again (Megatron's full validation)."""
        if self._loader is not None:
            self._loader = iter(self._loader)
        for iterator in self.iterators:
            iterator.clear()

    def fetch(self) -> None:
        """Get the next step and put its items into every iterator.

        Raises:
            StopIteration: the stream has ended.
            ReplicaFailedError: the leader failed; it raises its own error.
        """
        header, micro_batches = self._send() if self._loader is not None else self._receive()
        items: list[Item] = [header]
        for item in micro_batches:
            if isinstance(item, MicroBatch):
                item = slice_micro_batch(item, size=self._part.size, rank=self._part.rank)
            items.append(item)
        for iterator in self.iterators:
            iterator.extend(items)

    def _send(self) -> tuple[StepHeader, list[MicroBatch]]:
        try:
            header, micro_batches = self._next_step()
            assert self._loader is not None
            metadata = StepMetadata.of(
                header.totals,
                micro_batches,
                multiple=self._multiple,
                length=self._loader.config.micro_batch_length,
            )
            payload = encode_payload(micro_batches) if self._channel is not None else None
        except BaseException as error:
            if self._channel is not None:
                ended = isinstance(error, StopIteration)
                text = "" if ended else f"{type(error).__name__}: {error}"
                self._channel.header(encode_header(Ending(error=text)))
            raise
        if self._channel is not None and payload is not None:
            self._channel.header(encode_header(metadata))
            self._channel.payload(payload)
        return header, micro_batches

    def _next_step(self) -> tuple[StepHeader, list[MicroBatch]]:
        assert self._loader is not None
        header = next(self._loader)
        assert isinstance(header, StepHeader), f"expected a step header, got {header!r}"
        items = [next(self._loader) for _ in header.micro_batches]
        return header, [item for item in items if isinstance(item, MicroBatch)]

    def _receive(self) -> tuple[StepHeader, list[MicroBatch] | list[MicroBatchLayout]]:
        assert self._channel is not None
        content = decode_header(self._channel.header())
        if isinstance(content, Ending):
            if content.error:
                raise ReplicaFailedError(f"the leader of this replica failed: {content.error}")
            raise StopIteration
        header = StepHeader(totals=content.totals, micro_batches=content.positions)
        if not self._channel.has_payload:
            return header, content.layouts()
        buffer = np.zeros(payload_bytes(content), dtype=np.uint8)
        return header, decode_payload(content, self._channel.payload(buffer))


class ChunkIterator:
    """Iterator of one model chunk over step headers and micro-batches.

    Args:
        feed: where steps come from, shared by the chunks of a rank.
    """

    def __init__(self, feed: StepFeed) -> None:
        self._feed = feed
        self._items: deque[Item] = deque()
        self._has_begun = False

    def __len__(self) -> int:
        """Steps of one pass over the stream."""
        return self._feed.num_steps

    def __iter__(self) -> ChunkIterator:
        """Start the stream again if it has begun (Megatron's full validation iterates so)."""
        if self._has_begun:
            self._feed.restart()
        return self

    def __next__(self) -> Item:
        self._has_begun = True
        if not self._items:
            self._feed.fetch()
        return self._items.popleft()

    def extend(self, items: list[Item]) -> None:
        """Take a step's items."""
        self._items.extend(items)

    def clear(self) -> None:
        """Forget items that were not taken."""
        self._items.clear()
        self._has_begun = False
