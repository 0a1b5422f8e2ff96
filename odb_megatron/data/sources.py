"""Data sources: random access from a record number to a sample, for each supported kind of data.

Knows files and tokens, not order, epochs, replicas or blends.
"""

from __future__ import annotations

import os
import struct
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import ChatFormatError, ChatRecord, parse_record
from odb_megatron.data.images import SampleImages
from odb_megatron.data.index_check import check_index
from odb_megatron.data.preprocess import (
    BadRecordPolicy,
    SampleRules,
    apply_rules,
    check_ids,
    check_weights,
    shift_labels,
    skipped_bad_record,
)
from odb_megatron.data.records import (
    file_fingerprint,
    has_records,
    open_records,
    require_data,
)
from odb_megatron.data.sample import BadRecordError, DataFileError, Sample, Skipped

if TYPE_CHECKING:
    from odb_megatron.data.image_chat import ImageRules

__all__ = [
    "ChatSource",
    "IndexedSource",
    "ItemSource",
    "MapSource",
    "SampleSource",
    "count_records",
    "open_source",
]


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

MAX_DOCUMENT_TOKENS = 1 << 24
"""Longest document of a Megatron dataset that is read; a longer one is a bad record."""


class SampleSource(Protocol):
    """What order, blend and stream need of a source."""

    @property
    def path(self) -> str:
        """Name shown in reports and errors."""

    def __len__(self) -> int:
        """Number of records, bad ones included."""

    def sample(self, index: int, *, source: int) -> Sample | Skipped:
        """Preprocess record `index`; `source` is stored in the result.

        Raises:
            BadRecordError, OverlongError: by policy, naming path and line.
            ChatFormatError, DataFileError: always.
        """

    def fingerprint(self) -> str:
        """Digest that changes when the data changes."""


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
    if has_records(path):
        if renderer is None:
            raise ValueError(
                f"{path} needs a tokenizer: pass --tokenizer-type HuggingFaceTokenizer and "
                "--tokenizer-model with its folder"
            )
        if images is not None:
            from odb_megatron.data.image_chat import ImageChatSource

            return ImageChatSource(path, rules=rules, renderer=renderer, images=images, cache=cache)
        return ChatSource(path, rules=rules, renderer=renderer, cache=cache)
    return IndexedSource(path.removesuffix(".bin").removesuffix(".idx"), rules=rules, mmap=mmap)


class _RuledSource:
    """Shared policy handling: subclasses give `_load`, raising ValueError for a bad record."""

    path: str

    def __init__(self, rules: SampleRules) -> None:
        self._rules = rules

    def line(self, index: int) -> int:
        """Return the line, or number, that messages give for a record; from 1."""
        return self._line(index)

    def _line(self, index: int) -> int:
        return index + 1

    def _load(self, index: int, *, source: int) -> Sample:
        raise NotImplementedError

    def sample(self, index: int, *, source: int) -> Sample | Skipped:
        line = self._line(index)
        try:
            sample = self._load(index, source=source)
        except BadRecordError as error:
            bad = error
        except ChatFormatError as error:
            raise ChatFormatError(f"{self.path}:{line}: {error}") from None
        except DataFileError:
            raise
        except ValueError as error:
            bad = BadRecordError(path=self.path, line=line, reason=str(error), trace=_trace(error))
        except Exception as error:  # of a user's dataset, or a damaged file
            reason = f"record {index} raised {type(error).__name__}: {error}"
            bad = BadRecordError(path=self.path, line=line, reason=reason, trace=_trace(error))
        else:
            try:
                check_ids(sample, self._rules)
                check_weights(sample)
            except ValueError as error:
                bad = BadRecordError(path=self.path, line=line, reason=str(error))
            else:
                return apply_rules(sample, self._rules, path=self.path, line=line)
        if self._rules.bad_record is BadRecordPolicy.ERROR:
            raise bad
        return skipped_bad_record(bad, source=source)


class ChatSource(_RuledSource):
    """Conversations or texts, one sample per record."""

    def __init__(
        self,
        path: str,
        *,
        rules: SampleRules,
        renderer: ChatRenderer,
        cache: str | None = None,
    ) -> None:
        super().__init__(rules)
        self.path = path
        self._records = open_records(path, cache)
        self._renderer = renderer

    def __len__(self) -> int:
        return len(self._records)

    def fingerprint(self) -> str:
        return self._records.fingerprint()

    def rough_sizes(self) -> npt.NDArray[np.int64]:
        """Return a number for each record that grows with its length: its bytes, int64 [N]."""
        return self._records.num_bytes()

    def _line(self, index: int) -> int:
        return self._records.line(index)

    def record(self, index: int) -> ChatRecord:
        """Return a record, read but not rendered."""
        return parse_record(self._records[index])

    def _load(self, index: int, *, source: int) -> Sample:
        ids, weights = self._renderer.render(self.record(index))
        return shift_labels(ids, weights, source=source)


class IndexedSource(_RuledSource):
    """A Megatron IndexedDataset: each document is a sample, loss on every token.

    The documents are already tokens; `--append-eod` of Megatron's preprocessing decides whether an
    end-of-document token is learnt.

    Raises:
        ValueError: the index cannot be read or contradicts itself, or the `.bin` file is shorter
            than it says.
    """

    def __init__(self, path: str, *, rules: SampleRules, mmap: bool = True) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        super().__init__(rules)
        self.path = path
        try:
            check_index(path)
            self._dataset = IndexedDataset(path, multimodal=False, mmap=mmap)
        except (AssertionError, IndexError, ValueError, OSError, struct.error) as error:
            raise ValueError(
                f"{path}.idx and .bin are no readable Megatron dataset ({error or 'damaged index'}"
                "): write them with Megatron's tools/preprocess_data.py"
            ) from error
        self._status = _status(path)
        self._bounds: npt.NDArray[np.int64] = np.asarray(self._dataset.document_indices)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def fingerprint(self) -> str:
        return file_fingerprint(self.path + ".idx") + file_fingerprint(self.path + ".bin")

    def rough_sizes(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each document, int64 [N]; nothing but the index is read."""
        sums = np.zeros(len(self._dataset.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self._dataset.sequence_lengths, out=sums[1:])
        return np.diff(sums[self._bounds])

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
        if (now := _status(self.path)) != self._status:
            raise DataFileError(
                f"{self.path}.idx or .bin changed while in use (bytes and times of change "
                f"{self._status} then, {now} now); leave data files alone during a run, and start "
                "the run again"
            )
        parts = [np.asarray(self._dataset[part]) for part in range(first, last)]
        ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
        return shift_labels(ids, np.ones(ids.size, dtype=np.bool_), source=source)


class MapSource(_RuledSource):
    """Any map-style dataset whose items are mappings with `tokens`, `labels` and `loss_mask`.

    Items are already shifted; arrays, tensors and lists are taken. A loss_mask may hold weights, up
    to `preprocess.MAX_WEIGHT`; an item where all are 0 is a bad record. `num_patches` is optional
    (see `Sample`), and so are images: `pixel_values` [P, C] with `image_grid_thw` [I, 3],
    `image_starts` [I] and, if it is not 2, `image_merge` (see `SampleImages`).

    Args:
        dataset: `len()` and `[index]`.
        rules: policies.
        name: shown in reports and errors.
    """

    def __init__(self, dataset: Any, *, rules: SampleRules, name: str = "") -> None:
        super().__init__(rules)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and "
                "__getitem__"
            )
        self.path = name or type(dataset).__name__
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def fingerprint(self) -> str:
        """A dataset may give its own `fingerprint()`."""
        own = getattr(self._dataset, "fingerprint", None)
        return str(own()) if callable(own) else f"{self.path}:{len(self)}"

    def _load(self, index: int, *, source: int) -> Sample:
        return _mapping_sample(self._dataset[index], source=source)


class ItemSource(_RuledSource):
    """Items of an iterable data set, as `MapSource` has them.

    Args:
        rules: policies.
        name: shown in reports and errors.
    """

    def __init__(self, *, rules: SampleRules, name: str) -> None:
        super().__init__(rules)
        self.path = name
        self._item: Any = None

    def convert(self, item: Any, *, number: int, source: int = 0) -> Sample | Skipped:
        """Preprocess an item, the `number`-th (from 1) of those that were read.

        Raises:
            BadRecordError, OverlongError: by policy.
        """
        self._item = item
        return self.sample(number - 1, source=source)

    def _load(self, index: int, *, source: int) -> Sample:
        return _mapping_sample(self._item, source=source)


def count_records(path: str, *, mmap: bool = True, cache: str | None = None) -> int:
    """Return how many records lie at `path`; no tokenizer is needed.

    Raises:
        ValueError: as `open_source`.
    """
    if has_records(path):
        return len(open_records(path, cache))
    rules = SampleRules(context=1, token_budget=1)
    return len(open_source(path, rules=rules, renderer=None, mmap=mmap))


def _status(prefix: str) -> tuple[tuple[int, int], ...]:
    """Return size and time of change of both files of a Megatron dataset."""
    try:
        found = [os.stat(prefix + end) for end in (".idx", ".bin")]
    except OSError as error:
        raise DataFileError(
            f"{prefix}.idx or .bin cannot be read any more ({error}): see that every node can read "
            "them, and start the run again"
        ) from error
    return tuple((one.st_size, one.st_mtime_ns) for one in found)


def _trace(error: Exception) -> str:
    """Return where a user's dataset raised, or hangs; empty where only this package was at work."""
    frames = traceback.extract_tb(error.__traceback__)
    if all(frame.filename.startswith(_PACKAGE) or _is_generated(frame) for frame in frames):
        return ""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:  # of what the user's error prints
        return f"(no traceback: it cannot be printed, {type(failure).__name__})"


def _is_generated(frame: traceback.FrameSummary) -> bool:
    """Whether `dataclasses` wrote the frame's code: the way to a `__post_init__`."""
    return (frame.filename, frame.name) == ("<string>", "__init__")


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
