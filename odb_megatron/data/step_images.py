"""The images of a step as rows of its header, and their patches as one payload.

Must not send anything. Patches are in no header and in no token payload: they go to the ranks of
the first pipeline stage alone, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.images import ImageLayout, PixelFormat, image_layout
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout

__all__ = ["ImageRow", "check_rows", "layout_of_rows", "pixel_bytes", "with_pixels"]

ImageRow = tuple[int, int, int, int, int]
"""Sample of the micro-batch, patches in time, height and width, first token in the sample."""

_MAX_BYTES = 1 << 34


def layout_of_rows(rows: Sequence[ImageRow], item: MicroBatchLayout, *, merge: int) -> ImageLayout:
    """Return where the images lie that `rows` describe."""
    num_samples = len(item.positions)
    table = np.array(rows, dtype=np.int64)
    members = [table[table[:, 0] == at] for at in range(num_samples)]
    return image_layout(
        [one[:, 1:4] for one in members],
        [one[:, 4] for one in members],
        offsets=item.cu_seqlens_padded.numpy().astype(np.int64)[:num_samples],
        merge=merge,
    )


def check_rows(
    images: Sequence[Sequence[ImageRow]],
    pixels: PixelFormat | None,
    *,
    lengths: Sequence[Sequence[int]],
    patches: Sequence[int],
) -> None:
    """Raise unless the rows of a header fit its samples.

    Raises:
        ValueError: they do not.
        TypeError: a row that is none.
    """
    if pixels is None:
        if images:
            raise ValueError("images without a kind of patches")
        return
    if len(images) != len(lengths):
        raise ValueError("images of another number of micro-batches")
    for rows, samples, count in zip(images, lengths, patches, strict=True):
        total, last = 0, (0, 0)
        for row in rows:
            if len(row) != 5 or not all(type(n) is int and 0 <= n < 1 << 31 for n in row):
                raise ValueError("an image's row is none")
            sample, t, h, w, start = row
            if min(t, h, w) < 1 or h % pixels.merge or w % pixels.merge:
                raise ValueError("an image's grid is none")
            end = start + pixels.tokens((t, h, w))
            if sample >= len(samples) or end > samples[sample] or (sample, start) < last:
                raise ValueError("an image that lies outside its sample, or in another")
            total, last = total + t * h * w, (sample, end)
        if rows and total > count:
            raise ValueError("more patches than the micro-batch has")
    if _num_patches(images) * pixels.patch_bytes > _MAX_BYTES:
        raise ValueError(f"patches of more than {_MAX_BYTES} bytes")


def pixel_bytes(images: Sequence[Sequence[ImageRow]], pixels: PixelFormat) -> int:
    """Return the size of the patches' payload."""
    return _num_patches(images) * pixels.patch_bytes


def with_pixels(
    micro_batches: Sequence[MicroBatch], data: npt.NDArray[np.uint8], pixels: PixelFormat
) -> list[MicroBatch]:
    """Return the micro-batches with their patches.

    Raises:
        ValueError: the payload has another size than they say.
    """
    counts = [0 if one.images is None else int(one.images.cu_patches[-1]) for one in micro_batches]
    if data.size != sum(counts) * pixels.patch_bytes:
        raise ValueError(
            f"{data.size} bytes of patches arrived; the header describes "
            f"{sum(counts) * pixels.patch_bytes}: ranks of the replica run different code"
        )
    found, at = [], 0
    for item, count in zip(micro_batches, counts, strict=True):
        part = data[at : at + count * pixels.patch_bytes]
        at += part.size
        if count:
            values = torch.from_numpy(part.view(pixels.dtype).reshape(count, pixels.width))
            item = replace(item, pixel_values=values)
        found.append(item)
    return found


def _num_patches(images: Sequence[Sequence[ImageRow]]) -> int:
    return sum(t * h * w for rows in images for _, t, h, w, _ in rows)
