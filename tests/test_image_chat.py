"""`data.image_chat` and `data.image_parts`: from a chat record with pictures to a sample."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_samples import draw

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.image_chat import ImageChatSource, ImageRules, expand_images
from odb_megatron.data.image_parts import lift_images
from odb_megatron.data.patches import PatchRules
from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason
from odb_megatron.data.sources import MapSource, open_source
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.plan.padding import OverlongPolicy

PATCHES = PatchRules(patch=4, min_pixels=64, max_pixels=1024)
TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["user assistant what is this a red cat"] * 9, vocab_size=300, folder=folder / "a")
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "a"), local_files_only=True)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def visual(renderer: ChatRenderer) -> int:
    return renderer.token_id(TOKENS[1])


def chat(*parts: Any, answer: Any = "a red cat", **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def source(folder: Path, renderer: ChatRenderer, *records: Any, **policies: Any) -> ImageChatSource:
    path = folder / f"chat{len(list(folder.iterdir()))}.jsonl"  # a file in use must not change
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    values: dict[str, Any] = {"context": 200, "token_budget": 200, **policies}
    images = values.pop("images", ImageRules(patches=PATCHES))
    found = open_source(str(path), rules=SampleRules(**values), renderer=renderer, images=images)
    assert isinstance(found, ImageChatSource)
    return found


def one(folder: Path, renderer: ChatRenderer, record: Any, **policies: Any) -> Sample:
    sample = source(folder, renderer, record, **policies).sample(0, source=3)
    assert isinstance(sample, Sample)
    return sample


def test_length_is_that_after_expansion(
    tmp_path: Path, renderer: ChatRenderer, visual: int
) -> None:
    draw(tmp_path / "a.png", size=(16, 24))
    draw(tmp_path / "b.png", size=(40, 8))
    record = chat(
        *({"type": "image", "path": "a.png"}, text("what is this")),
        {"type": "image_url", "image_url": {"url": "b.png"}},
    )
    sample = one(tmp_path, renderer, record)
    images = sample.images
    assert images is not None
    assert images.grid_thw.tolist() == [[1, 6, 4], [1, 2, 10]]
    assert (sample.num_patches, sample.source) == (44, 3)
    plain = one(tmp_path, renderer, chat(text(TOKENS[0] + TOKENS[2] + "what is this")))
    assert len(sample) == len(plain) + 2 + 6 + 5
    assert (sample.tokens == visual).sum() == 11
    for start, end in zip(images.starts, images.ends, strict=True):
        assert (sample.tokens[start:end] == visual).all()
        assert sample.tokens[start - 1] == renderer.token_id(TOKENS[0])
        assert sample.tokens[end] == renderer.token_id(TOKENS[2])
    assert sample.num_loss_tokens == plain.num_loss_tokens  # the answer's alone
    assert pickle.loads(pickle.dumps(sample)).images.num_patches == 44


def test_visual_tokens_carry_no_loss_in_an_answer(
    tmp_path: Path, renderer: ChatRenderer, visual: int
) -> None:
    draw(tmp_path / "a.png", size=(16, 24))
    answer = [text("a"), {"type": "image", "image": "a.png"}, text("cat")]
    sample = one(tmp_path, renderer, chat(text("what"), answer=answer))
    at = sample.labels == visual
    assert at.sum() == 6
    assert not sample.loss_mask[at].any()
    assert sample.loss_mask[np.flatnonzero(at)[-1] + 1] == 1  # the end marker behind the picture


def test_all_layouts_are_the_same_sample(tmp_path: Path, renderer: ChatRenderer) -> None:
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
    found = [one(tmp_path, renderer, record) for record in records]
    for sample in found[1:]:
        assert np.array_equal(sample.tokens, found[0].tokens)
        assert np.array_equal(sample.images.pixel_values, found[0].images.pixel_values)  # type: ignore[union-attr]


def test_without_pictures_it_is_a_chat_source(tmp_path: Path, renderer: ChatRenderer) -> None:
    record = chat(text("what is this"))
    sample = one(tmp_path, renderer, record)
    rules = SampleRules(context=200, token_budget=200)
    path = next(tmp_path.glob("chat*.jsonl"))
    plain = open_source(str(path), rules=rules, renderer=renderer)
    expected = plain.sample(0, source=3)
    assert isinstance(expected, Sample)
    assert np.array_equal(sample.tokens, expected.tokens)
    assert (sample.images, sample.num_patches) == (None, 0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (chat({"type": "image", "path": "gone.png"}), "'gone.png' in .* cannot be opened"),
        (chat({"type": "image_url", "image_url": {"url": "https://x/a.png"}}), "is a web address"),
        (chat({"type": "image"}), r"messages\[0\].content\[0\] is an image without a source"),
        (chat({"type": "image", "path": "a.png", "url": "b"}), "has path and url; expected one"),
        (chat({"type": "image", "path": 3}), r"content\[0\].path is a int; expected a path"),
        (chat({"type": "image_url", "image_url": {}}), "image_url.url is a NoneType"),
        (
            chat({"type": "image_url", "image_url": {"url": "a", "detail": "low"}}),
            "detail is 'low'",
        ),
        (chat({"type": "image"}, images=["a.png", "a.png"]), "lists 2 images, and 1 of them have"),
        (chat(text("x"), images=["a.png"]), "lists 1 images, and 1 of them have no part"),
        (chat({"type": "video", "video": "a.mp4"}), "part of type 'video'"),
        (chat(text("look: <|image_pad|>")), "has 0 pictures, and its text 1 times"),
        (chat(*[{"type": "image", "path": "a.png"}] * 257), "257 pictures; up to 256"),
        (
            chat({"type": "image", "path": "long.png"}),
            "'long.png': .* differ by a factor of at most 200",
        ),
        (chat({"type": "image", "path": "thin.png"}), "'thin.png': .*; expected up to 1024 pixels"),
        (chat({"type": "image", "path": "a\0b.png"}), r"'a\\x00b.png' is no path"),
    ],
)
def test_bad_records(
    tmp_path: Path, renderer: ChatRenderer, record: dict[str, Any], message: str
) -> None:
    draw(tmp_path / "a.png", size=(8, 8))
    draw(tmp_path / "long.png", size=(900, 4))
    draw(tmp_path / "thin.png", size=(700, 12))
    with pytest.raises(BadRecordError, match=rf"chat\d+.jsonl:1: .*{message}"):
        source(tmp_path, renderer, record).sample(0, source=0)
    skipped = source(tmp_path, renderer, record, bad_record=BadRecordPolicy.SKIP).sample(
        0, source=0
    )
    assert isinstance(skipped, Skipped)
    assert skipped.reason is SkipReason.BAD_RECORD


def test_without_image_flags_pictures_are_refused(tmp_path: Path, renderer: ChatRenderer) -> None:
    source(tmp_path, renderer, chat({"type": "image", "path": "a.png"}))
    rules = SampleRules(context=200, token_budget=200)
    path = next(tmp_path.glob("chat*.jsonl"))
    plain = open_source(str(path), rules=rules, renderer=renderer)
    with pytest.raises(
        BadRecordError, match="is a part of type 'image', and this model reads text alone"
    ):
        plain.sample(0, source=0)


def test_a_tokenizer_without_the_token(tmp_path: Path, renderer: ChatRenderer) -> None:
    rules = ImageRules(patches=PATCHES, text="<picture>", token="<picture>")
    with pytest.raises(ValueError, match="the tokenizer has no token '<picture>'"):
        source(tmp_path, renderer, chat(text("x")), images=rules)
    with pytest.raises(ValueError, match="must hold its token '<picture>' once"):
        ImageRules(text="a", token="<picture>")


def test_truncation_cuts_no_image(tmp_path: Path, renderer: ChatRenderer, visual: int) -> None:
    draw(tmp_path / "a.png", size=(32, 32))
    picture = {"type": "image", "path": "a.png"}
    record = chat(picture, text("what is"), picture)
    whole = one(tmp_path, renderer, record)
    assert whole.images is not None
    second = int(whole.images.starts[1])
    for context in (second + 1, second + 15):
        cut = one(tmp_path, renderer, record, context=context, overlong=OverlongPolicy.TRUNCATE)
        assert len(cut) == second
        assert cut.truncated == len(whole) - second
        assert cut.images is not None
        assert (cut.num_patches, cut.images.starts.tolist()) == (64, [int(whole.images.starts[0])])
        assert (cut.tokens == visual).sum() == 16
    first = int(whole.images.starts[0])
    short = one(tmp_path, renderer, record, context=first + 3, overlong=OverlongPolicy.TRUNCATE)
    assert (len(short), short.images, short.num_patches) == (first, None, 0)


def test_nothing_is_left_of_a_sample_that_begins_with_a_long_image() -> None:
    item = {
        "tokens": [5] * 8,
        "labels": [5] * 7 + [6],
        "loss_mask": [0] * 7 + [1],
        "pixel_values": np.zeros((16, 12), dtype=np.uint8),
        "image_grid_thw": [[1, 4, 4]],
        "image_starts": [0],
    }
    rules = SampleRules(context=3, token_budget=9, overlong=OverlongPolicy.TRUNCATE)
    skipped = MapSource([item], rules=rules).sample(0, source=0)
    assert isinstance(skipped, Skipped)
    assert "the image at its start is longer than 3 tokens" in skipped.message


def test_items_of_own_datasets() -> None:
    item = {
        "tokens": [1, 5, 5, 2],
        "labels": [5, 5, 2, 3],
        "loss_mask": [0, 0, 1, 1],
        "pixel_values": np.zeros((8, 12), dtype=np.float32),
        "image_grid_thw": [[1, 4, 2]],
        "image_starts": [1],
    }
    rules = SampleRules(context=9, token_budget=9)

    def load(**changes: Any) -> Sample | Skipped:
        return MapSource([{**item, **changes}], rules=rules).sample(0, source=0)

    sample = load()
    assert isinstance(sample, Sample)
    assert sample.num_patches == 8
    assert load(pixel_values=None, image_grid_thw=None, image_starts=None).images is None  # type: ignore[union-attr]
    nothing = {"pixel_values": [], "image_grid_thw": [], "image_starts": []}
    assert load(**nothing).images is None  # type: ignore[union-attr]
    for changes, message in (
        ({"image_starts": None}, "images need pixel_values, image_grid_thw, image_starts"),
        ({"image_grid_thw": np.zeros((0, 3), dtype=int)}, r"image_grid_thw has shape \(0, 3\)"),
        ({"image_merge": 1}, "last image ends at token 9"),
        ({"num_patches": 3}, "num_patches is 3; its images have 8"),
        ({"loss_mask": [1, 0, 1, 1]}, "where the label is a visual token"),
        ({"image_grid_thw": [[1.5, 4, 2]]}, "image_grid_thw has dtype float64"),
    ):
        with pytest.raises(BadRecordError, match=message):
            load(**changes)


def test_expand() -> None:
    ids, learn = np.array([1, 9, 2, 9, 3]), np.array([False, True, True, True, True])
    found = expand_images(ids, learn, token=9, counts=np.array([3, 1]))
    assert [part.tolist() for part in found] == [
        [1, 9, 9, 9, 2, 9, 3],
        [False, False, False, False, True, False, True],
        [1, 5],
    ]


def test_lift_leaves_the_rest_alone() -> None:
    record = {**chat(text("hi"), {"type": "image", "path": "a"}), "tools": [], "id": 7}
    lifted, names = lift_images(record, "<i>")
    assert names == ["a"]
    assert lifted == {**chat(text("hi"), text("<i>")), "tools": [], "id": 7}


def test_fingerprint_follows_the_rules(tmp_path: Path, renderer: ChatRenderer) -> None:
    record = chat(text("x"))
    prints = {
        source(tmp_path, renderer, record, images=ImageRules(patches=patches)).fingerprint()
        for patches in (PATCHES, PatchRules())
    }
    assert len(prints) == 2
