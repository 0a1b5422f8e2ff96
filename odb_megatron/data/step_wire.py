"""A packed step as bytes: a header of metadata, a payload of tokens, and the patches of its images.

Must not send anything. The header is JSON and has everything but token ids, labels, loss masks and
patches; offsets, padding and positions follow from the sample lengths in it. The payload has real
tokens only: token ids and labels as int32, loss masks as in `sample_wire`. Patches are a payload of
their own, since only the first pipeline stage uses them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.images import PixelFormat
from odb_megatron.data.sample import Sample
from odb_megatron.data.sample_wire import (
    MaskForm,
    decode_masks,
    encode_masks,
    mask_bytes,
    mask_form,
)
from odb_megatron.data.step_images import ImageRow, check_rows, layout_of_rows
from odb_megatron.data.thd import PAD_TOKEN, MicroBatch, MicroBatchLayout, layout, position_ids
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals

__all__ = ["Ending", "StepMetadata", "StepWireError", "decode_header", "decode_payload"]
__all__ += ["encode_header", "pack_step", "payload_bytes"]

Bytes = npt.NDArray[np.uint8]
_Item = TypeVar("_Item", MicroBatch, MicroBatchLayout)

_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_SEGMENTS = 1 << 16  # of a micro-batch
_MAX_TOKENS = 1 << 28  # of a replica in a step: a payload of 2 GiB


class StepWireError(ValueError):
    """Bytes that describe no step: the source rank runs other code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """In place of a step: the loader is exhausted, or (with a message) has failed or was closed.

    Attributes:
        error: what the source rank raised; empty at the end of the data.
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
        plan_us: microseconds that making it took, waits included.
        mask_form: of the loss masks in the payload.
    """

    totals: StepTotals
    positions: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    patches: tuple[int, ...]
    rule: SizeRule
    images: tuple[tuple[ImageRow, ...], ...] = ()
    pixels: PixelFormat | None = None
    plan_us: int = 0
    mask_form: MaskForm = MaskForm.BITS

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
        metadata = StepMetadata(
            totals=StepTotals(**values["totals"]),
            positions=tuple(map(tuple, values["positions"])),
            lengths=tuple(map(tuple, values["lengths"])),
            patches=tuple(values["patches"]),
            rule=SizeRule(**values["rule"] | {"sizes": tuple(values["rule"]["sizes"])}),
            images=tuple(tuple(map(tuple, rows)) for rows in values["images"]),
            pixels=None if values["pixels"] is None else PixelFormat(**values["pixels"]),
            plan_us=values["plan_us"],
            mask_form=MaskForm(values["mask_form"]),
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
    num_samples = sum(map(len, metadata.lengths))
    form = metadata.mask_form
    return 8 * num_tokens + mask_bytes(form, num_tokens=num_tokens, num_samples=num_samples)


def pack_step(
    totals: StepTotals,
    micro_batches: Sequence[Sequence[tuple[int, Sample]]],
    *,
    rule: SizeRule,
) -> tuple[StepMetadata, Bytes, Bytes | None]:
    """Return a step's metadata, its payload, and its patches (None without images).

    Args:
        totals: the step.
        micro_batches: stream position and sample, by micro-batch; none for an idle one.
        rule: what samples and micro-batches are padded to.

    Raises:
        ValueError: a token id that does not fit 31 bits, or patches of different kinds.
    """
    samples = [sample for members in micro_batches for _, sample in members]
    formats = {sample.images.format for sample in samples if sample.images is not None}
    if len(formats) > 1:
        raise ValueError(
            f"the samples of a step have patches of different kinds ({sorted(map(str, formats))}): "
            "preprocess all images alike"
        )
    masks = [sample.loss_mask for sample in samples]
    metadata = StepMetadata(
        totals=totals,
        positions=tuple(tuple(at for at, _ in members) for members in micro_batches),
        lengths=tuple(tuple(len(sample) for _, sample in members) for members in micro_batches),
        patches=tuple(sum(one.num_patches for _, one in members) for members in micro_batches),
        rule=rule,
        images=tuple(map(_image_rows, micro_batches)) if formats else (),
        pixels=formats.pop() if formats else None,
        mask_form=mask_form(masks),
    )
    payload = np.zeros(0, dtype=np.uint8)
    if samples:
        tokens = np.concatenate([sample.tokens for sample in samples])
        labels = np.concatenate([sample.labels for sample in samples])
        low, high = min(tokens.min(), labels.min()), max(tokens.max(), labels.max())
        if not 0 <= low <= high <= _MAX_TOKEN_ID:
            raise ValueError(
                f"token ids from {low} to {high} do not fit 0 to {_MAX_TOKEN_ID}: the tokenizer or "
                "the data is damaged"
            )
        ids = [one.astype("<i4").view(np.uint8) for one in (tokens, labels)]
        payload = np.concatenate([*ids, encode_masks(metadata.mask_form, masks)])
    pixels = [one.images.pixel_values for one in samples if one.images is not None]
    patches = np.concatenate([one.reshape(-1).view(np.uint8) for one in pixels]) if pixels else None
    return metadata, payload, patches


def decode_payload(metadata: StepMetadata, payload: Bytes) -> list[MicroBatch]:
    """Return the step's micro-batches, padded.

    Raises:
        ValueError: the payload has another size than the header says.
    """
    if payload.size != payload_bytes(metadata):
        raise ValueError(
            f"a payload of {payload.size} bytes arrived; its header describes "
            f"{payload_bytes(metadata)}: ranks of the replica run different code"
        )
    count = sum(map(sum, metadata.lengths))
    tokens = payload[: 4 * count].view("<i4")
    labels = payload[4 * count : 8 * count].view("<i4")
    lengths = [length for row in metadata.lengths for length in row]
    mask = decode_masks(metadata.mask_form, payload[8 * count :], lengths)
    found, at = [], 0
    for item in metadata.layouts():
        starts = item.cu_seqlens_padded.numpy().astype(np.int64)
        real = item.cu_seqlens.numpy().astype(np.int64)
        places = np.repeat(starts[:-1] - real[:-1], np.diff(real)) + np.arange(real[-1])
        part = slice(at, at + int(real[-1]))
        at = part.stop
        size = int(starts[-1])
        ids = np.full((2, size), PAD_TOKEN, dtype=np.int64)
        ids[0, places], ids[1, places] = tokens[part], labels[part]
        loss_mask = np.zeros(size, dtype=np.float32)
        loss_mask[places] = mask[part]
        found.append(
            MicroBatch(
                cu_seqlens=item.cu_seqlens,
                cu_seqlens_padded=item.cu_seqlens_padded,
                max_seqlen=item.max_seqlen,
                positions=item.positions,
                num_patches=item.num_patches,
                images=item.images,
                tokens=torch.from_numpy(ids[:1]),
                labels=torch.from_numpy(ids[1:]),
                loss_mask=torch.from_numpy(loss_mask)[None],
                position_ids=position_ids(starts),
            )
        )
    return found


def _image_rows(members: Sequence[tuple[int, Sample]]) -> tuple[ImageRow, ...]:
    return tuple(
        (at, *grid, start)
        for at, (_, sample) in enumerate(members)
        if sample.images is not None
        for grid, start in zip(
            sample.images.grid_thw.tolist(), sample.images.starts.tolist(), strict=True
        )
    )


def _check(metadata: StepMetadata) -> None:
    """Raise ValueError or TypeError unless the numbers are some, and fit each other."""
    rows = (metadata.lengths, metadata.positions)
    sizes = [[len(row) for row in of_one] for of_one in rows]
    if sizes[0] != sizes[1] or len(metadata.patches) != len(metadata.lengths):
        raise ValueError("lengths, positions and patches of different sizes")
    totals = metadata.totals
    counts = [getattr(totals, field.name) for field in fields(totals) if field.type == "int"]
    rule = metadata.rule
    numbers = [*counts, *metadata.patches, *rule.sizes, rule.least, rule.longest, rule.multiple]
    numbers.append(metadata.plan_us)
    for row in (*rows[0], *rows[1], numbers):
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in row):
            raise ValueError("a number is none, negative or huge")
    if type(totals.is_final) is not bool or min(rule.multiple, rule.least, *rule.sizes[:1]) < 1:
        raise ValueError("is_final, or a padding rule, is none")
    lengths = [length for row in metadata.lengths for length in row]
    if min(lengths, default=1) < 1:
        raise ValueError("a sample without tokens")
    padded = sum(map(rule.padded, lengths))
    if rule.sizes and rule.num_segments(rule.sizes[-1]) > _MAX_SEGMENTS:
        raise ValueError(f"{rule.num_segments(rule.sizes[-1])} segments in a micro-batch")
    each = max(rule.multiple, rule.sizes[-1] if rule.sizes else rule.least)
    whole = max(padded, len(metadata.lengths) * each)
    if whole > _MAX_TOKENS:
        raise ValueError(f"{whole} tokens; at most {_MAX_TOKENS}")
    check_rows(metadata.images, metadata.pixels, lengths=metadata.lengths, patches=metadata.patches)
