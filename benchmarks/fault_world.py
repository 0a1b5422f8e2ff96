"""Starts the ranks of `fault_script.py`, lets something happen to one, and says how all ended.

Must not judge: what an output has to say is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT

__all__ = ["FaultRun", "run_fault"]

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
