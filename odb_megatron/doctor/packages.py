"""Python, what is installed, and whether versions fit; which Megatron would be imported.

Must not import what it looks for: torch and Megatron take seconds, and may be broken. Versions that
are wanted are those of the package's own extras (pyproject.toml) and of `megatron.compat`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odb_megatron import __version__
from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning
from odb_megatron.megatron.compat import MAX_VERSION, MIN_VERSION, check_version
from odb_megatron.megatron.compat_helpers import are_compiled

__all__ = ["MegatronFacts", "PackageFacts", "check_packages", "gather_packages"]

_OWN = "odb-megatron"
_NEEDED = {"numpy": "plans", "tqdm": "progress bars"}
_SHOWN = (
    *("torch", "transformers", "tokenizers", "psutil", "transformer-engine", "flash-attn"),
    *("flash-attn-3", "flash-attn-4", "nvidia-modelopt", "megatron-bridge"),
)
"""Packages that a run can do without, torch aside; Megatron is looked at apart."""

_TRAINING_PYTHON = (3, 12)
_PIP = "pip install 'odb-megatron[megatron]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFacts:
    """The `megatron` that Python finds.

    Attributes:
        version: of `megatron.core`; empty where there is none.
        folder: where `megatron.core` lies.
        foreign: file of an unrelated package of that name, which hides it.
        has_training: whether `megatron.training` is there.
        has_helpers: whether the dataset helpers are compiled, or can be where they lie.
    """

    version: str = ""
    folder: str = ""
    foreign: str = ""
    has_training: bool = False
    has_helpers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """What is installed.

    Attributes:
        python: its version.
        versions: of installed distributions, by name.
        wanted: what the package's extras ask for, by name: `>=2.6`.
        megatron: see `MegatronFacts`.
    """

    python: tuple[int, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)
    megatron: MegatronFacts = MegatronFacts()


def gather_packages(path: Sequence[str] = ()) -> PackageFacts:
    """Look at what is installed.

    Args:
        path: folders that come before `sys.path`, as the script's own does.
    """
    wanted = dict(_requirements())
    names = {*_NEEDED, *_SHOWN, *wanted}
    versions = {name: version for name in names if (version := _version(name))}
    return PackageFacts(
        python=tuple(sys.version_info[:3]),
        versions=versions,
        wanted=wanted,
        megatron=_megatron([*path, *sys.path]),
    )


def check_packages(
    facts: PackageFacts, *, on_gpu: bool, needs_training: bool = True
) -> list[Finding]:
    """Check versions.

    Args:
        facts: what is installed.
        on_gpu: whether the run is on GPUs.
        needs_training: whether it needs `megatron.training`; one loop of the user's own does not.
    """
    return [
        _python(facts.python, has_training=facts.megatron.has_training),
        fine(_OWN, __version__),
        *_needed(facts),
        *_optional(facts),
        *_check_megatron(facts, on_gpu=on_gpu, needs_training=needs_training),
    ]


def _python(version: tuple[int, ...], *, has_training: bool) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 10):
        return failure(
            "python", text, expected="3.10 or later", way_out="use Python 3.12, for Megatron 0.17+"
        )
    if version[:2] < _TRAINING_PYTHON and not has_training:  # else megatron.training says it
        return warning(
            "python",
            text,
            expected="3.12 or later for megatron.training, which pretrain scripts need; on 3.10 "
            "and 3.11 the core of 0.16 alone",
            way_out="make an environment with Python 3.12, or train with a loop like "
            "examples/train_core_only.py",
        )
    return fine("python", text)


def _pip(python: tuple[int, ...]) -> str:
    """Return what installs a Megatron that this Python can use."""
    if python[:2] >= _TRAINING_PYTHON:
        return _PIP
    return f"{_PIP} on Python 3.12 (here: pip install 'megatron-core<0.17', the core alone)"


def _needed(facts: PackageFacts) -> Iterator[Finding]:
    for name, why in _NEEDED.items():
        if name in facts.versions:
            yield _against(name, facts)
        else:
            way_out = f"pip install {name}"
            yield failure(name, "not installed", expected=f"needed for {why}", way_out=way_out)


def _optional(facts: PackageFacts) -> Iterator[Finding]:
    for name in (*_SHOWN, *sorted(set(facts.wanted) - {*_SHOWN, *_NEEDED, "megatron-core"})):
        if name in facts.versions:
            yield _against(name, facts)
        elif name == "torch":
            yield failure(
                "torch",
                "not installed",
                expected="needed to train (plan, simulate and inspect --lengths work without)",
                way_out=f"install the build for your CUDA (pytorch.org), or {_pip(facts.python)}",
            )
        elif name in _SHOWN:
            yield not_applicable(name, "not installed")


def _against(name: str, facts: PackageFacts) -> Finding:
    found, wanted = facts.versions[name], facts.wanted.get(name, "")
    if _satisfies(found, wanted):
        return fine(name, found)
    return warning(name, found, expected=wanted, way_out=f"pip install '{name}{wanted}'")


def _check_megatron(
    facts: PackageFacts, *, on_gpu: bool, needs_training: bool
) -> Iterator[Finding]:
    found = facts.megatron
    name = "megatron-core"
    if found.foreign:
        yield failure(
            name,
            f"{found.foreign} is another package called megatron",
            expected="NVIDIA's megatron.core",
            way_out=f"pip uninstall megatron, then {_pip(facts.python)}",
        )
        return
    if not found.version:
        yield failure(
            name,
            "not installed",
            expected="needed to train (plan, simulate and inspect --lengths work without)",
            way_out=f"{_pip(facts.python)}, or put a Megatron-LM checkout on PYTHONPATH",
        )
        return
    yield _megatron_version(found)
    if not found.has_training:
        report = failure if needs_training else warning
        yield report(
            "megatron.training",
            f"not part of the megatron-core {found.version} in {found.folder}",
            expected="needed by pretrain scripts; in 0.17 and later, on Python 3.12 and later "
            f"(this is {'.'.join(map(str, facts.python))})",
            way_out="megatron-core 0.17 or later, a Megatron-LM checkout on PYTHONPATH, or a loop "
            "like examples/train_core_only.py",
        )
    elif facts.python[:2] < _TRAINING_PYTHON:
        yield warning(
            "megatron.training",
            f"on Python {'.'.join(map(str, facts.python))}",
            expected="Python 3.12 or later: 0.17 and later need it",
            way_out="make an environment with Python 3.12",
        )
    if on_gpu and found.has_training and not found.has_helpers:
        yield failure(
            "dataset helpers",
            f"{found.folder}/datasets has no compiled helpers (helpers_cpp*.so) for this Python, "
            "and no Makefile: Megatron ends as it starts (initialize.py `_compile_dependencies`, "
            "datasets/utils.py 20, 0.19.2)",
            expected="either of them",
            way_out="install megatron-core's wheel for this Python again, or use a checkout of "
            "Megatron-LM",
        )
    if "psutil" not in facts.versions:
        yield warning(
            "checkpoints",
            "psutil is not installed",
            expected="Megatron needs it to save torch_dist checkpoints, its default format",
            way_out="pip install psutil",
        )


def _megatron_version(found: MegatronFacts) -> Finding:
    low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))
    pip = f"pip install 'megatron-core>={low},<0.{MAX_VERSION[1] + 1}'"
    seen, expected = f"{found.version} in {found.folder}", f"{low} to {high}"
    try:
        version = check_version(found.version)
    except ValueError:
        return failure("megatron-core", seen, expected=expected, way_out=pip)
    if version[:2] > MAX_VERSION:
        return warning("megatron-core", seen, expected=expected, way_out=pip)
    return fine("megatron-core", f"{seen} (supported: {expected})")


# --- gathering -------------------------------------------------------------------------------


def _requirements() -> Iterator[tuple[str, str]]:
    """Yield name and version bounds of what the package and its extras ask for."""
    try:
        lines = importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout that is not installed
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[\w,-]*\])?\s*([<>=!~][^;]*)?", line)
        if match and not re.search(r"extra == .(dev|rivals|examples)", line):
            yield match[1].lower(), (match[2] or "").strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _megatron(path: Sequence[str]) -> MegatronFacts:
    spec = importlib.machinery.PathFinder.find_spec("megatron", list(path))
    if spec is None:
        return _editable_megatron()
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    core = next((place / "core" for place in places if (place / "core").is_dir()), None)
    if core is None:
        if spec.origin is None:
            return _editable_megatron()  # a namespace without it: megatron-bridge alone
        return MegatronFacts(foreign=spec.origin)
    return _megatron_in(core, [place / "training" for place in places])


def _editable_megatron() -> MegatronFacts:
    """Look where an import hook, as an editable install has it, finds Megatron."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return MegatronFacts()
    core = Path(spec.origin).parent
    return _megatron_in(core, [core.parent / "training"])


def _megatron_in(core: Path, training: Sequence[Path]) -> MegatronFacts:
    return MegatronFacts(
        version=_read_version(core / "package_info.py"),
        folder=str(core),
        has_training=any((place / "__init__.py").is_file() for place in training),
        has_helpers=are_compiled(core / "datasets") or (core / "datasets" / "Makefile").is_file(),
    )


def _read_version(path: Path) -> str:
    """Return `VERSION` of Megatron's package_info.py, which runs git when it is imported."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return _version("megatron-core")
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in _PARTS]
    if not all(numbers):
        return _version("megatron-core")
    pre = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]", text, re.MULTILINE)
    return ".".join(match[1] for match in numbers if match) + (pre[1] if pre else "")


_PARTS = ("MAJOR", "MINOR", "PATCH")


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version is within bounds such as `<0.20,>=0.16`; other signs are not looked at."""
    found = _numbers(version)
    for bound in filter(None, wanted.replace(" ", "").split(",")):
        sign, least = re.sub(r"[^<>=!~]", "", bound), _numbers(bound)
        size = max(len(found), len(least))
        ours, theirs = (one + (0,) * (size - len(one)) for one in (found, least))
        fits = {">=": ours >= theirs, "<": ours < theirs, "==": ours == theirs}
        if not fits.get(sign, True):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
