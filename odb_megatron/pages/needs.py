"""The packages that drawing and pages need, and what to say where one is missing.

Installs nothing and imports nothing but what is asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["require"]


def require(name: str, *, purpose: str) -> ModuleType:
    """Import a module of the extra `pages`.

    Args:
        name: of the module.
        purpose: what it is needed for, as the start of a sentence: "a page".

    Raises:
        ValueError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ValueError(
            f"{purpose} needs {package}, which is not installed: pip install 'odb-megatron[pages]'"
        ) from error
