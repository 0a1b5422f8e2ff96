"""State-space layers of packed samples: Megatron's own mixer, its kernel executed by a reference.

`mamba_ssm` needs a GPU. Its function takes `seq_idx`; what is tested is that Megatron's
`MambaMixer` (mamba_mixer.py `_ssm_training`, 0.17 to 0.19.2) is told samples by our batches, and
that a sample then comes out as alone.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from odb_megatron.data.thd import layout, sample_index
from odb_megatron.megatron.topology import has_state_layers
from odb_megatron.plan.padding import SizeRule

HEADS, CHANNELS, STATE, KERNEL = 2, 4, 3, 4
INNER = HEADS * CHANNELS
WIDTH = 2 * INNER + 2 * STATE + HEADS


@pytest.mark.parametrize(
    ("lengths", "rule", "index"),
    [
        ((3, 1, 2), SizeRule(), [0, 0, 0, 1, 2, 2]),
        ((3, 1), SizeRule(multiple=4), [0, 0, 0, 0, 1, 1, 1, 1]),
        ((2,), SizeRule(sizes=(6,)), [0, 0, 1, 1, 1, 1]),
        ((), SizeRule(multiple=2), [0, 0]),
    ],
)
def test_sample_index(lengths: tuple[int, ...], rule: SizeRule, index: list[int]) -> None:
    found = sample_index(layout(lengths, positions=range(len(lengths)), rule=rule))
    assert found.dtype == torch.int32
    assert found.tolist() == [index]


def test_as_megatron_makes_it() -> None:
    packed = pytest.importorskip("megatron.core.packed_seq_params")
    where = layout((5, 2, 4), positions=range(3))
    made = packed.PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=where.cu_seqlens_padded, total_tokens=11
    )
    assert torch.equal(made.seq_idx, sample_index(where))


def test_when_a_model_has_them() -> None:
    assert not has_state_layers(argparse.Namespace())
    assert has_state_layers(argparse.Namespace(hybrid_layer_pattern="M*M-"))
    assert has_state_layers(argparse.Namespace(is_hybrid_model=True))


def _scan(
    zxbcdt: Any, conv_weight: Any, conv_bias: Any, dt_bias: Any, decay: Any, **given: Any
) -> Any:
    """`mamba_split_conv1d_scan_combined`, token by token; the state is dropped at a new sample."""
    index = given["seq_idx"]
    num_tokens = zxbcdt.size(1)
    index = torch.zeros(1, num_tokens, dtype=torch.int32) if index is None else index
    gate, mixed, step = zxbcdt[0].split([INNER, INNER + 2 * STATE, HEADS], dim=-1)
    parts = []
    state = torch.zeros(HEADS, CHANNELS, STATE, dtype=zxbcdt.dtype)
    for at in range(num_tokens):
        if at and index[0, at] != index[0, at - 1]:
            state = torch.zeros_like(state)
        taps = [
            mixed[at - back] * conv_weight[:, KERNEL - 1 - back]
            for back in range(KERNEL)
            if at >= back and index[0, at - back] == index[0, at]
        ]
        x, b, c = F.silu(sum(taps) + conv_bias).split([INNER, STATE, STATE])
        x = x.view(HEADS, CHANNELS)
        delta = F.softplus(step[at] + dt_bias)
        state = state * torch.exp(delta * decay)[:, None, None]
        state = state + (delta[:, None] * x)[:, :, None] * b
        y = state @ c + x * given["D"][:, None]
        parts.append(y.reshape(INNER) * F.silu(gate[at]))
    return torch.stack(parts)[None]


def _mix(monkeypatch: pytest.MonkeyPatch, tokens: Any, packed: Any) -> Any:
    mixer = pytest.importorskip("megatron.core.ssm.mamba_mixer")
    transposed = {
        "l b d -> b l d": lambda tensor: tensor.transpose(0, 1),
        "b l d -> l b d": lambda tensor: tensor.transpose(0, 1),
        "d 1 w -> d w": lambda tensor: tensor.squeeze(1),
    }
    monkeypatch.setattr(
        mixer, "rearrange", lambda tensor, pattern: transposed[pattern](tensor), raising=False
    )
    monkeypatch.setattr(mixer, "mamba_split_conv1d_scan_combined", _scan)
    monkeypatch.setattr(
        mixer, "_check_mamba_sequence_packing_support", lambda **_options: (True, None)
    )
    monkeypatch.setattr(mixer, "MAMBA_HAS_STATE_DTYPE", False)
    made = torch.Generator().manual_seed(3)
    shapes = {
        "get_A_log": (HEADS,),
        "get_conv1d_weight": (INNER + 2 * STATE, 1, KERNEL),
        "get_conv1d_bias": (INNER + 2 * STATE,),
        "get_dt_bias": (HEADS,),
        "get_D": (HEADS,),
    }
    values = {
        name: torch.randn(shape, generator=made, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    own = SimpleNamespace(
        D_has_hdim=False,
        headdim=CHANNELS,
        chunk_size=4,
        activation="silu",
        norm_before_gate=False,
        rmsnorm=False,
        cp=SimpleNamespace(
            **{name: partial(values.get, name) for name in shapes},
            ngroups_local_tpcp=1,
            post_conv_ssm=lambda y, _packed: y,
        ),
    )
    return mixer.MambaMixer._ssm_training(own, tokens, packed)


@pytest.mark.parametrize(
    "rule", [SizeRule(), SizeRule(multiple=4), SizeRule(sizes=(24,), longest=12)]
)
def test_a_sample_comes_out_as_alone(monkeypatch: pytest.MonkeyPatch, rule: SizeRule) -> None:
    pytest.importorskip("megatron.core")
    from odb_megatron.megatron.forward_step import packed_batch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    lengths = (5, 1, 7)
    where = layout(lengths, positions=range(3), rule=rule)
    generator = torch.Generator().manual_seed(0)
    total = int(where.cu_seqlens_padded[-1])
    tokens = torch.randn(total, 1, WIDTH, generator=generator, dtype=torch.float64)
    packed = packed_batch(where, has_state_layers=True).packed_seq_params
    found = _mix(monkeypatch, tokens, packed)
    leaking = _mix(monkeypatch, tokens, packed_batch(where).packed_seq_params)
    leaks = []
    for start, length in zip(where.cu_seqlens_padded.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        alone = _mix(monkeypatch, tokens[part], None)
        assert torch.allclose(found[part], alone, atol=1e-6)
        leaks.append(float((leaking[part] - alone).abs().max()))
    assert leaks[0] == 0.0
    assert min(leaks[1:]) > 1e-3  # guard: without `seq_idx` the state would run on
