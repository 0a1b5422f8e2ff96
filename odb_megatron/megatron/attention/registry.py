"""The attention backends there are, and the choice of one for a device.

Must not import torch, Megatron or a kernel: a backend's class is loaded when a model is built with
it, and packages are looked for without importing them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from odb_megatron.megatron.attention.needs import Feature, Limits, Need, why_unfit

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
        limits: what it computes.
        reason: why it was chosen; filled by `select`.
    """

    name: str
    core_attention: str
    auto_devices: tuple[str, ...]
    named_devices: tuple[str, ...]
    why_unavailable: Callable[[], str | None]
    description: str
    limits: Limits = Limits()
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


def _has(module: str) -> bool:
    """Whether a module can be found, without importing it (its parents aside)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(*distributions: str) -> tuple[int, ...]:
    """Version of the first distribution that is installed; empty for none."""
    for name in distributions:
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(map(int, re.findall(r"\d+", text.split("+")[0])[:3]))
    return ()


def _why_no_megatron_core() -> str | None:
    if _has("megatron.core"):
        return None
    return "megatron-core is not installed (pip install megatron-core)"


def _why_no_transformer_engine() -> str | None:
    if not _has("transformer_engine"):
        return "transformer-engine is not installed (pip install 'transformer-engine[pytorch]')"
    found = _version("transformer_engine", "transformer-engine")
    if found < MIN_TRANSFORMER_ENGINE:
        seen, least = (".".join(map(str, one)) for one in (found, MIN_TRANSFORMER_ENGINE))
        return f"transformer-engine {seen} is too old: {least} or later"
    return _why_no_megatron_core()


def _why_no_flash() -> str | None:
    found = _version("flash_attn", "flash-attn")
    if not _has("flash_attn") or found < MIN_FLASH:
        seen = f"{'.'.join(map(str, found))} is too old" if found else "is not installed"
        return f"flash-attn {seen} (pip install 'flash-attn>=2.6')"
    return _why_no_megatron_core()


def _why_no_flash3() -> str | None:
    if not _has("flash_attn_interface"):
        return "flash-attn 3 is not installed (hopper/ of its repository)"
    return _why_no_megatron_core()


def _why_no_flash4() -> str | None:
    if not _has("flash_attn") or not _has("flash_attn.cute"):
        return "flash-attn 4 is not installed (pip install flash-attn-4)"
    return _why_no_megatron_core()


def _why_no_torch_varlen() -> str | None:
    found = _version("torch")
    if found < MIN_TORCH_VARLEN:
        seen = f"torch {'.'.join(map(str, found))}" if found else "no torch"
        return f"{seen} has no torch.nn.attention.varlen with windows: 2.11 or later"
    return _why_no_megatron_core()


def _why_no_torch_flex() -> str | None:
    found = _version("torch")
    if found < MIN_TORCH_FLEX:
        return "torch 2.6 or later is needed for flex-attention"
    return _why_no_megatron_core()


MIN_TRANSFORMER_ENGINE = (2, 9)
"""Of the versions before it none is supported; Megatron 0.16 to 0.19 need it for some flags."""

MIN_FLASH = (2, 6)
MIN_TORCH_VARLEN = (2, 11)
MIN_TORCH_FLEX = (2, 6)

_HALF = ("float16", "bfloat16")
_AMPERE = (8, 0)
_PACKAGE = "odb_megatron.megatron.attention"

_ALL = (
    AttentionBackend(
        name="te",
        core_attention=f"{_PACKAGE}.te:TECoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda",),
        why_unavailable=_why_no_transformer_engine,
        description="Transformer Engine's DotProductAttention, in Megatron's TE layers",
        limits=Limits(
            dtypes=_HALF,
            max_head_size=256,
            head_multiple=8,
            layers="transformer_engine",
            # Not for packed samples: attention/dot_product_attention/utils.py 515, 704, v2.9.
            features=frozenset(Feature) - {Feature.SINK, Feature.MAX_LOGIT},
            min_capability=_AMPERE,
        ),
    ),
    AttentionBackend(
        name="flash3",
        core_attention=f"{_PACKAGE}.flash:Flash3CoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda",),
        why_unavailable=_why_no_flash3,
        description="flash-attn 3 flash_attn_varlen_func",
        limits=Limits(
            dtypes=_HALF,
            max_head_size=256,
            head_multiple=8,
            features=frozenset({Feature.WINDOW, Feature.DETERMINISTIC, Feature.GRAPHS}),
            min_capability=(9, 0),
            max_capability=(9, 0),
        ),
    ),
    AttentionBackend(
        name="flash4",
        core_attention=f"{_PACKAGE}.flash:Flash4CoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda",),
        why_unavailable=_why_no_flash4,
        description="flash-attn 4 (CuTe) flash_attn_varlen_func",
        limits=Limits(
            dtypes=_HALF,
            max_head_size=128,
            head_multiple=8,
            features=frozenset({Feature.WINDOW, Feature.DETERMINISTIC}),
            min_capability=(9, 0),
        ),
    ),
    AttentionBackend(
        name="flash",
        core_attention=f"{_PACKAGE}.flash:FlashCoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda",),
        why_unavailable=_why_no_flash,
        description="flash-attn 2 flash_attn_varlen_func",
        limits=Limits(
            dtypes=_HALF,
            max_head_size=256,
            head_multiple=8,
            features=frozenset(
                {Feature.DROPOUT, Feature.WINDOW, Feature.DETERMINISTIC, Feature.GRAPHS}
            ),
            min_capability=_AMPERE,
        ),
    ),
    AttentionBackend(
        name="torch",
        core_attention=f"{_PACKAGE}.torch_kernels:TorchCoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda",),
        why_unavailable=_why_no_torch_varlen,
        description="torch.nn.attention.varlen",
        limits=Limits(
            dtypes=_HALF,
            max_head_size=256,
            head_multiple=8,
            features=frozenset({Feature.WINDOW, Feature.GRAPHS}),
            min_capability=_AMPERE,
        ),
    ),
    AttentionBackend(
        name="torch_flex",
        core_attention=f"{_PACKAGE}.torch_kernels:TorchFlexCoreAttention",
        auto_devices=("cuda",),
        named_devices=("cuda", "cpu"),
        why_unavailable=_why_no_torch_flex,
        description="torch flex_attention with a block mask (on the CPU without gradients)",
        limits=Limits(features=frozenset({Feature.WINDOW})),
    ),
    AttentionBackend(
        name="cpu",
        core_attention=f"{_PACKAGE}.cpu:CpuCoreAttention",
        auto_devices=("cpu",),
        named_devices=("cpu", "cuda"),
        why_unavailable=_why_no_megatron_core,
        description="torch scaled_dot_product_attention, one call per sample",
        limits=Limits(
            features=frozenset(
                {
                    Feature.DROPOUT,
                    Feature.WINDOW,
                    Feature.DETERMINISTIC,
                    Feature.CONTEXT_PARALLEL,
                }
            )
        ),
    ),
)

BACKENDS: Mapping[str, AttentionBackend] = {backend.name: backend for backend in _ALL}
"""All backends by name, in the order in which `auto` tries them."""


def select(
    name: str,
    *,
    device_type: str,
    need: Need | None = None,
    backends: Mapping[str, AttentionBackend] = BACKENDS,
) -> AttentionBackend:
    """Choose a backend.

    Args:
        name: a backend's name, or `auto` for the first one that is available and meant for the
            device and the need.
        device_type: `"cpu"` or `"cuda"`.
        need: what the model asks for; None for a choice by device alone.
        backends: what to choose from, by name.

    Returns:
        The backend, its `reason` saying why it was chosen.

    Raises:
        ValueError: unknown name; not available here; not for this device or need; none for `auto`.
    """
    if name == "auto":
        return _first_for(device_type, need, backends)
    if name not in backends:
        raise ValueError(
            f"attention backend {name!r} is unknown: choose auto or one of "
            f"{', '.join(backends)} (--odb-attention)"
        )
    backend = backends[name]
    if device_type not in backend.named_devices:
        raise ValueError(
            f"attention backend {name!r} runs on {' and '.join(backend.named_devices)}, and "
            f"this is {device_type}: pass --odb-attention auto, or start where there is such a "
            "device"
        )
    why_not = _why_not(backend, device_type, need, devices=backend.named_devices)
    if why_not is not None:
        raise ValueError(
            f"attention backend {name!r} cannot run on {device_type}: {why_not}. Mend that, or "
            "pass --odb-attention auto"
        )
    return replace(backend, reason=f"asked for by name: {backend.description}")


def _first_for(
    device_type: str, need: Need | None, backends: Mapping[str, AttentionBackend]
) -> AttentionBackend:
    passed_over: list[str] = []
    for backend in backends.values():
        why_not = _why_not(backend, device_type, need, devices=backend.auto_devices)
        if why_not is None:
            after = f"; passed over {', '.join(passed_over)}" if passed_over else ""
            return replace(
                backend, reason=f"first available on {device_type}: {backend.description}{after}"
            )
        passed_over.append(f"{backend.name} ({why_not})")
    by_name = [
        backend.name
        for backend in backends.values()
        if _why_not(backend, device_type, need, devices=backend.named_devices) is None
    ]
    way_out = f"ask for {' or '.join(by_name)} by name" if by_name else "mend one of these"
    raise ValueError(
        f"no attention backend for packed samples on {device_type}: "
        f"{', '.join(passed_over)}. Hint: {way_out} (--odb-attention)"
    )


def _why_not(
    backend: AttentionBackend, device_type: str, need: Need | None, *, devices: tuple[str, ...]
) -> str | None:
    if device_type not in devices:
        by_name = " unless asked for by name" if device_type in backend.named_devices else ""
        return f"not for {device_type}{by_name}"
    unfit = None if need is None else why_unfit(backend.limits, need)
    return unfit or backend.available()
