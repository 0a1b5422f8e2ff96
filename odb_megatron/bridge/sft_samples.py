"""Samples of Bridge's text SFT datasets, without padding.

Must not tokenize: Bridge's own dataset does, with its templates, loss masks and truncation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["SftSamples"]


class SftSamples:
    """A `GPTSFTDataset` or `GPTSFTChatDataset` of Bridge as items of `data.sources.MapSource`.

    Args:
        dataset: Bridge's, unpacked.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `tokens`, `labels` and `loss_mask` of one record, each [L]."""
        item = self._dataset[int(index)]
        length = min(len(item["input_ids"]) - 1, self._dataset.max_seq_length)
        batch = self._dataset.collate_fn([item])
        return {
            name: np.asarray(batch[name][0, :length]) for name in ("tokens", "labels", "loss_mask")
        }
