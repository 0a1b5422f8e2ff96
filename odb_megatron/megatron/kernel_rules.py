"""Which of Megatron's flags on low precision, CUDA graphs and layers fit packed micro-batches.

A function of arguments and of Megatron's version; must not look for packages or devices (that is
`attention`).
"""

from __future__ import annotations

import argparse

from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.topology import padding_multiple
from odb_megatron.plan.padding import budget_length

__all__ = ["graphed_modules", "kernel_messages"]


def kernel_messages(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    """Return what does not fit, by name.

    Args:
        args: validated; what is absent is off.
        config: with `--odb`.
    """
    return _low_precision(args) + _graphs(args, config)


def _low_precision(args: argparse.Namespace) -> list[str]:
    messages = []
    if getattr(args, "fp4", None):
        messages.append("--odb has no FP4 in this version: use --fp8-format or --bf16")
    if not getattr(args, "fp8", None):
        return messages
    if getattr(args, "transformer_impl", "local") != "transformer_engine":
        messages.append(
            "--odb has --fp8-format in Transformer Engine's layers: use --transformer-impl "
            "transformer_engine or --bf16 alone"
        )
    if getattr(args, "fp8_recipe", "delayed") == "custom":
        messages.append(
            "--fp8-recipe custom does not say which token counts it takes: use delayed, "
            "tensorwise, blockwise or mxfp8"
        )
    return messages


def _graphs(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    if getattr(args, "enable_cuda_graph", False) or getattr(args, "external_cuda_graph", False):
        return [
            "--enable-cuda-graph and --external-cuda-graph are --cuda-graph-impl by older names: "
            "use --cuda-graph-impl local or transformer_engine, with --odb-pad-to budget"
        ]
    kind = getattr(args, "cuda_graph_impl", None) or "none"
    if kind == "none":
        return []
    if kind not in ("local", "transformer_engine"):
        return [
            f"--cuda-graph-impl {kind} replays a whole step, and --odb makes steps of varying "
            "micro-batch counts: use local or transformer_engine with --odb-pad-to budget, or none"
        ]
    modules = graphed_modules(args)
    if any(module.startswith("full_iteration") for module in modules):
        return [
            "--cuda-graph-scope full_iteration replays a whole step, and --odb makes steps of "
            "varying micro-batch counts: use attn, mlp or no scope"
        ]
    if not config.pads_to_budget:
        return [
            "--odb makes micro-batches of varying size, which CUDA graphs cannot replay: add "
            "--odb-pad-to budget, or use --cuda-graph-impl none"
        ]
    has_attention = not modules or "attn" in modules
    if kind == "transformer_engine":
        return _transformer_engine_graphs(args, config, has_attention=has_attention)
    rope = getattr(args, "position_embedding_type", "rope") in ("rope", "yarn")
    if has_attention and rope and not getattr(args, "apply_rope_fusion", False):
        return [
            "--cuda-graph-impl local captures attention, and without fusion rotary embeddings of "
            "packed samples wait for the device (rope_utils.py 219, 0.19.2): drop "
            "--no-rope-fusion, or leave attention out with --cuda-graph-modules mlp"
        ]
    return []


def graphed_modules(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts of a layer that are put into CUDA graphs; empty for whole layers."""
    found = getattr(args, "cuda_graph_modules", None) or ()
    found = found.split(",") if isinstance(found, str) else found
    names = [getattr(each, "name", each) for each in found]
    return tuple(name for name in names if name != "full")


def _transformer_engine_graphs(
    args: argparse.Namespace, config: OdbConfig, *, has_attention: bool
) -> list[str]:
    messages = []
    if has_attention:
        messages.append(
            "--cuda-graph-impl transformer_engine takes tensors only, not the layout of packed "
            "samples (transformer_layer.py `_te_cuda_graph_replay`, 0.16.1 to 0.19.2): leave "
            "attention out with --cuda-graph-modules mlp (--cuda-graph-scope before 0.18), or use "
            "--cuda-graph-impl local"
        )
    length = budget_length(config.token_budget, padding_multiple(args))
    if length != args.seq_length:
        messages.append(
            f"--cuda-graph-impl transformer_engine captures --seq-length {args.seq_length} tokens, "
            f"and micro-batches are padded to {length}: make them equal (multiples of "
            f"{padding_multiple(args)}), or use --cuda-graph-impl local"
        )
    if (getattr(args, "pipeline_model_parallel_size", None) or 1) > 1:
        messages.append(
            "--cuda-graph-impl transformer_engine captures one graph for each micro-batch of a "
            "fixed count under pipeline parallelism, and --odb varies it: use --cuda-graph-impl "
            "local"
        )
    return messages
