"""Runs a Megatron-LM checkout's own pretrain script with `--odb`, the checkout left as it is.

`torchrun ... -m odb_megatron.run path/to/pretrain_gpt.py --odb ...`. The script is read with the
lines in it that patches/ has. Without `--odb` it runs as Python alone would run it.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from odb_megatron.elastic import reason_left
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.pretrain import FLAG, wants_odb
from odb_megatron.megatron.versions import megatron_version

__all__ = ["main"]

_USAGE = "usage: python -m odb_megatron.run SCRIPT [ARGS...]"
_NAMES = {"pretrain", "parse_and_validate_args"}
_LINES = """
from odb_megatron.megatron.pretrain import with_odb
pretrain, parse_and_validate_args = with_odb(pretrain, parse_and_validate_args)
"""


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
            _require_megatron(script)
            code = compile(_with_lines(script), str(script), "exec")
        # As `runpy` does it, so that data-loader workers find the script.
        module, own = ModuleType("__main__"), sys.modules["__main__"]
        module.__file__ = str(script)
        sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        finally:
            sys.modules["__main__"] = own


def _with_lines(script: Path) -> ast.Module:
    """Return a script with the lines in it; one that imports ODB itself is left as it is.

    Raises:
        ValueError: it does not have the form of pretrain_gpt.py.
    """
    tree = ast.parse(script.read_bytes(), str(script))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if any((node.module or "").startswith("odb_megatron") for node in imports):
        return tree
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    begins = "__name__ == '__main__'"
    parts = [
        one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == begins
    ]
    if not parts or not names >= _NAMES:
        raise ValueError(
            f"{FLAG}: {script} does not import {' and '.join(sorted(_NAMES))} and call them below "
            "if __name__ == '__main__', as pretrain_gpt.py of Megatron-LM does: use "
            "'odb-megatron pretrain', or call odb_megatron.megatron.pretrain.with_odb in it"
        )
    parts[0].body[:0] = ast.parse(_LINES).body
    return ast.fix_missing_locations(tree)


def _require_megatron(script: Path) -> None:
    """Check that there is a Megatron, and that of a checkout in its own script.

    Raises:
        ValueError: there is none, or another one than the script's is in this process.
    """
    try:
        megatron_version()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{FLAG}: there is no {error.name}: run a script of a Megatron-LM checkout, put the "
            "checkout on PYTHONPATH, or install megatron-core"
        ) from error
    own = script.resolve().parent / "megatron" / "training"
    training = sys.modules.get("megatron.training")  # as a launcher may have imported it
    found = own if training is None else Path(str(training.__file__)).resolve().parent
    if own.is_dir() and found != own:
        raise ValueError(
            f"{FLAG}: megatron.training was imported from {found} before {script} could import its "
            f"own, {own}: put {own.parents[1]} first on PYTHONPATH"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
