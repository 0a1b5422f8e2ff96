"""Looks a Megatron `.idx` file over before it is used: nothing in it is taken on trust.

Must not open the `.bin` file nor allocate by what the header says: counts are held against the
file's size first, and the tables are looked at in pieces. Layout as `_IndexWriter` has it
(indexed_dataset.py, megatron-core 0.19.2).
"""

from __future__ import annotations

import os
import stat
import struct

import numpy as np

__all__ = ["check_index"]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes of a token, by dtype code: the integers."""
_FLOATS = (6, 7)
_PIECE = 1 << 20


def check_index(prefix: str) -> None:
    """Raise unless `prefix.idx` describes documents that lie inside `prefix.bin`.

    Raises:
        ValueError: says what is wrong; to be continued by what to do.
        OSError: a file is missing or cannot be read.
    """
    for name in (f"{prefix}.idx", f"{prefix}.bin"):
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ValueError(f"{name} is no regular file")
    size, num_bytes = os.path.getsize(f"{prefix}.idx"), os.path.getsize(f"{prefix}.bin")
    with open(f"{prefix}.idx", "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        seen = f"{len(header)} bytes" if header.startswith(_MAGIC) else repr(header[:9])
        raise ValueError(f"bad header: {seen}")
    _, version, code, num_sequences, num_ends = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"bad version {version}; expected 1")
    if code not in _WIDTHS:
        kind = "floating-point tokens" if code in _FLOATS else "unknown"
        raise ValueError(f"{code} is not a valid DType of token ids ({kind})")
    needed = _HEADER.size + 12 * num_sequences + 8 * num_ends
    if size < needed:
        raise ValueError(
            f"it has {size} bytes, but its header counts {num_sequences} sequences and {num_ends} "
            f"document ends, which take {needed}: cut short, or a damaged index"
        )
    if num_ends < 1 or num_sequences < 1:
        raise ValueError(f"damaged index: {num_sequences} sequences, {num_ends} document ends")
    table = np.memmap(f"{prefix}.idx", mode="r", dtype=np.uint8)
    try:
        _check_tables(table, num_sequences, num_ends, width=_WIDTHS[code], num_bytes=num_bytes)
    finally:
        del table


def _check_tables(
    table: np.memmap[tuple[int, ...], np.dtype[np.uint8]],
    num_sequences: int,
    num_ends: int,
    *,
    width: int,
    num_bytes: int,
) -> None:
    first = _HEADER.size
    lengths = np.frombuffer(table, "<i4", num_sequences, first)
    starts = np.frombuffer(table, "<i8", num_sequences, first + 4 * num_sequences)
    ends = np.frombuffer(table, "<i8", num_ends, first + 12 * num_sequences)
    for at in range(0, num_sequences, _PIECE):
        length = lengths[at : at + _PIECE].astype(np.int64)
        start = starts[at : at + _PIECE]
        if (bad := np.flatnonzero((length < 0) | (start < 0))).size:
            raise ValueError(
                f"damaged index: sequence {at + bad[0]} has {length[bad[0]]} tokens at byte "
                f"{start[bad[0]]}"
            )
        if (bad := np.flatnonzero(start > num_bytes - width * length)).size:
            worst = int(bad[np.argmax(start[bad])])
            raise _OutsideError(num_bytes, int(start[worst]) + width * int(length[worst]))
    if int(ends[0]) != 0 or int(ends[-1]) != num_sequences:
        raise ValueError(
            f"damaged index: documents run from sequence {ends[0]} to {ends[-1]}; expected 0 to "
            f"{num_sequences}"
        )
    for at in range(0, num_ends - 1, _PIECE):
        falls = np.flatnonzero(np.diff(ends[at : at + _PIECE + 1]) < 0)
        if falls.size:
            raise ValueError(
                f"damaged index: document {at + falls[0]} ends before it begins (sequence "
                f"{ends[at + falls[0] + 1]} after {ends[at + falls[0]]})"
            )


class _OutsideError(ValueError):
    """Tokens lie behind the end of the `.bin` file."""

    def __init__(self, num_bytes: int, needed: int) -> None:
        super().__init__(
            f"the .bin file has {num_bytes} bytes, the index needs {needed}: the file is cut "
            "short; copy or write it again"
        )
