"""Pictures as patches: sizes that divide into them, and Qwen2-VL's order of patches.

Must not open files or know a tokenizer. PIL is imported when a picture is cut, not before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGE_TEXT", "IMAGE_TOKEN", "PatchRules", "cut_into_patches", "smart_resize"]

IMAGE_TOKEN = "<|image_pad|>"
"""Token that stands for a visual token, as in Qwen2-VL."""

IMAGE_TEXT = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
"""What a picture is in a message's text."""

_COLOURS = 3
_MAX_ASPECT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRules:
    """How a picture becomes patches.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of the squares of patches that become one visual token.
        min_pixels: a picture of fewer is enlarged.
        max_pixels: a picture of more is made smaller.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        if min(self.patch, self.merge) < 1:
            raise ValueError(
                f"patches of {self.patch} pixels, {self.merge} x {self.merge} to a token; expected "
                "at least 1"
            )
        if not self.side**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"pictures of {self.min_pixels} to {self.max_pixels} pixels; expected at least one "
                f"square of {self.side} x {self.side}, and the larger number last"
            )

    @property
    def side(self) -> int:
        """Side of the square that becomes one visual token, in pixels."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """Values of a patch."""
        return _COLOURS * self.patch**2

    @property
    def max_patches(self) -> int:
        """Most patches of a picture."""
        return self.max_pixels // self.patch**2


def smart_resize(height: int, width: int, rules: PatchRules) -> tuple[int, int]:
    """Return the size that a picture is brought to: multiples of the square, within the limits.

    As `smart_resize` of transformers (models/qwen2_vl/image_processing_qwen2_vl.py, 5.24), which
    exceeds the maximum where a picture is long for it: one square is the least across. Such a
    picture is refused here, so that the maximum holds.

    Raises:
        ValueError: an empty picture, one more than 200 times as long as wide, or one that would
            have more than `max_pixels`.
    """
    if min(height, width) < 1 or max(height, width) > _MAX_ASPECT * min(height, width):
        raise ValueError(
            f"the picture has {width} x {height} pixels; expected sides of at least 1 that differ "
            f"by a factor of at most {_MAX_ASPECT}"
        )
    side = rules.side
    needed = rules.max_pixels
    new_height, new_width = (round(length / side) * side for length in (height, width))
    if new_height * new_width > rules.max_pixels:
        factor = math.sqrt(height * width / rules.max_pixels)
        new_height, new_width = (
            max(side, math.floor(length / factor / side) * side) for length in (height, width)
        )
        needed = -(-max(height, width) // min(height, width)) * side**2
    elif new_height * new_width < rules.min_pixels:
        factor = math.sqrt(rules.min_pixels / (height * width))
        new_height, new_width = (
            math.ceil(length * factor / side) * side for length in (height, width)
        )
        needed = new_height * new_width
    if new_height * new_width > rules.max_pixels:
        raise ValueError(
            f"the picture has {width} x {height} pixels and would be brought to {new_width} x "
            f"{new_height}, in squares of {side} x {side}; expected up to {rules.max_pixels} "
            f"pixels: crop it, or raise --odb-image-max-pixels to {needed}"
        )
    return new_height, new_width


def cut_into_patches(
    picture: Image, rules: PatchRules
) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Return a picture's patches and its grid.

    Args:
        picture: in RGB.
        rules: sizes.

    Returns:
        patches, uint8 [P, 3 * patch * patch], the squares of `merge * merge` row by row, in each
        its patches row by row, in each its colours one after the other; and (1, height, width) in
        patches.

    Raises:
        ValueError: see `smart_resize`.
    """
    from PIL.Image import Resampling

    height, width = smart_resize(picture.height, picture.width, rules)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Resampling.BICUBIC)
    pixels = np.asarray(picture, dtype=np.uint8)
    rows, columns = height // rules.patch, width // rules.patch
    merge, patch = rules.merge, rules.patch
    parts = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, _COLOURS)
    ordered = parts.transpose(0, 3, 1, 4, 6, 2, 5)
    return ordered.reshape(rows * columns, rules.width), (1, rows, columns)
