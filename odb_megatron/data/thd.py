"""Packed (THD) assembly of a micro-batch: concatenated samples and their cumulative lengths.

Must not choose which samples go together (that is the plan) and must not pad by a rule of its own
(`plan.padding`). Shape suffixes: T tokens of the micro-batch after padding, S samples, S1 = S + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odb_megatron.data.images import ImageLayout, image_layout
from odb_megatron.data.sample import Sample
from odb_megatron.plan.padding import padded_length

__all__ = ["PAD_TOKEN", "MicroBatch", "MicroBatchLayout", "assemble", "assemble_idle", "layout"]

PAD_TOKEN = 0
"""Token id at padded places and in idle micro-batches: any id of the vocabulary serves, because
no loss is taken there and attention does not cross samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLayout:
    """Where the samples of one packed micro-batch lie: all that a middle pipeline stage uses.

    With a fixed length (`total`) what the samples leave of it is one more segment, without a real
    token, at the end of both cumulative lengths.

    Attributes:
        cu_seqlens: int32 [S1], cumulative lengths before padding (real tokens).
        cu_seqlens_padded: int32 [S1], cumulative lengths after padding (offsets into T).
        max_seqlen: longest padded sample.
        positions: stream positions of the samples, in their order here; empty when idle.
        num_patches: image patches that its samples stand for.
        images: where its images lie; None where there are none.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    positions: tuple[int, ...]
    num_patches: int = 0
    images: ImageLayout | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it carries no sample."""
        return not self.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(MicroBatchLayout):
    """One packed micro-batch, on the CPU.

    Attributes:
        tokens: int64 [1, T].
        labels: int64 [1, T]; a sample's last label is its own, never the next sample's token.
        loss_mask: float32 [1, T], 0 at padding.
        position_ids: int64 [1, T], from 0 in each sample.
        pixel_values: [P, C], patches of its images; None where there are none, or where this
            rank has no use for them.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    pixel_values: Tensor | None = None


def layout(
    lengths: Sequence[int], *, positions: Sequence[int], multiple: int = 1, total: int = 0
) -> MicroBatchLayout:
    """Lay out samples of the given lengths, each padded to `multiple`; none for an idle one.

    An idle micro-batch is the smallest legal one: `multiple` padding tokens. Its `cu_seqlens` name
    no real token, so FLOPs accounting adds nothing for it; attention goes by `cu_seqlens_padded`.

    Args:
        lengths: tokens of each sample.
        positions: their stream positions.
        multiple: see `plan.padding.length_multiple`.
        total: tokens of the micro-batch, a multiple of `multiple`; 0 for what the samples need.

    Raises:
        ValueError: the samples need more than `total`.
    """
    real = list(lengths) or [0]
    padded = [padded_length(max(1, length), multiple) for length in real]
    if total:
        rest = total - sum(padded)
        if rest < 0:
            raise ValueError(
                f"samples of {sum(padded)} tokens after padding are in a micro-batch that is "
                f"padded to {total}: raise --odb-token-budget, or drop --odb-pad-to-budget"
            )
        if not lengths:
            padded = [total]
        elif rest:
            real, padded = [*real, 0], [*padded, rest]
    return MicroBatchLayout(
        cu_seqlens=torch.tensor([0, *np.cumsum(real)], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32),
        max_seqlen=max(padded),
        positions=tuple(positions),
    )


def assemble(
    samples: Sequence[Sample], *, positions: Sequence[int], multiple: int = 1, total: int = 0
) -> MicroBatch:
    """Concatenate samples, each padded to `multiple`.

    Args:
        samples: at least one (see `assemble_idle` for none).
        positions: their stream positions, same order.
        multiple: see `plan.padding.length_multiple`.
        total: see `layout`.

    Raises:
        ValueError: no samples, `positions` of another length, or more samples than fit `total`.
    """
    if not samples or len(samples) != len(positions):
        raise ValueError(
            f"a micro-batch needs samples and one position for each; got {len(samples)} samples "
            f"and {len(positions)} positions"
        )
    lengths = [len(sample) for sample in samples]
    where = layout(lengths, positions=positions, multiple=multiple, total=total)
    offsets = where.cu_seqlens_padded.numpy()
    tokens_T = np.full(offsets[-1], PAD_TOKEN, dtype=np.int64)
    labels_T = np.full(offsets[-1], PAD_TOKEN, dtype=np.int64)
    loss_mask_T = np.zeros(offsets[-1], dtype=np.float32)
    position_ids_T = np.zeros(offsets[-1], dtype=np.int64)
    for sample, start, end in zip(samples, offsets, offsets[1:], strict=False):
        tokens_T[start : start + len(sample)] = sample.tokens
        labels_T[start : start + len(sample)] = sample.labels
        loss_mask_T[start : start + len(sample)] = sample.loss_mask
        position_ids_T[start:end] = np.arange(end - start)
    return MicroBatch(
        tokens=torch.from_numpy(tokens_T)[None],
        labels=torch.from_numpy(labels_T)[None],
        loss_mask=torch.from_numpy(loss_mask_T)[None],
        position_ids=torch.from_numpy(position_ids_T)[None],
        cu_seqlens=where.cu_seqlens,
        cu_seqlens_padded=where.cu_seqlens_padded,
        max_seqlen=where.max_seqlen,
        positions=where.positions,
        num_patches=sum(sample.num_patches for sample in samples),
        images=_images(samples, offsets[:-1]),
        pixel_values=_pixels(samples),
    )


def assemble_idle(*, multiple: int = 1, total: int = 0) -> MicroBatch:
    """Return an idle micro-batch: see `layout`; none of its tokens has loss."""
    where = layout((), positions=(), multiple=multiple, total=total)
    num_tokens = total or multiple
    zeros_T = torch.zeros((1, num_tokens), dtype=torch.int64)
    return MicroBatch(
        tokens=zeros_T + PAD_TOKEN,
        labels=zeros_T + PAD_TOKEN,
        loss_mask=torch.zeros((1, num_tokens), dtype=torch.float32),
        position_ids=torch.arange(multiple).repeat(num_tokens // multiple)[None],
        cu_seqlens=where.cu_seqlens,
        cu_seqlens_padded=where.cu_seqlens_padded,
        max_seqlen=where.max_seqlen,
        positions=(),
    )


def _images(samples: Sequence[Sample], offsets: npt.NDArray[np.int32]) -> ImageLayout | None:
    own = [sample.images for sample in samples]
    formats = {images.format for images in own if images is not None}
    if not formats:
        return None
    if len(formats) > 1:
        raise ValueError(
            "samples of one micro-batch have patches of different kinds "
            f"({sorted(map(str, formats))}): preprocess all images alike"
        )
    nothing = np.zeros(0, dtype=np.int64)
    return image_layout(
        [nothing if one is None else one.grid_thw for one in own],
        [nothing if one is None else one.starts for one in own],
        offsets=offsets.astype(np.int64)[: len(own)],
        merge=formats.pop().merge,
    )


def _pixels(samples: Sequence[Sample]) -> Tensor | None:
    own = [sample.images.pixel_values for sample in samples if sample.images is not None]
    return torch.from_numpy(np.concatenate(own)) if own else None
