"""How much memory a run takes: of the CUDA device or, without one, of the process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["MemoryUse", "memory_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one rank, in bytes.

    Attributes:
        peak: most that tensors have taken on the device; without a device the
            most that the process ever had resident.
        reserved: most that torch's allocator held on the device, fragments included;
            0 without a device.
        total: what the device, or the machine, has.
    """

    peak: int
    reserved: int
    total: int

    def __str__(self) -> str:
        peak, reserved, total = (
            f"{num / 2**30:.2f} GiB" for num in (self.peak, self.reserved, self.total)
        )
        if not self.reserved:
            return f"process peak {peak} of {total}"
        return f"peak {peak}, reserved {reserved} of {total}"


def memory_use() -> MemoryUse:
    """Return this rank's memory use."""
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        return MemoryUse(
            peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            total=torch.cuda.get_device_properties(device).total_memory,
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryUse(peak=_peak_resident(), reserved=0, total=total)


def _peak_resident() -> int:
    """Return the kernel's high-water mark; `getrusage` would show that of a parent before exec."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
