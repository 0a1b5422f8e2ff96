"""Switches ODB on in the configuration of a Bridge recipe, and asserts that it is on.

Must not validate the whole configuration: the run does when it starts, after Bridge has filled in
what depends on the number of ranks.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from odb_megatron.bridge.arguments import transformer_of
from odb_megatron.bridge.hooks import install_entry, require_names
from odb_megatron.bridge.provider import OdbDatasetConfig
from odb_megatron.bridge.run import BridgeRun
from odb_megatron.bridge.settings import OdbSettings, flag_values, unknown_setting
from odb_megatron.bridge.validation import UnusableError, has_data, recipe_errors

__all__ = ["enable", "require_active"]

_MARK = "_has_odb"
"""Attribute of a configuration in which ODB was switched on; no field, and copied with it."""

_LOADER_FIELDS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "data_sharding",
    "dataloader_save",
    "dataloader_load",
)


def enable(cfg: Any, *, token_budget: int | None = None, **settings: Any) -> None:
    """Train `cfg` with ODB: its own data, packed online under a token budget.

    Changes `cfg`: `dataset` becomes an `OdbDatasetConfig` that keeps the recipe's, and what ODB
    needs is set (each change is printed): micro-batches of one packed row, a loss per token. Call
    it after other changes to the configuration, and before `pretrain()` or `finetune()`.

    Args:
        cfg: a recipe's `ConfigContainer`.
        token_budget: most tokens of a micro-batch on one replica; None: `model.seq_length`.
        settings: other attributes of `OdbSettings`, such as `overlong="drop"` or `data_path=...`.

    Raises:
        ValueError: a setting that is not known or has a wrong value, or data that ODB cannot read.
    """
    if isinstance(cfg.dataset, OdbDatasetConfig):
        raise ValueError("ODB is on in this configuration: change cfg.dataset.odb instead")
    known = [field.name for field in fields(OdbSettings)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(unknown_setting(unknown[0]))
    require_names()
    odb = OdbSettings(token_budget=token_budget, **settings)
    flag_values(odb)  # checks types and choices
    errors = recipe_errors(cfg.dataset, has_own_data=has_data(odb))
    if errors:
        raise ValueError("\n".join(errors))
    recipe = cfg.dataset
    given = {name: getattr(recipe, name) for name in _LOADER_FIELDS if hasattr(recipe, name)}
    cfg.dataset = OdbDatasetConfig(odb=odb, recipe=recipe, **given)
    for owner, where, name, value in (
        (cfg.train, "train", "micro_batch_size", 1),
        (cfg.validation, "validation", "eval_micro_batch_size", 1),
        (transformer_of(cfg.model), "model", "calculate_per_token_loss", True),
        (cfg.ddp, "ddp", "average_in_collective", False),
    ):
        before = getattr(owner, name)
        if before != value:
            setattr(owner, name, value)
            if before is not None:
                _tell(f"odb: {where}.{name}={value} (was {before})")
    setattr(cfg, _MARK, True)
    install_entry(_make_run)


def require_active(cfg: Any) -> None:
    """Raise unless ODB is on in a configuration, whatever was applied to it since.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(cfg.dataset, OdbDatasetConfig):
        raise ValueError(
            f"the dataset is a {type(cfg.dataset).__name__}, not ODB's: an override or an "
            "assignment to cfg.dataset replaced it; make other changes first and call "
            "odb_megatron.bridge.enable(cfg) last (to train without ODB, take the recipe's "
            "configuration anew)"
        )
    if cfg.dataset.dataloader_type != "external" or not isinstance(cfg.dataset.odb, OdbSettings):
        raise ValueError(
            f"dataset.dataloader_type is {cfg.dataset.dataloader_type!r} and dataset.odb a "
            f"{type(cfg.dataset.odb).__name__}; expected 'external' and OdbSettings: drop the "
            "override that changes them (dataset.odb.order chooses the order of the samples)"
        )


def _make_run(state: Any) -> BridgeRun | None:
    cfg = state.cfg
    if not isinstance(cfg.dataset, OdbDatasetConfig) and not getattr(cfg, _MARK, False):
        return None
    try:
        require_active(cfg)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    return BridgeRun(state)


def _tell(text: str) -> None:
    from megatron.bridge.utils.common_utils import get_rank_safe

    if get_rank_safe() == 0:
        print(text, flush=True)
