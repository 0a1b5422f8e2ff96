"""Which Megatron is installed, and whether it is supported.

Must not hold policy or read arguments' values. What differs between versions has one module for
each concern: `compat_pretrain` (how `pretrain()` is called and the model is built) and
`compat_metrics` (what is gathered to be logged). They look at what there is, not at its number.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

__all__ = [
    "MAX_VERSION",
    "MIN_VERSION",
    "NEWER",
    "describe_megatron",
    "megatron_version",
    "packed_seq_params",
]

MIN_VERSION = (0, 16)
"""First supported megatron-core minor version."""

MAX_VERSION = (0, 19)
"""Last supported megatron-core minor version."""

NEWER = "Megatron-LM main of 2026-08-22 (d98e8a64, 0.20.0)"
"""What was run of later ones; they are not refused, since main's number says little of it."""


def megatron_version() -> tuple[int, ...]:
    """Return the version, as integers, of the megatron-core that is imported.

    A checkout on `sys.path` comes before an installed package, whose metadata stays visible.

    Raises:
        ValueError: older than what is supported.
    """
    from megatron.core import package_info

    return check_version(str(package_info.__version__))


def check_version(text: str) -> tuple[int, ...]:
    """Parse a version and check that it is not too old.

    Raises:
        ValueError: it is.
    """
    version = tuple(int(number) for number in re.findall(r"\d+", text)[:3])
    if version[:2] < MIN_VERSION:
        low, high = _bounds()
        raise ValueError(
            f"megatron-core {text} is not supported; this odb_megatron works with {low} to {high}: "
            f"pip install 'megatron-core>={low},<0.{MAX_VERSION[1] + 1}'"
        )
    return version


def describe_megatron() -> str:
    """Return one line on what was found, for start-up; a warning where it is newer than known."""
    version = megatron_version()
    found, (low, high) = ".".join(map(str, version)), _bounds()
    if version[:2] > MAX_VERSION:
        return (
            f"warning: megatron-core {found} is newer than {low} to {high}, which this "
            f"odb_megatron supports; of newer ones it was run with {NEWER}"
        )
    return f"megatron-core {found} (supported: {low} to {high})"


def _bounds() -> tuple[str, ...]:
    return tuple(".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))


def packed_seq_params(**values: Any) -> Any:
    """Build PackedSeqParams of samples without padding between them.

    Raises:
        ValueError: a field that this Megatron does not have.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    unknown = values.keys() - known
    if unknown:
        raise ValueError(
            f"PackedSeqParams of this Megatron has no {', '.join(sorted(unknown))}: use "
            "megatron-core 0.17 or later"
        )
    if "pad_between_seqs" in known:  # 0.19 and later: Transformer Engine then does not look
        values["pad_between_seqs"] = False
    return PackedSeqParams(**values)
