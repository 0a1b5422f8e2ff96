"""Runs the step loop of one replica: asks the other replicas for it, one step a call.

With worker processes the loop runs in a process of its own, so that reading, planning and packing
never hold the trainer's interpreter lock; this side relays what it asks. That process and its
workers, which it forks, form a process group, which ends with the trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import multiprocessing
import os
import pickle
import queue
import select
import signal
import threading
import traceback
import warnings
import weakref
from collections.abc import Generator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import torch

from odb_megatron.comm.heartbeat import ControlError, Deadline
from odb_megatron.data.iterable import ItemReader, ItemStream
from odb_megatron.data.loop import Ask, Failure, PackedStep, Progress, Request, StepLoop
from odb_megatron.data.stream import SampleStream, StreamReader
from odb_megatron.data.workers import Reader, WorkerError, fresh_context, pickled
from odb_megatron.plan.record import HEADER, LoaderClosedError, PlanConfig

if TYPE_CHECKING:
    from odb_megatron.comm.groups import SourceGroup

__all__ = ["StepLoader"]

_LOOK_S = 0.1
_JOIN_S = 5.0
_CLOSING_AT = HEADER.fields["closing"][1]  # type: ignore[index]


class StepLoader:
    """Steps of one replica, made with all others.

    Args:
        stream: the run's stream.
        config: plan configuration; `num_replicas` must be that of `channel`.
        channel: this loader's own channel to the other replicas.
        num_workers: data-loader workers; 0 reads in the calling thread.
        consumed: samples consumed before (resume).

    Attributes:
        stream, config: see above.
        replica: this one.
        progress: where the loader stands after the last step made.
        fetch_limit_s: seconds that a sample may take in a worker; 0 for any time. Set before the
            first step, like `deadline`.
        deadline: ends the wait for the loop's process; None to wait for ever.
        is_over: nothing is left, or the loader has failed.
    """

    def __init__(
        self,
        stream: SampleStream | ItemStream,
        config: PlanConfig,
        *,
        channel: SourceGroup,
        num_workers: int = 0,
        consumed: int = 0,
    ) -> None:
        self.stream, self.config = stream, config
        self.replica = channel.replica
        self.progress = self._start = Progress(consumed=consumed)
        self._channel, self._num_workers = channel, num_workers
        self._loop: StepLoop | _LoopProcess | None = None
        self._steps: Generator[Request, Any, None] | None = None
        self._is_closing = False
        self.fetch_limit_s = 0.0
        self.deadline: Deadline | None = None
        self.is_over = False

    def __len__(self) -> int:
        """Steps of one pass over the stream."""
        left = 0 if self.is_over else max(0, self.config.total - self._start.consumed)
        return -(-left // self.config.global_batch_size)

    def restore(self, progress: Progress) -> None:
        """Go on from a saved run's progress, before the first step.

        Raises:
            ValueError: the state of an iterable source is damaged or does not fit.
        """
        assert self._steps is None, "a state is loaded before the first step"
        self.progress = self._start = progress
        if progress.source is not None:
            self._open()  # reads up to where the saved run was

    def restarted(self) -> StepLoader:
        """Return a loader that starts where this one did (Megatron's full validation)."""
        again = copy.copy(self)
        again._loop = again._steps = None
        again.progress, again.is_over, again._is_closing = self._start, False, False
        return again

    def close(self) -> None:
        """Make no further step: the next call of `make_step` tells the other replicas.

        The only method that may be called while another thread is in one.
        """
        self._is_closing = True
        if self._loop is not None:
            self._loop.close()

    def make_step(self) -> PackedStep | None:
        """Make the next step with all other replicas; None after the last.

        An error of this replica is raised at once; call again to tell the others.

        Raises:
            LoaderClosedError: a replica has closed its loader; it may be this one.
            ReplicaFailedError, ControlError: another replica has failed, or is gone.
            BadRecordError, OverlongError, ChatFormatError: by policy.
            TooManyBadRecordsError: on all replicas, in the same step.
        """
        if self.is_over:
            return None
        try:
            if self._steps is None:
                self._steps = self._open().run()
            request = next(self._steps)
            while isinstance(request, Ask):
                try:
                    answer = getattr(self._channel, request.method)(*request.args)
                except BaseException as error:
                    self._steps.throw(error)
                    raise
                request = self._steps.send(answer)
        except StopIteration:
            self.is_over = True
            return None
        except BaseException as error:
            self.is_over = True
            if not isinstance(error, LoaderClosedError):
                self._channel.close()  # whoever waits for this replica learns it
            raise
        if isinstance(request, Failure):
            raise request.error
        self.progress = request.progress
        return request

    def end(self) -> None:
        """Tell the other replicas that no further step is made, if they do not know; drop them."""
        self.close()
        while not self.is_over:
            self.make_step()
        if self._steps is not None:
            self._steps.close()
        elif isinstance(self._loop, _LoopProcess):
            self._loop.kill()

    def _open(self) -> StepLoop | _LoopProcess:
        if self._loop is None:
            num = 0 if self._is_closing else self._num_workers  # one that closes reads nothing
            if isinstance(self.stream, ItemStream) and self.stream.shards.has_own_workers:
                num = 0
            parts = (self.stream, self.config, self.replica, self._start, num, self.fetch_limit_s)
            self._loop = _LoopProcess(parts, self.deadline) if num else _make_loop(*parts)
            if self._is_closing:
                self._loop.close()
        return self._loop


def _make_loop(
    stream: Any, config: PlanConfig, replica: int, start: Progress, num_workers: int, limit_s: float
) -> StepLoop:
    """Return a step loop.

    Raises:
        ValueError: the saved state of an iterable source does not fit.
    """
    reader: Reader
    who: Any = {"replica": replica, "num_workers": num_workers, "limit_s": limit_s}
    if isinstance(stream, ItemStream):
        reader = ItemReader(stream, config, state=start.source, **who)
    else:
        reader = StreamReader(stream, config, consumed=start.consumed, **who)
    num_sources = len(stream.source_names)
    return StepLoop(reader, config, replica=replica, num_sources=num_sources, start=start)


class _LoopProcess:
    """The trainer's side of a loop in a process of its own; has `StepLoop`'s `run` and `close`.

    Args:
        parts: the arguments of `_make_loop`.
        deadline: see `StepLoader`.

    Raises:
        ValueError: they cannot be sent to a process, or no loop can be made of them.
    """

    def __init__(self, parts: tuple[Any, ...], deadline: Deadline | None) -> None:
        self._deadline = deadline
        self._number = 0
        self._is_closing = False
        # A process that is stopped reads nothing: writing more than a pipe holds would never end.
        self._answers = queue.SimpleQueue[tuple[Any, ...]]()
        self._writer = threading.Thread(target=self._write, daemon=True)
        data = pickled(parts)
        context: Any = fresh_context(data)
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, data), name="the step loop", daemon=True
        )
        self._process.start()
        other.close()
        self._ready = select.poll()  # a connection's own `poll` makes a selector for each call
        self._ready.register(self._connection.fileno(), select.POLLIN)
        self._writer.start()
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
            self._answers.put((None,))
            while (request := self._receive()) is not None:
                if self._is_closing and isinstance(request, Ask) and request.method == "gather":
                    record = bytearray(request.args[0])
                    record[_CLOSING_AT] = 1
                    request = replace(request, args=(bytes(record),))
                self._answers.put(((yield request),))
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and its workers."""
        _processes.discard(self)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # where it has made no group yet
        self._process.join(_JOIN_S)
        self._answers.put(())
        self._writer.join(_JOIN_S)  # nobody reads any more: it ends
        self._connection.close()

    def _write(self) -> None:
        while answer := self._answers.get():
            with contextlib.suppress(OSError):  # `_receive` says why
                self._connection.send(*answer)

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
            while not self._ready.poll(1e3 * _LOOK_S):
                if self._deadline is not None:
                    self._deadline.check()
            found = self._connection.recv()
        except ControlError as error:
            raise WorkerError(
                f"waiting for the step loop's process {self._process.pid}, or its data-loader "
                f"workers: {error}"
            ) from error
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_JOIN_S)
            raise WorkerError(
                f"the step loop's process {self._process.pid} has ended with exit code "
                f"{self._process.exitcode}: its own output, or the system's log, may say why; "
                "SIGKILL often means that memory ran out: lower --num-workers"
            ) from error
        if isinstance(found, BaseException):
            raise found
        return found


_processes: weakref.WeakSet[_LoopProcess] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for process in list(_processes):
        process.kill()


def _serve(connection: Connection, data: bytes) -> None:
    """Run the loop in this process."""
    os.setpgid(0, 0)  # its workers too: they end together
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    # In the main thread: torch's handler of SIGCHLD then also ends the wait for a worker that was
    # killed while it was sending.
    try:
        steps = _make_loop(*pickle.loads(data)).run()
        connection.send(None)
        while True:
            request = steps.send(connection.recv())
            if isinstance(request, Failure):
                request = Failure(_sendable(request.error))
            connection.send(request)
    except StopIteration:
        connection.send(None)
    except (EOFError, BrokenPipeError):
        pass  # the trainer is gone, or wants no more
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send(_sendable(error))


def _sendable(error: BaseException) -> Any:
    """Return what arrives as the error, with its traceback as its cause."""
    found = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(found))
    except Exception:  # pickle raises what it likes
        return RuntimeError("".join(traceback.format_exception(error)))
    return found


def _end_with_trainer() -> None:
    trainer: Any = multiprocessing.parent_process()
    trainer.join()
    os.killpg(0, signal.SIGKILL)
