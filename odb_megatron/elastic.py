"""torchrun that ends a failed run with one reason, last and once, and `odb-megatron pretrain`.

A rank that fails leaves its reason in the file that the launcher gives it
(`TORCHELASTIC_ERROR_FILE`, torch/distributed/elastic/multiprocessing/errors). Imports torch only in
`main`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["launch", "leave_reason", "main", "pretrain", "reason_left"]

USAGE_ERROR = 2
"""Exit code of a process whose arguments cannot be used, as argparse has it."""

MISSING = 1
"""Exit code where a package is missing that a run needs."""

_CLOSE_S = 30  # after a failure, torch's launcher sends SIGTERM, and SIGKILL so much later
_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "odb_megatron"


def leave_reason(text: str, *, is_told: bool = False, code: int = 1) -> bool:
    """Leave the reason of this rank's failure to the launcher; the first one left stays.

    Args:
        text: the reason.
        is_told: this rank only heard of another's failure.
        code: exit code that it is about to end with.

    Returns:
        Whether there is a launcher that will print it: a caller prints it itself if not.
    """
    path = os.environ.get(_FILE)
    if not path or path == os.devnull:
        return False
    rank, now = int(os.environ.get("RANK", "0")), time.time_ns()  # torch's times are whole seconds
    reason = {"rank": rank, "text": text, "is_told": is_told, "time_ns": now, "code": code}
    about = {"py_callstack": text, "timestamp": str(now // 10**9), _KEY: reason}
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
    device = "cpu: Megatron on the CPU, for tests and demos; refused where torch sees a GPU"
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help=device)
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="processes (default 1)"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options, flags = parser.parse_known_args(argv[:end])
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is no number of at least 1")
    sys.path.insert(0, os.getcwd())  # where the processes look first
    missing = []
    for name in ("torch", "megatron.training"):
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # not even its parent
            is_there = False
        missing += [name] * (not is_there)
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
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as failed:
        first, reason = _first_to_fail(failed)
        code = failed.failures[first].exitcode
        if code < 0 and reason and (code == -signal.SIGTERM or reason["rank"] == first):
            code = reason["code"]  # it was ended by the launcher before it had ended itself
        print(f"\nodb: {_described(reason, rank=first, code=code)}", file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


def _first_to_fail(failed: ChildFailedError) -> tuple[int, dict[str, Any] | None]:
    """The rank that failed first, and the reason that came first; one that was told comes last.

    A rank that left nothing before the errors of the others is the one that they name.
    """
    first, failure = failed.get_first_failure()
    reasons = []
    files = [one.error_file for one in failed.failures.values() if os.path.isfile(one.error_file)]
    # ATTEMPT/LOCAL_RANK/error.json; a rank that is still ending has left its reason beside.
    for path in Path(files[0]).parent.parent.glob("*/error.json") if files else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # Else it is half written, or written by another than `leave_reason`.
            found = json.loads(path.read_text(encoding="utf-8"))
            reasons.append(found["message"]["extraInfo"][_KEY])
    reason = min(reasons, key=lambda one: (one["is_told"], one["time_ns"]), default=None)
    if reason is None or reason["is_told"]:
        for rank, one in failed.failures.items():
            late = failure.timestamp + _CLOSE_S
            by_launcher = one.exitcode == -signal.SIGTERM or one.timestamp >= late
            if not os.path.isfile(one.error_file) and not by_launcher:
                return rank, None
    return first, reason


def _described(reason: dict[str, Any] | None, *, rank: int, code: int) -> str:
    silent = "and left no reason: see what it printed above"
    if code < 0:  # what others left is a consequence
        name = signal.Signals(-code).name
        memory = ", and whether the machine ran out of memory" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name} {silent}{memory}"
    if reason is None:
        return f"rank {rank} ended with exit code {code} {silent}"
    if code == USAGE_ERROR:
        return f"error: {reason['text']}"
    return f"rank {reason['rank']} failed, its traceback is above: {reason['text']}"


if __name__ == "__main__":
    sys.exit(main())
