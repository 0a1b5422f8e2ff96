"""`odb_megatron.data.thd`: packed micro-batches against a token-by-token reference."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import PAD_TOKEN, MicroBatch, assemble, padding_mask
from odb_megatron.plan.padding import SizeRule, size_rule

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


@pytest.mark.parametrize(
    "batch", [_assembled([3, 5], multiple=4), assemble([], positions=[], rule=SizeRule(multiple=4))]
)
def test_megatron_takes_it(batch: MicroBatch) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.packed_seq_params import PackedSeqParams

    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=batch.cu_seqlens_padded,
        cu_seqlens_kv_padded=batch.cu_seqlens_padded,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q_padded.tolist()[-1] == batch.tokens.shape[1]
    assert params.max_seqlen_q == batch.max_seqlen


def test_a_micro_batch_survives_pickling() -> None:
    batch = pickle.loads(pickle.dumps(_assembled([3, 2], multiple=2)))
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 4, 5]]
    assert batch.positions == (0, 7)
