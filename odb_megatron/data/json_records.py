"""Random access to the records of a `.jsonl` or `.json` file, plain or gzipped.

Must not interpret a record (that is `chat_record`), keep a JSONL file in memory, or share an open
file between processes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import operator
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, overload

import numpy as np
import numpy.typing as npt

from odb_megatron.data.sample import BadRecordError

__all__ = ["JSON_ENDINGS", "JsonRecords", "is_json_path"]

_CHUNK_BYTES = 16 << 20
_FINGERPRINT_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACES = re.compile(r"[ \t\r\n]*")


def is_json_path(path: str) -> bool:
    """Whether a path ends like a JSON or JSONL file, in capitals or not."""
    return path.lower().endswith(JSON_ENDINGS)


class JsonRecords(Sequence[dict[str, object]]):
    """The records of one file, in file order.

    A `.jsonl` file holds one JSON object per line; blank lines are no records. A `.json` file is an
    array of objects when its first non-blank byte is `[`, and JSONL otherwise. JSONL is indexed
    once (24 bytes per record at most) and read by position; a gzipped file, or an array, is held as
    bytes in memory.

    A copy may be pickled or forked: each process opens the file itself, and refuses it if its size
    changed.

    Args:
        path: the file.

    Raises:
        ValueError: the file is missing, unreadable, without a record, or an array that does not
            parse.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._is_array = False
        self._bytes: bytes | None = None
        self._file: tuple[int, BinaryIO] | None = None
        name = Path(path).name.lower()
        try:
            self._size = os.stat(path).st_size
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
            BadRecordError: the record is not valid JSON, UTF-8, or an object.
            IndexError: no such record.
            RuntimeError: the file changed since it was indexed.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = self._position(index)
        try:
            return _parse_object(self._read(int(self._starts[i]), int(self._ends[i])))
        except _RecordError as error:
            raise BadRecordError(path=self.path, line=self.line(i), reason=str(error)) from error

    def line(self, index: int) -> int:
        """1-based line of record `index` (JSONL), or its 1-based number (array)."""
        i = self._position(index)
        return i + 1 if self._lines is None else int(self._lines[i]) + 1

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
        if self._is_gzip or self._is_array:
            state["_bytes"] = None
        return state

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
            if is_array or self._is_gzip:
                self._bytes = file.read()
            if is_array:
                self._is_array = True
                self._starts, self._ends = self._array_index(self._bytes or b"", skip)
                self._lines: npt.NDArray[np.int64] | None = None
                return
            source = file if self._bytes is None else io.BytesIO(self._bytes)
            source.seek(skip)
            starts, ends, first = _line_index(source, skip)
        keep = first != ord("\n")
        for i in np.flatnonzero(np.isin(first, list(b" \t\r"))):
            keep[i] = bool(self._read(int(starts[i]), int(ends[i])).strip(_BLANK))
        self._starts, self._ends = starts[keep], ends[keep]
        self._lines = None if keep.all() else np.flatnonzero(keep)

    def _array_index(
        self, data: bytes, skip: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        try:
            spans = list(_array_spans(data[skip:].decode()))
        except UnicodeDecodeError as error:
            self._refuse(
                f"is not UTF-8: byte {skip + error.start} is 0x{data[skip + error.start]:02x}; "
                "convert it to UTF-8"
            )
        except json.JSONDecodeError as error:
            self._refuse(
                f"starts with '[' but is no JSON array: {error.msg} at line {error.lineno}, "
                f"column {error.colno}; mend it there, or write one object per line and name the "
                "file .jsonl"
            )
        except RecursionError:
            self._refuse(
                "is nested too deeply to parse; flatten the record, or write one per line as .jsonl"
            )
        edges = np.array(spans, dtype=np.int64).reshape(-1, 2) + skip
        return edges[:, 0], edges[:, 1]

    def _open(self) -> BinaryIO:
        return gzip.open(self.path, "rb") if self._is_gzip else open(self.path, "rb", buffering=0)  # type: ignore[return-value]

    def _read(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the (decompressed) file."""
        if self._is_gzip or self._is_array:
            if self._bytes is None:  # a pickled copy
                self._check_size()
                with self._open() as file:
                    self._bytes = file.read()
            return self._bytes[start:end]
        if self._file is None or self._file[0] != os.getpid():
            self._check_size()
            self._file = (os.getpid(), self._open())
        data = bytearray()
        while len(data) < end - start:
            part = os.pread(self._file[1].fileno(), end - start - len(data), start + len(data))
            if not part:
                self._refuse_changed(start + len(data))
            data += part
        return bytes(data)

    def _check_size(self) -> None:
        size = os.stat(self.path).st_size
        if size != self._size:
            self._refuse_changed(size)

    def _refuse_changed(self, size: int) -> NoReturn:
        # No ValueError: it is not a bad record, and no policy may leave it out.
        raise RuntimeError(
            f"{self.path} changed while in use: it had {self._size} bytes when it was indexed and "
            f"has {size} now; leave data files alone during a run, and start the run again"
        )


class _RecordError(ValueError):
    """Why a record cannot be parsed."""


def _first_byte(file: BinaryIO) -> bytes:
    while chunk := file.read(_FINGERPRINT_BYTES):
        if stripped := chunk.lstrip(_BLANK):
            return stripped[:1]
    return b""


def _line_index(
    file: BinaryIO, position: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Start, end (without the newline) and first byte of every line from the file's position on."""
    starts: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    ends: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    first: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    buffer = bytearray(_CHUNK_BYTES)
    at_line_start = True
    while size := file.readinto(buffer):  # type: ignore[attr-defined]
        chunk = np.frombuffer(buffer, dtype=np.uint8, count=size)
        newlines = np.flatnonzero(chunk == ord("\n")).astype(np.int64)
        heads = np.concatenate([np.zeros(int(at_line_start), np.int64), newlines + 1])
        at_line_start = bool(heads.size) and int(heads[-1]) == size
        heads = heads[:-1] if at_line_start else heads
        starts.append(heads + position)
        first.append(chunk[heads])
        ends.append(newlines + position)
        position += size
    if not at_line_start:
        ends.append(np.array([position], np.int64))
    return np.concatenate(starts), np.concatenate(ends), np.concatenate(first)


def _array_spans(text: str) -> Iterator[tuple[int, int]]:
    """Byte span of each element of a JSON array; elements are only checked for their extent."""
    scan = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len).raw_decode
    at = _skip_spaces(text, _skip_spaces(text, 0) + 1)
    num_bytes, counted = 0, 0
    if text[at : at + 1] == "]":
        at += 1
    else:
        while True:
            _, end = scan(text, at)
            start_byte = num_bytes + len(text[counted:at].encode())
            num_bytes, counted = start_byte + len(text[at:end].encode()), end
            yield start_byte, num_bytes
            at = _skip_spaces(text, end)
            separator = text[at : at + 1]
            at += 1
            if separator == "]":
                break
            if separator != ",":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at - 1)
            at = _skip_spaces(text, at)
    if _skip_spaces(text, at) != len(text):
        raise json.JSONDecodeError("Text after the array", text, _skip_spaces(text, at))


def _skip_spaces(text: str, at: int) -> int:
    match = _SPACES.match(text, at)
    assert match is not None
    return match.end()


def _parse_object(data: bytes) -> dict[str, object]:
    if b"\0" in data:
        raise _RecordError(
            f"holds a NUL byte at column {data.index(0) + 1} (a damaged or sparse file?)"
        )
    try:
        record = json.loads(data.decode(), parse_constant=_no_constant, parse_float=_finite)
        if _SURROGATE.search(data):
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _RecordError(
            f"is not valid JSON: {error.msg} at column {error.pos + 1}; expected one JSON object"
        ) from error
    except UnicodeDecodeError as error:
        raise _RecordError(
            f"is not UTF-8: byte 0x{data[error.start]:02x} at column {error.start + 1}"
        ) from error
    except UnicodeEncodeError as error:
        raise _RecordError("holds half of a \\u surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _RecordError("is nested too deeply to parse") from error
    except _RecordError:
        raise
    except ValueError as error:  # int() refuses more than sys.get_int_max_str_digits() digits
        raise _RecordError(f"holds a number that cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise _RecordError(
            f"is a JSON {type(record).__name__}; expected an object with named columns"
        )
    return record


def _no_constant(name: str) -> NoReturn:
    raise _RecordError(f"holds {name}, which is not JSON; write null or leave the column out")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RecordError(f"holds the number {digits[:40]}, which is too large for a float")
    return value
