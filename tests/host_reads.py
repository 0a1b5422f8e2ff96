"""What would make a process wait for its device, counted in a run on the CPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["host_reads"]

_OF_TENSORS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""What reads values on the host. `numpy` is not among them: it fails for tensors of a device."""


@contextlib.contextmanager
def host_reads(*, within: str = "") -> Iterator[list[str]]:
    """Yield a list of calls to come that read a tensor on the host or wait for the device.

    Args:
        within: only those that a file with this in its path makes, in the main thread.
    """
    found: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            where = caller.f_code.co_filename
            if within in where and threading.current_thread() is threading.main_thread():
                found.append(f"{name} in {where}:{caller.f_lineno}")
            return original(*args, **kwargs)

        return call

    names = [(torch.Tensor, name) for name in _OF_TENSORS]
    names += [(torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize")]
    with contextlib.ExitStack() as stack:
        for owner, name in names:
            original, is_own = getattr(owner, name), name in vars(owner)
            setattr(owner, name, counted(name, original))
            stack.callback(*(setattr, owner, name, original) if is_own else (delattr, owner, name))
        yield found
