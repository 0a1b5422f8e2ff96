"""The step loader: replicas as threads, from a user's dataset to packed steps, whatever goes wrong.

With workers the loop runs in a process of its own, which has them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
from synthetic_data import (
    Records,
    check_content,
    in_threads,
    lenient_stream,
    metadata_of,
    rules,
    single_stream,
    step_config,
    steps_of,
)

from odb_megatron.comm.groups import ControlError
from odb_megatron.comm.heartbeat import Deadline
from odb_megatron.data.sample import BadRecordError, Sample
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.wire import decode_step
from odb_megatron.data.workers import WorkerError
from odb_megatron.plan.record import LoaderClosedError, PlanConfig, ReplicaFailedError
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels


def _children() -> set[psutil.Process]:
    """Processes that the fork server has started, and theirs."""
    own = psutil.Process().children()
    return {one for server in own for one in server.children(recursive=True) if _lives(one)}


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process and no thread outlives its loader."""
    threads, others = set(threading.enumerate()), _children()  # of other tests' worlds
    yield
    end = time.monotonic() + 20
    while time.monotonic() < end and (_children() - others or set(threading.enumerate()) - threads):
        time.sleep(0.05)
    assert not _children() - others
    assert not set(threading.enumerate()) - threads


def _errors(
    stream: SampleStream, config: PlanConfig, *, num_workers: Sequence[int], **more: Any
) -> list[BaseException]:
    """Run replicas with these workers to their errors; all must have one, soon."""

    def go(channel: ThreadChannel) -> None:
        loader = StepLoader(
            stream, config, channel=channel, num_workers=num_workers[channel.replica]
        )
        for name, value in more.items():
            setattr(loader, name, value)
        try:
            steps_of(loader)
        except Exception:
            loader.end()  # as a feed does: the others are told
            raise

    started = time.monotonic()
    results = run_in_threads(go, thread_channels(config.num_replicas, timeout_s=200.0))
    assert time.monotonic() - started < 150  # nobody waited for the time-out
    for result in results:
        assert isinstance(result, BaseException)
    return results  # type: ignore[return-value]


# --- steps ------------------------------------------------------------------------------------


class Delayed(Records):
    """Records that take a random time each, other times in every run."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(random.SystemRandom().choice([0.0, 0.0, 0.001, 0.01]))
        return super().__getitem__(index)


def test_any_number_of_workers_gives_the_same_steps() -> None:
    """Over several epochs, with bad and overlong records: all samples once, whole, in order."""
    rng = random.Random(3)
    lengths = [rng.choice([0, *range(1, 36)]) for _ in range(25)]
    stream = lenient_stream(lengths, num_samples=60, kind=Delayed)
    config = step_config(total=60, global_batch_size=6)

    def go(channel: ThreadChannel) -> list[Any]:
        runs = []
        for num_workers in (0, 2):
            loader = StepLoader(stream, config, channel=channel, num_workers=num_workers)
            runs.append(steps_of(loader))
            assert loader.make_step() is None
            assert loader.progress == runs[-1][-1].progress
        return runs

    results = in_threads(go)
    for plain, with_workers in results:
        for one, other in zip(plain, with_workers, strict=True):
            assert metadata_of(one) == metadata_of(other)
            assert bytes(one.payload) == bytes(other.payload)
            assert one.progress == other.progress
    trained: list[int] = []
    usable = [at for at in range(60) if isinstance(stream.fetch(at), Sample)]
    for step in zip(*(plain for plain, _ in results), strict=True):
        ids = []
        for one in step:
            metadata = metadata_of(one)
            check_content(decode_step(metadata, one.payload), stream)
            ids += [at for row in metadata.positions for at in row]
        trained += sorted(ids)
    assert trained == usable
    counts = [plain[-1].progress.source_counts[0] for plain, _ in results]
    assert sum(one.samples for one in counts) == len(usable)
    assert sum(one.bad_records + one.overlong for one in counts) == 60 - len(usable)
    assert all(one.first_message for one in counts)
    assert sum(metadata_of(step).totals.num_moved for step in results[0][0]) > 0


def test_a_pass_begins_anew() -> None:
    """As evaluation does; its length is known, and the wait for data is measured."""

    class Slow(Records):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.01)
            return super().__getitem__(index)

    stream, config = single_stream(Slow([3] * 10)), step_config(total=10)

    def go(channel: ThreadChannel) -> int:
        loader = StepLoader(stream, config, channel=channel, consumed=2)
        assert (len(loader), loader.config, loader.stream) == (2, config, stream)
        steps = steps_of(loader)
        again = steps_of(loader.restarted())
        assert list(map(metadata_of, steps)) == list(map(metadata_of, again))
        assert metadata_of(steps[0]).totals.consumed_before == 2
        return min(step.header.totals.wait_us for step in steps)

    waits = in_threads(go)
    assert waits[0] == waits[1] >= 20_000  # two samples per replica and step


# --- errors of the data -----------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_datasets_own_failure_stops_all_replicas(num_workers: int) -> None:
    stream = single_stream(Records([3] * 12, failing=5))
    guilty = next(p for p in range(12) if stream.locate(p).record == 5) % 2
    config = step_config(total=12, global_batch_size=2)
    workers = [num_workers * (replica == guilty) for replica in range(2)]
    errors = _errors(stream, config, num_workers=workers)
    assert isinstance(errors[guilty], BadRecordError)
    assert "record 5 raised KeyError: 'no such thing in record 5'" in str(errors[guilty])
    assert isinstance(errors[1 - guilty], ReplicaFailedError)
    assert str(errors[1 - guilty]).startswith(
        f"replica {guilty} failed: BadRecordError: synthetic:6"
    )


class Deadly(Records):
    """Record 5 ends the process that reads it, or never comes."""

    def __init__(self, lengths: Sequence[int], *, hangs: bool) -> None:
        super().__init__(lengths)
        self.hangs = hangs

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self.hangs:
            time.sleep(1000)
        elif index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("hangs", "error", "text"),
    [
        (False, WorkerError, r"a data-loader worker has ended .*record 5 of synthetic.*--num-work"),
        (True, BadRecordError, r"record 5 of synthetic\) took longer than 1 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_named(
    hangs: bool, error: type[Exception], text: str
) -> None:
    stream = single_stream(Deadly([3] * 12, hangs=hangs))
    guilty = next(p for p in range(12) if stream.locate(p).record == 5) % 2
    config = step_config(total=12, global_batch_size=12)
    workers = [int(replica == guilty) for replica in range(2)]
    errors = _errors(stream, config, num_workers=workers, fetch_limit_s=1.0)
    with pytest.raises(error, match=text):
        raise errors[guilty]
    assert str(errors[1 - guilty]).startswith(f"replica {guilty} failed: {error.__name__}: ")


class Large(Records):
    """More than a pipe holds: a worker is always sending."""

    def __getitem__(self, index: int) -> Any:
        return {name: [1] * 20_000 for name in ("tokens", "labels", "loss_mask")}


def test_a_worker_that_is_killed_while_it_sends_is_noticed() -> None:
    """Torch's loader alone waits for the rest of what it was sending."""
    stream = single_stream(
        Large([20_000] * 64), sample_rules=rules(context=20_000, token_budget=20_000)
    )
    config = step_config(total=64, num_replicas=1, global_batch_size=1, token_budget=20_000)
    loader = StepLoader(stream, config, channel=thread_channels(1)[0], num_workers=1)
    loader.make_step()
    (worker,) = psutil.Process(_loop_process().pid).children()
    time.sleep(1.0)
    worker.kill()
    started = time.monotonic()
    with pytest.raises(WorkerError, match="a data-loader worker has ended"):
        steps_of(loader)
    assert time.monotonic() - started < 20


def test_a_dataset_that_cannot_be_pickled_is_refused() -> None:
    class Local(Records):
        """Cannot be imported by a worker."""

    stream = single_stream(Local([3] * 20))
    for error in _errors(stream, step_config(), num_workers=[1, 1]):
        assert isinstance(error, (ValueError, ControlError))
    loader = StepLoader(
        stream, step_config(num_replicas=1), channel=thread_channels(1)[0], num_workers=1
    )
    with pytest.raises(ValueError, match="the data cannot be sent to worker processes") as caught:
        loader.make_step()
    assert "at the top level of a module" in str(caught.value)
    assert "--num-workers 0" in str(caught.value)


# --- the loop's process -----------------------------------------------------------------------


def _loop_process() -> Any:
    (process,) = [one for one in multiprocessing.active_children() if one.name == "the step loop"]
    return process


class _Alone:
    """The heartbeat of a world of one rank."""

    gone: dict[int, str] = {}  # noqa: RUF012
    who = "rank 0"

    def note(self, what: str, number: int) -> None:
        pass

    def ask(self, what: str, number: int) -> None:
        pass

    def diagnosis(self, what: str = "") -> str:
        return ""


def _deadline(timeout_s: float) -> Deadline:
    return Deadline(_Alone(), timeout_s=timeout_s, warn_s=1.0)  # type: ignore[arg-type]


def _loader(total: int = 400, **more: Any) -> StepLoader:
    config = step_config(total=total, num_replicas=1)
    stream = lenient_stream([3] * total)
    return StepLoader(stream, config, channel=thread_channels(1)[0], num_workers=2, **more)


def test_a_killed_loop_is_named_and_leaves_no_worker() -> None:
    others = _children()
    loader = _loader()
    loader.make_step()
    assert len(_children() - others) >= 3
    process = _loop_process()
    os.kill(process.pid, signal.SIGKILL)
    text = f"process {process.pid} has ended with exit code -9: .*lower --num-workers"
    with pytest.raises(WorkerError, match=text):
        steps_of(loader)
    assert loader.make_step() is None
    del loader  # at once: its workers are gone as well


@pytest.mark.parametrize("whom", ["loop", "worker"])
def test_a_stopped_process_is_warned_of_and_ends_in_time(
    whom: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = _loader()
    loader.deadline = deadline = _deadline(6.0)
    loader.make_step()
    process = psutil.Process(_loop_process().pid)
    for one in [process] if whom == "loop" else process.children():
        one.suspend()
    started = time.monotonic()
    text = f"waiting for the step loop's process {process.pid}, or its .*trainer has waited \\d+ s"
    with pytest.raises(WorkerError, match=text), deadline.waiting():
        steps_of(loader)
    assert time.monotonic() - started < 30
    error = capsys.readouterr().err
    assert "odb: warning: rank 0: the trainer waits for the step loop's process" in error
    assert "It is an error after 6 s" in error


def test_a_stopped_process_that_is_sent_much_ends_in_time() -> None:
    """More than a pipe holds: the trainer would wait in writing."""
    config = step_config(total=1 << 14, num_replicas=1, global_batch_size=1 << 14)
    stream = lenient_stream([1] * (1 << 14))
    loader = StepLoader(stream, config, channel=thread_channels(1)[0], num_workers=1)
    loader.deadline = deadline = _deadline(3.0)
    original, channel = loader._channel.gather, loader._channel

    def gather(record: bytes) -> list[bytes]:
        if len(record) > 64:
            psutil.Process(_loop_process().pid).suspend()
        return original(record)

    channel.gather = gather  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match=r"the trainer has waited \d+ s"), deadline.waiting():
        loader.make_step()


# --- closing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_replica_that_closes_stops_all(num_workers: int, after: int) -> None:
    """One that was never used starts no process to say so."""
    before = set(multiprocessing.active_children())

    def go(channel: ThreadChannel) -> None:
        workers = num_workers * channel.replica
        stream, config = lenient_stream([3] * 40), step_config(total=40)
        loader = StepLoader(stream, config, channel=channel, num_workers=workers)
        assert len(steps_of(loader, most=after)) == after
        if channel.replica == 1:
            loader.close()
        with pytest.raises(LoaderClosedError, match="a replica has closed its loader"):
            loader.make_step()
        assert after or set(multiprocessing.active_children()) <= before
        assert loader.make_step() is None
        loader.end()

    in_threads(go)
