"""State-space layers of packed samples: what Megatron's mixer is told of where samples begin.

Its kernel (`mamba_ssm`) needs a GPU, and drops the state where `seq_idx` changes.
"""

from __future__ import annotations

import argparse
import inspect
import re

import pytest
import torch

from odb_megatron.data.thd import layout, sample_index
from odb_megatron.megatron.topology import has_state_layers
from odb_megatron.plan.padding import SizeRule


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


def test_megatrons_mixer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By batches of a model that has such layers, and it hands `seq_idx` to its kernels."""
    mixer = pytest.importorskip("megatron.core.ssm.mamba_mixer")
    from odb_megatron.megatron.forward_step import packed_batch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    where = layout((5, 1, 7), positions=range(3), rule=SizeRule(multiple=4))
    packed = packed_batch(where, has_state_layers=True).packed_seq_params
    assert torch.equal(packed.seq_idx, sample_index(where))
    assert getattr(packed_batch(where).packed_seq_params, "seq_idx", None) is None
    code = inspect.getsource(mixer.MambaMixer._ssm_training)
    assert len(re.findall(r"seq_idx=seq_idx", code)) > 0
