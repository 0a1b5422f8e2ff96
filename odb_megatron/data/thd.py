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
from odb_megatron.plan.padding import SizeRule

__all__ = ["PAD_TOKEN", "MicroBatch", "MicroBatchLayout", "assemble", "assemble_idle", "layout"]
__all__ += ["position_ids", "sample_index"]

PAD_TOKEN = 0
"""Token id at padded places and in idle micro-batches: any id of the vocabulary serves, because
no loss is taken there and attention does not cross samples."""

_ANY = SizeRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLayout:
    """Where the samples of one packed micro-batch lie: all that a middle pipeline stage uses.

    Where the rule fixes sizes, what the samples leave is segments without a real token behind
    theirs, and S counts all that the rule has room for.

    Attributes:
        cu_seqlens: int32 [S1], cumulative lengths before padding (real tokens).
        cu_seqlens_padded: int32 [S1], cumulative lengths after padding (offsets into T).
        max_seqlen: longest padded sample; with fixed sizes the longest there can be.
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
    lengths: Sequence[int], *, positions: Sequence[int], rule: SizeRule = _ANY
) -> MicroBatchLayout:
    """Lay out samples of the given lengths by a rule; none for an idle micro-batch.

    An idle micro-batch is the smallest legal one: `multiple` padding tokens, or the smallest size.
    Its `cu_seqlens` name no real token, so FLOPs accounting adds nothing for it; attention goes by
    `cu_seqlens_padded`.

    Args:
        lengths: tokens of each sample.
        positions: their stream positions.
        rule: what samples and micro-batches are padded to.

    Raises:
        ValueError: the samples need more than the largest size.
    """
    real = list(lengths)
    padded = [rule.padded(length) for length in real]
    used = sum(padded)
    if rule.sizes:
        size = rule.size_of(used)
        padded += rule.padding(size - used)
        padded += [0] * (rule.num_segments(size) - len(padded))
        longest = rule.longest or size
    else:
        padded = padded or [rule.multiple]
        longest = max(padded)
    real += [0] * (len(padded) - len(real))
    return MicroBatchLayout(
        cu_seqlens=torch.tensor([0, *np.cumsum(real)], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32),
        max_seqlen=longest,
        positions=tuple(positions),
    )


def assemble(
    samples: Sequence[Sample], *, positions: Sequence[int], rule: SizeRule = _ANY
) -> MicroBatch:
    """Concatenate samples, padded by a rule.

    Args:
        samples: at least one (see `assemble_idle` for none).
        positions: their stream positions, same order.
        rule: see `layout`.

    Raises:
        ValueError: no samples, `positions` of another length, or more samples than fit the rule.
    """
    if not samples or len(samples) != len(positions):
        raise ValueError(
            f"a micro-batch needs samples and one position for each; got {len(samples)} samples "
            f"and {len(positions)} positions"
        )
    lengths = [len(sample) for sample in samples]
    where = layout(lengths, positions=positions, rule=rule)
    offsets = where.cu_seqlens_padded.numpy()
    tokens_T = np.full(offsets[-1], PAD_TOKEN, dtype=np.int64)
    labels_T = np.full(offsets[-1], PAD_TOKEN, dtype=np.int64)
    loss_mask_T = np.zeros(offsets[-1], dtype=np.float32)
    for sample, start in zip(samples, offsets, strict=False):
        tokens_T[start : start + len(sample)] = sample.tokens
        labels_T[start : start + len(sample)] = sample.labels
        loss_mask_T[start : start + len(sample)] = sample.loss_mask
    return MicroBatch(
        tokens=torch.from_numpy(tokens_T)[None],
        labels=torch.from_numpy(labels_T)[None],
        loss_mask=torch.from_numpy(loss_mask_T)[None],
        position_ids=position_ids(offsets),
        cu_seqlens=where.cu_seqlens,
        cu_seqlens_padded=where.cu_seqlens_padded,
        max_seqlen=where.max_seqlen,
        positions=where.positions,
        num_patches=sum(sample.num_patches for sample in samples),
        images=_images(samples, offsets[:-1]),
        pixel_values=_pixels(samples),
    )


def assemble_idle(*, rule: SizeRule = _ANY) -> MicroBatch:
    """Return an idle micro-batch: see `layout`; none of its tokens has loss."""
    where = layout((), positions=(), rule=rule)
    zeros_T = torch.zeros((1, int(where.cu_seqlens_padded[-1])), dtype=torch.int64)
    return MicroBatch(
        tokens=zeros_T + PAD_TOKEN,
        labels=zeros_T + PAD_TOKEN,
        loss_mask=torch.zeros(zeros_T.shape, dtype=torch.float32),
        position_ids=position_ids(where.cu_seqlens_padded.numpy()),
        cu_seqlens=where.cu_seqlens,
        cu_seqlens_padded=where.cu_seqlens_padded,
        max_seqlen=where.max_seqlen,
        positions=(),
    )


def sample_index(item: MicroBatchLayout) -> Tensor:
    """Return which segment each token is of, int32 [1, T].

    State-space layers start anew where it changes: Megatron calls it `seq_idx`.
    """
    lengths = item.cu_seqlens_padded.diff()
    index_T = torch.repeat_interleave(
        torch.arange(lengths.numel(), dtype=torch.int32), lengths.long()
    )
    return index_T[None]


def position_ids(offsets: npt.NDArray[np.integer]) -> Tensor:
    """Places within each segment, also one of padding: none is beyond the longest sample's."""
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    return torch.from_numpy(np.arange(offsets[-1], dtype=np.int64) - starts)[None]


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
