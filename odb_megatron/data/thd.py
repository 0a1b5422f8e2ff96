"""Packed (THD) micro-batches: samples one after the other, their cumulative lengths, and which
tokens of them a context-parallel rank holds.

Which samples go together is the plan's part, what they are padded to `plan.padding`'s. Shape
suffixes: T tokens of the micro-batch after padding, S samples, S1 = S + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odb_megatron.data.images import ImageLayout, image_layout
from odb_megatron.plan.padding import SizeRule

__all__ = ["PAD_TOKEN", "MicroBatch", "MicroBatchLayout", "chunk_indices", "context_part"]
__all__ += ["cost_balance", "filled", "layout", "padding_mask", "sample_index", "slice_micro_batch"]

PAD_TOKEN = 0
"""Token id at padded places and in idle micro-batches: any id of the vocabulary serves, because
no loss is taken there and attention does not cross samples."""

_ANY = SizeRule()
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
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
        share: how many replicas train it together, and which of them this one is.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    positions: tuple[int, ...]
    num_patches: int = 0
    images: ImageLayout | None = None
    share: tuple[int, int] = (1, 0)

    @property
    def is_idle(self) -> bool:
        """Whether it carries no sample."""
        return not self.positions


@dataclass(frozen=True, kw_only=True)
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


def layout(  # noqa: PLR0913
    lengths: Sequence[int],
    *,
    positions: Sequence[int],
    rule: SizeRule = _ANY,
    num_patches: int = 0,
    images: Sequence[Sequence[int]] = (),
    merge: int = 1,
    share: tuple[int, int] = (1, 0),
) -> MicroBatchLayout:
    """Lay out samples of the given lengths by a rule; none for an idle micro-batch.

    An idle micro-batch is the smallest legal one: `multiple` padding tokens, or the smallest size.
    Its `cu_seqlens` name no real token, so FLOPs accounting adds nothing for it; attention goes by
    `cu_seqlens_padded`.

    Args:
        lengths: tokens of each sample.
        positions: their stream positions.
        rule: what samples and micro-batches are padded to.
        num_patches: image patches that the samples stand for.
        images: see `wire.StepHeader`.
        merge: see `images.ImageLayout`.
        share: see `MicroBatchLayout`; the rule is that for as many.

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
    offsets = np.array([0, *padded], dtype=np.int32).cumsum(dtype=np.int32)
    found = None
    if images:
        found = image_layout(images, offsets[: len(positions)].astype(np.int64), merge=merge)
    return MicroBatchLayout(
        cu_seqlens=torch.from_numpy(np.array([0, *real], np.int32).cumsum(dtype=np.int32)),
        cu_seqlens_padded=torch.from_numpy(offsets),
        max_seqlen=longest,
        positions=tuple(positions),
        num_patches=num_patches,
        images=found,
        share=share,
    )


def filled(
    item: MicroBatchLayout,
    tokens: npt.NDArray[np.integer],
    labels: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.float32],
    pixel_values: Tensor | None = None,
) -> MicroBatch:
    """Return a micro-batch of this layout: its samples' real tokens, one after the other, go to
    their padded places."""
    starts, real = item.cu_seqlens_padded.numpy(), item.cu_seqlens.numpy()
    lengths, size = np.diff(starts), int(starts[-1])
    # Also from 0 in each segment of padding: none is beyond the longest sample's.
    within = np.arange(size)
    within -= np.repeat(starts[:-1], lengths)
    places: Any = slice(None)  # where nothing is padded, which is usual
    if real[-1] < size:
        places = np.flatnonzero(within < np.repeat(np.diff(real), lengths))
    ids, mask = np.full((2, size), PAD_TOKEN, dtype=np.int64), np.zeros(size, dtype=np.float32)
    ids[0, places], ids[1, places], mask[places] = tokens, labels, loss_mask
    return MicroBatch(
        **vars(item),
        tokens=torch.from_numpy(ids[:1]),
        labels=torch.from_numpy(ids[1:]),
        loss_mask=torch.from_numpy(mask)[None],
        position_ids=torch.from_numpy(within)[None],
        pixel_values=pixel_values,
    )


def sample_index(item: MicroBatchLayout) -> Tensor:
    """Return which segment each token is of, int32 [1, T].

    State-space layers start anew where it changes: Megatron calls it `seq_idx`.
    """
    lengths = item.cu_seqlens_padded.diff()
    index = torch.repeat_interleave(
        torch.arange(lengths.numel(), dtype=torch.int32), lengths.long()
    )
    return index[None]


# --- context parallelism -----------------------------------------------------------------------
#
# Every sample is cut into 2 * size equal chunks, of which rank r holds chunks r and
# 2 * size - 1 - r, so that causal attention costs every rank the same. That is the order of
# Transformer Engine's `thd_get_partitioned_indices`
# (transformer_engine/common/fused_attn/context_parallel.cu).


def chunk_indices(cu_seqlens_padded: Integers, *, size: int, rank: int) -> Integers:
    """Return the places in the whole pack that a rank holds, int64 [T / size], sample by sample.

    Args:
        cu_seqlens_padded: int [S1], offsets of the padded samples.
        size: context-parallel size.
        rank: context-parallel rank.

    Raises:
        ValueError: a sample's padded length is no multiple of 2 * size.
    """
    starts = np.asarray(cu_seqlens_padded, dtype=np.int64)
    lengths = np.diff(starts)
    if (lengths % (2 * size)).any():
        at = int((lengths % (2 * size) != 0).argmax())
        raise ValueError(
            f"sample {at} of the micro-batch has {lengths[at]} tokens after padding, which "
            f"context parallelism of {size} cannot cut into {2 * size} equal chunks: pad samples "
            f"to a multiple of {2 * size}"
        )
    chunks = lengths // (2 * size)
    first = starts[:-1] + rank * chunks
    last = starts[:-1] + (2 * size - 1 - rank) * chunks
    # Runs of consecutive places: (first, last) of each sample, each `chunk` long.
    begins = np.stack([first, last], axis=1).reshape(-1)
    sizes = np.repeat(chunks, 2)
    before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    return np.repeat(begins - before, sizes) + np.arange(int(sizes.sum()))


def context_part(item: MicroBatchLayout, size: int, rank: int) -> tuple[int, int]:
    """Return over how many ranks a micro-batch is cut, and which part a rank has.

    Args:
        item: the micro-batch, perhaps shared by several replicas.
        size: context-parallel size of a replica.
        rank: context-parallel rank.
    """
    width, place = item.share
    return width * size, place * size + rank


def slice_micro_batch(item: MicroBatch, *, size: int, rank: int) -> MicroBatch:
    """Return a rank's part of a micro-batch; cumulative lengths stay those of the whole.

    Args:
        item: the micro-batch.
        size: context-parallel size of a replica.
        rank: context-parallel rank.

    Raises:
        ValueError: see `chunk_indices`; or it has images, which a rank cannot encode in part.
    """
    size, rank = context_part(item, size, rank)
    if size == 1:
        return item
    if item.images is not None:
        raise ValueError(
            "samples with images cannot be cut for context parallelism in this version: use "
            "--context-parallel-size 1 and --odb-share-long 1"
        )
    index = torch.from_numpy(chunk_indices(item.cu_seqlens_padded.numpy(), size=size, rank=rank))
    names = ("tokens", "labels", "loss_mask", "position_ids")
    part: dict[str, Any] = {name: getattr(item, name).index_select(1, index) for name in names}
    return replace(item, **part)


def padding_mask(item: MicroBatchLayout, *, size: int = 1, rank: int = 0) -> Tensor:
    """Return where a rank's part is padding (True), bool [1, T / size]; see `slice_micro_batch`.

    The first token of an idle micro-batch counts as real: a router's load-balancing loss divides by
    the number of real tokens, so that none at all gives 0 / 0.
    """
    starts = item.cu_seqlens_padded.numpy().astype(np.int64)
    real = np.diff(item.cu_seqlens.numpy().astype(np.int64))
    if item.is_idle:
        real = np.ones_like(real)
    padded = np.diff(starts)
    within = np.arange(int(starts[-1])) - np.repeat(starts[:-1], padded)
    mask = within >= np.repeat(real, padded)
    size, rank = context_part(item, size, rank)
    if size > 1:
        mask = mask[chunk_indices(starts, size=size, rank=rank)]
    return torch.from_numpy(mask)[None]


def cost_balance(lengths: Integers, padded: Integers, *, size: int) -> float:
    """Return how even the attention over real tokens is across the ranks: mean / max.

    A rank's share of a sample is the number of (query, key) pairs of its two chunks. Padding at a
    sample's end makes the shares uneven; without it they are equal.

    Args:
        lengths: int [S], tokens of each sample before padding.
        padded: int [S], the same after padding, multiples of 2 * size.
        size: context-parallel size.
    """
    chunks = padded // (2 * size)
    # Pairs of the first n queries of a sample: n (n + 1) / 2.
    edges = np.minimum(np.arange(2 * size + 1)[:, None] * chunks, lengths)
    pairs = np.diff(edges * (edges + 1) // 2, axis=0)  # [2 * size, S]
    by_rank = (pairs[:size] + pairs[: size - 1 : -1]).sum(axis=1)
    most = int(by_rank.max()) if len(lengths) else 0
    return float(by_rank.mean() / most) if most else 1.0
