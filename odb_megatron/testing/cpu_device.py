"""Lets Megatron (core and training) run on a CPU with gloo, for tests and demos.

Production code must not use it: it replaces functions of torch and Megatron for the whole process,
as listed in `REPLACEMENTS` with a reason each. `torch.cuda.is_available` and
`torch.cuda.get_device_properties` stay as they are (inductor reads them). Processes started by
`spawn` do not inherit the layer; forked ones (torch's data-loader workers on Linux) do.

Megatron has no official CPU mode: `use_cpu_initialization` still asks CUDA for its RNG state
(megatron/core/tensor_parallel/random.py, up to 0.19.2). What is replaced was found by running
0.18.2 and 0.19.2 (core: GPTModel, DDP, distributed optimizer, all schedules, MoE; training:
`pretrain()` with evaluation and checkpoints).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch

__all__ = ["REPLACEMENTS", "Replacement", "activate", "is_active"]

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

    Imports Megatron where it is installed. A second call does nothing. Rank 0 (environment variable
    `RANK`, 0 where unset) prints one line.

    Raises:
        RuntimeError: CUDA is available here.
    """
    global _active  # noqa: PLW0603 (a process-wide switch is what this is)
    if _active:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU device layer was asked for, but torch sees a CUDA device: drop --device cpu "
            "to use it, or hide it with CUDA_VISIBLE_DEVICES= (empty)"
        )
    _import_megatron()
    for replacement in REPLACEMENTS:
        _apply(replacement)
    # That the CPU generator moved: here it stands in for CUDA's.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: (
            not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")
        )
    )
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

    def leave_uncompiled(model: Any = None, **_: Any) -> Any:
        return model or (lambda function: function)

    with mock.patch.object(torch, "compile", leave_uncompiled):
        for name in _MEGATRON_MODULES:
            with contextlib.suppress(ModuleNotFoundError):  # whoever needs it is told
                importlib.import_module(name)


class Replacement(NamedTuple):
    """One name that the layer replaces.

    Attributes:
        module: importable module, followed by `:Class` where the name is a class attribute.
        name: attribute to replace. In Megatron, other modules that imported the same object by
            name get the replacement as well.
        make: given the original, returns the replacement; a function object of its own each time,
            since dynamo refuses one object under two names.
        reason: why Megatron needs it on a CPU.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str


def _apply(replacement: Replacement) -> None:
    module_name, _, class_name = replacement.module.partition(":")
    in_megatron = module_name.startswith("megatron.")
    if in_megatron and module_name not in sys.modules:
        return
    owner: Any = importlib.import_module(module_name)
    if class_name:
        owner = getattr(owner, class_name)
    original = getattr(owner, replacement.name, None)
    if original is None:
        if in_megatron:
            return
        raise RuntimeError(
            f"{replacement.module} has no {replacement.name}: the CPU device layer was "
            "written for torch 2.13; use that, or mend its table"
        )
    made = replacement.make(original)
    setattr(owner, replacement.name, made)
    for key, module in list(sys.modules.items()) if in_megatron else ():
        # Others hold this very object under this name: `from x import name`.
        if key.startswith("megatron.") and vars(module).get(replacement.name) is original:
            setattr(module, replacement.name, made)


class _Ready:
    """Stands in for `torch.cuda.Stream` and `Event`: work on a CPU is done, and in order."""

    cuda_stream = 0

    def __init__(self, *_args: object, **_named: object) -> None:
        return None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def query(self) -> bool:
        return True

    def record_event(self, event: _Ready | None = None) -> _Ready:
        return event or _Ready()

    def _nothing(self, *_args: object) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def __enter__(self) -> _Ready:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        return None


def _gives(value: Callable[[], Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda _original: lambda *_args, **_named: value()


_nothing, _ready = _gives(lambda: None), _gives(_Ready)


def _set_rng_state(_original: Any) -> Callable[..., None]:
    return lambda new_state, *_args, **_named: torch.set_rng_state(new_state)


def _tensor_type(original: Any) -> Callable[..., Any]:
    """`Tensor.type()` answers as for a CUDA tensor; given a type, it converts on the CPU."""

    def tensor_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return tensor_type


def _on_cpu(original: Any) -> Callable[..., Any]:
    """A tensor factory that takes `device="cuda"` as the CPU and does not pin memory."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).partition(":")[0] == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _itself(_original: Any) -> Callable[..., Any]:
    return lambda self, *_args, **_named: self


def _all_to_all_single(original: Any) -> Callable[..., Any]:
    def all_to_all_single(output: Any, input: Any, *sizes: Any, **named: Any) -> Any:
        def plain(value: Any) -> Any:
            return value.tolist() if hasattr(value, "tolist") else value

        named = {
            key: plain(value) if "split_sizes" in key else value for key, value in named.items()
        }
        return original(output, input, *map(plain, sizes), **named)

    return all_to_all_single


def _all_gather(original: Any) -> Callable[..., Any]:
    """Gather tensors of unequal first dimensions padded to the longest: gloo refuses them."""

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        lengths = [len(part) if part.dim() else 1 for part in tensor_list]
        if async_op or len(set(lengths)) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in lengths]
        original(gathered, padded, group=group)
        for part, found in zip(tensor_list, gathered, strict=True):
            part.copy_(found[: len(part)])
        return None

    return all_gather


def _reduce_scatter(original: Any) -> Callable[..., Any]:
    """Reduce-scatter parts of unequal first dimensions by an all-reduce of all of them."""

    def reduce_scatter(output: Any, input_list: Any, *args: Any, **kwargs: Any) -> Any:
        if len({part.shape for part in input_list}) == 1 or args or set(kwargs) - {"group"}:
            return original(output, input_list, *args, **kwargs)
        total = torch.cat(list(input_list))
        torch.distributed.all_reduce(total, **kwargs)
        own = torch.distributed.get_rank(kwargs.get("group"))
        first = sum(len(part) for part in input_list[:own])
        output.copy_(total[first : first + len(output)])
        return None

    return reduce_scatter


def _initialize_megatron(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if args:
            return original(True, *args[1:], **kwargs)
        return original(**kwargs | {"allow_no_cuda": True})

    return initialize_megatron


def _norm_with_sequence_parallel(original: Any) -> Any:
    """Torch's norm, its parameters marked so that their gradients are summed over the ranks."""

    def make_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = original(cls, alone, *args, **kwargs)
        for parameter in norm.parameters() if config.sequence_parallel else ():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(make_norm)


_cpu = _gives(lambda: torch.device("cpu"))
_rng_state = _gives(torch.get_rng_state)
_RANDOM = "megatron.core.tensor_parallel.random"
_NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm"
_START = "megatron.training.initialize"

REPLACEMENTS = tuple(
    Replacement(*row)
    for row in (
        ("torch.cuda", "current_device", _cpu, "device of most of Megatron's buffers"),
        ("torch.cuda", "synchronize", _nothing, "called by timers, p2p and checkpoints"),
        ("torch.cuda", "get_rng_state", _rng_state, "read by RNG tracker and checkpoints"),
        ("torch.cuda.random", "get_rng_state", _rng_state, "read by the tracker's fork"),
        ("torch.cuda", "set_rng_state", _set_rng_state, "loading silently did nothing"),
        (
            "torch.cuda", "manual_seed",
            lambda _: lambda seed: torch.default_generator.manual_seed(int(seed)),
            "seeding silently did nothing",
        ),
        ("torch:Tensor", "type", _tensor_type, "compared with 'torch.cuda.FloatTensor'"),
        ("torch:Tensor", "cuda", _itself, "model and optimizer state are moved to CUDA"),
        ("torch:Tensor", "pin_memory", _itself, "a CUDA build without a GPU cannot pin"),
        ("torch", "tensor", _on_cpu, "created with device='cuda'"),
        ("torch", "zeros", _on_cpu, "created with device='cuda'"),
        ("torch.cuda", "current_stream", _ready, "read by DDP and MoE dispatch"),
        ("torch.cuda", "stream", _ready, "entered by DDP set-up and MoE dispatch"),
        ("torch.cuda", "Stream", lambda _: _Ready, "made by DDP set-up and MoE dispatch"),
        ("torch.cuda", "Event", lambda _: _Ready, "made by MoE dispatch"),
        ("torch.distributed", "all_to_all_single", _all_to_all_single, "splits must be lists"),
        ("torch.distributed", "all_gather", _all_gather, "experts with TP: unequal sizes"),
        ("torch.distributed", "reduce_scatter", _reduce_scatter, "experts with TP: as above"),
        ("torch.cuda", "device_count", _gives(lambda: 1), "training initializes mpu only if >= 1"),
        ("torch.cuda", "is_current_stream_capturing", _gives(lambda: False), "asked by dev's p2p"),
        ("torch.cuda", "set_device", _nothing, "training selects a device if there is one"),
        (_RANDOM, "_set_cuda_rng_state", _set_rng_state, "restoring the state did nothing"),
        (
            _NORM, "__new__", _norm_with_sequence_parallel,
            "refuses sequence parallelism; Apex's norms need CUDA",
        ),
        (
            "megatron.core.datasets.utils", "compile_helpers", _nothing,
            "the wheel ships the compiled helpers but no Makefile, so compiling exits",
        ),
        (
            _START, "initialize_megatron", _initialize_megatron,
            "asserts CUDA unless allow_no_cuda=True, which pretrain() does not pass",
        ),
        (
            _START, "set_jit_fusion_options", _nothing,
            "warms up fused functions on device='cuda' at full sequence length",
        ),
        (
            "megatron.training.arguments", "get_device_arch_version", _gives(lambda: 10),
            "reads the GPU's properties; from 10 on no CUDA_DEVICE_MAX_CONNECTIONS is demanded",
        ),
    )
)  # fmt: skip
