"""`odb_megatron.data.step_wire`: what arrives equals what was sent."""

from __future__ import annotations

from dataclasses import fields, replace

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
    encode_payload,
    payload_bytes,
)
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout, assemble, assemble_idle
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.step import StepTotals

TOTALS = StepTotals(
    **{field.name: 3 for field in fields(StepTotals) if field.type == "int"},
    costs=(1 << 50, 7),
    costs_before=(5, 6),
    is_final=True,
)


def micro_batches(lengths: list[list[int]], *, rule: SizeRule) -> list[MicroBatch]:
    generator = np.random.RandomState(0)
    made, position = [], 40
    for sizes in lengths:
        samples = [
            Sample(
                tokens=generator.randint(0, 1 << 31, size=size),
                labels=generator.randint(0, 1 << 31, size=size),
                loss_mask=generator.randint(0, 2, size=size).astype(np.float32),
            )
            for size in sizes
        ]
        positions = range(position, position + len(sizes))
        position += len(sizes)
        made.append(
            assemble(samples, positions=positions, rule=rule) if sizes else assemble_idle(rule=rule)
        )
    return made


def assert_equal(one: MicroBatchLayout, other: MicroBatchLayout) -> None:
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
    sent = micro_batches(lengths, rule=rule)
    metadata = StepMetadata.of(TOTALS, sent, rule=rule)
    payload = encode_payload(sent)
    assert payload.size == payload_bytes(metadata)
    found = decode_header(encode_header(metadata))
    assert found == metadata
    assert isinstance(found, StepMetadata)
    received = decode_payload(found, payload.copy())
    assert len(received) == len(sent)
    for one, other in zip(sent, received, strict=True):
        assert_equal(one, other)
    for one, where in zip(sent, found.layouts(), strict=True):
        assert_equal(where, MicroBatchLayout(
            **{field.name: getattr(one, field.name) for field in fields(MicroBatchLayout)}
        ))  # fmt: skip


@pytest.mark.parametrize("ending", [Ending(), Ending(error="ValueError: no such file")])
def test_endings(ending: Ending) -> None:
    assert decode_header(encode_header(ending)) == ending


def test_a_payload_of_another_size() -> None:
    sent = micro_batches([[3]], rule=SizeRule())
    metadata = StepMetadata.of(TOTALS, sent, rule=SizeRule())
    with pytest.raises(ValueError, match="payload of 24 bytes arrived; its header describes 25"):
        decode_payload(metadata, encode_payload(sent)[:-1])


def test_a_token_id_that_does_not_fit() -> None:
    sent = micro_batches([[3]], rule=SizeRule())
    tokens = sent[0].tokens.clone()
    tokens[0, 1] = 1 << 31
    with pytest.raises(ValueError, match="do not fit 0 to 2147483647"):
        encode_payload([replace(sent[0], tokens=tokens)])
