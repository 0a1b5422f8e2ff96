"""Skips what this machine cannot run, puts slow files first, takes signals as in a terminal.

The markers themselves are declared in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import signal
from collections import Counter

import pytest
from hypothesis import settings

# Timing on a shared machine says nothing about a property; a failure prints how to repeat it.
settings.register_profile("odb", deadline=None, print_blob=True)
settings.load_profile("odb")


def pytest_configure() -> None:
    """Take signals as in a terminal: under nohup, or behind a shell's &, some are ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip marked tests whose requirement is missing, and put files that start processes first.

    So nobody waits for a long file at the end (`--no-loadscope-reorder` keeps this order).
    """
    weight = Counter(
        item.path
        for item in items
        for name in ("megatron", "slow")
        if item.get_closest_marker(name)
    )
    items.sort(key=lambda item: -weight[item.path])
    for marker, missing in (("gpu", _missing_gpu), ("megatron", _missing_megatron)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _missing_megatron() -> str | None:
    try:
        found = importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "megatron.training is not installed (it needs Python 3.12)"
