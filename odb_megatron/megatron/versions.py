"""Which Megatron is there, and whether it is supported; without importing it."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

__all__ = ["SUPPORTED", "describe_megatron", "megatron_version", "require_version"]

SUPPORTED = "0.18 to 0.19 and main"

MIN_VERSION, MAX_VERSION = (0, 18), (0, 19)

_NEWER = "Megatron-LM main of 2026-08-22 (d98e8a64, 0.20.0)"
"""What was run of later ones; they are not refused, since main's number says little of it."""


def require_version(text: str) -> tuple[int, ...]:
    """Return a version's numbers.

    Raises:
        ValueError: it is older than what is supported.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", text)[:3])
    if version[:2] < MIN_VERSION:
        raise ValueError(
            f"megatron-core {text} is too old: odb_megatron supports {SUPPORTED}: "
            "pip install 'megatron-core>=0.18,<0.20' (Python 3.12 or later)"
        )
    return version


def megatron_version() -> tuple[int, ...]:
    """Return the version of the Megatron that an import would find.

    It is read from the package's own file: a checkout on `sys.path` comes before an installed
    package, whose metadata stays visible, and importing an old one may already fail.

    Raises:
        ValueError: it is older than what is supported.
        ModuleNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")
    info = runpy.run_path(str(Path(spec.origin).with_name("package_info.py")))
    return require_version(str(info["__version__"]))


def describe_megatron() -> str:
    """Return one line on what was found, for start-up; a warning where it is newer than known."""
    version = megatron_version()
    found = ".".join(map(str, version))
    if version[:2] > MAX_VERSION:
        return (
            f"warning: megatron-core {found} is newer than {SUPPORTED} as odb_megatron knows them; "
            f"of newer ones it was run with {_NEWER}"
        )
    return f"megatron-core {found} (supported: {SUPPORTED})"
