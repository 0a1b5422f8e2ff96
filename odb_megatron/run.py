"""Runs a Megatron-LM checkout's own pretrain script with `--odb`, the checkout left as it is.

`torchrun ... -m odb_megatron.run path/to/pretrain_gpt.py --odb ...`. Without `--odb` the script
runs as Python alone would run it; nothing is imported or replaced.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odb_megatron.elastic import reason_left
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.pretrain import FLAG, HostScript, wants_odb
from odb_megatron.megatron.versions import megatron_version

if TYPE_CHECKING:
    from odb_megatron.megatron.hooks import Replacements

__all__ = ["main"]

_USAGE = "usage: python -m odb_megatron.run SCRIPT [ARGS...]"


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
    with reason_left():
        with usage_errors():
            host, replaced = _replace(script)
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            replaced.undo()
    with usage_errors():
        if not host.has_trained:
            raise ValueError(
                f"{script} ended without a call of megatron.training.pretrain(): {FLAG} did nothing"
            )


def _replace(script: Path) -> tuple[HostScript, Replacements]:
    """Let the names that the script will import be a host script's.

    Raises:
        ValueError: there is no Megatron, or another one than the script's is in this process.
    """
    try:
        megatron_version()
        training = importlib.import_module("megatron.training")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core", "megatron.training"):
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
    from odb_megatron.megatron.hooks import REPLACED, Replacements

    host, replaced = HostScript(training.pretrain), Replacements()
    replaced.replace(REPLACED["pretrain"], lambda _: host.pretrain)
    replaced.replace_in(training, "pretrain", lambda _: host.pretrain)  # what scripts import
    replaced.replace(REPLACED["parse_and_validate_args"], lambda _: host.parse_and_validate_args)
    return host, replaced


if __name__ == "__main__":
    main(sys.argv[1:])
