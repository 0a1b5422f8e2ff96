"""What follows from Megatron's parallelism: where replicas wait for each other, and multiples.

Pure function of arguments; must not read process groups.
"""

from __future__ import annotations

import argparse

from odb_megatron.plan.padding import length_multiple
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.plan.record import Sync

__all__ = ["count_multiple", "has_state_layers", "padding_multiple", "pipeline_of", "routers"]
__all__ += ["sync_of"]


def sync_of(args: argparse.Namespace) -> tuple[Sync, str]:
    """Return where replicas wait for each other, and why.

    In every micro-batch where they meet there (expert parallelism: all-to-all; parameters sharded
    over replicas: all-gather; global auxiliary loss: all-reduce), and with pipelining, where the
    costliest micro-batch sets the pace. Else once per step.

    Args:
        args: Megatron's arguments; what is absent is off.
    """
    reasons = (
        (_size(args, "expert_model_parallel_size") > 1, "expert parallelism"),
        (_shards_parameters(args), "parameters are sharded over replicas"),
        ("global_aux_loss" in routers(args), "global auxiliary loss"),
        (_size(args, "pipeline_model_parallel_size") > 1, "pipeline parallelism"),
    )
    found = [reason for applies, reason in reasons if applies]
    if found:
        return Sync.MICROBATCH, ", ".join(found)
    return Sync.STEP, "replicas meet once per optimizer step"


def padding_multiple(args: argparse.Namespace) -> int:
    """Return the multiple that every sample's length is padded to.

    FP8 takes the token counts of mcore's `get_fp8_align_size` (fp8_utils.py, 0.18.2, 0.19.2).
    """
    sequence_parallel = getattr(args, "sequence_parallel", False)
    is_mx = getattr(args, "fp8_recipe", "delayed") == "mxfp8"
    return length_multiple(
        context_parallel_size=_size(args, "context_parallel_size"),
        sequence_parallel_size=_size(args, "tensor_model_parallel_size")
        if sequence_parallel
        else 1,
        rank_multiple=(32 if is_mx else 16) if getattr(args, "fp8", None) else 1,
    )


def has_state_layers(args: argparse.Namespace) -> bool:
    """Whether the model has state-space layers."""
    names = ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern")
    return any(bool(getattr(args, name, None)) for name in names)


def pipeline_of(args: argparse.Namespace) -> Pipeline:
    """Return how Megatron's schedule cuts the model."""
    chunks = _size(args, "virtual_pipeline_model_parallel_size")
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) or 0
    return Pipeline(
        stages=_size(args, "pipeline_model_parallel_size"),
        chunks=chunks,
        group=group if chunks > 1 else 0,
    )


def count_multiple(args: argparse.Namespace) -> int:
    """Return what M must be a multiple of."""
    return pipeline_of(args).count_multiple


def _size(args: argparse.Namespace, name: str) -> int:
    return getattr(args, name, None) or 1


def _shards_parameters(args: argparse.Namespace) -> bool:
    if getattr(args, "use_torch_fsdp2", False):
        return True
    strategy = getattr(args, "data_parallel_sharding_strategy", "optim_grads_params")
    return bool(getattr(args, "use_megatron_fsdp", False)) and strategy == "optim_grads_params"


def routers(args: argparse.Namespace) -> set[str]:
    """Return the load-balancing types in use; Megatron takes one or a list."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    if getattr(args, "num_experts", None) is None:
        return set()
    return {kinds} if isinstance(kinds, str) else set(kinds)
