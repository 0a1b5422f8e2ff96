"""`python -m odb_megatron.doctor.torch_facts`: what torch sees here, as one line of JSON.

Runs in a process of its own: torch takes seconds to import and may be broken. Must not allocate on
a device.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["MARK", "look"]

MARK = "odb-torch-facts: "
"""Begins the line; libraries print others."""


def look() -> dict[str, Any]:
    """Return the values of `kernels.TorchFacts`."""
    import torch

    from odb_megatron.comm.available import gloo_error, has_gloo, has_nccl, nccl_version

    available = torch.cuda.is_available()
    devices = range(torch.cuda.device_count()) if available else ()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "devices": [torch.cuda.get_device_name(device) for device in devices],
        "capability": list(torch.cuda.get_device_capability()) if available else [],
        "has_gloo": has_gloo(),
        "gloo_error": gloo_error() if has_gloo() else "",
        "nccl": nccl_version() or ("of unknown version" if has_nccl() else ""),
    }


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(look())}", flush=True)
    sys.exit(0)
