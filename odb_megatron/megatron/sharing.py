"""Samples that several replicas train together: their process groups, and what of megatron-core
would go on with the static context-parallel group.

A micro-batch that k replicas share is one of context-parallel size k times Megatron's own, and its
`PackedSeqParams` name the group. Transformer Engine's attention and the RoPE tables follow it
(transformer_engine.py 1984, gpt_model.py 410; 0.19.2); where RoPE is applied (attention.py 1505)
and where routers reduce (router.py 422, 633, 654) the static group is taken, except in `dev`. Hooks
of the modules, which recomputed layers run again, mend that here.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from odb_megatron.comm.groups import add_up, device_group, largest, ranks_of
from odb_megatron.data.thd import chunk_indices

__all__ = ["PARTS", "SharedGroups", "largest_difference"]

_OF_DEV = "_get_aux_loss_groups"
_TABLES = (RotaryEmbedding, YarnRotaryEmbedding)
PARTS = (Attention, TransformerLayer, *_TABLES)
"""Kinds of the modules that sharing is about."""


class SharedGroups:
    """Groups of this rank's peers in replicas that share samples, made when first needed.

    The k replicas of a group are a*k to a*k + k - 1 of their block. Groups are disjoint within a
    micro-batch index, and all replicas of a block run the same indices in the same order, so that
    no two groups wait for each other; members make them in the order of their sizes.

    Args:
        groups: Megatron's.
        block: the replicas, counted by `groups.dp`, that plan together; this rank's is one.
        timeout: of collectives.
        modules: of the model; they follow from now on the group that a micro-batch names.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        block: range,
        *,
        timeout: timedelta,
        modules: Iterable[nn.Module],
    ) -> None:
        self._timeout, self.tensor_group = timeout, groups.tp
        context = groups.cp.size()
        # By replica, context-parallel ranks in their order (parallel_state.py, RankGenerator).
        ranks = ranks_of(groups.dp_cp)
        self._replicas = [ranks[at * context : (at + 1) * context] for at in block]
        self._own: int = groups.dp_cp.rank() // context - block.start
        # Tensor-parallel ranks are neighbours in every order of ranks that Megatron has.
        tensor = ranks_of(groups.tp)
        self._tensor_steps = [other - tensor[groups.tp.rank()] for other in tensor]
        self._made: dict[int, Any] = {1: groups.cp}
        # Context- and tensor-parallel group of what routers balance, by context-parallel group.
        self._routing: dict[Any, Any] = {groups.cp: groups.tp_cp}
        self._routes = False
        _make_stream()
        for module in modules:
            if isinstance(module, Attention):
                module.pg_collection = copy.copy(module.pg_collection)
                module.register_forward_pre_hook(_take_group, with_kwargs=True)
            if isinstance(module, TransformerLayer):
                for router in module.modules():
                    # That of `dev` takes the group from the parameters by itself.
                    if isinstance(router, TopKRouter) and not hasattr(router, _OF_DEV):
                        self._follow(module, router)

    @property
    def pair(self) -> int:
        """2, or 1 for the last replica of an odd number."""
        return 2 if self._own ^ 1 < len(self._replicas) else 1

    def of(self, width: int) -> Any:
        """Return this rank's context-parallel group of so many replicas; see `make`."""
        return self._made[width]

    def make(self, widths: Iterable[int]) -> None:
        """Make the groups of these numbers of replicas that there are not yet.

        All members of each of them call it before the same schedule.
        """
        for width in sorted(set(widths) - self._made.keys()):
            first = self._own // width * width
            members = [rank for one in self._replicas[first : first + width] for rank in one]
            self._made[width] = group = device_group(members, self._timeout)
            if self._routes:
                several = len(self._tensor_steps) > 1
                members = [rank + step for rank in members for step in self._tensor_steps]
                self._routing[group] = device_group(members, self._timeout) if several else group

    def _follow(self, layer: TransformerLayer, router: TopKRouter) -> None:
        """Let a router balance over the tokens of all replicas that share a micro-batch."""
        self._routes = True
        static, attach = router.tp_cp_group, router.attach_and_log_load_balancing_loss
        signature = inspect.signature(attach)

        def take(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            packed = kwargs.get("packed_seq_params")
            router.tp_cp_group = self._routing.get(packed and packed.cp_group, static)

        def attach_and_log(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            # Logged values are summed over it later, when other micro-batches have been there.
            bound.arguments["reduce_group"] = static
            return attach(*bound.args, **bound.kwargs)

        layer.register_forward_pre_hook(take, with_kwargs=True)
        router.attach_and_log_load_balancing_loss = attach_and_log


def largest_difference(
    modules: Iterable[nn.Module], shared: SharedGroups, *, multiple: int = 1
) -> float:
    """Run a model's first layer over a sample that two replicas share, and over the same alone.

    All ranks call it, with equal parameters on all replicas. Gradients of parameters are left
    behind, as before a step's first micro-batch, when they are set to zero.

    Args:
        modules: of the model, or of this rank's part of it.
        shared: their groups, those of two made.
        multiple: what a rank's tokens are a multiple of (sequence parallelism, FP8).

    Returns:
        The largest difference of outputs and of gradients of inputs, relative to the largest.
    """
    layer = next(one for one in modules if isinstance(one, TransformerLayer))
    config, tables = layer.config, next((one for one in modules if isinstance(one, _TABLES)), None)
    pair, static = shared.of(shared.pair), shared.of(1)
    length = 4 * pair.size() * math.lcm(2, multiple)
    device = torch.cuda.current_device()
    generator = torch.Generator().manual_seed(length)  # the same on all ranks
    shape = (length, 1, config.hidden_size)
    inputs = torch.randn(shape, generator=generator).to(device, config.params_dtype)
    weights = torch.randn(shape, generator=generator).to(device, config.params_dtype)
    offsets = torch.tensor([0, length], dtype=torch.int32, device=device)
    was_training, found = layer.training, []
    layer.eval()  # without dropout
    for group in (pair, static):
        size, rank = group.size(), group.rank()
        index = torch.from_numpy(chunk_indices(np.array([0, length]), size=size, rank=rank))
        if config.sequence_parallel:
            tensor = shared.tensor_group
            index = index.chunk(tensor.size())[tensor.rank()]
        part = inputs[index].requires_grad_()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets if size > 1 else None,
            cu_seqlens_kv_padded=offsets if size > 1 else None,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            cp_group=group,
            local_cp_size=size,
        )
        rotation = None if tables is None else tables(length, packed_seq=True, cp_group=group)
        rotation = rotation[0] if isinstance(rotation, tuple) else rotation  # of YaRN
        output, _ = layer(
            part, attention_mask=None, rotary_pos_emb=rotation, packed_seq_params=packed
        )
        (gradient,) = torch.autograd.grad((output * weights[index]).sum(), part)
        whole = torch.zeros(2, *shape, device=device)
        whole[:, index] = torch.stack([output.detach(), gradient]).float()
        add_up(whole, group)
        if config.sequence_parallel:
            add_up(whole, shared.tensor_group)
        found.append(whole)
    layer.train(was_training)
    difference = (found[0] - found[1]).abs().amax((1, 2, 3)) / found[1].abs().amax((1, 2, 3))
    return largest(difference.max())


def _make_stream() -> None:
    """Give Transformer Engine's attention what it makes with static context parallelism alone."""
    try:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
    except ImportError:  # is not installed
        return
    if torch.cuda.is_available() and getattr(TEDotProductAttention, "cp_stream", 0) is None:
        TEDotProductAttention.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _take_group(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    packed = kwargs.get("packed_seq_params")
    if packed is not None and packed.cp_group is not None:
        module.pg_collection.cp = packed.cp_group
