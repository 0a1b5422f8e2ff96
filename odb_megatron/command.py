"""What the commands share: their arguments, and what is refused before the work and written after.

A command is a parser and a function of its options that returns a `Report`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_megatron.elastic import USAGE_ERROR

__all__ = ["Column", "Report", "aligned", "check_output", "need_pages", "new_parser", "rows_of"]
__all__ += ["run_command", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a command found.

    Attributes:
        values: the JSON.
        text: what is printed.
        write_page: writes the page for `--html` to a path.
        exit_code: of the command.
        refused: why not all that was asked for is there: printed last, with exit code 2.
    """

    values: Any
    text: str
    write_page: Callable[[str], None] | None = None
    exit_code: int = 0
    refused: str = ""


def new_parser(name: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """Return the parser of a command, with `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"odb-megatron {name}", description=description, allow_abbrev=False, **more
    )
    figures = (
        "write the figures as JSON; - is standard output, the text then goes to standard error"
    )
    parser.add_argument("--json", metavar="FILE", help=figures)
    return parser


def run_command(
    parser: argparse.ArgumentParser, argv: list[str], work: Callable[[argparse.Namespace], Report]
) -> int:
    """Parse, check the output files, work, print, write; return the exit code.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    options = parser.parse_args(argv)
    try:
        _check_outputs(options)
        report = work(options)
        print(report.text, file=sys.stderr if options.json == "-" else sys.stdout)
        if options.json:
            values = report.values
            text = values if isinstance(values, str) else json.dumps(values, indent=1) + "\n"
            if options.json == "-":
                sys.stdout.write(text)
            else:
                Path(options.json).write_text(text, encoding="utf-8")
        if report.write_page is not None and options.html:
            report.write_page(options.html)
        if report.refused:
            raise ValueError(report.refused)
    except BrokenPipeError:
        raise  # the reader of the output has left: no argument is to blame
    except (ValueError, OSError) as error:
        parser.exit(USAGE_ERROR, f"{parser.prog}: error: {error}\n")
    return report.exit_code


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse what cannot be written after the work, or would overwrite what it reads."""
    given = vars(options)
    for name in ("json", "html"):
        value = given.get(name)
        if value is None or (name, value) == ("json", "-"):
            continue
        check_output(f"--{name}", value)
        for other, values in given.items():
            named = values if isinstance(values, list) else [values]
            paths = [one for one in named if isinstance(one, str)]
            paths = [one.removeprefix("file:").partition("#")[0] for one in paths]
            if other != name and os.path.realpath(value) in map(os.path.realpath, paths):
                raise ValueError(
                    f"--{name} {value} would overwrite what {other} names: name another file"
                )
        if name == "html":
            need_pages("--html")


def check_output(flag: str, value: str) -> None:
    """Refuse a file that cannot be written; what is there stays as it is.

    Raises:
        ValueError: it cannot be opened for writing.
    """
    if value == "-":
        raise ValueError(f"{flag} - : it goes to a file, name one")
    path, is_there = Path(value), os.path.exists(value)
    if is_there and not path.is_file() and not path.is_dir():
        return  # a pipe, a device: opening one may wait, or be heard
    try:
        with open(value, "ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {value} cannot be written ({error.strerror}): name a file in a folder that "
            "is there and yours"
        ) from error


def need_pages(purpose: str) -> None:
    """Refuse early what needs a package that is missing.

    Raises:
        ValueError: matplotlib or jinja2 is not installed.
    """
    for name in ("matplotlib", "jinja2"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{purpose} needs {name}, which is not installed: pip install 'odb-megatron[pages]'"
            ) from error


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return value

    return parse


# --- tables ----------------------------------------------------------------------------------

Column = tuple[str, str, str]
"""Its head, the key of a figure, and the format."""


def rows_of(
    columns: Sequence[Column], named: Iterable[tuple[str, Mapping[str, Any]]], head: str
) -> list[list[str]]:
    """Return a table's head, and a row for each of the named figures; - where one is not known."""
    rows = [[head, *(title for title, _, _ in columns)]]
    for name, figures in named:
        values = [(figures.get(key), spec) for _, key, spec in columns]
        rows.append(
            [name, *("-" if value is None else f"{value:{spec}}" for value, spec in values)]
        )
    return rows


def aligned(rows: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """Return a table as text: the first columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if at < names else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
