"""Refuses what cannot work with ODB under Bridge, at start-up and by name.

Must not change a value. What Megatron refuses as well is in `odb_megatron.megatron.validation`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from odb_megatron.bridge.arguments import BridgeArgs, data_paths, transformer_of
from odb_megatron.bridge.settings import flag_values, in_bridge_words
from odb_megatron.data.records import require_data
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.validation import refuse_unsupported

__all__ = ["UnusableError", "has_data", "recipe_errors", "refuse", "refuse_early"]


class UnusableError(ValueError):
    """A configuration that cannot be used, found when the run starts."""


_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_SFT = "GPTSFTDatasetConfig"
_PRETRAINING = ("GPTDatasetConfig", "MockGPTDatasetConfig", "GPTFIMDatasetConfig")

_NO_DATA = (
    "the recipe trains on mock data, and dataset.odb on real samples: give "
    "dataset.odb.data_path=FILE.jsonl (or a Megatron prefix, or a list of them)"
)


def recipe_errors(recipe: Any, *, has_own_data: bool) -> list[str]:
    """Return why a recipe's dataset configuration cannot be trained with ODB; empty if it can.

    Args:
        recipe: the configuration.
        has_own_data: whether `dataset.odb` names other data.
    """
    errors = []
    if getattr(recipe, "enable_in_batch_packing", False):
        errors.append(
            "dataset.enable_in_batch_packing and dataset.odb both pack: set "
            "dataset.enable_in_batch_packing=false"
        )
    if getattr(recipe, "enable_offline_packing", False) or (
        getattr(recipe, "offline_packing_specs", None) is not None
    ):
        errors.append(
            "dataset.enable_offline_packing and dataset.odb both pack: set "
            "dataset.enable_offline_packing=false dataset.offline_packing_specs=null"
        )
    if has_own_data:
        return errors
    kinds = {cls.__name__ for cls in type(recipe).__mro__}
    if "GPTFIMDatasetConfig" in kinds:
        errors.append(
            "dataset.odb does not cut samples for fill-in-the-middle: use GPTDatasetConfig"
        )
    elif kinds.intersection(_PRETRAINING):
        has_blend = getattr(recipe, "blend", None) or getattr(recipe, "blend_per_split", None)
        if not has_blend:
            errors.append(_NO_DATA)
    elif _SFT not in kinds:
        errors.append(
            f"dataset.odb does not read {type(recipe).__name__} in this version: use a recipe with "
            f"{_SFT} or GPTDatasetConfig, or give dataset.odb.data_path"
        )
    return errors


def _has_restart(cfg: Any) -> bool:
    return cfg.inprocess_restart is not None and bool(cfg.inprocess_restart.enabled)


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda cfg: getattr(transformer_of(cfg.model), "num_moe_experts", None) is not None,
        "Bridge's forward step gives the routers of a mixture of experts no padding mask, so that "
        "padding and idle micro-batches would count in their losses: with dataset.odb use a dense "
        "model in this version (under megatron.training's pretrain() experts work)",
    ),
    (
        lambda cfg: bool(getattr(transformer_of(cfg.model), "mtp_num_layers", None)),
        "dataset.odb has no multi-token prediction under Bridge in this version: set "
        "model.mtp_num_layers=null",
    ),
    (
        lambda cfg: bool(getattr(cfg.model, "is_hybrid_model", False)),
        "dataset.odb was not tried with hybrid models (state-space layers) under Bridge: use a "
        "transformer",
    ),
    (
        lambda cfg: bool(getattr(transformer_of(cfg.model), "tp_comm_overlap", False)),
        "model.tp_comm_overlap has buffers of one shape, and dataset.odb makes micro-batches of "
        "varied size: set it to false (comm_overlap.tp_comm_overlap=false)",
    ),
    (
        lambda cfg: bool(cfg.dist.use_decentralized_pg),
        "dataset.odb finds its replicas by Megatron's parallel state: set "
        "dist.use_decentralized_pg=false",
    ),
    (
        lambda cfg: cfg.dist.eval_context_parallel_size is not None,
        "dataset.odb has one layout of ranks for training and evaluation: drop "
        "dist.eval_context_parallel_size",
    ),
    (
        lambda cfg: bool(cfg.ddp.average_in_collective),
        "dataset.odb divides gradients by the loss tokens of all replicas: set "
        "ddp.average_in_collective=false",
    ),
    (
        _has_restart,
        "dataset.odb does not survive an in-process restart: set inprocess_restart.enabled=false",
    ),
    (
        lambda cfg: bool(cfg.validation.full_validation),
        "Bridge does not read validation.full_validation (eval.py, 0.6.2): drop it, and set "
        "validation.eval_iters",
    ),
    (
        lambda cfg: bool(cfg.logger.skip_train_metrics_log),
        "logger.skip_train_metrics_log leaves out the call that dataset.odb logs its steps at: "
        "drop it",
    ),
)


def refuse(cfg: Any, args: BridgeArgs, config: OdbConfig) -> None:
    """Check a validated configuration.

    Raises:
        UnusableError: every refusal that applies, one line each.
    """
    messages = _configuration_errors(cfg)
    if (getattr(args, "cuda_graph_impl", None) or "none") != "none":
        messages.append(
            "dataset.odb makes micro-batches whose number of samples varies, which CUDA graphs "
            "cannot replay: use model.cuda_graph_impl=none"
        )
    try:
        refuse_unsupported(args, config)
    except ValueError as error:
        messages += in_bridge_words(str(error)).split("\n")
    if messages:
        raise UnusableError("\n".join(messages))


def refuse_early(cfg: Any) -> None:
    """Check what can be checked without ranks: settings, the recipe, and that the files are there.

    Raises:
        UnusableError: every refusal that applies, one line each.
    """
    settings = cfg.dataset.odb
    messages = _configuration_errors(cfg)
    try:
        args = argparse.Namespace(**flag_values(settings), seq_length=cfg.model.seq_length)
        OdbConfig.from_args(args)
    except ValueError as error:
        messages.append(in_bridge_words(str(error)))
    for path in data_paths(cfg):
        try:
            require_data(path)
        except ValueError as error:
            messages.append(str(error))
    if messages:
        raise UnusableError("\n".join(messages))


def _configuration_errors(cfg: Any) -> list[str]:
    settings = cfg.dataset.odb
    messages = recipe_errors(cfg.dataset.recipe, has_own_data=has_data(settings))
    messages += [message for applies, message in _REFUSALS if applies(cfg)]
    per_split = [name for name in _PER_SPLIT if getattr(settings, name) is not None]
    if settings.data_path is not None and per_split:
        messages.append(
            f"dataset.odb.data_path is for all splits, and dataset.odb.{per_split[0]} for one: "
            "give the one (with dataset.odb.split), or a file for each split"
        )
    return messages


def has_data(settings: Any) -> bool:
    """Whether settings name data of their own."""
    return any(getattr(settings, name) is not None for name in ("data_path", *_PER_SPLIT))
