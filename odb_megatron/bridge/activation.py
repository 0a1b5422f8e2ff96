"""Switches ODB on in the configuration of a Bridge recipe, and asserts that it is on.

The whole configuration is checked when the run starts, after Bridge has filled in what depends on
the number of ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

from odb_megatron.bridge.arguments import UnusableError, owner_of, refuse_early
from odb_megatron.bridge.hooks import install_entry
from odb_megatron.bridge.run import BridgeRun
from odb_megatron.bridge.settings import PATHS, OdbSettings, setting_in_bridge, unknown_setting
from odb_megatron.errors import name_settings
from odb_megatron.megatron.validation import RULES

__all__ = ["OdbDatasetConfig", "enable", "require_active", "switch_on"]

_MARK = "_has_odb"
"""Attribute of a configuration in which ODB was switched on; no field, and copied with it."""

_LOADER_FIELDS = (
    *("num_workers", "pin_memory", "persistent_workers"),
    *("data_sharding", "dataloader_save", "dataloader_load"),
)


@dataclass
class OdbDatasetConfig(DatasetProvider):
    """`cfg.dataset` of a run with ODB. It has no other attributes than these and its base's.

    Bridge takes custom data from a `DatasetProvider` (data/base.py 86, 0.6.2: "compatibility
    contract").

    Attributes:
        odb: the settings.
        recipe: the recipe's own dataset configuration, whose data are trained unless `odb` names
            others.
        skip_getting_attention_mask_from_dataset: False: only then Bridge lets middle pipeline
            stages read the iterator, where the bounds of samples come from (gpt_step.py
            `_middle_pp_stage_needs_batch`, 0.6.2). There is no such mask.
    """

    odb: OdbSettings = field(default_factory=OdbSettings)
    recipe: Any = None
    skip_getting_attention_mask_from_dataset: bool = False
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "external"

    _run: ClassVar[Any] = None  # no part of the configuration, so no field

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__ and not name.startswith("_"):
            place = ": settings are in cfg.dataset.odb, the recipe's own in cfg.dataset.recipe"
            for owner in ("odb", "recipe"):
                if hasattr(getattr(self, owner), name):
                    place = f": set cfg.dataset.{owner}.{name}"
            raise AttributeError(f"cfg.dataset is ODB's and has no {name}{place}")
        object.__setattr__(self, name, value)

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Return the iterators of the three splits; see the base class.

        Raises:
            RuntimeError: called outside of Bridge's `pretrain()` and `finetune()`.
        """
        if self._run is None:
            raise RuntimeError(
                "dataset.odb builds its data inside megatron.bridge.training's pretrain() or "
                "finetune(): call one of them after odb_megatron.bridge.enable(cfg)"
            )
        built: tuple[Any, Any, Any] = self._run.build(context)
        return built


def enable(cfg: Any, *, token_budget: int | None = None, **settings: Any) -> None:
    """Train `cfg` with ODB: its own data, packed online under a token budget.

    Changes `cfg`: `dataset` becomes an `OdbDatasetConfig` that keeps the recipe's, and what ODB
    needs is set and printed: micro-batches of one packed row, a loss per token. Call it after other
    changes to the configuration, and before `pretrain()` or `finetune()`.

    Args:
        cfg: a recipe's `ConfigContainer`.
        token_budget: most tokens of a micro-batch on one replica; None: `model.seq_length`.
        settings: other attributes of `OdbSettings`, such as `overlong="drop"` or `data_path=...`.

    Raises:
        ValueError: a setting that is not known or has a wrong value, or data that ODB cannot read;
            `cfg` is of no use then.
    """
    if isinstance(cfg.dataset, OdbDatasetConfig):
        raise ValueError("ODB is on in this configuration: change cfg.dataset.odb instead")
    unknown = sorted(set(settings) - {field.name for field in fields(OdbSettings)})
    if unknown:
        raise ValueError(unknown_setting(unknown[0]))
    switch_on(cfg, OdbSettings(token_budget=token_budget, **settings))
    refuse_early(cfg)


def switch_on(cfg: Any, odb: OdbSettings) -> None:
    """Do what `enable` does, without a look at settings and data."""
    name_settings(setting_in_bridge)
    recipe = cfg.dataset
    given = {name: getattr(recipe, name) for name in _LOADER_FIELDS if hasattr(recipe, name)}
    cfg.dataset = OdbDatasetConfig(odb=odb, recipe=recipe, **given)
    said = []
    dense = argparse.Namespace()
    needs = [(one.name, one.values[0]) for one in RULES if one.is_set and one.applies(dense)]
    for argument, value in (*needs, ("ddp_average_in_collective", False)):
        owner, name = owner_of(cfg, PATHS[argument])
        before = getattr(owner, name)
        if before != value:
            setattr(owner, name, value)
            if before is not None:
                said.append(f"{PATHS[argument]}={value} (was {before})")
    if said:
        from megatron.bridge.utils.common_utils import get_rank_safe

        if get_rank_safe() == 0:
            print(f"odb: set {', '.join(said)}", flush=True)
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
