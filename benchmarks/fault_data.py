"""A data set that fails as told, in the worker process that asks for its bad item."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["BAD_ITEM", "FaultyDataset", "mark"]

BAD_ITEM = 45
_LONGEST = 60


class FaultyDataset:
    """Random items of 8 to 60 tokens, one of which is bad.

    Args:
        size: number of items.
        fault: `raises`, `killed`, `stopped`, `hangs`, `none`; empty for no fault.
        folder: where the moment of the fault is noted.
    """

    def __init__(self, size: int, *, fault: str, folder: str) -> None:
        self._size, self._fault, self._folder = size, fault, folder

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index == BAD_ITEM and self._fault:
            mark(self._folder)
            if self._fault == "raises":
                raise KeyError("no such image: 4711.png")
            if self._fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._fault == "hangs":
                time.sleep(3600)
            return None
        made = random.Random(index)
        tokens = [made.randrange(1, 100) for _ in range(made.randint(8, _LONGEST))]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": [1] * (len(tokens) - 1)}


def mark(folder: str, name: str = "fault") -> None:
    """Note that it happens now."""
    target = Path(folder) / name
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}")
        scratch.write_text(f"{time.time()} {os.getpid()}", encoding="utf-8")
        scratch.replace(target)
