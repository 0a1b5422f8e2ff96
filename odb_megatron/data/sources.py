"""Data sources: random access from a record number to a sample, for each supported kind of data.

Knows files and tokens, not order, epochs, replicas or blends.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import ChatFormatError, ChatRecord, parse_record
from odb_megatron.data.images import SampleImages
from odb_megatron.data.pictures import ImageRules, RecordImages
from odb_megatron.data.records import file_fingerprint, has_records, open_records, require_data
from odb_megatron.data.sample import (
    BadRecordError,
    DataFileError,
    Sample,
    SampleRules,
    Skipped,
    SkipReason,
    WeightError,
    apply_rules,
    check_sample,
    shift_labels,
)
from odb_megatron.plan.padding import OverlongError

__all__ = ["DATA_ERRORS", "ChatSource", "IndexedSource", "MapSource", "SampleSource"]
__all__ += ["count_records", "open_source"]

DATA_ERRORS = (BadRecordError, OverlongError, ChatFormatError, DataFileError, WeightError)
"""What a source raises; each names the record."""

_PIECE = 1 << 20

MAX_DOCUMENT_TOKENS = 1 << 24
"""Longest document of a Megatron dataset that is read; a longer one is a bad record."""


def open_source(
    path: str,
    *,
    rules: SampleRules,
    renderer: ChatRenderer | None,
    mmap: bool = True,
    images: ImageRules | None = None,
    cache: str | None = None,
) -> SampleSource:
    """Open records of chats or texts, or a Megatron `.bin`/`.idx` pair (`path` without the ending).

    Args:
        path: as in Megatron's `--data-path`.
        rules: policies for every record.
        renderer: tokenizer and chat template; needed for records only.
        mmap: map `.bin` files into memory (`--no-mmap-bin-files` turns it off).
        images: what becomes of the pictures of chat files; None to refuse records with any.
        cache: see `open_records`.

    Raises:
        ValueError: nothing usable lies at `path`.
    """
    require_data(path)
    if not has_records(path):
        return IndexedSource(path.removesuffix(".bin").removesuffix(".idx"), rules=rules, mmap=mmap)
    if renderer is None:
        raise ValueError(
            f"{path} needs a tokenizer: pass --tokenizer-type HuggingFaceTokenizer and "
            "--tokenizer-model with its folder"
        )
    return ChatSource(path, rules=rules, renderer=renderer, images=images, cache=cache)


def count_records(path: str, *, mmap: bool = True, cache: str | None = None) -> int:
    """Return how many records lie at `path`; no tokenizer is needed.

    Raises:
        ValueError: as `open_source`.
    """
    if has_records(path):
        return len(open_records(path, cache))
    rules = SampleRules(context=1, token_budget=1)
    return len(open_source(path, rules=rules, renderer=None, mmap=mmap))


class SampleSource:
    """What order, blend and stream need of a source.

    Subclasses give `_load`, which raises ValueError for a bad record.

    Attributes:
        path: name shown in reports and errors.
    """

    def __init__(self, path: str, rules: SampleRules) -> None:
        self.path = path
        self._rules = rules

    def __len__(self) -> int:
        """Number of records, bad ones included."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Digest that changes when the data changes."""
        raise NotImplementedError

    def line(self, index: int) -> int:
        """Return the line, or number, that messages give for a record; from 1."""
        return index + 1

    def _load(self, index: int, *, source: int) -> Sample:
        raise NotImplementedError

    def sample(self, index: int, *, source: int) -> Sample | Skipped:
        """Preprocess record `index`; `source` is stored in the result.

        Raises:
            BadRecordError, OverlongError: by policy, naming path and line.
            ChatFormatError, DataFileError: always.
        """
        line = self.line(index)
        try:
            sample = self._load(index, source=source)
            check_sample(sample, self._rules)
        except DataFileError:
            raise
        except ChatFormatError as error:
            raise ChatFormatError(f"{self.path}:{line}: {error}") from None
        except Exception as error:
            bad = error
            if not isinstance(error, BadRecordError):
                reason, trace = str(error), ""
                if not isinstance(error, ValueError):  # of a damaged file, or what hangs
                    reason, trace = _raised(error, index)
                bad = BadRecordError(self.path, line, reason, trace)
            if self._rules.skip_bad:
                return Skipped(reason=SkipReason.BAD_RECORD, message=str(bad), source=source)
            raise bad from error.__cause__ or error
        return apply_rules(sample, self._rules, path=self.path, line=line)


def _raised(error: Exception, index: int) -> tuple[str, str]:
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception as failure:  # of what the user's error prints
        trace = f"(no traceback: it cannot be printed, {type(failure).__name__})"
    return f"record {index} raised {type(error).__name__}: {error}", trace


class ChatSource(SampleSource):
    """Conversations, with or without pictures, or texts: one sample per record.

    Raises:
        ValueError: the file cannot be used, or the tokenizer has no token for visual ones.
    """

    def __init__(
        self,
        path: str,
        *,
        rules: SampleRules,
        renderer: ChatRenderer,
        images: ImageRules | None = None,
        cache: str | None = None,
    ) -> None:
        super().__init__(path, rules)
        self._records = open_records(path, cache)
        self.renderer = renderer
        self._images = images
        if images is not None:
            ids, _ = renderer.tokenizer.encode(images.token)
            if len(ids) != 1:
                raise ValueError(
                    f"the tokenizer has no token {images.token!r} (it makes {len(ids)} of the "
                    "text): use the tokenizer that belongs to the model, or add the token to it"
                )
            self._token = ids[0]

    def __len__(self) -> int:
        return len(self._records)

    def fingerprint(self) -> str:
        """Of the pictures the rules count, their own content does not."""
        own = self._records.fingerprint()
        if self._images is None:
            return own
        return hashlib.sha256(f"{own} {self._images}".encode()).hexdigest()

    def line(self, index: int) -> int:
        return self._records.line(index)

    def record(self, index: int) -> ChatRecord:
        """Return a record, read but not rendered."""
        return parse_record(self._records[index])

    def _load(self, index: int, *, source: int) -> Sample:
        if self._images is None:
            return shift_labels(*self.renderer.render(self.record(index)), source=source)
        row = self._records[index]
        pictures = RecordImages(row, self._images)
        ids, weights = self.renderer.render(parse_record(row, images=pictures.take))
        folder = self._images.folder or self._records.folder
        ids, weights, images = pictures.expand(ids, weights, token=self._token, folder=folder)
        return shift_labels(ids, weights, source=source, images=images)


class IndexedSource(SampleSource):
    """A Megatron IndexedDataset: each document is a sample, loss on every token.

    The documents are already tokens; `--append-eod` of Megatron's preprocessing decides whether an
    end-of-document token is learnt.

    Raises:
        ValueError: the index cannot be read or contradicts itself, or the `.bin` file is shorter
            than it says.
    """

    def __init__(self, path: str, *, rules: SampleRules, mmap: bool = True) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        super().__init__(path, rules)
        self._status = self._look()
        try:
            if not all(os.path.isfile(path + end) for end in (".idx", ".bin")):
                raise ValueError("no regular files")  # which would be waited for
            # Megatron's reader leaves a traceback of its own behind where it fails half made.
            with open(path + ".idx", "rb") as file:
                if (header := file.read(9)) != b"MMIDIDX\x00\x00":
                    raise ValueError(f"bad header: {header!r}")
            if not os.path.getsize(path + ".bin"):
                raise ValueError("the .bin file is empty")
            self._dataset = IndexedDataset(path, multimodal=False, mmap=mmap)
            _check_index(self._dataset.index, num_bytes=self._status[1][0])
        except Exception as error:  # Megatron's reader raises what it comes upon
            raise ValueError(
                f"{path}.idx and .bin are no readable Megatron dataset ({type(error).__name__}: "
                f"{error}): write them with Megatron's tools/preprocess_data.py"
            ) from error
        self._bounds: npt.NDArray[np.int64] = np.asarray(self._dataset.document_indices)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def fingerprint(self) -> str:
        return file_fingerprint(self.path + ".idx") + file_fingerprint(self.path + ".bin")

    def _load(self, index: int, *, source: int) -> Sample:
        first, last = int(self._bounds[index]), int(self._bounds[index + 1])
        num_tokens = int(self._dataset.sequence_lengths[first:last].sum(dtype=np.int64))
        if num_tokens > MAX_DOCUMENT_TOKENS:
            raise ValueError(
                f"the document has {num_tokens} tokens; up to {MAX_DOCUMENT_TOKENS} are read: "
                "split it"
            )
        # A mapped file that was cut would end the process by SIGBUS, an unmapped one give whatever
        # memory holds.
        if (now := self._look()) != self._status:
            raise DataFileError(
                f"{self.path}.idx or .bin changed while in use (bytes and times of change "
                f"{self._status} then, {now} now); leave data files alone during a run, and start "
                "the run again"
            )
        parts = [np.asarray(self._dataset[part]) for part in range(first, last)]
        ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
        return shift_labels(ids, np.ones(ids.size, dtype=np.bool_), source=source)

    def _look(self) -> list[tuple[int, int]]:
        """Return size and time of change of both files."""
        try:
            found = [os.stat(self.path + end) for end in (".idx", ".bin")]
        except OSError as error:
            raise DataFileError(
                f"{self.path}.idx or .bin cannot be read any more ({error}): see that every node "
                "can read them, and start the run again"
            ) from error
        return [(one.st_size, one.st_mtime_ns) for one in found]


def _check_index(index: Any, *, num_bytes: int) -> None:
    """Raise unless an index's documents lie inside the `.bin` file; looked at in pieces."""
    lengths, starts = index.sequence_lengths, index.sequence_pointers
    ends = index.document_indices
    width = np.dtype(index.dtype).itemsize
    if np.dtype(index.dtype).kind not in "iu":
        raise ValueError(f"tokens are of type {np.dtype(index.dtype)}; expected integers")
    for at in range(0, len(lengths), _PIECE):
        length, start = lengths[at : at + _PIECE].astype(np.int64), starts[at : at + _PIECE]
        is_bad = (length < 0) | (start < 0) | (start > num_bytes - width * length)
        if is_bad.any():
            worst = int(np.flatnonzero(is_bad)[0])
            raise ValueError(
                f"the index has sequence {at + worst} at byte {start[worst]} with {length[worst]} "
                f"tokens, and the .bin file {num_bytes} bytes: damaged, or cut short"
            )
    pieces = range(0, len(ends), _PIECE)
    falls = any((np.diff(ends[at : at + _PIECE + 1]) < 0).any() for at in pieces)
    if falls or not len(lengths) or int(ends[0]) != 0 or int(ends[-1]) != len(lengths):
        raise ValueError(f"damaged index: its documents are not sequences 0 to {len(lengths)}")


class MapSource(SampleSource):
    """Any map-style dataset whose items are mappings with `tokens`, `labels` and `loss_mask`.

    Items are already shifted; arrays, tensors and lists are taken. A loss_mask may hold weights, up
    to `sample.MAX_WEIGHT`; an item where all are 0 is a bad record. `num_patches` is optional (see
    `Sample`), and so are images: `pixel_values` [P, C] with `image_grid_thw` [I, 3],
    `image_starts` [I] and, if it is not 2, `image_merge` (see `SampleImages`).

    Args:
        dataset: `len()` and `[index]`.
        rules: policies.
        name: shown in reports and errors.
    """

    def __init__(self, dataset: Any, *, rules: SampleRules, name: str = "") -> None:
        super().__init__(name or type(dataset).__name__, rules)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and "
                "__getitem__"
            )
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def fingerprint(self) -> str:
        """A dataset may give its own `fingerprint()`."""
        own = getattr(self._dataset, "fingerprint", None)
        return str(own()) if callable(own) else f"{self.path}:{len(self)}"

    def _load(self, index: int, *, source: int) -> Sample:
        try:
            item = self._dataset[index]
        except Exception as error:
            raise BadRecordError(self.path, index + 1, *_raised(error, index)) from error
        return _mapping_sample(item, source=source)


def _mapping_sample(item: Any, *, source: int) -> Sample:
    if not isinstance(item, Mapping):
        raise ValueError(
            f"item is a {type(item).__name__}; expected a mapping with tokens, labels and loss_mask"
        )
    missing = {"tokens", "labels", "loss_mask"} - set(item)
    if missing:
        raise ValueError(f"item lacks {sorted(missing)}; it has {sorted(map(str, item))}")
    images = _mapping_images(item)
    given = 0 if images is None else images.num_patches
    sample = Sample(
        tokens=_numbers(item["tokens"], "tokens", kinds="iu").astype(np.int64),
        labels=_numbers(item["labels"], "labels", kinds="iu").astype(np.int64),
        loss_mask=_numbers(item["loss_mask"], "loss_mask", kinds="biuf").astype(np.float32),
        source=source,
        num_patches=_numbers(item.get("num_patches", given), "num_patches", kinds="iu").item(),
        images=images,
    )
    if sample.num_loss_tokens == 0:
        raise ValueError("no token to learn from: every label is masked")
    return sample


def _mapping_images(item: Mapping[str, Any]) -> SampleImages | None:
    names = ("pixel_values", "image_grid_thw", "image_starts")
    given = [name for name in names if item.get(name) is not None]
    if not given:
        return None
    if len(given) < len(names):
        raise ValueError(f"item has {' and '.join(given)}; images need {', '.join(names)}")
    pixels = np.asarray(item["pixel_values"])
    if not len(pixels) and not len(item["image_grid_thw"]):
        return None
    grid, starts = (_numbers(item[name], name, kinds="iu").astype(np.int64) for name in names[1:])
    merge = _numbers(item.get("image_merge", 2), "image_merge", kinds="iu").item()
    return SampleImages(pixel_values=pixels, grid_thw=grid, starts=starts, merge=merge)


def _numbers(values: Any, name: str, *, kinds: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim == 1 and not array.size:
        raise ValueError(f"{name} is empty; expected at least one number")
    if array.dtype.kind not in kinds:
        expected = "integers" if kinds == "iu" else "numbers"
        raise ValueError(f"{name} has dtype {array.dtype}; expected {expected}")
    return array
