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
from collections.abc import Sequence
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
        [*map(str, pip), "install", "--quiet", "--only-binary=:all:", "numpy", "tqdm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if got.returncode:
        reason = (got.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"numpy for Python {version} cannot be installed: {reason}")
    return venv / "bin"


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


# --- layers ----------------------------------------------------------------------------------

_ABOVE = "odb_megatron.(megatron|bridge|report)"
FORBIDDEN = {  # what a layer must not import: imports go downwards only
    "plan": rf"torch|megatron|{_ABOVE}|odb_megatron.(comm|data|testing)",
    "comm": rf"megatron|{_ABOVE}|odb_megatron.(data|testing)",
    "data": rf"megatron.(training|core.parallel_state)|torch.distributed|{_ABOVE}",
    "megatron": r"torch.distributed|odb_megatron.bridge",
    "bridge": r"torch.distributed",
    "report": r"torch|odb_megatron.(comm|megatron|bridge)",
}
USED_ABOVE = {"doctor.py", "elastic.py", "testing"}
"""A process of its own that tries gloo, since that can end it; torch's launcher; test worlds."""


def test_layers() -> None:
    """Of every import, and of uses of `torch.distributed` as an attribute."""
    found, looked_at = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        layer, *_ = path.relative_to(PACKAGE).parts
        if layer in USED_ABOVE:
            continue
        looked_at.add(layer)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)] if ast.unparse(node) == "torch.distributed" else []
            forbidden = FORBIDDEN.get(layer, "torch.distributed")
            cpu = "(?!.cpu_device)" if layer != "testing" else ""
            pattern = rf"({forbidden}|odb_megatron.testing{cpu})(\.|$)"
            found += [f"{path}: {name}" for name in names if re.match(pattern, name)]
    assert found == []
    assert looked_at >= set(FORBIDDEN)


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
