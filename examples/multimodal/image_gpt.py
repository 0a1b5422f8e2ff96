"""A GPT with a small vision tower after Qwen2-VL's, to start from: patches in, visual tokens out.

The tower is the same on all tensor-parallel ranks. It runs in every micro-batch, also in one
without images: gradient hooks wait for each weight. Shapes: P patches, C values of a patch,
H hidden size, N heads, D channels of a head, V visual tokens, I images.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from odb_megatron.data.images import ImageLayout, visual_places

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, as Qwen2-VL normalizes colours."""

_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower.

    Attributes:
        num_layers: transformer layers.
        hidden: hidden size.
        ffn_hidden: intermediate size of the MLPs.
        num_heads: attention heads.
        patch_width: values of a patch.
        merge: side of the squares of patches that become one visual token.
        output: hidden size of the language model.
        seed: of the initial weights, which are the same on all ranks.
        init_std: their standard deviation.
    """

    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    patch_width: int
    merge: int
    output: int
    seed: int = 0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.ffn_hidden, self.num_heads, self.patch_width, self.merge)
        if min(*sizes, self.output) < 1 or self.num_layers < 0:
            raise ValueError(f"the vision tower's sizes must be at least 1; got {self}")
        if self.hidden % self.num_heads or self.head % 4:
            raise ValueError(
                f"a vision tower of hidden size {self.hidden} with {self.num_heads} heads; "
                "expected heads of equal size, a multiple of 4: half for height, half for width"
            )

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.num_heads

    def flops_per_patch(self, *, num_patches: int) -> int:
        """Return forward FLOPs of a patch in an image of so many patches.

        Attention within an image sees all of it, both ways; the merger works once per square.
        """
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.ffn_hidden
        attention = 2 * num_patches * self.hidden
        merged = self.hidden * self.merge**2
        merger = (merged**2 + merged * self.output) // self.merge**2
        return 2 * (self.patch_width * self.hidden + self.num_layers * (layer + attention) + merger)


class VisionTower(nn.Module):
    """Patch embedding, transformer with attention within each image, merger.

    Positions are rotary in height and width. Colours (uint8) are normalized here, so that patches
    travel as bytes; float patches are taken as they are.

    Args:
        shape: its sizes.
    """

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Linear(shape.patch_width, shape.hidden, bias=False)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        merged = shape.hidden * shape.merge**2
        self.norm = nn.LayerNorm(shape.hidden)
        self.merger_in = nn.Linear(merged, merged)
        self.merger_out = nn.Linear(merged, shape.output)
        generator = torch.Generator().manual_seed(shape.seed)
        for weight in self.parameters():
            if weight.ndim > 1:
                made = torch.empty(weight.shape, dtype=torch.float32)
                made.normal_(std=shape.init_std, generator=generator)
                weight.data.copy_(made)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixel_values: uint8 or floating [P, C].
            grid_thw: int64 [I, 3], on the CPU.

        Returns:
            [V, output], image by image.
        """
        weight = self.embedding.weight
        x_PH = self.embedding(_normalized(pixel_values).to(weight.dtype))
        angles_PD = _angles(grid_thw, self.shape).to(x_PH.device)
        cos_PD, sin_PD = angles_PD.cos(), angles_PD.sin()
        ends = [0, *grid_thw.prod(dim=1).cumsum(dim=0).tolist()]
        for layer in self.layers:
            x_PH = layer(x_PH, cos_PD, sin_PD, ends)
        merged = self.norm(x_PH).reshape(-1, self.merger_in.in_features)
        out: Tensor = self.merger_out(F.gelu(self.merger_in(merged)))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden)

    def forward(self, x_PH: Tensor, cos_PD: Tensor, sin_PD: Tensor, ends: list[int]) -> Tensor:
        num_patches = x_PH.size(0)
        qkv = self.qkv(self.norm1(x_PH)).view(num_patches, 3, self.num_heads, -1)
        query, key, value = qkv.unbind(dim=1)
        query_NPD, key_NPD, value_NPD = (
            part.transpose(0, 1)
            for part in (_rotated(query, cos_PD, sin_PD), _rotated(key, cos_PD, sin_PD), value)
        )
        parts = [
            F.scaled_dot_product_attention(
                query_NPD[None, :, start:end],
                key_NPD[None, :, start:end],
                value_NPD[None, :, start:end],
            )[0].transpose(0, 1)
            for start, end in pairwise(ends)
        ]
        x_PH = x_PH + self.out(torch.cat(parts).flatten(1))
        hidden = F.gelu(self.up(self.norm2(x_PH)), approximate="tanh")
        out: Tensor = x_PH + self.down(hidden)
        return out


def _normalized(pixel_values: Tensor) -> Tensor:
    if pixel_values.dtype is not torch.uint8:
        return pixel_values
    device = pixel_values.device
    mean, std = (torch.tensor(of, device=device).view(1, 3, 1) for of in (_MEAN, _STD))
    colours = pixel_values.view(pixel_values.size(0), 3, -1) / 255.0
    normalized: Tensor = ((colours - mean) / std).flatten(1)
    return normalized


def _angles(grid_thw: Tensor, shape: VisionShape) -> Tensor:
    """Return rotary angles, float32 [P, D]: height in the first quarter of pairs, then width."""
    quarter = shape.head // 4
    frequencies = _THETA ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
    rows = []
    for t, h, w in grid_thw.tolist():
        at = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
        merge = shape.merge  # squares lie together
        squares = at.view(2, h // merge, merge, w // merge, merge)
        rows.append(squares.permute(1, 3, 2, 4, 0).reshape(-1, 2).repeat(t, 1))
    angles = (torch.cat(rows)[:, :, None] * frequencies).flatten(1)
    return torch.cat((angles, angles), dim=-1)


def _rotated(x_PND: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    first, second = x_PND.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_PND.float() * cos_PD[:, None] + turned * sin_PD[:, None]).to(x_PND.dtype)


class ImageGPT(GPTModel):  # type: ignore[misc]
    """A GPT with a vision tower in its first stage.

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
