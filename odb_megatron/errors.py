"""Errors that name settings, as the host of the run does: Megatron or Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SettingError", "flag_of", "name_settings", "setting_name"]

_FLAGS = {
    "fp8": "--fp8-format",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}


def flag_of(name: str) -> str:
    """Return the command-line flag of one of Megatron's arguments, or of ODB's (`odb_...`)."""
    return _FLAGS.get(name) or "--" + name.replace("_", "-")


_hosts: list[Callable[[str], str]] = [flag_of]  # the last one counts


def name_settings(name: Callable[[str], str]) -> None:
    """Let all texts of this process name settings as this host does; the default is `flag_of`."""
    _hosts.append(name)


def setting_name(name: str) -> str:
    """Return what this process's host calls a setting."""
    return _hosts[-1](name)


class SettingError(ValueError):
    """A text in which `{micro_batch_size}` is a setting's name, and other fields are `values`."""

    def __init__(self, text: str, /, *more: dict[str, Any], **values: Any) -> None:
        super().__init__(text, *more, *([values] if values else []))

    def __str__(self) -> str:
        text, *more = self.args
        return str(text).format_map(_Names({key: v for one in more for key, v in one.items()}))


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return setting_name(name)
