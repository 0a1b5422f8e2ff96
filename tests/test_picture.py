"""`data.picture`: what is read, and what a hostile name or file gets."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_samples import draw

from odb_megatron.data import picture
from odb_megatron.data.picture import open_picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "pictures"
    (inner / "deeper").mkdir(parents=True)
    draw(tmp_path / "outside.png")
    draw(inner / "a.png", size=(30, 20))
    return inner


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is huge; its data would be."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("name", ["b.jpg", "b.webp", "b.bmp", "b.gif", "deeper/b.png"])
def test_kinds(folder: Path, name: str) -> None:
    draw(folder / name, size=(40, 24))
    found = open_picture(name, folder=str(folder))
    assert (found.mode, found.size) == ("RGB", (40, 24))
    assert open_picture(str(folder / name), folder=str(folder)).size == (40, 24)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA", "I;16"])
def test_modes(folder: Path, mode: str) -> None:
    from PIL import Image

    Image.new(mode, (8, 9)).save(folder / "m.png")
    assert open_picture("m.png", folder=str(folder)).mode == "RGB"


def test_a_data_uri(folder: Path) -> None:
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    assert open_picture(f"data:image/png;base64,{data}", folder="/nowhere").size == (30, 20)
    assert open_picture("a.png", folder=str(folder)).size == (30, 20)


def test_upright(folder: Path) -> None:
    from PIL import Image

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
        ("a\0.png", "null"),
        ("text.png", "'text.png' cannot be read as a picture .UnidentifiedImageError"),
        ("empty.png", "cannot be read as a picture"),
        ("cut.png", "'cut.png' cannot be read as a picture .OSError: .*truncated"),
        ("cut.jpg", "cannot be read as a picture .OSError: .*truncated"),
        ("bomb.png", "it has 60000 x 60000 pixels|DecompressionBomb"),
        ("large.png", "it has 9000 x 9000 pixels; up to 67108864 are decoded"),
        ("script.svg", "cannot be read as a picture"),
        ("page.eps", "cannot be read as a picture"),
        ("data:text/html;base64,aGk=", "expected data:image/...;base64,"),
        ("data:image/png;base64,!!", "is no base64"),
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
    with pytest.raises(ValueError, match=message):
        open_picture(name, folder=str(folder))


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
        except ValueError:
            return
        assert found.mode == "RGB"
