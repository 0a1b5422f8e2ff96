"""Which collective backends torch has here, and whether gloo can open its socket.

Must not leave a process group behind. Run in a process of its own: creating a gloo device on an
interface that does not exist can end in an error of torch's that is not to be caught.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

__all__ = ["gloo_error", "has_gloo", "has_nccl", "nccl_version"]


def has_gloo() -> bool:
    """Whether this torch was built with gloo."""
    return dist.is_available() and dist.is_gloo_available()


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def nccl_version() -> str:
    """Return the NCCL that torch was built with, `""` for none."""
    if not has_nccl():
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def gloo_error() -> str:
    """Sum one number in a gloo group of one process, on the interface that gloo chooses.

    Returns:
        `""`, or what went wrong.
    """
    try:
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=datetime.timedelta(seconds=20),
        )
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
