"""Lets Megatron (core and training, 0.16 to 0.19) run on a CPU with gloo, for tests and demos.

Must not change anything at import time, must not run where CUDA is available, and must not be
used by production code: it replaces functions of torch and Megatron for the whole process, as
listed in `cpu_replacements.REPLACEMENTS` with a reason each. `torch.cuda.is_available` and
`torch.cuda.get_device_properties` stay as they are (inductor reads them). Processes started by
`spawn` do not inherit the layer; forked ones (torch's data-loader workers on Linux) do.

Megatron has no official CPU mode: `use_cpu_initialization` still asks CUDA for its RNG state
(megatron/core/tensor_parallel/random.py, 0.16.1 to 0.19.2).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from types import ModuleType
from typing import Any

from odb_megatron.testing.cpu_replacements import REPLACEMENTS, Replacement

__all__ = ["activate", "is_active"]

_NOTICE = (
    "odb_megatron: Megatron runs on CPU with gloo in this process "
    "(device layer for tests and demos, not for training at speed)"
)

# Megatron modules imported before anything is replaced, so that each finds torch as it is.
_MEGATRON_MODULES = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.datasets.utils",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.torch_norm",
    "megatron.training.initialize",
    "megatron.training.training",
)

_active = False


def is_active() -> bool:
    """Whether `activate` has run in this process."""
    return _active


def activate() -> None:
    """Replace what Megatron needs from CUDA by CPU equivalents, for the rest of the process.

    Imports torch and, where installed, Megatron. A second call does nothing. Rank 0 (environment
    variable `RANK`, 0 where unset) prints one line.

    Raises:
        RuntimeError: CUDA is available here, or torch is told to count devices through NVML,
            in which case a replaced device count would make CUDA look available.
    """
    global _active  # noqa: PLW0603 (a process-wide switch is what this is)
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU device layer was asked for, but torch sees a CUDA device: drop --device cpu "
            "to use it, or hide it with CUDA_VISIBLE_DEVICES= (empty)"
        )
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
        raise RuntimeError(
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 makes torch.cuda.is_available() follow the replaced "
            "device count: unset it to use the CPU device layer"
        )
    _import_megatron()
    for replacement in REPLACEMENTS:
        _apply(replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_cpu_rng)
    _active = True
    if os.environ.get("RANK", "0") == "0":
        print(_NOTICE, flush=True)


def _import_megatron() -> None:
    """Import what is installed, without compiling Megatron's fused functions.

    Megatron decorates them with `torch.compile` as it is imported (megatron/core/jit.py).
    Compiling takes 20 s in the first step of a process and again when lengths change, and needs a
    C++ compiler. Modules imported before the layer keep their compiled functions; `torch.compile`
    itself is as before when this returns.
    """
    import torch

    compile_function = torch.compile
    torch.compile = _leave_uncompiled
    try:
        for package in ("megatron.core", "megatron.training"):
            if _is_installed(package):
                for name in _MEGATRON_MODULES:
                    if name.startswith(package + "."):
                        importlib.import_module(name)
    finally:
        torch.compile = compile_function


def _leave_uncompiled(model: Any = None, **_options: object) -> Any:
    """`torch.compile`, as function or as decorator with options, that compiles nothing."""
    return (lambda function: function) if model is None else model


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; `megatron` itself is a namespace package."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _apply(replacement: Replacement) -> None:
    module_name, _, class_name = replacement.module.partition(":")
    in_megatron = module_name.startswith("megatron.")
    if in_megatron and module_name not in sys.modules:
        return
    owner: Any = importlib.import_module(module_name)
    if class_name:
        owner = getattr(owner, class_name)
    original = getattr(owner, replacement.name, None)
    if original is None and not replacement.may_be_absent:
        if in_megatron:
            return
        raise RuntimeError(
            f"{replacement.module} has no {replacement.name}: the CPU device layer was "
            "written for torch 2.13; use that, or mend its table"
        )
    made = replacement.make(original)
    setattr(owner, replacement.name, made)
    if in_megatron and original is not None:
        for module in _megatron_modules_with(replacement.name, original):
            setattr(module, replacement.name, made)


def _megatron_modules_with(name: str, value: object) -> list[ModuleType]:
    """Megatron modules that hold this very object under this name (`from x import name`)."""
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("megatron.")
        and isinstance(module, ModuleType)
        and module.__dict__.get(name) is value
    ]


def _not_about_cpu_rng(record: logging.LogRecord) -> bool:
    """Drop the warning that the CPU generator moved: here it stands in for CUDA's."""
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")
