"""Command blocks of the README and the quickstart, for the tests that run them."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["QUICKSTART", "README", "command", "commands"]

README = Path(__file__).resolve().parents[1] / "README.md"
QUICKSTART = README.parent / "docs" / "quickstart.md"

_PROGRAMS = ("make", "odb-megatron", "torchrun", "sbatch", "python", ".venv/bin/python", ".ci/run")


def command(*words: str, page: Path = README) -> list[str]:
    """Return the words of the one command that has all of these, without a last `...`."""
    (found,) = [block for block in commands(page) if set(words) <= set(block)]
    return found[:-1] if found[-1] == "..." else found


def commands(page: Path) -> list[list[str]]:
    """Return the words of every command of a page: lines of code that begin with a program."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    found = [_split(line) for line in lines if not line.startswith("     ")]
    return [words for words in found if words and words[0] in _PROGRAMS]


def _split(block: str) -> list[str]:
    try:
        return shlex.split(block.replace("\\\n", " "), comments=True)
    except ValueError:  # no command
        return []
