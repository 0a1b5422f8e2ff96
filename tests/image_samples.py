"""Samples with synthetic images, and pictures drawn at run time, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odb_megatron.data.images import SampleImages
from odb_megatron.data.sample import Sample

__all__ = ["VISUAL", "draw", "image_sample"]

VISUAL = 7
"""Token id at visual places."""


def image_sample(
    layout: Sequence[int | tuple[int, int]], *, seed: int = 0, width: int = 12, dtype: str = "uint8"
) -> Sample:
    """Return a sample of text runs (a number of tokens) and images (patches in height and width).

    Two by two patches are a visual token.
    """
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    learn: list[bool] = []
    grid, starts = [], []
    for part in layout:
        if isinstance(part, int):
            ids += rng.integers(10, 300, size=part).tolist()
            learn += [True] * part
        else:
            count = part[0] * part[1] // 4
            grid.append((1, *part))
            starts.append(len(ids))
            ids += [VISUAL] * count
            learn += [False] * count
    ids.append(9)
    learn.append(True)
    images = None
    if grid:
        total = int(np.prod(grid, axis=1).sum())
        pixels = rng.integers(0, 256, size=(total, width))
        images = SampleImages(
            pixel_values=(pixels if dtype == "uint8" else pixels / 255).astype(dtype),
            grid_thw=np.array(grid, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
        )
    return Sample(
        tokens=np.array(ids[:-1], dtype=np.int64),
        labels=np.array(ids[1:], dtype=np.int64),
        loss_mask=np.array(learn[1:], dtype=np.float32),
        num_patches=images.num_patches if images else 0,
        images=images,
    )


def draw(path: Path, *, size: tuple[int, int] = (64, 48), seed: int = 0, **options: Any) -> Path:
    """Write a picture of random rectangles."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", size, tuple(rng.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y = rng.integers(0, size[0]), rng.integers(0, size[1])
        pen.rectangle([x, y, x + 9, y + 7], fill=tuple(rng.integers(0, 256, 3).tolist()))
    picture.save(path, **options)
    return path
