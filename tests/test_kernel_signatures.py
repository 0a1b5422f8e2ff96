"""Recorded signatures of attention kernels, against the packages or their sources.

A source is looked for in the installed package, and else in bare clones under the folder that
`ODB_SOURCE_MIRRORS` names (`owner+name/repo`). Without either, a test is skipped, saying so.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from odb_megatron.testing.kernel_signatures import SIGNATURES, KernelSignature

MIRRORS = os.environ.get("ODB_SOURCE_MIRRORS", "")


def _source(kernel: KernelSignature) -> str:
    clone = Path(MIRRORS) / kernel.repository.replace("/", "+") / "repo"
    if MIRRORS and clone.is_dir():
        done = subprocess.run(
            ["git", "-C", str(clone), "show", f"{kernel.tag}:{kernel.path}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
    try:
        found = importlib.util.find_spec(kernel.module)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        pytest.skip(f"{kernel.module} is not installed, and no clone of {kernel.repository}")
    return Path(found.origin).read_text(encoding="utf-8")


def _declared(source: str, name: str) -> ast.FunctionDef:
    inside, _, function = name.rpartition(".")
    tree: ast.AST = ast.parse(source)
    for node in ast.walk(tree):
        if inside and isinstance(node, ast.ClassDef) and node.name == inside:
            return _declared(ast.unparse(node), function)
        if not inside and isinstance(node, ast.FunctionDef) and node.name == function:
            return node
    raise AssertionError(f"no {name}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_as_recorded(name: str) -> None:
    kernel = SIGNATURES[name]
    arguments = _declared(_source(kernel), kernel.function).args
    names = [argument.arg for argument in arguments.args if argument.arg != "self"]
    required = names[: len(names) - len(arguments.defaults)]
    assert tuple(required) == kernel.required
    assert tuple(names[len(required) :]) == kernel.optional
    assert tuple(argument.arg for argument in arguments.kwonlyargs) == kernel.keyword_only


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_recorded_binds(name: str) -> None:
    kernel = SIGNATURES[name]
    signature = kernel.signature()
    signature.bind(*range(len(kernel.required)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'made_up'"):
        signature.bind(*range(len(kernel.required)), made_up=1)
    with pytest.raises(TypeError, match="missing a required argument"):
        signature.bind()
