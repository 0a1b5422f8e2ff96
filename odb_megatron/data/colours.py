"""A picture's colours in RGB, 8 bits each, whatever its file stores.

Must not open files. A conversion that would lose the picture is an error or is done here: Pillow's
own clips 16 bits to 255, and shows the hidden colours of transparent pixels. PIL is imported when
a picture is converted, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["in_rgb"]

_EIGHT_BITS = ("1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_WHITE = 255


def in_rgb(picture: Image, *, is_png: bool = False) -> Image:
    """Return the picture in RGB: 16-bit grey scaled to 8 bits, transparency laid on white.

    White as `to_rgb` of qwen-vl-utils has it.

    Args:
        picture: of any mode of Pillow.
        is_png: it was read from a PNG; Pillow up to 11 has 16-bit grey of those as mode I.

    Raises:
        ValueError: a mode whose values have no defined range.
    """
    from PIL import Image

    if picture.mode in _SIXTEEN_BITS or (picture.mode == "I" and is_png):
        return _from_sixteen_bits(picture)
    if picture.mode not in _EIGHT_BITS:
        raise ValueError(
            f"its pixels are of Pillow's mode {picture.mode}, whose values have no defined range; "
            "expected grey of 8 or 16 bits, a palette, or colours of 8 bits: convert it"
        )
    if "transparency" not in picture.info and picture.mode not in ("LA", "PA", "RGBA"):
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    found = Image.new("RGB", picture.size, (_WHITE,) * 3)
    found.paste(layer, mask=layer.getchannel("A"))
    return found


def _from_sixteen_bits(picture: Image) -> Image:
    from PIL import Image

    eight_bits = np.round(np.arange(1 << 16) / 257).astype(np.uint8)
    hidden = picture.info.get("transparency")
    if isinstance(hidden, int) and 0 <= hidden < 1 << 16:
        eight_bits[hidden] = _WHITE
    values = np.clip(np.asarray(picture), 0, (1 << 16) - 1)
    return Image.fromarray(eight_bits[values]).convert("RGB")
