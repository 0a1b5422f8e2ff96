"""An environment on top of .venv (.venv-bridge, .venv-modelopt) runs the commands of the docs.

Needs to run in one: `make test-bridge` and `make test-modelopt` do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odb_megatron import __version__

pytestmark = pytest.mark.skipif(
    not Path(sys.prefix).name.startswith(".venv-"),
    reason="this is no environment on top of .venv: make test-bridge and test-modelopt have one",
)

COMMANDS = {
    "odb-megatron": ("--version", __version__),
    "torchrun": ("--help", "usage: torchrun"),
    "pytest": ("--version", "pytest"),
}

SPAWNS = """
import multiprocessing

import odb_megatron

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(eval, ("__import__('odb_megatron').__version__",)))
"""


def _run(folder: Path, *words: str) -> str:
    """Run a program of this environment as a user does, from another folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [Path(sys.prefix, "bin", words[0]), *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_seen_from_another_folder(tmp_path: Path) -> None:
    code = "import odb_megatron, sys; print(odb_megatron.__version__, sys.prefix)"
    assert _run(tmp_path, "python", "-c", code).split() == [__version__, sys.prefix]


def test_a_process_that_python_starts_sees_the_package(tmp_path: Path) -> None:
    """As the manager of a checkpoint's writers, which unpickles names of this package."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    assert _run(tmp_path, "python", str(script)).strip() == __version__


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run_here(tmp_path: Path, name: str) -> None:
    """In this environment, not in .venv, whose packages it has besides its own."""
    flag, said = COMMANDS[name]
    program = Path(sys.prefix, "bin", name)
    assert f"{sys.prefix}/bin/python" in program.read_text(encoding="utf-8")
    assert said in _run(tmp_path, name, flag)
