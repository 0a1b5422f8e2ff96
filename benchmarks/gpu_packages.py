"""Makes torch, numpy, megatron-core and this repository importable on a bare machine.

Must not import any of them itself, nor anything else that is not in Python's own library: it runs
before they can be found.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["HOW_TO_CARRY", "MissingPackageError", "find_packages"]

ROOT = Path(__file__).resolve().parents[1]
_NEEDED = ("torch", "numpy", "packaging", "megatron.core")
_MARK = "megatron/core/package_info.py"

HOW_TO_CARRY = """\
megatron-core is a wheel of 2.4 MB. On a machine with a package index:
    python3 -m pip download --no-deps -d wheels megatron-core==0.19.2
then carry the file to this machine, and either
    python3 benchmarks/gpu_throughput.py --megatron-wheel wheels/megatron_core-0.19.2-*.whl ...
or
    python3 -m zipfile -e wheels/megatron_core-0.19.2-*.whl site
    PYTHONPATH=site python3 benchmarks/gpu_throughput.py ..."""


class MissingPackageError(RuntimeError):
    """What the benchmark needs cannot be imported here."""


def find_packages(wheel: Path | None) -> None:
    """Put the repository and, if given, megatron-core's wheel on the import path.

    This repository comes before an installed package: the benchmark is a part of it. The wheel is
    unpacked to a temporary folder, which goes when the process ends.

    Args:
        wheel: of megatron-core; None if it is installed or on `PYTHONPATH`.

    Raises:
        MissingPackageError: a package cannot be found, or the wheel is none of megatron-core's.
    """
    sys.path.insert(0, str(ROOT))
    if wheel is not None:
        sys.path.insert(0, _unpack(wheel))
    missing = [name for name in _NEEDED if not _is_found(name)]
    if missing:
        raise MissingPackageError(
            f"{', '.join(missing)} cannot be imported by {sys.executable}; needed are "
            f"{', '.join(_NEEDED)}. {HOW_TO_CARRY}"
        )


def _unpack(wheel: Path) -> str:
    if not zipfile.is_zipfile(wheel):
        raise MissingPackageError(f"--megatron-wheel {wheel} is no wheel. {HOW_TO_CARRY}")
    folder = tempfile.mkdtemp(prefix="odb-megatron-core-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        if _MARK not in archive.namelist():
            raise MissingPackageError(
                f"--megatron-wheel {wheel} has no {_MARK}: it is not megatron-core's. "
                f"{HOW_TO_CARRY}"
            )
        archive.extractall(folder)
    return folder


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
