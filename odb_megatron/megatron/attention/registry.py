"""The attention backends there are, and the choice of one for a device.

Must not import torch or Megatron: a backend's class is loaded when a model is built with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["BACKENDS", "AttentionBackend", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """A kernel for packed samples, as a Megatron core-attention class.

    Attributes:
        name: what the user writes.
        core_attention: `module:Class`; the class takes the constructor and forward arguments of
            mcore's `DotProductAttention`.
        auto_devices: device types (`"cpu"`, `"cuda"`) for which `auto` may choose it.
        named_devices: device types on which it runs if asked for by name.
        why_unavailable: returns None if it can run in this process, else why not.
        description: what it does, for the line that is printed at start-up.
        reason: why it was chosen; filled by `select`.
    """

    name: str
    core_attention: str
    auto_devices: tuple[str, ...]
    named_devices: tuple[str, ...]
    why_unavailable: Callable[[], str | None]
    description: str
    reason: str = ""

    def __post_init__(self) -> None:
        if self.name == "auto" or self.core_attention.count(":") != 1:
            raise ValueError(
                f"backend name {self.name!r} must not be 'auto' and core_attention "
                f"{self.core_attention!r} must be 'module:Class'"
            )

    def available(self) -> str | None:
        """None if the backend can run in this process, else why not."""
        return self.why_unavailable()

    def load(self) -> type[Any]:
        """Import and return the core-attention class (a `MegatronModule`)."""
        module, _, name = self.core_attention.partition(":")
        loaded: type[Any] = getattr(importlib.import_module(module), name)
        return loaded


def _why_no_megatron_core() -> str | None:
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "megatron-core is not installed (pip install megatron-core)"


_CPU = AttentionBackend(
    name="cpu",
    core_attention="odb_megatron.megatron.attention.cpu:CpuCoreAttention",
    auto_devices=("cpu",),
    named_devices=("cpu", "cuda"),
    why_unavailable=_why_no_megatron_core,
    description="torch scaled_dot_product_attention, one call per sample",
)

BACKENDS: Mapping[str, AttentionBackend] = {backend.name: backend for backend in (_CPU,)}
"""All backends by name, in the order in which `auto` tries them."""


def select(
    name: str,
    *,
    device_type: str,
    backends: Mapping[str, AttentionBackend] = BACKENDS,
) -> AttentionBackend:
    """Choose a backend.

    Args:
        name: a backend's name, or `auto` for the first one that is available and meant for the
            device.
        device_type: `"cpu"` or `"cuda"`.
        backends: what to choose from, by name.

    Returns:
        The backend, its `reason` saying why it was chosen.

    Raises:
        ValueError: unknown name; not available here; not for this device; none for `auto`.
    """
    if name == "auto":
        return _first_for(device_type, backends)
    if name not in backends:
        raise ValueError(
            f"attention backend {name!r} is unknown: choose auto or one of "
            f"{', '.join(backends)} (--odb-attention)"
        )
    backend = backends[name]
    why_not = _why_not(backend, device_type, backend.named_devices)
    if why_not is not None:
        raise ValueError(
            f"attention backend {name!r} cannot run on {device_type}: {why_not}. Mend that, or "
            "pass --odb-attention auto"
        )
    return replace(backend, reason=f"asked for by name: {backend.description}")


def _first_for(device_type: str, backends: Mapping[str, AttentionBackend]) -> AttentionBackend:
    passed_over: list[str] = []
    for backend in backends.values():
        why_not = _why_not(backend, device_type, backend.auto_devices)
        if why_not is None:
            after = f"; passed over {', '.join(passed_over)}" if passed_over else ""
            return replace(
                backend, reason=f"first available on {device_type}: {backend.description}{after}"
            )
        passed_over.append(f"{backend.name} ({why_not})")
    by_name = [
        backend.name
        for backend in backends.values()
        if _why_not(backend, device_type, backend.named_devices) is None
    ]
    way_out = f"ask for {' or '.join(by_name)} by name" if by_name else "mend one of these"
    raise ValueError(
        f"no attention backend for packed samples on {device_type}: "
        f"{', '.join(passed_over)}. Way out: {way_out} (--odb-attention)"
    )


def _why_not(backend: AttentionBackend, device_type: str, devices: tuple[str, ...]) -> str | None:
    if device_type not in devices:
        by_name = " unless asked for by name" if device_type in backend.named_devices else ""
        return f"not for {device_type}{by_name}"
    return backend.available()
