"""`python -m odb_megatron.testing.backends --json OUT`: attention of packed samples here.

Each kernel that can run here is held to a plain softmax over each sample in float64.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from odb_megatron.command import check_output
from odb_megatron.data.thd import layout
from odb_megatron.megatron.attention import absent
from odb_megatron.plan.padding import SizeRule

__all__ = ["CASES", "Case", "attend", "build", "differences", "main", "report"]

_FIXED = SizeRule(sizes=(64, 96), least=4, longest=48, multiple=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Samples, how they are padded, and the attention over them.

    Attributes:
        lengths: tokens of each sample; none for an idle micro-batch.
        rule: what they are padded to.
        num_groups: key/value heads of 4.
        head_size: of queries and keys; values have 16.
        scale: factor on the scores, None for 1 / sqrt(head_size).
        window: keys a query sees before itself, None for all.
    """

    lengths: tuple[int, ...]
    rule: SizeRule = SizeRule()
    num_groups: int = 2
    head_size: int = 16
    scale: float | None = None
    window: int | None = None


CASES: dict[str, Case] = {
    "one sample fills the pack": Case(lengths=(48,)),
    "several samples": Case(lengths=(5, 4, 1, 23)),
    "as many heads as groups": Case(lengths=(7, 12), num_groups=4),
    "one group": Case(lengths=(7, 12), num_groups=1),
    "padded to a multiple": Case(lengths=(7, 5, 16), rule=SizeRule(multiple=8)),
    "padded to a size": Case(lengths=(7, 23, 2), rule=_FIXED),
    "size that is full": Case(lengths=(48, 16), rule=_FIXED),
    "idle": Case(lengths=(), rule=_FIXED),
    "window": Case(lengths=(21, 3, 40), window=6),
    "window of one key": Case(lengths=(9, 2), window=0),
    "scale": Case(lengths=(9, 14), scale=0.7),
}


def attend(query: Tensor, key: Tensor, value: Tensor, offsets: list[int], case: Case) -> Tensor:
    """Return causal attention within each segment, float64 [t, np, hn]."""
    times = query.size(1) // key.size(1)
    key, value = (tensor.double().repeat_interleave(times, dim=1) for tensor in (key, value))
    scale = 1 / math.sqrt(query.size(2)) if case.scale is None else case.scale
    parts = []
    for start, end in pairwise(offsets):
        part = slice(start, end)
        scores = torch.einsum("qnd,knd->nqk", query[part].double(), key[part]) * scale
        sees = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril()
        if case.window is not None:
            sees = sees.triu(-case.window)
        weights = scores.masked_fill(~sees, -math.inf).softmax(dim=-1)
        parts.append(torch.einsum("nqk,knd->qnd", weights, value[part]))
    return torch.cat(parts)


def build(core_attention: Any, case: Case, **options: Any) -> Any:
    """Build a core-attention class for a case; needs no process groups."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4 * case.head_size,
        num_attention_heads=4,
        num_query_groups=case.num_groups,
        attention_dropout=0.0,
        window_size=None if case.window is None else (case.window, 0),
    )
    for name, value in options.items():
        setattr(config, name, value)
    groups = SimpleNamespace(tp=None, cp=None)
    return core_attention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=case.scale, pg_collection=groups
    )


def differences(
    core_attention: Any, case: Case, *, device: str, dtype: torch.dtype
) -> tuple[float, float]:
    """Return how far outputs, and gradients relative to their largest, are from the reference."""
    from megatron.core.transformer.enums import AttnMaskType

    from odb_megatron.megatron.forward_step import packed_seq_params

    where = layout(case.lengths, positions=range(len(case.lengths)), rule=case.rule)
    offsets = where.cu_seqlens_padded.to(device)
    generator = torch.Generator().manual_seed(20260619)
    own = [
        torch.randn(int(offsets[-1]), heads, case.head_size, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, case.num_groups, case.num_groups)
    ]
    others = [tensor.detach().double().requires_grad_() for tensor in own]
    packed = packed_seq_params(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=64,
        max_seqlen_kv=64,
    )
    module = build(core_attention, case)
    out = module(*own, None, AttnMaskType.causal, packed_seq_params=packed)
    expected = attend(others[0], others[1], others[2], offsets.tolist(), case).flatten(1)
    assert out.shape == expected.shape, f"shape {tuple(out.shape)}"
    assert torch.isfinite(out).all(), "a token was left unwritten"
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(device)
    mine = torch.autograd.grad((out.double() * weights).sum(), own)
    wanted = torch.autograd.grad((expected * weights).sum(), others)
    largest = max(1e-3, *(float(each.abs().max()) for each in wanted))
    apart = max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))
    return float((out - expected).detach().abs().max()), apart / largest


def report(name: str) -> dict[str, Any]:
    """Return what a kernel does here.

    Returns:
        `installed` and, if not, `why`; the `device` it was checked on; `checked`: `ran` or
        `skipped`, with a `reason`; `max_abs_diff` of outputs and `gradient_diff`, relative, both
        None unless it ran; `ok`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    why = absent()[name] or ("" if device == "cuda" or name == "torch" else "needs a CUDA device")
    if not why and name == "flash3" and torch.cuda.get_device_capability() != (9, 0):
        why = "needs compute capability 9.0"
    found = {"installed": not absent()[name], "why": why, "device": device, "ok": True}
    found |= {"max_abs_diff": None, "gradient_diff": None, "checked": "skipped", "reason": why}
    if why:
        return found
    if name == "te":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention as attention
    else:
        from odb_megatron.megatron.packed_attention import CLASSES

        attention = CLASSES[name]
    dtype = torch.float32 if name == "torch" else torch.bfloat16
    pairs = [differences(attention, case, device=device, dtype=dtype) for case in CASES.values()]
    output, gradient = (max(values) for values in zip(*pairs, strict=True))
    return found | {
        "checked": "ran",
        "reason": f"{len(pairs)} cases in {dtype}".replace("torch.", ""),
        "max_abs_diff": output,
        "gradient_diff": gradient,
        "ok": max(output, gradient) <= (1e-5 if dtype == torch.float32 else 3e-2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all kernels, print a line for each; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m odb_megatron.testing.backends")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT", help="write this file")
    options = parser.parse_args(arguments)
    if options.json is not None:
        try:
            check_output("--json", str(options.json))
        except ValueError as error:
            parser.error(str(error))
    results = {name: report(name) for name in absent()}
    for name, found in results.items():
        number = found["max_abs_diff"]
        figure = "" if number is None else f", largest difference {number:.1e}"
        wrong = "" if found["ok"] else "  WRONG"
        print(f"{name:<7} {found['checked']:<8} {found['reason']}{figure}{wrong}")
    if options.json is not None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        whole = {"device": name, "torch": torch.__version__, "backends": results}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
