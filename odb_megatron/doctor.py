"""`odb-megatron doctor`: what of this machine would fail or slow a run. A dry run asks it too.

What is looked at is passed to the checks, which are functions of it. Torch and Megatron need not be
installed: a process of its own imports torch, which takes seconds and may be broken.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from odb_megatron import __version__
from odb_megatron.command import Report, new_parser, run_command
from odb_megatron.megatron import attention
from odb_megatron.megatron.versions import MAX_VERSION, MIN_VERSION, require_version

__all__ = ["FAILURE", "NOT_APPLICABLE", "OK", "WARNING", "Finding", "Load", "as_json"]
__all__ += ["check_host", "check_megatron", "check_network", "check_packages", "check_run"]
__all__ += ["check_torch", "main", "render"]

OK, WARNING, FAILURE, NOT_APPLICABLE = "ok", "warning", "failure", "not applicable"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; with a warning or a failure also what was expected, and the hint."""

    subject: str
    status: str
    observed: str
    expected: str = ""
    hint: str = ""


def _judged(
    subject: str, observed: str, expected: str, hint: str, *, fails: bool = False,
    warns: bool = False,
) -> Finding:  # fmt: skip
    if not fails and not warns:
        return Finding(subject, OK, observed)
    return Finding(subject, FAILURE if fails else WARNING, observed, expected, hint)


def render(findings: Sequence[Finding]) -> str:
    """Return the findings as lines for a terminal."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    wrap = partial(textwrap.wrap, width=100, break_long_words=False, break_on_hyphens=False)
    for finding in findings:
        status = "n/a" if finding.status == NOT_APPLICABLE else finding.status
        head, pad = f"{status:<8} {finding.subject:<{width}}  ", " " * (width + 11)
        lines += wrap(finding.observed, initial_indent=head, subsequent_indent=pad)
        if finding.expected:
            text = f"expected: {finding.expected}; hint: {finding.hint}"
            lines += wrap(text, initial_indent=pad, subsequent_indent=pad)
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as plain values."""
    counts = Counter(finding.status for finding in findings)
    return {
        "command": [],  # of versions that checked one
        "exit_code": int(counts[FAILURE] > 0),
        "counts": {status: counts[status] for status in (OK, WARNING, FAILURE, NOT_APPLICABLE)},
        "checks": [asdict(finding) for finding in findings],
    }


# --- packages --------------------------------------------------------------------------------

_NEEDED = ("numpy", "tqdm", "torch")
_SHOWN = (
    *("transformers", "tokenizers", "psutil", "transformer-engine", "flash-attn", "flash-attn-3"),
    *("nvidia-modelopt", "megatron-bridge"),
)
_PIP = "pip install 'odb-megatron[megatron]' on Python 3.12 or later"


def check_packages(versions: Mapping[str, str], *, python: tuple[int, ...]) -> Iterator[Finding]:
    """Check what is installed: versions of distributions by name, and of this Python."""
    expected = "3.12 or later: megatron.training, which pretrain scripts need, is for those"
    text, hint = ".".join(map(str, python)), "make an environment with Python 3.12"
    yield _judged("python", text, expected, hint, warns=python[:2] < (3, 12))
    yield Finding("odb-megatron", OK, __version__)
    for name in (*_NEEDED, *_SHOWN):
        observed = versions.get(name, "not installed")
        if name in versions or name not in _NEEDED:
            yield Finding(name, OK if name in versions else NOT_APPLICABLE, observed)
        else:
            hint = _PIP if name == "torch" else f"pip install {name}"
            yield Finding(name, FAILURE, observed, "needed to train", hint)
    if "psutil" not in versions:
        expected = "Megatron needs it to save torch_dist checkpoints, its default format"
        yield Finding("checkpoints", WARNING, "no psutil", expected, "pip install psutil")


def check_megatron(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the Megatron that a launched process would import.

    Args:
        found: `version` and `folder` of `megatron.core`, `has_training`; `error` where it cannot be
            imported, and `foreign`, the file of an unrelated package `megatron`.
    """
    hint = f"{_PIP}, or put a Megatron-LM checkout on PYTHONPATH"
    if "error" in found:
        observed = found["error"]
        if found["foreign"]:
            observed = f"{found['foreign']} is another package"
            hint = f"pip uninstall megatron; {hint}"
        yield Finding("megatron-core", FAILURE, observed, "NVIDIA's, needed to train", hint)
        return
    low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))
    is_old = is_new = False
    try:
        is_new = require_version(found["version"])[:2] > MAX_VERSION
    except ValueError:
        is_old = True
    observed, pip = (
        f"{found['version']} in {found['folder']}",
        f"pip install megatron-core=={high}.*",
    )
    yield _judged("megatron-core", observed, f"{low} to {high}", pip, fails=is_old, warns=is_new)
    if not found["has_training"]:
        expected = "needed by pretrain scripts"
        yield Finding("megatron.training", FAILURE, "not there", expected, hint)


# --- devices, collectives, attention ---------------------------------------------------------

_MARK = "odb-torch: "
_GLOO = "GLOO_SOCKET_IFNAME"


def look_at_torch() -> None:
    """Print what torch sees here, in a process of its own; nothing is allocated on a device."""
    import torch
    import torch.distributed as dist

    gloo = ""
    try:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        limit = datetime.timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except (AttributeError, RuntimeError, ValueError) as error:  # torch without gloo too
        gloo = str(error).splitlines()[0]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {
        "version": f"torch {torch.__version__} for CUDA {torch.version.cuda or '-'}",
        "devices": [torch.cuda.get_device_name(at) for at in range(count)],
        "has_nccl": dist.is_available() and dist.is_nccl_available(),
        "gloo_error": gloo,
        "attention": attention.absent(),
        "megatron": _look_at_megatron(),
    }
    print(f"{_MARK}{json.dumps(found)}", flush=True)


def _look_at_megatron() -> dict[str, Any]:
    try:
        core = importlib.import_module("megatron.core")
        # Behind the + is what git says of whatever checkout the package lies in.
        version = core.__version__.partition("+")[0]
        about = {"version": version, "folder": str(Path(str(core.__file__)).parent)}
        training = importlib.util.find_spec("megatron.training")
    except Exception as error:  # whatever an unrelated or broken package does
        spec = importlib.util.find_spec("megatron")
        return {"error": repr(error), "foreign": (spec.origin if spec else "") or ""}
    return {**about, "has_training": training is not None}


def _torch_facts() -> dict[str, Any]:
    code = "from odb_megatron.doctor import look_at_torch; look_at_torch()"
    command = [sys.executable, "-c", code]  # the current folder first, as a launched process
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return {"error": f"{said[-1]} (exit code {done.returncode})"}


def check_torch(found: Mapping[str, Any], *, driver: str, visible: str | None) -> Iterator[Finding]:
    """Check devices, collectives and attention backends.

    Args:
        found: see `look_at_torch`; `error` where torch cannot be imported.
        driver: version of the NVIDIA driver; empty for none.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    if "error" in found:
        hint = "install torch anew, the build for this machine's driver (pytorch.org)"
        yield Finding("torch", FAILURE, found["error"], "that 'import torch' works", hint)
        return
    devices, build = found["devices"], f"{found['version']}; driver {driver or '-'}"
    is_hidden = visible is not None and visible.strip() in ("", "-1")
    if not devices and not driver:
        yield Finding("CUDA", NOT_APPLICABLE, f"no NVIDIA driver here; {build}")
    else:
        seen = ", ".join(f"{count} × {name}" for name, count in Counter(devices).items())
        hint = "see nvidia-smi; the driver must be as new as torch's build for CUDA (pytorch.org), "
        hint += "a container needs --gpus all"
        if is_hidden:
            seen, hint = f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset CUDA_VISIBLE_DEVICES"
        observed, fails = f"{seen or 'torch sees none'}; {build}", not devices and not is_hidden
        expected = "the devices of the run"
        yield _judged("CUDA", observed, expected, hint, fails=fails, warns=not devices)
    observed, hint = "there" if found["has_nccl"] else "none", "install torch's CUDA build"
    fails = bool(devices) and not found["has_nccl"]
    yield _judged("NCCL", observed, "needed on GPUs", hint, fails=fails)
    gloo, expected = found["gloo_error"], "plans go over gloo, on GPUs too"
    hint = f"{_GLOO} with an interface that is up, or a host name that resolves to one"
    works = "a group of one process works"
    yield _judged("gloo", gloo or works, expected, hint, fails=bool(gloo))
    observed = ", ".join(f"{name}: {why or 'ok'}" for name, why in found["attention"].items())
    expected = f"a kernel for packed samples on {'cuda' if devices else 'cpu'}"
    hint = "pip install 'odb-megatron[te]' or 'odb-megatron[flash]'"
    able = [name for name, why in found["attention"].items() if not why]
    yield _judged("attention", observed, expected, hint, fails=bool(devices) and able == ["torch"])
    yield from check_megatron(found["megatron"])


# --- limits of the machine -------------------------------------------------------------------

_MIB = 1 << 20

# Four segments of 9.6 MB are in reports of NCCL's failures in containers of 64 MiB
# (NVIDIA/nccl#342, #1518); its manual has --shm-size=1g for 8 ranks.
_NCCL_MIN, _NCCL_ENOUGH = 40 * _MIB, 128 * _MIB
_WORKER = _MIB  # samples go through pipes: semaphores, 0.02 MB measured


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks of one machine: ranks on it, those that read, data-loader workers of each."""

    ranks: int = 1
    readers: int = 1
    num_workers: int = 0
    replicas: int = 1  # of the whole run
    uses_nccl: bool = True


def find_host() -> dict[str, Any]:
    """Return the limits of this machine, sizes in bytes; -1 for none."""
    adapters, shared = Path("/sys/class/infiniband"), Path("/dev/shm")
    status = os.statvfs(shared) if shared.is_dir() else None
    return {
        "shared_free": status.f_bavail * status.f_frsize if status else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "num_cores": len(os.sched_getaffinity(0)),
        "infiniband": sorted(os.listdir(adapters)) if adapters.is_dir() else [],
    }


def check_host(host: Mapping[str, Any], load: Load | None) -> Iterator[Finding]:
    """Check limits, as `find_host` has them, against what a run needs where it is known."""
    run = load or Load(ranks=8)
    workers = run.readers * run.num_workers
    nccl = run.ranks if run.uses_nccl and run.ranks > 1 else 0
    free, need = host["shared_free"], workers * _WORKER + nccl * _NCCL_ENOUGH
    observed = f"{free / _MIB:.0f} MiB free in /dev/shm"
    expected = f"{need / _MIB:.0f} MiB ({workers} workers, NCCL of {nccl} ranks)"
    hint = "start the container with --shm-size=1g or more (Kubernetes: an emptyDir of medium "
    hint += "Memory on /dev/shm), or mount -o remount,size=1g /dev/shm"
    is_short = bool(load) and free < workers * _WORKER + nccl * _NCCL_MIN
    is_small = free < (need if load else 65 * _MIB)  # a container has 64 by default
    yield _judged("shared memory", observed, expected, hint, fails=is_short, warns=is_small)
    soft, hard = (sys.maxsize if one == -1 else one for one in host["open_files"])
    # Pipes of two loaders' workers: 5 each, measured with torch 2.13; 8 gloo groups.
    need = 256 + 10 * run.num_workers + 16 * (run.replicas - 1)
    expected = f"about {need} for {run.num_workers} workers and {run.replicas} replicas"
    hint = f"ulimit -n {min(hard, 2 * need)} in the job script"
    hint = hint if hard >= need else "raise the hard limit (limits.conf, slurmd's LimitNOFILE)"
    observed = f"ulimit -n is {'unlimited' if soft == sys.maxsize else soft}"
    yield _judged("open files", observed, expected, hint, fails=2 * soft < need, warns=soft < need)
    if host["infiniband"]:
        observed, is_limited = f"ulimit -l is {host['locked_memory']}", host["locked_memory"] != -1
        hint = "ulimit -l unlimited (container: --ulimit memlock=-1; slurmd: LimitMEMLOCK)"
        expected = f"unlimited: NCCL registers its buffers with {', '.join(host['infiniband'])}"
        yield _judged("locked memory", observed, expected, hint, warns=is_limited)
    else:
        yield Finding("locked memory", NOT_APPLICABLE, "no InfiniBand or RoCE adapter here")
    observed = f"{host['num_cores']} that this process may use"
    expected = f"one for each of {run.ranks} ranks and {workers} workers"
    hint = "fewer --num-workers, or ask the scheduler for more (--cpus-per-task)"
    is_small = bool(load) and run.ranks + workers > host["num_cores"]
    yield _judged("cores", observed, expected, hint, warns=is_small)


# --- network ---------------------------------------------------------------------------------

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def find_interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of network interfaces, by name; empty for none."""
    found = dict.fromkeys((name for _, name in socket.if_nameindex()), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for name in found:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(channel.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def check_network(
    interfaces: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    resolved: str,
    num_nodes: int | None,
) -> Iterator[Finding]:
    """Check which interface gloo takes.

    Args:
        interfaces: IPv4 addresses, by name.
        environment: of the run.
        resolved: what the host's name resolves to, where gloo then listens; empty for nothing.
        num_nodes: of the run; None where it is not known.
    """
    outside = [name for name, at in interfaces.items() if at and not at.startswith("127.")]
    named = ", ".join(f"{name} {interfaces[name]}" for name in outside) or "none but loopback"
    host = f"the host's name resolves to {resolved or 'nothing'}"
    yield Finding("interfaces", OK, f"{named}; {host}")
    gloo = environment.get(_GLOO, "")
    is_wrong = any(name not in interfaces for name in gloo.split(",") if name)
    is_alone = num_nodes == 1 or (num_nodes is None and len(outside) < 2)
    is_sure = len(outside) == 1 and interfaces[outside[0]] == resolved
    leads_nowhere = num_nodes is not None and (not resolved or resolved.startswith("127."))
    is_open = not (gloo or is_alone or is_sure)
    observed, fails = f"{gloo or 'not set'}; {host}", is_wrong or (is_open and leads_nowhere)
    expected = f"the network that all nodes share, of {', '.join(sorted(interfaces))}"
    hint = f"export {_GLOO}={outside[0] if outside else 'NAME'}, or what all nodes share"
    yield _judged(_GLOO, observed, expected, hint, fails=fails, warns=is_open)


# --- the command, and the dry run ------------------------------------------------------------


def check_run(load: Load | None, *, num_nodes: int | None) -> list[Finding]:
    """Check limits and network of this machine, for a run where its load is known."""
    resolved = ""
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(socket.gethostname())
    network = check_network(find_interfaces(), os.environ, resolved=resolved, num_nodes=num_nodes)
    return [*check_host(find_host(), load), *network]


def check_machine() -> list[Finding]:
    """Check everything of this machine."""
    versions = {}
    for name in (*_NEEDED, *_SHOWN):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = list(check_packages(versions, python=sys.version_info[:3]))
    if "torch" in versions:
        driver = Path("/proc/driver/nvidia/version")
        version = driver.read_text(errors="replace").split("\n")[0] if driver.is_file() else ""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found += check_torch(_torch_facts(), driver=" ".join(version.split()), visible=visible)
    else:
        found += check_megatron({"error": "not looked for: torch is missing", "foreign": ""})
    return found + check_run(None, num_nodes=None)


def main(argv: list[str]) -> int:
    """Check this machine, print what was found; return 1 where there is a failure, else 0."""

    def work(_: argparse.Namespace) -> Report:
        findings = check_machine()
        report = as_json(findings)
        counts = [f"{count} {status}" for status, count in report["counts"].items() if count]
        text = f"{render(findings)}\n\ndoctor: {', '.join(counts)}"
        return Report(values=report, text=text, exit_code=report["exit_code"])

    parser = new_parser(
        "doctor",
        "Look at this machine for what would fail or slow a run. Exit code: 0 all well, or "
        "warnings only; 1 a failure; 2 arguments that cannot be used.",
        epilog="--odb-dry-run behind a training command checks its flags and reads its data.",
    )
    return run_command(parser, argv, work)
