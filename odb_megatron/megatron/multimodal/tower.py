"""A small vision tower after Qwen2-VL's: patches of many images in, visual tokens out.

Must not know samples, Megatron or process groups: every rank that has images encodes all of them.
Shapes: P patches, C values of a patch, H hidden size, N heads, D channels of a head, V visual
tokens, I images.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odb_megatron.megatron.multimodal.shape import VisionShape

__all__ = ["VisionTower"]

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, as Qwen2-VL normalizes colours."""

_THETA = 10000.0


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
