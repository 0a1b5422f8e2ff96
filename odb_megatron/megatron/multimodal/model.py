"""A GPT whose visual tokens are embedded by a vision tower.

Must not read Megatron's arguments or know where samples begin: places come with the micro-batch.
Megatron's own LLaVA is not used: see docs/multimodal.md.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from odb_megatron.data.images import ImageLayout, visual_places
from odb_megatron.megatron.multimodal.shape import VisionShape
from odb_megatron.megatron.multimodal.tower import VisionTower

__all__ = ["ImageGPT"]


class ImageGPT(GPTModel):
    """A GPT with a vision tower in its first stage.

    The tower is the same on all tensor-parallel ranks. It runs in every micro-batch, also in one
    without images: gradient hooks wait for each weight.

    Args:
        vision: the tower's sizes.
        options: of `GPTModel`.
    """

    def __init__(self, *, vision: VisionShape, **options: Any) -> None:
        if options["config"].sequence_parallel:
            # The embedding is cut for sequence parallelism behind the images, not before.
            options["scatter_embedding_sequence_parallel"] = False
        super().__init__(**options)
        self.vision = VisionTower(vision) if self.pre_process else None

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        images: ImageLayout | None = None,
        pixel_values: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Embed tokens and images, then run the GPT.

        Args:
            input_ids: int64 [1, T]; any id at visual places.
            position_ids: int64 [3, 1, T] for `mrope`, [1, T] for `rope`.
            attention_mask: None.
            images: where images lie.
            pixel_values: [P, C], on any device; used by the first stage alone.
            options: of `GPTModel.forward`.
        """
        decoder_input = None
        if self.pre_process:
            decoder_input = self._embedded(input_ids, images, pixel_values)
            mask = options.get("padding_mask")
            if mask is not None and self.config.sequence_parallel:  # else cut with the embedding
                options["padding_mask"] = self._cut(mask.transpose(0, 1).contiguous()).transpose(
                    0, 1
                )
        output: Tensor = super().forward(
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, **options
        )
        return output

    def _embedded(
        self, input_ids: Tensor | None, images: ImageLayout | None, pixel_values: Tensor | None
    ) -> Tensor:
        assert self.vision is not None, "the first stage has the tower"
        text = self.embedding(input_ids=input_ids, position_ids=None)  # [T, 1, H]
        if images is None:
            visual = self.vision(*_nothing(self.vision, text.device))
            embedded: Tensor = text + 0.0 * visual.sum()
        else:
            assert pixel_values is not None, "delivered to the first stage"
            pixels = pixel_values.to(text.device, non_blocking=True)
            visual = self.vision(pixels, images.grid_thw)
            places = visual_places(images).to(text.device, non_blocking=True)
            embedded = text.index_copy(0, places, visual[:, None].to(text.dtype))
        return self._cut(embedded) if self.config.sequence_parallel else embedded

    def _cut(self, tensor: Tensor) -> Tensor:
        """Return this tensor-parallel rank's part of the first dimension."""
        part: Tensor = tensor_parallel.scatter_to_sequence_parallel_region(
            tensor, group=self.pg_collection.tp
        )
        return part


def _nothing(tower: VisionTower, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the smallest image there is, black."""
    side = tower.shape.merge
    pixels = torch.zeros((side**2, tower.shape.patch_width), dtype=torch.uint8, device=device)
    return pixels, torch.tensor([[1, side, side]])
