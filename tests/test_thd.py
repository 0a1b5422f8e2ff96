"""`odb_megatron.data.thd`: packed micro-batches against a token-by-token reference."""

from __future__ import annotations

import bisect
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import (
    PAD_TOKEN,
    MicroBatch,
    chunk_indices,
    cost_balance,
    layout,
    padding_mask,
    slice_micro_batch,
)
from odb_megatron.data.wire import assemble
from odb_megatron.plan.padding import SizeRule, size_rule

BASE = 1000
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)
MULTIPLES = st.sampled_from([1, 2, 4, 6, 16])


def _samples(lengths: list[int]) -> list[Sample]:
    """Tokens count up over all samples, so that no two places hold the same one."""
    samples, first = [], 1
    for length in lengths:
        tokens = np.arange(first, first + length)
        mask = (tokens % 3 > 0).astype(np.float32)
        samples.append(Sample(tokens=tokens, labels=tokens + 10_000, loss_mask=mask))
        first += length
    return samples


def _assembled(lengths: list[int], multiple: int = 1) -> MicroBatch:
    return assemble(
        _samples(lengths),
        positions=[7 * i for i in range(len(lengths))],
        rule=SizeRule(multiple=multiple),
    )


def test_patches_are_added_up() -> None:
    samples = [replace(sample, num_patches=at) for at, sample in enumerate(_samples([3, 2, 4]))]
    assert assemble(samples, positions=[0, 1, 2]).num_patches == 3
    assert assemble([], positions=[]).num_patches == 0


@given(LENGTHS, MULTIPLES)
def test_against_a_naive_reference(lengths: list[int], multiple: int) -> None:
    batch = _assembled(lengths, multiple)
    tokens: list[int] = []
    labels: list[int] = []
    mask: list[float] = []
    places: list[int] = []
    bounds, padded_bounds = [0], [0]
    for sample in _samples(lengths):
        place = 0
        for token, label, weight in zip(
            sample.tokens, sample.labels, sample.loss_mask, strict=True
        ):
            tokens.append(int(token))
            labels.append(int(label))
            mask.append(float(weight))
            places.append(place)
            place += 1
        bounds.append(bounds[-1] + place)
        while place % multiple:
            tokens.append(PAD_TOKEN)
            labels.append(PAD_TOKEN)
            mask.append(0.0)
            places.append(place)
            place += 1
        padded_bounds.append(len(tokens))
    assert batch.tokens.tolist() == [tokens]
    assert batch.labels.tolist() == [labels]
    assert batch.loss_mask.tolist() == [mask]
    assert batch.position_ids.tolist() == [places]
    assert batch.cu_seqlens.tolist() == bounds
    assert batch.cu_seqlens_padded.tolist() == padded_bounds
    assert batch.max_seqlen == max(np.diff(padded_bounds))
    assert batch.positions == tuple(7 * i for i in range(len(lengths)))
    assert not batch.is_idle


@given(LENGTHS, MULTIPLES)
def test_types_shapes_and_sentinels(lengths: list[int], multiple: int) -> None:
    batch = _assembled(lengths, multiple)
    total = batch.tokens.shape[1]
    assert total % multiple == 0
    for tensor in (batch.tokens, batch.labels, batch.position_ids):
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (1, total))
    assert (batch.loss_mask.dtype, tuple(batch.loss_mask.shape)) == (torch.float32, (1, total))
    for bounds in (batch.cu_seqlens, batch.cu_seqlens_padded):
        assert (bounds.dtype, tuple(bounds.shape)) == (torch.int32, (len(lengths) + 1,))
        assert bounds[0] == 0
    assert batch.cu_seqlens_padded[-1] == total
    assert batch.cu_seqlens[-1] == sum(lengths)
    assert torch.equal(batch.cu_seqlens, batch.cu_seqlens_padded) == all(
        length % multiple == 0 for length in lengths
    )


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_idle_micro_batch_is_the_smallest(multiple: int) -> None:
    batch = assemble([], positions=[], rule=SizeRule(multiple=multiple))
    assert batch.is_idle
    assert batch.positions == ()
    assert batch.tokens.tolist() == batch.labels.tolist() == [[PAD_TOKEN] * multiple]
    assert batch.loss_mask.tolist() == [[0.0] * multiple]
    assert batch.position_ids.tolist() == [list(range(multiple))]
    assert batch.cu_seqlens.tolist() == [0, 0]
    assert batch.cu_seqlens_padded.tolist() == [0, multiple]
    assert batch.max_seqlen == multiple
    reference = _assembled([1], multiple)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_padded"):
        assert getattr(batch, name).dtype == getattr(reference, name).dtype
        assert getattr(batch, name).shape == getattr(reference, name).shape


def test_a_fixed_length() -> None:
    """What is left is segments without a real token, and entries of no tokens at all."""
    own = _assembled([7, 5], multiple=4)
    rule = SizeRule(sizes=(24,), multiple=4)
    batch = assemble(_samples([7, 5]), positions=(0, 1), rule=rule)
    assert batch.cu_seqlens.tolist() == [0, 7, *[12] * 6]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 16, *[24] * 5]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        whole = getattr(batch, name)
        assert whole.shape == (1, 24)
        assert torch.equal(whole[:, :16], getattr(own, name))
        assert name == "position_ids" or not whole[:, 16:].any()
    assert batch.position_ids[0, 16:].tolist() == list(range(8))
    assert batch.max_seqlen == 24
    assert padding_mask(batch)[0].tolist() == [False] * 7 + [True] + [False] * 5 + [True] * 11


def test_a_fixed_length_that_is_full() -> None:
    samples, positions = _samples([7, 5]), (0, 1)
    batch = assemble(samples, positions=positions, rule=SizeRule(sizes=(16,), multiple=4))
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 16, 16, 16, 16]
    with pytest.raises(ValueError, match="16 tokens after padding .* padded to 12: raise --odb"):
        assemble(samples, positions=positions, rule=SizeRule(sizes=(12,), multiple=4))


def test_an_idle_micro_batch_of_a_fixed_length() -> None:
    batch = assemble([], positions=[], rule=SizeRule(sizes=(12, 24), multiple=4))
    assert batch.is_idle
    assert batch.cu_seqlens.tolist() == [0] * 5
    assert batch.cu_seqlens_padded.tolist() == [0, 12, 12, 12, 12]
    assert batch.tokens.shape == batch.position_ids.shape == batch.loss_mask.shape == (1, 12)
    assert padding_mask(batch)[0].tolist() == [False] + [True] * 11


@given(
    st.lists(st.integers(1, 40), max_size=20),
    MULTIPLES,
    st.integers(200, 5000),
    st.lists(st.integers(1, 5000), max_size=3),
)
def test_shapes_follow_from_the_size_alone(
    lengths: list[int], multiple: int, budget: int, buckets: list[int]
) -> None:
    """Every tensor's shape, `max_seqlen`, and places within the longest sample's."""
    rule = size_rule((*buckets, budget), token_budget=budget, context=48, multiple=multiple)
    kept: list[int] = []
    for length in lengths:
        if sum(map(rule.padded, [*kept, length])) <= rule.sizes[-1]:
            kept.append(length)
    batch = assemble([], positions=[], rule=rule)
    if kept:
        batch = assemble(_samples(kept), positions=range(len(kept)), rule=rule)
    size = rule.size_of(sum(map(rule.padded, kept)))
    assert batch.tokens.shape == batch.position_ids.shape == (1, size)
    entries = rule.num_segments(size) + 1
    assert batch.cu_seqlens.shape == batch.cu_seqlens_padded.shape == (entries,)
    assert batch.max_seqlen == rule.longest <= 48
    segments = batch.cu_seqlens_padded.diff()
    assert batch.cu_seqlens_padded[-1] == size
    assert int(segments.min()) >= 0
    assert int(segments.max()) <= rule.longest
    assert (segments % multiple == 0).all()
    assert (batch.cu_seqlens.diff() <= segments).all()
    assert batch.cu_seqlens.diff()[: len(kept)].tolist() == kept
    assert int(batch.position_ids.max()) < rule.longest


# --- context parallelism -----------------------------------------------------------------------


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
