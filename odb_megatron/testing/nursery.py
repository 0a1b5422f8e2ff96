"""Starts processes in which torch, and on request Megatron on CPU, has been imported already.

A process of this one's, the nursery, imports once and then forks: importing takes 5 s of CPU in a
process started anew, forking .1 s. Must not be used by the product: forking is safe here because
the nursery has no threads, no process groups and no CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["Child", "Nursery", "nursery"]


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
        self._process = context.Process(target=_serve, args=(theirs, device_layer), name="nursery")
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


def _serve(control: socket.socket, device_layer: bool) -> None:
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
            process = context.Process(target=_run, args=(connection, control))
            process.start()
            connection.close()
            status.send(process.pid)
            living[process.sentinel] = process, status


def _run(connection: Connection, control: socket.socket) -> None:
    """The body of a forked process."""
    control.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment, path = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    run, job = connection.recv()
    run(job, connection)
