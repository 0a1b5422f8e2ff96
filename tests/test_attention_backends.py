"""Attention backends against a float64 reference: where they run, and on fakes of their kernels.

The fakes take exactly the arguments of the real functions (`test_kernel_signatures`) and leave
unwritten what those would. On a GPU every backend that is installed runs on its real kernel.
"""

from __future__ import annotations

import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from odb_megatron.megatron.attention.registry import BACKENDS
from odb_megatron.testing import backends
from odb_megatron.testing.attention_cases import CASES, Case, attend, real_places
from odb_megatron.testing.backend_checks import Difference, _build, contract, measure, worst
from odb_megatron.testing.fake_kernels import fake_flash, fake_torch_varlen

BF16 = torch.bfloat16


def test_the_reference_is_torchs() -> None:
    """One sample at a time, by scaled_dot_product_attention; so no backend judges another."""
    for case in (CASES["several samples"], CASES["scale"], CASES["multi-latent"]):
        query, key, value = case.tensors(dtype=torch.float64)
        offsets = case.layout().cu_seqlens_padded.tolist()
        found = attend(query, key, value, offsets, case)
        for start, end in pairwise(offsets):
            one = torch.nn.functional.scaled_dot_product_attention(
                *(part[None, start:end].transpose(1, 2) for part in (query, key, value)),
                is_causal=True,
                scale=case.softmax_scale,
                enable_gqa=True,
            )
            assert torch.allclose(found[start:end], one[0].transpose(0, 1), atol=1e-12)


def test_cases_are_what_they_say() -> None:
    assert int(CASES["FP8 shapes"].layout().cu_seqlens_padded[-1]) == 128
    whole = CASES["padded to a size"].layout()
    assert (whole.cu_seqlens_padded.diff() == 0).any()  # entries that stand for no token
    assert int(whole.cu_seqlens_padded[-1]) == 64 > int(real_places(whole).sum()) == 32
    assert not real_places(CASES["idle"].layout()).any()
    one = CASES["one sample fills the pack"].layout()
    assert one.cu_seqlens_padded.tolist() == [0, 48]


@pytest.mark.parametrize("name", ["torch_flex", "cpu"])
def test_those_that_run_on_the_cpu(name: str) -> None:
    found = measure(BACKENDS[name].load(), device="cpu", dtype=torch.float32)
    assert found.num_cases >= 12
    assert found.fits(torch.float32), found
    assert (found.gradient is None) == (name == "torch_flex")


@pytest.mark.parametrize("name", ["flash", "flash3", "flash4", "torch"])
def test_those_that_need_a_gpu_on_fakes(name: str) -> None:
    found = contract(BACKENDS[name])
    assert found is not None
    assert found.num_cases == len(CASES)
    assert found.fits(BF16), found
    assert found.gradient is not None


@pytest.mark.slow
def test_transformer_engine_on_a_fake() -> None:
    """Megatron's own `TEDotProductAttention` in between, for two versions of Transformer Engine."""
    found = contract(BACKENDS["te"])
    assert found is not None
    assert found.num_cases == len(CASES)
    assert found.fits(BF16), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_on_the_gpu(name: str) -> None:
    backend = BACKENDS[name]
    why = backend.available()
    if why is not None:
        pytest.skip(why)
    dtype = BF16 if backend.limits.dtypes else torch.float32
    found = measure(backend.load(), device="cuda", dtype=dtype)
    assert found.num_cases >= 12
    assert found.fits(dtype), found


def _packed(where: Any, **changes: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": where.cu_seqlens,
        "cu_seqlens_kv": where.cu_seqlens,
        "cu_seqlens_q_padded": where.cu_seqlens_padded,
        "cu_seqlens_kv_padded": where.cu_seqlens_padded,
        "max_seqlen_q": where.max_seqlen,
        "max_seqlen_kv": where.max_seqlen,
    }
    return PackedSeqParams(**values | changes)


@pytest.mark.parametrize("name", ["flash", "flash3", "flash4"])
def test_what_flash_is_told(name: str) -> None:
    case = CASES["window"]
    with fake_flash(name) as kernel:
        module = _build(BACKENDS[name].load(), case)
        module(*case.tensors(dtype=BF16), None, packed_seq_params=_packed(case.layout()))
    (call,) = kernel.calls
    assert call["causal"] is True
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"]
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (40, 40)
    assert call["window_size"] == (6, 0)
    assert call["softmax_scale"] == 0.25
    assert call["deterministic"] is False
    assert call.get("dropout_p", 0.0) == 0.0
    assert ("dropout_p" in call) == (name == "flash")


@pytest.mark.parametrize("name", ["flash", "flash3", "flash4"])
def test_no_window(name: str) -> None:
    case = CASES["several samples"]
    with fake_flash(name) as kernel:
        module = _build(BACKENDS[name].load(), case)
        module(*case.tensors(dtype=BF16), None, packed_seq_params=_packed(case.layout()))
    expected = (None, None) if name == "flash4" else (-1, -1)
    assert kernel.calls[0]["window_size"] == expected


def test_what_torch_is_told() -> None:
    case = CASES["several samples"]
    with fake_torch_varlen() as kernel:
        module = _build(BACKENDS["torch"].load(), case)
        module(*case.tensors(dtype=BF16), None, packed_seq_params=_packed(case.layout()))
    (call,) = kernel.calls
    assert (call["max_q"], call["max_k"], call["window_size"]) == (23, 23, (-1, 0))
    assert (call["scale"], call["enable_gqa"]) == (0.25, True)


def test_torch_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 has no `enable_gqa`; before it there is no window."""
    case = CASES["several samples"]
    from torch.nn.attention import varlen

    with fake_torch_varlen() as kernel:
        own = varlen.varlen_attn.__signature__  # type: ignore[attr-defined]
        kept = [p for n, p in own.parameters.items() if n != "enable_gqa"]
        varlen.varlen_attn.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        module = _build(BACKENDS["torch"].load(), case)
        module(*case.tensors(dtype=BF16), None, packed_seq_params=_packed(case.layout()))
        assert kernel.calls[0]["key"].shape == (33, 4, 16)
        kept = [p for n, p in own.parameters.items() if n != "window_size"]
        varlen.varlen_attn.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"needs varlen_attn with scale and window_size"):
            _build(BACKENDS["torch"].load(), case)


def test_a_padded_batch() -> None:
    """Without `--odb` rows come as [S, B, heads, D]."""
    case = Case(lengths=(9, 9, 9))
    query, key, value = case.tensors(dtype=torch.float32)
    rows = [part.view(3, 9, -1, 16).transpose(0, 1) for part in (query, key, value)]
    module = _build(BACKENDS["torch_flex"].load(), case)
    with torch.no_grad():
        out = module(*rows, None)
    assert out.shape == (9, 3, 64)
    expected = attend(query, key, value, [0, 9, 18, 27], case).view(3, 9, 64).transpose(0, 1)
    assert (out - expected).abs().max() < 1e-5


def test_layers_of_a_micro_batch_share_the_mask() -> None:
    from odb_megatron.megatron.attention import torch_kernels

    case = CASES["several samples"]
    where, last = case.layout(), torch_kernels._LastMask()
    offsets = where.cu_seqlens_padded
    first = last.of(offsets, num_tokens=33, window=-1)
    assert last.of(offsets, num_tokens=33, window=-1) is first
    assert last.of(offsets, num_tokens=33, window=4) is not first
    assert last.of(offsets.clone(), num_tokens=33, window=-1) is not first


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qkv_format": "sbhd"}, "must come as qkv_format 'thd', got 'sbhd'"),
        ({"max_seqlen_q": None}, "must come with max_seqlen_q"),
        (
            {"cu_seqlens_q_padded": torch.tensor([0, 5, 9], dtype=torch.int32)},
            "got 5 offsets of keys for 3 of queries",
        ),
        (
            {"cu_seqlens_q_padded": torch.tensor([0, 5, 9, 10, 33])},
            r"must be int32 \[samples \+ 1\], got torch.int64",
        ),
        (
            {
                f"cu_seqlens_{name}_padded": torch.tensor([0, 5, 9], dtype=torch.int32)
                for name in ("q", "kv")
            },
            r"cu_seqlens \[0, 5, 9\] do not end at the pack's 33 tokens",
        ),
    ],
)
def test_layouts_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    """pitfalls.md, boundary bookkeeping: `[0, 5, 9]` with no sentinel is refused."""
    case = CASES["several samples"]
    module = _build(BACKENDS["torch_flex"].load(), case)
    with pytest.raises(ValueError, match=text), torch.no_grad():
        module(
            *case.tensors(dtype=torch.float32),
            None,
            packed_seq_params=_packed(case.layout(), **changes),
        )


@pytest.mark.parametrize("name", ["cpu", "torch_flex"])
@pytest.mark.parametrize("offsets", [[0, 5, 9], [3, 9, 33], [0, 9, 5, 33], [0, 5, 34]])
def test_boundaries_that_do_not_fit(name: str, offsets: list[int]) -> None:
    """Every backend that runs here."""
    case = CASES["several samples"]
    module = _build(BACKENDS[name].load(), case)
    made = torch.tensor(offsets, dtype=torch.int32)
    names = [f"cu_seqlens_{side}{end}" for side in ("q", "kv") for end in ("", "_padded")]
    packed = _packed(case.layout(), **dict.fromkeys(names, made))
    with pytest.raises(ValueError, match="cu_seqlens"), torch.no_grad():
        module(*case.tensors(dtype=torch.float32), None, packed_seq_params=packed)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"context_parallel_size": 2}, "does not support --context-parallel-size above 1"),
        ({"attention_dropout": 0.1}, "does not support --attention-dropout above 0"),
        ({"softmax_type": "learnable"}, "does not support --softmax-type learnable"),
        ({"qk_clip": True}, "does not support --qk-clip"),
        ({"log_max_attention_logit": True}, "does not support --log-max-attention-logit"),
        ({"fp8_dot_product_attention": True}, "does not support --fp8-dot-product-attention"),
    ],
)
def test_what_varlen_kernels_do_not_have(values: dict[str, Any], text: str) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0
    )
    for name, value in values.items():
        setattr(config, name, value)
    load = BACKENDS["torch_flex"].load()
    with pytest.raises(ValueError, match=f"attention backend torch_flex {text}: drop it, or"):
        load(config, 1, AttnMaskType.causal, "self")


def test_other_attention_is_refused() -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0
    )
    load = BACKENDS["torch_flex"].load()
    for mask, kind in ((AttnMaskType.causal, "cross"), (AttnMaskType.padding, "self")):
        with pytest.raises(ValueError, match="has causal self-attention only"):
            load(config, 1, mask, kind)
    module = load(config, 1, AttnMaskType.causal, "self")
    row = torch.zeros(4, 1, 4, 16)
    with pytest.raises(ValueError, match="has no attention_bias: use rope or"):
        module(row, row, row, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="got attn_mask_type no_mask, supports causal"):
        module(row, row, row, None, AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="got 1 queries for 4 keys: it has no key/value cache"):
        module(row[:1], row, row, None)


def test_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "backends.json"
    names = [name for name in BACKENDS if name != "te"]
    assert backends.main(["--json", str(out), "--only", *names]) == 0
    found = json.loads(out.read_text())
    assert list(found["backends"]) == names
    for name, one in found["backends"].items():
        assert one["checked"] in ("ran", "contract"), name
        assert (one["max_abs_diff"] is None) == (one["checked"] == "contract")
        assert one["reason"]
        assert one["ok"]
    cpu = found["backends"]["cpu"]
    assert (cpu["installed"], cpu["checked"]) == (True, "ran")
    assert 0 < cpu["max_abs_diff"] < 1e-5
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in names)
    assert f"auto        {found['auto']}" in printed
    monkeypatch.setattr(backends.Difference, "fits", lambda _self, _dtype: False)
    assert backends.main(["--only", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_worst_of_several_versions_counts_in_outputs_and_in_gradients() -> None:
    one = Difference(output=1e-3, gradient=0.5, num_cases=3)
    other = Difference(output=2e-3, gradient=1e-4, num_cases=4)
    assert worst([one, other]) == Difference(output=2e-3, gradient=0.5, num_cases=3)
    assert not worst([one, other]).fits(BF16)
    without = Difference(output=0.0, gradient=None, num_cases=3)
    assert worst([without]).gradient is None


def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        backends.main(["--only", "cpu", "--json", str(tmp_path / "none" / "out.json")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "there is no folder" in printed.err
    assert not printed.out
