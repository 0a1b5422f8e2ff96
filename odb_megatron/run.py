"""Runs a Megatron-LM checkout's own pretrain script with `--odb`, the checkout left as it is.

`torchrun ... -m odb_megatron.run path/to/pretrain_gpt.py --odb ...`. Without `--odb` the script
runs as Python alone would run it; nothing is imported or replaced. Must not read the script.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odb_megatron.elastic import reason_left
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.host_script import FLAG, HostScript, wants_odb

__all__ = ["main"]

_USAGE = "usage: python -m odb_megatron.run SCRIPT [ARGS...]"

_PRETRAIN = ("megatron.training", "megatron.training.training")
_ARGUMENTS = "megatron.training.arguments"


def main(argv: Sequence[str]) -> None:
    """Run a script, with ODB in it if its arguments ask for that.

    Args:
        argv: the script's path, then its arguments.

    Raises:
        SystemExit: no script, flags that cannot be used, or a script that ODB cannot stand in for
            (2); what the script ends with.
    """
    with usage_errors():
        if not argv or argv[0].startswith("-"):
            raise ValueError(_USAGE)
        script = Path(argv[0])
        if not script.is_file():
            raise ValueError(f"no such script: {script}; {_USAGE}")
        asked = wants_odb(argv[1:])
    sys.argv = [str(script), *argv[1:]]
    sys.path[0] = str(script.resolve().parent)
    if not asked:
        runpy.run_path(str(script), run_name="__main__")
        return
    with usage_errors():
        host = _host(script)
    with _replaced(host), reason_left():
        runpy.run_path(str(script), run_name="__main__")
    with usage_errors():
        if not host.has_trained:
            raise ValueError(
                f"{script} ended without a call of megatron.training.pretrain(): {FLAG} did nothing"
            )


def _host(script: Path) -> HostScript:
    """Import the Megatron that the script will import.

    Raises:
        ValueError: there is none, or another one than the script's is in this process.
    """
    try:
        training = importlib.import_module("megatron.training")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.training"):
            raise
        raise ValueError(
            f"{FLAG}: megatron.training cannot be imported: run a script of a Megatron-LM "
            "checkout, put the checkout on PYTHONPATH, or install megatron-core"
        ) from error
    own = script.resolve().parent / "megatron" / "training"
    found = Path(str(training.__file__)).resolve().parent
    if own.is_dir() and found != own:
        raise ValueError(
            f"{FLAG}: megatron.training was imported from {found} before {script} could import its "
            f"own, {own}: put {own.parents[1]} first on PYTHONPATH"
        )
    return HostScript(training.pretrain)


@contextmanager
def _replaced(host: HostScript) -> Iterator[None]:
    """Let the names that a script imports be the host script's."""
    names: list[tuple[Any, str, Any]] = [
        (importlib.import_module(module), "pretrain", host.pretrain) for module in _PRETRAIN
    ]
    arguments = importlib.import_module(_ARGUMENTS)
    if hasattr(arguments, "parse_and_validate_args"):  # from 0.18
        names.append((arguments, "parse_and_validate_args", host.parse_and_validate_args))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


if __name__ == "__main__":
    main(sys.argv[1:])
