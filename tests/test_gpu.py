"""The script for the first hour on GPUs: a run on the CPU, its flags, what it does of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from odb_megatron.testing.gloo import run_replicas

pytest.importorskip("megatron.training", reason="megatron-core is not installed")
pytestmark = pytest.mark.megatron

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def _gpu() -> Any:
    sys.path.append(str(BENCHMARKS))
    import gpu

    return gpu


def _run(folder: Path, *flags: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run it from another folder; return its result and what it printed."""
    target = folder / "result.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--device", "cpu", "--json", target, *flags],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(target.read_text(encoding="utf-8")), done.stdout


def test_the_small_form(tmp_path: Path) -> None:
    result, printed = _run(tmp_path, "--steps", "5")
    assert result["complete"]
    parts = result["parts"]
    assert list(parts) == list(_gpu().PARTS)
    assert parts["environment"]["seen"]["torch"] != "-"
    assert parts["kernels"]["holds"]
    assert parts["kernels"]["seen"]["torch"]["checked"] == "ran"
    found = parts["losses"]["seen"]["packed against single"]
    assert (found["steps"], found["ok"]) == (5, True)
    assert parts["graphs"]["seen"]["one size against packed"]["ok"]
    assert parts["graphs"]["seen"]["TE graphs against one size"] == "it needs a GPU"
    rates = parts["throughput"]["seen"]
    assert rates["packed"]["padding"] == 0 < 0.3 < rates["padded"]["padding"]
    assert rates["packed over padded"] > 0
    assert parts["memory"]["seen"]["full"]["shapes"] == 1
    assert parts["interference"]["seen"]["its thread's CPU time, s"] > 0
    page = (tmp_path / "result.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        assert f"== {name}: " in printed
        assert part["title"] in page


def test_what_fails_leaves_the_rest(tmp_path: Path) -> None:
    flags = ("--parts", "losses", "throughput", "environment", "--", "--no-such-flag")
    result, _ = _run(tmp_path, *flags, code=1)
    assert result["complete"]
    assert "unrecognized arguments: --no-such-flag" in str(result["parts"]["losses"]["seen"])
    assert "error" in result["parts"]["throughput"]["seen"]["packed"]
    assert result["parts"]["environment"]["seen"]["cpus"] > 0


def test_a_difference_is_seen() -> None:
    gpu = _gpu()
    good = {"losses": [2.0, 1.0], "norms": [1.0, 1.0]}
    runs = {"packed": good, "single": good, "flash single": {"error": "no room"}}
    runs["flash packed"] = {**good, "losses": [2.0, 1.5]}
    holds, seen = gpu.losses(runs, 0.1)
    assert holds
    assert seen["flash packed against flash single"] == "no room"
    holds, seen = gpu.losses({**runs, "flash single": good}, 0.1)
    assert holds is False
    assert seen["flash packed against flash single"]["max_abs_loss_diff"] == 0.5


def test_flags_of_the_runs_for_a_gpu(tmp_path: Path) -> None:
    """Megatron and ODB take them, as far as that can be seen without one."""
    (refused,) = run_replicas(_refused, 1, tmp_path, timeout_s=120, device_layer=True)
    assert refused == {}


def _refused(rank: int, folder: Path) -> dict[str, str]:
    from argparse import Namespace
    from unittest import mock

    from odb_megatron.megatron import setup

    gpu, refused = _gpu(), {}
    values = {"device": "cuda", "steps": 50, "minutes": 1, "flags": []}
    hour = gpu.Hour(Namespace(json=folder / "result.json", **values))
    for name, run in gpu.planned(4096, gpu._TE).items():
        sys.argv = ["gpu.py", *hour._job(name, run)["flags"]]
        try:
            with (
                mock.patch.object(setup, "choose_backend"),  # it looks for a device
                mock.patch("megatron.training.global_vars.set_global_variables"),
            ):
                setup.read_args()
        except (ValueError, AssertionError) as error:
            refused[name] = str(error)
    return refused
