"""Which Megatron is there: told by its file, and an old one before anything of it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odb_megatron.megatron import versions
from odb_megatron.megatron.versions import describe_megatron, require_version

ROOT = Path(__file__).resolve().parents[1]
OLD = (
    "odb: error: megatron-core 0.17.1 is too old: odb_megatron supports 0.18 to 0.19 and main: "
    "pip install 'megatron-core>=0.18,<0.20' (Python 3.12 or later)"
)


@pytest.mark.parametrize(
    ("text", "version"), [("0.18.2", (0, 18, 2)), ("0.19.2", (0, 19, 2)), ("0.20.0rc0", (0, 20, 0))]
)
def test_supported_versions(text: str, version: tuple[int, ...]) -> None:
    assert require_version(text) == version


def test_a_newer_one_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "megatron_version", lambda: (0, 20, 0))
    assert describe_megatron().startswith("warning: megatron-core 0.20.0 is newer than 0.18 to")
    monkeypatch.setattr(versions, "megatron_version", lambda: (0, 19, 2))
    assert describe_megatron() == "megatron-core 0.19.2 (supported: 0.18 to 0.19 and main)"


@pytest.mark.parametrize(
    "command",
    [
        ["odb_megatron.megatron.pretrain", "--odb"],
        ["odb_megatron.run", "train.py", "--odb"],
        ["odb_megatron.cpu", "-m", "odb_megatron.megatron.pretrain", "--odb"],
    ],
)
def test_an_old_one_is_refused_before_it_is_imported(tmp_path: Path, command: list[str]) -> None:
    core = tmp_path / "megatron" / "core"
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    core.mkdir()
    (core / "package_info.py").write_text("__version__ = '0.17.1'\n")
    for folder in (core, core.parent / "training"):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (2, OLD), done.stderr
