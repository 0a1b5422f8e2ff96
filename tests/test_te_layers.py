"""Megatron's Transformer Engine layer specs with the `te` backend, on a fake Transformer Engine.

In processes of their own: Megatron takes its Transformer Engine paths for good.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

CODE = """
import json
from odb_megatron.testing.fake_kernels import fake_transformer_engine
kernel = fake_transformer_engine({version!r})
import torch
from types import SimpleNamespace
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from odb_megatron.data.thd import layout
from odb_megatron.megatron.attention.registry import BACKENDS
from odb_megatron.megatron.attention.spec import layer_spec
from odb_megatron.megatron.attention.te import TECoreAttention, without_padding
from odb_megatron.plan.padding import SizeRule
from odb_megatron.testing.attention_cases import CASES
from odb_megatron.testing.backend_checks import _build, _causal

shape = dict(num_layers=1, hidden_size=64, num_attention_heads=4,
             transformer_impl="transformer_engine")
found = {{}}
for name, config in {{
    "dense": TransformerConfig(**shape),
    "latent": MLATransformerConfig(**shape, multi_latent_attention=True),
}}.items():
    submodules = layer_spec(config, backend=BACKENDS["te"]).submodules.self_attention.submodules
    found[name] = [submodules.core_attention.__name__, submodules.linear_proj.__name__]
local = layer_spec(TransformerConfig(**shape), backend=BACKENDS["torch"]).submodules
found["local"] = local.self_attention.submodules.core_attention.__name__

case = CASES["padded to a multiple"]
where = case.layout()
given = PackedSeqParams(
    qkv_format="thd", cu_seqlens_q=where.cu_seqlens, cu_seqlens_kv=where.cu_seqlens,
    cu_seqlens_q_padded=where.cu_seqlens_padded, cu_seqlens_kv_padded=where.cu_seqlens_padded,
    max_seqlen_q=where.max_seqlen, max_seqlen_kv=where.max_seqlen,
    seq_idx=torch.zeros(1, 40, dtype=torch.int32),
)
module = _build(TECoreAttention, CASES["window"])
module(*case.tensors(dtype=torch.bfloat16), None, _causal(), packed_seq_params=given)
call = kernel.calls[-1]
offsets = where.cu_seqlens_padded
found["options"] = {{
    name: module.options.get(name)
    for name in ("num_attention_heads", "num_gqa_groups", "kv_channels", "window_size",
                 "attn_mask_type", "attention_type")
}}
found["call"] = {{
    "names": sorted(call),
    "mask": call["attn_mask_type"],
    "lengths": call["cu_seqlens_q"].tolist() == call["cu_seqlens_kv"].tolist() == offsets.tolist(),
    "same": call["cu_seqlens_q_padded"] is call["cu_seqlens_q"],
    "between": call["pad_between_seqs"],
    "longest": [call["max_seqlen_q"], call["max_seqlen_kv"]],
}}
found["untouched"] = given.cu_seqlens_q is where.cu_seqlens
old = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
found["plain"] = without_padding(old, has_context=True).cu_seqlens_q is offsets
try:
    given.cu_seqlens_q_padded = given.cu_seqlens_kv_padded = offsets[:-1]
    module(*case.tensors(dtype=torch.bfloat16), None, _causal(), packed_seq_params=given)
except ValueError as error:
    found["refused"] = str(error)
try:
    low = TransformerConfig(**shape)
    low.fp8_multi_head_attention = True
    TECoreAttention(low, 1, _causal(), "self")
except ValueError as error:
    found["low"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.9.0", "2.18.0"])
def test_layers_and_what_transformer_engine_is_told(version: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE.format(version=version)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dense"] == ["TECoreAttention", "TERowParallelLinear"]
    assert found["latent"] == ["TECoreAttention", "TERowParallelLinear"]
    assert found["local"] == "TorchCoreAttention"
    assert found["options"] == {
        "num_attention_heads": 4,
        "num_gqa_groups": 2,
        "kv_channels": 16,
        "window_size": [6, 0],
        "attn_mask_type": "causal",
        "attention_type": "self",
    }
    call = found["call"]
    assert not {"total_tokens", "seq_idx", "tokens_per_sample"} & set(call.pop("names"))
    assert call == {
        "mask": "padding_causal",
        "lengths": True,
        "same": True,
        "between": False,
        "longest": [16, 16],
    }
    assert found["untouched"]
    assert found["plain"]
    assert "no FP8 attention for packed samples" in found["low"]
    assert "leave fp8_multi_head_attention out" in found["low"]
    assert "do not end at the pack's 32 tokens" in found["refused"]
