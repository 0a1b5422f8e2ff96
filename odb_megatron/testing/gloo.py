"""Runs a function in N gloo processes and brings back results, or the first failure.

No process is left behind, whatever ends the run. Replicas are threads by default in tests; use this
where torch's or Megatron's own process groups are the subject, with many cases in one start.

Processes are forked from one of this process's, the nursery, which has imported torch and, on
request, Megatron on CPU: importing takes 5 s of CPU in a process started anew, forking .1 s. That
is safe because the nursery has no threads, no process groups and no CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Child", "Nursery", "ReplicaError", "nursery", "run_replicas"]

_GRACE_S = 0.5
"""How long to look for a dead process behind the first error: its peers may report first."""


class ReplicaError(RuntimeError):
    """A replica raised, or died without a result.

    Attributes:
        rank: which replica.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"replica {rank} {message}")
        self.rank = rank


class _Job(NamedTuple):
    """What one process is to do (pickled into it)."""

    rank: int
    num_replicas: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    folder: Path
    timeout_s: float
    model_parallel: Mapping[str, Any] | None

    @property
    def stack(self) -> Path:
        """The file in which the process says where it is, when it gets SIGUSR1."""
        return self.folder / f"stack_{self.rank}"


def run_replicas(
    fn: Callable[..., Any],
    num_replicas: int,
    *args: Any,
    timeout_s: float,
    device_layer: bool = False,
    model_parallel: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` in processes that share a gloo process group.

    Each process has `RANK`, `LOCAL_RANK` and `WORLD_SIZE` set. The processes may have children of
    their own (data-loader workers). A result is sent before the process group is torn down, which
    happens when all results are in.

    Args:
        fn: a module-level function; it, its arguments and its result are pickled.
        num_replicas: number of processes, at least 1.
        *args: passed on to every replica.
        timeout_s: for everything together, process starts included.
        device_layer: activate the CPU device layer first.
        model_parallel: keyword arguments of Megatron's `initialize_model_parallel`, which is then
            called, and its generators seeded (seed 1).

    Returns:
        Results by rank.

    Raises:
        ReplicaError: a replica raised (with its traceback) or died (with its exit code); a death
            is named rather than the errors it caused in peers. The others are killed.
        TimeoutError: not all were done in time; names them and shows where each one was.
    """
    assert num_replicas > 0, "nobody would run it"
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="gloo_replicas_") as folder:
        common = (num_replicas, fn, args, Path(folder), timeout_s, model_parallel)
        jobs = [_Job(rank, *common) for rank in range(num_replicas)]
        children: list[Child] = []
        try:
            for job in jobs:
                children.append(nursery(device_layer=device_layer).start(_run, job))
            results = _collect(children, jobs, deadline)
            for child in children:  # let them tear down and end
                with contextlib.suppress(OSError):
                    child.connection.send(None)
            for child in children:
                child.join(10)
            return results
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.join()
                child.connection.close()


def _collect(children: Sequence[Child], jobs: Sequence[_Job], deadline: float) -> list[Any]:
    """Wait for a result of every process; raise on the first failure, a death before an error."""
    results: dict[int, Any] = {}
    failure: ReplicaError | None = None
    pending = {child.connection: rank for rank, child in enumerate(children)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(pending.values())
            raise failure or TimeoutError(_where([(children[at], jobs[at]) for at in ranks]))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                results[rank], error = connection.recv()
            except (EOFError, ConnectionResetError):
                code = children[rank].join(5)
                text = f"ended without a result, exit code {code}"
                raise ReplicaError(rank, text) from None
            if error and failure is None:
                failure = ReplicaError(rank, f"raised:\n{error}")
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failure is not None:
        raise failure
    return [results[rank] for rank in range(len(children))]


def _where(late: Sequence[tuple[Child, _Job]]) -> str:
    """Say which replicas are not done and where their threads are."""
    for child, job in late:
        if job.stack.exists():
            child.send_signal(signal.SIGUSR1)
    time.sleep(_GRACE_S)
    lines = [f"no result in time from replica {', '.join(str(job.rank) for _, job in late)}"]
    for _, job in late:
        stack = job.stack.read_text() if job.stack.exists() else "not started yet"
        lines.append(f"replica {job.rank} was here:\n{stack}")
    return "\n".join(lines)


def _run(job: _Job, connection: Connection) -> None:
    """The body of one process."""
    import torch

    released = threading.Event()
    threading.Thread(target=_watch_parent, args=(connection, released), daemon=True).start()
    os.environ.update(
        RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.num_replicas)
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with job.stack.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{job.folder / 'store'}",
                rank=job.rank,
                world_size=job.num_replicas,
                timeout=timedelta(seconds=job.timeout_s),
            )
            if job.model_parallel is not None:
                from megatron.core import parallel_state
                from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

                parallel_state.initialize_model_parallel(**job.model_parallel)
                model_parallel_cuda_manual_seed(1)
            connection.send((job.fn(job.rank, *job.args), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
        released.wait()
        faulthandler.unregister(signal.SIGUSR1)
        if job.model_parallel is not None:
            parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _watch_parent(connection: Connection, released: threading.Event) -> None:
    """End with the parent: its end of the pipe closes when it is gone."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    released.set()


# --- the nursery -------------------------------------------------------------------------------


class Child:
    """A process of the nursery's, which is not a child of this process.

    Attributes:
        pid: its process id.
        connection: to it.
        exitcode: negative for a signal; None until `join` has seen its end.
    """

    def __init__(self, home: Nursery, pid: int, connection: Connection) -> None:
        self._home, self._handle = home, os.pidfd_open(pid)
        self.pid, self.connection = pid, connection
        self.exitcode: int | None = None

    def join(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended, at most `timeout` seconds; return its exit code."""
        if self.exitcode is None and wait([self._handle], timeout):
            self.exitcode = self._home.exitcode_of(self.pid)
            os.close(self._handle)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Does nothing where it has ended."""
        if self.join(0) is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that imports and forks; may be used by several threads.

    Args:
        device_layer: activate the CPU device layer of Megatron.
    """

    def __init__(self, *, device_layer: bool) -> None:
        self._control, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, device_layer), name="nursery")
        self._lock = threading.Lock()
        self._process.start()
        theirs.close()
        atexit.register(self._control.close)  # before multiprocessing waits for its processes

    @property
    def pid(self) -> int | None:
        """The nursery's own process id."""
        return self._process.pid

    def start(self, run: Callable[[Any, Connection], None], job: Any) -> Child:
        """Call `run(job, connection)` in a process with this one's environment and import path.

        Args:
            run: a module-level function.
            job: pickled.

        Raises:
            RuntimeError: the nursery has ended.
        """
        mine, theirs = multiprocessing.Pipe()
        try:
            with self._lock:
                self._control.send(None)
                reduction.send_handle(self._control, theirs.fileno(), self.pid)
                child = Child(self, self._control.recv(), mine)
        except (EOFError, OSError) as error:
            self._process.join(1)
            code = self._process.exitcode
            raise RuntimeError(f"the nursery has ended, exit code {code}: see above") from error
        finally:
            theirs.close()
        mine.send((dict(os.environ), sys.path))
        mine.send((run, job))  # read when modules can be imported as here
        return child

    def exitcode_of(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        try:
            with self._lock:
                self._control.send(pid)
                code: int = self._control.recv()
        except (EOFError, OSError):  # the nursery has gone, and what it started with it
            return -signal.SIGKILL
        return code


@functools.cache
def nursery(*, device_layer: bool) -> Nursery:
    """Return this process's nursery of a kind, which is started when first asked for."""
    return Nursery(device_layer=device_layer)


def _serve(control: Connection, device_layer: bool) -> None:
    """Fork what is asked for until the other end of `control` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests' process decides
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported; no threads to fork
    import torch  # noqa: F401

    if device_layer:
        from odb_megatron.testing import cpu_device

        os.environ["RANK"] = "nursery"  # the notice is for users
        cpu_device.activate()
    gc.collect()
    gc.freeze()  # collections in the processes leave the shared pages alone
    context = multiprocessing.get_context("fork")
    living: dict[int | None, ForkProcess] = {}
    with contextlib.suppress(EOFError):
        while True:
            pid = control.recv()
            if pid is None:
                connection = Connection(reduction.recv_handle(control))
                process = context.Process(target=_forked, args=(connection, control))
                process.start()
                connection.close()
                living[process.pid] = process
                control.send(process.pid)
            else:
                process = living.pop(pid)
                process.join()
                control.send(process.exitcode)


def _forked(connection: Connection, control: Connection) -> None:
    """The body of a forked process."""
    control.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment, path = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    run, job = connection.recv()
    run(job, connection)
