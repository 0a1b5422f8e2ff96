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
from dataclasses import is_dataclass
from typing import Any

from odb_megatron import bridge
from odb_megatron.bridge.settings import OdbSettings, unknown_setting
from odb_megatron.errors import usage_errors

__all__ = ["configured", "main"]

_ODB = "dataset.odb."
_STEP = "megatron.bridge.training.gpt_step:forward_step"
_FINETUNE_WORDS = ("sft", "peft", "finetune", "lora", "dora")
_SECTIONS = (
    *("model", "dataset", "train", "validation", "optimizer", "ddp", "scheduler"),
    *("logger", "tokenizer", "checkpoint", "dist", "rng"),
)
"""What every configuration has, so that null is no value of theirs."""


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
        from odb_megatron.bridge.arguments import UnusableError, refuse_early
        from odb_megatron.megatron.hooks import Replacements

        refuse_early(cfg)
    if args.dry_run:
        return
    train = getattr(importlib.import_module(f"megatron.bridge.training.{mode}"), mode)
    module = importlib.import_module("megatron.bridge.training.pretrain")

    def checked(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def runtime_config_update(cfg: Any) -> None:
            with usage_errors():  # what Bridge refuses before it starts ends in one message too
                original(cfg)

        return runtime_config_update

    replaced = Replacements()
    replaced.replace_in(module, "runtime_config_update", checked)
    try:
        train(cfg, step)
    except UnusableError as error:
        with usage_errors():
            raise ValueError(str(error)) from error
    finally:
        replaced.undo()


def configured(recipe: str, *, overlays: Sequence[str] = (), overrides: Sequence[str] = ()) -> Any:
    """Return a recipe's configuration with overrides applied and ODB on.

    Args:
        recipe: a function of `megatron.bridge.recipes`, or MODULE:FUNCTION.
        overlays: YAML files, applied in this order.
        overrides: `KEY=VALUE`, applied last.

    Raises:
        ValueError: an override that is not known, or see `enable`.
    """
    bridge.enable  # noqa: B018  # says it where there is no Bridge
    from odb_megatron.bridge.activation import require_active, switch_on

    cfg = _found(recipe, module="megatron.bridge.recipes")()
    loaded: list[tuple[str, Any]] = [(path, _loaded(path)) for path in overlays]
    settings: list[tuple[str, Any]] = [
        (path, {"dataset": {"odb": _taken(overlay)}}) for path, overlay in loaded
    ]
    own = [text for text in overrides if text.lstrip("+~").startswith(_ODB)]
    others = [text for text in overrides if text not in own]
    for where, change in [*loaded, (" ".join(others), others)]:
        cfg = _applied(cfg, change, where=where)
    switch_on(cfg, OdbSettings())
    for where, change in [*settings, (" ".join(own), own)]:
        cfg = _applied(cfg, change, where=where)
        require_active(cfg)
    return cfg


def _applied(cfg: Any, change: dict[str, Any] | Sequence[str], *, where: str) -> Any:
    """Return a configuration with the content of a YAML file, or overrides, applied as Bridge does.

    Bridge warns and goes on where a key is not known, and says nothing where a deletion, or a value
    in place of a section, does not do what it says. All are errors here.
    """
    from megatron.bridge.training.utils.omegaconf_utils import (
        OverridesError,
        process_config_with_overrides,
    )
    from omegaconf import OmegaConf

    is_file = isinstance(change, dict)
    for text in _keys(change) if isinstance(change, dict) else change:
        if text.startswith("~"):
            raise ValueError(f"{text}: Bridge keeps what is not named: give KEY=VALUE")
        _require_place(cfg, text.lstrip("+").partition("=")[0], where=where)
    before = {name: type(getattr(cfg, name)) for name in _SECTIONS}
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        OmegaConf.save(OmegaConf.create(change if is_file else {}), file.name)
        overrides = None if is_file else list(change)
        try:
            cfg = process_config_with_overrides(
                cfg, config_filepath=file.name, cli_overrides=overrides
            )
        except OverridesError as error:
            raise ValueError(f"{where}: {str(error)[:300]}") from error
    for name, kind in before.items():
        if not is_dataclass(now := getattr(cfg, name)):
            raise ValueError(
                f"{where}: {name} is {kind.__name__} in this recipe and cannot be {now!r}: "
                f"change {name}.KEY, or choose another recipe (--recipe MODULE:FUNCTION)"
            )
    return cfg


def _keys(overlay: dict[str, Any]) -> Iterator[str]:
    for key, value in overlay.items():
        yield from (
            (f"{key}.{inner}" for inner in _keys(value)) if isinstance(value, dict) else [key]
        )


def _require_place(cfg: Any, key: str, *, where: str) -> None:
    """Raise on a key that the configuration does not have: Bridge only warns, or not even that."""
    if "_target_" in key:
        raise ValueError(
            f"{where}: _target_ would make another object of a section, or do nothing where "
            "Bridge cannot: use a recipe that has it (--recipe MODULE:FUNCTION)"
        )
    owner = cfg
    for part in key.split("."):
        if owner is None or isinstance(owner, dict):
            return
        if not hasattr(owner, part):
            text = f"the configuration has no {key}, so it would do nothing"
            raise ValueError(
                f"{where}: {unknown_setting(part) if isinstance(owner, OdbSettings) else text}"
            )
        owner = getattr(owner, part)


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
    except (OSError, yaml_error, OmegaConfBaseException) as error:
        raise ValueError(f"the overlay {path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"the overlay {path} holds no mapping: its top level is KEY: VALUE")
    return loaded


def _taken(overlay: dict[str, Any]) -> Any:
    """Take `dataset.odb` out of an overlay."""
    dataset = overlay.get("dataset")
    odb = dataset.pop("odb", {}) if isinstance(dataset, dict) else {}
    if dataset == {}:
        del overlay["dataset"]
    return odb


if __name__ == "__main__":
    main()
