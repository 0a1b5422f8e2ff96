"""CPU core attention under context parallelism, against the same attention in one piece.

Each rank computes both: its chunks with the group, and the whole pack alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from odb_megatron.testing.gloo import run_replicas

LENGTHS = {
    "even": (16, 8),
    "padded": (7, 1, 13),
    "one_rank_has_nothing": (1,),
    "idle": (0,),
}


def _measure(rank: int, size: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from odb_megatron.data.thd import chunk_indices
    from odb_megatron.megatron.attention.cpu import CpuCoreAttention

    def attention(context_parallel: int) -> Any:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            num_query_groups=2,
            attention_dropout=0.0,
            context_parallel_size=context_parallel,
        )
        return CpuCoreAttention(config, 1, AttnMaskType.causal, "self")

    assert mpu.get_context_parallel_world_size() == size
    found: dict[str, Any] = {}
    for name, lengths in LENGTHS.items():
        padded = [max(1, -(-n // (2 * size))) * 2 * size for n in lengths]
        offsets = np.concatenate(([0], np.cumsum(padded)))
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        cu_padded = torch.tensor(offsets, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_padded,
            cu_seqlens_kv_padded=cu_padded,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
        )
        torch.manual_seed(0)
        whole = [torch.randn(offsets[-1], heads, 4, requires_grad=True) for heads in (4, 2, 2)]
        weights = torch.randn(offsets[-1], 16)
        index = torch.from_numpy(chunk_indices(offsets, size=size, rank=rank))
        expected = attention(1)(*whole, None, packed_seq_params=params)
        (expected * weights).sum().backward()
        gradients = [tensor.grad[index] for tensor in whole]

        own = [tensor.detach()[index].requires_grad_() for tensor in whole]
        output = attention(size)(*own, None, packed_seq_params=params)
        (output * weights[index]).sum().backward()
        found[name] = {
            "output": (output - expected[index]).abs().max().item(),
            "gradient": max(
                (tensor.grad - gradient).abs().max().item()
                for tensor, gradient in zip(own, gradients, strict=True)
            ),
            "largest": max(gradient.abs().max().item() for gradient in gradients),
        }
    try:
        attention(size)(*(torch.randn(4, 1, h, 4) for h in (4, 2, 2)), None)
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("size", [2, 4])
def test_as_in_one_piece(size: int) -> None:
    results = run_replicas(
        _measure,
        size,
        size,
        timeout_s=200,
        device_layer=True,
        model_parallel={"context_parallel_size": size},
    )
    for found in results:
        for name in LENGTHS:
            assert found[name]["output"] < 1e-6, name
            assert found[name]["gradient"] < 1e-5, name
        assert "for packed samples only" in found["refused"]
    assert max(found["padded"]["largest"] for found in results) > 0.1  # guard: there were gradients
