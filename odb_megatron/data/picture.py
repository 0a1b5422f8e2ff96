"""Opens the picture that a record names, and trusts neither the name nor the file.

Must not fetch anything from a network, follow a name out of the picture folder, or know what
becomes of the pixels. Whatever is wrong is a ValueError: a bad record.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from io import BytesIO
from typing import TYPE_CHECKING

from odb_megatron.data.colours import in_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_FILE_BYTES", "MAX_SOURCE_PIXELS", "check_pillow", "open_picture", "shown_name"]

MAX_FILE_BYTES = 64 << 20
"""Largest picture file that is read."""

MAX_SOURCE_PIXELS = 1 << 26
"""Most pixels of a picture that is decoded: 4 bytes each meanwhile."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_MAX_SHOWN = 200


def check_pillow() -> None:
    """Raise unless PIL can be imported.

    Raises:
        ValueError: it cannot.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"pictures are read by Pillow, which cannot be imported ({error}): pip install pillow"
        ) from error


def open_picture(name: str, *, folder: str) -> Image:
    """Return the picture in RGB, turned upright as its EXIF says; of an animation the first frame.

    See `colours.in_rgb` for 16 bits and transparency.

    Args:
        name: path relative to `folder`, or absolute and below it; or a `data:` URI in base64.
        folder: symbolic links out of it are not followed.

    Raises:
        ValueError: a web address, a name outside the folder, no file, too large, damaged, or no
            picture.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    data = _decoded(name) if name.startswith("data:") else _read(name, folder)
    shown = shown_name(name)
    if not data:
        raise ValueError(f"{shown} is empty; expected {', '.join(_FORMATS)}")
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_SOURCE_PIXELS:
                raise ValueError(
                    f"it has {width} x {height} pixels; up to {MAX_SOURCE_PIXELS} are decoded"
                )
            is_png = picture.format == "PNG"
            upright: Image.Image = ImageOps.exif_transpose(picture)
            return in_rgb(upright, is_png=is_png)
    except UnidentifiedImageError as error:  # whose own text names a buffer
        raise ValueError(
            f"{shown} cannot be read as a picture: its {len(data)} bytes begin like none; "
            f"expected {', '.join(_FORMATS)}"
        ) from error
    except Exception as error:  # of PIL: its readers raise what they come upon
        raise ValueError(
            f"{shown} cannot be read as a picture ({type(error).__name__}: {str(error)[:200]}); "
            f"expected {', '.join(_FORMATS)}"
        ) from error


def _decoded(name: str) -> bytes:
    found, shown = _DATA.match(name), shown_name(name)
    if found is None:
        raise ValueError(f"{shown} is no picture; expected data:image/...;base64,...")
    if len(name) > MAX_FILE_BYTES * 4 // 3:
        raise ValueError(
            f"{shown} has {len(name)} characters; pictures of up to {MAX_FILE_BYTES} bytes are read"
        )
    try:
        return base64.b64decode(name[found.end() :], validate=True)
    except ValueError as error:  # binascii.Error, or characters that are not ASCII
        raise ValueError(f"{shown} is no base64 ({error})") from error


def _read(name: str, folder: str) -> bytes:
    shown = shown_name(name)
    if _SCHEME.match(name):
        raise ValueError(
            f"{shown} is a web address or another URI, and nothing is fetched while training: "
            "download the picture, and name its path below the picture folder"
        )
    root = os.path.realpath(folder)
    try:
        path = os.path.realpath(os.path.join(root, name))
        os.fsencode(path)
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise ValueError(
            f"{shown} is no path ({error}): correct the name in the record, or drop the record"
        ) from error
    if os.path.commonpath([root, path]) != root:
        raise ValueError(
            f"{shown} lies outside the picture folder {folder}: move the picture, or name another "
            "folder by --odb-image-folder"
        )
    try:
        # Not to wait for a pipe's other end, and not through a link put there meanwhile.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file, "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{shown} is no file")
            if found.st_size > MAX_FILE_BYTES:
                raise ValueError(
                    f"{shown} has {found.st_size} bytes; up to {MAX_FILE_BYTES} are read"
                )
            return stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"{shown} in {folder} cannot be opened ({error.strerror})") from error


def shown_name(name: str) -> str:
    """Return the name, or the start of a long one, in quotes and without control characters."""
    return repr(name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "...")
