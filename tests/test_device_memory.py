"""`odb_megatron.megatron.device_memory`: the CPU path, and what it asks of torch on a device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from odb_megatron.megatron.device_memory import MemoryUse, gibibytes, memory_use, reset_peak


def test_without_a_device_it_is_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = memory_use()
    block = np.ones(before.peak // 8 + (8 << 20))  # more than was ever resident
    after = memory_use()
    assert after.peak >= before.peak + (64 << 20)
    del block
    assert memory_use().peak >= after.peak - (1 << 20)  # counted by the page, in batches
    assert (after.reserved, after.total) == (0, before.total)
    assert after.total > after.peak
    reset_peak()  # nothing
    assert str(after).startswith("process peak ")


def test_with_a_device_it_is_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: device * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: device * 2**31)
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: called.append("reset"))
    use = memory_use()
    assert use == MemoryUse(peak=3 * 2**30, reserved=6 * 2**30, total=80 * 2**30)
    assert str(use) == "peak 3.00 GiB, reserved 6.00 GiB of 80.00 GiB"
    reset_peak()
    assert called == ["reset"]


def test_the_names_it_asks_torch_for_exist() -> None:
    for name in (
        "max_memory_allocated",
        "max_memory_reserved",
        "get_device_properties",
        "reset_peak_memory_stats",
    ):
        assert callable(getattr(torch.cuda, name))
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    assert "total_memory" in dir(torch._C._CudaDeviceProperties)


@pytest.mark.gpu
def test_a_device_counts_what_is_allocated() -> None:
    reset_peak()
    before = memory_use()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert memory_use().peak >= before.peak + held.nbytes
    assert memory_use().reserved >= memory_use().peak
    assert memory_use().total == torch.cuda.get_device_properties(0).total_memory


def test_bytes_for_a_reader() -> None:
    assert gibibytes(3 << 29) == "1.50 GiB"
    assert gibibytes(0) == "0.00 GiB"
