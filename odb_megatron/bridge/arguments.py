"""Bridge's configuration and state, seen as the arguments that `odb_megatron.megatron` reads.

What Megatron counts in its arguments Bridge counts in its `TrainState`: it is read there. What
cannot work with ODB under Bridge is refused, beside what cannot under Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from odb_megatron.bridge.settings import PATHS, OdbSettings
from odb_megatron.data.records import require_data
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.validation import refuse_unsupported

__all__ = ["BridgeArgs", "UnusableError", "owner_of", "recipe_errors", "refuse", "refuse_early"]

_SPLITS = ("train_data_path", "valid_data_path", "test_data_path")
_NO_SPLIT = "969, 30, 1"  # Megatron's own default (validate_args 654, 0.19.2)


class UnusableError(ValueError):
    """A configuration that cannot be used, found when the run starts."""


def _padded_vocab(state: Any) -> int:
    """Return the rows of the embedding; 0 until the tokenizer is there."""
    model = state.cfg.model
    if not model.vocab_size or not model.should_pad_vocab:
        return int(model.vocab_size or 0)
    from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

    return int(
        calculate_padded_vocab_size(
            model.vocab_size,
            model.make_vocab_size_divisible_by,
            model.tensor_model_parallel_size,
            logging_enabled=False,
        )
    )


_COUNTED: dict[str, Callable[[Any], int]] = {
    "curr_iteration": lambda state: state.train_state.step,
    "consumed_train_samples": lambda state: state.train_state.consumed_train_samples,
    "consumed_valid_samples": lambda state: state.train_state.consumed_valid_samples,
    "train_iters": lambda state: state.cfg.train.train_iters or 0,
    "padded_vocab_size": _padded_vocab,
}
"""What changes in a run, read from Bridge's `GlobalState` at each question."""


class BridgeArgs(argparse.Namespace):
    """Arguments of one run.

    Args:
        cfg: Bridge's `ConfigContainer`, after `validate()`.
        state: Bridge's `GlobalState`.
        rank: this rank.
        world_size: number of ranks.
    """

    __slots__ = ("_state",)  # not among the arguments, which ranks compare

    def __init__(self, cfg: Any, state: Any, *, rank: int, world_size: int) -> None:
        super().__init__()
        object.__setattr__(self, "_state", state)
        self.rank, self.world_size = rank, world_size
        self.data_parallel_size = cfg.data_parallel_size
        self.iteration = 0  # of the checkpoint, once it is loaded
        vars(self).update(cfg.dataset.odb.as_flags())
        found = {name: _value(cfg, path) for name, path in PATHS.items()}
        vars(self).update(found)
        self.eval_iters: int = found["eval_iters"] or 0
        self.use_megatron_fsdp = found["use_megatron_fsdp"] or cfg.dist.use_megatron_fsdp
        self.full_validation = False  # Bridge does not read it (eval.py, 0.6.2)
        groups = found["num_query_groups"]
        self.group_query_attention = groups not in (None, found["num_attention_heads"])
        vars(self).update(_of_data(cfg, cfg.dataset.odb))

    def __getattr__(self, name: str) -> Any:
        if name not in _COUNTED:
            raise AttributeError(name)
        return int(_COUNTED[name](self._state))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train_iters":  # where the loop ends
            self._state.cfg.train.train_iters = value
        else:
            super().__setattr__(name, value)


def owner_of(cfg: Any, path: str) -> tuple[Any, str]:
    """Return what has the attribute that a path names, and the attribute's name.

    A `GPTModelProvider` is a transformer's configuration, other models have one.
    """
    section, _, name = path.partition(".")
    owner = getattr(cfg, section)
    if section == "model" and not hasattr(getattr(owner, "transformer", None), name):
        return owner, name
    if section == "model":
        return owner.transformer, name
    return getattr(owner, "recipe", owner) if section == "dataset" else owner, name


def _value(cfg: Any, path: str) -> Any:
    owner, name = owner_of(cfg, path)
    return getattr(owner, name, None)


def _of_data(cfg: Any, settings: OdbSettings) -> dict[str, Any]:
    recipe = cfg.dataset.recipe
    blend, splits = _blends(recipe, settings)
    seed = getattr(recipe, "random_seed", getattr(recipe, "seed", None))
    split = settings.split or getattr(recipe, "split", None) or _NO_SPLIT
    return {
        "data_path": blend,
        "data_args_path": None,
        "per_split_data_args_path": None,
        **dict(zip(_SPLITS, splits, strict=True)),
        "split": split if blend is not None else None,
        "seed": cfg.rng.seed if seed is None else seed,
        "dataloader_type": settings.order,
        "data_sharding": getattr(recipe, "data_sharding", True),
        "num_workers": cfg.dataset.num_workers,
        "num_dataset_builder_threads": getattr(recipe, "num_dataset_builder_threads", 1),
        "data_cache_path": getattr(recipe, "path_to_cache", None),
        "mmap_bin_files": getattr(recipe, "mmap_bin_files", True),
    }


_Words = list[str] | None


def _blends(recipe: Any, settings: OdbSettings) -> tuple[_Words, list[_Words]]:
    """Return the files of one blend, and those of each split, as Megatron's flags have them.

    A recipe has a blend as mcore does: (paths, weights or None).
    """

    def words(given: Any) -> _Words:
        return None if given is None else [given] if isinstance(given, str) else [*map(str, given)]

    def weighed(blend: Any) -> _Words:
        if blend is None or blend[1] is None:
            return words(blend and blend[0])
        return [str(word) for pair in zip(blend[1], blend[0], strict=True) for word in pair]

    if settings.has_data:
        return words(settings.data_path), [words(getattr(settings, name)) for name in _SPLITS]
    per_split = getattr(recipe, "blend_per_split", None) or (None, None, None)
    return weighed(getattr(recipe, "blend", None)), [weighed(one) for one in per_split]


_PACKS = ("enable_in_batch_packing", "enable_offline_packing", "offline_packing_specs")
_OFF = {
    "model.num_moe_experts": "Bridge's forward step gives the routers of a mixture of experts no "
    "padding mask, so that padding and idle micro-batches would count in their losses; under "
    "megatron.training's pretrain() experts work",
    "model.mtp_num_layers": "multi-token prediction is not in this version under Bridge",
    "model.is_hybrid_model": "hybrid models (state-space layers) were not tried under Bridge",
    "model.tp_comm_overlap": "it has buffers of one shape, and micro-batches vary in size; "
    "comm_overlap.tp_comm_overlap sets it",
    "dist.use_decentralized_pg": "replicas are found by Megatron's parallel state",
    "dist.eval_context_parallel_size": "training and evaluation have one layout of ranks",
    "validation.full_validation": "Bridge does not read it (eval.py, 0.6.2); "
    "validation.eval_iters is what it reads",
    "logger.skip_train_metrics_log": "it leaves out the call at which steps are logged",
}
"""What must not be on, and why."""


def _off(path: str, why: str) -> str:
    return f"dataset.odb and {path}: {why}: drop {path}"


def recipe_errors(recipe: Any, settings: OdbSettings) -> list[str]:
    """Return why a recipe's dataset configuration cannot be trained with ODB; empty if it can."""
    packs = (f"dataset.{name}" for name in _PACKS if getattr(recipe, name, None))
    errors = [_off(path, "both pack") for path in packs]
    kinds = {cls.__name__ for cls in type(recipe).__mro__}
    if settings.has_data or "GPTSFTDatasetConfig" in kinds:
        return errors
    if not kinds & {"GPTDatasetConfig", "MockGPTDatasetConfig"} or "GPTFIMDatasetConfig" in kinds:
        errors.append(
            f"dataset.odb does not read {type(recipe).__name__} in this version: use a recipe with "
            "GPTSFTDatasetConfig or GPTDatasetConfig, or give dataset.odb.data_path"
        )
    elif not (getattr(recipe, "blend", None) or getattr(recipe, "blend_per_split", None)):
        errors.append(
            "the recipe trains on mock data, and dataset.odb on real samples: give "
            "dataset.odb.data_path=FILE.jsonl (or a Megatron prefix, or a list of them)"
        )
    return errors


def refuse(cfg: Any, args: BridgeArgs, config: OdbConfig) -> None:
    """Check a validated configuration.

    Raises:
        UnusableError: every refusal that applies, one line each.
    """
    messages = _configuration_errors(cfg)
    if (args.cuda_graph_impl or "none") != "none":
        messages.append(
            "dataset.odb makes micro-batches whose number of samples varies, which CUDA graphs "
            "cannot replay: use model.cuda_graph_impl=none"
        )
    try:
        refuse_unsupported(args, config)
    except ValueError as error:
        messages.append(str(error))
    if messages:
        raise UnusableError("\n".join(messages))


def refuse_early(cfg: Any) -> None:
    """Check what can be checked without ranks: settings, the recipe, and that the files are there.

    Raises:
        UnusableError: every refusal that applies, one line each.
    """
    from megatron.core.datasets.utils import get_blend_from_list

    settings, messages = cfg.dataset.odb, _configuration_errors(cfg)
    checks: list[tuple[Callable[[Any], object], Any]]
    blend, per_split = _blends(cfg.dataset.recipe, settings)
    blends = filter(None, map(get_blend_from_list, (blend, *per_split)))
    paths = [path for paths, *_ in blends for path in paths]
    args = argparse.Namespace(**settings.as_flags(), seq_length=cfg.model.seq_length)
    checks = [(OdbConfig.from_args, args), *((require_data, path) for path in paths)]
    for check, subject in checks:
        try:
            check(subject)
        except ValueError as error:
            messages.append(str(error))
    if messages:
        raise UnusableError("\n".join(messages))


def _configuration_errors(cfg: Any) -> list[str]:
    settings = cfg.dataset.odb
    messages = recipe_errors(cfg.dataset.recipe, settings)
    messages += [_off(path, why) for path, why in _OFF.items() if _value(cfg, path)]
    if cfg.inprocess_restart is not None and cfg.inprocess_restart.enabled:
        messages.append(_off("inprocess_restart", "groups and threads do not survive it"))
    if settings.order not in ("single", "cyclic"):
        messages.append(f"dataset.odb.order is {settings.order!r}: give single or cyclic")
    per_split = [name for name in _SPLITS if getattr(settings, name) is not None]
    if settings.data_path is not None and per_split:
        messages.append(
            f"dataset.odb.data_path is for all splits, and dataset.odb.{per_split[0]} for one: "
            "give the one (with dataset.odb.split), or a file for each split"
        )
    return messages
