"""Pictures of chat records: taken out of a record, opened, and cut into Qwen2-VL's patches.

Neither a name nor a file is trusted: nothing is fetched, no name leads out of the picture folder,
and whatever is wrong is a ValueError, that is a bad record. Pillow is imported when a picture is
opened, not before.
"""

from __future__ import annotations

import base64
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from odb_megatron.data.images import SampleImages

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGE_TOKEN", "MAX_FILE_BYTES", "MAX_IMAGES", "MAX_SOURCE_PIXELS", "ImageRules"]
__all__ += ["RecordImages", "cut_into_patches", "open_picture", "smart_resize"]

IMAGE_TOKEN = "<|image_pad|>"
"""Token that stands for a visual token, as in Qwen2-VL."""

MAX_IMAGES = 256
"""Most pictures of a record."""

MAX_FILE_BYTES = 64 << 20
"""Largest picture file that is read."""

MAX_SOURCE_PIXELS = 1 << 26
"""Most pixels of a picture that is decoded: 4 bytes each meanwhile."""

_COLOURS = 3
_MAX_ASPECT = 200
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_MAX_SHOWN = 200
_COLUMNS = ("images", "image")
_SOURCES = ("image", "image_url", "path", "url")

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """What becomes of the pictures of a chat file.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of the squares of patches that become one visual token.
        min_pixels: a picture of fewer is enlarged.
        max_pixels: a picture of more is made smaller.
        folder: where pictures lie; empty for the folder of the chat file.
        token: becomes a picture's visual tokens.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    folder: str = ""
    token: str = IMAGE_TOKEN

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


# --- from a record to patches -------------------------------------------------------------------


class RecordImages:
    """The pictures of one record, in the order in which its messages take them.

    A part of a message is of type `image_url` (OpenAI: `image_url` is an object with `url`, or the
    URL) or `image` (`image`, `path` or `url`). One of type `image` without any of these takes the
    next of the record's column `images` (or `image`), all of which must be taken.

    Attributes:
        names: paths or data URIs.
    """

    def __init__(self, record: Mapping[str, Any], rules: ImageRules) -> None:
        column = next((name for name in _COLUMNS if record.get(name)), "")
        value = record.get(column, [])
        values = value if isinstance(value, list) else [value]
        self._listed = [_source(one, f"{column}[{i}]") for i, one in enumerate(values)]
        self._rules = rules
        self.names: list[str] = []

    def take(self, part: Mapping[str, Any], path: str) -> str:
        """Note the picture of a part; return what stands for it in the text."""
        given = [key for key in _SOURCES if part.get(key) is not None]
        if len(given) > 1:
            raise ValueError(f"{path} has {' and '.join(given)}; expected one of them")
        if given:
            self.names.append(_source(part[given[0]], f"{path}.{given[0]}"))
        elif self._listed:
            self.names.append(self._listed.pop(0))
        else:
            raise ValueError(
                f"{path} is an image without a source; expected {', '.join(_SOURCES)} in it, or "
                "one more in the record's column images"
            )
        return f"<|vision_start|>{self._rules.token}<|vision_end|>"

    def expand(
        self, ids: Integers, weights: npt.NDArray[np.float32], *, token: int, folder: str
    ) -> tuple[Integers, npt.NDArray[np.float32], SampleImages | None]:
        """Open the pictures, and give each as many tokens as it has visual ones.

        Raises:
            ValueError: a picture that is not taken, cannot be read, or of a wrong size.
        """
        num, num_found = len(self.names), int((ids == token).sum())
        if self._listed:
            raise ValueError(
                f"{len(self._listed)} of the images that the record lists have no part of type "
                "'image' in a message: add the parts where the pictures belong"
            )
        if num > MAX_IMAGES:
            raise ValueError(f"the record has {num} pictures; up to {MAX_IMAGES} are taken")
        if num_found != num:
            raise ValueError(
                f"the record has {num} pictures, and its text {num_found} times "
                f"{self._rules.token}: a message must not hold this token itself, and the chat "
                "template must print each message once"
            )
        if not num:
            return ids, weights, None
        cut = [self._cut(name, folder) for name in self.names]
        grid = np.array([one for _, one in cut], dtype=np.int64)
        counts = grid.prod(axis=1) // self._rules.merge**2
        times, places = np.ones(ids.size, dtype=np.int64), np.flatnonzero(ids == token)
        times[places] = counts
        starts = (np.cumsum(times) - times)[places]
        weights = np.repeat(weights * (ids != token), times)  # visual tokens have none
        pixels = np.concatenate([patches for patches, _ in cut])
        images = SampleImages(
            pixel_values=pixels, grid_thw=grid, starts=starts, merge=self._rules.merge
        )
        return np.repeat(ids, times), weights, images

    def _cut(self, name: str, folder: str) -> tuple[npt.NDArray[np.uint8], Sequence[int]]:
        try:
            return cut_into_patches(open_picture(name, folder=folder), self._rules)
        except ValueError as error:
            shown = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
            raise ValueError(f"the picture {shown!r} {error}") from error


def _source(value: Any, path: str) -> str:
    if isinstance(value, Mapping):
        if value.get("detail") not in (None, "auto", "high"):
            raise ValueError(
                f"{path}.detail is {str(value['detail'])[:40]!r}, and pictures have one size rule: "
                "drop it, and set --odb-image-max-pixels"
            )
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path} is a {type(value).__name__}; expected a path or a data: URI")
    return value


def smart_resize(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the size that a picture is brought to: multiples of the square, within the limits.

    As `smart_resize` of transformers (models/qwen2_vl/image_processing_qwen2_vl.py, 5.24), which
    exceeds the maximum where a picture is long for it: one square is the least across. Such a
    picture is refused here, so that the maximum holds.

    Raises:
        ValueError: an empty picture, one more than 200 times as long as wide, or one that would
            have more than `max_pixels`.
    """
    size, side = (height, width), rules.side
    if min(size) < 1 or max(size) > _MAX_ASPECT * min(size):
        raise ValueError(
            f"has {width} x {height} pixels; expected sides of at least 1 that differ "
            f"by a factor of at most {_MAX_ASPECT}"
        )
    new = [round(length / side) * side for length in size]
    if math.prod(new) > rules.max_pixels:
        factor = math.sqrt(height * width / rules.max_pixels)
        new = [max(side, math.floor(length / factor / side) * side) for length in size]
    elif math.prod(new) < rules.min_pixels:
        factor = math.sqrt(rules.min_pixels / (height * width))
        new = [math.ceil(length * factor / side) * side for length in size]
    if math.prod(new) > rules.max_pixels:
        raise ValueError(
            f"has {width} x {height} pixels and would be brought to {new[1]} x {new[0]}, in "
            f"squares of {side} x {side}; expected up to {rules.max_pixels} pixels: crop it, or "
            "raise --odb-image-max-pixels"
        )
    return new[0], new[1]


def cut_into_patches(
    picture: Image, rules: ImageRules
) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Return the patches of a picture in RGB, and its grid.

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


# --- opening ------------------------------------------------------------------------------------


def open_picture(name: str, *, folder: str) -> Image:
    """Return the picture in RGB, turned upright as its EXIF says; of an animation the first frame.

    Grey of 16 bits is scaled to 8, transparency laid on white (as `to_rgb` of qwen-vl-utils has
    it): Pillow's own conversion clips the one and shows the hidden colours of the other.

    Args:
        name: path relative to `folder`, or absolute and below it; or a `data:` URI in base64.
        folder: symbolic links out of it are not followed.

    Raises:
        ValueError: a web address, a name outside the folder, no file, too large, damaged, or no
            picture.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(
            f"is read by Pillow, which cannot be imported ({error}): pip install pillow"
        ) from error

    data = _decoded(name) if name.startswith("data:") else _read(name, folder)
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_SOURCE_PIXELS:
                raise ValueError(
                    f"it has {width} x {height} pixels; up to {MAX_SOURCE_PIXELS} are decoded"
                )
            return _in_colour(ImageOps.exif_transpose(picture))
    except Exception as error:  # of PIL: its readers raise what they come upon
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        if isinstance(error, UnidentifiedImageError):  # whose own text names a buffer
            reason = f"its {len(data)} bytes begin like none"
        expected = ", ".join(_FORMATS)
        raise ValueError(f"cannot be read as a picture ({reason}); expected {expected}") from error


def _in_colour(picture: Image) -> Image:
    from PIL import Image

    hidden = picture.info.get("transparency")
    # Pillow up to 11 has 16-bit grey of PNGs as mode I.
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        eight_bits = np.round(np.arange(1 << 16) / 257).astype(np.uint8)
        if isinstance(hidden, int) and 0 <= hidden < 1 << 16:
            eight_bits[hidden] = 255
        values = np.clip(np.asarray(picture), 0, (1 << 16) - 1)
        return Image.fromarray(eight_bits[values]).convert("RGB")
    if hidden is None and picture.mode not in ("LA", "PA", "RGBA"):
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    found = Image.new("RGB", picture.size, "white")
    found.paste(layer, mask=layer.getchannel("A"))
    return found


def _decoded(name: str) -> bytes:
    found = _DATA.match(name)
    if found is None:
        raise ValueError("is no picture; expected data:image/...;base64,...")
    if len(name) > MAX_FILE_BYTES * 4 // 3:
        raise ValueError(f"has {len(name)} characters; up to {MAX_FILE_BYTES} bytes are read")
    try:
        return base64.b64decode(name[found.end() :], validate=True)
    except ValueError as error:  # binascii.Error, or characters that are not ASCII
        raise ValueError(f"is no base64 ({error})") from error


def _read(name: str, folder: str) -> bytes:
    if _SCHEME.match(name):
        raise ValueError(
            "is a web address or another URI, and nothing is fetched while training: download the "
            "picture, and name its path below the picture folder"
        )
    root = os.path.realpath(folder)
    try:
        path = os.path.realpath(os.path.join(root, name))
        os.fsencode(path)
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise ValueError(f"is no path ({error}): correct the name in the record") from error
    if os.path.commonpath([root, path]) != root:
        raise ValueError(
            f"lies outside the picture folder {folder}: move the picture, or name another folder "
            "by --odb-image-folder"
        )
    try:
        # Not to wait for a pipe's other end, and not through a link put there meanwhile.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file, "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                size = f"has {found.st_size} bytes, of which up to {MAX_FILE_BYTES} are read"
                raise ValueError(f"is no file, or {size}")
            return stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"in {folder} cannot be opened ({error.strerror})") from error
