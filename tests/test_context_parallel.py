"""`odb_megatron.data.thd`: chunks as Transformer Engine's kernel cuts them."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_data import BASE

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import (
    assemble,
    chunk_indices,
    cost_balance,
    layout,
    padding_mask,
    slice_micro_batch,
)
from odb_megatron.plan.padding import SizeRule


def partitioned_indices(cu_seqlens: list[int], *, size: int, rank: int) -> list[int]:
    """`thd_partition_src_index` of TE's context_parallel.cu, one thread after the other."""
    own = [start // size for start in cu_seqlens]
    found = []
    for token in range(cu_seqlens[-1] // size):
        sequence = bisect.bisect_right(own, token) - 1
        length = own[sequence + 1] - own[sequence]
        index = token - own[sequence]
        offset = rank if index < length // 2 else (size - 1) * 2 - rank
        found.append(index + own[sequence] * size + length // 2 * offset)
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4, 8]))
def test_as_transformer_engine_cuts(chunks: list[int], size: int) -> None:
    cu_seqlens = np.concatenate(([0], np.cumsum(np.array(chunks) * 2 * size)))
    parts = [chunk_indices(cu_seqlens, size=size, rank=rank) for rank in range(size)]
    for rank, part in enumerate(parts):
        expected = partitioned_indices(cu_seqlens.tolist(), size=size, rank=rank)
        assert part.tolist() == expected
    assert sorted(np.concatenate(parts).tolist()) == list(range(int(cu_seqlens[-1])))


def test_known_cut() -> None:
    """Two samples of 8 and 4 tokens on 2 ranks."""
    cu_seqlens = np.array([0, 8, 12])
    assert chunk_indices(cu_seqlens, size=2, rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert chunk_indices(cu_seqlens, size=2, rank=1).tolist() == [2, 3, 4, 5, 9, 10]


def test_a_sample_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="sample 1 .* has 6 tokens .* pad samples to a multiple"):
        chunk_indices(np.array([0, 8, 14]), size=2, rank=0)


def sample(length: int) -> Sample:
    ids = np.arange(length) + BASE
    return Sample(tokens=ids, labels=ids + 1, loss_mask=np.ones(length, dtype=np.float32))


def test_an_odd_length_loses_and_invents_nothing() -> None:
    """7 tokens on 2 ranks: padded to 8, and the ranks' real tokens are the seven."""
    item = assemble([sample(7), sample(3)], positions=[0, 1], rule=SizeRule(multiple=4))
    parts = [slice_micro_batch(item, size=2, rank=rank) for rank in range(2)]
    assert [part.tokens.shape for part in parts] == [(1, 6), (1, 6)]
    real = torch.cat([part.tokens[part.loss_mask > 0] for part in parts])
    assert sorted(real.tolist()) == sorted([*range(BASE, BASE + 7), *range(BASE, BASE + 3)])
    assert sum(int(part.loss_mask.sum()) for part in parts) == 10
    for part in parts:
        assert torch.equal(part.cu_seqlens, item.cu_seqlens)
        assert torch.equal(part.cu_seqlens_padded, item.cu_seqlens_padded)
        at = part.loss_mask[0] > 0
        assert torch.equal(part.labels[0][at], part.tokens[0][at] + 1)
        assert torch.equal(part.position_ids[0][at], part.tokens[0][at] - BASE)


def test_one_rank_has_everything_and_idle_ones_can_be_cut() -> None:
    item = assemble([sample(5)], positions=[0], rule=SizeRule(multiple=1))
    assert slice_micro_batch(item, size=1, rank=0) is item
    idle = slice_micro_batch(assemble([], positions=[], rule=SizeRule(multiple=4)), size=2, rank=1)
    assert idle.is_idle
    assert idle.tokens.shape == (1, 2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_balance_counts_query_key_pairs(lengths: list[int], size: int) -> None:
    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    work = []
    for rank in range(size):
        cu_seqlens = np.concatenate(([0], np.cumsum(padded)))
        places = chunk_indices(cu_seqlens, size=size, rank=rank)
        within = places - cu_seqlens[np.searchsorted(cu_seqlens, places, side="right") - 1]
        which = np.searchsorted(cu_seqlens, places, side="right") - 1
        work.append(int(sum(p + 1 for p, s in zip(within, which, strict=True) if p < lengths[s])))
    expected = np.mean(work) / max(work)
    found = cost_balance(np.array(lengths), np.array(padded), size=size)
    assert found == pytest.approx(expected)


def test_balance_without_padding_is_even_and_without_tokens_one() -> None:
    assert cost_balance(np.array([16, 64]), np.array([16, 64]), size=4) == 1.0
    assert cost_balance(np.array([0]), np.array([4]), size=2) == 1.0
    assert cost_balance(np.array([], dtype=int), np.array([], dtype=int), size=2) == 1.0


@pytest.mark.parametrize(
    ("lengths", "multiple", "expected"),
    [((3, 2), 1, "00000"), ((3, 5), 4, "000100000111"), ((1,), 4, "0111"), ((), 4, "0111")],
)
def test_where_padding_is(lengths: tuple[int, ...], multiple: int, expected: str) -> None:
    """An idle micro-batch keeps one token that counts."""
    item = layout(lengths, positions=tuple(range(len(lengths))), rule=SizeRule(multiple=multiple))
    mask = padding_mask(item)
    assert (mask.dtype, tuple(mask.shape)) == (torch.bool, (1, len(expected)))
    assert "".join(str(int(value)) for value in mask[0]) == expected


@given(st.lists(st.integers(1, 20), max_size=5), st.sampled_from([2, 3, 4]))
def test_the_mask_is_cut_like_the_tokens(lengths: list[int], size: int) -> None:
    item = layout(lengths, positions=tuple(range(len(lengths))), rule=SizeRule(multiple=2 * size))
    whole = padding_mask(item)[0].numpy()
    offsets = item.cu_seqlens_padded.numpy()
    assert int((~whole).sum()) == (sum(lengths) or 1)
    for rank in range(size):
        part = padding_mask(item, size=size, rank=rank)[0].numpy()
        assert np.array_equal(part, whole[chunk_indices(offsets, size=size, rank=rank)])
