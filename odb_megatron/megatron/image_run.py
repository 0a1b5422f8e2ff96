"""A run of `pretrain()` whose samples have images, with a model of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

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

    def _why_not_shared(self) -> str:
        return "pictures are encoded whole"

    def _make_replica(self) -> ReplicaData:
        return ReplicaData(
            self._args,
            self._place,
            deadlines=self._deadlines,
            has_images=True,
        )


def image_batch(
    item: MicroBatchLayout, *, is_mrope: bool, model_inputs: Mapping[str, Tensor] | None = None
) -> Batch:
    """Return `packed_batch` with images, and with positions on every pipeline stage."""
    tensors = dict(model_inputs or {})
    if isinstance(item, MicroBatch) and item.pixel_values is not None:
        tensors["pixel_values"] = item.pixel_values
    if is_mrope:
        tensors["mrope"] = mrope_positions(item.cu_seqlens_padded, item.images)
    batch = packed_batch(item, model_inputs=tensors)
    inputs = {"pixel_values": None, **batch.model_inputs, "images": item.images}
    positions = inputs.pop("mrope", batch.position_ids)
    return replace(batch, position_ids=positions, model_inputs=inputs)
