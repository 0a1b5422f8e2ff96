"""Runs a script or a module as `__main__` with Megatron on the CPU, for tests and demos.

`torchrun --nproc-per-node 2 -m odb_megatron.cpu SCRIPT [ARGS...]`, or `-m MODULE` for SCRIPT.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_megatron.elastic import reason_left
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.versions import megatron_version
from odb_megatron.testing import cpu_device

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Activate the CPU device layer, then run a script, or a module, as Python itself would.

    `sys.argv` becomes the script and its arguments, `sys.path[0]` the script's folder (of a module
    the current one).

    Args:
        argv: the script's path, or `-m` and a module, then its arguments.

    Raises:
        SystemExit: no script was named, it does not exist, or the layer refuses to start (CUDA is
            available); the message says which.
    """
    is_module = argv[:1] == ["-m"]
    named = argv[1:] if is_module else argv
    if not named:
        raise SystemExit("usage: python -m odb_megatron.cpu (SCRIPT | -m MODULE) [ARGS...]")
    script = Path(named[0])
    if not is_module and not script.is_file():
        raise SystemExit(f"no such script: {script}")
    if not is_module:  # first, so that the layer finds the Megatron of a script's own checkout
        sys.path[0] = str(script.resolve().parent)
    with usage_errors(), contextlib.suppress(ModuleNotFoundError):  # the script may need none
        megatron_version()
    try:
        cpu_device.activate()
    except RuntimeError as error:
        raise SystemExit(f"odb_megatron: {error}") from error
    sys.argv = [str(script), *named[1:]]
    with reason_left():
        if is_module:
            runpy.run_module(named[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
