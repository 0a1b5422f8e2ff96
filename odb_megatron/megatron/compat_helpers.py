"""Megatron's compiled dataset helpers: not built anew where they are there and cannot be.

`pretrain()` runs `make` in megatron/core/datasets as it starts, and ends when that fails
(initialize.py `_compile_dependencies`, datasets/utils.py 20, 0.19.2). The wheels of 0.17 to 0.19
hold the compiled helpers, and no Makefile. Must not compile anything itself.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["are_compiled", "compiled_once"]

_ENDINGS = importlib.machinery.EXTENSION_SUFFIXES


def are_compiled(folder: Path) -> bool:
    """Whether helpers that this Python can import lie in a folder, megatron/core/datasets."""
    return any((folder / f"helpers_cpp{end}").is_file() for end in _ENDINGS)


def compiled_once(original: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replaces `megatron.core.datasets.utils.compile_helpers`."""
    folder = Path(sys.modules[original.__module__].__file__ or "").parent

    def compile_helpers() -> Any:
        if not (folder / "Makefile").is_file() and are_compiled(folder):
            print("> dataset index builder: compiled with the package", flush=True)
            return None
        return original()

    compile_helpers.__module__ = original.__module__  # wrapped again, it still knows the folder
    return compile_helpers
