"""Megatron's compiled dataset helpers are not built anew where they cannot be."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest

from odb_megatron.megatron.compat_helpers import are_compiled, compiled_once

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.mark.parametrize(
    ("files", "is_compiled_anew"),
    [
        ([f"helpers_cpp{SUFFIX}"], False),  # a wheel
        ([f"helpers_cpp{SUFFIX}", "Makefile"], True),  # a checkout, built before
        (["Makefile"], True),  # a checkout
        (["helpers_cpp.cpython-27-pdp11.so"], True),  # of another Python: Megatron says so
        ([], True),
    ],
)
def test_only_what_can_be_is_compiled(
    files: list[str],
    is_compiled_anew: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in files:
        (tmp_path / name).touch()
    module = ModuleType("its_utils")
    module.__file__ = str(tmp_path / "utils.py")
    monkeypatch.setitem(sys.modules, "its_utils", module)

    def original() -> str:
        return "compiled"

    original.__module__ = "its_utils"
    twice = compiled_once(compiled_once(original))  # the CPU layer's, and a run's
    assert twice() == ("compiled" if is_compiled_anew else None)
    assert ("compiled with the package" in capsys.readouterr().out) is not is_compiled_anew
    assert are_compiled(tmp_path) == (f"helpers_cpp{SUFFIX}" in files)


@pytest.mark.megatron
def test_the_installed_wheel_is_left_as_it_is() -> None:
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    assert are_compiled(folder)
    assert not (folder / "Makefile").exists()
