"""Runs an attention backend on the cases and measures how far it is from the reference.

Must not choose a backend. Where the kernel's package is missing a fake with its signature stands
in, so that what is passed to it is checked (`contract`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_megatron.megatron.attention.registry import AttentionBackend
from odb_megatron.testing.attention_cases import CASES, Case, attend, real_places
from odb_megatron.testing.fake_kernels import fake_flash, fake_torch_varlen

__all__ = ["Difference", "contract", "measure", "te_contract", "worst"]

TE_VERSIONS = ("2.9.0", "2.18.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a backend is from the reference, at most over the cases.

    Attributes:
        output: absolute difference of an output, over real tokens.
        gradient: of a gradient, relative to the largest of its case; None where there are none.
        num_cases: cases that were run.
    """

    output: float
    gradient: float | None
    num_cases: int

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether it is what rounding explains."""
        most = 1e-5 if dtype == torch.float32 else 3e-2
        return self.output <= most and (self.gradient or 0.0) <= most


def measure(core_attention: type[Any], *, device: str, dtype: torch.dtype) -> Difference:
    """Run a core-attention class on every case.

    Args:
        core_attention: from `AttentionBackend.load`.
        device: `cpu` or `cuda`.
        dtype: of queries, keys and values.
    """
    has_gradient = not (device == "cpu" and "Flex" in core_attention.__name__)
    with _flex_not_traced():
        found = [
            _one(core_attention, case, device=device, dtype=dtype, has_gradient=has_gradient)
            for case in CASES.values()
            if core_attention.__name__ != "CpuCoreAttention" or case.lengths
        ]
    return Difference(
        output=max(output for output, _ in found),
        gradient=max(gradient for _, gradient in found) if has_gradient else None,
        num_cases=len(found),
    )


def contract(backend: AttentionBackend) -> Difference | None:
    """Run a backend on a fake of its kernel, on the CPU; None where there is none to fake."""
    if backend.name == "te":
        return worst([_in_own_process(version) for version in TE_VERSIONS])
    with contextlib.ExitStack() as stack:
        if backend.name.startswith("flash"):
            kernel = stack.enter_context(fake_flash(backend.name))
        elif backend.name == "torch":
            kernel = stack.enter_context(fake_torch_varlen())
        else:
            return None
        found = measure(backend.load(), device="cpu", dtype=torch.bfloat16)
        assert len(kernel.calls) == found.num_cases, "a case did not reach the kernel"
    return found


def worst(results: Sequence[Difference]) -> Difference:
    """Return the largest difference of each kind, and the fewest cases."""
    gradients = [result.gradient for result in results if result.gradient is not None]
    return Difference(
        output=max(result.output for result in results),
        gradient=max(gradients, default=None),
        num_cases=min(result.num_cases for result in results),
    )


def te_contract(version: str) -> Difference:
    """As `contract` for Transformer Engine; only in a process that has imported no Megatron."""
    from odb_megatron.testing.fake_kernels import fake_transformer_engine

    kernel = fake_transformer_engine(version)
    from odb_megatron.megatron.attention.te import TECoreAttention

    found = measure(TECoreAttention, device="cpu", dtype=torch.bfloat16)
    assert len(kernel.calls) == found.num_cases, "a case did not reach the kernel"
    return found


def _in_own_process(version: str) -> Difference:
    code = (
        "import json, dataclasses, odb_megatron.testing.backend_checks as checks; "
        f"print(json.dumps(dataclasses.asdict(checks.te_contract({version!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Transformer Engine {version} (fake): {done.stderr[-2000:]}")
    return Difference(**json.loads(done.stdout.splitlines()[-1]))


def _one(
    core_attention: type[Any],
    case: Case,
    *,
    device: str,
    dtype: torch.dtype,
    has_gradient: bool,
) -> tuple[float, float]:
    from megatron.core.packed_seq_params import PackedSeqParams

    where = case.layout()
    offsets = where.cu_seqlens_padded
    real = real_places(where) if case.lengths else torch.ones(int(offsets[-1]), dtype=torch.bool)
    tensors = [tensor.to(device) for tensor in case.tensors(dtype=dtype)]
    own = [tensor.clone().requires_grad_(has_gradient) for tensor in tensors]
    others = [tensor.double().requires_grad_() for tensor in tensors]
    on_device = [tensor.to(device) for tensor in (where.cu_seqlens, offsets)]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device[0],
        cu_seqlens_kv=on_device[0],
        cu_seqlens_q_padded=on_device[1],
        cu_seqlens_kv_padded=on_device[1],
        max_seqlen_q=where.max_seqlen,
        max_seqlen_kv=where.max_seqlen,
    )
    module = _build(core_attention, case)
    with _no_gradient(not has_gradient):
        out = module(*own, None, _causal(), packed_seq_params=packed)
    expected = attend(*_three(others), offsets.tolist(), case).flatten(1)
    assert out.shape == expected.shape, f"shape {tuple(out.shape)}"
    assert torch.isfinite(out).all(), "a token was left unwritten"
    output = _most(out, expected, real)
    if not has_gradient:
        return output, 0.0
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64) * real[:, None]
    weights = weights.to(device)
    mine = torch.autograd.grad((out.double() * weights).sum(), own)
    wanted = torch.autograd.grad((expected * weights).sum(), others)
    largest = max(1e-3, *(float(gradient.abs().max()) for gradient in wanted))
    pairs = zip(mine, wanted, strict=True)
    return output, max(_most(one, other, real) for one, other in pairs) / largest


def _build(core_attention: type[Any], case: Case) -> Any:
    from types import SimpleNamespace

    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.num_heads * case.head_size,
        num_attention_heads=case.num_heads,
        num_query_groups=case.num_groups,
        kv_channels=case.head_size,
        attention_dropout=0.0,
        window_size=None if case.window is None else (case.window, 0),
    )
    return core_attention(
        config,
        1,
        _causal(),
        "self",
        softmax_scale=case.scale,
        pg_collection=SimpleNamespace(tp=None, cp=None),
    )


def _causal() -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType.causal


def _three(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors
    return query, key, value


def _most(one: Tensor, other: Tensor, real: Tensor) -> float:
    difference = (one.detach().double() - other.detach()).abs().flatten(1).amax(dim=1).cpu()
    return float(difference[real].max()) if bool(real.any()) else 0.0


@contextlib.contextmanager
def _flex_not_traced() -> Iterator[None]:
    """On the CPU flex-attention traces itself anew for each case, for the same plain operations."""
    from torch.nn.attention import flex_attention

    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if torch.cuda.is_available() or not hasattr(flex_attention, name):
        yield
        return
    setattr(flex_attention, name, True)
    try:
        yield
    finally:
        setattr(flex_attention, name, False)


@contextlib.contextmanager
def _no_gradient(wanted: bool) -> Iterator[None]:
    with torch.no_grad() if wanted else contextlib.nullcontext():
        yield
