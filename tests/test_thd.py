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
    chunk_indices,
    cost_balance,
    layout,
    padding_mask,
    slice_micro_batch,
)
from odb_megatron.data.wire import assemble
from odb_megatron.plan.padding import SizeRule, size_rule

LENGTHS = st.lists(st.integers(1, 20), max_size=8)
MULTIPLES = st.sampled_from([1, 2, 4, 6, 16])
TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


def _samples(lengths: list[int]) -> list[Sample]:
    """Tokens count up over all samples, so that no two places hold the same one."""
    samples, first = [], 1
    for length in lengths:
        tokens = np.arange(first, first + length)
        mask = (tokens % 3 > 0).astype(np.float32)
        samples.append(Sample(tokens=tokens, labels=tokens + 10_000, loss_mask=mask))
        first += length
    return samples


@given(LENGTHS, MULTIPLES)
def test_against_a_naive_reference(lengths: list[int], multiple: int) -> None:
    """Of no sample too: an idle micro-batch, the smallest there is."""
    samples = [replace(one, num_patches=at) for at, one in enumerate(_samples(lengths))]
    positions = [7 * at for at in range(len(lengths))]
    batch = assemble(samples, positions=positions, rule=SizeRule(multiple=multiple))
    expected: list[tuple[int, int, float, int]] = []
    bounds, padded_bounds = [0], [0]
    for sample in samples:
        columns = (sample.tokens.tolist(), sample.labels.tolist(), sample.loss_mask.tolist())
        expected += zip(*columns, range(len(sample)), strict=True)
        bounds.append(bounds[-1] + len(sample))
        size = -(-len(sample) // multiple) * multiple
        expected += [(PAD_TOKEN, PAD_TOKEN, 0.0, at) for at in range(len(sample), size)]
        padded_bounds.append(len(expected))
    if not samples:
        expected += [(PAD_TOKEN, PAD_TOKEN, 0.0, at) for at in range(multiple)]
        bounds, padded_bounds = [0, 0], [0, multiple]
    for name, column in zip(TENSORS, zip(*expected, strict=True), strict=True):
        tensor = getattr(batch, name)
        assert tensor.tolist() == [list(column)]
        assert tensor.dtype == (torch.float32 if name == "loss_mask" else torch.int64)
    for name, values in (("cu_seqlens", bounds), ("cu_seqlens_padded", padded_bounds)):
        assert getattr(batch, name).tolist() == values
        assert getattr(batch, name).dtype == torch.int32
    assert batch.max_seqlen == max(np.diff(padded_bounds))
    assert (batch.positions, batch.is_idle) == (tuple(positions), not samples)
    assert batch.num_patches == sum(range(len(samples)))


@pytest.mark.parametrize(
    ("lengths", "sizes", "real", "padded", "mask"),
    [
        # What is left is segments without a real token, and entries of no tokens at all.
        ([7, 5], (24,), [0, 7, *[12] * 6], [0, 8, 16, *[24] * 5], "0000000100000" + 11 * "1"),
        ([7, 5], (16,), [0, 7, *[12] * 4], [0, 8, *[16] * 4], "0000000100000111"),
        ([], (12, 24), [0] * 5, [0, *[12] * 4], "0" + 11 * "1"),
        ([3, 5], (), [0, 3, 8], [0, 4, 12], "000100000111"),
        # An idle one keeps a token that counts.
        ([], (), [0, 0], [0, 4], "0111"),
    ],
)  # fmt: skip
def test_layouts_and_where_padding_is(
    lengths: list[int], sizes: tuple[int, ...], real: list[int], padded: list[int], mask: str
) -> None:
    rule = SizeRule(sizes=sizes, multiple=4)
    item = layout(lengths, positions=range(len(lengths)), rule=rule)
    assert item.cu_seqlens.tolist() == real
    assert item.cu_seqlens_padded.tolist() == padded
    assert item.max_seqlen == (padded[-1] if sizes else max(np.diff(padded)))
    assert padding_mask(item).dtype == torch.bool
    assert "".join(str(int(one)) for one in padding_mask(item)[0]) == mask


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
    batch = assemble(_samples(kept), positions=range(len(kept)), rule=rule)
    size = rule.size_of(sum(map(rule.padded, kept)))
    assert {getattr(batch, name).shape for name in TENSORS} == {(1, size)}
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
    with pytest.raises(ValueError, match=r"sample \d+ .* pad samples to a multiple of"):
        chunk_indices(np.append(cu_seqlens, cu_seqlens[-1] + 2 * size + 1), size=size, rank=0)


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]))
def test_ranks_parts_are_the_micro_batch(lengths: list[int], size: int) -> None:
    """Nothing is lost or invented where a length is odd; the mask is cut like the tokens."""
    item = assemble(
        _samples(lengths), positions=range(len(lengths)), rule=SizeRule(multiple=2 * size)
    )
    offsets = item.cu_seqlens_padded.numpy()
    mask = padding_mask(item)[0]
    assert int((~mask).sum()) == (sum(lengths) or 1)
    for rank in range(size):
        part = slice_micro_batch(item, size=size, rank=rank)
        index = torch.from_numpy(chunk_indices(offsets, size=size, rank=rank))
        for name in TENSORS:
            assert torch.equal(getattr(part, name), getattr(item, name)[:, index])
        assert torch.equal(padding_mask(item, size=size, rank=rank)[0], mask[index])
        assert part.cu_seqlens is item.cu_seqlens
        assert (part is item) == (size == 1)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_balance_counts_query_key_pairs(lengths: list[int], size: int) -> None:
    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    cu_seqlens = np.concatenate(([0], np.cumsum(padded)))
    work = []
    for rank in range(size):
        places = chunk_indices(cu_seqlens, size=size, rank=rank)
        which = np.searchsorted(cu_seqlens, places, side="right") - 1
        pairs = zip(places - cu_seqlens[which], which, strict=True)
        work.append(int(sum(p + 1 for p, s in pairs if p < lengths[s])))
    found = cost_balance(np.array(lengths), np.array(padded), size=size)
    assert found == pytest.approx(np.mean(work) / max(work))
