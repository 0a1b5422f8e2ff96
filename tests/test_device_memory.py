"""`odb_megatron.megatron.device_memory`, on the CPU and on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from odb_megatron.megatron.device_memory import memory_use


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


@pytest.mark.gpu
def test_a_device_counts_what_is_allocated() -> None:
    before = memory_use()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert memory_use().peak >= before.peak + held.nbytes
    assert memory_use().reserved >= memory_use().peak
    assert memory_use().total == torch.cuda.get_device_properties(0).total_memory
