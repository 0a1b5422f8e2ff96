"""`data.images`: what a sample's images must be, where they lie, and their positions."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_samples import VISUAL, image_sample

from odb_megatron.data.images import PixelFormat, SampleImages, mrope_positions, visual_places
from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.wire import assemble
from odb_megatron.plan.padding import SizeRule


def images_of(**changes: Any) -> SampleImages:
    values: dict[str, Any] = {
        "pixel_values": np.zeros((12, 3), dtype=np.uint8),
        "grid_thw": np.array([[1, 2, 2], [1, 4, 2]]),
        "starts": np.array([3, 6]),
    }
    return SampleImages(**{**values, **changes})


def test_sizes() -> None:
    images = images_of()
    assert images.ends.tolist() == [4, 8]
    assert images.num_patches == 12
    assert images.format == PixelFormat(width=3, dtype="uint8", merge=2)
    assert images.format.patch_bytes == 3
    assert [images.format.tokens(one) for one in images.grid_thw.tolist()] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid_thw": np.zeros((0, 3), dtype=np.int64)}, r"has shape \(0, 3\)"),
        ({"grid_thw": np.ones((2, 2), dtype=np.int64)}, r"expected \[images, 3\]"),
        ({"starts": np.array([3])}, r"image_starts has shape \(1,\)"),
        ({"pixel_values": np.zeros(12)}, r"expected \[2\] and \[patches, values\]"),
        ({"pixel_values": np.zeros((12, 3), dtype=np.int64)}, "type int64"),
        ({"grid_thw": np.array([[1, 2, 2], [1, 8, 1]])}, "multiples of 2"),
        ({"grid_thw": np.array([[1, 2, 2], [0, 4, 2]])}, "counts from 1"),
        (
            {"grid_thw": np.array([[1, 2, 2], [1, 2, 2]])},
            "expected as many patches as pixel_values has, 12",
        ),
        (
            {"starts": np.array([3, 3])},
            r"expected one image behind the other; they begin at tokens \[3, 3\]",
        ),
        ({"starts": np.array([-1, 3])}, "expected one image behind the other"),
        ({"merge": 0}, "0 x 0 to a token"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        images_of(**changes)


def test_no_image_is_cut() -> None:
    images = images_of()
    assert [images.whole_length(n) for n in (3, 4, 6, 7, 8)] == [3, 4, 6, 6, 8]
    assert images.kept(3) is None
    kept = images.kept(7)
    assert kept is not None
    assert (kept.starts.tolist(), kept.num_patches) == ([3], 4)
    assert images.kept(8).num_patches == 12  # type: ignore[union-attr]


def test_a_sample_does_not_learn_visual_tokens() -> None:
    sample = image_sample([3, (4, 2), 2])
    at = sample.labels == VISUAL
    assert at.sum() == 2
    assert not sample.loss_mask[at].any()
    mask = sample.loss_mask.copy()
    mask[2] = 1
    values = {"tokens": sample.tokens, "labels": sample.labels, "images": sample.images}
    with pytest.raises(ValueError, match="where the label is a visual token .*tokens 3 to 4"):
        Sample(**values, loss_mask=mask, num_patches=8)
    with pytest.raises(ValueError, match="num_patches is 0; its images have 8"):
        Sample(**values, loss_mask=sample.loss_mask)
    with pytest.raises(ValueError, match="last image ends at token 5; it has 4 tokens"):
        Sample(
            tokens=sample.tokens[:4],
            labels=sample.labels[:4],
            loss_mask=sample.loss_mask[:4],
            num_patches=8,
            images=sample.images,
        )


def pack(*samples: Sample, multiple: int = 1, sizes: tuple[int, ...] = ()) -> MicroBatch:
    rule = SizeRule(multiple=multiple, sizes=sizes)
    return assemble(samples, positions=range(len(samples)), rule=rule)


def test_offsets_of_a_micro_batch() -> None:
    samples = [image_sample([3, (4, 2), 1]), image_sample([5]), image_sample([(2, 2), 1, (2, 4)])]
    item = pack(*samples, multiple=4, sizes=(32,))
    images, pixels = item.images, item.pixel_values
    assert images is not None
    assert pixels is not None
    assert images.grid_thw.tolist() == [[1, 4, 2], [1, 2, 2], [1, 2, 4]]
    assert images.starts.tolist() == [3, 16, 18]
    assert images.cu_images.tolist() == [0, 1, 1, 3]
    assert images.cu_patches.tolist() == [0, 8, 12, 20]
    assert item.num_patches == 20
    assert visual_places(images).tolist() == [3, 4, 16, 18, 19]
    assert (item.tokens[0, visual_places(images)] == VISUAL).all()
    assert (item.tokens == VISUAL).sum() == 5
    own = np.concatenate([s.images.pixel_values for s in samples if s.images is not None])
    assert np.array_equal(pixels.numpy(), own)


def test_without_images_nothing_is_added() -> None:
    for item in (pack(image_sample([5])), assemble([], positions=[], rule=SizeRule(multiple=4))):
        assert (item.images, item.pixel_values) == (None, None)
        positions = mrope_positions(item.cu_seqlens_padded, None)
        assert positions.shape == (3, 1, item.tokens.shape[1])
        assert all(torch.equal(row, item.position_ids) for row in positions)


def test_patches_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="patches of different kinds"):
        pack(image_sample([(2, 2)]), image_sample([(2, 2)], width=3))


def test_positions_are_those_of_qwen2_vl() -> None:
    """Sample by sample, as `get_rope_index` has them; restarted in each, however it is packed."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=1)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: Qwen2VLModel.get_vision_position_ids(
        model, *a, **k
    )
    rng = random.Random(5)
    for trial in range(60):
        samples = []
        for _ in range(rng.randint(1, 5)):
            parts: list[Any] = []
            for _ in range(rng.randint(1, 4)):
                parts += [rng.randint(1, 7)]
                if rng.random() < 0.6:
                    parts += [(2 * rng.randint(1, 4), 2 * rng.randint(1, 4))]
            samples.append(image_sample(parts, seed=trial))
        item = pack(*samples, multiple=rng.choice([1, 4, 8]))
        found = mrope_positions(item.cu_seqlens_padded, item.images)[:, 0]
        for sample, start in zip(samples, item.cu_seqlens_padded.tolist(), strict=False):
            tokens = torch.from_numpy(sample.tokens)[None]
            grid = None if sample.images is None else torch.from_numpy(sample.images.grid_thw)
            kinds = (tokens == VISUAL).int()
            expected, _ = Qwen2VLModel.get_rope_index(
                model, tokens, mm_token_type_ids=kinds, image_grid_thw=grid
            )
            assert torch.equal(found[:, start : start + len(sample)], expected[:, 0])


def test_video_grids_count_in_time_too() -> None:
    sample = image_sample([2])
    images = SampleImages(
        pixel_values=np.zeros((24, 3), dtype=np.uint8),
        grid_thw=np.array([[3, 2, 4]]),
        starts=np.array([1]),
    )
    mask = np.array([0, 0, 0, 0, 0, 0, 1, 1], dtype=np.float32)
    ids = np.full(8, 5)
    item = pack(Sample(tokens=ids, labels=ids, loss_mask=mask, num_patches=24, images=images))
    assert mrope_positions(item.cu_seqlens_padded, item.images)[:, 0].tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4],
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 2, 1, 2, 1, 2, 4],
    ]
    assert len(sample) == 2
