"""Options of a program before the words that it starts: where they end, and what they say.

Pure. Must not guess: an option whose words cannot be told is refused by name, since the next word
might be its value, or the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Options", "split_options"]

_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a program, as they are written: `-N`, `--nodes`.

    Attributes:
        values: those with a value: `-N 2`, `-N2`, `--nodes 2`, `--nodes=2`.
        flags: those without one.
        attached: those whose value, if any, is in the same word: `-K0`, `--exclusive=user`.
        last: those behind which no other follows, in place of what is started (`python -m`).
        refused: those with which nothing can be told, and why.
        has_plugins: whether others may come from elsewhere: a long one with `=` is one word then.
    """

    values: frozenset[str] = _NONE
    flags: frozenset[str] = _NONE
    attached: frozenset[str] = _NONE
    last: frozenset[str] = _NONE
    refused: dict[str, str] | None = None
    has_plugins: bool = False


def split_options(
    program: str, words: Sequence[str], options: Options
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return options with their values, in their order, and the words behind them.

    Args:
        program: its name, for messages.
        words: behind the program's name.
        options: that it has.

    Raises:
        ValueError: an option that is not known, or refused, or lacks its value.
    """
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        for name, value in _of_word(program, word, options):
            reason = (options.refused or {}).get(name)
            if reason is not None:
                raise ValueError(f"{program} {name}: {reason}")
            if value is None:
                if not rest:
                    raise ValueError(f"{program} {name}: expected a value behind it")
                value = rest.pop(0)
            found.append((name, value))
        if found and found[-1][0] in options.last:
            break
    return found, rest


def _of_word(program: str, word: str, options: Options) -> list[tuple[str, str | None]]:
    """Return the options in one word; None for a value that is the next word."""
    if word.startswith("--"):
        return [_long(program, word, options)]
    found: list[tuple[str, str | None]] = []
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        if name in options.values:
            found.append((name, letters or None))
            letters = ""
        elif name in options.attached:
            found.append((name, letters))
            letters = ""
        elif name in options.flags or name in (options.refused or {}):
            found.append((name, ""))
        else:
            raise _unknown(program, name if word == name else f"{word} ({name})")
    return found


def _long(program: str, word: str, options: Options) -> tuple[str, str | None]:
    name, is_given, value = word.partition("=")
    if name in options.values:
        return name, value if is_given else None
    is_known = name in options.attached or name in options.flags or name in (options.refused or {})
    if is_known or (options.has_plugins and is_given):
        return name, value
    raise _unknown(program, name)


def _unknown(program: str, name: str) -> ValueError:
    return ValueError(
        f"{program} {name}: not an option known here, so that what {program} starts cannot be "
        "told: write it as its manual does, leave it out, or give the command behind it alone"
    )
