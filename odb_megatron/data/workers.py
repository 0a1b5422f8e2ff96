"""Processes that read: how they start, what is sent to them, how long a sample may take there.

A process that holds process groups, threads or a CUDA context is never forked: the step loop's
process comes from a server that was started afresh (`forkserver`), and workers are its forks.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import multiprocessing
import multiprocessing.context
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Any

import torch

from odb_megatron.data.sample import Sample, Skipped

__all__ = ["FetchTimeoutError", "Reader", "WorkerError", "fresh_context", "limited"]
__all__ += ["pickled", "starting"]

PREFETCH = 2
"""Batches ahead of each worker."""

_starting = threading.Lock()

_IN_C_S = 2.0
"""Seconds after the limit in which an interruption has its effect."""


class WorkerError(RuntimeError):
    """A process that reads has died, or does not answer."""


class FetchTimeoutError(Exception):
    """A sample took too long; raised inside the code that makes it."""


class Reader:
    """The samples of one replica, in the order in which it reads them.

    Args:
        dataset: what torch's DataLoader fetches batches from, here or in workers.
        num_workers: worker processes.
        options: further arguments of the DataLoader.
    """

    def __init__(self, dataset: Any, num_workers: int, **options: Any) -> None:
        if num_workers:
            context = multiprocessing.get_context("fork")
            options |= {"prefetch_factor": PREFETCH, "multiprocessing_context": context}
        self._loader: Any = torch.utils.data.DataLoader(
            dataset,
            num_workers=num_workers,
            collate_fn=list,
            generator=torch.Generator().manual_seed(0),  # else the model's would be advanced
            **options,
        )
        self._batches: Any = None

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        """Return the next samples with their ids, fewer where the source ends.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatFormatError, DataFileError: always.
            WorkerError: a worker process has died.
        """
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Whether there is no further sample."""
        return False

    def head(self) -> bytes:
        """Return what must differ between replicas' own iterators; of one size."""
        return b""

    def check_heads(self, heads: Sequence[bytes]) -> None:
        """Raise if replicas read the same samples; the same on all."""

    def state(self) -> Any:
        """Return where the source is after what was read, as JSON values; None if it has none."""
        return None

    def close(self) -> None:
        """Read nothing more; end worker processes."""
        self._batches = self._loader = None

    def _next_batch(self, what: Callable[[], str]) -> list[Any]:
        """Return the next batch; `what` says in words what the workers were doing."""
        if self._batches is None:
            with starting():
                self._batches = iter(self._loader)
        try:
            batch: list[Any] = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise WorkerError(
                f"a data-loader worker has ended ({error}) while {what()}. Its own output, or the "
                "system's log, may say why; SIGKILL often means that memory ran out: lower "
                "--num-workers"
            ) from error
        return batch


def pickled(value: Any) -> bytes:
    """Return an object as it is sent to a process.

    Raises:
        ValueError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickle raises what it likes
        raise ValueError(
            f"the data cannot be sent to worker processes ({type(error).__name__}: {error}): "
            "define its classes and functions at the top level of a module and open files when "
            "they are first read, or pass --num-workers 0"
        ) from error


def fresh_context(data: bytes) -> BaseContext:
    """Return what starts processes afresh that unpickle `data`.

    Python imports the main script in every process it starts afresh. A training script imports
    Megatron, which takes each of them seconds and its memory: only classes of its own need it.
    """
    multiprocessing.set_forkserver_preload(["odb_megatron.data.step_loader"])
    return multiprocessing.get_context("forkserver") if b"__main__" in data else _ForkServer()


class _ForkServerProcess(multiprocessing.context.ForkServerProcess):
    def start(self) -> None:
        main: dict[str, Any] = vars(sys.modules["__main__"])
        with _starting:
            # What `multiprocessing.spawn.get_preparation_data` finds the script by.
            values: dict[str, Any] = {
                name: main[name] for name in ("__spec__", "__file__") if name in main
            }
            main.update(dict.fromkeys(values))
            try:
                super().start()
            finally:
                main.update(values)


class _ForkServer(multiprocessing.context.ForkServerContext):
    Process = _ForkServerProcess


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start worker processes within: an error says what they lack.

    Raises:
        RuntimeError: shared memory, which their queues need, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage("/dev/shm").free
        raise RuntimeError(
            f"worker processes cannot be started ({error}): /dev/shm has {free >> 10} KiB free; "
            "make it larger (--shm-size of a container), or pass --num-workers 0"
        ) from error


@contextlib.contextmanager
def limited(limit_s: float, *, what: Callable[[], str]) -> Iterator[None]:
    """Run what makes one sample, in the main thread of a worker process: SIGALRM is taken over.

    What runs in Python, sleeps or waits for a file or socket is interrupted where it is; code in C
    that never returns ends the worker.

    Args:
        limit_s: seconds it may take; 0 for any time.
        what: returns the sample in words.
    """
    if not limit_s:
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise FetchTimeoutError(
            f"{what()} took longer than {limit_s:g} s (0.8 times --odb-timeout-s): it hangs, or "
            "reads too slowly"
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s + _IN_C_S, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
