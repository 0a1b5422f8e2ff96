"""Random access to the records of a data path.

JSON and JSONL files are read here, by byte position; all else (Parquet, Arrow, CSV, folders, globs,
the Hugging Face Hub) by `datasets`. What a record means is the business of `chat_record`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from odb_megatron.data.sample import BadRecordError, DataFileError

__all__ = ["MAX_HELD_BYTES", "MAX_RECORD_BYTES", "Records", "file_fingerprint", "has_records"]
__all__ += ["open_records", "require_data", "strict_json"]

MAX_RECORD_BYTES = 16 << 20
"""Largest record that is read; a larger one is a bad record. As text, about four million tokens."""

MAX_HELD_BYTES = 1 << 30
"""Largest JSON array, or gzipped file after decompression: every process that reads it holds it."""

_CHUNK_BYTES = 1 << 20
_EDGE_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_ENDING = re.compile(r"\.(jsonl|ndjson|json|parquet|arrow|csv|tsv)(\.gz|\.zst)?$", re.IGNORECASE)
_LINES = re.compile(r"\.(jsonl|ndjson|json)(\.gz)?$", re.IGNORECASE)
_PART = r"[A-Za-z_][\w.-]*(?:\[[^\[\]]*\])?"
_PATH = re.compile(rf"(?P<place>.+?)(?::(?P<config>[\w.-]+))?:(?P<split>{_PART}(?:\+{_PART})*)")
_HUB_NAME = re.compile(r"(\w[\w.-]*)/\w[\w.-]*")
_OPENING = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*(?:(\])[ \t\r\n]*)?")
_SEPARATOR = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")
_MAX_SHOWN = 40
_MAX_LISTED = 8

Record = dict[str, object]


class Records:
    """The records of one data path, in its order; a copy may be pickled or forked.

    Attributes:
        path: as it was given, for messages.
        folder: where relative names in records start from.
    """

    path: str
    folder: str

    def __len__(self) -> int:
        """Number of records, bad ones included."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Record:
        """Record `index`, made anew at each call.

        Raises:
            BadRecordError: the record is not valid JSON, UTF-8, or an object, or too large.
            IndexError: no such record.
            DataFileError: the file changed since it was opened, or cannot be read any more.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def line(self, index: int) -> int:
        """1-based line of record `index` (JSONL), or its 1-based number."""
        return index + 1

    def fingerprint(self) -> str:
        """Digest that changes with the data, mostly, and is the same for any copy of it."""
        raise NotImplementedError


# --- data paths ------------------------------------------------------------------------------


def _parts(path: str) -> tuple[str, str | None, str | None]:
    """Return place, configuration and split of a data path `PLACE[[:CONFIG]:SPLIT]`."""
    found = None if os.path.lexists(path) else _PATH.fullmatch(path)
    return (path, None, None) if found is None else found.group("place", "config", "split")  # type: ignore[return-value]


def _kind(path: str) -> str:
    """Return "lines" for a file that is read here, "table", or "tokens" for a Megatron prefix."""
    place, _, split = _parts(path)
    is_many = os.path.isdir(place) or (glob.has_magic(place) and not os.path.lexists(place))
    if _LINES.search(place) and not (is_many or split):
        return "lines"
    is_tokens = not (is_many or _is_hub_name(place)) or len(_missing(path)) < 2
    return "tokens" if is_tokens and not _ENDING.search(place) else "table"


def _is_hub_name(place: str) -> bool:
    name = _HUB_NAME.fullmatch(place)
    return name is not None and not _ENDING.search(place) and not os.path.exists(name[1])


def _missing(path: str) -> list[str]:
    """Return which of the two files of a Megatron data set are not there."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    return [prefix + end for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]


def has_records(path: str) -> bool:
    """Whether a data path names records; else it is the prefix of a Megatron `.bin` and `.idx`."""
    return _kind(path) != "tokens"


def require_data(path: str) -> None:
    """Raise unless data lies at a path; nothing is opened, and the Hub is not asked.

    Raises:
        ValueError: nothing usable is there.
    """
    kind, (place, *_) = _kind(path), _parts(path)
    if kind == "tokens" and (missing := _missing(path)):
        raise ValueError(
            f"no data at {path!r}: expected a file ending in .jsonl, .ndjson, .json, .parquet, "
            ".arrow, .csv or .tsv, a folder or glob of them, a Hub data set (org/name), or a "
            f"Megatron prefix with .bin and .idx (missing: {', '.join(missing)}). "
            f"{_what_is_there(place)}"
        )
    is_there = os.path.lexists(place) or _is_hub_name(place) or glob.glob(place, recursive=True)
    if kind != "tokens" and not is_there:
        raise ValueError(
            f"{place} does not exist; check the path (it must be readable on every node). "
            f"{_what_is_there(place)}"
        )
    needed = ["datasets", "zstandard"] if place.lower().endswith(".zst") else ["datasets"]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if kind == "table" and lacking:
        raise ValueError(
            f"{path} is read by {lacking[0]}, which is not installed: pip install "
            "'odb-megatron[files]'"
        )


def _what_is_there(place: str) -> str:
    folder = os.path.dirname(place) or "."
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f"The folder {folder} holds {', '.join(names[:_MAX_LISTED]) or 'nothing'}{more}"


@lru_cache(maxsize=64)
def open_records(path: str, cache: str | None = None) -> Records:
    """Open a data path, once per process.

    Args:
        path: a JSON or JSONL file, plain or gzipped; or `PLACE`, `PLACE:SPLIT` or
            `PLACE:CONFIG:SPLIT`, where PLACE is a file, folder, glob or name of a Hub data set and
            SPLIT what `datasets` understands: train (the default), train[:1%], train+test.
        cache: folder that keeps indices and Arrow files, so that the next run maps them into
            memory; None for none, and for the cache of `datasets`.

    Raises:
        ValueError: the data is missing, unreadable, without a record, or too large to be held.
    """
    require_data(path)
    records = _LineRecords(path, cache) if _kind(path) == "lines" else _Table(path, cache)
    if not len(records):
        raise ValueError(
            f"{path} holds no record; expected one JSON object per line, an array of them, or rows"
        )
    return records


# --- JSON and JSONL --------------------------------------------------------------------------


class _LineRecords(Records):
    """The records of a JSONL file (blank lines are none), or the elements of a JSON array.

    A `.json` file is an array when its first byte is `[`, and JSONL otherwise. A plain JSONL file
    is indexed once, in 8 bytes per record (16 where there are blank lines), and read by position;
    an array and a gzipped file are held. A file that changes in use is refused.
    """

    def __init__(self, path: str, cache: str | None) -> None:
        self.path = path
        self.folder = os.path.dirname(os.path.abspath(path))
        self._data: bytes | None = None
        self._file: io.FileIO | None = None
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is a pipe, socket or device; name a regular file")
            self._status = (status.st_size, status.st_mtime_ns)
            digest = hashlib.sha256(f"{os.path.realpath(path)} {self._status}".encode()).hexdigest()
            self._kept = "" if cache is None else f"{cache}/odb-index-{digest[:24]}.npy"
            self._index = self._indexed()
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); check its permissions, or fetch the file again"
            ) from error

    def __len__(self) -> int:
        return int(self._index.shape[1]) - 1

    def __getitem__(self, index: int) -> Record:
        at = range(len(self))[index]
        start, end = self._index[0, at : at + 2].tolist()
        try:
            if end - start > MAX_RECORD_BYTES:
                raise ValueError(
                    f"has {end - start} bytes; a record is read up to {MAX_RECORD_BYTES} "
                    f"({MAX_RECORD_BYTES >> 20} MiB): split it"
                )
            record = strict_json(self._read(start, end).rstrip(_BLANK))
            if not isinstance(record, dict):
                raise ValueError(
                    f"is a JSON {type(record).__name__}; expected an object with named columns"
                )
        except ValueError as error:
            raise BadRecordError(path=self.path, line=self.line(at), reason=str(error)) from error
        return record

    def line(self, index: int) -> int:
        return 1 + (index if len(self._index) == 1 else int(self._index[1, index]))

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    def __getstate__(self) -> dict[str, object]:
        """Leave the open file behind, what is held, and an index that is in a file."""
        state = {**self.__dict__, "_file": None, "_data": None}
        is_kept = self._data is not None or isinstance(self._index, np.memmap)
        return {**state, "_index": None} if is_kept else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_index"] is None:
            self._check(os.stat(self.path))
            self._index = self._indexed()

    def _indexed(self) -> npt.NDArray[np.int64]:
        """Index, or hold, the file.

        Returns:
            int64 [1 or 2, N + 1]: where each record starts, and the last one ends; its 0-based
            line, if that is another than its number.
        """
        name = self.path.lower()
        is_gzip = name.endswith(".gz")
        with contextlib.suppress(OSError, ValueError):  # there is none
            return _mapped(self._kept)
        with gzip.open(self.path) if is_gzip else open(self.path, "rb") as file:
            head = file.read(_EDGE_BYTES).removeprefix(_BOM).lstrip(_BLANK)
            file.seek(0)
            is_array = head[:1] == b"[" and name.removesuffix(".gz").endswith(".json")
            if not is_gzip and not is_array:
                index = _line_index(file)  # type: ignore[arg-type]
                with contextlib.suppress(OSError, ValueError):  # else it stays in memory
                    os.makedirs(os.path.dirname(self._kept), exist_ok=True)
                    part = f"{self._kept}.{os.uname().nodename}.{os.getpid()}"  # as other ranks do
                    with open(part, "wb") as target:
                        np.save(target, index)
                    os.replace(part, self._kept)
                    return _mapped(self._kept)
                return index
            self._data = file.read(MAX_HELD_BYTES + 1)
        if len(self._data) > MAX_HELD_BYTES:
            raise ValueError(
                f"{self.path} holds more than {MAX_HELD_BYTES >> 20} MiB, gzipped or as an array, "
                "which every process would keep in memory: gunzip it, write one object per line as "
                ".jsonl, or split it"
            )
        if not is_array:
            return _line_index(io.BytesIO(self._data))
        try:
            self._data, starts = _array_elements(self._data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} starts with '[' but is no JSON array: {error}; repair it there, or "
                "write one object per line and name the file .jsonl"
            ) from error
        return np.array([starts], dtype=np.int64)

    def _read(self, start: int, end: int) -> bytes:
        if self._data is not None:
            return self._data[start:end]
        try:
            if self._file is None:
                self._file = io.FileIO(self.path)
            number, data = self._file.fileno(), b""
            self._check(os.fstat(number))
            while len(data) < end - start:  # pread: forked processes share the file's position
                part = os.pread(number, end - start - len(data), start + len(data))
                if not part:
                    raise OSError(f"it ends at byte {start + len(data)}")
                data += part
            return data
        except OSError as error:
            raise DataFileError(
                f"{self.path} cannot be read any more ({error}): see that every node can read it, "
                "and start the run again"
            ) from error

    def _check(self, status: os.stat_result) -> None:
        if (now := (status.st_size, status.st_mtime_ns)) != self._status:
            # No ValueError: it is not a bad record, and no policy may leave it out.
            raise DataFileError(
                f"{self.path} changed while in use: bytes and time of change were {self._status}, "
                f"and are {now}; leave data files alone during a run, and start the run again"
            )


def _mapped(name: str) -> npt.NDArray[np.int64]:
    index: npt.NDArray[np.int64] = np.load(name, mmap_mode="r", allow_pickle=False)
    return index


def _array_elements(text: str) -> tuple[bytes, list[int]]:
    """Return the texts of an array's elements, joined, and where each starts and the last one ends.

    They are parsed one by one, to be skipped; what one holds is checked when it is read.
    """
    decode, end, joined, starts = json.JSONDecoder().raw_decode, 0, bytearray(), [0]
    found = _OPENING.match(text)
    while found is not None and found[1] != "]":
        _, end = decode(text, found.end())
        joined += text[found.end() : end].encode()
        starts.append(len(joined))
        found = _SEPARATOR.match(text, end)
    if found is None:
        raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
    if found.end() < len(text):
        raise json.JSONDecodeError("Extra data", text, found.end())
    return bytes(joined), starts


def _line_index(file: BinaryIO) -> npt.NDArray[np.int64]:
    """See `_LineRecords._indexed`; blank lines take no memory, and long ones are not held."""
    position = begin = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(position)
    starts, lines = array("q"), array("q")
    number, has_text = 0, False
    while part := file.readline(_CHUNK_BYTES):
        position += len(part)
        if not has_text and part.strip(_BLANK):
            has_text = True
            starts.append(begin)
            lines.append(number)
        if part.endswith(b"\n"):
            begin, has_text = position, False
            number += 1
    starts.append(position)
    is_gapless = not lines or lines[-1] == len(lines) - 1
    rows = [starts] if is_gapless else [starts, lines + array("q", [0])]
    return np.stack([np.frombuffer(row, dtype=np.int64) for row in rows])


def file_fingerprint(path: str) -> str:
    """Digest of a file's size and its first and last 64 KiB."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(0, size - _EDGE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


# --- JSON texts that are not trusted ---------------------------------------------------------


def strict_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Python's parser takes NaN, infinities, numbers that overflow, half surrogate pairs and keys that
    occur twice (of which the last counts); here they are errors. Nesting ends where that parser
    refuses to go deeper: some thousand levels.

    Raises:
        ValueError: why not, as the end of a sentence that begins with the text's name.
    """
    try:
        value = json.loads(
            data.decode(),
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=_without_repeats,
        )
        if re.search(rb"\\u[dD][89a-fA-F]", data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg} at column {error.pos + 1}") from error
    except UnicodeError as error:  # of bytes, or of half a surrogate pair
        raise ValueError(f"is not UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply to parse") from error
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {digits[:_MAX_SHOWN]}, which is not finite")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"has the key {twice[:_MAX_SHOWN]!r} twice in one object; keep one")
    return value


# --- tables, by `datasets` -------------------------------------------------------------------


class _Table(Records):
    """The rows of a `datasets.Dataset`, memory-mapped from its Arrow cache.

    Arrow has every key in every row: those that are None are left out, at any depth.
    """

    def __init__(self, path: str, cache: str | None) -> None:
        self.path = path
        place = os.path.abspath(_parts(path)[0])
        self.folder = place if os.path.isdir(place) else os.path.dirname(place)
        try:
            self._rows = _load(path, cache)
        except Exception as error:  # datasets, its builders and the Hub's client raise many
            cause = error if error.__cause__ is None else error.__cause__
            reason = " ".join(str(cause).split())[:1000]
            raise ValueError(
                f"{path} cannot be read by datasets ({type(cause).__name__}: {reason}); see that "
                "it is there, whole, and of one kind, and that this machine may fetch it"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        row: Record = _without_nulls(self._rows[range(len(self))[index]])
        return row

    def fingerprint(self) -> str:
        size = len(self)
        digest = hashlib.sha256(f"{size} {self._rows.features}".encode())
        for index in sorted({*range(min(size, 64)), *range(max(0, size - 64), size)}):
            digest.update(repr(self[index]).encode())
        return digest.hexdigest()


def _load(path: str, cache: str | None) -> Any:
    """Return the `datasets.Dataset` at a path."""
    import datasets

    place, config, split = _parts(path)
    split = split or "train"
    if any(os.path.isfile(f"{place}/{name}") for name in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(place)
        saved = {"train": saved} if isinstance(saved, datasets.Dataset) else saved
        sizes = {name: len(rows) for name, rows in saved.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        ranges = [(p.splitname, range(p.from_ or 0, p.to or sizes[p.splitname])) for p in parts]
        return datasets.concatenate_datasets([saved[name].select(own) for name, own in ranges])
    is_folder = os.path.isdir(place)
    pattern = os.path.join(glob.escape(place), "**") if is_folder else place
    files = [place] if os.path.isfile(place) else sorted(glob.glob(pattern, recursive=True))
    endings = {file: found[1].lower() for file in files if (found := _ENDING.search(file))}
    kinds = {"json" if "json" in ending else ending for ending in endings.values()}
    if files and not kinds:
        raise ValueError("it holds no file of a kind that is read")
    if len(kinds) > 1:
        named = ", ".join([*endings][:_MAX_LISTED])
        raise ValueError(f"it holds files of {len(kinds)} kinds, {named}")
    options: dict[str, Any] = {} if cache is None else {"cache_dir": f"{cache}/arrow"}
    if kinds <= {"csv", "tsv"} and kinds:
        options["keep_default_na"] = False  # "None" and "NA" are texts
    if is_folder or not files:
        return datasets.load_dataset(place, config, split=split, **options)
    if kinds == {"tsv"}:
        options["sep"] = "\t"
    kind = kinds.pop().replace("tsv", "csv")
    return datasets.load_dataset(kind, data_files={"train": [*endings]}, split=split, **options)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
