"""The dataset configuration that stands in a recipe's place while ODB is on.

Must not build anything by itself: the run does, which Bridge's `pretrain()` begins. Bridge takes
custom data from a `DatasetProvider` (data/base.py 86, 0.6.2: "compatibility contract").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

from odb_megatron.bridge.settings import OdbSettings

__all__ = ["OdbDatasetConfig"]


@dataclass
class OdbDatasetConfig(DatasetProvider):
    """`cfg.dataset` of a run with ODB. It has no other attributes than these and its base's.

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
            raise AttributeError(f"cfg.dataset is ODB's and has no {name}{self._place_of(name)}")
        object.__setattr__(self, name, value)

    def _place_of(self, name: str) -> str:
        for owner in ("odb", "recipe"):
            if hasattr(getattr(self, owner), name):
                return f": set cfg.dataset.{owner}.{name}"
        return ": settings are in cfg.dataset.odb, the recipe's own in cfg.dataset.recipe"

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
