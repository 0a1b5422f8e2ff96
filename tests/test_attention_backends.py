"""Choice of an attention kernel, what it and Megatron are told, and what is refused."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_reads import host_reads

pytest.importorskip("megatron.core")

from odb_megatron.data.thd import layout
from odb_megatron.megatron import attention
from odb_megatron.megatron.attention import select
from odb_megatron.megatron.forward_step import packed_seq_params
from odb_megatron.megatron.topology import padding_multiple
from odb_megatron.plan.padding import SizeRule
from odb_megatron.testing import backends
from odb_megatron.testing.backends import CASES, Case, attend, build, differences

BF16 = torch.bfloat16
FIELDS = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded")
FIELDS += ("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "pad_between_seqs")
"""Of PackedSeqParams, that attention is told."""
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


FORWARD = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
CALLED = {  # where, by which names in which order
    "flash": ("flash_attn/flash_attn_interface.py", "flash_attn_varlen_func", ["q", "k", "v"]),
    "flash3": ("hopper/flash_attn_interface.py", "flash_attn_varlen_func", ["q", "k", "v"]),
    "te": (FORWARD, "forward", ["self", "query_layer", "key_layer", "value_layer"]),
}


def _source(path: str) -> Path:
    """Find a file of an installed package, or of unpacked ones in the folders of `ODB_SOURCES`."""
    roots = filter(None, [*sys.path, *os.environ.get("ODB_SOURCES", "").split(os.pathsep)])
    paths = [path, path.removeprefix("hopper/")]  # as flash-attn 3 is installed
    found = [Path(root, inner) for root in roots for inner in paths]
    file = next((one for one in found if one.is_file()), None)
    return file or pytest.skip(f"no {path}: neither installed nor in ODB_SOURCES")


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_takes_what_it_is_given(flash: Any, name: str) -> None:
    """Stock `TEDotProductAttention` passes the fields of PackedSeqParams on by their names."""
    path, function, first = CALLED[name]
    tree = ast.parse(_source(path).read_text(encoding="utf-8"))
    defined = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    names = [one.arg for one in [d for d in defined if d.name == function][-1].args.args]
    assert names[: len(first)] == first
    given = set(FIELDS)
    if name != "te":
        kernel = flash[name]
        given = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
        given |= {"causal", "window_size", "deterministic"}
        given |= {"dropout_p"} if kernel.has_dropout else set()
    assert given <= set(names)


def test_lengths_of_zero(flash: Any) -> None:
    """With these Megatron runs a layer to capture it (cuda_graphs.py 274, 0.19.2): no check may
    fail, nor wait for the device.
    """

    @functools.wraps(_flash_attn_varlen_func)
    def kernel(q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
        assert given["cu_seqlens_q"].dtype is torch.int32
        return torch.zeros_like(q)

    sys.modules["flash_attn"].flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    zeros = torch.zeros(4, dtype=torch.int32)
    tensors = [torch.zeros(33, heads, 16, dtype=BF16) for heads in (4, 2, 2)]
    module = build(flash["flash"], CASES["several samples"])
    packed = packed_seq_params(
        qkv_format="thd", cu_seqlens_q=zeros, cu_seqlens_kv=zeros, max_seqlen_q=64, max_seqlen_kv=64
    )
    with host_reads(within="odb_megatron") as reads:
        out = module(*tensors, None, packed_seq_params=packed)
    assert out.shape == (33, 64)
    assert reads == []


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


@pytest.mark.parametrize(("recipe", "multiple"), [("tensorwise", 16), ("mxfp8", 32)])
def test_token_counts_that_fp8_takes(recipe: str, multiple: int) -> None:
    """TransformerEngine#2892: no last offset is stretched; padding is of the sample before it."""
    flags = {"fp8": "hybrid", "fp8_recipe": recipe, "tensor_model_parallel_size": 2}
    args = Namespace(**flags, sequence_parallel=True, context_parallel_size=2)
    rule = SizeRule(multiple=padding_multiple(args))
    lengths = [7, 64, 1, 129]
    where = layout(lengths, positions=range(4), rule=rule)
    offsets = where.cu_seqlens_padded.numpy()
    padding = np.diff(offsets) - lengths
    assert offsets[-1] // 4 % multiple == 0  # of each rank
    assert (padding >= 0).all()
    assert padding.max() < 4 * multiple


def _run(case: Case, packed: dict[str, Any] | None = None, **given: Any) -> None:
    from megatron.core import packed_seq_params

    from odb_megatron.megatron.packed_attention import CLASSES

    later = make_dataclass(
        "Later", [("of_later_versions", Any, None)], bases=(packed_seq_params.PackedSeqParams,)
    )
    offsets = torch.tensor([0, 5, 9, 33], dtype=torch.int32)
    fields = {"qkv_format": "thd", "cu_seqlens_q": offsets, "max_seqlen_q": 24, **(packed or {})}
    params = later(**fields) if packed is not None else None
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
        ({"of_later_versions": 1}, {}, "nothing that is not known here, got of_later_versions"),
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
