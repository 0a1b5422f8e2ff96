"""Checks every attention backend against the CPU reference on one small batch, and times it.

Must not choose a backend for training, and must not know any by name but the reference: a backend
that is added to the registry is checked here without a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_model import ModelSize, attention_config, parameter_dtype
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from odb_megatron.data.thd import MicroBatchLayout
from odb_megatron.megatron.attention.registry import BACKENDS, AttentionBackend
from odb_megatron.megatron.attention.spec import layer_spec
from odb_megatron.megatron.run_report import Clock

__all__ = ["REFERENCE", "BackendCheck", "check_backends"]

REFERENCE = "cpu"
_LENGTHS = (7, 64, 1, 130, 33)
_CASES = {"packed": 1, "packed_with_padding": 16}
_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Most ‖out − reference‖ / ‖reference‖; the reference is computed in float32."""
_TIMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCheck:
    """Under what backends are checked.

    Attributes:
        size: of the model.
        device_type: `"cuda"` or `"cpu"`.
        lengths: of the samples of one full micro-batch, to time the backend on.
        seed: of the tensors.
    """

    size: ModelSize
    device_type: str
    lengths: Sequence[int]
    seed: int


def check_backends(check: BackendCheck, clock: Clock) -> dict[str, dict[str, object]]:
    """Check all backends of the registry; one that fails does not stop the others.

    Returns:
        By name: `available`, and either `reason` or, per case, `passed`, `max_abs_diff` and
        `rel_diff` of the output and of the three gradients; `attention_ms` is a forward and
        backward pass of one layer's attention over a full micro-batch, the median of five.
    """
    found: dict[str, dict[str, object]] = {}
    for name, backend in BACKENDS.items():
        why_not = backend.available()
        if why_not is None and check.device_type not in backend.named_devices:
            why_not = f"not for {check.device_type}"
        if why_not is not None:
            found[name] = {"available": False, "reason": why_not}
            continue
        is_reference = name == REFERENCE and check.device_type == "cpu"
        found[name] = {
            "available": True,
            "is_reference": is_reference,
            **_check(backend, check, clock),
        }
    return found


def _check(backend: AttentionBackend, check: BackendCheck, clock: Clock) -> dict[str, object]:
    result: dict[str, object] = {"cases": {}}
    cases: dict[str, object] = {}
    for case, multiple in _CASES.items():
        try:
            cases[case] = _compare(backend, check, multiple)
        except Exception as error:  # whatever a kernel's package raises
            cases[case] = {"passed": False, "error": _text(error)}
    result["cases"] = cases
    try:
        result["attention_ms"] = _time(backend, check, clock)
    except Exception as error:
        result["error"] = _text(error)
    return result


def _compare(backend: AttentionBackend, check: BackendCheck, multiple: int) -> dict[str, object]:
    config = attention_config(check.size, check.device_type)
    where = _layout(_LENGTHS, multiple)
    dtype = parameter_dtype(check.device_type)
    inputs = _inputs(where, config, check.seed, dtype)
    reference = _run(
        _attention(BACKENDS[REFERENCE], config),
        [tensor.float() for tensor in inputs],
        where,
        torch.device("cpu"),
    )
    device = torch.device(torch.cuda.current_device())
    found = _run(_attention(backend, config).to(device), inputs, where, device)
    real = _real(where)
    differences = []
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, reference, strict=True):
        one, other = one.double()[real], other.double()[real]
        differences.append(
            {
                "of": name,
                "max_abs_diff": float((one - other).abs().max()),
                "rel_diff": float((one - other).norm() / other.norm()),
            }
        )
    worst = max(float(str(each["rel_diff"])) for each in differences)
    limit = _LIMITS[dtype]
    return {
        "passed": bool(np.isfinite(worst) and worst <= limit),
        "limit": limit,
        "differences": differences,
    }


def _time(backend: AttentionBackend, check: BackendCheck, clock: Clock) -> float:
    config = attention_config(check.size, check.device_type)
    where = _layout(check.lengths, 1)
    device = torch.device(torch.cuda.current_device())
    inputs = _inputs(where, config, check.seed, parameter_dtype(check.device_type))
    *moved, gradient = (tensor.to(device) for tensor in inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in moved]
    attention, parameters = (
        _attention(backend, config).to(device),
        _packed_parameters(where, device),
    )
    times = []
    for _ in range(1 + _TIMED):
        torch.cuda.synchronize()
        start = clock.mark()
        _pass(attention, leaves, gradient, parameters)
        end = clock.mark()
        torch.cuda.synchronize()
        times.append(clock.elapsed_s(start, end) * 1e3)
    return float(np.median(times[1:]))


def _attention(backend: AttentionBackend, config: TransformerConfig) -> Any:
    """Build one layer's core attention, as the backend's layer spec has it."""
    spec: Any = layer_spec(config, backend=backend)
    return spec.submodules.self_attention.submodules.core_attention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None,
    )


def _layout(lengths: Sequence[int], multiple: int) -> MicroBatchLayout:
    padded = [-(-length // multiple) * multiple for length in lengths]
    return MicroBatchLayout(
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32),
        max_seqlen=max(padded),
        positions=tuple(range(len(lengths))),
    )


def _inputs(
    where: MicroBatchLayout, config: TransformerConfig, seed: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Queries, keys, values [T, N, D] and a gradient [T, N * D], on the CPU."""
    random = torch.Generator().manual_seed(seed)
    heads, channels = config.num_attention_heads, config.kv_channels
    num_tokens = int(where.cu_seqlens_padded[-1])
    shapes = [(num_tokens, heads, channels)] * 3 + [(num_tokens, heads * channels)]
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def _run(
    attention: Any,
    inputs: Sequence[torch.Tensor],
    where: MicroBatchLayout,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return the output [T, N, D] and the gradients of queries, keys and values, on the CPU.

    At padding the output's gradient is zero, as the loss's is there.
    """
    query, key, value = (tensor.to(device).detach().requires_grad_() for tensor in inputs[:3])
    real = _real(where).to(device)
    gradient = inputs[3].to(device) * real[:, None]
    _pass(attention, (query, key, value), gradient, _packed_parameters(where, device))
    with torch.no_grad():
        out = _forward(attention, (query, key, value), _packed_parameters(where, device))
    found = [out.reshape(query.shape), query.grad, key.grad, value.grad]
    return [tensor.cpu() for tensor in found if tensor is not None]


def _pass(
    attention: Any, inputs: Sequence[torch.Tensor], gradient: torch.Tensor, parameters: Any
) -> None:
    """Run a forward and a backward pass."""
    _forward(attention, inputs, parameters).reshape(gradient.shape).backward(gradient)


def _forward(attention: Any, inputs: Sequence[torch.Tensor], parameters: Any) -> Any:
    return attention(
        *inputs,
        None,
        attn_mask_type=AttnMaskType.padding_causal,
        attention_bias=None,
        packed_seq_params=parameters,
    )


def _packed_parameters(where: MicroBatchLayout, device: torch.device) -> Any:
    cu_seqlens, padded = where.cu_seqlens.to(device), where.cu_seqlens_padded.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=where.max_seqlen,
        max_seqlen_kv=where.max_seqlen,
    )


def _real(where: MicroBatchLayout) -> torch.Tensor:
    """Which tokens of the micro-batch are not padding, bool [T]."""
    real = torch.zeros(int(where.cu_seqlens_padded[-1]), dtype=torch.bool)
    lengths = where.cu_seqlens.diff().tolist()
    for start, length in zip(where.cu_seqlens_padded.tolist(), lengths, strict=False):
        real[start : start + length] = True
    return real


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
