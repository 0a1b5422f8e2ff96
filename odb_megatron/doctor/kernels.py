"""CUDA, NCCL and gloo as torch sees them, and the attention backends that can run here.

Must not import torch: a process of its own does (`torch_facts`). The backends are those of
`megatron.attention.registry`; what they compute is checked by `odb_megatron.testing.backends`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning
from odb_megatron.doctor.torch_facts import MARK
from odb_megatron.megatron.attention.registry import BACKENDS, select

__all__ = ["KernelFacts", "TorchFacts", "check_kernels", "gather_kernels", "run_backends"]

_LOOK_S = 120.0
_RUN_S = 900.0
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says.

    Attributes:
        version: torch's.
        cuda: that it was built for; empty for none.
        hip: ROCm that it was built for; empty for none.
        devices: names of the CUDA devices it sees.
        capability: (major, minor) of the first one.
        has_gloo: whether it has gloo.
        gloo_error: why a gloo group of one process failed; empty where it did not.
        nccl: version; empty for none.
    """

    version: str
    cuda: str = ""
    hip: str = ""
    devices: tuple[str, ...] = ()
    capability: tuple[int, ...] = ()
    has_gloo: bool = True
    gloo_error: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """Devices and backends.

    Attributes:
        torch: None where there is none, or it cannot be imported.
        torch_error: why not; empty where it is not installed.
        driver: first line of the NVIDIA driver's version; empty where none is loaded.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        unavailable: of each attention backend why it cannot run, empty where it can.
    """

    torch: TorchFacts | None = None
    torch_error: str = ""
    driver: str = ""
    visible: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def gather_kernels(environment: Mapping[str, str], *, has_torch: bool) -> KernelFacts:
    """Look at this machine.

    Args:
        environment: of the run.
        has_torch: whether torch is installed.
    """
    found, error = _look(environment) if has_torch else (None, "")
    driver = ""
    if _DRIVER.is_file():
        driver = (_DRIVER.read_text(errors="replace").splitlines() or [""])[0]
    return KernelFacts(
        torch=found,
        torch_error=error,
        driver=" ".join(driver.replace("NVRM version:", "").split()),
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
        unavailable={name: backend.available() or "" for name, backend in BACKENDS.items()},
    )


def check_kernels(facts: KernelFacts, *, on_gpu: bool) -> list[Finding]:
    """Check devices, collectives and backends.

    Args:
        facts: the machine's.
        on_gpu: whether the run is on GPUs.
    """
    if facts.torch is None:
        if not facts.torch_error:
            return [not_applicable("CUDA, NCCL, gloo", "torch is not installed")]
        return [
            failure(
                "torch",
                facts.torch_error,
                expected="that 'import torch' works",
                way_out="install torch anew, the build for this machine's driver (pytorch.org)",
            )
        ]
    return [
        _cuda(facts, facts.torch),
        _nccl(facts.torch),
        _gloo(facts.torch),
        _attention(facts, facts.torch, on_gpu=on_gpu),
    ]


def run_backends(environment: Mapping[str, str]) -> list[Finding]:
    """Run every backend that can run here against a float64 reference; takes a minute."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "backends.json"
        command = [sys.executable, "-m", "odb_megatron.testing.backends", "--json", str(out)]
        done = _run(command, environment, _RUN_S)
        if not out.is_file():
            expected, way_out = "a report on each backend", f"run {' '.join(command[1:])}"
            return [failure("kernels", done, expected=expected, way_out=way_out)]
        report = json.loads(out.read_text(encoding="utf-8"))
    found = []
    for name, one in report["backends"].items():
        subject = f"kernel {name}"
        if not one["ok"]:
            expected = "the reference's result"
            way_out = "choose another by --odb-attention, and report this"
            found.append(failure(subject, _told(one), expected=expected, way_out=way_out))
        elif one["checked"] == "ran":
            found.append(fine(subject, _told(one)))
        else:
            found.append(not_applicable(subject, _told(one)))
    return found


def _told(one: Mapping[str, Any]) -> str:
    number = one["max_abs_diff"] if one["checked"] == "ran" else one["contract_diff"]
    figure = "" if number is None else f", largest difference {number:.1e}"
    return f"{one['checked']}: {one['reason']}{figure}"


def _cuda(facts: KernelFacts, torch: TorchFacts) -> Finding:
    if torch.devices:
        names = sorted({f"{torch.devices.count(name)} × {name}" for name in torch.devices})
        capability = ".".join(map(str, torch.capability))
        seen = f"{', '.join(names)}, capability {capability}, CUDA {torch.cuda}"
        return fine("CUDA", f"{seen}; driver {facts.driver}" if facts.driver else seen)
    if not facts.driver:
        return not_applicable(
            "CUDA", f"no NVIDIA driver here; torch is for CUDA {torch.cuda or '-'}"
        )
    if not torch.cuda:
        return failure(
            "CUDA",
            f"driver {facts.driver}, and torch {torch.version} is a build without CUDA",
            expected="a build for CUDA",
            way_out="install torch from the index of its CUDA build (pytorch.org)",
        )
    if facts.visible is not None and facts.visible.strip() in ("", "-1"):
        return warning(
            "CUDA",
            f"CUDA_VISIBLE_DEVICES is {facts.visible!r}: torch sees no device",
            expected="the devices of the run",
            way_out="unset CUDA_VISIBLE_DEVICES",
        )
    return failure(
        "CUDA",
        f"driver {facts.driver}, and torch {torch.version} for CUDA {torch.cuda} sees no device",
        expected="a device",
        way_out="see nvidia-smi; a driver older than the build needs an older torch, a container "
        "--gpus all",
    )


def _nccl(torch: TorchFacts) -> Finding:
    if torch.nccl:
        return fine("NCCL", torch.nccl)
    if not torch.devices:
        return not_applicable("NCCL", "no CUDA device")
    way_out = "install torch's CUDA build for Linux"
    return failure("NCCL", "torch has none", expected="needed on GPUs", way_out=way_out)


def _gloo(torch: TorchFacts) -> Finding:
    if not torch.has_gloo:
        expected = "plans go over gloo, on GPUs too"
        way_out = "install torch's build for Linux"
        return failure("gloo", "torch has none", expected=expected, way_out=way_out)
    if torch.gloo_error:
        return failure(
            "gloo",
            torch.gloo_error,
            expected="a group of one process on this host",
            way_out="set GLOO_SOCKET_IFNAME to an interface that is up, or let the host's name "
            "resolve to its address",
        )
    return fine("gloo", "a group of one process works")


def _attention(facts: KernelFacts, torch: TorchFacts, *, on_gpu: bool) -> Finding:
    device = "cuda" if on_gpu else "cpu"
    able = [name for name, why in facts.unavailable.items() if not why]
    seen = ", ".join(f"{name}: {why or 'ok'}" for name, why in facts.unavailable.items())
    wanted = [name for name in able if device in BACKENDS[name].auto_devices]
    if not wanted:
        return failure(
            "attention",
            seen,
            expected=f"a backend that --odb-attention auto may choose on {device}",
            way_out="pip install 'odb-megatron[te]' or 'odb-megatron[flash]', or torch 2.11",
        )
    if on_gpu and not torch.devices:
        return fine("attention", f"{seen} (which can run on a GPU shows there)")
    return fine("attention", f"auto would choose {_chosen(facts, device)}; {seen}")


def _chosen(facts: KernelFacts, device: str) -> str:
    """Return the first backend that would be chosen, by the facts and not by this machine."""
    given = {
        name: replace(backend, why_unavailable=partial(_why, facts.unavailable[name]))
        for name, backend in BACKENDS.items()
        if name in facts.unavailable
    }
    return select("auto", device_type=device, backends=given).name


def _why(text: str) -> str | None:
    return text or None


def _look(environment: Mapping[str, str]) -> tuple[TorchFacts | None, str]:
    command = [sys.executable, "-m", "odb_megatron.doctor.torch_facts"]
    text = _run(command, environment, _LOOK_S)
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    if not lines:
        return None, (text.strip().splitlines() or ["it ended without a word"])[-1]
    values = json.loads(lines[-1].removeprefix(MARK))
    devices, capability = (tuple(values.pop(name)) for name in ("devices", "capability"))
    return TorchFacts(devices=devices, capability=capability, **values), ""


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a command; return what it printed, errors last."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {timeout_s:g} s"
    if done.returncode < 0:
        return f"{done.stdout}\n{done.stderr}\nended by signal {-done.returncode}"
    return f"{done.stdout}\n{done.stderr}"
