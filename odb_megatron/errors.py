"""A user's mistakes: settings are named as the host of the run names them, Megatron or
Megatron-Bridge, and a run whose flags cannot be used ends with one message and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from odb_megatron.elastic import USAGE_ERROR, leave_reason

__all__ = [
    "SettingError",
    "flag_of",
    "host_names",
    "name_settings",
    "raise_usage_errors",
    "setting_name",
]
__all__ += ["usage_errors", "usage_reason"]

_HOST, _OWN = "/megatron/", "/odb_megatron/"  # in the paths of files

_FLAGS = {
    "fp8": "--fp8-format",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}


def flag_of(name: str) -> str:
    """Return the command-line flag of one of Megatron's arguments, or of ODB's (`odb_...`)."""
    return _FLAGS.get(name) or "--" + name.replace("_", "-")


_host: dict[str, Callable[[str], str]] = {"name": flag_of}


def name_settings(name: Callable[[str], str]) -> None:
    """Let all texts of this process name settings as its host does; else they are flags."""
    _host["name"] = name


def host_names() -> Callable[[str], str]:
    """Return what names settings in this process; another process can be sent it."""
    return _host["name"]


def setting_name(name: str) -> str:
    """Return what this process's host calls a setting."""
    return _host["name"](name)


class SettingError(ValueError):
    """A text in which `{micro_batch_size}` is a setting's name, and other fields are `values`."""

    def __init__(self, text: str, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__(text, {**(values or {}), **more})  # so it can be pickled

    def __str__(self) -> str:
        text, values = self.args
        return str(text).format_map(_Names(values))


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return setting_name(name)


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
        if message.startswith("unrecognized arguments"):
            known = list(parser._option_string_actions)
            found = [
                difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
                for flag in re.findall(r"--[\w-]+", message)
            ]
            names = " and ".join(name for own in found for name in own)
            did_you_mean = f"did you mean {names}? (--help lists all flags)"
            message += f": {did_you_mean if names else '--help lists all flags'}"
        raise ValueError(message)

    setattr(parser, "error", error)  # noqa: B010  # the parser is made by Megatron


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
