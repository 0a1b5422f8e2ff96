"""Shared memory, open files, locked memory and cores of this machine, against what a run needs.

Must not start anything. What was measured is said where it is used; the rest is in docs/doctor.md.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning

__all__ = ["HostFacts", "Load", "check_host", "gather_host"]

UNLIMITED = -1
_MIB = 1 << 20
_SHARED = "/dev/shm"

NCCL_LEAST = 40 * _MIB
"""Shared memory of a rank without which NCCL is likely to fail: four segments of 9.6 MB, their size
in reports of its failures in containers of 64 MiB (NVIDIA/nccl#342, #1518)."""

NCCL_ENOUGH = 128 * _MIB
"""Of a rank, to be safe: 1 GiB for 8 ranks, as NCCL's manual has it (`--shm-size=1g`)."""

WORKER_LEAST = _MIB
"""Of a worker whose samples go through pipes, as with --odb: semaphores, 0.02 MB measured."""

_ITEM_BYTES = 28
"""Of a token of Megatron's padded items: three int64 and a float32 (`data.padded`)."""

_IN_FLIGHT = 3
"""Batches of a worker that are made and not yet taken: torch's prefetch factor of 2, and one."""

_FILES_BASE = 256
_FILES_PER_WORKER = 5  # pipes, a sentinel: 20 for 4 workers, measured with torch 2.13
_FILES_PER_PEER = 2
_GLOO_GROUPS = 8  # of ODB's loaders 5, of Megatron 3
_LOADERS = 2  # training and validation


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Limits of this machine; `UNLIMITED` for none.

    Attributes:
        shared_total: bytes of /dev/shm; 0 where there is none.
        shared_free: free ones.
        open_files: soft and hard limit of a process.
        locked_memory: soft limit in bytes.
        infiniband: names of adapters.
        num_cores: that this process may use.
    """

    shared_total: int
    shared_free: int
    open_files: tuple[int, int]
    locked_memory: int
    infiniband: tuple[str, ...] = ()
    num_cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run asks of one machine.

    Attributes:
        ranks: processes on it.
        readers: those of them that read data.
        num_workers: `--num-workers`.
        replicas: of the whole run.
        uses_nccl: whether ranks talk by NCCL.
        batch_tokens: tokens of a padded batch that workers hand over in shared memory; 0 with
            `--odb`, whose samples go through pipes.
    """

    ranks: int
    readers: int = 1
    num_workers: int = 0
    replicas: int = 1
    uses_nccl: bool = True
    batch_tokens: int = 0


def gather_host() -> HostFacts:
    """Look at this machine."""
    total = free = 0
    if os.path.isdir(_SHARED):
        status = os.statvfs(_SHARED)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    folder = Path("/sys/class/infiniband")
    return HostFacts(
        shared_total=total,
        shared_free=free,
        open_files=_limits(resource.RLIMIT_NOFILE),
        locked_memory=_limits(resource.RLIMIT_MEMLOCK)[0],
        infiniband=tuple(sorted(os.listdir(folder))) if folder.is_dir() else (),
        num_cores=len(os.sched_getaffinity(0)),
    )


def check_host(facts: HostFacts, load: Load | None) -> list[Finding]:
    """Check limits.

    Args:
        facts: the machine's.
        load: the run's; None where none is known, and only what is there can be told.
    """
    return [
        _shared_memory(facts, load),
        _open_files(facts, load),
        _locked_memory(facts),
        _cores(facts, load),
    ]


def _shared_memory(facts: HostFacts, load: Load | None) -> Finding:
    subject, seen = "shared memory", f"{_size(facts.shared_free)} free in {_SHARED}"
    way_out = (
        "start the container with --shm-size=1g or more (Kubernetes: an emptyDir of medium Memory "
        f"on {_SHARED}), or mount -o remount,size=1g {_SHARED}"
    )
    if load is None:
        if facts.shared_total > 64 * _MIB:
            return fine(subject, seen)
        expected = "more than the 64 MiB that a container has by default: NCCL needs about 1 GiB"
        return warning(subject, seen, expected=expected, way_out=way_out)
    workers = load.readers * load.num_workers
    each = max(WORKER_LEAST, _ITEM_BYTES * load.batch_tokens * _IN_FLIGHT)
    own, nccl = workers * each, load.ranks if load.uses_nccl and load.ranks > 1 else 0
    parts = [f"{workers} workers × {_size(each)}"] if workers else []
    if nccl:
        parts.append(f"NCCL: {nccl} ranks × {_size(NCCL_ENOUGH)}")
    if not parts:
        return fine(subject, f"{seen}; this run needs none")
    expected = f"{_size(own + nccl * NCCL_ENOUGH)} ({', '.join(parts)})"
    if load.batch_tokens and workers:
        way_out += "; or fewer --num-workers"
    if facts.shared_free < own + nccl * NCCL_LEAST:
        return failure(subject, seen, expected=expected, way_out=way_out)
    if facts.shared_free < own + nccl * NCCL_ENOUGH:
        return warning(subject, seen, expected=expected, way_out=way_out)
    return fine(subject, f"{seen}; needed: {expected}")


def _open_files(facts: HostFacts, load: Load | None) -> Finding:
    soft, hard = facts.open_files
    limits = "unlimited" if soft == UNLIMITED else f"{soft}"
    if hard != soft:
        limits += f" (hard limit {'unlimited' if hard == UNLIMITED else hard})"
    subject, seen = "open files", f"ulimit -n is {limits}"
    workers, replicas = (load.num_workers, load.replicas) if load else (0, 1)
    need = (
        _FILES_BASE
        + _FILES_PER_WORKER * _LOADERS * workers
        + _FILES_PER_PEER * _GLOO_GROUPS * (replicas - 1)
    )
    expected = f"about {need} for {workers} workers and {replicas} replicas"
    if soft == UNLIMITED or soft >= need:
        return fine(subject, seen if load is None else f"{seen}; needed: {expected}")
    raised = min(max(2 * need, 4096), hard) if hard != UNLIMITED else max(2 * need, 4096)
    way_out = f"ulimit -n {raised} in the job script"
    if hard != UNLIMITED and hard < need:
        way_out = "raise the hard limit (limits.conf, LimitNOFILE of slurmd or the container)"
    report = failure if 2 * soft < need else warning
    return report(subject, seen, expected=expected, way_out=way_out)


def _locked_memory(facts: HostFacts) -> Finding:
    subject = "locked memory"
    if not facts.infiniband:
        return not_applicable(subject, "no InfiniBand or RoCE adapter here")
    adapters = ", ".join(facts.infiniband)
    if facts.locked_memory == UNLIMITED:
        return fine(subject, f"unlimited, for {adapters}")
    return warning(
        subject,
        f"ulimit -l is {facts.locked_memory // 1024} kB, and there are {adapters}",
        expected="unlimited: NCCL registers its buffers with the adapter",
        way_out="ulimit -l unlimited (container: --ulimit memlock=-1; slurmd: LimitMEMLOCK)",
    )


def _cores(facts: HostFacts, load: Load | None) -> Finding:
    subject, seen = "cores", f"{facts.num_cores} that this process may use"
    if load is None:
        return fine(subject, seen)
    processes = load.ranks + load.readers * load.num_workers
    need = f"{load.ranks} ranks and {load.readers * load.num_workers} workers"
    if processes <= facts.num_cores:
        return fine(subject, f"{seen}, for {need}")
    return warning(
        subject,
        seen,
        expected=f"one for each of {need}",
        way_out="fewer --num-workers, or ask the scheduler for more (--cpus-per-task)",
    )


def _limits(name: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(name)
    return tuple(UNLIMITED if one == resource.RLIM_INFINITY else one for one in (soft, hard))  # type: ignore[return-value]


def _size(num_bytes: int) -> str:
    if num_bytes < 1024 * _MIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / 1024 / _MIB:.1f} GiB"
