"""Runs a recipe of Megatron-Bridge with ODB switched on by overrides alone.

    torchrun --nproc-per-node 8 -m odb_megatron.bridge.run_recipe \
        --recipe llama32_1b_sft_config dataset.odb.token_budget=16384 ...

Overrides are Bridge's (Hydra's grammar, `KEY=VALUE`); `dataset.odb.*` among them, and in YAML
overlays, are ODB's. An override that would do nothing is an error here, where Bridge only warns.
Must not train without ODB: that is asserted after the overrides.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from odb_megatron import bridge
from odb_megatron.bridge.settings import OdbSettings, unknown_setting
from odb_megatron.errors import usage_errors

__all__ = ["configured", "main"]

_ODB = "dataset.odb."
_STEP = "megatron.bridge.training.gpt_step:forward_step"
_FINETUNE_WORDS = ("sft", "peft", "finetune", "lora", "dora")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe.

    Raises:
        SystemExit: arguments or a configuration that cannot be used (2), or `--help` (0).
    """
    args = _parsed(argv)
    with usage_errors():
        cfg = configured(args.recipe, overlays=args.config, overrides=args.overrides)
        step = _found(args.step)
        mode = args.mode or _mode_of(args.recipe)
        _require_weights(cfg, mode)
        from odb_megatron.bridge.validation import UnusableError, refuse_early

        refuse_early(cfg)
    if args.dry_run:
        return
    train = getattr(importlib.import_module(f"megatron.bridge.training.{mode}"), mode)
    try:
        with _checked_by_bridge():
            train(cfg, step)
    except UnusableError as error:
        with usage_errors():
            raise ValueError(str(error)) from error


def _require_weights(cfg: Any, mode: str) -> None:
    """Say what Bridge's `finetune()` asserts."""
    checkpoint = cfg.checkpoint
    if mode == "finetune" and checkpoint.pretrained_checkpoint is checkpoint.load is None:
        raise ValueError(
            "finetune() starts from weights: give checkpoint.pretrained_checkpoint=FOLDER (or "
            "checkpoint.load=FOLDER), or --mode pretrain"
        )


@contextmanager
def _checked_by_bridge() -> Iterator[None]:
    """End the process in one message where Bridge refuses the configuration, before it starts."""
    module = importlib.import_module("megatron.bridge.training.pretrain")
    original = module.runtime_config_update

    def runtime_config_update(cfg: Any) -> None:
        with usage_errors():
            original(cfg)

    setattr(module, "runtime_config_update", runtime_config_update)  # noqa: B010
    try:
        yield
    finally:
        setattr(module, "runtime_config_update", original)  # noqa: B010


def configured(recipe: str, *, overlays: Sequence[str] = (), overrides: Sequence[str] = ()) -> Any:
    """Return a recipe's configuration with overrides applied and ODB on.

    Args:
        recipe: a function of `megatron.bridge.recipes`, or MODULE:FUNCTION.
        overlays: YAML files, applied in this order.
        overrides: `KEY=VALUE`, applied last.

    Raises:
        ValueError: an override that is not known, or see `enable`.
    """
    enable = bridge.enable  # first: says it where there is no Bridge
    from omegaconf import OmegaConf

    from odb_megatron.bridge.activation import require_active
    from odb_megatron.bridge.applied import applied

    own = [text for text in overrides if text.lstrip("+~").startswith(_ODB)]
    others = [text for text in overrides if text not in own]
    cfg = _found(recipe, module="megatron.bridge.recipes")()
    base = OmegaConf.create({"dataset": {"odb": asdict(OdbSettings())}})
    settings = base
    with tempfile.TemporaryDirectory() as folder:
        for at, path in enumerate(overlays):
            overlay = _loaded(path)
            odb = _taken(overlay)
            settings = _merged(settings, odb, where=path)
            _refuse_unknown(cfg, overlay, where=path)
            rest = Path(folder) / f"{at}.yaml"
            OmegaConf.save(OmegaConf.create(overlay), rest)
            cfg = applied(cfg, where=path, overlay=str(rest))
    if others:
        for text in others:
            if "_target_" in text:
                raise ValueError(
                    f"{text}: _target_ would make another object of this section, or do nothing "
                    "where Bridge cannot: use a recipe that has it (--recipe MODULE:FUNCTION)"
                )
        cfg = applied(cfg, where=" ".join(others), overrides=others)
        _require_applied(cfg, others)
    for text in own:
        settings = _overridden(settings, text)
    values = OmegaConf.to_container(settings, resolve=True)["dataset"]["odb"]
    enable(cfg, **values)
    require_active(cfg)
    return cfg


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m odb_megatron.bridge.run_recipe",
        description="Run a recipe of Megatron-Bridge with online dynamic batching.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe",
        required=True,
        help="function of megatron.bridge.recipes that returns the configuration, or "
        "MODULE:FUNCTION",
    )
    parser.add_argument(
        "--mode",
        choices=("pretrain", "finetune"),
        help="Bridge's function to run; default: by the recipe's name",
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="YAML", help="overlay; can be repeated"
    )
    parser.add_argument(
        "--step", default=_STEP, metavar="MODULE:FUNCTION", help=f"forward step; default {_STEP}"
    )
    parser.add_argument("--dry-run", action="store_true", help="stop before training")
    args, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-"):
            parser.error(f"there is no option {text}; overrides have the form KEY=VALUE")
        if "=" not in text and not text.startswith("~"):
            parser.error(f"an override has the form KEY=VALUE, got {text!r}")
    args.overrides = rest
    return args


def _found(name: str, *, module: str = "") -> Callable[..., Any]:
    where, _, function = name.rpartition(":")
    where = where or module
    try:
        found = getattr(importlib.import_module(where), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(error.name):
            raise
        raise ValueError(f"there is no module {where}, of which {name} was asked for") from error
    if not callable(found):
        names = [one for one in dir(importlib.import_module(where)) if one.endswith("_config")]
        similar = difflib.get_close_matches(function, names, n=3)
        hint = f": did you mean {' or '.join(similar)}?" if similar else ""
        raise ValueError(f"{where} has no function {function}{hint}")
    return found  # type: ignore[no-any-return]


def _mode_of(recipe: str) -> str:
    name = recipe.rpartition(":")[2]
    if "pretrain" in name:
        return "pretrain"
    if any(word in name for word in _FINETUNE_WORDS):
        return "finetune"
    raise ValueError(
        f"the name {name} does not say what it is for: give --mode pretrain or finetune"
    )


def _loaded(path: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    yaml_error: type[Exception] = importlib.import_module("yaml").YAMLError  # comes without types
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ValueError(f"the overlay {path} cannot be read: {error}") from error
    except (yaml_error, OmegaConfBaseException) as error:
        raise ValueError(f"the overlay {path} is no YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"the overlay {path} holds no mapping: its top level is KEY: VALUE")
    return loaded


def _taken(overlay: dict[str, Any]) -> dict[str, Any]:
    """Take `dataset.odb` out of an overlay."""
    dataset = overlay.get("dataset")
    odb = dataset.pop("odb", {}) if isinstance(dataset, dict) else {}
    if not isinstance(odb, dict):
        raise ValueError(f"dataset.odb is {odb!r}: it holds settings, such as token_budget: 16384")
    if isinstance(dataset, dict) and not dataset:
        del overlay["dataset"]
    return odb


def _merged(settings: Any, odb: dict[str, Any], *, where: str) -> Any:
    from omegaconf import OmegaConf

    for name in odb:
        _require_setting(name, where=where)
    return OmegaConf.merge(settings, {"dataset": {"odb": odb}})


def _overridden(settings: Any, text: str) -> Any:
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, parse_hydra_overrides

    name, sign, _ = text.partition("=")
    if name[0] in "+~" or not sign:
        raise ValueError(
            f"{text}: settings of dataset.odb are there already: write {_ODB}NAME=VALUE"
        )
    _require_setting(name.removeprefix(_ODB).partition(".")[0], where=text)
    try:
        return parse_hydra_overrides(settings, [text])
    except OverridesError as error:
        raise ValueError(f"{text} is no override: {str(error)[:300]}") from error


def _require_setting(name: str, *, where: str) -> None:
    if name not in asdict(OdbSettings()):
        raise ValueError(f"{where}: {unknown_setting(name)}")


def _refuse_unknown(cfg: Any, overlay: dict[str, Any], *, where: str, prefix: str = "") -> None:
    """Raise on a key of an overlay that the configuration does not have: Bridge only warns."""
    for key, value in overlay.items():
        name = f"{prefix}{key}"
        if key == "_target_":
            raise ValueError(
                f"{where}: {name} would make another object of this section, or do nothing where "
                "Bridge cannot: use a recipe that has it (--recipe MODULE:FUNCTION)"
            )
        has_key = key in cfg if isinstance(cfg, dict) else hasattr(cfg, str(key))
        if not has_key and not isinstance(cfg, dict):
            raise ValueError(f"{where}: the configuration has no {name}, so it would do nothing")
        inner = cfg.get(key) if isinstance(cfg, dict) else getattr(cfg, str(key))
        if isinstance(value, dict) and inner is not None:
            _refuse_unknown(inner, value, where=where, prefix=f"{name}.")


def _require_applied(cfg: Any, overrides: Sequence[str]) -> None:
    """Raise on an override that added a key of no attribute: Bridge only warns."""
    for text in overrides:
        name = text.partition("=")[0]
        if not name.startswith("+"):
            continue  # Hydra refuses what is not there
        name = name.lstrip("+")
        owner = cfg
        for part in name.split("."):
            is_mapping = isinstance(owner, dict)
            owner = owner.get(part, _ABSENT) if is_mapping else getattr(owner, part, _ABSENT)
            if owner is _ABSENT:
                raise ValueError(f"{text}: the configuration has no {name}, so it would do nothing")


_ABSENT = object()


if __name__ == "__main__":
    main()
