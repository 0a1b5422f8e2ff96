"""Applies Bridge's overrides and overlays, and refuses those of which Bridge would drop a part.

Must not know the settings of `dataset.odb`. Bridge warns and goes on where a key is not known, or a
`_target_` or a value does not fit (`omegaconf_utils._apply_overrides`, 0.6.2), and says nothing
where a deletion, or a null in place of a section, does not do what it says.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["applied"]

_LOGGER = "megatron.bridge.training.utils.omegaconf_utils"
_SECTIONS = (
    *("model", "dataset", "train", "validation", "optimizer", "ddp", "scheduler"),
    *("logger", "tokenizer", "checkpoint", "dist", "rng"),
)
"""What every configuration has, so that null is no value of theirs."""


def applied(
    cfg: Any, *, where: str, overlay: str | None = None, overrides: Sequence[str] = ()
) -> Any:
    """Return a configuration with a YAML file, or overrides, applied as Bridge does.

    Args:
        cfg: a `ConfigContainer`; it is changed.
        where: what errors name.
        overlay: the file.
        overrides: `KEY=VALUE`.

    Raises:
        ValueError: Bridge refuses one of them, or would drop it.
    """
    from megatron.bridge.training.utils.omegaconf_utils import (
        OverridesError,
        process_config_with_overrides,
    )

    for text in overrides:
        if text.startswith("~"):
            _refuse_deletion(cfg, text)
    before = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    with _warnings() as usual:
        process_config_with_overrides(cfg)  # says what Bridge drops of the recipe itself
    with _warnings() as dropped:
        try:
            cfg = process_config_with_overrides(
                cfg, config_filepath=overlay, cli_overrides=list(overrides) or None
            )
        except OverridesError as error:
            raise ValueError(str(error)) from error
    new = [text for text in dropped if text not in usual]
    if new:
        raise ValueError(f"{where}: Bridge would drop a part of it: {'; '.join(new)}")
    for name, value in before.items():
        now = getattr(cfg, name)
        is_section = dataclasses.is_dataclass(value)
        if is_section and name in _SECTIONS and not dataclasses.is_dataclass(now):
            raise ValueError(
                f"{where}: {name} is a section of the configuration and cannot be {now!r}: change "
                f"{name}.KEY, or choose another recipe"
            )
        if isinstance(now, dict) and not isinstance(value, dict):
            raise ValueError(
                f"{where}: {name} is {value!r} in this recipe, and a mapping would not become a "
                "configuration: use a recipe that has it (--recipe MODULE:FUNCTION)"
            )
    return cfg


def _refuse_deletion(cfg: Any, text: str) -> None:
    name = text.lstrip("~").partition("=")[0]
    owner = cfg
    for part in name.split(".")[:-1]:
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
    if not isinstance(owner, dict):
        raise ValueError(
            f"{text}: a deletion would do nothing, as Bridge keeps what is not named: give "
            f"{name}=VALUE"
        )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what Bridge warns of while it applies."""
    found: list[str] = []
    logger = logging.getLogger(_LOGGER)

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    collector = Collector(logging.WARNING)
    level, disabled = logger.level, logger.disabled  # logging.config disables loggers
    logger.addHandler(collector)
    logger.disabled = False
    if not logger.isEnabledFor(logging.WARNING):
        logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.disabled = disabled
