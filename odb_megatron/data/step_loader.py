"""Runs the step loop of one replica: answers what it asks of the other replicas, one step a call.

Knows no trainer and no other rank of its replica (`feed`). With worker processes the loop runs in a
process of its own, so that reading, planning and packing never hold the trainer's interpreter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.loop import (
    Exchange,
    Failure,
    Gather,
    GatherAll,
    GatherBlocks,
    PackedStep,
    Progress,
    Request,
    StepLoop,
)
from odb_megatron.data.loop_process import Deadline, LoopProcess, LoopSpec
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import Workers
from odb_megatron.plan.record import LoaderClosedError, PlanConfig

__all__ = ["Channel", "StepLoader"]


class Channel(Protocol):
    """What `comm.blocks.SourceGroup` does."""

    @property
    def replica(self) -> int:
        """This replica."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    def gather(self, record: bytes) -> list[bytes]:
        """All-gather equal-sized records within the block, in replica order."""

    def gather_blocks(self, record: bytes) -> list[bytes]:
        """All-gather one record per block."""

    def gather_all(self, record: bytes) -> list[bytes]:
        """All-gather equal-sized records of all replicas, in replica order."""

    def exchange(
        self, step: int, sends: Mapping[int, bytes] | None, receives: Mapping[int, int]
    ) -> dict[int, Any]:
        """Send bytes to replicas of the block, and receive so many from others; see `Exchange`."""

    def close(self) -> None:
        """Close the connections; peers that wait learn it."""


class StepLoader:
    """Steps of one replica, made with all others.

    Args:
        stream: the run's stream.
        config: plan configuration; `num_replicas` must be that of `channel`.
        channel: this loader's own channel to the other replicas.
        num_workers: data-loader workers; 0 reads in the calling thread.
        consumed: samples consumed before (resume).

    Attributes:
        fetch_limit_s: seconds that a worker has for a sample, 0 for any time; set before the first
            step.
        deadline: ends the wait for a process that does not answer.
        is_over: no further step can be made.
    """

    def __init__(
        self,
        stream: SampleStream | ItemStream,
        config: PlanConfig,
        *,
        channel: Channel,
        num_workers: int = 0,
        consumed: int = 0,
    ) -> None:
        if config.num_replicas != channel.num_replicas:
            raise ValueError(f"{config.num_replicas} replicas, {channel.num_replicas} connected")
        self.stream, self.config = stream, config
        self._channel, self._num_workers = channel, num_workers
        self._start = self._progress = Progress(consumed=consumed)
        self._loop: StepLoop | LoopProcess | None = None
        self._steps: Generator[Request, Any, None] | None = None
        self._is_closing = False
        self.fetch_limit_s = 0.0
        self.deadline: Deadline | None = None
        self.is_over = False

    def __len__(self) -> int:
        """Steps of one pass over the stream."""
        left = 0 if self.is_over else max(0, self.config.total - self._start.consumed)
        return -(-left // self.config.global_batch_size)

    @property
    def replica(self) -> int:
        """This replica."""
        return self._channel.replica

    @property
    def progress(self) -> Progress:
        """Where the loader stands after the last step made."""
        return self._progress

    def restore(self, progress: Progress) -> None:
        """Go on from a saved run's progress, before the first step.

        Raises:
            ValueError: the state of an iterable source is damaged or does not fit.
        """
        assert self._steps is None, "a state is loaded before the first step"
        self._start = self._progress = progress
        if progress.source is not None:
            self._open()  # reads up to where the saved run was

    def restarted(self) -> StepLoader:
        """Return a loader that starts where this one did (Megatron's full validation)."""
        again = type(self)(
            self.stream, self.config, channel=self._channel, num_workers=self._num_workers
        )
        again._start = again._progress = self._start
        again.fetch_limit_s, again.deadline = self.fetch_limit_s, self.deadline
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
            request: Request = next(self._steps)
            while not isinstance(request, (PackedStep, Failure)):
                try:
                    answer = self._answer(request)
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
        self._progress = request.progress
        return request

    def end(self) -> None:
        """Tell the other replicas that no further step is made, if they do not know; drop them."""
        self.close()
        while not self.is_over:
            self.make_step()
        if self._steps is not None:
            self._steps.close()
        elif isinstance(self._loop, LoopProcess):
            self._loop.kill()

    def _answer(self, request: Request) -> Any:
        channel = self._channel
        match request:
            case Gather(record):
                return channel.gather(record)
            case GatherBlocks(record):
                return channel.gather_blocks(record)
            case GatherAll(record):
                return channel.gather_all(record)
            case Exchange(step, sends, receives):
                return channel.exchange(step, sends, receives)
        raise AssertionError(f"no request: {request}")

    def _open(self) -> StepLoop | LoopProcess:
        if self._loop is None:
            num = 0 if self._is_closing else self._num_workers  # one that closes reads nothing
            workers = Workers(num=num, timeout_s=self.fetch_limit_s)
            spec = LoopSpec(
                stream=self.stream,
                config=self.config,
                replica=self._channel.replica,
                start=self._start,
                workers=workers,
            )
            self._loop = (
                LoopProcess(spec, deadline=self.deadline) if spec.has_process else spec.make()
            )
            if self._is_closing:
                self._loop.close()
        return self._loop
