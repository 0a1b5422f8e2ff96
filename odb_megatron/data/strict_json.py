"""JSON text from files that are not trusted: what is no plain JSON, or ambiguous, is an error.

Pure. Must not know what a value means, nor read files: who calls bounds the size of the text.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

__all__ = ["JsonTextError", "strict_json"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_SHOWN = 40


class JsonTextError(ValueError):
    """Why a text is refused, as the end of a sentence that begins with its name."""


def strict_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Python's parser takes NaN, infinities, numbers that overflow, half surrogate pairs and keys that
    occur twice (of which the last counts); here they are errors. Nesting ends where that parser
    refuses to go deeper: some thousand levels.

    Raises:
        JsonTextError: the text is not UTF-8 or no such JSON.
    """
    if b"\0" in data:
        raise JsonTextError(
            f"holds a NUL byte at column {data.index(0) + 1} (a damaged or sparse file?)"
        )
    try:
        value = json.loads(
            data.decode(),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repeats,
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        ends = " (do its lines end in CR alone? convert them)" if b"\r" in data.strip() else ""
        raise JsonTextError(
            f"is not valid JSON: {error.msg} at column {error.pos + 1}{ends}"
        ) from error
    except UnicodeDecodeError as error:
        raise JsonTextError(
            f"is not UTF-8: byte 0x{data[error.start]:02x} at column {error.start + 1}"
        ) from error
    except UnicodeEncodeError as error:
        raise JsonTextError("holds half of a \\u surrogate pair, which is no character") from error
    except RecursionError as error:
        raise JsonTextError("is nested too deeply to parse") from error
    except JsonTextError:
        raise
    except ValueError as error:  # int() refuses more than sys.get_int_max_str_digits() digits
        raise JsonTextError(f"holds a number that cannot be read: {error}") from error
    return value


def _no_constant(name: str) -> NoReturn:
    raise JsonTextError(f"holds {name}, which is not JSON; write null or leave the column out")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonTextError(
            f"holds the number {digits[:_MAX_SHOWN]}, which is too large for a float"
        )
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonTextError(
            f"has the key {twice[:_MAX_SHOWN]!r} twice in one object; keep one of them"
        )
    return value
