"""What a model asks of an attention backend, and whether a backend offers it.

Pure: numbers and names in, reasons out. Must not import torch or Megatron, read a device, or look
for packages.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import Enum

__all__ = ["Feature", "Limits", "Need", "graphed_modules", "need_of", "why_unfit"]


class Feature(Enum):
    """What not every backend computes, and the flag that asks for it."""

    DROPOUT = "--attention-dropout above 0"
    WINDOW = "--window-size"
    SINK = "--softmax-type other than vanilla"
    MAX_LOGIT = "--qk-clip and --log-max-attention-logit"
    DETERMINISTIC = "--deterministic-mode"
    CONTEXT_PARALLEL = "--context-parallel-size above 1"
    GRAPHS = "--cuda-graph-impl with attention in the graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model asks for; defaults are for what is not known.

    Attributes:
        dtype: of queries, keys and values: `float32`, `float16` or `bfloat16`; empty for any.
        head_size: channels per head of queries and keys; 0 for any.
        layers: `--transformer-impl`.
        features: what else is asked for.
        capability: (major, minor) of the CUDA device; None where it is not known.
    """

    dtype: str = ""
    head_size: int = 0
    layers: str = "local"
    features: frozenset[Feature] = frozenset()
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend computes.

    Attributes:
        dtypes: as in `Need`; empty for all.
        max_head_size: 0 for any.
        head_multiple: head sizes are multiples of it.
        layers: the `--transformer-impl` whose layers it is made for.
        features: what it has.
        min_capability: first CUDA device it runs on.
        max_capability: last one.
    """

    dtypes: tuple[str, ...] = ()
    max_head_size: int = 0
    head_multiple: int = 1
    layers: str = "local"
    features: frozenset[Feature] = frozenset(Feature)
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] = (99, 9)


def why_unfit(limits: Limits, need: Need) -> str | None:
    """Return None if a backend with these limits does what is needed, else why not."""
    if need.layers != limits.layers:
        return f"needs --transformer-impl {limits.layers}"
    if need.capability is not None and not (
        limits.min_capability <= need.capability <= limits.max_capability
    ):
        low, high, seen = (
            ".".join(map(str, one))
            for one in (limits.min_capability, limits.max_capability, need.capability)
        )
        until = "" if limits.max_capability == (99, 9) else f" to {high}"
        return f"needs compute capability {low}{until}, not {seen}"
    if need.dtype and limits.dtypes and need.dtype not in limits.dtypes:
        return f"computes in {' or '.join(limits.dtypes)}, not {need.dtype}"
    if limits.max_head_size and need.head_size > limits.max_head_size:
        return f"has head sizes up to {limits.max_head_size}, not {need.head_size}"
    if need.head_size % limits.head_multiple:
        return f"has head sizes in multiples of {limits.head_multiple}, not {need.head_size}"
    missing = [feature.value for feature in Feature if feature in need.features - limits.features]
    return f"does not have {', '.join(missing)}" if missing else None


def need_of(args: argparse.Namespace, *, capability: tuple[int, int] | None = None) -> Need:
    """Return what Megatron's arguments ask for; what is absent is off.

    Args:
        args: validated.
        capability: of the CUDA device.
    """

    def given(name: str, default: object = None) -> object:
        return getattr(args, name, default)

    size = given("kv_channels") or 0
    if given("multi_latent_attention"):
        size = int(args.qk_head_dim) + int(args.qk_pos_emb_head_dim)
    asked = {
        Feature.DROPOUT: bool(given("attention_dropout")),
        Feature.WINDOW: given("window_size") is not None,
        Feature.SINK: given("softmax_type", "vanilla") != "vanilla",
        Feature.MAX_LOGIT: bool(given("qk_clip") or given("log_max_attention_logit")),
        Feature.DETERMINISTIC: bool(given("deterministic_mode")),
        Feature.CONTEXT_PARALLEL: (getattr(args, "context_parallel_size", None) or 1) > 1,
        Feature.GRAPHS: _graphs_attention(args),
    }
    return Need(
        dtype="bfloat16" if given("bf16") else "float16" if given("fp16") else "float32",
        head_size=int(str(size)),
        layers=str(given("transformer_impl", "local")),
        features=frozenset(feature for feature, is_asked in asked.items() if is_asked),
        capability=capability,
    )


def _graphs_attention(args: argparse.Namespace) -> bool:
    if getattr(args, "cuda_graph_impl", None) in (None, "none"):
        return False
    modules = graphed_modules(args)
    return not modules or "attn" in modules


def graphed_modules(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts of a layer that are put into CUDA graphs; empty for whole layers.

    0.17 has `cuda_graph_scope`, 0.18 and later `cuda_graph_modules`; enums or names.
    """
    found = getattr(args, "cuda_graph_modules", None)
    if found is None:
        found = getattr(args, "cuda_graph_scope", None)
    found = found or ()
    found = found.split(",") if isinstance(found, str) else found
    names = [getattr(each, "name", each) for each in found]
    return tuple(name for name in names if name != "full")
