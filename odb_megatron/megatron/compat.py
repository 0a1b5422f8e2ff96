"""What differs between Megatron versions, in one place.

Must not hold policy or read arguments' values; callers ask for a fact or a function by meaning.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

__all__ = [
    "MAX_VERSION",
    "MIN_VERSION",
    "describe_megatron",
    "megatron_version",
    "packed_seq_params",
    "require_config_container",
    "seqlen_stats_updater",
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


def require_config_container() -> None:
    """Check that `pretrain()` takes a configuration container, as from 0.19.

    Raises:
        ValueError: an older Megatron.
    """
    version = megatron_version()
    if version < (0, 19):
        found = ".".join(map(str, version))
        raise ValueError(
            f"this script needs megatron.training 0.19 (its pretrain() takes a configuration "
            f"container); found megatron-core {found}: pip install 'megatron-core>=0.19,<0.20'"
        )


def packed_seq_params(**values: Any) -> Any:
    """Build PackedSeqParams from the fields this Megatron knows; unknown ones must be None."""
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})


def seqlen_stats_updater() -> Callable[[Any], None]:
    """Return Megatron's FLOPs accounting hook for packed samples (0.19; a no-op before)."""
    from megatron.training import training

    update: Callable[[Any], None] | None = getattr(
        training, "update_seqlen_stats_from_cu_seqlens", None
    )
    return update if update is not None else _ignore


def _ignore(cu_seqlens: Any) -> None:
    del cu_seqlens
