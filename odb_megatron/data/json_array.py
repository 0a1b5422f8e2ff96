"""Where the elements of a JSON array lie, without parsing them.

Pure. Must not build the elements: one of them may be as large as the file. What an element holds
is looked at when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["JsonArrayError", "array_spans"]

_PIECE_BYTES = 1 << 20
_TEXT = re.compile(rb"[^ \t\r\n]")
_BLANK = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_DELTA = np.zeros(256, dtype=np.int32)
_DELTA[list(b"[{")] = 1
_DELTA[list(b"]}")] = -1


class JsonArrayError(ValueError):
    """Where a text stops being an array of elements.

    Attributes:
        at: byte of the text.
    """

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


def array_spans(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each element.

    Args:
        data: the text.
        start: where its `[` is.

    Raises:
        JsonArrayError: brackets or commas that are no array's.
    """
    begin, closed, is_first = start + 1, -1, True
    for here, byte in _outer_marks(data, start):
        if byte in b"[{":
            if (before := _TEXT.search(data, begin, here)) is not None:
                raise JsonArrayError(_NO_COMMA, here if closed >= 0 else before.end())
            continue
        if byte in b"]}" and here < 0:  # ends an element; whether in kind is looked at when read
            closed = ~here + 1
            continue
        here = ~here if here < 0 else here
        if byte == b"}":
            raise JsonArrayError(_NO_COMMA, here)
        first = _TEXT.search(data, begin, here)
        if first is None and (byte == b"," or not is_first):
            raise JsonArrayError("expecting a value", here)
        if closed >= 0 and (after := _TEXT.search(data, closed, here)) is not None:
            raise JsonArrayError(_NO_COMMA, after.start())
        if first is not None:
            end = here
            while data[end - 1] in _BLANK:
                end -= 1
            yield first.start(), end
        begin, closed, is_first = here + 1, -1, False
        if byte == b"]":
            break
    if (rest := _TEXT.search(data, begin)) is not None:
        raise JsonArrayError("there is text after the array", rest.start())


_NO_COMMA = "expecting ',' or ']'"


def _outer_marks(data: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the brackets and commas around the elements, up to the one that ends the array.

    A place is given as `~place` where the bracket ends an element.
    """
    depth, in_string, run = 1, 0, 0  # run: backslashes right before the piece
    for at in range(start + 1, len(data), _PIECE_BYTES):
        piece = np.frombuffer(data, np.uint8, min(_PIECE_BYTES, len(data) - at), at)
        ends, run = _string_ends(piece, run)
        strings = (np.cumsum(ends, dtype=np.int32) + in_string) & 1
        in_string = int(strings[-1])
        delta = _DELTA[piece]
        delta[strings == 1] = 0
        depths = np.cumsum(delta, dtype=np.int32) + np.int32(depth)
        depth = int(depths[-1])
        is_outer = (delta > 0) & (depths == 2)
        is_outer |= (delta < 0) & (depths <= 1)
        is_outer |= (piece == _COMMA) & (strings == 0) & (depths == 1)
        for place in np.flatnonzero(is_outer).tolist():
            whole, level = at + place, int(depths[place])
            byte = data[whole : whole + 1]
            yield (~whole if byte in b"]}" and level == 1 else whole), byte
            if level <= 0:
                return
    inside = "a string" if in_string else "the array" if depth == 1 else "an element"
    raise JsonArrayError(f"the file ends inside {inside}: {_NO_COMMA}", len(data))


def _string_ends(piece: npt.NDArray[np.uint8], run: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Return which bytes are quotes that begin or end a string, and the backslashes at the end.

    Args:
        piece: bytes.
        run: backslashes right before them.
    """
    places = np.arange(len(piece), dtype=np.int32)
    others = np.where(piece != _BACKSLASH, places, np.int32(-1 - run))
    last = np.maximum.accumulate(others)  # the last byte up to each that is no backslash
    before = np.concatenate(([np.int32(-1 - run)], last[:-1]))
    is_escaped = (places - before - 1) & 1 == 1
    return (piece == _QUOTE) & ~is_escaped, len(piece) - 1 - int(last[-1])
