"""A rank's micro-batches as Bridge's own forward steps read them, and the state of the train data.

Must not plan or cut: Bridge cuts a rank's context-parallel part itself (gpt_step.py
`_partition_packed_batch_for_cp`, 0.6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from odb_megatron.data.feed import StepHeader
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout

__all__ = ["Batches", "TrainBatches", "as_batch"]


def as_batch(item: MicroBatchLayout) -> dict[str, Any]:
    """Return what `megatron.bridge.training.gpt_step.get_batch` takes from the iterator.

    Ranks that use no tokens get None for them, and the layout all the same: without it a middle
    pipeline stage would attend across samples. Segments of padding alone are named as real, and
    entries that stand for no token are left out, so that no kernel meets a sample of no tokens.
    """
    names = ("tokens", "labels", "loss_mask", "position_ids")
    has_tokens = isinstance(item, MicroBatch)
    used = item.cu_seqlens_padded.diff() > 0
    padded = torch.cat([item.cu_seqlens_padded[:1], item.cu_seqlens_padded[1:][used]])
    lengths = item.cu_seqlens.diff()[used]
    lengths = torch.where(lengths == 0, padded.diff(), lengths)
    real = torch.cat([padded[:1], lengths.cumsum(0, dtype=torch.int32)])
    longest = torch.tensor(item.max_seqlen, dtype=torch.int32)
    return {
        **{name: getattr(item, name) if has_tokens else None for name in names},
        "attention_mask": None,
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


class Batches:
    """Step headers as they come, micro-batches as dictionaries.

    Args:
        items: of `data.feed`.
        on_batch: called with each micro-batch.
    """

    def __init__(self, items: Iterator[Any], *, on_batch: Callable[[MicroBatchLayout], None]):
        self._items = items
        self._on_batch = on_batch

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> StepHeader | dict[str, Any]:
        item = next(self._items)
        if isinstance(item, StepHeader):
            return item
        self._on_batch(item)
        return as_batch(item)


class TrainBatches(Batches):
    """The same for training, with the two methods that Bridge's checkpoints ask for.

    Bridge calls `save_state` on the first rank of each replica and `restore_state` on all
    (checkpointing.py `maybe_save_dataloader_state`, `maybe_load_dataloader_state`, 0.6.2).

    Args:
        items: see `Batches`.
        on_batch: see `Batches`.
        save: returns the state as text.
        restore: continues from it.
    """

    def __init__(
        self,
        items: Iterator[Any],
        *,
        on_batch: Callable[[MicroBatchLayout], None],
        save: Callable[[], str],
        restore: Callable[[str], None],
    ) -> None:
        super().__init__(items, on_batch=on_batch)
        self._save, self._restore = save, restore

    def save_state(self) -> dict[str, str]:
        """Return the state after the last step trained."""
        return {"odb": self._save()}

    def restore_state(self, state: Any) -> None:
        """Continue from `state`, before the first step.

        Raises:
            ValueError: it is none of `save_state`, or see `BridgeRun.restore`.
        """
        text = state.get("odb") if isinstance(state, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f"the dataloader state of the checkpoint is {str(state)[:80]!r}, which ODB did not "
                "write: resume with the data loader that did, or start the data anew "
                "(checkpoint.finetune=true)"
            )
        self._restore(text)
