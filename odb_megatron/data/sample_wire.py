"""A sample as bytes, for the way from one replica to another.

Pure. The size follows from the sample alone, so a planner can announce it before anything is sent.
Layout: header, tokens, labels (one where they are the tokens shifted), loss mask as bits; ids take
32 bits where all fit.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from odb_megatron.data.sample import Sample

__all__ = ["SampleWireError", "decode_sample", "encode_sample", "wire_size"]

_HEADER = struct.Struct("<IIqqQ")
_WIDE, _OWN_LABELS = 1, 2
_BITS = 32


class SampleWireError(ValueError):
    """Bytes that are not the sample that was announced."""


def wire_size(sample: Sample) -> int:
    """Return the number of bytes of `encode_sample`."""
    flags = _flags(sample)
    return _size(len(sample), flags)


def encode_sample(sample: Sample) -> bytes:
    """Return the sample's bytes."""
    flags = _flags(sample)
    kind = "<i8" if flags & _WIDE else "<i4"
    labels = sample.labels if flags & _OWN_LABELS else sample.labels[-1:]
    body = b"".join(
        (
            sample.tokens.astype(kind).tobytes(),
            labels.astype(kind).tobytes(),
            np.packbits(sample.loss_mask != 0).tobytes(),
        )
    )
    numbers = (flags, len(sample), sample.source, sample.truncated)
    return _HEADER.pack(*numbers, zlib.crc32(body)) + body


def decode_sample(data: bytes | memoryview) -> Sample:
    """Inverse of `encode_sample`.

    Raises:
        SampleWireError: the size, the checksum or a number of the header is wrong.
    """
    if len(data) < _HEADER.size:
        raise SampleWireError(f"{len(data)} bytes arrived; a sample has at least {_HEADER.size}")
    flags, length, source, truncated, checksum = _HEADER.unpack_from(data)
    if flags > _WIDE | _OWN_LABELS or not length or source < 0 or truncated < 0:
        raise SampleWireError(
            f"a sample arrived with flags {flags}, {length} tokens, source {source} and "
            f"{truncated} cut off: its header is damaged"
        )
    expected = _size(length, flags)
    if len(data) != expected:
        raise SampleWireError(
            f"a sample of {length} tokens arrived in {len(data)} bytes; expected {expected}"
        )
    body = data[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise SampleWireError(f"a sample of {length} tokens arrived with a wrong checksum")
    kind = np.dtype("<i8" if flags & _WIDE else "<i4")
    num_labels = length if flags & _OWN_LABELS else 1
    ids = np.frombuffer(body, dtype=kind, count=length + num_labels).astype(np.int64)
    tokens = ids[:length]
    labels = ids[length:] if flags & _OWN_LABELS else ids[1:]
    bits = np.frombuffer(body, dtype=np.uint8, offset=ids.size * kind.itemsize)
    mask = np.unpackbits(bits, count=length).astype(np.float32)
    return Sample(tokens=tokens, labels=labels, loss_mask=mask, source=source, truncated=truncated)


def _flags(sample: Sample) -> int:
    own = not np.array_equal(sample.labels[:-1], sample.tokens[1:])
    wide = not (_fits(sample.tokens) and _fits(sample.labels))
    return _WIDE * wide + _OWN_LABELS * own


def _fits(ids: npt.NDArray[np.int64]) -> bool:
    limit = 1 << (_BITS - 1)
    return -limit <= int(ids.min()) and int(ids.max()) < limit


def _size(length: int, flags: int) -> int:
    width = 8 if flags & _WIDE else 4
    num_labels = length if flags & _OWN_LABELS else 1
    return _HEADER.size + width * (length + num_labels) + -(-length // 8)
