"""The names of torch and Megatron that the CPU device layer replaces, each with its reason.

Must not replace anything itself: `cpu_device.activate` does. Imports neither torch nor Megatron.
What is replaced was found by running Megatron 0.16.1 and 0.19.2 (core: GPTModel, DDP, distributed
optimizer, all schedules, MoE; training: `pretrain()` with evaluation and checkpoints).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["REPLACEMENTS", "Replacement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One name that the layer replaces.

    Attributes:
        module: importable module, followed by `:Class` where the name is a class attribute.
        name: attribute to replace. In Megatron, other modules that imported the same object by
            name get the replacement as well.
        make: given the original (None where the installed version lacks the name), returns the
            replacement; a function object of its own each time, since dynamo refuses one object
            under two names.
        reason: why Megatron needs it on a CPU.
        may_be_absent: set the name even where the installed version does not have it.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str
    may_be_absent: bool = False


class _CpuStream:
    """Stands in for `torch.cuda.Stream`: work on a CPU is already in order."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def record_event(self, event: _CpuEvent | None = None) -> _CpuEvent:
        return _CpuEvent() if event is None else event

    def __enter__(self) -> _CpuStream:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        return None


class _CpuEvent:
    """Stands in for `torch.cuda.Event`: always complete."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None

    def record(self, stream: object = None) -> None:
        """Complete at once."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


def _current_device(_original: Any) -> Callable[[], Any]:
    import torch

    def current_device() -> Any:
        return torch.device("cpu")

    return current_device


def _nothing(_original: Any) -> Callable[..., None]:
    def do_nothing(*_args: object, **_kwargs: object) -> None:
        return None

    return do_nothing


def _constant(value: object) -> Callable[[Any], Callable[[], object]]:
    def make(_original: Any) -> Callable[[], object]:
        return lambda: value

    return make


def _get_rng_state(_original: Any) -> Callable[..., Any]:
    import torch

    def get_rng_state(device: object = "cuda") -> Any:
        return torch.get_rng_state()

    return get_rng_state


def _set_rng_state(_original: Any) -> Callable[..., None]:
    import torch

    def set_rng_state(new_state: Any, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_rng_state


def _manual_seed(_original: Any) -> Callable[[int], None]:
    import torch

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    return manual_seed


def _tensor_type(original: Any) -> Callable[..., Any]:
    """`Tensor.type()` answers as for a CUDA tensor; given a type, it converts on the CPU."""

    def tensor_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return tensor_type


def _is_cuda(device: object) -> bool:
    return device is not None and str(device).partition(":")[0] == "cuda"


def _on_cpu(original: Any) -> Callable[..., Any]:
    """A tensor factory that takes `device="cuda"` as the CPU and does not pin memory."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _itself(_original: Any) -> Callable[..., Any]:
    def stay(self: Any, *_args: object, **_kwargs: object) -> Any:
        return self

    return stay


def _current_stream(_original: Any) -> Callable[..., _CpuStream]:
    def current_stream(device: object = None) -> _CpuStream:
        return _CpuStream()

    return current_stream


def _stream_context(_original: Any) -> Callable[..., _CpuStream]:
    def stream(stream: object) -> _CpuStream:
        return _CpuStream()

    return stream


def _all_to_all_single(original: Any) -> Callable[..., Any]:
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return original(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **kwargs
        )

    return all_to_all_single


def _all_gather(original: Any) -> Callable[..., Any]:
    """Gather tensors of unequal first dimensions padded to the longest: gloo refuses them."""
    import torch

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
    import torch

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


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _initialize_megatron(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs["allow_no_cuda"] = True
        else:
            args = (True, *args[1:])
        return original(*args, **kwargs)

    return initialize_megatron


def _norm_with_sequence_parallel(original: Any) -> Any:
    """Torch's norm, its parameters marked so that their gradients are summed over the ranks."""

    def make_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = original(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(make_norm)


def _row(
    module: str, name: str, make: Callable[[Any], Any], reason: str, *, may_be_absent: bool = False
) -> Replacement:
    return Replacement(
        module=module, name=name, make=make, reason=reason, may_be_absent=may_be_absent
    )


REPLACEMENTS: tuple[Replacement, ...] = (
    _row("torch.cuda", "current_device", _current_device, "device of most of Megatron's buffers"),
    _row("torch.cuda", "synchronize", _nothing, "called by timers, p2p and checkpoints"),
    _row("torch.cuda", "get_rng_state", _get_rng_state, "read by RNG tracker and checkpoints"),
    _row("torch.cuda.random", "get_rng_state", _get_rng_state, "read by the tracker's fork"),
    _row("torch.cuda", "set_rng_state", _set_rng_state, "loading silently did nothing"),
    _row("torch.cuda", "manual_seed", _manual_seed, "seeding silently did nothing"),
    _row("torch:Tensor", "type", _tensor_type, "compared with 'torch.cuda.FloatTensor'"),
    _row("torch:Tensor", "cuda", _itself, "model and optimizer state are moved to CUDA"),
    _row("torch:Tensor", "pin_memory", _itself, "a CUDA build without a GPU cannot pin"),
    _row("torch", "tensor", _on_cpu, "created with device='cuda'"),
    _row("torch", "zeros", _on_cpu, "created with device='cuda'"),
    _row("torch.cuda", "current_stream", _current_stream, "read by DDP and MoE dispatch"),
    _row("torch.cuda", "stream", _stream_context, "entered by DDP set-up and MoE dispatch"),
    _row("torch.cuda", "Stream", lambda _: _CpuStream, "made by DDP set-up and MoE dispatch"),
    _row("torch.cuda", "Event", lambda _: _CpuEvent, "made by MoE dispatch"),
    _row("torch.distributed", "all_to_all_single", _all_to_all_single, "splits must be lists"),
    _row("torch.distributed", "all_gather", _all_gather, "experts with TP: unequal sizes"),
    _row("torch.distributed", "reduce_scatter", _reduce_scatter, "experts with TP: as above"),
    _row("torch.cuda", "device_count", _constant(1), "training initializes mpu only if >= 1"),
    _row("torch.cuda", "is_current_stream_capturing", _constant(False), "asked by dev's p2p"),
    _row("torch.cuda", "set_device", _nothing, "training selects a device if there is one"),
    _row(
        "megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state,
        "restoring the state silently did nothing",
    ),
    _row(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm", "__new__",
        _norm_with_sequence_parallel, "refuses sequence parallelism; Apex's norms need CUDA",
    ),
    _row(
        "megatron.core.datasets.utils", "compile_helpers", _nothing,
        "the wheel ships the compiled helpers but no Makefile, so compiling exits",
    ),
    _row(
        "megatron.training.initialize", "initialize_megatron", _initialize_megatron,
        "asserts CUDA unless allow_no_cuda=True, which pretrain() does not pass",
    ),
    _row(
        "megatron.training.initialize", "set_jit_fusion_options", _nothing,
        "warms up fused functions on device='cuda' at full sequence length",
    ),
    _row(
        "megatron.training.arguments", "get_device_arch_version", _constant(10),
        "reads the GPU's properties; from 10 on no CUDA_DEVICE_MAX_CONNECTIONS is demanded",
    ),
)  # fmt: skip
