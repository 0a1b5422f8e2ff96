"""The padded baseline: the same stream as fixed-length items for Megatron's own data loader.

Must not pack or plan; it exists so that `--odb` has an equal to be compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from odb_megatron.data.sample import Skipped
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import PAD_TOKEN

__all__ = ["PaddedDataset"]


class PaddedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Map-style over stream positions, every item padded to `sequence_length`.

    An item holds int64 `tokens`, `labels`, `position_ids` and float32 `loss_mask`, each
    [sequence_length], the ints `length` (0 for a position that emits nothing), `position` and
    `truncated` (0 or 1), and why a position emits nothing: `skipped` (a SkipReason, else 0)
    and `message`.

    Args:
        stream: its `len()` is this one's.
        sequence_length: `--seq-length`.
        split: Megatron's Split; its sampler chooses the batch size by it.
    """

    def __init__(self, stream: SampleStream, *, sequence_length: int, split: Any) -> None:
        self.stream = stream
        self.split = split
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, position: int) -> dict[str, Any]:
        size = self._sequence_length
        tokens = np.full(size, PAD_TOKEN, dtype=np.int64)
        labels = np.full(size, PAD_TOKEN, dtype=np.int64)
        loss_mask = np.zeros(size, dtype=np.float32)
        sample = self.stream.fetch(position)
        length, truncated, skipped, message = 0, 0, 0, ""
        if isinstance(sample, Skipped):
            skipped, message = int(sample.reason), sample.message
        else:
            length, truncated = len(sample), int(sample.truncated > 0)
            tokens[:length] = sample.tokens
            labels[:length] = sample.labels
            loss_mask[:length] = sample.loss_mask
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": np.arange(size, dtype=np.int64),
            "length": length,
            "position": position,
            "truncated": truncated,
            "skipped": skipped,
            "message": message,
        }
