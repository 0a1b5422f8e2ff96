"""A sample as bytes, for the way from one replica to another.

Pure. The size follows from the sample alone, so a planner can announce it before anything is sent.
Layout: header, tokens, labels (one where they are the tokens shifted), loss mask (see `mask_form`);
ids take 32 bits where all fit. Images follow: number, patches and format, grids, places, patches.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from odb_megatron.data.images import PIXEL_TYPES, SampleImages
from odb_megatron.data.sample import Sample

__all__ = ["MaskForm", "SampleWireError", "decode_masks", "decode_sample", "encode_masks"]
__all__ += ["encode_sample", "mask_bytes", "mask_form", "wire_size"]

Mask = npt.NDArray[np.float32]

_HEADER = struct.Struct("<IIqqII")
_WIDE, _OWN_LABELS, _IMAGES = 1, 2, 4
_MASK_FORM = 8  # times the MaskForm
_BITS = 32
_IMAGE_HEADER = struct.Struct("<IIIII")  # images, patches, values of a patch, type, merge
_PLACE_BYTES = 32  # of an image: three sides of its grid and where it begins


class SampleWireError(ValueError):
    """Bytes that are not the sample that was announced."""


class MaskForm(IntEnum):
    """How loss masks of samples are written."""

    BITS = 0  # all weights are 0 or 1
    SCALED = 1  # in each sample 0 or one number: that of each as float32, then bits
    WEIGHTS = 2  # float32


def mask_form(masks: Sequence[Mask]) -> MaskForm:
    """Return the shortest form that has the masks exactly."""
    if not all(((mask == 0) | (mask == mask.max())).all() for mask in masks):
        return MaskForm.WEIGHTS
    return MaskForm.BITS if all(mask.max() in (0, 1) for mask in masks) else MaskForm.SCALED


def mask_bytes(form: MaskForm, *, num_tokens: int, num_samples: int) -> int:
    """Return the size of `encode_masks`."""
    if form is MaskForm.WEIGHTS:
        return 4 * num_tokens
    return -(-num_tokens // 8) + 4 * num_samples * (form is MaskForm.SCALED)


def encode_masks(form: MaskForm, masks: Sequence[Mask]) -> npt.NDArray[np.uint8]:
    """Return the bytes of samples' masks, one after the other."""
    whole = np.concatenate(masks)
    if form is MaskForm.WEIGHTS:
        return whole.astype("<f4").view(np.uint8)
    scales = (
        np.array([mask.max() for mask in masks], "<f4") if form is MaskForm.SCALED else whole[:0]
    )
    return np.concatenate([scales.view(np.uint8), np.packbits(whole > 0)])


def decode_masks(form: MaskForm, data: npt.NDArray[np.uint8], lengths: Sequence[int]) -> Mask:
    """Return samples' masks of the given lengths, one after the other: float32 [sum of lengths]."""
    if form is MaskForm.WEIGHTS:
        return data.view("<f4").astype(np.float32)
    head = 4 * len(lengths) if form is MaskForm.SCALED else 0
    mask = np.unpackbits(data[head:], count=sum(lengths)).astype(np.float32)
    return mask * np.repeat(data[:head].view("<f4"), lengths) if head else mask


def wire_size(sample: Sample) -> int:
    """Return the number of bytes of `encode_sample`."""
    flags = _flags(sample)
    return _size(len(sample), flags) + _image_bytes(sample)


def encode_sample(sample: Sample) -> bytes:
    """Return the sample's bytes."""
    flags = _flags(sample)
    kind = "<i8" if flags & _WIDE else "<i4"
    labels = sample.labels if flags & _OWN_LABELS else sample.labels[-1:]
    body = b"".join(
        (
            sample.tokens.astype(kind).tobytes(),
            labels.astype(kind).tobytes(),
            encode_masks(MaskForm(flags // _MASK_FORM), [sample.loss_mask]).tobytes(),
            *_encoded_images(sample.images),
        )
    )
    numbers = (flags, len(sample), sample.source, sample.truncated)
    return _HEADER.pack(*numbers, sample.num_patches, zlib.crc32(body)) + body


def decode_sample(data: bytes | memoryview) -> Sample:
    """Inverse of `encode_sample`.

    Raises:
        SampleWireError: the size, the checksum or a number of the header is wrong.
    """
    if len(data) < _HEADER.size:
        raise SampleWireError(f"{len(data)} bytes arrived; a sample has at least {_HEADER.size}")
    flags, length, source, truncated, num_patches, checksum = _HEADER.unpack_from(data)
    form = flags // _MASK_FORM
    if form > max(MaskForm) or not length or source < 0 or truncated < 0:
        raise SampleWireError(
            f"a sample arrived with flags {flags}, {length} tokens, source {source} and "
            f"{truncated} cut off: its header is damaged"
        )
    expected = _size(length, flags)
    has_images = bool(flags & _IMAGES)
    if len(data) < expected if has_images else len(data) != expected:
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
    size = mask_bytes(MaskForm(form), num_tokens=length, num_samples=1)
    data_of_mask = np.frombuffer(body, np.uint8, count=size, offset=ids.size * kind.itemsize)
    mask = decode_masks(MaskForm(form), data_of_mask, [length])
    try:
        return Sample(
            tokens=tokens,
            labels=labels,
            loss_mask=mask,
            source=source,
            truncated=truncated,
            num_patches=num_patches,
            images=_decoded_images(data[expected:]) if has_images else None,
        )
    except ValueError as error:
        raise SampleWireError(
            f"a sample of {length} tokens arrived with damaged content: {error}"
        ) from error


def _image_bytes(sample: Sample) -> int:
    images = sample.images
    if images is None:
        return 0
    return _IMAGE_HEADER.size + _PLACE_BYTES * len(images.starts) + images.pixel_values.nbytes


def _encoded_images(images: SampleImages | None) -> tuple[bytes, ...]:
    if images is None:
        return ()
    pixels, kind = images.pixel_values, images.format
    header = _IMAGE_HEADER.pack(
        *(len(images.starts), len(pixels), kind.width),
        *(PIXEL_TYPES.index(kind.dtype), kind.merge),
    )
    places = np.concatenate([images.grid_thw.reshape(-1), images.starts]).astype("<i8")
    return header, places.tobytes(), np.ascontiguousarray(pixels).tobytes()


def _decoded_images(data: bytes | memoryview) -> SampleImages:
    if len(data) < _IMAGE_HEADER.size:
        raise ValueError(f"{len(data)} bytes of images; expected at least {_IMAGE_HEADER.size}")
    count, num_patches, width, kind, merge = _IMAGE_HEADER.unpack_from(data)
    if kind >= len(PIXEL_TYPES):
        raise ValueError(f"patches of type {kind}; expected one below {len(PIXEL_TYPES)}")
    dtype = np.dtype(PIXEL_TYPES[kind])
    expected = _IMAGE_HEADER.size + _PLACE_BYTES * count + num_patches * width * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes of images; expected {expected}")
    places = np.frombuffer(data, "<i8", count=4 * count, offset=_IMAGE_HEADER.size)
    pixels = np.frombuffer(data, dtype, offset=_IMAGE_HEADER.size + _PLACE_BYTES * count)
    return SampleImages(
        pixel_values=pixels.reshape(num_patches, width).copy(),
        grid_thw=places[: 3 * count].reshape(count, 3).astype(np.int64),
        starts=places[3 * count :].astype(np.int64),
        merge=merge,
    )


def _flags(sample: Sample) -> int:
    own = not np.array_equal(sample.labels[:-1], sample.tokens[1:])
    wide = not (_fits(sample.tokens) and _fits(sample.labels))
    flags = _WIDE * wide + _OWN_LABELS * own + _IMAGES * (sample.images is not None)
    return flags + _MASK_FORM * mask_form([sample.loss_mask])


def _fits(ids: npt.NDArray[np.int64]) -> bool:
    limit = 1 << (_BITS - 1)
    return -limit <= int(ids.min()) and int(ids.max()) < limit


def _size(length: int, flags: int) -> int:
    width = 8 if flags & _WIDE else 4
    num_labels = length if flags & _OWN_LABELS else 1
    mask = mask_bytes(MaskForm(flags // _MASK_FORM), num_tokens=length, num_samples=1)
    return _HEADER.size + width * (length + num_labels) + mask
