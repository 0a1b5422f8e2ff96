"""Images of a sample, and where the images of a packed micro-batch lie.

Pure values: must not open files, know a tokenizer or run a vision tower. An image is a grid of
`t * h * w` patches; each square of `merge * merge` patches of it becomes one visual token, so that
`t * h * w / merge**2` places of the sample are its own. Shape suffixes: I images, I1 = I + 1,
P patches, C values of a patch, S1 samples + 1, V visual tokens, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PIXEL_TYPES", "ImageLayout", "PixelFormat", "SampleImages", "image_layout"]
__all__ += ["mrope_positions", "visual_places"]

Integers = npt.NDArray[np.int64]

PIXEL_TYPES = ("uint8", "float16", "float32")
"""Types that patches can have. `uint8` are colours as they are in the picture: an eighth of the
bytes of Qwen2-VL's own `pixel_values`, float32 with each frame twice."""

_MAX_SIDE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelFormat:
    """What all patches of a step have in common.

    Attributes:
        width: values of a patch.
        dtype: one of `PIXEL_TYPES`.
        merge: side of the squares of patches that become one visual token.
    """

    width: int
    dtype: str
    merge: int

    def __post_init__(self) -> None:
        if self.dtype not in PIXEL_TYPES or min(self.width, self.merge) < 1:
            raise ValueError(
                f"patches of {self.width} values of type {self.dtype}, {self.merge} x {self.merge} "
                f"to a token; expected at least 1, 1 and one of {', '.join(PIXEL_TYPES)}"
            )

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch."""
        return self.width * np.dtype(self.dtype).itemsize

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """Visual tokens of an image."""
        t, h, w = grid_thw
        return t * h * w // self.merge**2


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleImages:
    """Images of one sample, in the order of their places.

    Attributes:
        pixel_values: uint8, float16 or float32 [P, C], patches of all images one after the other,
            those of a square beside each other (Qwen2-VL's order).
        grid_thw: int64 [I, 3], patches of each image in time, height and width.
        starts: int64 [I], the sample's token at which each image's visual tokens begin.
        merge: side of the squares of patches that become one visual token.
    """

    pixel_values: npt.NDArray[np.generic]
    grid_thw: Integers
    starts: Integers
    merge: int = 2

    def __post_init__(self) -> None:
        grid, pixels, starts = self.grid_thw, self.pixel_values, self.starts
        if grid.ndim != 2 or grid.shape[1:] != (3,) or not len(grid):
            raise ValueError(f"image_grid_thw has shape {grid.shape}; expected [images, 3]")
        if starts.shape != grid.shape[:1] or pixels.ndim != 2:
            raise ValueError(
                f"image_starts has shape {starts.shape} and pixel_values {pixels.shape}; "
                f"expected [{len(grid)}] and [patches, values]"
            )
        _ = self.format  # checks type and sizes
        expected = ""
        if int(grid.min()) < 1 or int(grid.max()) > _MAX_SIDE or (grid[:, 1:] % self.merge).any():
            expected = f"counts from 1 to {_MAX_SIDE}, height and width multiples of {self.merge}"
        elif int(grid.prod(axis=1).sum()) != len(pixels):
            expected = f"as many patches as pixel_values has, {len(pixels)}"
        elif (starts[1:] < self.ends[:-1]).any() or int(starts[0]) < 0:
            expected = f"one image behind the other; they begin at tokens {starts.tolist()}"
        if expected:
            raise ValueError(f"image_grid_thw is {grid.tolist()}; expected {expected}")

    @property
    def format(self) -> PixelFormat:
        """What its patches are."""
        pixels = self.pixel_values
        return PixelFormat(width=pixels.shape[1], dtype=pixels.dtype.name, merge=self.merge)

    @property
    def ends(self) -> Integers:
        """Token behind the last visual one of each image, int64 [I]."""
        return self.starts + self.grid_thw.prod(axis=1) // self.merge**2

    @property
    def num_patches(self) -> int:
        """Patches of all images."""
        return len(self.pixel_values)

    def kept(self, num_tokens: int) -> SampleImages | None:
        """Return the images that lie wholly in the sample's first tokens; None for none."""
        count = int((self.ends <= num_tokens).sum())
        grid, starts = self.grid_thw[:count], self.starts[:count]
        pixels = self.pixel_values[: int(grid.prod(axis=1).sum())]
        return replace(self, pixel_values=pixels, grid_thw=grid, starts=starts) if count else None

    def whole_length(self, num_tokens: int) -> int:
        """Return how many of so many first tokens are left if no image may be cut."""
        cut = (self.starts < num_tokens) & (self.ends > num_tokens)
        return int(self.starts[cut][0]) if cut.any() else num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Where the images of a micro-batch lie: every pipeline stage needs it for positions.

    Attributes:
        grid_thw: int64 [I, 3].
        starts: int64 [I], place in T of each image's first visual token.
        cu_images: int32 [S1], cumulative images of the samples.
        cu_patches: int32 [I1], cumulative patches of the images: offsets into `pixel_values`.
        merge: side of the squares of patches that become one visual token.
    """

    grid_thw: Tensor
    starts: Tensor
    cu_images: Tensor
    cu_patches: Tensor
    merge: int


def image_layout(images: Sequence[Sequence[int]], offsets: Integers, *, merge: int) -> ImageLayout:
    """Lay out the images of a micro-batch.

    Args:
        images: see `wire.StepHeader`.
        offsets: place in T of each sample.
        merge: see `ImageLayout`.
    """
    rows = np.array(images, dtype=np.int64)
    sample, grid = rows[:, 0], rows[:, 1:4]
    counts = np.bincount(sample, minlength=len(offsets))
    return ImageLayout(
        grid_thw=torch.from_numpy(grid.copy()),
        starts=torch.from_numpy(offsets[sample] + rows[:, 4]),
        cu_images=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        cu_patches=torch.tensor([0, *np.cumsum(grid.prod(axis=1))], dtype=torch.int32),
        merge=merge,
    )


def visual_places(images: ImageLayout) -> Tensor:
    """Return the places in T of all visual tokens, int64 [V], image by image."""
    counts = images.grid_thw.prod(dim=1) // images.merge**2
    before = torch.cumsum(counts, dim=0) - counts
    runs = torch.repeat_interleave(images.starts - before, counts)
    return runs + torch.arange(int(counts.sum()))


def mrope_positions(cu_seqlens_padded: Tensor, images: ImageLayout | None) -> Tensor:
    """Return positions in time, height and width, int64 [3, 1, T], from 0 in each sample.

    A text token advances all three. Visual tokens count from the position behind the text before
    them along the three axes of their grid, and what follows goes on behind the largest of these
    (Qwen2-VL, `get_rope_index` of transformers 5.24). Without images all three are the places in
    the sample. Padding goes on as text.

    Args:
        cu_seqlens_padded: int32 [S1].
        images: None for a micro-batch without any.
    """
    offsets = cu_seqlens_padded.numpy().astype(np.int64)
    positions_3T = np.empty((3, int(offsets[-1])), dtype=np.int64)
    found: list[tuple[int, list[int]]] = []
    if images is not None:
        grid = images.grid_thw // torch.tensor([1, images.merge, images.merge])
        found = list(zip(images.starts.tolist(), grid.tolist(), strict=True))[::-1]
    for start, end in pairwise(offsets.tolist()):
        place, position = start, 0
        while found and found[-1][0] < end:
            begin, (t, h, w) = found.pop()
            text = begin - place
            positions_3T[:, place:begin] = np.arange(position, position + text)
            place, axes_3V = begin + t * h * w, np.indices((t, h, w)).reshape(3, -1)
            positions_3T[:, begin:place] = axes_3V + position + text
            position += text + max(t, h, w)
        positions_3T[:, place:end] = np.arange(position, position + end - place)
    return torch.from_numpy(positions_3T)[:, None]
