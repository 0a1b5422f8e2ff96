"""Types of the benchmarks' flags: what cannot be used is refused before anything is measured.

Must not import torch or Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["data_name", "output_file", "whole"]

_NAMED_DATA = ("chitchat", "chat-mix")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return value

    return parse


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written; its folder is made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error}") from None
    return path


def data_name(text: str) -> str:
    """An argparse type: the name of data that is prepared, or a file."""
    if text not in _NAMED_DATA and not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {' nor '.join(_NAMED_DATA)} nor a file"
        )
    return text
