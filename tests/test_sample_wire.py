"""`odb_megatron.data.sample_wire`: what arrives is what was sent, or an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.sample import Sample
from odb_megatron.data.sample_wire import (
    SampleWireError,
    decode_sample,
    encode_sample,
    wire_size,
)


def _sample(length: int, *, seed: int = 0, limit: int = 50_000, shifted: bool = True) -> Sample:
    random = np.random.RandomState(seed)
    ids = random.randint(0, limit, length + 1)
    labels = ids[1:] if shifted else random.randint(-100, limit, length)
    return Sample(
        tokens=ids[:-1].astype(np.int64),
        labels=labels.astype(np.int64),
        loss_mask=random.randint(0, 2, length).astype(np.float32),
        source=seed % 7,
        truncated=seed % 3,
    )


def _assert_same(one: Sample, other: Sample) -> None:
    for name in ("tokens", "labels", "loss_mask"):
        got, expected = getattr(one, name), getattr(other, name)
        assert got.dtype == expected.dtype
        assert got.tolist() == expected.tolist()
    assert (one.source, one.truncated) == (other.source, other.truncated)


@given(
    st.integers(1, 70), st.integers(0, 1000), st.sampled_from([2, 1 << 31, 1 << 40]), st.booleans()
)
def test_round_trip(length: int, seed: int, limit: int, shifted: bool) -> None:
    sample = _sample(length, seed=seed, limit=limit, shifted=shifted)
    data = encode_sample(sample)
    assert len(data) == wire_size(sample)
    _assert_same(decode_sample(data), sample)
    _assert_same(decode_sample(memoryview(data)), sample)


WEIGHTS = st.sampled_from([0.0, 1.0, 0.3, 4096.0])


@given(st.lists(WEIGHTS, min_size=1, max_size=40), st.integers(0, 9))
def test_weights(weights: list[float], seed: int) -> None:
    """Exactly; bits where there is one number besides 0."""
    sample = replace(
        _sample(len(weights), seed=seed), loss_mask=np.array(weights, dtype=np.float32)
    )
    data = encode_sample(sample)
    distinct = set(weights) - {0.0}
    bits = -(-len(weights) // 8)
    size = bits if distinct <= {1.0} else bits + 4 if len(distinct) == 1 else 4 * len(weights)
    assert len(data) == wire_size(sample) == 32 + 4 * (len(weights) + 1) + size
    _assert_same(decode_sample(data), sample)


def test_sizes() -> None:
    """A shifted sample takes four bytes and a bit per token."""
    assert wire_size(_sample(800)) == 32 + 4 * 801 + 100
    assert wire_size(_sample(800, shifted=False)) == 32 + 8 * 800 + 100
    wide = Sample(
        tokens=np.array([1 << 31]), labels=np.array([-1]), loss_mask=np.ones(1, dtype=np.float32)
    )
    assert wire_size(wide) == 32 + 16 + 1
    _assert_same(decode_sample(encode_sample(wide)), wide)


def test_what_is_damaged_is_refused() -> None:
    data = bytearray(encode_sample(_sample(9)))
    with pytest.raises(SampleWireError, match="9 tokens arrived in 73 bytes; expected 74"):
        decode_sample(bytes(data[:-1]))
    with pytest.raises(SampleWireError, match="31 bytes arrived; a sample has at least 32"):
        decode_sample(bytes(data[:31]))
    data[40] ^= 1
    with pytest.raises(SampleWireError, match="9 tokens arrived with a wrong checksum"):
        decode_sample(bytes(data))
