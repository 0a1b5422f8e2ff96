"""`odb-megatron patch CHECKOUT [--check | --apply | --revert | --diff]`.

Must not decide what may be patched: that is `checkout`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_megatron.patching.checkout import Checkout, examine

__all__ = ["main"]

_REFUSED = 1


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Args:
        argv: arguments behind `odb-megatron patch`.

    Returns:
        0; 1 where the checkout was refused.

    Raises:
        SystemExit: arguments that do not parse (2), or `--help` (0).
    """
    options = _parse(argv)
    try:
        checkout = examine(Path(options.checkout))
        print(_run(options.action, checkout), end="")
        if checkout.foreign:
            print(f"odb-megatron patch: warning: {checkout.foreign}", file=sys.stderr)
    except BrokenPipeError:
        raise  # the reader of the output has left: nothing was refused
    except (ValueError, OSError) as error:
        print(f"odb-megatron patch: {error}", file=sys.stderr)
        return _REFUSED
    return 0


def _run(action: str, checkout: Checkout) -> str:
    patch = checkout.version_patch.patch
    what = f"{patch.path} of {checkout.version_patch.name} (megatron-core {checkout.version})"
    added = f"{patch.num_lines} lines"
    unseen = f" ({checkout.unseen}: only this file was compared)" if checkout.unseen else ""
    if action == "diff":
        return checkout.version_patch.text
    if action == "apply":
        had = checkout.is_patched
        checkout.apply()
        done = "has the patch already" if had else f"is patched: {added} inserted{unseen}"
        return f"{what} {done}\n"
    if action == "revert":
        had = checkout.is_patched
        checkout.revert()
        return f"{what} {f'is as before: {added} removed' if had else 'has no patch'}\n"
    if checkout.is_patched:
        return f"{what} is patched; --revert removes {added}\n"
    checkout.require_clean()
    return f"{what} can be patched; --apply inserts {added}{unseen}\n"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="odb-megatron patch",
        description="Put --odb into a Megatron-LM checkout's own pretrain_gpt.py. Without --odb "
        "the patched script does what it did.",
        allow_abbrev=False,
    )
    parser.add_argument("checkout", metavar="CHECKOUT", help="folder of the checkout")
    actions = parser.add_mutually_exclusive_group()
    for name, text in (
        ("check", "say what it is and whether it can be patched; change nothing (default)"),
        ("apply", "insert the lines; nothing where they are already"),
        ("revert", "remove them: the file is then as it was, to the byte"),
        ("diff", "print the patch for it, as git apply takes it; change nothing"),
    ):
        actions.add_argument(
            f"--{name}", dest="action", action="store_const", const=name, help=text
        )
    parser.set_defaults(action="check")
    return parser.parse_args(list(argv))
