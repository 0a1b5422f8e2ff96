"""Images on their way: to other ranks, to other replicas, and what they count for in memory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_samples import image_sample
from test_step_wire import TOTALS, Members, assembled

from odb_megatron.data.context_parallel import slice_micro_batch
from odb_megatron.data.images import ImageLayout, PixelFormat
from odb_megatron.data.sample import Sample
from odb_megatron.data.sample_wire import (
    SampleWireError,
    decode_sample,
    encode_sample,
    wire_size,
)
from odb_megatron.data.step_images import pixel_bytes, with_pixels
from odb_megatron.data.step_wire import (
    StepMetadata,
    StepWireError,
    decode_header,
    decode_payload,
    encode_header,
    pack_step,
)
from odb_megatron.data.thd import assemble
from odb_megatron.plan.padding import SizeRule

SIDES = st.sampled_from([2, 4, 6])
LAYOUTS = st.lists(
    st.one_of(st.integers(1, 5), st.tuples(SIDES, SIDES)), min_size=1, max_size=4
).map(lambda parts: [*parts, 2])
DTYPES = st.sampled_from(["uint8", "float16", "float32"])


def same_images(one: ImageLayout | None, other: ImageLayout | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
    )


@given(LAYOUTS, st.integers(0, 99), DTYPES)
def test_a_sample_arrives_with_its_images(layout: list[Any], seed: int, dtype: str) -> None:
    sent = image_sample(layout, seed=seed, dtype=dtype)
    data = encode_sample(sent)
    assert len(data) == wire_size(sent)
    found = decode_sample(memoryview(data))
    assert (found.tokens.tolist(), found.num_patches) == (sent.tokens.tolist(), sent.num_patches)
    if sent.images is None:
        assert found.images is None
        return
    assert found.images is not None
    assert found.images.format == sent.images.format
    for name in ("pixel_values", "grid_thw", "starts"):
        assert np.array_equal(getattr(found.images, name), getattr(sent.images, name))
    found.images.pixel_values[0] = 0  # its own memory
    with pytest.raises(SampleWireError):
        decode_sample(data[:-1])


def test_patches_without_images_arrive_too() -> None:
    sample = replace(image_sample([4]), num_patches=9)
    assert decode_sample(encode_sample(sample)).num_patches == 9


def test_any_damage_to_a_sample_is_an_error() -> None:
    """Never another sample, nor another exception."""
    rng = np.random.default_rng(0)
    data = encode_sample(image_sample([3, (2, 2), 2]))
    caught = 0
    for _ in range(300):
        bad = bytearray(data)
        bad[int(rng.integers(len(bad)))] ^= int(rng.integers(1, 256))
        try:
            decode_sample(bytes(bad))
        except SampleWireError:
            caught += 1
    assert caught > 200  # the source's number and the count of cut tokens may be any


STEPS = st.lists(st.lists(LAYOUTS, max_size=3), min_size=1, max_size=4)


def build(step: list[list[list[Any]]], *, dtype: str = "uint8") -> Members:
    """Samples with positions, by micro-batch."""
    made: Members = []
    position = 0
    for number, layouts in enumerate(step):
        made.append([])
        for one in layouts:
            made[-1].append((position, image_sample(one, seed=number, dtype=dtype)))
            position += 1
    return made


@settings(max_examples=40)
@given(STEPS, st.sampled_from([1, 4, 16]), DTYPES)
def test_a_step_arrives_with_its_images(step: Any, multiple: int, dtype: str) -> None:
    rule = SizeRule(multiple=multiple)
    samples = build(step, dtype=dtype)
    sent = assembled(samples, rule)
    metadata, payload, pixels = pack_step(TOTALS, samples, rule=rule)
    found = decode_header(encode_header(metadata))
    assert found == metadata
    assert isinstance(found, StepMetadata)
    others = decode_payload(found, payload)
    for item, other, where in zip(sent, others, found.layouts(), strict=True):
        assert other.pixel_values is None  # of the last stage
        assert same_images(item.images, other.images)
        assert same_images(item.images, where.images)
    if pixels is None:
        assert found.pixels is None
        assert all(item.images is None for item in sent)
        assert found.images == ()
        return
    assert found.pixels is not None
    assert pixels.size == pixel_bytes(found.images, found.pixels)
    for item, other in zip(sent, with_pixels(others, pixels, found.pixels), strict=True):
        if item.pixel_values is None:
            assert other.pixel_values is None
            continue
        assert other.pixel_values is not None
        assert other.pixel_values.dtype == item.pixel_values.dtype
        assert torch.equal(other.pixel_values, item.pixel_values)
    with pytest.raises(ValueError, match="bytes of patches arrived; the header describes"):
        with_pixels(others, pixels[:-1], found.pixels)


def test_a_header_that_does_not_fit_is_refused() -> None:
    metadata, _, _ = pack_step(TOTALS, build([[[3, (2, 2), 2]]]), rule=SizeRule())
    assert metadata.pixels == PixelFormat(width=12, dtype="uint8", merge=2)
    rows: tuple[tuple[Any, ...], ...] = (
        ((0, 1, 2, 2, 6),),  # behind the sample's end
        ((1, 1, 2, 2, 3),),  # of no sample
        ((0, 1, 2, 3, 3),),  # no grid
        ((0, 0, 2, 2, 3),),
        ((0, 1, 2, 2, 3), (0, 1, 2, 2, 3)),  # one on top of the other, and too many patches
        ((0, 1, 2, 4, 3),),  # more patches than the micro-batch has
        ((0, 1, 2, 2),),
        ((0, 1, 2, 2, -3),),
        ((0, 1, 2, 2, 1 << 40),),
        ((0, 1, 2, 2, "x"),),
    )
    changed = [replace(metadata, images=(row,)) for row in rows]
    changed += [replace(metadata, images=()), replace(metadata, pixels=None)]
    for bad in changed:
        with pytest.raises(StepWireError):
            decode_header(encode_header(bad))
    wrong = encode_header(metadata).replace(b'"uint8"', b'"int64"')
    with pytest.raises(StepWireError):
        decode_header(wrong)


def test_patches_of_two_kinds_in_a_step() -> None:
    samples = [[(width, image_sample([(2, 2), 2], width=width))] for width in (12, 3)]
    with pytest.raises(ValueError, match="samples of a step have patches of different kinds"):
        pack_step(TOTALS, samples, rule=SizeRule())


def test_context_parallelism_is_refused() -> None:
    item = assemble([image_sample([3, (2, 2), 1])], positions=[0], rule=SizeRule(multiple=4))
    assert slice_micro_batch(item, size=1, rank=0) is item
    with pytest.raises(ValueError, match="images cannot be cut for context parallelism"):
        slice_micro_batch(item, size=2, rank=0)


def test_a_sample_without_images_is_as_before() -> None:
    sample = Sample(tokens=np.arange(3), labels=np.arange(3), loss_mask=np.ones(3, np.float32))
    assert len(encode_sample(sample)) == 32 + 24 + 1
