"""Stands in for attention packages: their calls, executed by the reference on any device.

For checks on machines without them; must not be used to train. A fake takes exactly the arguments
of the real function, asserts what its documentation demands of them, notes them, and leaves
unwritten (NaN) what the real one would: tokens outside all segments, and past `max_seqlen`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from odb_megatron.testing.attention_cases import Case, attend
from odb_megatron.testing.kernel_signatures import SIGNATURES, KernelSignature

__all__ = ["FakeKernel", "fake_flash", "fake_torch_varlen", "fake_transformer_engine"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True, kw_only=True)
class FakeKernel:
    """One function.

    Attributes:
        kernel: its declaration.
        calls: arguments of each call, by name.
    """

    kernel: KernelSignature
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Bind, check, note, compute."""
        given = self.kernel.signature().bind(*args, **kwargs).arguments
        self.calls.append(given)
        names = list(given)
        query, key, value = (given[name] for name in names[:3])
        is_torch = "cu_seq_q" in given
        offsets: Tensor = given["cu_seq_q" if is_torch else "cu_seqlens_q"]
        others: Tensor = given["cu_seq_k" if is_torch else "cu_seqlens_k"]
        longest = given["max_q" if is_torch else "max_seqlen_q"]
        _check(query, key, value)
        for each in (offsets, others):
            assert each.dtype == torch.int32, "cu_seqlens are int32"
            assert each.dim() == 1, "cu_seqlens are [samples + 1]"
            assert each.device == query.device, "cu_seqlens are where queries are"
        assert type(longest) is int, "max_seqlen is an int on the host"
        assert torch.equal(offsets, others), "self-attention"
        return _compute(query, key, value, offsets, longest=longest, **_meaning(given))


def _meaning(given: dict[str, Any]) -> dict[str, Any]:
    """Scale, window and groups as the packages spell them."""
    scale = given.get("softmax_scale", given.get("scale"))
    left, right = given.get("window_size") or (-1, -1)
    left = -1 if left is None else left
    is_causal = given.get("causal") or "causal" in (given.get("attn_mask_type") or "")
    assert is_causal or right == 0, "not causal"
    assert left < 0 or right == 0, "a window to the right of a causal query"
    return {"scale": scale, "window": None if left < 0 else left}


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    assert query.dim() == key.dim() == value.dim() == 3, "packed tensors are [T, heads, D]"
    assert query.dtype == key.dtype == value.dtype, "one dtype"
    assert query.dtype in _HALF, "half precision"
    assert query.size(1) % key.size(1) == 0, "groups divide heads"
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "contiguous channels"
    assert query.size(2) % 8 == 0, "head sizes are multiples of 8"


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    *,
    longest: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    case = Case(lengths=(), head_size=query.size(2), scale=scale, window=window)
    ends = offsets.tolist()
    out = attend(query, key, value, ends, case)
    unwritten = torch.ones(query.size(0), dtype=torch.bool)
    for start, end in pairwise(ends):
        unwritten[start : min(end, start + longest)] = False
    rest = out.new_zeros(query.size(0) - out.size(0), *out.shape[1:])
    out = torch.cat([out, rest]).masked_fill(unwritten[:, None, None], torch.nan)
    return out.to(query.dtype)


@contextmanager
def fake_flash(name: str) -> Iterator[FakeKernel]:
    """Put a fake of backend `flash`, `flash3` or `flash4` into `sys.modules`."""
    kernel = FakeKernel(kernel=SIGNATURES[name])
    modules = _modules(SIGNATURES[name].module)
    list(modules.values())[-1].flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    before = {module: sys.modules.get(module) for module in modules}
    sys.modules.update(modules)
    try:
        yield kernel
    finally:
        for module, original in before.items():
            if original is None:
                del sys.modules[module]
            else:
                sys.modules[module] = original


@contextmanager
def fake_torch_varlen() -> Iterator[FakeKernel]:
    """Replace `varlen_attn`, which has no CPU kernel, by a fake with its signature."""
    from torch.nn.attention import varlen

    kernel = FakeKernel(kernel=SIGNATURES["torch"])
    original = varlen.varlen_attn

    def varlen_attn(*args: Any, **kwargs: Any) -> Tensor:
        return kernel(*args, **kwargs)

    varlen_attn.__signature__ = kernel.kernel.signature()  # type: ignore[attr-defined]
    varlen.varlen_attn = varlen_attn
    try:
        yield kernel
    finally:
        varlen.varlen_attn = original


def _modules(name: str) -> dict[str, ModuleType]:
    parts = name.split(".")
    names = [".".join(parts[: at + 1]) for at in range(len(parts))]
    modules = {}
    for each in names:
        modules[each] = ModuleType(each)
        modules[each].__spec__ = ModuleSpec(each, None, is_package=True)
    return modules


class _Package(ModuleType):
    """A module that has every class and function it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.lstrip("_")[:1].isupper():
            made: Any = type(name, (torch.nn.Module,), {})
        else:
            made = lambda *_args, **_kwargs: None  # noqa: E731
        setattr(self, name, made)
        return made


_TE_MODULES = (
    *("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"),
    "transformer_engine.pytorch",
    *(
        f"transformer_engine.pytorch.{name}"
        for name in (
            *("attention", "attention.rope", "cpp_extensions", "cpu_offload", "cross_entropy"),
            *("distributed", "float8_tensor", "fp8", "module", "module.base", "permutation"),
            *("router", "tensor", "tensor.mxfp8_tensor", "tensor.utils", "graph", "utils"),
        )
    ),
)
"""What Megatron 0.19.2 imports."""


def fake_transformer_engine(version: str) -> FakeKernel:
    """Install a Transformer Engine of which only `DotProductAttention` computes; for good.

    To be called before Megatron is imported, in a process that does nothing else: Megatron takes
    its Transformer Engine paths from then on.

    Args:
        version: what it says it is; "2.18.0" and later have the newer signature.
    """
    newer = tuple(map(int, version.split(".")[:2])) >= (2, 18)
    kernel = FakeKernel(kernel=SIGNATURES["te 2.18" if newer else "te"])
    modules = {name: _Package(name) for name in _TE_MODULES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    modules["transformer_engine"].__version__ = version  # type: ignore[attr-defined]

    class DotProductAttention(torch.nn.Module):
        """Keeps what it is built with; forward is the fake kernel."""

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            """Scale and window were given to the constructor."""
            own = {"window_size": self.options.get("window_size")}
            given = kernel.kernel.signature().bind(*args, **kwargs).arguments
            assert given["qkv_format"] == "thd"
            kernel.calls.append(given)
            query, key, value = tuple(given.values())[:3]
            _check(query, key, value)
            meaning = _meaning({**given, **own})
            meaning["scale"] = self.options.get("softmax_scale")
            padded = given.get("cu_seqlens_q_padded")
            is_same = padded is None or padded is given["cu_seqlens_q"]
            assert is_same, "FlashAttention is left out where samples have padding between them"
            offsets, longest = given["cu_seqlens_q"], given["max_seqlen_q"]
            return _compute(query, key, value, offsets, longest=longest, **meaning).flatten(1)

    modules["transformer_engine.pytorch"].DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    sys.modules.update(modules)
    return kernel
