"""`data.picture`: what is read, and what a hostile name or file gets."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_samples import draw
from PIL import Image

from odb_megatron.data import picture
from odb_megatron.data.colours import in_rgb
from odb_megatron.data.picture import open_picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "pictures"
    (inner / "deeper").mkdir(parents=True)
    draw(tmp_path / "outside.png")
    draw(inner / "a.png", size=(30, 20))
    return inner


def png(width: int, height: int, raw: bytes, *, bits: int, colours: int, **chunks: bytes) -> bytes:
    """A PNG by its parts, for what Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    body = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))
    for kind, data in chunks.items():
        body += chunk(kind.encode(), data)
    body += chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is huge; its data would be."""
    return png(width, height, b"\0" * 1000, bits=8, colours=2)


def seen(folder: Path, name: str) -> list[list[int]]:
    """The colours of a picture, pixel by pixel."""
    found = open_picture(name, folder=str(folder))
    assert found.mode == "RGB"
    colours: list[list[int]] = np.asarray(found).reshape(-1, 3).tolist()
    return colours


@pytest.mark.parametrize("name", ["b.jpg", "b.webp", "b.bmp", "b.gif", "deeper/b.png"])
def test_kinds(folder: Path, name: str) -> None:
    draw(folder / name, size=(40, 24))
    found = open_picture(name, folder=str(folder))
    assert (found.mode, found.size) == ("RGB", (40, 24))
    assert open_picture(str(folder / name), folder=str(folder)).size == (40, 24)


WHITE, GREY = [255] * 3, [100] * 3


@pytest.mark.parametrize(
    ("mode", "pixels", "expected"),
    [
        ("1", [0, 255], [[0] * 3, WHITE]),
        ("L", [0, 100, 255], [[0] * 3, GREY, WHITE]),
        ("LA", [(100, 255), (100, 0), (0, 51)], [GREY, WHITE, [204] * 3]),
        ("RGB", [(1, 2, 3), (250, 100, 0)], [[1, 2, 3], [250, 100, 0]]),
        (
            "RGBA",
            [(1, 2, 3, 255), (1, 2, 3, 0), (5, 0, 255, 51)],
            [[1, 2, 3], WHITE, [205, 204, 255]],
        ),
        ("I;16", [0, 300, 25700, 32896, 65535], [[0] * 3, [1] * 3, GREY, [128] * 3, WHITE]),
    ],
)
def test_modes(folder: Path, mode: str, pixels: list[Any], expected: list[list[int]]) -> None:
    picture = Image.new(mode, (len(pixels), 1))
    for at, pixel in enumerate(pixels):
        picture.putpixel((at, 0), pixel)
    picture.save(folder / "m.png")
    with Image.open(folder / "m.png") as read:
        assert read.mode == mode or (mode, read.mode) == ("I;16", "I")
    assert seen(folder, "m.png") == expected


PALETTE = bytes([10, 20, 30, 40, 50, 60, 70, 80, 90])
OF_PALETTE = [[10, 20, 30], [40, 50, 60], [70, 80, 90]]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(3, 1, b"\0\0\1\2", bits=8, colours=3, PLTE=PALETTE), OF_PALETTE),
        (png(3, 1, b"\0\x01\x20", bits=4, colours=3, PLTE=PALETTE), OF_PALETTE),
        (
            png(3, 1, b"\0\0\1\2", bits=8, colours=3, PLTE=PALETTE, tRNS=b"\xff\0\x33"),
            [OF_PALETTE[0], WHITE, [218, 220, 222]],
        ),
        (png(2, 1, b"\0\x64\x07", bits=8, colours=0, tRNS=b"\0\7"), [GREY, WHITE]),
        (png(2, 1, b"\0\1\2\3\4\5\6", bits=8, colours=2, tRNS=b"\0\1\0\2\0\3"), [WHITE, [4, 5, 6]]),
        (png(4, 1, b"\0\x1b", bits=2, colours=0), [[v] * 3 for v in (0, 85, 170, 255)]),
        (png(2, 1, b"\0\x64\x64\x07\0", bits=16, colours=0, tRNS=b"\7\0"), [GREY, WHITE]),
        (png(1, 1, b"\0" + b"\x64\x64" * 3, bits=16, colours=2), [GREY]),
        (png(2, 1, b"\0\x64\x64\xff\xff\x64\x64\0\0", bits=16, colours=4), [GREY, WHITE]),
        (png(1, 1, b"\0" + b"\x64\x64" * 3 + b"\0\0", bits=16, colours=6), [WHITE]),
    ],
    ids=[
        "P",
        "P-4",
        "P-clear",
        "L-clear",
        "RGB-clear",
        "L-2",
        "16-clear",
        "48",
        "LA-32",
        "RGBA-64",
    ],
)
def test_png_by_its_bytes(folder: Path, data: bytes, expected: list[list[int]]) -> None:
    (folder / "m.png").write_bytes(data)
    assert seen(folder, "m.png") == expected


@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr", "RGB"])
def test_modes_of_jpeg(folder: Path, mode: str) -> None:
    Image.new("RGB", (16, 16), (200, 100, 40)).convert(mode).save(folder / "m.jpg", quality=100)
    grey = round(0.299 * 200 + 0.587 * 100 + 0.114 * 40)
    expected = [grey] * 3 if mode == "L" else [200, 100, 40]
    assert np.abs(np.array(seen(folder, "m.jpg")) - expected).max() <= 3


@pytest.mark.parametrize("name", ["m.gif", "m.webp"])
def test_transparency_of_other_kinds(folder: Path, name: str) -> None:
    picture = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (0, 0, 16, 8))
    picture.save(folder / name, **({"lossless": True} if name == "m.webp" else {}))
    assert seen(folder, name) == [[0] * 3] * 128 + [WHITE] * 128


def test_grey_of_16_bits_keeps_its_values(folder: Path) -> None:
    values = np.linspace(300, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(values).save(folder / "m.png")
    found = np.array(seen(folder, "m.png")).reshape(64, 64, 3)
    assert np.abs(found - values[:, :, None] / 257).max() <= 0.5
    assert len(np.unique(found)) == 255


def test_modes_that_no_kind_read_has() -> None:
    deep = Image.new("I;16B", (1, 1), 25700)
    assert np.asarray(in_rgb(deep)).tolist() == [[GREY]]
    old = Image.new("I", (2, 1), 25700)  # Pillow up to 11 has 16-bit PNGs so
    old.putpixel((1, 0), 70000)
    assert np.asarray(in_rgb(old, is_png=True)).tolist() == [[GREY, WHITE]]
    for mode in ("I", "F", "LAB"):
        with pytest.raises(ValueError, match=f"mode {mode}, whose .* no defined range; expected"):
            in_rgb(Image.new(mode, (2, 2)))


def test_a_data_uri(folder: Path) -> None:
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    assert open_picture(f"data:image/png;base64,{data}", folder="/nowhere").size == (30, 20)
    assert open_picture("a.png", folder=str(folder)).size == (30, 20)


def test_upright(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (30, 20)).save(folder / "t.jpg", exif=exif)
    assert open_picture("t.jpg", folder=str(folder)).size == (20, 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.png", "'gone.png' in .* cannot be opened"),
        ("../outside.png", "'../outside.png' lies outside the picture folder"),
        ("/etc/passwd", "outside the picture folder .*--odb-image-folder"),
        ("link.png", "'link.png' lies outside"),
        ("loop.png", "loop.png' in .* cannot be opened|cannot be opened"),
        ("http://example.com/a.png", "is a web address or another URI, and nothing is fetched"),
        ("https://example.com/a.png", "is a web address"),
        ("file:///etc/passwd", "is a web address or another URI"),
        ("FTP:a.png", "is a web address or another URI"),
        (".", "cannot be opened|is no file"),
        ("deeper", "cannot be opened|is no file"),
        ("pipe", "'pipe' is no file"),
        ("a" * 5000, "aaa\\.\\.\\.' in .* cannot be opened"),
        ("a\0.png", r"'a\\x00\.png' is no path .*null"),
        ("a\ud800.png", r"'a\\ud800\.png' is no path .*correct the name in the record"),
        (
            "text.png",
            "'text.png' cannot be read as a picture: its 10 bytes begin like none; expect",
        ),
        ("empty.png", "'empty.png' is empty; expected PNG"),
        ("grey.tiff", "'grey.tiff' cannot be read as a picture: its .* bytes begin like none"),
        ("cut.png", "'cut.png' cannot be read as a picture .OSError: .*truncated"),
        ("cut.jpg", "cannot be read as a picture .OSError: .*truncated"),
        ("bomb.png", "it has 60000 x 60000 pixels|DecompressionBomb"),
        ("large.png", "it has 9000 x 9000 pixels; up to 67108864 are decoded"),
        ("script.svg", "cannot be read as a picture"),
        ("page.eps", "cannot be read as a picture"),
        ("data:text/html;base64,aGk=", "expected data:image/...;base64,"),
        ("data:image/png;base64,!!", "is no base64"),
        ("data:image/png;base64,\u00e9", "'data:image/png;base64,.*' is no base64"),
        ("data:image/png;base64,", "'data:image/png;base64,' is empty"),
        ("data:image/png;base64,aGk=", "cannot be read as a picture"),
        ("data:image/png,abc", "expected data:image/...;base64,"),
    ],
)
def test_hostile(folder: Path, name: str, message: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe")
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    draw(folder / "whole.jpg", size=(300, 300))
    for whole, cut in (("a.png", "cut.png"), ("whole.jpg", "cut.jpg")):
        data = (folder / whole).read_bytes()
        (folder / cut).write_bytes(data[: len(data) // 2])
    (folder / "bomb.png").write_bytes(bomb(60000, 60000))
    (folder / "large.png").write_bytes(bomb(9000, 9000))
    (folder / "script.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    Image.new("F", (4, 4)).save(folder / "grey.tiff")
    with pytest.raises(ValueError, match=message) as raised:
        open_picture(name, folder=str(folder))
    assert repr(name)[:40].rstrip("'\"") in str(raised.value)  # which picture
    assert " at 0x" not in str(raised.value)


def test_large_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_FILE_BYTES", 60)
    with pytest.raises(ValueError, match="'a.png' has .* bytes; up to 60 are read"):
        open_picture("a.png", folder=str(folder))
    with pytest.raises(ValueError, match="characters; pictures of up to 60 bytes"):
        open_picture("data:image/png;base64," + "A" * 200, folder="")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        picture.check_pillow()


@given(st.data())
def test_damaged_files_are_bad_records_and_nothing_else(data: st.DataObject) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        folder = Path(name)
        kind = data.draw(st.sampled_from(["png", "jpg", "gif", "webp", "bmp"]))
        content = bytearray(draw(folder / f"a.{kind}", size=(24, 16)).read_bytes())
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.integers(0, 255))
        (folder / "b").write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            found = open_picture("b", folder=name)
        except ValueError as error:
            message = str(error)
        else:
            message = "'b' "
            assert found.mode == "RGB"
        assert message.startswith("'b' ")
        assert " at 0x" not in message
