"""The cost model that a run plans with: as given by `--odb-cost`, or by the model's shape."""

from __future__ import annotations

import argparse

from odb_megatron.megatron.config import OdbConfig
from odb_megatron.plan.cost import CostModel, ModelShape

__all__ = ["cost_model"]

_OVERHEAD_SHARE = 0.05
"""Overhead of a micro-batch as a share of a full one's linear cost, where nothing was measured."""


def cost_model(args: argparse.Namespace, config: OdbConfig) -> CostModel:
    """Return the cost model.

    Args:
        args: Megatron's, the padded vocabulary's size among them; a script whose model has a vision
            tower sets `odb_patch_tokens`, what a patch costs beside a token.
        config: ODB's.
    """
    if config.cost is not None:
        return config.cost.model()
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    shape = ModelShape(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        ffn_hidden=args.ffn_hidden_size,
        query=args.num_attention_heads * args.kv_channels,
        key_value=groups * args.kv_channels,
        vocab=args.padded_vocab_size,
        gated_mlp=args.swiglu,
    )
    return CostModel.from_ratios(
        quadratic=shape.quadratic_ratio,
        fixed_tokens=_OVERHEAD_SHARE * config.token_budget,
        patch_tokens=getattr(args, "odb_patch_tokens", 0.0),
    )
