"""Packs of samples that attention backends are checked on, and the reference they are held to.

Must not use a kernel: the reference is a plain softmax over each sample, in float64.

Shapes: T tokens, N heads, G key/value heads, D channels per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from odb_megatron.data.thd import MicroBatchLayout, layout
from odb_megatron.plan.padding import SizeRule

__all__ = ["CASES", "Case", "attend", "real_places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Samples, how they are padded, and the attention over them.

    Attributes:
        lengths: tokens of each sample; none for an idle micro-batch.
        rule: what they are padded to.
        num_heads: N.
        num_groups: G.
        head_size: D of queries and keys.
        value_size: D of values, 0 for the same.
        scale: factor on the scores, None for 1 / sqrt(D).
        window: keys a query sees before itself, None for all.
    """

    lengths: tuple[int, ...]
    rule: SizeRule = field(default_factory=SizeRule)
    num_heads: int = 4
    num_groups: int = 2
    head_size: int = 16
    value_size: int = 0
    scale: float | None = None
    window: int | None = None

    def layout(self) -> MicroBatchLayout:
        """Return where samples lie."""
        return layout(self.lengths, positions=range(len(self.lengths)), rule=self.rule)

    def tensors(self, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, the same in every process."""
        generator = torch.Generator().manual_seed(20260619)
        total = int(self.layout().cu_seqlens_padded[-1])
        shapes = (
            (total, self.num_heads, self.head_size),
            (total, self.num_groups, self.head_size),
            (total, self.num_groups, self.value_size or self.head_size),
        )
        query, key, value = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in shapes
        )
        return query, key, value

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores."""
        return 1 / math.sqrt(self.head_size) if self.scale is None else self.scale


_FIXED = SizeRule(sizes=(64, 96), least=4, longest=48, multiple=4)

CASES: dict[str, Case] = {
    "one sample fills the pack": Case(lengths=(48,)),
    "several samples": Case(lengths=(5, 4, 1, 23)),
    "as many heads as groups": Case(lengths=(7, 12), num_groups=4),
    "one group": Case(lengths=(7, 12), num_groups=1),
    "padded to a multiple": Case(lengths=(7, 5, 16), rule=SizeRule(multiple=8)),
    "FP8 shapes": Case(lengths=(86, 3), rule=SizeRule(multiple=32)),
    "padded to a size": Case(lengths=(7, 23, 2), rule=_FIXED),
    "size that is full": Case(lengths=(48, 16), rule=_FIXED),
    "idle": Case(lengths=(), rule=_FIXED),
    "window": Case(lengths=(21, 3, 40), window=6),
    "window of one key": Case(lengths=(9, 2), window=0),
    "scale": Case(lengths=(9, 14), scale=0.7),
    "multi-latent": Case(lengths=(9, 14), num_groups=4, head_size=24),
}
"""The kinds of pitfalls: boundary bookkeeping, padding, fixed shapes; and what models vary."""


def attend(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, offsets: list[int], case: Case
) -> Tensor:
    """Return causal attention within each segment, float64 [T, N, D].

    Args:
        query_TND: queries.
        key_TGD: keys.
        value_TGD: values.
        offsets: where segments start, and the end of the last.
        case: scale and window.
    """
    times = query_TND.size(1) // key_TGD.size(1)
    query = query_TND.double()
    key, value = (
        tensor.double().repeat_interleave(times, dim=1) for tensor in (key_TGD, value_TGD)
    )
    parts = [query.new_zeros(0, query.size(1), value.size(2))]
    for start, end in pairwise(offsets):
        part = slice(start, end)
        scores = torch.einsum("qnd,knd->nqk", query[part], key[part]) * case.softmax_scale
        sees = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril()
        if case.window is not None:
            sees = sees.triu(-case.window)
        weights = scores.masked_fill(~sees, -math.inf).softmax(dim=-1)
        parts.append(torch.einsum("nqk,knd->qnd", weights, value[part]))
    return torch.cat(parts)


def real_places(where: MicroBatchLayout) -> Tensor:
    """Return which tokens are of a sample, bool [T]."""
    starts = where.cu_seqlens_padded[:-1].long()
    ends = starts + where.cu_seqlens.diff()
    places_T = torch.arange(int(where.cu_seqlens_padded[-1]))
    inside = (places_T[:, None] >= starts) & (places_T[:, None] < ends)
    return inside.any(dim=1)
