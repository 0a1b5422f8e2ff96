"""Which Megatron is installed, and whether it is supported.

Must not hold policy or read arguments' values. What differs between versions has one module for
each concern: `compat_pretrain` (how `pretrain()` is called and the model is built) and
`compat_metrics` (what is gathered to be logged). They look at what there is, not at its number.
"""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from typing import Any

__all__ = [
    "MAX_VERSION",
    "MIN_VERSION",
    "describe_megatron",
    "megatron_version",
    "packed_seq_params",
]

MIN_VERSION = (0, 16)
"""First supported megatron-core minor version."""

MAX_VERSION = (0, 19)
"""Last supported megatron-core minor version."""


def megatron_version() -> tuple[int, ...]:
    """Return the installed megatron-core's version as integers.

    Raises:
        ValueError: not installed, or outside the supported range.
    """
    try:
        text = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        import megatron.core

        text = str(megatron.core.__version__)  # a checkout on PYTHONPATH has no metadata
    return check_version(text)


def check_version(text: str) -> tuple[int, ...]:
    """Parse a version and check that it is supported.

    Raises:
        ValueError: outside the supported range.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", text)[:3])
    if not MIN_VERSION <= version[:2] <= MAX_VERSION:
        low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))
        raise ValueError(
            f"megatron-core {text} is not supported; this odb_megatron works with {low} to {high}: "
            f"pip install 'megatron-core>={low},<0.{MAX_VERSION[1] + 1}'"
        )
    return version


def describe_megatron() -> str:
    """Return one line on what was found, for start-up."""
    version = ".".join(map(str, megatron_version()))
    low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))
    return f"megatron-core {version} (supported: {low} to {high})"


def packed_seq_params(**values: Any) -> Any:
    """Build PackedSeqParams from the fields this Megatron knows; unknown ones must be None."""
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})
