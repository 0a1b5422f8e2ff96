"""`data.patches`: sizes and patches as Qwen2-VL's own processor makes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_samples import draw
from PIL import Image

from odb_megatron.data.patches import PatchRules, cut_into_patches, smart_resize

SMALL = PatchRules(min_pixels=56 * 56, max_pixels=28 * 28 * 16)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([SMALL, PatchRules()]))
def test_sizes_are_those_of_transformers(height: int, width: int, rules: PatchRules) -> None:
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
    found = smart_resize(height, width, rules)
    assert found == theirs
    assert found[0] % 28 == found[1] % 28 == 0
    assert rules.min_pixels <= found[0] * found[1] <= rules.max_pixels


@pytest.mark.parametrize(
    ("size", "rules", "became", "needed"),
    [
        ((28, 5600), PatchRules(max_pixels=25088), (28, 2240), 200 * 784),
        ((60, 10000), PatchRules(max_pixels=25088), (28, 2044), 167 * 784),
        ((1, 200), SMALL, (28, 812), 29 * 784),
        ((30, 60), PatchRules(max_pixels=3136), (56, 84), 6 * 784),
    ],
)
def test_the_maximum_holds(
    size: tuple[int, int], rules: PatchRules, became: tuple[int, int], needed: int
) -> None:
    for (height, width), (new_height, new_width) in ((size, became), (size[::-1], became[::-1])):
        message = (
            f"the picture has {width} x {height} pixels and would be brought to {new_width} x "
            f"{new_height}, in squares of 28 x 28; expected up to {rules.max_pixels} pixels: crop "
            f"it, or raise --odb-image-max-pixels to {needed}$"
        )
        with pytest.raises(ValueError, match=message):
            smart_resize(height, width, rules)
        enough = smart_resize(height, width, replace(rules, max_pixels=needed))
        assert enough[0] * enough[1] <= needed
    assert smart_resize(28, 896, PatchRules(max_pixels=25088)) == (28, 896)  # just fits


@pytest.mark.parametrize("size", [(64, 48), (300, 200), (20, 31), (28, 28), (440, 30)])
def test_patches_are_those_of_transformers(size: tuple[int, int], tmp_path: object) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    picture = Image.open(draw(tmp_path / "a.png", size=size))  # type: ignore[operator]
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


def test_refused() -> None:
    with pytest.raises(ValueError, match="patches of 0 pixels, 2 x 2 to a token"):
        PatchRules(patch=0)
    with pytest.raises(ValueError, match="pictures of 100 to 9000 pixels; expected at least one"):
        PatchRules(min_pixels=100, max_pixels=9000)
    with pytest.raises(ValueError, match="the larger number last"):
        PatchRules(min_pixels=9000, max_pixels=8000)
