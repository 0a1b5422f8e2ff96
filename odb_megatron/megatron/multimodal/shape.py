"""Sizes of a vision tower, and what they cost.

Pure: no torch, no Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VisionShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of `tower.VisionTower`.

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
