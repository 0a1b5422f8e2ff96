"""What ODB needs of its host: it is set where nothing else was asked for, and refused by name else.

`{name}` in a text is an argument of Megatron's, or of ODB's, in the host's words (`errors`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from odb_megatron.errors import SettingError
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.topology import count_multiple, padding_multiple, routers
from odb_megatron.plan.padding import OverlongPolicy, budget_length

__all__ = ["NEEDS", "refuse_flags", "refuse_unsupported", "set_needs"]


def _always(_args: argparse.Namespace) -> bool:
    return True


def _has_experts(args: argparse.Namespace) -> bool:
    return getattr(args, "num_experts", None) is not None


def _moves_micro_batches(args: argparse.Namespace) -> bool:
    """Whether experts meet in micro-batches of different sizes, those of several replicas."""
    has_one_shape = getattr(args, "odb_pad_to", None) in ("budget", ["budget"])
    shares = _has_experts(args) and (getattr(args, "expert_model_parallel_size", None) or 1) > 1
    return shares and not has_one_shape


class Need(NamedTuple):
    """An argument that must have one of some values; the first is set where none was given."""

    name: str
    values: tuple[Any, ...]
    why: str
    applies: Callable[[argparse.Namespace], bool] = _always
    is_set: bool = True


_LOSS = "without it the loss is averaged per micro-batch first: it depends on the packing"
_SIZES = "replicas' micro-batches differ in size ({odb_pad_to} budget gives all one)"
_ORDER = "the data loader is its own, and takes the order of the samples from this"

NEEDS = (
    Need("calculate_per_token_loss", (True,), _LOSS),
    Need("micro_batch_size", (1,), "a packed micro-batch is one row of many samples"),
    Need("eval_micro_batch_size", (1,), "evaluations are packed too"),
    Need("moe_token_dispatcher_type", ("alltoall", "flex"), _SIZES, _moves_micro_batches),
    Need("dataloader_type", ("single", "cyclic"), _ORDER, is_set=False),
    Need("non_persistent_ckpt_type", ("global",), "all nodes read its data state", is_set=False),
    Need("gtp_weight_remat_size", (1,), "it does not know this axis", is_set=False),
)

_OFF = {
    "sft": "two packings of the same data; chat files are read without it",
    "trust_remote_code": "no code is run that comes with a tokenizer",
    "mock_data": "real samples are trained: give {data_path}",
    "fim_data": "samples are not cut for fill-in-the-middle",
    **dict.fromkeys(
        (
            *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
            "dataloader_inter_document_masking",
        ),
        "it does nothing: samples never share positions or attention; loss follows the data",
    ),
    **dict.fromkeys(
        (
            *("rampup_batch_size", "step_batch_size_schedule", "iterations_to_skip"),
            *("phase_transition_iterations", "multiple_validation_sets"),
        ),
        "not in this version",
    ),
    **dict.fromkeys(
        ("hybrid_context_parallel", "sequence_packing_scheduler", "use_varlen_dataset"),
        "both form the micro-batches",
    ),
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_torch_fsdp2"),
        "FSDP is not in this version (it has not been run: no test without CUDA can); use "
        "{use_distributed_optimizer}",
    ),
    "decrease_batch_size_if_needed": "the batch size stays",
    "override_ckpt_iteration": "it would count other samples than the checkpoint's own iteration; "
    "{ckpt_step} loads the checkpoint of that iteration",
    "full_validation": "Megatron's own fails with one validation set (training.py 4382, 0.19.2); "
    "{eval_iters} gives the steps of an evaluation",
    "perform_rl_step": "rollouts are not batched",
    "inprocess_restart": "it leaves groups and threads; a restarted job goes on from a checkpoint",
    "logits_load_dir": "a teacher's saved logits are not read",
    "overlap_moe_expert_parallel_comm": "its schedule routes without the padding mask "
    "(models/gpt/fine_grained_callables.py 130, 0.19.2): padding would count in routers' losses",
    "ddp_average_in_collective": "gradients are divided by the loss tokens of all replicas",
    "fp4": "not in this version; use {fp8} or {bf16}",
}
"""Arguments that must not be given with `--odb`, and why."""


def set_needs(args: argparse.Namespace, unset: Mapping[str, Any]) -> str:
    """Set what was not given: to what ODB needs, or without `--odb` to Megatron's default.

    Args:
        args: parsed, with None for what was not given; changed.
        unset: defaults by name.

    Returns:
        What was set for ODB, for the user; empty for nothing.
    """
    said = []
    for name, default in unset.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
            need = next(need for need in NEEDS if need.name == name)
            if args.odb and default not in need.values and need.applies(args):
                setattr(args, name, need.values[0])
                value = "" if need.values[0] is True else f" {need.values[0]}"
                said.append(f"{{{name}}}{value}")
    return str(SettingError(" ".join(said)))


def refuse_flags(args: argparse.Namespace) -> None:
    """Check arguments that Megatron has refused, or not validated: what ODB refuses says why.

    Raises:
        ValueError: every refusal of a flag that applies, one line each.
    """
    _raise(_flag_texts(args, enabled=args.odb), {})


def refuse_unsupported(args: argparse.Namespace, config: OdbConfig) -> None:
    """Check parsed and validated arguments.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    multiple = padding_multiple(args)
    values = {
        "budget": config.token_budget,
        "length": args.seq_length,
        "multiple": multiple,
        "captured": budget_length(config.token_budget, multiple),
        "stages": getattr(args, "pipeline_model_parallel_size", None) or 1,
        "group": count_multiple(args),
        "cost": _cost_error(config),
        "loss_per": config.loss_per and config.loss_per.value,
        "scale": config.count_scale,
        "folder": getattr(args, "save", None),
        "unsaved": _save_error(args) if config.enabled else "",
    }
    texts = [*_flag_texts(args, enabled=config.enabled), *_weight_texts(args, config)]
    if config.enabled:
        texts += [*_graph_texts(args, config, values), *_planning_texts(args, config, values)]
    _raise(texts, values)


def _raise(texts: Iterable[str], values: Mapping[str, Any]) -> None:
    messages = [str(SettingError(text, values)) for text in texts]
    if messages:
        raise ValueError("\n".join(messages))


def _flag_texts(args: argparse.Namespace, *, enabled: bool) -> Iterator[str]:
    """Yield what is refused of single flags; layers and kernels are the baseline's, too."""
    if getattr(args, "transformer_impl", "local") not in ("local", "transformer_engine"):
        yield (
            "{odb} packs samples in Megatron's local layers and in Transformer Engine's: use "
            "{transformer_impl} local or transformer_engine"
        )
    if getattr(args, "spec", None) and getattr(args, "transformer_impl", "local") == "local":
        yield (
            "local layers of {spec} may not take packed samples of {odb}: drop it, or use "
            "{transformer_impl} transformer_engine"
        )
    if not enabled:
        return
    for name, values, why, applies, _ in NEEDS:
        value = getattr(args, name, None)
        if value is not None and value not in values and applies(args):
            wanted = "" if values[0] is True else f" {' or '.join(map(str, values))}"
            yield f"{{odb}} needs {{{name}}}{wanted}: {why}"
    for name, why in _OFF.items():
        if getattr(args, name, None):
            yield f"{{odb}} and {{{name}}}: {why}: drop {{{name}}}"
    yield from _layer_texts(args)


def _layer_texts(args: argparse.Namespace) -> Iterator[str]:
    has_experts, predicts = _has_experts(args), bool(getattr(args, "mtp_num_layers", None))
    if {"quantile_balancing", "sinkhorn"} & routers(args):
        yield (
            "{moe_router_load_balancing_type} quantile_balancing and sinkhorn take no padding "
            "mask, and {odb} has padding and idle micro-batches: use aux_loss, seq_aux_loss, "
            "global_aux_loss or none"
        )
    backend = ""
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        backend = getattr(args, "moe_flex_dispatcher_backend", "deepep")
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        # NCCL's experts end the run where a rank's capacity is passed; the others drop tokens.
        if getattr(args, name, None) is not None and has_experts and backend != "ncclep":
            yield (
                f"{{{name}}} drops tokens by what else is in a micro-batch, so with {{odb}} the "
                "loss would depend on how samples are packed: drop it"
            )
    if _moves_micro_batches(args):
        evens_out = getattr(args, "moe_hybridep_pad_uneven_dispatch_inputs", False)
        if backend == "hybridep" and not evens_out:
            yield (
                "{moe_flex_dispatcher_backend} hybridep takes equal token counts "
                "(token_dispatcher.py 1055, 0.19.2), and micro-batches differ in size: "
                "add {moe_hybridep_pad_uneven_dispatch_inputs}, or {odb_pad_to} budget"
            )
        if backend == "ncclep":
            yield (
                "{moe_flex_dispatcher_backend} ncclep sizes its buffers by the first micro-batch "
                "(token_dispatcher.py `_ensure_bootstrap`, 0.19.2): add {odb_pad_to} budget"
            )
    if predicts and (getattr(args, "context_parallel_size", None) or 1) > 1:
        yield (
            "multi-token prediction of packed samples is not exact under context parallelism "
            "(multi_token_prediction.py 270, 0.19.2): with {odb} drop {mtp_num_layers} or "
            "{context_parallel_size}"
        )
    if predicts and has_experts:
        yield (
            "multi-token prediction shifts the routers' padding mask, so that padding counts in "
            "their losses: with {odb} drop {mtp_num_layers} or {num_experts}"
        )
    if getattr(args, "fp8", None) and getattr(args, "transformer_impl", "local") == "local":
        yield (
            "{fp8} is of Transformer Engine's layers: use {transformer_impl} transformer_engine, "
            "or {bf16} alone"
        )
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "delayed") == "custom":
        yield (
            "{fp8_recipe} custom does not say which token counts it takes: use delayed, "
            "tensorwise, blockwise or mxfp8"
        )


def _weight_texts(args: argparse.Namespace, config: OdbConfig) -> Iterator[str]:
    """Yield what does not know that weights are scaled; see `data.preprocess.count_scale`."""
    if config.loss_per is None:
        return
    if getattr(args, "fp16", False):
        yield (
            "{odb_loss_per} {loss_per} scales the loss by {scale}, so that weights can be counted "
            "in whole numbers, and {fp16} has no room for that: use {bf16}, or drop one of them"
        )
    if _has_experts(args) and not config.enabled:
        yield (
            "{odb_loss_per} {loss_per} weighs the routers' losses by what {odb} knows of a step: "
            "add {odb}, or drop {num_experts}"
        )
    if getattr(args, "experimental_attention_variant", None) is not None:
        yield (
            "{odb_loss_per} {loss_per} and {experimental_attention_variant}, whose own loss would "
            "not be weighed: drop one of them"
        )


def _graphed_modules(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts of a layer that are put into CUDA graphs; empty for whole layers."""
    found = getattr(args, "cuda_graph_modules", None) or ()  # enums or names
    found = found.split(",") if isinstance(found, str) else found
    names = [getattr(each, "name", each) for each in found]
    return tuple(name for name in names if name != "full")


def _graph_texts(
    args: argparse.Namespace, config: OdbConfig, values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield which CUDA graphs and buffers do not fit packed micro-batches."""
    has_length = config.pads_to_budget and values["captured"] == values["length"]
    if getattr(args, "tp_comm_overlap", False) and not has_length:
        yield (
            "{tp_comm_overlap} has buffers for {seq_length} {length} tokens (initialize.py 211, "
            "0.19.2), and {odb} makes micro-batches of varying size: add {odb_pad_to} budget with "
            "a budget of as many, or drop {tp_comm_overlap}"
        )
    kind, modules = getattr(args, "cuda_graph_impl", None) or "none", _graphed_modules(args)
    has_attention = not modules or "attn" in modules
    rope = getattr(args, "position_embedding_type", "rope") in ("rope", "yarn")
    if kind == "none":
        return
    if kind == "full_iteration" or any(one.startswith("full_iteration") for one in modules):
        yield (
            "{cuda_graph_impl} full_iteration replays a whole step, and {odb} makes steps of "
            "varying micro-batch counts: use local or none"
        )
    elif not config.pads_to_budget:
        yield (
            "{odb} makes micro-batches of varying size, which CUDA graphs cannot replay: add "
            "{odb_pad_to} budget, or use {cuda_graph_impl} none"
        )
    elif kind == "local":
        if has_attention and rope and not getattr(args, "apply_rope_fusion", False):
            yield (
                "{cuda_graph_impl} local captures attention with lengths of 0, by which rotary "
                "embeddings without fusion find no positions (cuda_graphs.py 274, 0.19.2): drop "
                "{no_rope_fusion}, or leave attention out with {cuda_graph_modules} mlp"
            )
        backend = getattr(getattr(args, "attention_backend", None), "name", "")
        if has_attention and backend == "unfused" and args.transformer_impl == "local":
            yield (
                "{attention_backend} unfused reads lengths on the host, which {cuda_graph_impl} "
                "local cannot capture: use {attention_backend} flash, or leave attention out with "
                "{cuda_graph_modules} mlp"
            )
    else:
        use_local = "or use {cuda_graph_impl} local"
        if has_attention:
            yield (
                "{cuda_graph_impl} transformer_engine takes tensors only, not the layout of packed "
                "samples (transformer_layer.py `_te_cuda_graph_replay`, 0.18.2, 0.19.2): leave "
                f"attention out with {{cuda_graph_modules}} mlp, {use_local}"
            )
        if values["captured"] != values["length"]:
            yield (
                "{cuda_graph_impl} transformer_engine captures {seq_length} {length} tokens, and "
                "micro-batches are padded to {captured}: make them equal (multiples of "
                f"{{multiple}}), {use_local}"
            )
        if values["stages"] > 1:
            yield (
                "{cuda_graph_impl} transformer_engine captures one graph for each micro-batch of a "
                "fixed count under pipeline parallelism, and {odb} varies it: use "
                "{cuda_graph_impl} local"
            )


def _planning_texts(
    args: argparse.Namespace, config: OdbConfig, values: Mapping[str, Any]
) -> Iterator[str]:
    if min(config.token_budget, args.seq_length) < values["multiple"]:
        yield (
            "every sample is padded to a multiple of {multiple} (context parallelism, tensor "
            "parallelism with sequence parallelism, FP8): {odb_token_budget} {budget} and "
            "{seq_length} {length} must not be below it"
        )
    if config.token_budget < args.seq_length and config.overlong is OverlongPolicy.ERROR:
        yield (
            "{odb_token_budget} {budget} is below {seq_length} {length}: samples in between could "
            "not be placed; raise the budget, or say what happens to them with {odb_overlong} "
            "truncate, drop or solo"
        )
    if values["cost"]:
        yield "{odb_cost} {cost}"
    has_chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if has_chunks and values["group"] < values["stages"]:
        yield (
            "{odb} makes a multiple of {microbatch_group_size_per_vp_stage} micro-batches: {group} "
            "is below the {stages} pipeline stages, which the interleaved schedule refuses; raise "
            "it, or drop it"
        )
    if config.pad_to and config.overlong is OverlongPolicy.SOLO:
        yield (
            "{odb_overlong} solo makes micro-batches above the budget, which {odb_pad_to} cannot "
            "pad to one of its shapes: use error, truncate or drop, or drop {odb_pad_to}"
        )
    if values["unsaved"]:
        yield "{save} {folder}: {unsaved}"


def _cost_error(config: OdbConfig) -> str:
    if config.cost is not None:
        try:
            longest = np.array([max(config.context, config.token_budget)])
            config.cost.model().samples(longest, longest * 0)
        except ValueError as error:
            return f"{config.cost}: {error}"
    return ""


def _save_error(args: argparse.Namespace) -> str:
    """Return what would show at the first save only, with all steps until then lost."""
    save = str(getattr(args, "save", None) or "")
    if not save or "://" in save:
        return ""
    found = Path(save).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        return f"{found} is no folder"
    if not os.access(found, os.W_OK | os.X_OK):
        return f"no permission to write to {found}"
    if getattr(args, "rank", 0) == 0:
        try:
            with tempfile.TemporaryDirectory(prefix=".odb-", dir=found):
                pass
        except OSError as error:
            return f"{found} cannot be written ({error.strerror})"
    return ""
