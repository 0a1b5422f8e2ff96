"""A run of `pretrain()` whose samples have images, with a model of your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from odb_megatron.data.images import mrope_positions
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.megatron.forward_step import Batch, make_forward_step, packed_batch
from odb_megatron.megatron.replica import ReplicaData
from odb_megatron.megatron.run import OdbRun

__all__ = ["ImageRun", "image_batch"]


class ImageRun(OdbRun):
    """One run; see `OdbRun`. Its arguments have the flags of `images.add_image_arguments`.

    The model's `forward` is given `images` (`data.images.ImageLayout`; None where there are none)
    and `pixel_values` ([P, C], in the first pipeline stage), and for `mrope` position_ids
    [3, 1, T]. The planner takes a patch for `args.odb_patch_tokens` tokens, 0 where that is not
    set, or as `--odb-cost` says.
    """

    def _make_forward_step(self) -> Callable[..., Any]:
        is_mrope = self._args.position_embedding_type == "mrope"
        return make_forward_step(
            partial(image_batch, is_mrope=is_mrope),
            on_batch=self._on_batch,
            router_mask=self._router_mask(),
        )

    def _make_replica(self) -> ReplicaData:
        return ReplicaData(
            self._args,
            self._place,
            deadlines=self._deadlines,
            has_images=True,
        )


def image_batch(item: MicroBatchLayout, *, is_mrope: bool) -> Batch:
    """Return `packed_batch` with images, and with positions on every pipeline stage."""
    batch = packed_batch(item)
    if is_mrope:
        positions = mrope_positions(item.cu_seqlens_padded, item.images)
        device = torch.cuda.current_device()
        batch = replace(batch, position_ids=positions.to(device, non_blocking=True))
    pixels = item.pixel_values if isinstance(item, MicroBatch) else None
    return replace(batch, model_inputs={"images": item.images, "pixel_values": pixels})
