"""What `odb-megatron doctor` says of given facts, row by row, and of this machine."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from odb_megatron import doctor
from odb_megatron.doctor import FAILURE, NOT_APPLICABLE, OK, WARNING, Finding, Load
from odb_megatron.megatron.attention import absent

GIB, MIB = 1 << 30, 1 << 20
ABSENT = {**dict.fromkeys(absent(), "absent"), "torch": ""}
TWO = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}


def packages(python: tuple[int, ...] = (3, 12, 1), *, without: str = "") -> Any:
    names = {"numpy", "tqdm", "torch", "psutil"} - {without}
    return doctor.check_packages(dict.fromkeys(names, "9.9"), python=python)


def megatron(**facts: Any) -> Any:
    found = {"version": "0.19.2", "folder": "/site/megatron/core", "has_training": True, **facts}
    return doctor.check_megatron(found)


def torch(driver: str = "580", visible: str | None = None, **facts: Any) -> Any:
    found = {"version": "torch 2.13 for CUDA 13.0", "devices": ["H100"] * 8, "has_nccl": True}
    found |= {"gloo_error": "", "attention": dict.fromkeys(absent(), "")}
    found["megatron"] = {"version": "0.19.2", "folder": "/site", "has_training": True}
    found |= facts
    return doctor.check_torch(found, driver=driver, visible=visible)


def host(load: Load | None = Load(ranks=8, num_workers=2, replicas=8), **limits: Any) -> Any:  # noqa: B008
    limits = {"shared_free": 63 * GIB, "open_files": (1 << 16, 1 << 16), **limits}
    limits = {"locked_memory": -1, "num_cores": 128, "infiniband": ("mlx5_0",), **limits}
    return doctor.check_host(limits, load)


def network(nodes: int | None = 2, resolved: str = "10.0.0.7", **names: str) -> Any:
    environment = {f"{name.upper()}_SOCKET_IFNAME": value for name, value in names.items()}
    return doctor.check_network(TWO, environment, resolved=resolved, num_nodes=nodes)


@pytest.mark.parametrize(
    ("findings", "status", "subject", "words"),
    [
        (packages((3, 10, 4)), WARNING, "python", "3.12 or later"),
        (packages(without="torch"), FAILURE, "torch", "pip install 'odb-megatron[megatron]'"),
        (packages(without="numpy"), FAILURE, "numpy", "pip install numpy"),
        (packages(without="psutil"), WARNING, "checkpoints", "psutil"),
        (megatron(version="0.15.3"), FAILURE, "megatron-core", "to 0.19"),
        (megatron(version="0.20.0"), WARNING, "megatron-core", "to 0.19"),
        (megatron(error="ModuleNotFoundError", foreign=""), FAILURE, "megatron-core", "NotFound"),
        (megatron(error="x", foreign="/x.py"), FAILURE, "megatron-core", "pip uninstall megatron"),
        (megatron(has_training=False), FAILURE, "megatron.training", "checkout on PYTHONPATH"),
        (torch(error="libcudart"), FAILURE, "torch", "libcudart"),
        (torch(devices=[]), FAILURE, "CUDA", "nvidia-smi"),
        (torch(devices=[], visible=""), WARNING, "CUDA", "unset CUDA_VISIBLE_DEVICES"),
        (torch(devices=[], driver=""), NOT_APPLICABLE, "CUDA", "no NVIDIA driver"),
        (torch(has_nccl=False), FAILURE, "NCCL", "CUDA build"),
        (torch(gloo_error="no device"), FAILURE, "gloo", "no device"),
        (torch(attention=ABSENT), FAILURE, "attention", "on cuda"),
        (host(shared_free=64 * MIB), FAILURE, "shared memory", "--shm-size=1g"),
        (host(shared_free=GIB), WARNING, "shared memory", "NCCL of 8 ranks"),
        (host(None, shared_free=64 * MIB), WARNING, "shared memory", "64 MiB free"),
        (host(open_files=(300, 4096)), WARNING, "open files", "ulimit -n 776"),
        (host(open_files=(100, 4096)), FAILURE, "open files", "2 workers"),
        (host(open_files=(100, 100)), FAILURE, "open files", "raise the hard limit"),
        (host(locked_memory=65536), WARNING, "locked memory", "mlx5_0"),
        (host(num_cores=4), WARNING, "cores", "2 workers"),
        (network(), WARNING, "GLOO_SOCKET_IFNAME", "export GLOO_SOCKET_IFNAME=eth0"),
        (network(None), WARNING, "GLOO_SOCKET_IFNAME", "export GLOO_SOCKET_IFNAME=eth0"),
        (network(resolved="127.0.1.1"), FAILURE, "GLOO_SOCKET_IFNAME", "127.0.1.1"),
        (network(gloo="eth9"), FAILURE, "GLOO_SOCKET_IFNAME", "of eth0, ib0, lo"),
    ],
)
def test_finding(findings: Iterable[Finding], status: str, subject: str, words: str) -> None:
    every = list(findings)
    (found,) = [one for one in every if (one.subject, one.status) == (subject, status)]
    assert words in f"{found.observed}|{found.expected}|{found.hint}"
    assert doctor.as_json(every)["exit_code"] == (status == FAILURE)
    assert status in (NOT_APPLICABLE, OK) or (found.expected and found.hint)


def test_nothing_to_say() -> None:
    every = [*packages(), *torch(), *host(), *network(1), *network(gloo="ib0"), *megatron()]
    assert not [one for one in every if one.status in (WARNING, FAILURE)]


def test_which_megatron_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout in the current folder comes first; an unrelated package is named."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").write_text("")
    code = "from odb_megatron.doctor import _look_at_megatron; print(_look_at_megatron())"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))

    def found() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert f"'foreign': '{tmp_path / 'megatron' / '__init__.py'}'" in found()
    (core / "__init__.py").write_text("__version__ = '0.20.1rc0'")
    about = f"'version': '0.20.1rc0', 'folder': '{core}', 'has_training': False"
    assert about in found()


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    code = doctor.main(["--json", str(out)])
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert set(report) == {"command", "exit_code", "counts", "checks"}
    assert set(report["checks"][0]) == {"subject", "status", "observed", "expected", "hint"}
    assert report["exit_code"] == code == (report["counts"][FAILURE] > 0)
    seen = {one["subject"]: one["observed"] for one in report["checks"]}
    assert seen["torch"] == importlib.metadata.version("torch")
    assert {"gloo", "attention", "open files", "interfaces"} <= set(seen)
    assert printed.splitlines()[-1].startswith("doctor: ")
    assert all(len(line) <= 100 or "/" in line for line in printed.splitlines())


def test_it_takes_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--", "torchrun", "a.py"])
    assert ended.value.code == 2
    assert "unrecognized arguments: " in capsys.readouterr().err
