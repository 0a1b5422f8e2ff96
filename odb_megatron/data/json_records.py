"""Random access to the records of a `.jsonl` or `.json` file, plain or gzipped.

Must not interpret a record (that is `chat_record`), keep a plain file in memory, load a record
larger than `MAX_RECORD_BYTES`, or share an open file between processes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import operator
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, overload

import numpy as np
import numpy.typing as npt

from odb_megatron.data.json_array import JsonArrayError, array_spans
from odb_megatron.data.sample import BadRecordError, DataFileError
from odb_megatron.data.strict_json import JsonTextError, strict_json

__all__ = ["JSON_ENDINGS", "MAX_HELD_BYTES", "MAX_RECORD_BYTES", "JsonRecords", "is_json_path"]

MAX_RECORD_BYTES = 16 << 20
"""Largest record that is read; a larger one is a bad record. As text, about four million tokens."""

MAX_HELD_BYTES = 1 << 30
"""Largest array, or gzipped file after decompression: the one is held while it is indexed, the
other by every process that reads it."""

_CHUNK_BYTES = 1 << 20
_FINGERPRINT_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_IS_TEXT = np.array([byte not in _BLANK for byte in range(256)])

_Places = npt.NDArray[np.int64]


def is_json_path(path: str) -> bool:
    """Whether a path ends like a JSON or JSONL file, in capitals or not."""
    return path.lower().endswith(JSON_ENDINGS)


class JsonRecords(Sequence[dict[str, object]]):
    """The records of one file, in file order.

    A `.jsonl` file holds one JSON object per line; blank lines are no records. A `.json` file is an
    array of objects when its first non-blank byte is `[`, and JSONL otherwise. A file is indexed
    once, in 24 bytes per record at most (twice that for a moment), and read by position; a gzipped
    one is held decompressed.

    A copy may be pickled or forked: each process opens the file itself, and refuses it if its size
    or its time of change is another.

    Args:
        path: the file.
        cache: folder that keeps the index of a plain file of lines, so that the next run maps it
            into memory; None for none.

    Raises:
        ValueError: the file is missing, unreadable, no regular file, without a record, an array
            whose elements cannot be told apart, or an array or gzipped file above `MAX_HELD_BYTES`.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache: str | None = None) -> None:
        self.path = str(path)
        self._cache, self._index_file = cache, ""
        self._starts: _Places
        self._ends: _Places
        self._lines: _Places | None
        self._bytes: bytes | None = None
        self._file: tuple[int, BinaryIO] | None = None
        name = Path(path).name.lower()
        try:
            status = os.stat(path)
            self._size, self._changed_ns = status.st_size, status.st_mtime_ns
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                self._refuse("is a pipe, socket or device; name a regular file")
            if not name.endswith(JSON_ENDINGS) and not os.path.isdir(path):
                self._refuse(
                    f"has none of the endings {', '.join(JSON_ENDINGS)}; convert or rename it"
                )
            self._is_gzip = name.endswith(".gz")
            self._index(may_be_array=name.endswith((".json", ".json.gz")))
        except FileNotFoundError:
            self._refuse("does not exist; check the path (it must be readable on every node)")
        except IsADirectoryError:
            self._refuse("is a directory; name a file in it")
        except (OSError, EOFError, zlib.error) as error:
            self._refuse(
                f"cannot be read ({error}); check its permissions, or fetch the file again"
            )
        if not len(self):
            self._refuse(
                "holds no record; expected one JSON object per line, or an array of objects"
            )

    def __len__(self) -> int:
        return int(self._starts.size)

    @overload
    def __getitem__(self, index: int) -> dict[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, object]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, object] | list[dict[str, object]]:
        """Record `index`, parsed anew at each call.

        Raises:
            BadRecordError: the record is not valid JSON, UTF-8, or an object, or too large.
            IndexError: no such record.
            DataFileError: the file changed since it was indexed, or cannot be read any more.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = self._position(index)
        try:
            return self._record(int(self._starts[i]), int(self._ends[i]))
        except JsonTextError as error:
            raise BadRecordError(path=self.path, line=self.line(i), reason=str(error)) from error

    def line(self, index: int) -> int:
        """1-based line of record `index` (JSONL), or its 1-based number (array)."""
        i = self._position(index)
        return i + 1 if self._lines is None else int(self._lines[i]) + 1

    def num_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each record, int64 [N]."""
        return self._ends - self._starts

    def fingerprint(self) -> str:
        """Digest of the file's size and its first and last 64 KiB; the same for any copy of it."""
        digest = hashlib.sha256(str(self._size).encode())
        with open(self.path, "rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, self._size - _FINGERPRINT_BYTES))
            digest.update(file.read(_FINGERPRINT_BYTES))
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, object]:
        """Leave the open file behind, and of a gzipped file its bytes: both are opened again."""
        state = {**self.__dict__, "_file": None}
        state["_bytes"] = None
        if self._index_file:  # mapped again
            state["_starts"] = state["_ends"] = state["_lines"] = None
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Map the index again, where it is in a file."""
        self.__dict__.update(state)
        if self._index_file:
            self._starts, self._ends, *lines = np.load(
                self._index_file, mmap_mode="r", allow_pickle=False
            )
            self._lines = lines[0] if lines else None

    def _record(self, start: int, end: int) -> dict[str, object]:
        if end - start > MAX_RECORD_BYTES:
            raise JsonTextError(
                f"has {end - start} bytes; a record is read up to {MAX_RECORD_BYTES} "
                f"({MAX_RECORD_BYTES >> 20} MiB): split it"
            )
        record = strict_json(self._read(start, end))
        if not isinstance(record, dict):
            raise JsonTextError(
                f"is a JSON {type(record).__name__}; expected an object with named columns"
            )
        return record

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"{self.path} {reason}")

    def _position(self, index: int) -> int:
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"record {i} of {self.path}, which holds {len(self)}")
        return i % len(self)

    def _index(self, *, may_be_array: bool) -> None:
        with self._open() as file:
            skip = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(skip)
            is_array = may_be_array and _first_byte(file) == b"["
            file.seek(0)
            data = self._whole(file) if is_array or self._is_gzip else None
            self._bytes = data if self._is_gzip else None
            self._lines = None
            if is_array and data is not None:
                self._starts, self._ends = self._array_index(data, skip)
                return
            if data is None and self._cache is not None and self._load_index():
                return
            source = file if data is None else io.BytesIO(data)
            source.seek(skip)
            self._starts, self._ends, self._lines = _line_index(source, skip)
        if data is None and self._cache is not None:
            self._save_index(self._cache)

    def _index_path(self) -> str:
        status = f"{os.path.realpath(self.path)} {self._size} {self._changed_ns}"
        name = hashlib.sha256(status.encode()).hexdigest()[:24]
        return os.path.join(self._cache or "", f"odb-lines-{name}.npy")

    def _load_index(self) -> bool:
        """Map a saved index; return whether there is one."""
        try:
            self._starts, self._ends, *lines = np.load(
                self._index_path(), mmap_mode="r", allow_pickle=False
            )
        except (OSError, ValueError):
            return False
        self._lines, self._index_file = lines[0] if lines else None, self._index_path()
        return True

    def _save_index(self, cache: str) -> None:
        """Save the index and map it; it stays in memory where it cannot be saved."""
        parts = [self._starts, self._ends, *([] if self._lines is None else [self._lines])]
        path = self._index_path()
        part = f"{path}.{os.getpid()}.part"
        with contextlib.suppress(OSError):
            os.makedirs(cache, exist_ok=True)
            with open(part, "wb") as file:
                np.save(file, np.stack(parts))
            os.replace(part, path)
            self._load_index()

    def _whole(self, file: BinaryIO) -> bytes:
        """Return the (decompressed) content from the file's position on."""
        parts, num_bytes = [], 0
        while part := file.read(_CHUNK_BYTES):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > MAX_HELD_BYTES:
                kind = "unpacks to" if self._is_gzip else "is an array of"
                way_out = "gunzip it" if self._is_gzip else "write one object per line, as .jsonl"
                self._refuse(
                    f"{kind} more than {MAX_HELD_BYTES >> 20} MiB, which are held in memory: "
                    f"{way_out}, or split it"
                )
        return b"".join(parts)

    def _array_index(self, data: bytes, skip: int) -> tuple[_Places, _Places]:
        start = skip
        while data[start] in _BLANK:
            start += 1
        try:
            edges = np.fromiter(array_spans(data, start), dtype=np.dtype((np.int64, 2)))
        except JsonArrayError as error:
            line = data.count(b"\n", 0, error.at) + 1
            column = error.at - (data.rfind(b"\n", 0, error.at) + 1) + 1
            self._refuse(
                f"starts with '[' but is no JSON array: {error} at line {line}, byte {column}; "
                "mend it there, or write one object per line and name the file .jsonl"
            )
        return np.ascontiguousarray(edges[:, 0]), np.ascontiguousarray(edges[:, 1])

    def _open(self) -> BinaryIO:
        return gzip.open(self.path, "rb") if self._is_gzip else open(self.path, "rb", buffering=0)  # type: ignore[return-value]

    def _read(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the (decompressed) file."""
        try:
            if self._is_gzip:
                if self._bytes is None:  # a pickled copy
                    with self._open() as file:
                        self._check(os.stat(self.path))
                        self._bytes = self._whole(file)
                return self._bytes[start:end]
            if self._file is None or self._file[0] != os.getpid():
                self._file = (os.getpid(), self._open())
            number = self._file[1].fileno()
            self._check(os.fstat(number))
            data = os.pread(number, end - start, start)
            while len(data) < end - start:
                part = os.pread(number, end - start - len(data), start + len(data))
                if not part:
                    self._refuse_changed(start + len(data))
                data += part
            return data
        except (OSError, EOFError, zlib.error) as error:
            raise DataFileError(
                f"{self.path} cannot be read any more ({error}): see that every node can read it, "
                "and start the run again"
            ) from error

    def _check(self, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != (self._size, self._changed_ns):
            self._refuse_changed(status.st_size)

    def _refuse_changed(self, size: int) -> NoReturn:
        # No ValueError: it is not a bad record, and no policy may leave it out.
        raise DataFileError(
            f"{self.path} changed while in use: it had {self._size} bytes when it was indexed and "
            f"has {size} now, or was written to; leave data files alone during a run, and start "
            "the run again"
        )


def _first_byte(file: BinaryIO) -> bytes:
    while chunk := file.read(_FINGERPRINT_BYTES):
        if stripped := chunk.lstrip(_BLANK):
            return stripped[:1]
    return b""


def _line_index(file: BinaryIO, position: int) -> tuple[_Places, _Places, _Places | None]:
    """Start, end (without the newline) and 0-based number of every line that is not blank.

    From the file's position on, which is given; numbers are None where no line is blank. Blank
    lines are dropped while the file is scanned, so that they take no memory.
    """
    starts, ends, lines = [], [], []
    buffer = bytearray(_CHUNK_BYTES)
    num_lines, open_start, open_has_text = 0, position, False
    while size := file.readinto(buffer):  # type: ignore[attr-defined]
        chunk = np.frombuffer(buffer, dtype=np.uint8, count=size)
        newlines = np.flatnonzero(chunk == ord("\n"))
        heads = np.concatenate(([0], newlines + 1))
        begun = heads[heads < size]  # a line that begins at the chunk's end has no byte in it yet
        has_text = np.zeros(len(heads), dtype=np.bool_)
        has_text[: len(begun)] = np.logical_or.reduceat(_IS_TEXT[chunk], begun)
        has_text[0] |= open_has_text
        begins = heads + position
        begins[0] = open_start
        keep = np.flatnonzero(has_text[:-1])
        starts.append(begins[keep])
        ends.append(newlines[keep] + position)
        lines.append(keep + num_lines)
        num_lines += len(newlines)
        open_start, open_has_text = int(begins[-1]), bool(has_text[-1])
        position += size
    if open_has_text:
        starts.append(np.array([open_start]))
        ends.append(np.array([position]))
        lines.append(np.array([num_lines]))
    if not starts:
        return np.empty(0, np.int64), np.empty(0, np.int64), None
    numbers = _joined(lines)
    is_gapless = not numbers.size or int(numbers[-1]) == numbers.size - 1
    return _joined(starts), _joined(ends), None if is_gapless else numbers


def _joined(parts: list[_Places]) -> _Places:
    """Concatenate, and let go of the parts."""
    whole = np.concatenate(parts)
    parts.clear()
    return whole
