"""What ODB needs of its host: it is set where nothing else was asked for, and refused by name else.

`{name}` in a text is an argument of Megatron's, or of ODB's, in the host's words (`errors`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from odb_megatron.errors import SettingError
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.topology import (
    count_multiple,
    padding_multiple,
    routers,
    why_not_shared,
)
from odb_megatron.plan.padding import OverlongPolicy, budget_length

__all__ = ["RULES", "refuse_flags", "refuse_unsupported", "set_needs"]


def _moves_micro_batches(args: argparse.Namespace) -> bool:
    """Whether experts meet in micro-batches of different sizes, those of several replicas."""
    has_one_shape = _given(args, "odb_pad_to") in ("budget", ["budget"])
    shares = _given(args, "num_experts") and (_given(args, "expert_model_parallel_size") or 1) > 1
    return bool(shares) and not has_one_shape


def _given(args: argparse.Namespace, name: str) -> Any:
    return getattr(args, name, None)


class Rule(NamedTuple):
    """What `--odb` asks of one argument.

    Attributes:
        values: that it may have; empty where it must not be given.
        is_set: whether the first of them is set where none was given.
        applies: whether the argument matters to this run.
    """

    name: str
    why: str
    values: tuple[Any, ...] = ()
    is_set: bool = True
    applies: Callable[[argparse.Namespace], bool] = lambda _: True


_LOSS = "without it the loss is averaged per micro-batch first: it depends on the packing"
_SIZES = "replicas' micro-batches differ in size ({odb_pad_to} budget gives all one)"
_ORDER = "the data loader is its own, and takes the order of the samples from this"
_SAMPLES = "it does nothing: samples never share positions or attention; loss follows the data"
_FSDP = "FSDP is not in this version (it has not been run: no test without CUDA can); use "
_FSDP += "{use_distributed_optimizer}"
_STEP = "it would count other samples than the checkpoint's own iteration; {ckpt_step} loads the "
_STEP += "checkpoint of that iteration"
_EVALUATION = "Megatron's own fails with one validation set (training.py 4382, 0.19.2); "
_EVALUATION += "{eval_iters} gives the steps of an evaluation"
_ROUTES = "its schedule routes without the padding mask (models/gpt/fine_grained_callables.py 130, "
_ROUTES += "0.19.2): padding would count in routers' losses"
_REASONS = {
    "not in this version": "rampup_batch_size step_batch_size_schedule iterations_to_skip "
    "phase_transition_iterations multiple_validation_sets",
    "both form the micro-batches": "hybrid_context_parallel sequence_packing_scheduler "
    "use_varlen_dataset",
    _SAMPLES: "reset_position_ids reset_attention_mask eod_mask_loss "
    "dataloader_inter_document_masking",
    _FSDP: "use_megatron_fsdp use_torch_fsdp2",
    "two packings of the same data; chat files are read without it": "sft",
    "no code is run that comes with a tokenizer": "trust_remote_code",
    "real samples are trained: give {data_path}": "mock_data",
    "samples are not cut for fill-in-the-middle": "fim_data",
    "the batch size stays": "decrease_batch_size_if_needed",
    _STEP: "override_ckpt_iteration",
    _EVALUATION: "full_validation",
    "rollouts are not batched": "perform_rl_step",
    "it leaves groups and threads; a restarted job goes on from a checkpoint": "inprocess_restart",
    "a teacher's saved logits are not read": "logits_load_dir",
    _ROUTES: "overlap_moe_expert_parallel_comm",
    "gradients are divided by the loss tokens of all replicas": "ddp_average_in_collective",
    "not in this version; use {fp8} or {bf16}": "fp4",
}
RULES = (
    Rule("calculate_per_token_loss", _LOSS, (True,)),
    Rule("micro_batch_size", "a packed micro-batch is one row of many samples", (1,)),
    Rule("eval_micro_batch_size", "evaluations are packed too", (1,)),
    Rule("moe_token_dispatcher_type", _SIZES, ("alltoall", "flex"), applies=_moves_micro_batches),
    Rule("dataloader_type", _ORDER, ("single", "cyclic"), is_set=False),
    Rule("non_persistent_ckpt_type", "all nodes read its data state", ("global",), is_set=False),
    Rule("gtp_weight_remat_size", "it does not know this axis", (1,), is_set=False),
    *(Rule(name, why, is_set=False) for why, names in _REASONS.items() for name in names.split()),
)


def set_needs(args: argparse.Namespace, unset: Mapping[str, Any]) -> str:
    """Set what was not given: to what ODB needs, or without `--odb` to Megatron's default.

    Args:
        args: parsed, with None for what was not given; changed.
        unset: defaults by name.

    Returns:
        What was set for ODB, for the user; empty for nothing.
    """
    said = []
    for rule in RULES:
        if rule.name in unset and getattr(args, rule.name) is None:
            value = unset[rule.name]
            if args.odb and value not in rule.values and rule.applies(args):
                value = rule.values[0]
                said.append(f"{{{rule.name}}}" + ("" if value is True else f" {value}"))
            setattr(args, rule.name, value)
    return str(SettingError(" ".join(said)))


def refuse_flags(args: argparse.Namespace, *, besides: ValueError | None = None) -> None:
    """Check arguments that were refused otherwise, or not validated: what ODB refuses says why.

    Args:
        args: parsed.
        besides: another refusal, to be named first.

    Raises:
        ValueError: every refusal of a flag that applies, one line each.
    """
    _raise(_flag_texts(args, enabled=args.odb), {}, first=besides)


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
        "stages": _given(args, "pipeline_model_parallel_size") or 1,
        "group": count_multiple(args),
        "loss_per": config.loss_per and config.loss_per.value,
        "scale": config.count_scale,
        "folder": _given(args, "save"),
    }
    found = _flag_texts(args, enabled=config.enabled) | _weight_texts(args, config)
    if config.enabled:
        found |= _graph_texts(args, config, values) | _planning_texts(args, config, values)
    _raise(found, values)


def _raise(
    found: Mapping[str, Any], values: Mapping[str, Any], first: ValueError | None = None
) -> None:
    """Raise what applies of texts, each with whether it does."""
    messages = [str(SettingError(text, values)) for text, applies in found.items() if applies]
    if messages:
        raise ValueError("\n".join([*([str(first)] if first else []), *messages]))


def _flag_texts(args: argparse.Namespace, *, enabled: bool) -> dict[str, Any]:
    """Return what is refused of single flags; layers and kernels are the baseline's, too."""
    layers = getattr(args, "transformer_impl", "local")
    is_other = layers not in ("local", "transformer_engine")
    predicts = bool(_given(args, "mtp_num_layers"))
    ties = not _given(args, "untie_embeddings_and_output_weights")
    saves = bool(_given(args, "save") or _given(args, "load"))
    ties &= saves and _given(args, "ckpt_format") != "torch"
    ties &= (_given(args, "pipeline_model_parallel_size") or 1) > 1
    found: dict[str, Any] = {
        "{odb} packs samples in Megatron's local layers and in Transformer Engine's: use "
        "{transformer_impl} local or transformer_engine": is_other,
        "local layers of {spec} may not take packed samples of {odb}: drop it, or use "
        "{transformer_impl} transformer_engine": _given(args, "spec") and layers == "local",
        "multi-token prediction in pipeline stages has no checkpoints with tied embeddings "
        "(language_module.py 497, 0.19.2): with {mtp_num_layers} add "
        "{untie_embeddings_and_output_weights}, or drop {pipeline_model_parallel_size}": predicts
        and ties,
    }
    if not enabled:
        return found
    for rule in RULES:
        value = _given(args, rule.name)
        if not rule.values:
            found[f"{{odb}} and {{{rule.name}}}: {rule.why}: drop {{{rule.name}}}"] = value
        elif value not in (None, *rule.values) and rule.applies(args):
            wanted = "" if rule.values[0] is True else f" {' or '.join(map(str, rule.values))}"
            found[f"{{odb}} needs {{{rule.name}}}{wanted}: {rule.why}"] = True
    has_experts, moves = _given(args, "num_experts") is not None, _moves_micro_batches(args)
    backend = ""
    if _given(args, "moe_token_dispatcher_type") == "flex":
        backend = getattr(args, "moe_flex_dispatcher_backend", "deepep")
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        # NCCL's experts end the run where a rank's capacity is passed; the others drop tokens.
        drops = _given(args, name) is not None and has_experts and backend != "ncclep"
        found[
            f"{{{name}}} drops tokens by what else is in a micro-batch, so with {{odb}} the loss "
            "would depend on how samples are packed: drop it"
        ] = drops
    is_even = _given(args, "moe_hybridep_pad_uneven_dispatch_inputs")
    masks_none = {"quantile_balancing", "sinkhorn"} & routers(args)
    has_context = (_given(args, "context_parallel_size") or 1) > 1
    fp8, recipe = _given(args, "fp8"), _given(args, "fp8_recipe")
    return found | {
        "{moe_router_load_balancing_type} quantile_balancing and sinkhorn take no padding mask, "
        "which {odb} needs: use aux_loss, seq_aux_loss, global_aux_loss or none": masks_none,
        "{moe_flex_dispatcher_backend} hybridep takes equal token counts (token_dispatcher.py "
        "1055, 0.19.2), and micro-batches differ in size: add "
        "{moe_hybridep_pad_uneven_dispatch_inputs}, or {odb_pad_to} budget": moves
        and backend == "hybridep"
        and not is_even,
        "{moe_flex_dispatcher_backend} ncclep sizes its buffers by the first micro-batch "
        "(token_dispatcher.py `_ensure_bootstrap`, 0.19.2): add {odb_pad_to} budget": moves
        and backend == "ncclep",
        "multi-token prediction of packed samples is not exact under context parallelism "
        "(multi_token_prediction.py 270, 0.19.2): with {odb} drop {mtp_num_layers} or "
        "{context_parallel_size}": predicts and has_context,
        "multi-token prediction shifts the routers' padding mask, so that padding counts in their "
        "losses: with {odb} drop {mtp_num_layers} or {num_experts}": predicts and has_experts,
        "{fp8} is of Transformer Engine's layers: use {transformer_impl} transformer_engine, or "
        "{bf16} alone": fp8 and layers == "local",
        "{fp8_recipe} custom does not say which token counts it takes: use delayed, tensorwise, "
        "blockwise or mxfp8": fp8 and recipe == "custom",
    }


def _weight_texts(args: argparse.Namespace, config: OdbConfig) -> dict[str, Any]:
    """Return what does not know that weights are scaled; see `data.sample.count_scale`."""
    if config.loss_per is None:
        return {}
    has_experts = _given(args, "num_experts") is not None
    return {
        "{odb_loss_per} {loss_per} scales the loss by {scale} to count weights in whole numbers, "
        "and {fp16} has no room for that: use {bf16}, or drop one of them": _given(args, "fp16"),
        "{odb_loss_per} {loss_per} weighs the routers' losses by what {odb} knows of a step: add "
        "{odb}, or drop {num_experts}": has_experts and not config.enabled,
        "{odb_loss_per} {loss_per} and {experimental_attention_variant}, whose own loss would not "
        "be weighed: drop one of them": _given(args, "experimental_attention_variant"),
    }


def _graph_texts(
    args: argparse.Namespace, config: OdbConfig, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return which CUDA graphs and buffers do not fit packed micro-batches."""
    kind = _given(args, "cuda_graph_impl") or "none"
    modules = _given(args, "cuda_graph_modules") or ()  # enums or names; none for whole layers
    modules = modules.split(",") if isinstance(modules, str) else modules
    parts = {getattr(one, "name", one) for one in modules} - {"full"}
    has_attention = not parts or "attn" in parts
    fixed, same = config.pads_to_budget, values["captured"] == values["length"]
    overlaps = _given(args, "tp_comm_overlap") and not (fixed and same)
    found = {
        "{tp_comm_overlap} has buffers for {seq_length} {length} tokens (initialize.py 211, "
        "0.19.2), and {odb} makes micro-batches of varying size: add {odb_pad_to} budget with a "
        "budget of as many, or drop {tp_comm_overlap}": overlaps
    }
    if kind == "full_iteration" or any(one.startswith("full_iteration") for one in parts):
        whole = kind != "none"
        return found | {
            "{cuda_graph_impl} full_iteration replays a whole step, and {odb} makes steps of "
            "varying micro-batch counts: use local or none": whole
        }
    if kind == "none" or not fixed:
        return found | {
            "{odb} makes micro-batches of varying size, which CUDA graphs cannot replay: add "
            "{odb_pad_to} budget, or use {cuda_graph_impl} none": kind != "none"
        }
    found |= {
        "{cuda_graph_impl} has a graph for each micro-batch under pipeline parallelism, whose "
        "buffers are shared as in the step captured (cuda_graphs.py 1916, 2512, 0.19.2), and {odb} "
        "varies their number: use none": values["stages"] > 1
    }
    out = "leave attention out with {cuda_graph_modules} mlp"
    if kind == "local":
        rotates = getattr(args, "position_embedding_type", "rope") in ("rope", "yarn")
        unfused = getattr(_given(args, "attention_backend"), "name", "") == "unfused"
        unfused &= getattr(args, "transformer_impl", "local") == "local"
        return found | {
            "{cuda_graph_impl} local captures attention with lengths of 0, by which rotary "
            "embeddings without fusion find no positions (cuda_graphs.py 274, 0.19.2): drop "
            f"{{no_rope_fusion}}, or {out}": has_attention
            and rotates
            and not _given(args, "apply_rope_fusion"),
            "{attention_backend} unfused reads lengths on the host, which {cuda_graph_impl} local "
            f"cannot capture: use {{attention_backend}} flash, or {out}": has_attention and unfused,
        }
    local = "or use {cuda_graph_impl} local"
    return found | {
        "{cuda_graph_impl} transformer_engine takes tensors only, not the layout of packed samples "
        "(transformer_layer.py `_te_cuda_graph_replay`, 0.18.2, 0.19.2): "
        f"{out}, {local}": has_attention,
        "{cuda_graph_impl} transformer_engine captures {seq_length} {length} tokens, and "
        "micro-batches are padded to {captured}: make them equal (multiples of {multiple}), "
        f"{local}": not same,
    }


def _planning_texts(
    args: argparse.Namespace, config: OdbConfig, values: Mapping[str, Any]
) -> dict[str, Any]:
    smallest, policy = min(config.token_budget, args.seq_length), config.overlong
    unshared = why_not_shared(args)
    is_shared = config.share_long > 1 and (_given(args, "data_parallel_size") or 1) > 1
    has_gap = config.token_budget < args.seq_length and policy is OverlongPolicy.ERROR
    has_gap = has_gap and not is_shared
    has_chunks = _given(args, "virtual_pipeline_model_parallel_size")
    cost_error, save_error = "", _save_error(args)
    if config.cost is not None:
        longest = np.array([max(config.context, config.token_budget)])
        try:
            config.cost.model().samples(longest, longest * 0)
        except ValueError as error:
            cost_error = f"{config.cost}: {error}"
    return {
        "every sample is padded to a multiple of {multiple} (context parallelism, sequence "
        "parallelism, FP8): {odb_token_budget} {budget} and {seq_length} {length} must not be "
        "below it": smallest < values["multiple"],
        "{odb_token_budget} {budget} is below {seq_length} {length}: samples in between could not "
        "be placed; raise the budget, or give {odb_overlong} truncate, drop or solo": has_gap,
        f"{{odb_share_long}} {config.share_long}: {unshared}": is_shared and unshared,
        f"{{odb_cost}} {cost_error}": cost_error,
        "{odb} makes a multiple of {microbatch_group_size_per_vp_stage} micro-batches: {group} is "
        "below the {stages} pipeline stages, which the interleaved schedule refuses; raise it, or "
        "drop it": has_chunks and values["group"] < values["stages"],
        "{odb_overlong} solo makes micro-batches above the budget, which {odb_pad_to} cannot pad "
        "to one of its shapes: use error, truncate or drop, or drop {odb_pad_to}": config.pad_to
        and policy is OverlongPolicy.SOLO,
        "{save} {folder}: " + save_error.replace("{", "{{").replace("}", "}}"): save_error,
    }


def _save_error(args: argparse.Namespace) -> str:
    """Return what would show at the first save only, with all steps until then lost."""
    save = str(_given(args, "save") or "")
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
