"""Runs a script as on a machine that has torch, numpy, packaging and what they need, nothing else.

    python tests/bare_machine.py SCRIPT [ARGS...]

Every other installed package, megatron-core too, cannot be found, as if it were not there; what
lies outside site-packages can. Prints at the end what was asked for and refused. Must not change
what is installed.
"""

from __future__ import annotations

import atexit
import re
import runpy
import site
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOTS = ("torch", "numpy", "packaging")


def installed_packages() -> set[str]:
    """Names of the roots and of all that they require."""
    wanted, seen = list(ROOTS), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        for line in requires:
            if "extra ==" not in line:
                wanted.append(_normal(re.split(r"[\s;<>=!~\[(]", line)[0]))
    return seen


def modules_of(packages: set[str]) -> set[str]:
    """Top-level modules of these packages."""
    owners = metadata.packages_distributions()
    return {top for top, names in owners.items() if packages & {_normal(name) for name in names}}


class OnlyFinder:
    """Stands for a finder, without the packages that are not to be found.

    Args:
        packages: what may come from site-packages.
        refused: filled with modules that were asked for, are there, and are of other packages.
    """

    def __init__(self, packages: set[str], refused: set[str]) -> None:
        self._packages = packages
        self._allowed = modules_of(packages)
        self._refused = refused
        self._folders = [Path(folder).resolve() for folder in site.getsitepackages()]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and name not in self._allowed:
            path = [each for each in sys.path if not self._is_site(each)]
            found = PathFinder.find_spec(name, path, target)
            if found is None and PathFinder.find_spec(name) is not None:
                self._refused.add(name)
            return found
        return PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any) -> Iterator[metadata.Distribution]:
        for found in metadata.MetadataPathFinder.find_distributions(context):
            name, folder = _normal(found.metadata["Name"]), str(found.locate_file(""))
            if name in self._packages or not self._is_site(folder):
                yield found

    def _is_site(self, folder: str) -> bool:
        return Path(folder or ".").resolve() in self._folders


def main() -> None:
    """Hide what is not to be found, then run the script."""
    refused: set[str] = set()
    only: Any = OnlyFinder(installed_packages(), refused)
    sys.meta_path = [
        *(
            each
            for each in sys.meta_path
            if getattr(each, "__name__", "").startswith(("B", "Froz"))
        ),
        only,
    ]
    atexit.register(lambda: print(f"refused: {sorted(refused)}", flush=True))
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
