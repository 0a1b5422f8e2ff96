"""A packed step as bytes: what arrives equals what was sent, and fits what it is sent with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.sample import Sample
from odb_megatron.data.step_wire import (
    Ending,
    StepMetadata,
    decode_header,
    decode_payload,
    encode_header,
    pack_step,
    payload_bytes,
)
from odb_megatron.data.thd import MicroBatchLayout, assemble, assemble_idle
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals

TOTALS = StepTotals(
    **{field.name: 3 for field in fields(StepTotals) if field.name != "is_final"}, is_final=True
)

Members = list[list[tuple[int, Sample]]]


def members(lengths: list[list[int]]) -> Members:
    """Samples with positions from 40 on, by micro-batch."""
    generator, position = np.random.RandomState(0), 40
    made: Members = []
    for sizes in lengths:
        made.append([])
        for size in sizes:
            ids = generator.randint(0, 1 << 31, size=(2, size))
            mask = generator.randint(0, 2, size=size).astype(np.float32)
            made[-1].append((position, Sample(tokens=ids[0], labels=ids[1], loss_mask=mask)))
            position += 1
    return made


def assembled(micro_batches: Members, rule: SizeRule) -> list[Any]:
    """The same as `data.thd` builds them."""
    return [
        assemble([s for _, s in row], positions=[p for p, _ in row], rule=rule)
        if row
        else assemble_idle(rule=rule)
        for row in micro_batches
    ]


def assert_equal(one: MicroBatchLayout, other: MicroBatchLayout) -> None:
    """In all that `one` has."""
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


@given(
    st.lists(st.lists(st.integers(1, 20), max_size=5), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 16]),
    # five samples of 20 tokens, each padded to 32, just fit 160
    st.sampled_from([(), (160,), (192,), (16, 64, 160)]),
    st.sampled_from([1, 16]),
)
def test_a_round_trip(
    lengths: list[list[int]], multiple: int, sizes: tuple[int, ...], least: int
) -> None:
    rule = SizeRule(sizes=sizes, least=least, longest=32 if sizes else 0, multiple=multiple)
    sent = members(lengths)
    metadata, payload, pixels = pack_step(TOTALS, sent, rule=rule)
    assert pixels is None
    assert payload.size == payload_bytes(metadata)
    found = decode_header(encode_header(metadata))
    assert found == metadata
    assert isinstance(found, StepMetadata)
    expected = assembled(sent, rule)
    for one, other, where in zip(
        expected, decode_payload(found, payload.copy()), found.layouts(), strict=True
    ):
        assert_equal(one, other)
        assert_equal(where, one)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.3, 8.0]), min_size=1, max_size=9), max_size=6),
    st.booleans(),
)
def test_weights(weights: list[list[float]], one_each: bool) -> None:
    """Exactly; bits, and a number for each sample, where it has only that one besides 0."""
    if one_each:
        weights = [[one * (at + 1) for one in np.sign(row)] for at, row in enumerate(weights)]
    masks = [np.array(row, dtype=np.float32) for row in weights]
    sent: Members = [
        [(position, replace(sample, loss_mask=mask))]
        for ((position, sample),), mask in zip(
            members([[len(mask)] for mask in masks]), masks, strict=True
        )
    ]
    rule = SizeRule(multiple=4)
    metadata, payload, _ = pack_step(TOTALS, [*sent, []], rule=rule)
    assert payload.size == payload_bytes(metadata)
    if one_each:
        count = sum(map(len, masks))
        extra = 4 * len(masks) if any(at and mask.any() for at, mask in enumerate(masks)) else 0
        assert payload.size == 8 * count + -(-count // 8) + extra
    found = decode_header(encode_header(metadata))
    assert isinstance(found, StepMetadata)
    for one, other in zip(
        assembled([*sent, []], rule), decode_payload(found, payload.copy()), strict=True
    ):
        assert_equal(one, other)


@pytest.mark.parametrize("ending", [Ending(), Ending(error="ValueError: no such file")])
def test_endings(ending: Ending) -> None:
    assert decode_header(encode_header(ending)) == ending


def test_a_payload_of_another_size() -> None:
    metadata, payload, _ = pack_step(TOTALS, members([[3]]), rule=SizeRule())
    with pytest.raises(ValueError, match="payload of 24 bytes arrived; its header describes 25"):
        decode_payload(metadata, payload[:-1])


@pytest.mark.parametrize("token", [1 << 31, -1])
def test_a_token_id_that_does_not_fit(token: int) -> None:
    ((position, sample),) = members([[3]])[0]
    for name in ("tokens", "labels"):
        changed = replace(sample, **{name: np.array([5, token, 7])})
        with pytest.raises(ValueError, match="do not fit 0 to 2147483647"):
            pack_step(TOTALS, [[(position, changed)]], rule=SizeRule())
