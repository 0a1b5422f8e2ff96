"""torchrun that ends a failed run with one reason, last and once, and `odb-megatron pretrain`.

A rank that fails leaves its reason in the file that the launcher gives it
(`TORCHELASTIC_ERROR_FILE`, torch/distributed/elastic/multiprocessing/errors). Must not interpret a
script's arguments, and must not import torch before `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["Reason", "launch", "leave_reason", "main", "pretrain", "reason_left"]

USAGE_ERROR = 2
"""Exit code of a process whose arguments cannot be used, as argparse has it."""

MISSING = 1
"""Exit code where a package is missing that a run needs."""

_GRACE_S = 10.0
"""For what the ranks of a run that succeeded leave behind."""

_MAX_S = 5.0
_CLOSE_S = 30  # after a failure, torch's launcher sends SIGTERM, and SIGKILL so much later
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "odb_megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a rank failed.

    Attributes:
        rank: global rank.
        text: what was seen, expected, and the hint.
        is_told: the rank only heard of another's failure, and `text` may be cut.
        time_ns: when.
        code: exit code that the rank is about to end with.
    """

    rank: int
    text: str
    is_told: bool
    time_ns: int
    code: int = 1


def leave_reason(text: str, *, is_told: bool = False, code: int = 1) -> bool:
    """Leave the reason of this rank's failure to the launcher; the first one left stays.

    Args:
        text: the reason.
        is_told: see `Reason`.
        code: see `Reason`.

    Returns:
        Whether there is a launcher that will print it: a caller prints it itself if not.
    """
    path = os.environ.get(_FILE)
    if not path or path == os.devnull:
        return False
    now = time.time_ns()
    rank = int(os.environ.get("RANK", "0"))
    reason = Reason(rank=rank, text=text, is_told=is_told, time_ns=now, code=code)
    about = {"py_callstack": text, "timestamp": str(now // 1_000_000_000)}
    about |= {_KEY: asdict(reason)}  # type: ignore[dict-item]
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def reason_left() -> Iterator[None]:
    """Leave the reason of an error that is raised within."""
    try:
        yield
    except Exception as error:
        leave_reason(f"{type(error).__name__}: {error}")
        raise


def pretrain(argv: Sequence[str]) -> int:
    """Run the package's own pretrain script in processes of this machine; see `main`.

    Args:
        argv: arguments behind `odb-megatron pretrain`: options at any place, and the script's.

    Raises:
        SystemExit: arguments that do not parse (2), or `--help` (0).
    """
    parser = argparse.ArgumentParser(
        prog="odb-megatron pretrain",
        description="Pretrain or fine-tune a GPT with Megatron, in N processes of this machine (on "
        "several, torchrun -m odb_megatron.megatron.pretrain). Flags that are not listed here are "
        "Megatron's and ODB's: 'odb-megatron pretrain --device cpu -- --help' lists them (without "
        "--device cpu where there is a GPU).",
        usage="%(prog)s [options] [--] [FLAGS...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="cpu: Megatron on the CPU, for tests and demos; refused where torch sees a GPU",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="processes (default 1)"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options, flags = parser.parse_known_args(argv[:end])
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is no number of at least 1")
    missing = [name for name in ("torch", "megatron.training") if not _is_there(name)]
    if missing:
        print(
            f"odb-megatron: {' and '.join(missing)} not found by {sys.executable}: "
            "pip install 'odb-megatron[megatron]' on Python 3.12 or later, or put a Megatron-LM "
            "checkout on PYTHONPATH; 'odb-megatron doctor' looks at the whole machine",
            file=sys.stderr,
        )
        return MISSING
    script = ["-m", "odb_megatron.megatron.pretrain", *flags, *argv[end + 1 :]]
    return launch(script, num_processes=options.nproc_per_node, device=options.device)


def _is_there(module: str) -> bool:
    """Whether the processes find a module; they look in the current folder first."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False
    finally:
        sys.path.pop(0)


def launch(script: Sequence[str], *, num_processes: int, device: str) -> int:
    """Run a script, or `-m` and a module, in processes of this machine; see `main`.

    Args:
        script: with its arguments.
        num_processes: how many.
        device: `cpu` for Megatron on the CPU, which processes share; else as the script does it.
    """
    runner = []
    if device == "cpu":
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        runner = ["-m", "odb_megatron.cpu"]
    return main(["--standalone", f"--nproc-per-node={num_processes}", *runner, *script])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torch.distributed.run`; return the exit code of the rank that failed first.

    Args:
        argv: arguments of torchrun; those of this process by default.

    Returns:
        0; a failed rank's exit code; 128 + signal number where a signal ended it, or the launcher.

    Raises:
        SystemExit: arguments that torchrun does not know.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = torchrun.parse_args(argv)  # type: ignore[no-untyped-call]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
        options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    _adopt_orphans()
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except SignalException as stop:
        _end_orphans(grace_s=0.0)
        return 128 + int(stop.sigval)
    except ChildFailedError as failed:
        _end_orphans(grace_s=0.0)  # before the reason: they print, too
        first, reason = _first_to_fail(failed)
        code = failed.failures[first].exitcode
        if code < 0 and reason is not None and (code == -signal.SIGTERM or reason.rank == first):
            code = reason.code  # it was ended by the launcher before it had ended itself
        print(f"\nodb: {describe(reason, rank=first, code=code)}", file=sys.stderr)
        return code if code > 0 else 128 - code
    _end_orphans(grace_s=_GRACE_S)
    return 0


def _first_to_fail(failed: ChildFailedError) -> tuple[int, Reason | None]:
    """The rank that failed first and the reason that came first: torch's times are whole seconds.

    A rank that left nothing before the others were told of a failure is the one they were told of.
    """
    first, failure = failed.get_first_failure()
    told_s = failure.timestamp
    files = [one.error_file for one in failed.failures.values() if os.path.isfile(one.error_file)]
    reason = first_reason(files[0]) if files else None
    if reason is None or reason.is_told:
        for rank, one in failed.failures.items():
            by_launcher = one.exitcode == -signal.SIGTERM or one.timestamp >= told_s + _CLOSE_S
            if not os.path.isfile(one.error_file) and not by_launcher:
                return rank, None
    return first, reason


def _adopt_orphans() -> None:
    """Become the parent of processes whose own one ends: those of a rank that was killed."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_orphans(*, grace_s: float) -> None:
    """Kill what ended ranks have left, such as the servers of Megatron's checkpoint writers.

    Args:
        grace_s: time to end by themselves, as a logger that still uploads does.
    """
    started, left = time.monotonic(), set[int]()
    while left := left | {pid for pid in _children() if _is_of_a_rank(pid)}:
        waited = time.monotonic() - started
        if waited > grace_s + _MAX_S:  # not even SIGKILL ends what hangs in a device
            return
        if waited >= grace_s:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = {pid for pid in left if not _has_ended(pid)}  # their children come to us then


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except OSError:
        return True


def _children() -> list[int]:
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += [int(pid) for pid in children.read_text().split()]
    return found


def _is_of_a_rank(pid: int) -> bool:
    try:
        return b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def describe(reason: Reason | None, *, rank: int, code: int) -> str:
    """Return a failure in words.

    Args:
        reason: what was left, None for nothing.
        rank: the rank that ended first.
        code: its exit code, negative for a signal.
    """
    silent = "and left no reason: see what it printed above"
    if code < 0:  # what others left is a consequence
        name = signal.Signals(-code).name
        memory = ", and whether the machine ran out of memory" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name} {silent}{memory}"
    if reason is None:
        return f"rank {rank} ended with exit code {code} {silent}"
    if code == USAGE_ERROR:
        return f"error: {reason.text}"
    return f"rank {reason.rank} failed, its traceback is above: {reason.text}"


def first_reason(error_file: str) -> Reason | None:
    """Return the reason that came first on this node; one that was only told comes last.

    Args:
        error_file: of the rank that ended first: `ATTEMPT/LOCAL_RANK/error.json`. A rank that
            failed before it, but is still ending, has left its reason beside.
    """
    files = Path(error_file).parent.parent.glob("*/error.json")
    reasons = [reason for reason in map(_read, sorted(files)) if reason is not None]
    return min(reasons, key=lambda reason: (reason.is_told, reason.time_ns), default=None)


def _read(path: Path) -> Reason | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Reason(**found["message"]["extraInfo"][_KEY])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # half written, or written by another than `leave_reason`


if __name__ == "__main__":
    sys.exit(main())
