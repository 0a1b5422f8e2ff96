"""The `odb-megatron` command.

Must start fast: each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from odb_megatron import __version__
from odb_megatron.elastic import USAGE_ERROR

__all__ = ["main"]

_COMMANDS = {
    "pretrain": ("elastic:pretrain", "train a GPT in processes of this machine, a CPU will do"),
    "inspect": ("report.inspect:main", "look at a data set before training on it, with advice"),
    "doctor": ("doctor:main", "check this machine before a run"),
    "simulate": ("report.simulate:main", "compare ways to form steps on sample lengths alone"),
    "trace": ("report.trace:trace", "show a run from its step logs (--odb-log-dir)"),
    "compare": ("report.trace:compare", "lay two runs over each other, from their step logs"),
}
"""The function that runs each command, arguments in and exit code out; and what it is for."""

_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Where the reader of standard output has left (`odb-megatron trace DIR | head`), it ends quietly,
    with the exit code that a shell gives to tools that the signal ends.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="odb-megatron",
        description="Online dynamic batching for NVIDIA Megatron.",
        epilog="'odb-megatron COMMAND --help' describes a command. Training flags are those of "
        "'odb-megatron pretrain -- --help'.",
    )
    parser.add_argument("--version", action="version", version=f"odb-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    known, rest = parser.parse_known_args(argv[:1])
    if known.command is None:
        parser.print_help()
        return USAGE_ERROR * bool(argv)
    module, _, function = _COMMANDS[known.command][0].partition(":")
    run = getattr(importlib.import_module(f"odb_megatron.{module}"), function)
    return int(run(rest + argv[1:]))
