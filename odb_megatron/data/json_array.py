"""Where the elements of a JSON array lie, without parsing them.

Pure. Must not build the elements: one of them may be as large as the file. What an element holds
is looked at when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["JsonArrayError", "array_spans"]

_OUTSIDE = re.compile(rb'[\[\]{},"]')
_INSIDE = re.compile(rb'[\[\]{}"]')
_TEXT = re.compile(rb"[^ \t\r\n]")
_BACKSLASH = ord("\\")


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
    at = begin = start + 1
    depth, closed, is_first = 1, -1, True
    while True:
        found = (_OUTSIDE if depth == 1 else _INSIDE).search(data, at)
        if found is None:
            inside = "the array" if depth == 1 else "an element"
            raise JsonArrayError(f"the file ends inside {inside}: expecting ',' or ']'", len(data))
        byte, here, at = found.group(), found.start(), found.end()
        if byte == b'"':
            at = _string_end(data, at)
        elif byte in b"[{":
            if depth == 1 and (before := _TEXT.search(data, begin, here)) is not None:
                raise JsonArrayError("expecting ',' or ']'", here if closed >= 0 else before.end())
            depth += 1
        elif depth > 1:  # ] or }; which of them is looked at when the element is read
            depth -= 1
            closed = at if depth == 1 else -1
        else:
            if byte == b"}":
                raise JsonArrayError("expecting ',' or ']'", here)
            first = _TEXT.search(data, begin, here)
            if first is None and (byte == b"," or not is_first):
                raise JsonArrayError("expecting a value", here)
            if closed >= 0 and (after := _TEXT.search(data, closed, here)) is not None:
                raise JsonArrayError("expecting ',' or ']'", after.start())
            if first is not None:
                end = here
                while data[end - 1] in b" \t\r\n":
                    end -= 1
                yield first.start(), end
            begin, closed, is_first = at, -1, False
            if byte == b"]":
                break
    if (rest := _TEXT.search(data, at)) is not None:
        raise JsonArrayError("there is text after the array", rest.start())


def _string_end(data: bytes, at: int) -> int:
    """Place behind the quote that ends a string; `at` is behind the one that begins it."""
    first = at
    while True:
        quote = data.find(b'"', at)
        if quote < 0:
            raise JsonArrayError("the file ends inside a string", len(data))
        back = quote
        while back > first and data[back - 1] == _BACKSLASH:
            back -= 1
        at = quote + 1
        if (quote - back) % 2 == 0:
            return at
