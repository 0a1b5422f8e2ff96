"""Samples and packed steps as bytes: what arrives equals what was sent."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_samples import image_sample

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import slice_micro_batch
from odb_megatron.data.wire import (
    Ending,
    SampleWireError,
    StepHeader,
    assemble,
    decode_header,
    decode_sample,
    decode_step,
    encode_header,
    encode_sample,
    pack_step,
    wire_size,
)
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals

TOTALS = StepTotals(
    **{field.name: 3 for field in fields(StepTotals) if field.name != "is_final"}, is_final=True
)

# Runs of text, and pictures by their sides; the text at the end is what is learnt.
SIDES = st.sampled_from([2, 4, 6])
LAYOUTS = st.lists(
    st.one_of(st.integers(1, 20), st.tuples(SIDES, SIDES)), min_size=0, max_size=3
).map(lambda parts: [*parts, 2])
DTYPES = st.sampled_from(["uint8", "float16", "float32"])


def sample_of(layout: list[Any], *, seed: int, dtype: str = "uint8") -> Sample:
    sample = image_sample(layout, seed=seed, dtype=dtype)
    weights = np.random.RandomState(seed).rand(len(sample)).astype(np.float32)
    return replace(sample, loss_mask=sample.loss_mask * weights)


def assert_equal(one: Any, other: Any, *, without: str = "") -> None:
    """In all that `one` has."""
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name == without:
            continue
        if hasattr(left, "__dataclass_fields__"):
            assert_equal(left, right)
        elif isinstance(left, (torch.Tensor, np.ndarray)):
            assert left.dtype == right.dtype, field.name
            assert (left == right).all(), field.name
        else:
            assert left == right, field.name


@given(LAYOUTS, st.integers(0, 99), DTYPES)
def test_a_sample(layout: list[Any], seed: int, dtype: str) -> None:
    sent = replace(sample_of(layout, seed=seed, dtype=dtype), source=2, truncated=7)
    ignored = np.where(sent.loss_mask > 0, sent.labels, -100)  # as many data sets have it
    sent = replace(sent, labels=ignored)
    data = encode_sample(-5, sent)
    assert len(data) == wire_size(sent)
    number, found = decode_sample(memoryview(data))
    assert number == -5
    assert_equal(sent, found)
    if found.images is not None:
        found.images.pixel_values[0] = 0  # its own memory


def test_what_is_no_sample() -> None:
    assert decode_sample(encode_sample(1, replace(sample_of([4], seed=0), num_patches=9)))
    with pytest.raises(SampleWireError, match="without tokens"):
        decode_sample(bytes(100))


@settings(max_examples=60)
@given(
    st.lists(st.lists(LAYOUTS, max_size=3), min_size=1, max_size=4),
    DTYPES,
    st.sampled_from([1, 4, 16]),
    st.sampled_from([(), (512,), (256, 512)]),
)
def test_a_step(step: Any, dtype: str, multiple: int, sizes: tuple[int, ...]) -> None:
    rule = SizeRule(sizes=sizes, least=16, longest=128 if sizes else 0, multiple=multiple)
    rows = [
        [(40 + at, sample_of(one, seed=at, dtype=dtype)) for at, one in enumerate(row)]
        for row in step
    ]
    sent = [
        assemble([sample for _, sample in row], positions=[at for at, _ in row], rule=rule)
        for row in rows
    ]
    metadata, payload, pixels = pack_step(TOTALS, rows, rule=rule)
    found = decode_header(encode_header(metadata))
    assert found == metadata
    assert isinstance(found, StepHeader)
    for one, other, last, where in zip(
        sent,
        decode_step(found, payload, pixels),
        decode_step(found, payload),  # of the last stage
        found.layouts(),
        strict=True,
    ):
        assert_equal(one, other)
        assert_equal(last, one, without="pixel_values")
        assert_equal(where, one)
        assert last.pixel_values is None
    assert (pixels is None) == all(item.images is None for item in sent)
    for sizes_of in ((payload[:-4], pixels), (payload, np.zeros(7, np.uint8))):
        if sizes_of[0] is not payload and not payload.size:
            continue
        with pytest.raises(ValueError, match="bytes arrived; its header describes"):
            decode_step(found, *sizes_of)


def test_endings_and_what_is_no_header() -> None:
    for ending in (Ending(), Ending(error="ValueError: no such file")):
        assert decode_header(encode_header(ending)) == ending
    for data in (b"", b"[]", b"{}", b'{"error": 1, "more": 2}', b"\xff"):
        with pytest.raises(RuntimeError, match="ranks of the replica run different code"):
            decode_header(data)


def test_what_images_cannot_do() -> None:
    samples = [[(width, image_sample([(2, 2), 2], width=width))] for width in (12, 3)]
    with pytest.raises(ValueError, match="samples of a step have patches of different kinds"):
        pack_step(TOTALS, samples, rule=SizeRule())
    item = assemble([image_sample([3, (2, 2), 1])], positions=[0], rule=SizeRule(multiple=4))
    with pytest.raises(ValueError, match="images cannot be cut for context parallelism"):
        slice_micro_batch(item, size=2, rank=0)
