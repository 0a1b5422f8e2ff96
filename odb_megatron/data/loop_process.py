"""A step loop in a process of its own, so that it never holds the trainer's interpreter lock.

The trainer's side relays what the loop asks of other replicas. The process, and the workers that it
forks, form a process group, which ends with the trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
import weakref
from collections.abc import Generator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.loop import Exchange, Gather, Progress, Reader, Request, StepLoop
from odb_megatron.data.replica_stream import StreamReader, WorkerError
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import Packed, Workers
from odb_megatron.plan.record import HEADER, PlanConfig

__all__ = ["Deadline", "LoopProcess", "LoopSpec"]

_LOOK_S = 0.1
_JOIN_S = 5.0
_CLOSING_AT = HEADER.fields["closing"][1]  # type: ignore[index]


class Deadline(Protocol):
    """What `comm.deadline.Deadline` does for a wait."""

    def begin(self, what: str, number: int) -> None:
        """A wait begins."""

    def check(self) -> None:
        """Go on waiting, or raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """What a step loop is made of.

    Attributes:
        stream: the run's stream.
        config: what all replicas agree on.
        replica: which one this is.
        start: where it goes on.
        workers: worker processes of the loop.
    """

    stream: SampleStream | ItemStream
    config: PlanConfig
    replica: int
    start: Progress
    workers: Workers

    @property
    def has_process(self) -> bool:
        """Whether the loop runs in a process of its own."""
        stream = self.stream
        return self.workers.num > 0 and not (
            isinstance(stream, ItemStream) and stream.has_own_workers
        )

    def make(self) -> StepLoop:
        """Return the loop.

        Raises:
            ValueError: the saved state of an iterable source does not fit.
        """
        stream, start = self.stream, self.start
        reader: Reader
        if isinstance(stream, ItemStream):
            items = reader = stream.open(
                replica=self.replica, num_replicas=self.config.num_replicas, workers=self.workers
            )
            if start.source is not None:
                items.restore(start.source)
        else:
            reader = StreamReader(
                stream,
                self.config,
                replica=self.replica,
                consumed=start.consumed,
                workers=self.workers,
            )
        return StepLoop(
            reader,
            self.config,
            replica=self.replica,
            num_sources=len(stream.source_names),
            start=start,
        )


class LoopProcess:
    """The trainer's side; has `StepLoop`'s `run` and `close`.

    Args:
        spec: what the loop is made of.
        deadline: ends the wait for a process that does not answer; None to wait for ever.

    Raises:
        ValueError: the spec cannot be sent to a process, or the loop cannot be made of it.
    """

    def __init__(self, spec: LoopSpec, *, deadline: Deadline | None = None) -> None:
        self._deadline = deadline
        self._number = 0
        self._writer: threading.Thread | None = None
        self._is_closing = False
        packed = Packed(spec)
        context: Any = packed.context()
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, packed), name="the step loop", daemon=True
        )
        self._process.start()
        other.close()
        _processes.add(self)
        try:
            self._receive()  # made, or why not
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        self._is_closing = True

    def run(self) -> Generator[Request, Any, None]:
        try:
            self._send(None)
            while True:
                request = self._receive()
                if request is None:
                    return
                if isinstance(request, Gather) and self._is_closing:
                    record = bytearray(request.record)
                    record[_CLOSING_AT] = 1
                    request = replace(request, record=bytes(record))
                answer = yield request
                if isinstance(request, Exchange):  # views cannot be sent
                    answer = {
                        by: None if part is None else bytes(part) for by, part in answer.items()
                    }
                self._send(answer)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and its workers."""
        _processes.discard(self)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # where it has made no group yet
        self._process.join(_JOIN_S)
        if self._writer is not None:
            self._writer.join(_JOIN_S)  # nobody reads any more: it ends
        self._connection.close()

    def _send(self, answer: Any) -> None:
        data = pickle.dumps(answer)
        # A process that is stopped reads nothing: writing more than a pipe holds would never end.
        self._writer = threading.Thread(target=self._write, args=(data,), daemon=True)
        self._writer.start()
        while self._writer.is_alive():
            self._writer.join(_LOOK_S)
            self._check()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the next `_receive` says why
            self._connection.send_bytes(data)

    def _check(self) -> None:
        try:
            if self._deadline is not None:
                self._deadline.check()
        except RuntimeError as error:
            raise WorkerError(
                f"waiting for the step loop's process {self._process.pid}, or its data-loader "
                f"workers: {error}"
            ) from error

    def _receive(self) -> Any:
        """Return the loop's next request, None at its end.

        Raises:
            WorkerError: the process is gone, or has not answered before the deadline.
            Exception: what the loop has raised.
        """
        self._number += 1
        if self._deadline is not None:
            self._deadline.begin("the step loop's process", self._number)
        try:
            while not self._connection.poll(_LOOK_S):
                self._check()
            found = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_JOIN_S)
            raise WorkerError(
                f"the step loop's process {self._process.pid} has ended with exit code "
                f"{self._process.exitcode}: its own output, or the system's log, may say why; "
                "SIGKILL often means that memory ran out: lower --num-workers"
            ) from error
        if isinstance(found, _Raised):
            raise found.error()
        return found


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on its way; its traceback as text."""

    pickled: bytes
    text: str

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # pickle raises what it likes
            pickled = b""
        return cls(pickled, text)

    def error(self) -> BaseException:
        error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.text)
        error.__cause__ = (
            None if not self.pickled else RuntimeError(f"in the step loop:\n{self.text}")
        )
        return error


_processes: weakref.WeakSet[LoopProcess] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for process in list(_processes):
        process.kill()


def _serve(connection: Connection, packed: Packed) -> None:
    """Run the loop in this process."""
    os.setpgid(0, 0)  # its workers too: they end together
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    try:
        spec = packed.unpack()
        steps = spec.make().run()
        connection.send(None)
        answer, found = connection.recv(), None
        while True:
            found = steps.send(answer)
            connection.send(found)
            answer = connection.recv()
    except StopIteration:
        connection.send(None)
    except (EOFError, BrokenPipeError):
        pass  # the trainer is gone, or wants no more
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send(_Raised.of(error))


def _end_with_trainer() -> None:
    trainer: Any = multiprocessing.parent_process()
    trainer.join()
    os.killpg(0, signal.SIGKILL)
