"""How much memory a run takes: of the CUDA device or, without one, of the process.

Must not allocate or free any, and must not print.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["MemoryUse", "gibibytes", "memory_use", "reset_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one rank, in bytes.

    Attributes:
        peak: most that tensors have taken on the device since `reset_peak`; without a device the
            most that the process ever had resident.
        reserved: most that torch's allocator held on the device since then, fragments included;
            0 without a device.
        total: what the device, or the machine, has.
    """

    peak: int
    reserved: int
    total: int

    def __str__(self) -> str:
        """For a message."""
        if not self.reserved:
            return f"process peak {gibibytes(self.peak)} of {gibibytes(self.total)}"
        return (
            f"peak {gibibytes(self.peak)}, reserved {gibibytes(self.reserved)} of "
            f"{gibibytes(self.total)}"
        )


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


def reset_peak() -> None:
    """Measure the device's peak anew from here on; a process's cannot be."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def gibibytes(num_bytes: int) -> str:
    """Return bytes for a reader."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _peak_resident() -> int:
    """Return the kernel's high-water mark; `getrusage` would show that of a parent before exec."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
