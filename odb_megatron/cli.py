"""The `odb-megatron` command.

Must start fast: each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from odb_megatron import __version__

__all__ = ["main"]

_COMMANDS = {
    "pretrain": (
        "train a GPT with megatron-core alone, in processes of this machine, also without a GPU",
        "odb_megatron.elastic:pretrain",
    ),
    "inspect": (
        "look at a data set before training on it: padding, balance, speed, memory, advice",
        "odb_megatron.report.inspect:main",
    ),
    "doctor": (
        "check this machine before a run",
        "odb_megatron.doctor:main",
    ),
    "simulate": (
        "compare ways to form steps on the lengths of samples alone",
        "odb_megatron.report.simulate:main",
    ),
    "trace": (
        "show a run from its step logs (--odb-log-dir)",
        "odb_megatron.report.trace:trace",
    ),
    "compare": (
        "lay two runs over each other, from their step logs",
        "odb_megatron.report.trace:compare",
    ),
}
"""What each command says of itself, and the function that runs it: arguments in, exit code out."""


_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Where the reader of standard output has left (`odb-megatron trace DIR | head`), it ends quietly,
    with the exit code that a shell gives to tools that the signal ends.
    """
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="odb-megatron",
        description="Online dynamic batching for NVIDIA Megatron.",
        epilog="'odb-megatron COMMAND --help' describes a command. Training flags are those of "
        "'odb-megatron pretrain -- --help'.",
    )
    parser.add_argument("--version", action="version", version=f"odb-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (text, _) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    known, rest = parser.parse_known_args(arguments[:1])
    if known.command is None:
        if arguments:
            parser.error(f"unrecognized arguments: {' '.join(arguments)}")
        parser.print_help()
        return 0
    module, _, function = _COMMANDS[known.command][1].partition(":")
    run: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return run(rest + arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
