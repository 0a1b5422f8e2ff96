"""`python -m odb_megatron.doctor.torch_facts`: what torch sees here, as one line of JSON.

Runs in a process of its own: torch takes seconds to import and may be broken. Must not allocate on
a device.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

__all__ = ["MARK", "look"]

MARK = "odb-torch-facts: "
"""Begins the line; libraries print others."""


def look() -> dict[str, Any]:
    """Return the values of `kernels.TorchFacts`."""
    import torch
    import torch.distributed as dist

    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    available = torch.cuda.is_available()
    devices = range(torch.cuda.device_count()) if available else ()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "devices": [torch.cuda.get_device_name(device) for device in devices],
        "capability": list(torch.cuda.get_device_capability()) if available else [],
        "has_gloo": has_gloo,
        "gloo_error": _gloo_error() if has_gloo else "",
        "nccl": _nccl_version() if has_nccl else "",
    }


def _nccl_version() -> str:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return "of unknown version"


def _gloo_error() -> str:
    """Return what goes wrong in a gloo group of one process, on the interface that gloo chooses."""
    import torch
    import torch.distributed as dist

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    limit = datetime.timedelta(seconds=20)
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(look())}", flush=True)
    sys.exit(0)
