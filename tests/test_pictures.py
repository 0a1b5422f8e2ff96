"""`data.pictures`: what is read, what a hostile name or file gets, and its patches in a sample."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_samples import draw
from PIL import Image

from odb_megatron.data import pictures
from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.pictures import (
    ImageRules,
    cut_into_patches,
    open_picture,
    smart_resize,
)
from odb_megatron.data.sample import BadRecordError, Sample, SampleRules, Skipped, SkipReason
from odb_megatron.data.sources import ChatSource, MapSource, open_source
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.plan.padding import OverlongPolicy

# --- opening ------------------------------------------------------------------------------------


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


def seen(folder: Path, name: str) -> list[list[int]]:
    """The colours of a picture, pixel by pixel."""
    found = open_picture(name, folder=str(folder))
    assert found.mode == "RGB"
    colours: list[list[int]] = np.asarray(found).reshape(-1, 3).tolist()
    return colours


def test_names(folder: Path) -> None:
    for name in ("b.jpg", "b.webp", "b.bmp", "b.gif", "deeper/b.png"):
        path = draw(folder / name, size=(40, 24))
        uri = f"data:image/any;base64,{base64.b64encode(path.read_bytes()).decode()}"
        for one in (name, str(path), uri):
            found = open_picture(one, folder=str(folder))
            assert (found.mode, found.size) == ("RGB", (40, 24))


WHITE, GREY = [255] * 3, [100] * 3
PLTE = ("PLTE", bytes([10, 20, 30, 40, 50, 60, 70, 80, 90]))
OF_PALETTE = [[10, 20, 30], [40, 50, 60], [70, 80, 90]]


@pytest.mark.parametrize(
    ("width", "raw", "kind", "expected"),
    [
        (2, b"\x64\xff", (8, 0), [GREY, WHITE]),
        (3, b"\x64\xff\x64\0\0\x33", (8, 4), [GREY, WHITE, [204] * 3]),
        (2, b"\1\2\3\xfa\x64\0", (8, 2), [[1, 2, 3], [250, 100, 0]]),
        (2, b"\1\2\3\0\5\0\xff\x33", (8, 6), [WHITE, [205, 204, 255]]),
        (3, b"\0\1\2", (8, 3, PLTE), OF_PALETTE),
        (3, b"\x01\x20", (4, 3, PLTE), OF_PALETTE),
        (
            *(3, b"\0\1\2", (8, 3, PLTE, ("tRNS", b"\xff\0\x33"))),
            [OF_PALETTE[0], WHITE, [218, 220, 222]],
        ),
        (2, b"\x64\x07", (8, 0, ("tRNS", b"\0\7")), [GREY, WHITE]),
        (2, b"\1\2\3\4\5\6", (8, 2, ("tRNS", b"\0\1\0\2\0\3")), [WHITE, [4, 5, 6]]),
        (4, b"\x1b", (2, 0), [[v] * 3 for v in (0, 85, 170, 255)]),
        (2, b"\x01\x2c\x80\x80", (16, 0), [[1] * 3, [128] * 3]),
        (2, b"\x64\x64\x07\0", (16, 0, ("tRNS", b"\7\0")), [GREY, WHITE]),
        (1, b"\x64\x64" * 3, (16, 2), [GREY]),
        (2, b"\x64\x64\xff\xff\x64\x64\0\0", (16, 4), [GREY, WHITE]),
    ],
)
def test_colours(folder: Path, width: int, raw: bytes, kind: Any, expected: Any) -> None:
    bits, colours, *chunks = kind
    data = png(width, 1, b"\0" + raw, bits=bits, colours=colours, **dict(chunks))
    (folder / "m.png").write_bytes(data)
    assert seen(folder, "m.png") == expected


def test_other_kinds_in_colour_upright_and_on_white(folder: Path) -> None:
    for mode in ("CMYK", "YCbCr", "RGB"):
        Image.new("RGB", (16, 16), (200, 100, 40)).convert(mode).save(folder / "m.jpg", quality=99)
        assert np.abs(np.array(seen(folder, "m.jpg")) - [200, 100, 40]).max() <= 3
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 16, 8))
    for name, options in (("m.gif", {}), ("m.webp", {"lossless": True})):
        clear.save(folder / name, **options)
        assert seen(folder, name) == [[0] * 3] * 128 + [WHITE] * 128
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (30, 20)).save(folder / "t.jpg", exif=exif)
    assert open_picture("t.jpg", folder=str(folder)).size == (20, 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.png", "in .* cannot be opened"),
        ("../outside.png", "lies outside the picture folder"),
        ("/etc/passwd", "outside the picture folder .*--odb-image-folder"),
        ("link.png", "lies outside"),
        ("loop.png", "cannot be opened"),
        ("https://example.com/a.png", "is a web address or another URI, and nothing is fetched"),
        ("file:///etc/passwd", "is a web address or another URI"),
        ("FTP:a.png", "is a web address or another URI"),
        ("deeper", "cannot be opened|is no file"),
        ("pipe", "is no file"),
        ("a" * 5000, "in .* cannot be opened"),
        ("a\0.png", "is no path .*null"),
        ("a\ud800.png", "is no path .*correct the name in the record"),
        ("text.png", "cannot be read as a picture .its 10 bytes begin like none.; expected PNG"),
        ("empty.png", "cannot be read as a picture .its 0 bytes"),
        ("grey.tiff", "cannot be read as a picture .its .* bytes begin like none"),
        ("cut.png", "cannot be read as a picture .OSError: .*truncated"),
        ("bomb.png", "it has 60000 x 60000 pixels|DecompressionBomb"),
        ("large.png", "it has 9000 x 9000 pixels; up to 67108864 are decoded"),
        ("script.svg", "cannot be read as a picture"),
        ("data:text/html;base64,aGk=", "expected data:image/...;base64,"),
        ("data:image/png;base64,!!", "is no base64"),
        ("data:image/png;base64,\u00e9", "is no base64"),
        ("data:image/png;base64,aGk=", "cannot be read as a picture"),
    ],
)
def test_hostile(folder: Path, name: str, message: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe")
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    data = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    for own, side in (("bomb.png", 60000), ("large.png", 9000)):  # they say so; the data would be
        (folder / own).write_bytes(png(side, side, b"\0" * 1000, bits=8, colours=2))
    (folder / "script.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    Image.new("F", (4, 4)).save(folder / "grey.tiff")
    with pytest.raises(ValueError, match=message) as raised:
        open_picture(name, folder=str(folder))
    assert " at 0x" not in str(raised.value)


def test_large_files_and_no_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_FILE_BYTES", 60)
    with pytest.raises(ValueError, match="has .* bytes, of which up to 60 are read"):
        open_picture("a.png", folder=str(folder))
    with pytest.raises(ValueError, match="characters; up to 60 bytes"):
        open_picture("data:image/png;base64," + "A" * 200, folder="")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        open_picture("a.png", folder=str(folder))


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
        with contextlib.suppress(ValueError):
            assert open_picture("b", folder=name).mode == "RGB"


# --- sizes and patches --------------------------------------------------------------------------

SMALL = ImageRules(min_pixels=56 * 56, max_pixels=28 * 28 * 16)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([SMALL, ImageRules()]))
def test_sizes_are_those_of_transformers(height: int, width: int, rules: ImageRules) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as upstream

    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="differ by a factor of at most 200"):
            smart_resize(height, width, rules)
        return
    limits = {"min_pixels": rules.min_pixels, "max_pixels": rules.max_pixels}
    theirs = upstream(height, width, factor=28, **limits)
    if theirs[0] * theirs[1] > rules.max_pixels:
        with pytest.raises(ValueError, match="expected up to 12544 pixels"):
            smart_resize(height, width, rules)
        return
    assert smart_resize(height, width, rules) == theirs


@pytest.mark.parametrize(
    ("size", "max_pixels", "became"),
    [
        ((28, 5600), 25088, (28, 2240)),
        ((60, 10000), 25088, (28, 2044)),
        ((1, 200), SMALL.max_pixels, (28, 812)),
        ((30, 60), 3136, (56, 84)),
    ],
)
def test_the_maximum_holds(size: tuple[int, int], max_pixels: int, became: tuple[int, int]) -> None:
    for (height, width), new in ((size, became), (size[::-1], became[::-1])):
        message = f"{width} x {height} pixels and would be brought to {new[1]} x {new[0]}, .*raise"
        with pytest.raises(ValueError, match=message):
            smart_resize(height, width, ImageRules(max_pixels=max_pixels))


@pytest.mark.parametrize("size", [(64, 48), (300, 200), (20, 31), (28, 28), (440, 30)])
def test_patches_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    picture = Image.open(draw(tmp_path / "a.png", size=size))
    patches, grid = cut_into_patches(picture, SMALL)
    upstream = Qwen2VLImageProcessorPil(
        size={"shortest_edge": SMALL.min_pixels, "longest_edge": SMALL.max_pixels}
    )
    made = upstream(picture, return_tensors="np")
    assert made["image_grid_thw"].tolist() == [list(grid)]
    assert patches.shape == (grid[1] * grid[2], SMALL.width)
    mean, std = (np.repeat(np.array(v), 196) for v in (upstream.image_mean, upstream.image_std))
    colours = ((patches / 255 - mean) / std).reshape(-1, 3, 1, 196)
    twice = np.repeat(colours, 2, axis=2).reshape(len(patches), -1)  # frame by frame
    assert np.abs(twice - made["pixel_values"]).max() < 1e-5


def test_rules_that_do_not_fit() -> None:
    for sizes, error in (
        ({"patch": 0}, "patches of 0 pixels, 2 x 2 to a token"),
        ({"min_pixels": 100, "max_pixels": 9000}, "pictures of 100 to 9000 pixels; expected at"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "the larger number last"),
    ):
        with pytest.raises(ValueError, match=error):
            ImageRules(**sizes)


# --- from a record to a sample ------------------------------------------------------------------

PATCHES = ImageRules(patch=4, min_pixels=64, max_pixels=1024)
TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["user assistant what is this a red cat"] * 9, vocab_size=300, folder=folder / "a")
    loaded = AutoTokenizer.from_pretrained(str(folder / "a"), local_files_only=True)
    loaded.add_tokens(TOKENS, special_tokens=True)
    return loaded


@pytest.fixture(scope="module")
def visual(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids(TOKENS[1]))


def chat(*parts: Any, answer: Any = "a red cat", **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def source(folder: Path, tokenizer: Any, record: Any, **policies: Any) -> ChatSource:
    path = folder / f"chat{len(list(folder.iterdir()))}.jsonl"  # a file in use must not change
    path.write_text(json.dumps(record) + "\n")
    values: dict[str, Any] = {"context": 200, "token_budget": 200, **policies}
    images = values.pop("images", PATCHES)
    rules, renderer = SampleRules(**values), ChatRenderer(tokenizer)
    found = open_source(str(path), rules=rules, renderer=renderer, images=images)
    assert isinstance(found, ChatSource)
    return found


def one(folder: Path, tokenizer: Any, record: Any, **policies: Any) -> Sample:
    sample = source(folder, tokenizer, record, **policies).sample(0, source=3)
    assert isinstance(sample, Sample)
    return sample


def test_length_is_that_after_expansion(tmp_path: Path, tokenizer: Any, visual: int) -> None:
    draw(tmp_path / "a.png", size=(16, 24))
    draw(tmp_path / "b.png", size=(40, 8))
    record = chat(
        *({"type": "image", "path": "a.png"}, text("what is this")),
        {"type": "image_url", "image_url": {"url": "b.png"}},
    )
    sample = one(tmp_path, tokenizer, record)
    images = sample.images
    assert images is not None
    assert images.grid_thw.tolist() == [[1, 6, 4], [1, 2, 10]]
    assert (sample.num_patches, sample.source) == (44, 3)
    plain = one(tmp_path, tokenizer, chat(text(TOKENS[0] + TOKENS[2] + "what is this")))
    assert (plain.images, plain.num_patches) == (None, 0)
    assert len(sample) == len(plain) + 2 + 6 + 5
    assert (sample.tokens == visual).sum() == 11
    for start, end in zip(images.starts, images.ends, strict=True):
        assert (sample.tokens[start:end] == visual).all()
        assert sample.tokens[start - 1] == tokenizer.convert_tokens_to_ids(TOKENS[0])
        assert sample.tokens[end] == tokenizer.convert_tokens_to_ids(TOKENS[2])
    assert sample.num_loss_tokens == plain.num_loss_tokens  # the answer's alone
    assert pickle.loads(pickle.dumps(sample)).images.num_patches == 44


def test_visual_tokens_carry_no_loss_in_an_answer(
    tmp_path: Path, tokenizer: Any, visual: int
) -> None:
    draw(tmp_path / "a.png", size=(16, 24))
    answer = [text("a"), {"type": "image", "image": "a.png"}, text("cat")]
    sample = one(tmp_path, tokenizer, chat(text("what"), answer=answer))
    at = sample.labels == visual
    assert at.sum() == 6
    assert not sample.loss_mask[at].any()
    assert sample.loss_mask[np.flatnonzero(at)[-1] + 1] == 1  # the end marker behind the picture


def test_all_layouts_are_the_same_sample(tmp_path: Path, tokenizer: Any) -> None:
    path = draw(tmp_path / "a.png", size=(16, 24))
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    what = text("what is this")
    records = [
        chat({"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}}, what),
        chat({"type": "image_url", "image_url": "a.png"}, what),
        chat({"type": "image_url", "image_url": {"url": uri}}, what),
        chat({"type": "image", "image": str(path)}, what),
        chat({"type": "image", "url": "a.png"}, what),
        chat({"type": "image"}, what, images=["a.png"]),
        chat({"type": "image"}, what, images=[{"path": "a.png"}]),
        chat({"type": "image"}, what, image="a.png"),
    ]
    found = [one(tmp_path, tokenizer, record) for record in records]
    for sample in found[1:]:
        assert np.array_equal(sample.tokens, found[0].tokens)
        assert np.array_equal(sample.images.pixel_values, found[0].images.pixel_values)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            chat({"type": "image", "path": "gone.png"}),
            "the picture 'gone.png' in .* cannot be opened",
        ),
        (chat({"type": "image"}), r"messages\[0\].content\[0\] is an image without a source"),
        (chat({"type": "image", "path": "a.png", "url": "b"}), "has path and url; expected one"),
        (chat({"type": "image", "path": 3}), r"content\[0\].path is a int; expected a path"),
        (chat({"type": "image_url", "image_url": {}}), "image_url is a NoneType"),
        (
            chat({"type": "image_url", "image_url": {"url": "a", "detail": "low"}}),
            "detail is 'low'",
        ),
        (
            chat({"type": "image"}, images=["a.png", "a.png"]),
            "1 of the images that the record lists have no part",
        ),
        (chat(text("x"), images=["a.png"]), "1 of the images that the record lists"),
        (chat({"type": "video", "video": "a.mp4"}), "part of type 'video'"),
        (chat(text("look: <|image_pad|>")), "has 0 pictures, and its text 1 times"),
        (chat(*[{"type": "image", "path": "a.png"}] * 257), "257 pictures; up to 256"),
        (
            chat({"type": "image", "path": "long.png"}),
            "'long.png' has .* differ by a factor of at most 200",
        ),
        (
            chat({"type": "image", "path": "thin.png"}),
            "'thin.png' has .*; expected up to 1024 pixels",
        ),
    ],
)
def test_bad_records(tmp_path: Path, tokenizer: Any, record: dict[str, Any], message: str) -> None:
    draw(tmp_path / "a.png", size=(8, 8))
    draw(tmp_path / "long.png", size=(900, 4))
    draw(tmp_path / "thin.png", size=(700, 12))
    with pytest.raises(BadRecordError, match=rf"chat\d+.jsonl:1: .*{message}"):
        source(tmp_path, tokenizer, record).sample(0, source=0)
    skipped = source(tmp_path, tokenizer, record, skip_bad=True).sample(0, source=0)
    assert isinstance(skipped, Skipped)
    assert skipped.reason is SkipReason.BAD_RECORD


def test_a_tokenizer_without_the_token_and_a_script_without_images(
    tmp_path: Path, tokenizer: Any
) -> None:
    rules = replace(PATCHES, token="<picture>")
    with pytest.raises(ValueError, match="the tokenizer has no token '<picture>'"):
        source(tmp_path, tokenizer, chat(text("x")), images=rules)
    plain = source(tmp_path, tokenizer, chat({"type": "image", "path": "a.png"}), images=None)
    with pytest.raises(BadRecordError, match="part of type 'image', and this model reads text alo"):
        plain.sample(0, source=0)


def test_truncation_cuts_no_image(tmp_path: Path, tokenizer: Any, visual: int) -> None:
    draw(tmp_path / "a.png", size=(32, 32))
    picture = {"type": "image", "path": "a.png"}
    record = chat(picture, text("what is"), picture)
    whole = one(tmp_path, tokenizer, record)
    assert whole.images is not None
    first, second = whole.images.starts.tolist()
    for context in (second + 1, second + 15):
        cut = one(tmp_path, tokenizer, record, context=context, overlong=OverlongPolicy.TRUNCATE)
        assert (len(cut), cut.truncated) == (second, len(whole) - second)
        assert cut.images is not None
        assert (cut.num_patches, cut.images.starts.tolist()) == (64, [first])
        assert (cut.tokens == visual).sum() == 16
    short = one(tmp_path, tokenizer, record, context=first + 3, overlong=OverlongPolicy.TRUNCATE)
    assert (len(short), short.images, short.num_patches) == (first, None, 0)


ITEM: dict[str, Any] = {
    "tokens": [1, 5, 5, 2],
    "labels": [5, 5, 2, 3],
    "loss_mask": [0, 0, 1, 1],
    "pixel_values": np.zeros((8, 12), dtype=np.float32),
    "image_grid_thw": [[1, 4, 2]],
    "image_starts": [1],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_starts": None}, "images need pixel_values, image_grid_thw, image_starts"),
        ({"image_grid_thw": np.zeros((0, 3), dtype=int)}, r"image_grid_thw has shape \(0, 3\)"),
        ({"image_merge": 1}, "last image ends at token 9"),
        ({"num_patches": 3}, "num_patches is 3; its images have 8"),
        ({"loss_mask": [1, 0, 1, 1]}, "where the label is a visual token"),
        ({"image_grid_thw": [[1.5, 4, 2]]}, "image_grid_thw has dtype float64"),
    ],
)
def test_items_of_own_datasets(changes: dict[str, Any], message: str) -> None:
    rules = SampleRules(context=9, token_budget=9)

    def load(**changes: Any) -> Any:
        return MapSource([{**ITEM, **changes}], rules=rules).sample(0, source=0)

    assert load().num_patches == 8
    names = ("pixel_values", "image_grid_thw", "image_starts")
    for nothing in (None, []):
        assert load(**dict.fromkeys(names, nothing)).images is None
    with pytest.raises(BadRecordError, match=message):
        load(**changes)


def test_nothing_is_left_of_a_sample_that_begins_with_a_long_image() -> None:
    rules = SampleRules(context=1, token_budget=9, overlong=OverlongPolicy.TRUNCATE)
    item = ITEM | {"image_starts": [0], "labels": [5, 2, 3, 3], "loss_mask": [0, 1, 1, 1]}
    skipped = MapSource([item], rules=rules).sample(0, source=0)
    assert isinstance(skipped, Skipped)
    assert "the image at its start is longer than 1 tokens" in skipped.message


def test_fingerprint_follows_the_rules(tmp_path: Path, tokenizer: Any) -> None:
    every = (PATCHES, ImageRules())
    found = [source(tmp_path, tokenizer, chat(text("x")), images=one) for one in every]
    assert len({one.fingerprint() for one in found}) == 2
