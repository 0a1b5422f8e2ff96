"""The wheel, what importing costs, and which layer may import what.

Nothing is written into the repository: the wheel is built from a copy.
"""

from __future__ import annotations

import ast
import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import odb_megatron

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "odb_megatron"
NOT_SOURCE = {"__pycache__", ".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; a failure shows what it printed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the wheel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it.

    Built from a copy of the sources, so that no old build/lib can leak into them.
    """
    source = tmp_path_factory.mktemp("source")
    for path in repository_files():
        target = source / path.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    if (REPO / "patches").is_symlink():
        (source / "patches").symlink_to((REPO / "patches").readlink())
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(REPO).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and not NOT_SOURCE & set(path.relative_to(REPO).parts)
    }
    # A difference names a folder without __init__.py, or a data file missing from package-data.
    assert packaged == expected
    assert "odb_megatron/py.typed" in packaged
    assert {"odb_megatron/plan/__init__.py", "odb_megatron/data/__init__.py"} <= packaged
    (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (REPO / "LICENSE").read_bytes()


def test_wheel_metadata(wheel_metadata: email.message.Message) -> None:
    assert wheel_metadata["Name"] == "odb-megatron"
    assert wheel_metadata["Version"] == odb_megatron.__version__
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    required = wheel_metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[^\w-]", text)[0] for text in required if "extra ==" not in text}
    assert always == {"numpy", "tqdm"}
    if (REPO / "README.md").exists():
        assert wheel_metadata["Description-Content-Type"] == "text/markdown"
        assert str(wheel_metadata.get_payload()).strip()


def test_wheel_imports_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    code = """
import importlib.metadata as metadata
installed = sorted(found.name for found in metadata.distributions())
import odb_megatron
print(installed, odb_megatron.__version__, metadata.version("odb-megatron"), odb_megatron.__file__)
"""
    output = run(python, "-I", "-c", code, cwd=tmp_path).strip()
    version = odb_megatron.__version__
    assert output.startswith(f"['odb-megatron'] {version} {version} "), output
    assert str(tmp_path) in output


def test_sdist_holds_every_file(built: Path) -> None:
    """Its tests, documents and tools among them: a difference is missing from MANIFEST.in."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(REPO).as_posix() for path in repository_files()}
    assert "verification/run.py" in files
    assert files - held == set()
    assert not {name for name in held if NOT_SOURCE & set(Path(name).parts)}


def test_metadata_is_what_an_index_takes(built: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed (make venv)")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))


def test_every_extra_that_a_message_names_exists(
    wheel_metadata: email.message.Message,
) -> None:
    extras = set(wheel_metadata.get_all("Provides-Extra") or [])
    named = {
        extra
        for path in PACKAGE.rglob("*.py")
        for found in re.findall(r"odb-megatron\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named
    assert named <= extras


# --- without torch ---------------------------------------------------------------------------

EVERY_MODULE = """
import importlib, pkgutil, sys
for name in ("plan", "report"):
    package = importlib.import_module(f"odb_megatron.{name}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import odb_megatron.doctor, odb_megatron.elastic
print(sys.version_info[:2], "torch" in sys.modules)
"""


@pytest.fixture(scope="module", params=["3.10", "3.12"])
def plain(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: Any) -> Path:
    """The bin folder of an environment with the wheel, numpy and tqdm, and nothing else."""
    version = str(request.param)
    search = [REPO / "tools" / "find_python.sh", version]
    found = subprocess.run(search, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"there is no Python {version} with venv here (pyenv install {version})")
    venv = tmp_path_factory.mktemp(f"python{version}") / "venv"
    run(found.stdout.strip(), "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        (target,) = venv.glob("lib/*/site-packages")
        for path in _installed_with("numpy", "tqdm"):
            (target / path.name).symlink_to(path)
        return venv / "bin"
    got = subprocess.run(
        [*map(str, pip), "install", "--quiet", *_WHEELS_ONLY, "numpy", "tqdm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if got.returncode:
        reason = (got.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"numpy for Python {version} cannot be installed: {reason}")
    return venv / "bin"


_WHEELS_ONLY = ("--only-binary", ":all:", "--retries", "1")


def _installed_with(*names: str) -> set[Path]:
    """Top folders of distributions, their metadata among them."""
    found = set()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or ()}
        places = (Path(str(distribution.locate_file(top))) for top in tops - {".."})
        found |= {place for place in places if place.exists()}
    return found


def ran(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_without_torch(plain: Path, tmp_path: Path) -> None:
    """What works does, and the rest says what it needs."""
    tool = plain / "odb-megatron"
    imported = ran([plain / "python", "-c", EVERY_MODULE], tmp_path)
    assert imported.stdout.endswith(" False\n"), imported.stderr
    told = ran([tool, "--help"], tmp_path).stdout
    assert "usage: odb-megatron" in told
    lengths = ["--lengths", "lognormal:mean=200,cv=1,n=256,max=1024", "--token-budget", "2048"]
    simulated = ran(
        [tool, "simulate", *lengths, "--dp", "2", "--policy", "odb", "--json", "s.json"],
        tmp_path,
    )
    assert simulated.returncode == 0, simulated.stderr
    assert set(json.loads((tmp_path / "s.json").read_text())["policies"]) == {"odb"}
    if "inspect " in told:
        (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(20, 276))) + "\n")
        flags = ["--token-budget", "2048", "--dp", "2", "--global-batch-size", "16", "--no-advice"]
        inspected = ran(
            [tool, "inspect", "--lengths", "lengths.txt", *flags, "--json", "i.json"], tmp_path
        )
        assert inspected.returncode == 0, inspected.stderr
        assert json.loads((tmp_path / "i.json").read_text())
    looked = ran([tool, "doctor", "--json", "-"], tmp_path)
    assert looked.returncode == 1, looked.stderr
    checks = {one["subject"]: one["status"] for one in json.loads(looked.stdout)["checks"]}
    assert (checks["numpy"], checks["tqdm"]) == ("ok", "ok")
    assert (checks["torch"], checks["megatron-core"]) == ("failure", "failure")
    refused = ran([tool, "pretrain", "--odb"], tmp_path)
    assert refused.returncode == 1
    assert "pip install 'odb-megatron[megatron]'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="odb-megatron")
    assert command.value == "odb_megatron.cli:main"
    assert callable(command.load())


def test_plan_imports_without_torch() -> None:
    """Each module of it, not only the package."""
    code = (
        "import importlib, pkgutil, sys, odb_megatron.plan as plan\n"
        "for module in pkgutil.iter_modules(plan.__path__, 'odb_megatron.plan.'):\n"
        "    importlib.import_module(module.name)\n"
        "print('torch' in sys.modules, 'odb_megatron.plan.step_planner' in sys.modules)"
    )
    assert run(sys.executable, "-c", code, cwd=REPO).split() == ["False", "True"]


# --- layers ----------------------------------------------------------------------------------

TORCH_DISTRIBUTED = "torch.distributed"
CPU_DEVICE = "odb_megatron.testing.cpu_device"
MAY_USE_TORCH_DISTRIBUTED = ("odb_megatron.doctor", "odb_megatron.elastic")
"""A process of its own that tries gloo, since that can end it; and torch's launcher."""

# What a layer must not name, with the reason a failure shows.
FORBIDDEN: dict[str, dict[str, str]] = {
    "comm": {
        "odb_megatron.data": "comm does not know about data",
        "odb_megatron.megatron": "comm does not know about Megatron",
        "odb_megatron.bridge": "comm does not know about Megatron",
        "odb_megatron.report": "imports go downwards only",
        "megatron": "comm does not know about Megatron",
    },
    "data": {
        "odb_megatron.megatron": "imports go downwards only",
        "odb_megatron.bridge": "imports go downwards only",
        "odb_megatron.report": "imports go downwards only",
        "megatron.training": "data does not know Megatron's globals",
        "megatron.core.parallel_state": "data does not know Megatron's globals",
    },
    "megatron": {"odb_megatron.bridge": "imports go downwards only"},
    "report": {
        "torch": "reports read by data's sources and plan by the planner",
        "odb_megatron.comm": "reports have no process groups",
        "odb_megatron.megatron": "imports go downwards only",
        "odb_megatron.bridge": "imports go downwards only",
    },
}


def module_name(path: Path, package_root: Path) -> str:
    """The dotted name of a file of a package."""
    parts = path.relative_to(package_root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_used(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import and every attribute chain on an imported name.

    `from a import b` gives `a.b`: whether b is a module or a value, the layer named is the same.
    """
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (1 if is_package else 0)
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            for alias in node.names:
                full = base if alias.name == "*" else f"{base}.{alias.name}"
                yield node.lineno, full
                bound[alias.asname or alias.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _attribute_chain(node)
            if chain and chain[0] in bound:
                yield node.lineno, ".".join([bound[chain[0]], *chain[1:]])


def layer_violations(package_root: Path) -> list[str]:
    """Every place under a package folder that names what its layer must not."""
    found = set()
    for path in sorted(package_root.rglob("*.py")):
        module = module_name(path, package_root)
        layer = module.split(".")[1] if "." in module else ""
        source = path.read_text(encoding="utf-8")
        if module in MAY_USE_TORCH_DISTRIBUTED:
            continue
        for line, name in names_used(source, module, is_package=path.name == "__init__.py"):
            reason = _why_forbidden(layer, name)
            if reason:
                found.add(f"{path.relative_to(package_root.parent)}:{line}: {name}: {reason}")
    return sorted(found)


def _attribute_chain(node: ast.Attribute) -> list[str] | None:
    parts = [node.attr]
    value: ast.expr = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return [value.id, *reversed(parts)] if isinstance(value, ast.Name) else None


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _why_forbidden(layer: str, name: str) -> str | None:
    if _within(name, TORCH_DISTRIBUTED) and layer not in ("comm", "testing"):
        return "process groups are touched in odb_megatron.comm only"
    allowed = layer == "testing" or _within(name, CPU_DEVICE)
    if _within(name, "odb_megatron.testing") and not allowed:
        return f"of odb_megatron.testing only {CPU_DEVICE} may be imported"
    if layer == "plan":
        top = name.split(".")[0]
        own = _within(name, "odb_megatron.plan")
        if not (own or top == "numpy" or top in sys.stdlib_module_names):
            return "plan imports the standard library, numpy and itself"
    for prefix, reason in FORBIDDEN.get(layer, {}).items():
        if _within(name, prefix):
            return reason
    return None


def test_layers() -> None:
    assert list((PACKAGE / "plan").glob("*.py")), "no module found: the walk would prove nothing"
    assert layer_violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "name"),
    [
        ("data/a.py", "import torch.distributed as dist", "torch.distributed"),
        ("data/a.py", "from torch import distributed", "torch.distributed"),
        ("data/a.py", "from torch.distributed import all_reduce", "torch.distributed.all_reduce"),
        ("megatron/a.py", "import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("megatron/a.py", "import torch as t\nt.distributed.barrier()", "torch.distributed"),
        ("megatron/a.py", "def f():\n    import torch.distributed", "torch.distributed"),
        ("a.py", "from torch import distributed as d", "torch.distributed"),
        ("plan/a.py", "import torch", "torch"),
        ("plan/a.py", "from odb_megatron.data import sample", "odb_megatron.data.sample"),
        ("plan/a.py", "from ..data import sample", "odb_megatron.data.sample"),
        ("plan/__init__.py", "from ..data import sample", "odb_megatron.data.sample"),
        ("report/a.py", "from odb_megatron import testing", "odb_megatron.testing"),
        ("report/a.py", "import odb_megatron.testing.worlds", "odb_megatron.testing.worlds"),
        ("comm/a.py", "from megatron.core import parallel_state", "megatron.core.parallel_state"),
        ("data/a.py", "from megatron.training import get_args", "megatron.training.get_args"),
        ("data/a.py", "import odb_megatron.megatron.flags", "odb_megatron.megatron.flags"),
        ("report/a.py", "def f():\n    import torch", "torch"),
        ("report/a.py", "from odb_megatron.comm import groups", "odb_megatron.comm.groups"),
    ],
)
def test_layer_rule_sees(tmp_path: Path, file: str, source: str, name: str) -> None:
    path = tmp_path / "odb_megatron" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    violations = layer_violations(tmp_path / "odb_megatron")
    assert violations, "not seen"
    assert all(name in violation for violation in violations)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("comm/a.py", "import torch.distributed as dist\ndist.barrier()"),
        ("testing/a.py", "from torch import distributed"),
        ("plan/a.py", "import heapq\nimport numpy as np\nfrom odb_megatron.plan import cost"),
        ("plan/__init__.py", "from .cost import Cost"),
        ("megatron/a.py", "from odb_megatron.testing import cpu_device\ncpu_device.install()"),
        ("megatron/a.py", "from odb_megatron.testing.cpu_device import install"),
        ("data/a.py", "import torch\nx = torch.distributions\n# torch.distributed"),
    ],
)
def test_layer_rule_allows(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "odb_megatron" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert layer_violations(tmp_path / "odb_megatron") == []


# --- the repository --------------------------------------------------------------------------


def repository_files() -> list[Path]:
    """Tracked and not yet tracked files, ignored ones aside; every file where git cannot tell."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout.decode()
    except (FileNotFoundError, subprocess.CalledProcessError):
        listed = ""
    paths = [path for name in listed.split("\0") if name and (path := REPO / name).is_file()]
    if Path(__file__).resolve() in paths:
        return paths
    # No git, or this is an unpacked archive that a repository around it ignores.
    skipped = {*NOT_SOURCE, "build", "dist"}
    return [
        path
        for path in REPO.rglob("*")
        if path.is_file()
        and not skipped & set(path.relative_to(REPO).parts)
        and not any(part.startswith(".venv") for part in path.relative_to(REPO).parts)
    ]


def test_no_path_of_the_machine_it_was_written_on() -> None:
    # Put together here, so that this file does not hold what it looks for.
    roots = "|".join(("work/", "root/", "tmp/v"))
    machine_path = re.compile(rf"(?<![\w.])/(?:{roots})")
    files = repository_files()
    assert Path(__file__).resolve() in files, "the listing misses this very file"
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            if machine_path.search(line):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_lock_pins_every_direct_dependency() -> None:
    locked = {}
    for line in (REPO / "requirements" / "dev.lock").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("#")[0].strip().split("==")
            locked[name] = version
    direct = [
        line.split("#")[0].strip()
        for line in (REPO / "requirements" / "dev.in").read_text().splitlines()
        if line.split("#")[0].strip()
    ]
    assert len(direct) > 10
    for requirement in direct:
        name = re.split(r"[=<>\[]", requirement)[0]
        assert name in locked, f"{name} is in dev.in, not in dev.lock: run tools/lock.sh"
        if "==" in requirement:
            assert requirement == f"{name}=={locked[name]}", "dev.lock is old: run tools/lock.sh"
