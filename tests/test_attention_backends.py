"""Choice of an attention kernel, what it and Megatron are told, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from odb_megatron.data.thd import layout
from odb_megatron.megatron import attention
from odb_megatron.megatron.attention import absent, select
from odb_megatron.plan.padding import SizeRule
from odb_megatron.testing import backends
from odb_megatron.testing.backends import CASES, Case, attend, build, differences

BF16 = torch.bfloat16
ALL = ("te", "flash3", "flash")


def _args(impl: str = "local", backend: str = "auto", **others: Any) -> Namespace:
    flags = {"bf16": True, "attention_dropout": 0.0, **others}
    return Namespace(
        transformer_impl=impl, attention_backend=SimpleNamespace(name=backend), **flags
    )


@pytest.mark.parametrize(
    ("args", "device", "capability", "installed", "chosen"),
    [
        (_args("transformer_engine"), "cuda", (9, 0), ALL, "te"),
        (_args("transformer_engine", "fused"), "cuda", (9, 0), ALL, "te"),
        (_args(), "cuda", (9, 0), ALL, "flash3"),
        (_args(backend="flash"), "cuda", (10, 0), ALL, "flash"),
        (_args(attention_dropout=0.1), "cuda", (9, 0), ALL, "flash"),
        (_args(backend="unfused"), "cuda", (9, 0), ALL, "torch"),
        (_args(), "cpu", None, ALL, "torch"),
        (Namespace(), "cpu", None, (), "torch"),
        (_args("transformer_engine"), "cuda", (9, 0), (), "te is not here|--transformer-impl loc"),
        (_args("transformer_engine"), "cpu", None, ALL, "no CUDA device. Mend that"),
        (_args(backend="fused"), "cuda", (9, 0), ALL, "fused is Transformer Engine's"),
        (_args(backend="flash"), "cpu", None, ALL, "there is no CUDA device"),
        (_args(bf16=False), "cuda", (9, 0), ALL, "neither --bf16 nor --fp16"),
        (_args(context_parallel_size=2), "cuda", (9, 0), ALL, "no --context-parallel-size above 1"),
        (_args(), "cuda", (8, 0), ("flash3",), "flash is not here"),
        (_args(attention_dropout=0.1), "cuda", (9, 0), ("flash3",), "has no --attention-dropout"),
    ],
)
def test_what_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    args: Namespace,
    device: str,
    capability: tuple[int, int] | None,
    installed: tuple[str, ...],
    chosen: str,
) -> None:
    why = {name: "" if name in installed else f"{name} is not here" for name in ALL}
    monkeypatch.setattr(attention, "absent", lambda: {**why, "torch": ""})
    if chosen in {*ALL, "torch"}:
        assert select(args, device_type=device, capability=capability).name == chosen
    else:
        with pytest.raises(ValueError, match=chosen):
            select(args, device_type=device, capability=capability)


def test_the_choice_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, odb_megatron.megatron.attention as a; a.absent();"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('megatron.')])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- kernels -----------------------------------------------------------------------------------


def _flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """By the reference."""
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
    left, right = window_size
    assert (left, right) == (-1, -1) or right == 0
    case = Case(lengths=(), scale=softmax_scale, window=left if left >= 0 else None)
    return attend(q, k, v, cu_seqlens_q.tolist(), case).to(q.dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules with the function that is called, executed by the reference."""
    for name in ("flash_attn", "flash_attn_interface"):
        module: Any = ModuleType(name)
        module.flash_attn_varlen_func = _flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("odb_megatron.megatron.packed_attention").CLASSES


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(flash: Any, case: str) -> None:
    assert max(differences(flash["torch"], CASES[case], device="cpu", dtype=torch.float32)) < 1e-5
    for name in ("flash", "flash3"):
        assert max(differences(flash[name], CASES[case], device="cpu", dtype=BF16)) < 3e-2


@pytest.mark.parametrize(
    ("name", "module"), [("flash", "flash_attn"), ("flash3", "flash_attn_interface")]
)
def test_the_installed_function_takes_what_it_is_given(name: str, module: str) -> None:
    if absent()[name]:
        pytest.skip(absent()[name])
    from odb_megatron.megatron.packed_attention import CLASSES

    build(CLASSES[name], CASES["window"])  # looks at the signature


def test_a_function_of_other_arguments_is_refused(flash: Any) -> None:
    sys.modules["flash_attn"].flash_attn_varlen_func = lambda q, k, v, causal: None  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="flash_attn does not take cu_seqlens_k, cu_seqlens_q, det"
    ):
        build(flash["flash"], CASES["scale"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["te", "flash3", "flash", "torch"])
def test_on_the_gpu(name: str) -> None:
    found = backends.report(name)
    if found["checked"] == "skipped":
        pytest.skip(found["why"])
    assert found["ok"], found


def test_transformer_engine_takes_what_megatron_passes_on() -> None:
    """Stock `TEDotProductAttention` passes fields of PackedSeqParams on by their names."""
    if absent()["te"]:
        pytest.skip(absent()["te"])
    from transformer_engine.pytorch import DotProductAttention

    known = inspect.signature(DotProductAttention.forward).parameters
    assert {"cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q", "pad_between_seqs"} <= set(known)


# --- what Megatron is told ---------------------------------------------------------------------


@pytest.mark.parametrize("context_size", [1, 2])
def test_the_layout_of_a_pack(monkeypatch: pytest.MonkeyPatch, context_size: int) -> None:
    """Padding belongs to its sample, lengths are bounded by a power of two, and nothing else."""
    from odb_megatron.megatron.forward_step import packed_batch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    where = layout([7, 9, 1], positions=range(3), rule=SizeRule(multiple=8))
    batch = packed_batch(where, context_size=context_size)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 7, 16, 17]
    given = vars(batch.packed_seq_params)
    offsets = given["cu_seqlens_q"]
    assert offsets.tolist() == [0, 8, 24, 32]
    assert given["cu_seqlens_kv"] is offsets
    padded = given["cu_seqlens_q_padded"], given["cu_seqlens_kv_padded"]
    assert padded == ((offsets, offsets) if context_size > 1 else (None, None))
    assert given["max_seqlen_q"] == given["max_seqlen_kv"] == 16
    assert given.get("pad_between_seqs") in (False, None)


def _run(case: Case, packed: dict[str, Any] | None = None, **given: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from odb_megatron.megatron.packed_attention import CLASSES

    offsets = torch.tensor([0, 5, 9, 33], dtype=torch.int32)
    fields = {"qkv_format": "thd", "cu_seqlens_q": offsets, "max_seqlen_q": 24, **(packed or {})}
    params = PackedSeqParams(**fields) if packed is not None else None
    tensors = [torch.zeros(33, heads, 16) for heads in (4, 2, 2)]
    if params is None:
        tensors = [tensor[:, None] for tensor in tensors]
    query = tensors[0][: given.pop("queries", 33)]
    module = build(CLASSES["torch"], case)
    module(query, *tensors[1:], None, packed_seq_params=params, **given)


@pytest.mark.parametrize(
    ("packed", "given", "text"),
    [
        ({"qkv_format": "sbhd"}, {}, "must come as qkv_format 'thd', got 'sbhd'"),
        ({"local_cp_size": 1}, {}, "nothing that is not known here, got local_cp_size"),
        (
            {"cu_seqlens_q": torch.tensor([0, 33])},
            {},
            r"must be int32 \[samples \+ 1\], as many .*; got torch.int64",
        ),
        ({"cu_seqlens_kv": torch.tensor([0, 33])}, {}, "as many for keys as for queries; got"),
        *(
            ({"cu_seqlens_q": torch.tensor(ends, dtype=torch.int32)}, {}, "do not go up from 0 to")
            for ends in ([0, 5, 9], [3, 9, 33], [0, 9, 5, 33], [0, 5, 34])
        ),
        ({}, {"attention_bias": torch.zeros(1)}, "has no attention_bias: use rope or"),
        (None, {"queries": 1}, "got 1 queries for 33 keys"),
    ],
)
def test_what_does_not_fit(packed: dict[str, Any] | None, given: dict[str, Any], text: str) -> None:
    """pitfalls.md, boundary bookkeeping: `[0, 5, 9]` with no sentinel is refused."""
    with pytest.raises(ValueError, match=text):
        _run(Case(lengths=()), packed, **given)


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
def test_what_local_layers_do_not_have(flash: Any, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"Flash3Attention of local layers {text}: drop it, or"):
        build(flash["flash3"], CASES["scale"], **values)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "backends.json"
    assert backends.main(["--json", str(out)]) == 0
    found = json.loads(out.read_text())["backends"]
    assert list(found) == ["te", "flash3", "flash", "torch"]
    assert found["torch"]["checked"] == "ran"
    assert 0 < found["torch"]["max_abs_diff"] < 1e-5
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in found)
