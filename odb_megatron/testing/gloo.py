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
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["Child", "ReplicaError", "nursery", "run_replicas"]

_GRACE_S = 0.5
"""How long to look for a dead process behind the first error: its peers may report first."""


class ReplicaError(RuntimeError):
    """A replica raised, or died without a result.

    Attributes:
        rank: which replica.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one process is to do (pickled into it)."""

    rank: int
    num_replicas: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    folder: str
    timeout_s: float
    model_parallel: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process sends back: a result, or its error as text."""

    value: Any
    is_error: bool = False


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
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}, must be at least 1")
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="gloo_replicas_") as folder:
        processes: list[Child] = []
        connections: list[Connection] = []
        try:
            for rank in range(num_replicas):
                job = _Job(
                    rank=rank,
                    num_replicas=num_replicas,
                    fn=fn,
                    args=args,
                    folder=folder,
                    timeout_s=timeout_s,
                    model_parallel=model_parallel,
                )
                process, mine = nursery(device_layer=device_layer).start(_run, job)
                processes.append(process)
                connections.append(mine)
            results = _collect(processes, connections, deadline, folder)
            _release(processes, connections)
            return results
        finally:
            _end(processes, connections)


def _collect(
    processes: list[Child], connections: list[Connection], deadline: float, folder: str
) -> list[Any]:
    """Wait for a result of every process; raise on the first failure."""
    reports: dict[int, _Report] = {}
    while len(reports) < len(processes):
        pending = {connections[rank]: rank for rank in range(len(processes)) if rank not in reports}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(_stuck(processes, sorted(pending.values()), folder))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            report = _receive(connection)
            if report is None or report.is_error:
                raise _failure(rank, report, processes, connections, reports)
            reports[rank] = report
    return [reports[rank].value for rank in range(len(processes))]


def _receive(connection: Connection) -> _Report | None:
    """The report, or None if the process died without one."""
    try:
        report = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    assert isinstance(report, _Report)
    return report


def _failure(
    rank: int,
    report: _Report | None,
    processes: list[Child],
    connections: list[Connection],
    reports: Mapping[int, _Report],
) -> ReplicaError:
    """Name what came first: a process that died, else the first error that arrived."""
    if report is None:
        return _death(rank, processes[rank])
    pending = {
        connections[other]: other
        for other in range(len(processes))
        if other != rank and other not in reports
    }
    grace_ends = time.monotonic() + _GRACE_S
    while pending:
        ready = wait(list(pending), timeout=max(0.0, grace_ends - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            other = pending.pop(connection)
            if _receive(connection) is None:
                return _death(other, processes[other])
    return ReplicaError(rank, f"replica {rank} raised:\n{report.value}")


def _death(rank: int, process: Child) -> ReplicaError:
    process.join(timeout=5)
    return ReplicaError(
        rank, f"replica {rank} ended without a result, exit code {process.exitcode}"
    )


def _stuck(processes: list[Child], ranks: list[int], folder: str) -> str:
    """Say which replicas are not done and where their threads are."""
    for rank in ranks:
        if processes[rank].exitcode is None and _stack_file(folder, rank).exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_GRACE_S)
    lines = [f"no result in time from replica {', '.join(map(str, ranks))}"]
    for rank in ranks:
        path = _stack_file(folder, rank)
        stack = path.read_text() if path.exists() else "not started yet"
        lines.append(f"replica {rank} was here:\n{stack}")
    return "\n".join(lines)


def _release(processes: list[Child], connections: list[Connection]) -> None:
    """Let the processes tear down and end."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(None)
    for process in processes:
        process.join(timeout=10)


def _end(processes: list[Child], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for connection in connections:
        connection.close()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack_{rank}"


def _run(job: _Job, connection: Connection) -> None:
    """The body of one process."""
    released = threading.Event()
    threading.Thread(target=_watch_parent, args=(connection, released), daemon=True).start()
    os.environ.update(
        RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.num_replicas)
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with _stack_file(job.folder, job.rank).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            _set_up(job)
            report = _Report(job.fn(job.rank, *job.args))
            connection.send(report)
        except BaseException:
            connection.send(_Report(traceback.format_exc(), is_error=True))
        released.wait()
        faulthandler.unregister(signal.SIGUSR1)
        _tear_down(job)


def _watch_parent(connection: Connection, released: threading.Event) -> None:
    """End with the parent: its end of the pipe closes when it is gone."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    released.set()


def _set_up(job: _Job) -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{Path(job.folder) / 'store'}",
        rank=job.rank,
        world_size=job.num_replicas,
        timeout=timedelta(seconds=job.timeout_s),
    )
    if job.model_parallel is not None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(**job.model_parallel)
        model_parallel_cuda_manual_seed(1)


def _tear_down(job: _Job) -> None:
    import torch

    if job.model_parallel is not None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    distributed = torch.distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()


# --- the nursery -------------------------------------------------------------------------------


class Child:
    """A process of the nursery's; not a child of this process, so the nursery reports its end.

    Attributes:
        pid: its process id.
    """

    def __init__(self, status: Connection) -> None:
        self._status = status
        self._exitcode: int | None = None
        self.pid: int = status.recv()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        if self._exitcode is None and self._status.poll(timeout):
            try:
                self._exitcode = self._status.recv()
            except EOFError:  # the nursery has gone, and what it started with it
                self._exitcode = -signal.SIGKILL

    @property
    def exitcode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        self.join(0)
        return self._exitcode

    def kill(self) -> None:
        """End it at once; does nothing where it has ended."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget it."""
        self._status.close()


class Nursery:
    """The process that imports and forks; may be used by several threads.

    Args:
        device_layer: activate the CPU device layer of Megatron.
    """

    def __init__(self, *, device_layer: bool) -> None:
        self._control, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_serve_nursery, args=(theirs, device_layer), name="nursery"
        )
        self._lock = threading.Lock()
        self._process.start()
        theirs.close()
        atexit.register(self._control.close)  # before multiprocessing waits for its processes

    @property
    def pid(self) -> int | None:
        """The nursery's own process id."""
        return self._process.pid

    def start(self, run: Callable[[Any, Connection], None], job: Any) -> tuple[Child, Connection]:
        """Call `run(job, connection)` in a process with this one's environment and import path.

        Args:
            run: a module-level function.
            job: pickled.

        Returns:
            The process, and the other end of its connection.

        Raises:
            RuntimeError: the nursery has ended.
        """
        mine, theirs = multiprocessing.Pipe()
        status, report = multiprocessing.Pipe(duplex=False)
        try:
            with self._lock:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno(), report.fileno()])
            theirs.close()
            report.close()
            child = Child(status)
        except (EOFError, OSError) as error:
            self._process.join(1)
            code = self._process.exitcode
            raise RuntimeError(f"the nursery has ended, exit code {code}: see above") from error
        mine.send((dict(os.environ), sys.path))
        mine.send((run, job))  # read when modules can be imported as here
        return child, mine


@functools.cache
def nursery(*, device_layer: bool) -> Nursery:
    """Return this process's nursery of a kind, which is started when first asked for."""
    return Nursery(device_layer=device_layer)


def _serve_nursery(control: socket.socket, device_layer: bool) -> None:
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
    living: dict[int, tuple[BaseProcess, Connection[Any, Any]]] = {}
    while True:
        for ready in wait([control, *living]):
            if isinstance(ready, int):
                process, status = living.pop(ready)
                process.join()
                with contextlib.suppress(OSError):
                    status.send(process.exitcode)
                status.close()
                continue
            told, handles, _, _ = socket.recv_fds(control, 1, 2)
            if not told:
                return
            connection, status = (Connection(handle) for handle in handles)
            process = context.Process(target=_forked, args=(connection, control))
            process.start()
            connection.close()
            status.send(process.pid)
            living[process.sentinel] = process, status


def _forked(connection: Connection, control: socket.socket) -> None:
    """The body of a forked process."""
    control.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment, path = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    run, job = connection.recv()
    run(job, connection)
