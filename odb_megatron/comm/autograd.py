"""Collectives that gradients pass through.

Must not choose groups; the caller passes one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_with_gradient", "group_rank", "group_size"]


def group_size(group: Any) -> int:
    """Return the number of ranks of a process group."""
    return dist.get_world_size(group)


def group_rank(group: Any) -> int:
    """Return this process's rank in a process group."""
    return dist.get_rank(group)


def all_gather_with_gradient(tensor: Tensor, *, group: Any) -> list[Tensor]:
    """Gather equally shaped tensors of all ranks; gradients are summed and returned to each.

    Args:
        tensor: this rank's part.
        group: process group.

    Returns:
        Every rank's part, in group order.
    """
    gathered: Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return list(gathered.unbind())


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # An all-reduce, of which a rank keeps its part: gloo has no reduce-scatter.
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
