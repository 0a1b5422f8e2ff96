"""A step as bytes, for the other ranks of a replica: a header of metadata, and a payload of tokens.

Must not send anything. The header is JSON and has everything but token ids, labels, loss masks and
the patches of images; offsets, padding and positions follow from the sample lengths in it. The
payload has real tokens only: token ids and labels as int32, loss masks as bits. Patches are a
payload of their own (`step_pixels`), since only the first pipeline stage uses them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from odb_megatron.data.images import PixelFormat
from odb_megatron.data.sample import Sample
from odb_megatron.data.step_images import ImageRow, check_rows, image_rows, layout_of_rows
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout, assemble, assemble_idle, layout
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.step import StepTotals

__all__ = ["Ending", "StepMetadata", "StepWireError", "decode_header", "decode_payload"]
__all__ += ["encode_header", "encode_payload", "payload_bytes"]

Bytes = npt.NDArray[np.uint8]
_Item = TypeVar("_Item", MicroBatch, MicroBatchLayout)

_MAX_TOKEN_ID = (1 << 31) - 1
_MOST_SEGMENTS = 1 << 16  # of a micro-batch
_MOST_TOKENS = 1 << 28  # of a replica in a step: a payload of 2 GiB


class StepWireError(ValueError):
    """Bytes that describe no step: the leader runs other code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """In place of a step: the loader is exhausted, or (with a message) has failed or was closed.

    Attributes:
        error: what the leader raised; empty at the end of the data.
        closed: who closed its loader, empty for none.
    """

    error: str = ""
    closed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """What every rank of a replica knows of a step.

    Attributes:
        totals: the step, summed over replicas.
        positions: stream positions per micro-batch; an empty one is idle.
        lengths: tokens of each sample before padding, per micro-batch.
        patches: image patches that each micro-batch's samples stand for.
        rule: what samples and micro-batches are padded to.
        images: where the images of each micro-batch lie, see `step_images`; empty without any.
        pixels: what their patches are; None without images.
        window_bytes: see `FinishedStep`, with the next one.
        plan_us: see above.
    """

    totals: StepTotals
    positions: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    patches: tuple[int, ...]
    rule: SizeRule
    images: tuple[tuple[ImageRow, ...], ...] = ()
    pixels: PixelFormat | None = None
    window_bytes: int = 0
    plan_us: int = 0

    @classmethod
    def of(
        cls, totals: StepTotals, micro_batches: Sequence[MicroBatch], *, rule: SizeRule
    ) -> StepMetadata:
        """Describe assembled micro-batches.

        Raises:
            ValueError: patches of different kinds.
        """
        images, pixels = image_rows(micro_batches)
        return cls(
            totals=totals,
            positions=tuple(item.positions for item in micro_batches),
            lengths=tuple(_lengths(item) for item in micro_batches),
            patches=tuple(item.num_patches for item in micro_batches),
            rule=rule,
            images=images,
            pixels=pixels,
        )

    def layouts(self) -> list[MicroBatchLayout]:
        """Return the micro-batches without their tokens, as middle pipeline stages use them."""
        found = [
            replace(
                layout(lengths, positions=positions, rule=self.rule),
                num_patches=patches,
            )
            for lengths, positions, patches in zip(
                self.lengths, self.positions, self.patches, strict=True
            )
        ]
        return [self._with_images(item, at) for at, item in enumerate(found)]

    def with_images(self, items: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with where their images lie."""
        return [self._with_images(item, at) for at, item in enumerate(items)]

    def _with_images(self, item: _Item, at: int) -> _Item:
        if self.pixels is None or not self.images[at]:
            return item
        return replace(item, images=layout_of_rows(self.images[at], item, merge=self.pixels.merge))


def encode_header(content: StepMetadata | Ending) -> bytes:
    """Return the header's bytes."""
    return json.dumps(asdict(content), separators=(",", ":")).encode()


def decode_header(data: bytes) -> StepMetadata | Ending:
    """Inverse of `encode_header`.

    Raises:
        StepWireError: it is no header. One that is returned describes at most 2 GiB of payload.
    """
    try:
        values: dict[str, Any] = json.loads(data)
        if "error" in values:
            ending = Ending(**values)
            if not isinstance(ending.error, str) or not isinstance(ending.closed, str):
                raise TypeError("an ending that is no text")
            return ending
        totals: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["totals"].items()
        }
        metadata = StepMetadata(
            totals=StepTotals(**totals),
            positions=tuple(map(tuple, values["positions"])),
            lengths=tuple(map(tuple, values["lengths"])),
            patches=tuple(values["patches"]),
            rule=SizeRule(**values["rule"] | {"sizes": tuple(values["rule"]["sizes"])}),
            images=tuple(tuple(map(tuple, rows)) for rows in values["images"]),
            pixels=None if values["pixels"] is None else PixelFormat(**values["pixels"]),
            window_bytes=values["window_bytes"],
            plan_us=values["plan_us"],
        )
        _check(metadata)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StepWireError(
            f"a step header of {len(data)} bytes arrived that is none "
            f"({type(error).__name__}: {str(error)[:200]}): ranks of the replica run different code"
        ) from error
    return metadata


def payload_bytes(metadata: StepMetadata) -> int:
    """Return the size of a step's payload."""
    num_tokens = sum(map(sum, metadata.lengths))
    return 8 * num_tokens + -(-num_tokens // 8)


def encode_payload(micro_batches: Sequence[MicroBatch]) -> Bytes:
    """Return token ids, labels and loss masks of all real tokens, uint8 [bytes].

    Raises:
        ValueError: a token id that does not fit 31 bits.
    """
    places = [_real_places(item) for item in micro_batches]
    tokens, labels, mask = (
        np.concatenate(
            [
                getattr(item, name).numpy()[0][at]
                for item, at in zip(micro_batches, places, strict=True)
            ]
        )
        for name in ("tokens", "labels", "loss_mask")
    )
    for ids in (tokens, labels):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_TOKEN_ID:
            raise ValueError(
                f"token ids from {ids.min()} to {ids.max()} do not fit 0 to {_MAX_TOKEN_ID}: the "
                "tokenizer or the data is damaged"
            )
    return np.concatenate(
        [
            tokens.astype("<i4").view(np.uint8),
            labels.astype("<i4").view(np.uint8),
            np.packbits(mask > 0),
        ]
    )


def decode_payload(metadata: StepMetadata, payload: Bytes) -> list[MicroBatch]:
    """Return the step's micro-batches, equal to those that were encoded.

    Raises:
        ValueError: the payload has another size than the header says.
    """
    if payload.size != payload_bytes(metadata):
        raise ValueError(
            f"a payload of {payload.size} bytes arrived; its header describes "
            f"{payload_bytes(metadata)}: ranks of the replica run different code"
        )
    count = sum(map(sum, metadata.lengths))
    tokens = payload[: 4 * count].view("<i4").astype(np.int64)
    labels = payload[4 * count : 8 * count].view("<i4").astype(np.int64)
    mask = np.unpackbits(payload[8 * count :], count=count).astype(np.float32)
    micro_batches, at = [], 0
    parts = zip(metadata.lengths, metadata.positions, metadata.patches, strict=True)
    for lengths, positions, patches in parts:
        samples = []
        for length in lengths:
            part = slice(at, at + length)
            samples.append(Sample(tokens=tokens[part], labels=labels[part], loss_mask=mask[part]))
            at += length
        item = (
            assemble(samples, positions=positions, rule=metadata.rule)
            if positions
            else assemble_idle(rule=metadata.rule)
        )
        micro_batches.append(replace(item, num_patches=patches))
    return metadata.with_images(micro_batches)


def _check(metadata: StepMetadata) -> None:
    """Raise ValueError or TypeError unless the numbers are some, and fit each other."""
    rows = (metadata.lengths, metadata.positions)
    sizes = [[len(row) for row in of_one] for of_one in rows]
    if sizes[0] != sizes[1] or len(metadata.patches) != len(metadata.lengths):
        raise ValueError("lengths, positions and patches of different sizes")
    totals = metadata.totals
    costs = (*totals.costs, *totals.costs_before)
    counts = [getattr(totals, field.name) for field in fields(totals) if field.type == "int"]
    rule = metadata.rule
    numbers = [*counts, *metadata.patches, *rule.sizes, rule.least, rule.longest, rule.multiple]
    numbers += [metadata.window_bytes, metadata.plan_us]
    for row in (*rows[0], *rows[1], numbers, costs):
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in row):
            raise ValueError("a number is none, negative or huge")
    if type(totals.is_final) is not bool or min(rule.multiple, rule.least, *rule.sizes[:1]) < 1:
        raise ValueError("is_final, or a padding rule, is none")
    lengths = [length for row in metadata.lengths for length in row]
    if min(lengths, default=1) < 1:
        raise ValueError("a sample without tokens")
    padded = sum(map(rule.padded, lengths))
    if rule.sizes and rule.num_segments(rule.sizes[-1]) > _MOST_SEGMENTS:
        raise ValueError(f"{rule.num_segments(rule.sizes[-1])} segments in a micro-batch")
    each = max(rule.multiple, rule.sizes[-1] if rule.sizes else rule.least)
    whole = max(padded, len(metadata.lengths) * each)
    if whole > _MOST_TOKENS:
        raise ValueError(f"{whole} tokens; at most {_MOST_TOKENS}")
    check_rows(metadata.images, metadata.pixels, lengths=metadata.lengths, patches=metadata.patches)


def _lengths(item: MicroBatch) -> tuple[int, ...]:
    ends = item.cu_seqlens[: len(item.positions) + 1].tolist()  # no padding segment
    return tuple(end - start for start, end in pairwise(ends)) if item.positions else ()


def _real_places(item: MicroBatch) -> npt.NDArray[np.int64]:
    """Places of the real tokens in the padded micro-batch."""
    lengths = np.array(_lengths(item), dtype=np.int64)
    starts = item.cu_seqlens_padded.numpy().astype(np.int64)[: len(lengths)]
    before = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
