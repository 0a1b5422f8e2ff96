"""Samples and packed steps as bytes, between replicas and inside one.

Token ids and weights of the loss take 12 bytes a token, in the byte order of the hosts. A step is
a header of JSON, from which every rank knows where its samples lie, and two payloads: the tokens,
and the patches of images, which only the first pipeline stage uses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.images import PIXEL_TYPES, PixelFormat, SampleImages
from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout, filled, layout
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals

__all__ = ["Ending", "SampleWireError", "StepHeader", "assemble", "decode_header", "decode_sample"]
__all__ += ["decode_step", "encode_header", "encode_sample", "pack_step", "wire_size"]

Bytes = npt.NDArray[np.uint8]

_ANY = SizeRule()
_SAMPLE = struct.Struct("<q9I")
"""Id, tokens, source, tokens cut off, patches; images, rows and values of their patches, type,
merge."""
_TOKEN_BYTES = 12
_IMAGE_BYTES = 32  # its grid and its first token


class SampleWireError(ValueError):
    """Bytes that are no sample: the replica that sent them has failed."""


# --- a sample ----------------------------------------------------------------------------------


def wire_size(sample: Sample) -> int:
    """Return the number of bytes of `encode_sample`, announced before they are sent."""
    size = _SAMPLE.size + _TOKEN_BYTES * len(sample)
    if sample.images is None:
        return size
    return size + _IMAGE_BYTES * len(sample.images.starts) + sample.images.pixel_values.nbytes


def encode_sample(number: int, sample: Sample) -> bytes:
    """Return a sample and its id as bytes."""
    parts: list[npt.NDArray[Any]] = [_tokens([sample])]
    shape = [0] * 5
    if images := sample.images:
        pixels = images.pixel_values
        kind = PIXEL_TYPES.index(images.format.dtype)
        shape = [len(images.starts), *pixels.shape, kind, images.merge]
        parts += [np.append(images.grid_thw.reshape(-1), images.starts), pixels]
    head = (number, len(sample), sample.source, sample.truncated, sample.num_patches, *shape)
    return _SAMPLE.pack(*head) + b"".join(part.tobytes() for part in parts)


def decode_sample(data: bytes | memoryview) -> tuple[int, Sample]:
    """Inverse of `encode_sample`.

    Raises:
        SampleWireError: it is not: a replica that fails sends zeros.
    """
    number, length, source, truncated, num_patches, *shape = _SAMPLE.unpack_from(data)
    if not length:
        raise SampleWireError("a sample came without tokens: who has read or sent it has failed")
    end = _SAMPLE.size + _TOKEN_BYTES * length
    tokens, labels, mask = _split(np.frombuffer(data[_SAMPLE.size : end], np.uint8))
    count, num_rows, width, kind, merge = shape
    images = None
    if count:
        places = np.frombuffer(data, np.int64, 4 * count, end)
        pixels = np.frombuffer(data, PIXEL_TYPES[kind], offset=end + _IMAGE_BYTES * count)
        images = SampleImages(
            pixel_values=pixels.reshape(num_rows, width).copy(),
            grid_thw=places[: 3 * count].reshape(count, 3).copy(),
            starts=places[3 * count :].copy(),
            merge=merge,
        )
    return number, Sample(
        tokens=tokens.astype(np.int64),
        labels=labels.astype(np.int64),
        loss_mask=mask.copy(),
        source=source,
        truncated=truncated,
        num_patches=num_patches,
        images=images,
    )


def _tokens(samples: Sequence[Sample]) -> Bytes:
    """Return tokens, labels and loss masks of samples, in turn those of all."""
    parts = [one.tokens.astype(np.int32) for one in samples]
    parts += [one.labels.astype(np.int32) for one in samples]
    parts += [one.loss_mask.astype(np.float32).view(np.int32) for one in samples]
    return np.concatenate([np.zeros(0, np.int32), *parts]).view(np.uint8)


def _split(
    data: Bytes,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    tokens, labels, mask = data.view(np.int32).reshape(3, -1)
    return tokens, labels, mask.view(np.float32)


# --- a step ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """In place of a step: no further one is made.

    Attributes:
        error: what the source rank raised; empty at the end of the data.
        closed: who closed its loader, empty for none.
    """

    error: str = ""
    closed: str = ""


@dataclass(frozen=True, kw_only=True)
class StepHeader:
    """What every rank of a replica knows of a step.

    Attributes:
        totals: the step, summed over replicas.
        positions: stream positions per micro-batch; an empty one is idle.
        lengths: tokens of each sample before padding, per micro-batch.
        patches: image patches that each micro-batch's samples stand for.
        rule: what samples and micro-batches are padded to.
        images: a row for each image of each micro-batch: number of its sample there, patches in
            time, height and width, and its first token in the sample.
        pixels: what their patches are; None without images.
        shares: how many replicas train each micro-batch together, and which this one is of them.
        plan_us: microseconds that making it took, waits included.
    """

    totals: StepTotals
    positions: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()
    patches: tuple[int, ...] = ()
    rule: SizeRule = _ANY
    images: tuple[tuple[tuple[int, ...], ...], ...] = ()
    pixels: PixelFormat | None = None
    shares: tuple[tuple[int, int], ...] = ()
    plan_us: int = 0

    @property
    def sizes(self) -> list[int]:
        """Tokens of this replica's part of each micro-batch, padding included."""
        found = []
        for lengths, (width, _) in zip(self.lengths, self.shares, strict=True):
            rule = self.rule.shared(width)
            found.append(rule.size_of(sum(map(rule.padded, lengths)) or rule.multiple) // width)
        return found

    @property
    def own_positions(self) -> list[tuple[int, ...]]:
        """Stream positions by micro-batch, each on the first of the replicas that share it."""
        pairs = zip(self.positions, self.shares, strict=True)
        return [() if place else row for row, (_, place) in pairs]

    @property
    def payload_bytes(self) -> int:
        """Size of the tokens' payload."""
        return _TOKEN_BYTES * sum(map(sum, self.lengths))

    @property
    def pixel_bytes(self) -> int:
        """Size of the patches' payload."""
        count = sum(t * h * w for rows in self.images for _, t, h, w, _ in rows)
        return count * self.pixels.patch_bytes if self.pixels else 0

    def layouts(self) -> list[MicroBatchLayout]:
        """Return the micro-batches without their tokens, as middle pipeline stages use them."""
        return [
            layout(
                lengths,
                positions=self.positions[at],
                rule=self.rule.shared(self.shares[at][0]),
                share=self.shares[at],
                num_patches=self.patches[at],
                images=self.images[at] if self.pixels else (),
                merge=self.pixels.merge if self.pixels else 1,
            )
            for at, lengths in enumerate(self.lengths)
        ]


def _values(one: Any) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def encode_header(content: StepHeader | Ending) -> bytes:
    """Return the header's bytes."""
    return json.dumps(content, default=_values, separators=(",", ":")).encode()


def decode_header(data: bytes) -> StepHeader | Ending:
    """Inverse of `encode_header`.

    Raises:
        RuntimeError: it is no header.
    """
    try:
        found: dict[str, Any] = json.loads(
            data, object_hook=lambda values: {name: _tuples(one) for name, one in values.items()}
        )
        if "totals" not in found:
            return Ending(error=found["error"], closed=found["closed"])
        totals, rule = StepTotals(**found["totals"]), SizeRule(**found["rule"])
        pixels = found["pixels"] and PixelFormat(**found["pixels"])
        return StepHeader(**found | {"totals": totals, "rule": rule, "pixels": pixels})
    except (ValueError, TypeError, KeyError) as error:
        raise RuntimeError(
            f"a step header of {len(data)} bytes arrived that is none "
            f"({type(error).__name__}: {str(error)[:200]}): ranks of the replica run different code"
        ) from error


def pack_step(
    totals: StepTotals,
    micro_batches: Sequence[Sequence[tuple[int, Sample]]],
    *,
    rule: SizeRule,
    shares: Sequence[tuple[int, int]] = (),
) -> tuple[StepHeader, Bytes, Bytes | None]:
    """Return a step's header, its payload, and its patches (None without images).

    Args:
        totals: the step.
        micro_batches: stream position and sample, by micro-batch; none for an idle one.
        rule: what samples and micro-batches are padded to.
        shares: see `StepHeader`; none for micro-batches that nobody shares.

    Raises:
        ValueError: patches of different kinds.
    """
    members = [[sample for _, sample in row] for row in micro_batches]
    samples = [sample for row in members for sample in row]
    images = [sample.images for sample in samples if sample.images is not None]
    formats = {one.format for one in images}
    if len(formats) > 1:
        raise ValueError(
            f"the samples of a step have patches of different kinds ({sorted(map(str, formats))}): "
            "preprocess all images alike"
        )
    header = StepHeader(
        totals=totals,
        positions=tuple(tuple(at for at, _ in row) for row in micro_batches),
        lengths=tuple(tuple(map(len, row)) for row in members),
        patches=tuple(sum(one.num_patches for one in row) for row in members),
        rule=rule,
        images=tuple(map(_image_rows, members)) if formats else (),
        pixels=formats.pop() if formats else None,
        shares=tuple(shares) or ((1, 0),) * len(members),
    )
    pixels = [np.ascontiguousarray(one.pixel_values).reshape(-1).view(np.uint8) for one in images]
    return header, _tokens(samples), np.concatenate(pixels) if pixels else None


def _image_rows(samples: Sequence[Sample]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        (at, *grid, start)
        for at, sample in enumerate(samples)
        if (images := sample.images) is not None
        for grid, start in zip(images.grid_thw.tolist(), images.starts.tolist(), strict=True)
    )


def decode_step(
    header: StepHeader, payload: Bytes, pixels: Bytes | None = None
) -> list[MicroBatch]:
    """Return the step's micro-batches, padded; without patches where `pixels` is None.

    Raises:
        ValueError: a payload has another size than the header says.
    """
    sizes = [(payload.size, header.payload_bytes)]
    sizes += [] if pixels is None else [(pixels.size, header.pixel_bytes)]
    for size, expected in sizes:
        if size != expected:
            raise ValueError(
                f"a payload of {size} bytes arrived; its header describes {expected}: ranks of "
                "the replica run different code"
            )
    tokens, labels, mask = _split(payload)
    patches = None
    if pixels is not None and header.pixels is not None:
        patches = torch.from_numpy(pixels.view(header.pixels.dtype))
        patches = patches.reshape(-1, header.pixels.width)
    found, at, row = [], 0, 0
    for item in header.layouts():
        part = slice(at, at + int(item.cu_seqlens[-1]))
        at, own = part.stop, None
        if patches is not None and item.images is not None:
            own = patches[row : row + int(item.images.cu_patches[-1])]
            row += len(own)
        found.append(filled(item, tokens[part], labels[part], mask[part], own))
    return found


def assemble(
    samples: Sequence[Sample], *, positions: Sequence[int], rule: SizeRule = _ANY
) -> MicroBatch:
    """Pack samples into one micro-batch; none for an idle one."""
    row = list(zip(positions, samples, strict=True))
    return decode_step(*pack_step(StepTotals(), [row], rule=rule))[0]
