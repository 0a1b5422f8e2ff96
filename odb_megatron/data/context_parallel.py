"""Context parallelism: which tokens of a packed micro-batch a rank holds, and how even that is.

Must not touch process groups: rank and size come as numbers. Every sample is cut into 2 * size
equal chunks, of which rank r holds chunks r and 2 * size - 1 - r, so that causal attention costs
every rank the same. That is the order of Transformer Engine's `thd_get_partitioned_indices`
(transformer_engine/common/fused_attn/context_parallel.cu). Shape suffixes as in `data.thd`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odb_megatron.data.thd import MicroBatch, MicroBatchLayout

__all__ = ["chunk_indices", "cost_balance", "padding_mask", "slice_micro_batch"]

Integers = npt.NDArray[np.int64]


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


def slice_micro_batch(item: MicroBatch, *, size: int, rank: int) -> MicroBatch:
    """Return a rank's part of a micro-batch; cumulative lengths stay those of the whole.

    Raises:
        ValueError: see `chunk_indices`; or it has images, which a rank cannot encode in part.
    """
    if size == 1:
        return item
    if item.images is not None:
        raise ValueError(
            "samples with images cannot be cut for context parallelism in this version: use "
            "--context-parallel-size 1"
        )
    index_T = torch.from_numpy(chunk_indices(item.cu_seqlens_padded.numpy(), size=size, rank=rank))
    return replace(
        item,
        tokens=item.tokens.index_select(1, index_T),
        labels=item.labels.index_select(1, index_T),
        loss_mask=item.loss_mask.index_select(1, index_T),
        position_ids=item.position_ids.index_select(1, index_T),
    )


def padding_mask(item: MicroBatchLayout, *, size: int = 1, rank: int = 0) -> Tensor:
    """Return where a rank's part is padding (True), bool [1, T / size].

    The first token of an idle micro-batch counts as real: a router's load-balancing loss divides by
    the number of real tokens, so that none at all gives 0 / 0.

    Args:
        item: the micro-batch, or its layout.
        size: context-parallel size.
        rank: context-parallel rank.
    """
    starts = item.cu_seqlens_padded.numpy().astype(np.int64)
    real = np.diff(item.cu_seqlens.numpy().astype(np.int64))
    if item.is_idle:
        real = np.ones_like(real)
    padded = np.diff(starts)
    within = np.arange(int(starts[-1])) - np.repeat(starts[:-1], padded)
    mask_T = within >= np.repeat(real, padded)
    if size > 1:
        mask_T = mask_T[chunk_indices(starts, size=size, rank=rank)]
    return torch.from_numpy(mask_T)[None]


def cost_balance(lengths: Integers, padded: Integers, *, size: int) -> float:
    """Return how even the attention over real tokens is across the ranks: mean / max.

    A rank's share of a sample is the number of (query, key) pairs of its two chunks. Padding at a
    sample's end makes the shares uneven; without it they are equal.

    Args:
        lengths: int [S], tokens of each sample before padding.
        padded: int [S], the same after padding, multiples of 2 * size.
        size: context-parallel size.
    """
    lengths, padded = np.asarray(lengths, dtype=np.int64), np.asarray(padded, dtype=np.int64)
    chunks = padded // (2 * size)
    # Pairs of the first n queries of a sample: n (n + 1) / 2.
    edges = np.minimum(np.arange(2 * size + 1)[:, None] * chunks, lengths)
    pairs = np.diff(edges * (edges + 1) // 2, axis=0)  # [2 * size, S]
    by_rank = (pairs[:size] + pairs[: size - 1 : -1]).sum(axis=1)
    most = int(by_rank.max()) if len(lengths) else 0
    return float(by_rank.mean() / most) if most else 1.0
