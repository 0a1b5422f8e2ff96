"""What becomes of a run when a rank dies, stops or is signalled, or a data-loader worker fails.

Real `pretrain()` runs on the CPU, each in processes of its own (gloo), two replicas. A run that
hangs, leaves a process or does not name the cause makes the exit code 1.

    python benchmarks/faults.py --json faults.json
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from common import ROOT, ModelSize, parser_of, write_json

from odb_megatron.comm.watchdog import PEER_LOST

SCRIPT = Path(__file__).parent / "fault_script.py"
NUM_STEPS = 12
MODEL = ModelSize(num_layers=2, hidden=32, num_heads=2, ffn_hidden=64, seq_length=64)
_FLAGS = shlex.split(f"""
    --seed 1234 --lr 1e-3 --micro-batch-size 1 --global-batch-size 8 --odb
    --train-samples {8 * NUM_STEPS} --tokenizer-type NullTokenizer --vocab-size 127
    --eval-interval 1000 --eval-iters 0 --log-interval 1
""")
_START_S = 180.0
_ORPHAN_S = 12.0
"""Workers look for their parent every 5 s."""


class FaultRun(NamedTuple):
    """How a run ended.

    Attributes:
        seconds_to_exit: from the fault to the end of the last rank.
        exit_codes: of all ranks; negative for a signal, None for one that had to be killed.
        outputs: what each rank printed.
        orphans: processes of the run that were left after all ranks had ended.
        shm_left: files of the run's processes in /dev/shm.
        files: what lies in the folder of `--save`.
    """

    seconds_to_exit: float
    exit_codes: tuple[int | None, ...]
    outputs: tuple[str, ...]
    orphans: int
    shm_left: int
    files: tuple[str, ...]


def run_fault(
    kind: str,
    *,
    num_ranks: int = 2,
    victim: int = 1,
    flags: Sequence[str] = (),
    send: Sequence[tuple[int, float]] = (),
    limit_s: float = 120.0,
    to_all: bool = False,
    environment: Mapping[str, str] | None = None,
) -> FaultRun:
    """Run and return how it ended.

    Args:
        kind: see `fault_script`.
        num_ranks: processes.
        victim: the rank it happens to.
        flags: more flags; `SAVE` stands for a folder.
        send: signals sent to the victim once it has noted the fault, and seconds to wait after
            each.
        limit_s: ranks that run longer after the fault are killed.
        to_all: the signals go to all ranks, as a terminal's do.
        environment: more variables.
    """
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_PORT": str(_free_port()), "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    shared["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SCRIPT.parent), *sys.path])
    with tempfile.TemporaryDirectory(prefix="odb-faults-") as name:
        folder, world = Path(name), list[subprocess.Popen[bytes]]()
        saved, fault = folder / "save", folder / "fault"
        more = [str(saved) if flag == "SAVE" else flag for flag in flags]
        line = [sys.executable, str(SCRIPT), kind, str(victim), name, *MODEL.flags(), *_FLAGS]
        try:
            for rank in range(num_ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with (folder / f"output{rank}").open("wb") as output:
                    process = subprocess.Popen(
                        [*line, *more],
                        env={**os.environ, **shared, **place},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                world.append(process)
            limit = time.monotonic() + _START_S
            while not fault.exists() and time.monotonic() < limit and _live(world):
                time.sleep(0.02)
            began = float(fault.read_text().split()[0]) if fault.exists() else time.time()
            for number, pause_s in send:
                for process in world if to_all else [world[victim]]:
                    process.send_signal(number)  # nothing, if it has ended
                time.sleep(pause_s)
            pids = [one.pid for process in world for one in _session(process.pid)]
            while time.time() < began + limit_s and _live(world):
                time.sleep(0.02)
            codes, ended = tuple(process.poll() for process in world), time.time()
            for process in _live(world):
                process.send_signal(signal.SIGUSR1)
            orphans = _count_left(world)
            shm_left = [n for n in os.listdir("/dev/shm") if any(f"_{p}_" in n for p in pids)]
        finally:
            for process in world:
                for one in _session(process.pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
        outputs = [(folder / f"output{rank}").read_bytes() for rank in range(num_ranks)]
        files = tuple(sorted(str(path.relative_to(saved)) for path in saved.rglob("*")))
    texts = tuple(output.decode(errors="replace") for output in outputs)
    return FaultRun(round(ended - began, 2), codes, texts, orphans, len(shm_left), files)


def _free_port() -> int:
    """Return a port that the system gives to nobody until rank 0 listens, seconds from now."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    given = range(int(limits[0]), int(limits[1]) + 1)
    while True:
        port = random.randrange(5000, 65000)
        with socket.socket() as found, contextlib.suppress(OSError):
            if port not in given:
                found.bind(("127.0.0.1", port))
                return port


def _live(world: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in world if process.poll() is None]


def _count_left(world: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return how many processes are left besides ranks that have not ended."""
    ranks = {process.pid for process in world}
    limit = time.monotonic() + _ORPHAN_S
    while True:
        left = [one for rank in ranks for one in _session(rank) if one.pid not in ranks]
        if not left or time.monotonic() > limit:
            print(*(f"left: {one}\n" for one in left), end="", flush=True)
            return len(left)
        time.sleep(0.2)


def _session(leader: int) -> Iterator[psutil.Process]:
    """Yield the living processes of a session; one without a command line has all but left."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.cmdline():
                yield process


# --- the cases ---------------------------------------------------------------------------------

VICTIM = 1
MOST_S = 15.0
"""Seconds after which no rank of a run that has lost one may be left."""

_LIMIT_S = 180.0
_BAD_RECORD = r"train dataset:\d+: "


Judge = Callable[[FaultRun], bool]


def _others(pattern: str) -> Judge:
    """Whether every rank but the victim says so, `V` being the victim's rank."""
    regex = re.compile(pattern.replace("V", str(VICTIM)))
    return lambda run: all(
        regex.search(text) for rank, text in enumerate(run.outputs) if rank != VICTIM
    )


def _one(pattern: str) -> Judge:
    """Whether one rank says so, with the place, and the others which replica it was."""
    regex, told = re.compile(pattern, re.DOTALL), re.compile(r"replica \d failed: ")
    return lambda run: (
        any(regex.search(text) for text in run.outputs)
        and all(regex.search(text) or told.search(text) for text in run.outputs)
    )


def _saves(run: FaultRun) -> bool:
    """Whether a checkpoint was saved; the data's state is a part of it."""
    return any("metadata.json" in name for name in run.files)


_GONE = _others(r"rank V \(replica V, .*\) is gone")
_LEFT = _others(r"rank V \(replica V, .*\) has left the run early")
_STOPPED = _one(
    r"warning: .*the trainer waits for the step loop's process .*"
    r"the trainer has waited \d+ s \(--odb-timeout-s 20\)"
)
"""While the wait lasts, and as the error that ends it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and what has to follow.

    Attributes:
        kind: see `fault_script`.
        names: whether the cause is named.
        flags: of the run.
        send: signals to the victim, each with the seconds to wait after it.
        is_survived: all ranks must end with 0.
        is_dead_peer: the victim is gone; the others have `MOST_S`.
        slow_s: see `fault_script`.
        num_ranks: replicas; of one the rank itself is the victim.
    """

    kind: str
    names: Judge
    flags: tuple[str, ...] = ()
    send: tuple[tuple[int, float], ...] = ()
    is_survived: bool = False
    is_dead_peer: bool = False
    slow_s: float = 0.0
    num_ranks: int = 2


_SLOW = "--odb-timeout-s 9 --eval-interval 6 --eval-iters 1 --save SAVE --save-interval 6"
_SHORT = ("--odb-timeout-s", "20")

CASES = {
    "killed_in_step": Case("killed_in_step", _GONE, is_dead_peer=True),
    "killed_while_planning": Case("killed_planning", _GONE, is_dead_peer=True),
    "killed_in_device_call": Case("device_call", _GONE, is_dead_peer=True),
    "leaves_in_step": Case("leaves_in_step", _LEFT, is_dead_peer=True),
    "leaves_between": Case("leaves_between", _LEFT, is_dead_peer=True),
    "paused": Case(
        "waits",
        _others(r"warning: rank V \(.*\) has not answered since"),
        flags=("--odb-timeout-s", "40"),
        send=((signal.SIGSTOP, 20.0), (signal.SIGCONT, 0.0)),
        is_survived=True,
    ),
    "worker_raises": Case(
        "worker_raises",
        _one(_BAD_RECORD + r"record 45 raised KeyError.*Original traceback.*fault_script\.py"),
    ),
    "worker_killed": Case("worker_killed", _one(r"worker has ended .*record 45 of train dataset")),
    "worker_hangs": Case(
        "worker_hangs",
        _one(_BAD_RECORD + r".*record 45 of train dataset\) took longer.*time\.sleep"),
        flags=_SHORT,
    ),
    "worker_stopped": Case("worker_stopped", _STOPPED, flags=_SHORT, num_ranks=1),
    "armed_faulthandler": Case("armed", lambda _: True, is_survived=True),
    "dataset_returns_none": Case("worker_none", _one(_BAD_RECORD + "item is a NoneType")),
    "sigterm": Case(
        "waits",
        _saves,
        flags=("--exit-signal-handler", "--save", "SAVE", "--save-interval", "1000"),
        send=((signal.SIGTERM, 0.0),),
        is_survived=True,
    ),
    "slow_evaluation_and_save": Case(
        "slow",
        lambda run: _saves(run) and "validation loss at iteration 6" in "".join(run.outputs),
        flags=tuple(_SLOW.split()),
        is_survived=True,
        slow_s=12.0,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the cases; 1 if one did not end as it has to."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE")
    options = parser.parse_args(argv)
    results: dict[str, dict[str, object]] = {}
    for name in options.only or CASES:
        results[name] = measure(name)
        write_json(options.json, {"faults": results})
    failed = [name for name, found in results.items() if not found["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all ended as they have to")
    return 1 if failed else 0


def measure(name: str) -> dict[str, object]:
    """Run a case and judge it."""
    case = CASES[name]
    run = run_fault(
        case.kind,
        num_ranks=case.num_ranks,
        victim=min(VICTIM, case.num_ranks - 1),
        flags=("--num-workers", "1", *case.flags),
        send=case.send,
        limit_s=_LIMIT_S,
        environment={"SLOW_S": str(case.slow_s)},
    )
    survivors = list(run.exit_codes)
    if case.is_dead_peer:
        del survivors[VICTIM]
    if case.is_survived:
        is_right = set(survivors) == {0}
    elif case.kind == "device_call":
        is_right = survivors == [PEER_LOST]
    else:
        is_right = None not in survivors and 0 not in survivors
    found = {
        "seconds_to_exit": run.seconds_to_exit,
        "exit_codes": run.exit_codes,
        "names_the_cause": case.names(run),
        "orphans": run.orphans,
        "shm_left": run.shm_left,
    }
    is_in_time = not case.is_dead_peer or run.seconds_to_exit <= MOST_S
    is_clean = not run.orphans and not run.shm_left
    found["passed"] = is_right and is_in_time and is_clean and bool(found["names_the_cause"])
    print(f"  {name}: {found}", flush=True)
    for rank, text in enumerate(() if found["passed"] else run.outputs):
        print(f"--- rank {rank}\n{text[-4000:]}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
