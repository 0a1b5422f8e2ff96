"""Run the Megatron tests on each supported megatron-core version: `make test-matrix`.

Builds .venvs/VERSION from requirements/matrix/VERSION.lock where it is missing or the lock has
changed, over .venv, which has everything but Megatron; runs pytest in it, and prints one row per
version. The newest is .venv itself.

    python tools/test_matrix.py [VERSION ...]          all versions, where none is named
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venvs"
REPORTS = ROOT / "build" / "matrix"
BASE = ROOT / ".venv"

TESTS = (
    "test_attention_backends.py",
    "test_arguments.py",
    "test_cpu_device.py",
    "test_forward_step.py",
    "test_hooks.py",
    "test_megatron_dataset.py",
    "test_order.py",
    "test_pretrain*.py",
    "test_replica_ranks.py",
    "test_run_script.py",
    "test_thd.py",
    "test_topology.py",
    "test_validation.py",
    "test_versions.py",
)
"""Files in tests/ that touch Megatron at all: every call of `pretrain()` among them."""

QUICK = ("test_hooks.py", "test_pretrain.py", "test_pretrain_[pr]*.py", "test_versions.py")
"""Of these, those in which versions have differed; also in parallel, and resumed."""

VERSIONS = ("0.18.2", "0.19.2")
"""On the package index; the last one is .venv's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a version."""

    version: str
    python: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether tests ran and none failed."""
        return not self.error and not self.failed and self.passed > 0


def main() -> int:
    """Test; return 1 if a version has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument("--build-only", action="store_true", help="environments alone, no tests")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time; 0: no xdist")
    parser.add_argument("--quick", action="store_true", help="the files that differ most")
    parser.add_argument("--pytest", default="", help="further arguments of pytest")
    options = parser.parse_args()
    unknown = sorted(set(options.versions) - set(VERSIONS))
    if unknown:
        parser.error(
            f"{', '.join(unknown)} is not in the matrix: name any of {', '.join(VERSIONS)}"
        )
    chosen = [one for one in VERSIONS if not options.versions or one in options.versions]
    if options.build_only:
        for version in chosen:
            build(version)
        return 0
    rows = []
    for version in chosen:
        print(f"=== megatron-core {version}", flush=True)
        tests = QUICK if options.quick else TESTS
        rows.append(test(version, tests, jobs=options.jobs, more=options.pytest.split()))
        print_table(rows)
    return 0 if all(row.is_good for row in rows) else 1


def test(version: str, tests: Sequence[str], *, jobs: int, more: list[str]) -> Row:
    """Build a version's environment and run its tests."""
    try:
        python = build(version)
        found = installed(python)
    except (subprocess.CalledProcessError, OSError) as error:
        return Row(version=version, error=f"not built: {error}")
    if found != version:
        return Row(version=version, error=f"megatron-core {found} is imported: rebuild it")
    files = sorted(path for name in tests for path in (ROOT / "tests").glob(name))
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{version}.xml"
    report.unlink(missing_ok=True)
    order = ["--dist", "loadfile", "--no-loadscope-reorder"]
    at_a_time = ["-n", str(jobs), *order] if jobs else []
    started = time.monotonic()
    subprocess.run(
        [
            *(str(python), "-m", "pytest", *at_a_time, "-q", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", *more, *map(str, files)),
        ],
        cwd=ROOT,
        env=environment(python),
        check=False,
    )
    return read(report, version, python=python, seconds=time.monotonic() - started)


def build(version: str) -> Path:
    """Return the interpreter of a version's environment, which is built where it is not current."""
    if version == VERSIONS[-1]:
        return BASE / "bin" / "python"
    lock = ROOT / "requirements" / "matrix" / f"{version}.lock"
    folder = VENVS / version
    python, stamp = folder / "bin" / "python", folder / ".lock.sha256"
    code = "import sys; print(sys._base_executable)"
    command = [str(BASE / "bin" / "python"), "-I", "-c", code]
    base = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    made_of = f"{base} {BASE}"  # a moved folder is built anew
    digest = hashlib.sha256(lock.read_bytes() + made_of.encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"building {folder.relative_to(ROOT)} with {base}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--requirement", str(lock)], check=True)
    # Behind this environment's own packages.
    (line,) = (BASE / "lib").glob("python3.*/site-packages")
    (own,) = (folder / "lib").glob("python3.*/site-packages")
    (own / "zz_base.pth").write_text(f"{line}\n", encoding="utf-8")
    stamp.write_text(digest, encoding="utf-8")
    return python


def environment(python: Path) -> dict[str, str]:
    """Return the environment of the tests: their processes import this folder's package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["PATH"] = f"{python.parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PYTHONPATH": str(ROOT)}


def installed(python: Path) -> str:
    """Return the version of the megatron-core that is imported, as its own file says."""
    code = "import megatron.core as core; print('found', core.__version__)"
    command = [str(python), "-W", "ignore", "-c", code]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return ran.stdout.rpartition("found ")[2].strip().partition("+")[0]


def read(report: Path, version: str, *, python: Path, seconds: float) -> Row:
    """Count a report's tests."""
    shown = subprocess.run([str(python), "-V"], check=True, stdout=subprocess.PIPE, text=True)
    row = Row(version=version, python=shown.stdout.split()[-1], seconds=seconds)
    if not report.exists():
        return Row(version=version, python=row.python, error="pytest left no report")
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return Row(
        version=version,
        python=row.python,
        passed=count["tests"] - failed - count["skipped"],
        failed=failed,
        skipped=count["skipped"],
        seconds=seconds,
    )


def print_table(rows: list[Row]) -> None:
    """Print one row per version tested so far."""
    head = ("megatron-core", "Python", "passed", "failed", "skipped", "seconds")
    cells = [
        (row.version, row.python, row.passed, row.failed, row.skipped, f"{row.seconds:.0f}")
        for row in rows
    ]
    print(("{:<14}{:<8}" + "{:>8}" * 4).format(*head))
    for row, cell in zip(rows, cells, strict=True):
        line = ("{:<14}{:<8}" + "{:>8}" * 4).format(*cell)
        print(f"{line}  {re.sub(chr(10), ' ', row.error)}".rstrip())
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
