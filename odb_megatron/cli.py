"""The `odb-megatron` command.

Must start fast: each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from odb_megatron import __version__

__all__ = ["main"]

_COMMANDS = {
    "launch": "run a pretrain script on several processes of this machine, also without a GPU",
    "pretrain": "train a GPT with megatron-core alone: launch, with the package's own script",
    "patch": "put --odb into a Megatron-LM checkout's own pretrain_gpt.py",
    "inspect": "look at a data set before training on it: padding, balance, speed, memory, advice",
    "simulate": "compare ways to form steps on the lengths of samples alone",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="odb-megatron",
        description="Online dynamic batching for NVIDIA Megatron.",
        epilog="'odb-megatron COMMAND --help' describes a command. Training flags are those of "
        "'odb-megatron pretrain -- --help'.",
    )
    parser.add_argument("--version", action="version", version=f"odb-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    known, rest = parser.parse_known_args(arguments[:1])
    if known.command == "launch":
        from odb_megatron.launch import main as launch

        return launch(rest + arguments[1:])
    if known.command == "pretrain":
        from odb_megatron.launch import pretrain

        return pretrain(rest + arguments[1:])
    if known.command == "patch":
        from odb_megatron.patching.command import main as patch

        return patch(rest + arguments[1:])
    if known.command == "inspect":
        from odb_megatron.inspection.command import main as inspect

        return inspect(rest + arguments[1:])
    if known.command == "simulate":
        from odb_megatron.simulation.command import main as simulate

        return simulate(rest + arguments[1:])
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
