"""What becomes of a run when a rank dies, stops or is signalled, or a data-loader worker fails.

Real `pretrain()` runs on the CPU, each in processes of its own (gloo), two replicas. A run that
hangs, leaves a process or does not name the cause makes the exit code 1.

    python benchmarks/faults.py --json faults.json
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, write_json

from odb_megatron.comm.watchdog import PEER_LOST

SCRIPT = Path(__file__).parent / "fault_script.py"
NUM_STEPS = 12

_FLAGS = shlex.split(f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --distributed-backend gloo --seed 1234 --lr 1e-3 --micro-batch-size 1
    --calculate-per-token-loss --eval-interval 1000 --eval-iters 0 --log-interval 1
    --seq-length 64 --max-position-embeddings 64 --global-batch-size 8
    --train-samples {8 * NUM_STEPS} --tokenizer-type NullTokenizer --vocab-size 127 --odb
""")
_START_S = 180.0
_ORPHAN_S = 12.0
"""Workers look for their parent every 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRun:
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
    outputs: tuple[str, ...] = field(repr=False)
    orphans: int
    shm_left: int
    files: tuple[str, ...] = field(default=(), repr=False)


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
    with tempfile.TemporaryDirectory(prefix="odb-faults-") as folder:
        saved = Path(folder) / "save"
        line = [*_FLAGS, *(str(saved) if flag == "SAVE" else flag for flag in flags)]
        world = _start(kind, victim, folder, line, num_ranks, environment or {})
        try:
            began = _wait_for_fault(Path(folder) / "fault", world)
            for number, pause_s in send:
                for process in world if to_all else [world[victim]]:
                    process.send_signal(number)  # nothing, if it has ended
                time.sleep(pause_s)
            pids = [pid for process in world for pid in _session(process.pid)]
            codes, ended = _wait(world, until=time.time() + limit_s)
            orphans = _count_left(world)
            shm_left = [n for n in os.listdir("/dev/shm") if any(f"_{p}_" in n for p in pids)]
        finally:
            for process in world:
                _kill_session(process.pid)
        outputs = tuple(
            (Path(folder) / f"output{rank}").read_text(encoding="utf-8", errors="replace")
            for rank in range(num_ranks)
        )
        files = tuple(sorted(str(path.relative_to(saved)) for path in saved.rglob("*")))
    return FaultRun(
        seconds_to_exit=round(ended - began, 2),
        exit_codes=codes,
        outputs=outputs,
        orphans=orphans,
        shm_left=len(shm_left),
        files=files,
    )


def _start(
    kind: str,
    victim: int,
    folder: str,
    line: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str],
) -> list[subprocess.Popen[bytes]]:
    port = str(_free_port())
    world = []
    for rank in range(num_ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent), *sys.path])
        with (Path(folder) / f"output{rank}").open("wb") as output:
            world.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), kind, str(victim), folder, *line],
                    env={
                        **os.environ,
                        **place,
                        **environment,
                        "PYTHONPATH": paths,
                        "CUDA_VISIBLE_DEVICES": "",
                    },
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return world


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


def _wait_for_fault(mark: Path, world: Sequence[subprocess.Popen[bytes]]) -> float:
    """Return when it happened; now, if all ranks have ended without it."""
    limit = time.monotonic() + _START_S
    while time.monotonic() < limit:
        if mark.exists():
            return float(mark.read_text(encoding="utf-8").split()[0])
        if all(process.poll() is not None for process in world):
            break
        time.sleep(0.02)
    return time.time()


def _wait(
    world: Sequence[subprocess.Popen[bytes]], *, until: float
) -> tuple[tuple[int | None, ...], float]:
    while time.time() < until and any(process.poll() is None for process in world):
        time.sleep(0.02)
    codes, ended = tuple(process.poll() for process in world), time.time()
    for process, code in zip(world, codes, strict=True):
        if code is None:
            process.send_signal(signal.SIGUSR1)
    return codes, ended


def _count_left(world: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return how many processes are left besides ranks that have not ended."""
    ranks = {process.pid for process in world}
    limit = time.monotonic() + _ORPHAN_S
    while True:
        left = [pid for rank in ranks for pid in _session(rank) if pid not in ranks]
        if not left:
            return 0
        if time.monotonic() > limit:
            print("left:", *map(_command, left), sep="\n  ", flush=True)
            return len(left)
        time.sleep(0.2)


def _session(leader: int) -> list[int]:
    """Return the living processes of a session; one without memory has all but left."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            state = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            has_memory = bool((path / "cmdline").read_bytes())
        except OSError:
            continue
        if int(state[3]) == leader and state[0] != "Z" and has_memory:
            found.append(int(path.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return f"{pid} {line.decode(errors='replace')}"
    return f"{pid} (ended meanwhile)"


def _kill_session(leader: int) -> None:
    for pid in _session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- the cases ---------------------------------------------------------------------------------

VICTIM = 1
PAUSE_S = 20.0
DEADLINE_S = 40.0
MOST_S = 15.0
"""Seconds after which no rank of a run that has lost one may be left."""

_LIMIT_S = 180.0
_BAD_RECORD = r"train dataset:\d+: "


def _all_name(pattern: str, run: FaultRun) -> bool:
    """Whether every rank but the victim says so."""
    return all(re.search(pattern, text) for rank, text in enumerate(run.outputs) if rank != VICTIM)


def _one_names(pattern: str, run: FaultRun) -> bool:
    """Whether one rank says so, with the place, and the others which replica it was."""
    named = [bool(re.search(pattern, text, re.DOTALL)) for text in run.outputs]
    told = [bool(re.search(r"replica \d failed: ", text)) for text in run.outputs]
    return any(named) and all(map(bool.__or__, named, told))


def _saves(run: FaultRun) -> bool:
    """Whether a checkpoint was saved; the data's state is a part of it."""
    return any("metadata.json" in name for name in run.files)


def _stopped(run: FaultRun) -> bool:
    """Whether the wait is named while it lasts, and as the error that ends it."""
    found = re.search(
        r"warning: .*the trainer waits for the step loop's process .*"
        r"the trainer has waited \d+ s \(--odb-timeout-s 20\)",
        run.outputs[0],
        re.DOTALL,
    )
    return found is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault and what has to follow.

    Attributes:
        name: in the results.
        kind: see `fault_script`.
        names: whether the cause is named.
        flags: of the run.
        send: signals to the victim, each with the seconds to wait after it.
        is_survived: all ranks must end with 0.
        is_dead_peer: the victim is gone; the others have `MOST_S`.
        slow_s: see `fault_script`.
        num_ranks: replicas; of one the rank itself is the victim.
    """

    name: str
    kind: str
    names: Callable[[FaultRun], bool]
    flags: tuple[str, ...] = ()
    send: tuple[tuple[int, float], ...] = ()
    is_survived: bool = False
    is_dead_peer: bool = False
    slow_s: float = 0.0
    num_ranks: int = 2


def _gone(run: FaultRun) -> bool:
    return _all_name(rf"rank {VICTIM} \(replica {VICTIM}, .*\) is gone", run)


def _left(run: FaultRun) -> bool:
    return _all_name(rf"rank {VICTIM} \(replica {VICTIM}, .*\) has left the run early", run)


def _paused(run: FaultRun) -> bool:
    return _all_name(rf"warning: rank {VICTIM} \(.*\) has not answered since", run)


_SLOW = (
    *("--odb-timeout-s", "12"),
    *("--eval-interval", "6", "--eval-iters", "1", "--save", "SAVE", "--save-interval", "6"),
)

CASES = (
    Case(name="killed_in_step", kind="killed_in_step", names=_gone, is_dead_peer=True),
    Case(name="killed_while_planning", kind="killed_planning", names=_gone, is_dead_peer=True),
    Case(name="killed_in_device_call", kind="device_call", names=_gone, is_dead_peer=True),
    *(
        Case(name=name, kind=name, names=_left, is_dead_peer=True)
        for name in ("leaves_in_step", "leaves_between")
    ),
    Case(
        name="paused",
        kind="waits",
        names=_paused,
        flags=("--odb-timeout-s", f"{DEADLINE_S:g}"),
        send=((signal.SIGSTOP, PAUSE_S), (signal.SIGCONT, 0.0)),
        is_survived=True,
    ),
    Case(
        name="worker_raises",
        kind="worker_raises",
        names=lambda run: _one_names(
            _BAD_RECORD + r"record 45 raised KeyError.*Original traceback.*fault_data\.py", run
        ),
    ),
    Case(
        name="worker_killed",
        kind="worker_killed",
        names=lambda run: _one_names(r"worker has ended .*record 45 of train dataset", run),
    ),
    Case(
        name="worker_hangs",
        kind="worker_hangs",
        names=lambda run: _one_names(
            _BAD_RECORD + r".*record 45 of train dataset\) took longer.*time\.sleep", run
        ),
        flags=("--odb-timeout-s", "20"),
    ),
    Case(
        name="worker_stopped",
        kind="worker_stopped",
        names=_stopped,
        flags=("--odb-timeout-s", "20"),
        num_ranks=1,
    ),
    Case(name="armed_faulthandler", kind="armed", names=lambda _: True, is_survived=True),
    Case(
        name="dataset_returns_none",
        kind="worker_none",
        names=lambda run: _one_names(_BAD_RECORD + "item is a NoneType", run),
    ),
    Case(
        name="sigterm",
        kind="waits",
        names=_saves,
        flags=("--exit-signal-handler", "--save", "SAVE", "--save-interval", "1000"),
        send=((signal.SIGTERM, 0.0),),
        is_survived=True,
    ),
    Case(
        name="slow_evaluation_and_save",
        kind="slow",
        names=lambda run: _saves(run) and "validation loss at iteration 6" in "".join(run.outputs),
        flags=_SLOW,
        is_survived=True,
        slow_s=16.0,
    ),
)
QUICK = ("killed_in_device_call", "worker_raises")


def main(argv: Sequence[str]) -> int:
    """Run the cases; 1 if one did not end as it has to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    options = parser.parse_args(argv)
    names = options.only or (QUICK if options.quick else [case.name for case in CASES])
    results: dict[str, dict[str, object]] = {}
    for case in CASES:
        if case.name in names:
            results[case.name] = _measure(case)
            write_json(options.json, {"faults": results})
    failed = [name for name, found in results.items() if not found["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all ended as they have to")
    return 1 if failed else 0


def _measure(case: Case) -> dict[str, object]:
    run = run_fault(
        case.kind,
        num_ranks=case.num_ranks,
        victim=min(VICTIM, case.num_ranks - 1),
        flags=("--num-workers", "1", *case.flags),
        send=case.send,
        limit_s=_LIMIT_S,
        environment={"SLOW_S": str(case.slow_s)},
    )
    named = case.names(run)
    passed = named and not run.orphans and not run.shm_left and _codes_are_right(case, run)
    if case.is_dead_peer:
        passed = passed and run.seconds_to_exit <= MOST_S
    print(
        f"  {case.name}: exit codes {run.exit_codes} after {run.seconds_to_exit} s, "
        f"{'names' if named else 'does not name'} the cause, {run.orphans} orphans",
        flush=True,
    )
    if not passed:
        for rank, text in enumerate(run.outputs):
            print(f"--- rank {rank}\n{text[-4000:]}")
    return {
        "seconds_to_exit": run.seconds_to_exit,
        "exit_codes": run.exit_codes,
        "names_the_cause": named,
        "orphans": run.orphans,
        "shm_left": run.shm_left,
        "passed": passed,
    }


def _codes_are_right(case: Case, run: FaultRun) -> bool:
    if case.is_survived:
        return set(run.exit_codes) == {0}
    survivors = [
        code
        for rank, code in enumerate(run.exit_codes)
        if not (case.is_dead_peer and rank == VICTIM)
    ]
    if case.kind == "device_call":
        return survivors == [PEER_LOST]
    return None not in survivors and 0 not in survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
