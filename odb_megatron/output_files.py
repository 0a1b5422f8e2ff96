"""Files that a command is to write: refused before the work where they could not be written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["check_output", "write_json", "write_output"]


def check_output(flag: str, value: str) -> None:
    """Refuse a file that cannot be written.

    Args:
        flag: that names it.
        value: its path.

    Raises:
        ValueError: it is a folder, or has none, or cannot be opened for writing.
    """
    if not value:
        raise ValueError(f"{flag} '' names no file: give a name, or drop it")
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{flag} {value} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {value}: there is no folder {str(path.parent)!r}; make it first")
    is_there = path.exists()
    if is_there and not path.is_file():  # a pipe, a device: opening one may wait, or be heard
        if not os.access(path, os.W_OK):
            raise ValueError(f"{flag} {value} cannot be written: name another file")
        return
    try:
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {value} cannot be written ({error.strerror}): name another file"
        ) from error


def write_output(flag: str, value: str, text: str) -> None:
    """Write a file that `check_output` has passed.

    Raises:
        ValueError: it cannot be written any more.
    """
    try:
        Path(value).write_text(text, encoding="utf-8")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"{flag} {value} could not be written: {error.strerror}") from error


def write_json(value: str | None, report: dict[str, Any]) -> None:
    """Write what `--json` asks for: nothing, to standard output for `-`, or to a file.

    Raises:
        ValueError: as `write_output`.
    """
    text = json.dumps(report, indent=1) + "\n"
    if value == "-":
        print(text, end="")
    elif value:
        write_output("--json", value, text)
