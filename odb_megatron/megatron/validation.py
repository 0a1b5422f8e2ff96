"""Refuses what cannot work with ODB, at start-up and by name.

Must not change a value; every message names the flag to change.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.kernel_rules import kernel_messages
from odb_megatron.megatron.topology import count_multiple, padding_multiple
from odb_megatron.plan.padding import OverlongPolicy

__all__ = ["refuse_flags", "refuse_unsupported"]


@dataclass(frozen=True, slots=True)
class _Refusal:
    applies: Callable[[argparse.Namespace], bool]
    message: str


def _is_on(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _has_experts(args: argparse.Namespace) -> bool:
    return getattr(args, "num_experts", None) is not None


def _routers(args: argparse.Namespace) -> set[str]:
    """Load-balancing types in use; Megatron takes one or a list."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    if not _has_experts(args):
        return set()
    return {kinds} if isinstance(kinds, str) else set(kinds)


_REFUSALS = (
    _Refusal(
        lambda args: not args.calculate_per_token_loss,
        "--odb needs --calculate-per-token-loss: without it Megatron averages the loss per "
        "micro-batch first, so it would depend on how samples are packed",
    ),
    _Refusal(
        lambda args: args.micro_batch_size != 1,
        "--odb needs --micro-batch-size 1: a packed micro-batch is one row of many samples",
    ),
    _Refusal(
        lambda args: (
            (getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size)
            != args.micro_batch_size
        ),
        "--odb packs evaluation too: drop --eval-micro-batch-size",
    ),
    _Refusal(
        _is_on("sft"),
        "--odb and --sft are two packings of the same data, and --sft evaluates a mean of means: "
        "drop --sft (chat files are read by --odb itself)",
    ),
    _Refusal(
        lambda args: args.dataloader_type not in (None, "single", "cyclic"),
        "--odb brings its own data loader: use --dataloader-type single or cyclic to choose the "
        "order of the samples",
    ),
    _Refusal(
        _is_on("trust_remote_code"),
        "--odb runs no code that comes with a tokenizer: drop --trust-remote-code",
    ),
    _Refusal(
        _is_on("mock_data"), "--odb trains on real samples: drop --mock-data, give --data-path"
    ),
    _Refusal(
        _is_on("fim_data"), "--odb does not cut samples for fill-in-the-middle: drop --fim-data"
    ),
    _Refusal(
        lambda args: any(
            getattr(args, name, False)
            for name in (
                *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
                "dataloader_inter_document_masking",
            )
        ),
        "--reset-position-ids, --reset-attention-mask, --eod-mask-loss and "
        "--dataloader-inter-document-masking do nothing with --odb (samples never share positions "
        "or attention, and loss follows the data): drop them",
    ),
    _Refusal(
        lambda args: (
            getattr(args, "rampup_batch_size", None) is not None
            or getattr(args, "step_batch_size_schedule", None) is not None
        ),
        "--odb needs a constant batch size in this version: drop --rampup-batch-size and "
        "--step-batch-size-schedule",
    ),
    _Refusal(
        _is_on("decrease_batch_size_if_needed"),
        "--odb keeps the batch size: drop --decrease-batch-size-if-needed",
    ),
    _Refusal(
        _is_on("iterations_to_skip"),
        "--odb does not skip iterations in this version: drop --iterations-to-skip",
    ),
    _Refusal(
        lambda args: getattr(args, "override_ckpt_iteration", None) is not None,
        "--odb goes on with the samples of the checkpoint's own iteration, and "
        "--override-ckpt-iteration would count others: drop it, or load the checkpoint of that "
        "iteration with --ckpt-step",
    ),
    _Refusal(
        lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
        "--odb keeps its data state beside checkpoints that every node can read: use "
        "--non-persistent-ckpt-type global, or none",
    ),
    _Refusal(
        _is_on("phase_transition_iterations"),
        "--odb has one phase in this version: drop --phase-transition-iterations",
    ),
    _Refusal(
        _is_on("multiple_validation_sets"),
        "--odb evaluates one validation set in this version: drop --multiple-validation-sets",
    ),
    _Refusal(_is_on("perform_rl_step"), "--odb does not batch rollouts: drop --perform-rl-step"),
    _Refusal(
        _is_on("hybrid_context_parallel"),
        "--odb and --hybrid-context-parallel both form the micro-batches: drop one",
    ),
    _Refusal(
        lambda args: getattr(args, "sequence_packing_scheduler", None) is not None,
        "--odb and --sequence-packing-scheduler both form the micro-batches: drop one",
    ),
    _Refusal(
        _is_on("use_varlen_dataset"),
        "--odb and --use-varlen-dataset (which switches --sequence-packing-scheduler on) both read "
        "the data and form the micro-batches: drop one",
    ),
    _Refusal(
        _is_on("inprocess_restart"),
        "--odb keeps groups and threads that an in-process restart does not take down: drop "
        "--inprocess-restart (a restarted job goes on from its checkpoint)",
    ),
    _Refusal(
        lambda args: getattr(args, "logits_load_dir", None) is not None,
        "--odb does not read a teacher's saved logits: drop --logits-load-dir",
    ),
    _Refusal(
        lambda args: (
            bool(getattr(args, "use_megatron_fsdp", False))
            or bool(getattr(args, "use_torch_fsdp2", False))
        ),
        "--odb does not run on FSDP in this version: use --use-distributed-optimizer",
    ),
    _Refusal(
        lambda args: bool({"quantile_balancing", "sinkhorn"} & _routers(args)),
        "--moe-router-load-balancing-type quantile_balancing and sinkhorn take no padding mask, "
        "and --odb has padding and idle micro-batches: use aux_loss, seq_aux_loss, "
        "global_aux_loss or none",
    ),
    _Refusal(
        lambda args: (
            _has_experts(args) and getattr(args, "moe_expert_capacity_factor", None) is not None
        ),
        "--moe-expert-capacity-factor drops tokens by what else is in a micro-batch, so with --odb "
        "the loss would depend on how samples are packed: drop it",
    ),
    _Refusal(
        lambda args: (
            _has_experts(args)
            and getattr(args, "moe_token_dispatcher_type", "alltoall") != "alltoall"
            and (
                _above_one("expert_model_parallel_size")(args)
                or _above_one("pipeline_model_parallel_size")(args)
            )
        ),
        "--odb makes micro-batches of different sizes on different replicas and stages, for which "
        "this version has only --moe-token-dispatcher-type alltoall",
    ),
    _Refusal(
        _is_on("overlap_moe_expert_parallel_comm"),
        "--odb does not build schedule plans in this version: drop "
        "--overlap-moe-expert-parallel-comm",
    ),
    _Refusal(
        lambda args: _is_on("mtp_num_layers")(args) and padding_multiple(args) > 1,
        "multi-token prediction shifts tokens by the samples' lengths before padding "
        "(multi_token_prediction.py 249, 0.19.2), and --odb pads samples under context and "
        "sequence parallelism: drop --mtp-num-layers, or both of those",
    ),
    _Refusal(
        lambda args: _is_on("mtp_num_layers")(args) and _has_experts(args),
        "multi-token prediction shifts the routers' padding mask, so that padding counts in their "
        "losses: with --odb drop --mtp-num-layers or --num-experts",
    ),
    _Refusal(
        lambda args: (getattr(args, "gtp_weight_remat_size", None) or 1) > 1,
        "--odb does not know the weight-rematerialisation axis: use --gtp-weight-remat-size 1",
    ),
)


_REFUSALS_ALWAYS = (
    _Refusal(
        lambda args: bool(getattr(args, "full_validation", False)),
        "--full-validation fails in Megatron with one validation set (training.py 4382, 0.19.2), "
        "with --odb and without: drop it, and give the number of evaluation steps (--eval-iters)",
    ),
    _Refusal(
        lambda args: (
            getattr(args, "transformer_impl", "local") not in ("local", "transformer_engine")
        ),
        "--odb packs samples in Megatron's local layers and in Transformer Engine's: use "
        "--transformer-impl local or transformer_engine",
    ),
    _Refusal(
        lambda args: (
            getattr(args, "spec", None) is not None
            and getattr(args, "transformer_impl", "local") == "local"
        ),
        "local layers of --spec may not take packed samples of --odb: drop it, or use "
        "--transformer-impl transformer_engine",
    ),
)
"""What the script cannot do with or without `--odb`: its layers and data are the same."""


def refuse_flags(args: argparse.Namespace) -> None:
    """Check arguments that Megatron has refused, or not validated: what ODB refuses says why.

    Raises:
        ValueError: every refusal of a flag that applies, one line each.
    """
    messages = _flag_messages(args, enabled=args.odb)
    if messages:
        raise ValueError("\n".join(messages))


def refuse_unsupported(args: argparse.Namespace, config: OdbConfig) -> None:
    """Check parsed and validated Megatron arguments.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    messages = _flag_messages(args, enabled=config.enabled)
    messages += _weight_messages(args, config)
    if config.enabled:
        messages += kernel_messages(args, config)
        messages += _planning_messages(args, config)
        messages += _topology_messages(args, config)
        messages += _save_messages(args)
    if messages:
        raise ValueError("\n".join(messages))


def _flag_messages(args: argparse.Namespace, *, enabled: bool) -> list[str]:
    refusals = (*_REFUSALS_ALWAYS, *(_REFUSALS if enabled else ()))
    return [refusal.message for refusal in refusals if refusal.applies(args)]


def _weight_messages(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    """Say what does not know that weights are scaled; see `data.preprocess.count_scale`."""
    if config.loss_per is None:
        return []
    flag = f"--odb-loss-per {config.loss_per.value}"
    messages = []
    if getattr(args, "fp16", False):
        messages.append(
            f"{flag} scales the loss by {config.count_scale}, so that weights can be counted in "
            "whole numbers, and --fp16 has no room for that: use --bf16, or drop one of them"
        )
    if _has_experts(args) and not config.enabled:
        messages.append(
            f"{flag} weighs the routers' losses by what --odb knows of a step: add --odb, or drop "
            "--num-experts"
        )
    if getattr(args, "experimental_attention_variant", None) is not None:
        messages.append(
            f"{flag} and --experimental-attention-variant, whose own loss would not be weighed: "
            "drop one of them"
        )
    return messages


def _save_messages(args: argparse.Namespace) -> list[str]:
    """Say what would show at the first save only, with all steps until then lost."""
    save = getattr(args, "save", None)
    if not save or "://" in str(save):
        return []
    found = Path(save).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        return [f"--save {save}: {found} is no folder"]
    if not os.access(found, os.W_OK | os.X_OK):
        return [f"--save {save}: no permission to write to {found}"]
    if getattr(args, "rank", 0) == 0:
        try:
            with tempfile.TemporaryDirectory(prefix=".odb-", dir=found):
                pass
        except OSError as error:
            return [f"--save {save}: {found} cannot be written ({error.strerror})"]
    return []


def _topology_messages(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    messages = []
    multiple = padding_multiple(args)
    sequence = " with sequence parallelism" if getattr(args, "sequence_parallel", False) else ""
    if config.token_budget < multiple or args.seq_length < multiple:
        messages.append(
            f"every sample is padded to a multiple of {multiple} (context parallelism "
            f"{args.context_parallel_size}, tensor parallelism {args.tensor_model_parallel_size}"
            f"{sequence}{', FP8' if getattr(args, 'fp8', None) else ''}): "
            f"--odb-token-budget {config.token_budget} and --seq-length {args.seq_length} must not "
            "be below it"
        )
    return messages


def _planning_messages(args: argparse.Namespace, config: OdbConfig) -> list[str]:
    messages = []
    if config.cost is not None:
        try:
            longest = np.array([max(args.seq_length, config.token_budget)])
            config.cost.model().samples(longest, longest * 0)
        except ValueError as error:
            messages.append(f"--odb-cost {config.cost}: {error}")
    stages, group = getattr(args, "pipeline_model_parallel_size", 1), count_multiple(args)
    if getattr(args, "virtual_pipeline_model_parallel_size", None) and group < stages:
        messages.append(
            "--odb makes a multiple of --microbatch-group-size-per-virtual-pipeline-stage "
            f"micro-batches: {group} is below the {stages} pipeline stages, which the interleaved "
            "schedule refuses; raise it, or drop it"
        )
    if config.pad_to and config.overlong is OverlongPolicy.SOLO:
        messages.append(
            "--odb-overlong solo makes micro-batches above the budget, which --odb-pad-to cannot "
            "pad to one of its shapes: use error, truncate or drop, or drop --odb-pad-to"
        )
    if config.token_budget < args.seq_length and config.overlong is OverlongPolicy.ERROR:
        messages.append(
            f"--odb-token-budget {config.token_budget} is below --seq-length {args.seq_length}: "
            "samples in between could not be placed; raise the budget, or say what happens to "
            "them with --odb-overlong truncate, drop or solo"
        )
    return messages
