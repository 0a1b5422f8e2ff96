"""How a run ends whose flags cannot be used: one message, exit code 2, no traceback.

Must not decide what can be used.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from odb_megatron.elastic import USAGE_ERROR, leave_reason

__all__ = ["raise_usage_errors", "usage_errors", "usage_reason"]

_HOST = "/megatron/"  # in the path of a file of Megatron's
_OWN = "/odb_megatron/"


@contextmanager
def usage_errors() -> Iterator[None]:
    """End the process where the flags cannot be used.

    The launcher prints the reason of one rank; without one this rank prints it.

    Raises:
        SystemExit: for a ValueError, and for what Megatron refuses by other errors (2).
    """
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as error:
        text = usage_reason(error)
        if text is None:
            raise
        if not leave_reason(text, code=USAGE_ERROR):
            print(f"odb: error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from error


def raise_usage_errors(parser: argparse.ArgumentParser) -> None:
    """Let a parser raise ValueError where it would print its usage, which is Megatron's, and exit.

    Flags that are not known come with the one they resemble most.
    """

    def error(message: str) -> NoReturn:
        raise ValueError(message + _hint(message, parser))

    setattr(parser, "error", error)  # noqa: B010  # the parser is made by Megatron


def _hint(message: str, parser: argparse.ArgumentParser) -> str:
    if not message.startswith("unrecognized arguments"):
        return ""
    known = list(parser._option_string_actions)
    unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    similar = [difflib.get_close_matches(word, known, n=1, cutoff=0.75) for word in unknown]
    names = [name for found in similar for name in found]
    if names:
        return f": did you mean {' and '.join(names)}? (--help lists all flags)"
    return ": --help lists all flags"


def usage_reason(error: Exception) -> str | None:
    """Return an error's text; None for one that neither names what to mend nor is Megatron's."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = frame.filename.rpartition("/site-packages/")[2]
    if _HOST not in f"/{path}" or _OWN in f"/{path}":
        return None
    where = f"{path} {frame.lineno}"
    if str(error):
        return f"Megatron refuses the flags: {error} ({where})"
    return f"Megatron refuses the flags: {frame.line} ({where})"
