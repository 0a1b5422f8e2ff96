"""The feed: what each rank of a replica gets, made ahead or not; errors, closing, a new pass."""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from synthetic_data import (
    LENIENT,
    Records,
    check_content,
    in_threads,
    lenient_stream,
    rules,
    single_stream,
    step_config,
)

from odb_megatron.data.feed import StepFeed
from odb_megatron.data.loop import StepLoop
from odb_megatron.data.sample import BadRecordError
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.data.wire import StepHeader
from odb_megatron.plan.record import LoaderClosedError, ReplicaFailedError
from odb_megatron.testing.replicas import ThreadChannel, thread_channels

WAIT_S = 60.0
ERROR = {"skip_bad": False}
LENGTHS = [random.Random(9).choice([0, *range(1, 33)]) for _ in range(40)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert not set(threading.enumerate()) - before


def feed_of(
    channel: ThreadChannel, *, plan_ahead: int, stream: Any = None, **more: Any
) -> StepFeed:
    stream = stream or lenient_stream(LENGTHS)
    config = step_config(total=len(stream), num_replicas=channel.num_replicas, **more)
    return StepFeed(StepLoader(stream, config, channel=channel), plan_ahead=plan_ahead)


def read(feed: StepFeed, *, most: int | None = None, delay_s: float = 0.0) -> list[Any]:
    """Take steps as a trainer does: header, micro-batches, and where the loader stands then."""
    (iterator,) = feed.iterators
    steps: list[Any] = []
    while len(steps) != most:
        try:
            header = next(iterator)
        except StopIteration:
            break
        assert isinstance(header, StepHeader)
        items = [next(iterator) for _ in range(header.totals.num_micro_batches)]
        time.sleep(random.SystemRandom().random() * delay_s)
        timeless = replace(header, totals=replace(header.totals, wait_us=0), plan_us=0)
        steps.append((timeless, items, feed.progress))
    return steps


def named(steps: list[Any]) -> list[Any]:
    """What can be compared: headers, tokens and progress."""
    return [
        (header, [item.tokens.tolist() for item in items], progress)
        for header, items, progress in steps
    ]


# --- one rank ---------------------------------------------------------------------------------


def test_steps_and_progress_do_not_depend_on_timing() -> None:
    """What is asked about the loader is answered for the last step that was handed out."""

    class Delayed(Records):
        def __getitem__(self, index: int) -> Any:
            time.sleep(random.SystemRandom().choice([0.0, 0.0, 0.003]))
            return super().__getitem__(index)

    stream = lenient_stream(LENGTHS, kind=Delayed)

    def go(channel: ThreadChannel) -> list[Any]:
        runs = []
        for plan_ahead in (1, 5):
            feed = feed_of(channel, plan_ahead=plan_ahead, stream=stream)
            assert feed.progress.consumed == 0
            runs.append(named(read(feed, delay_s=0.01)))
            assert feed.progress == runs[-1][-1][2]
            assert feed.close(timeout_s=WAIT_S)
        return runs

    for first, *others in in_threads(go):
        assert len(first) == 10
        assert [progress.consumed for _, _, progress in first] == list(range(4, 41, 4))
        assert all(other == first for other in others)


def test_making_steps_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking, in any thread, ends a capture of CUDA graphs."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for owner, name in ((torch.Tensor, "pin_memory"), (torch.cuda, "current_device")):
        monkeypatch.setattr(owner, name, lambda *_args, own=name: calls.append(own))
    feed = feed_of(thread_channels(1)[0], plan_ahead=2)
    assert len(read(feed)) == 10
    assert feed.close(timeout_s=WAIT_S)
    assert calls == []


def test_several_loaders_at_once_in_turns() -> None:
    """Train, valid and test; each reports how its steps came."""
    groups = [thread_channels(2) for _ in range(3)]

    def go(channel: ThreadChannel) -> None:
        feeds = [feed_of(group[channel.replica], plan_ahead=2) for group in groups]
        for _ in range(4):
            found = [named(read(feed, most=1)) for feed in feeds]
            assert found[0] == found[1] == found[2]
        for feed in feeds:
            end = time.monotonic() + WAIT_S
            while feed.num_ready < 2 and time.monotonic() < end:
                time.sleep(0.001)
            read(feed, most=1)
            assert min(feed.delivered[name] for name in ("queue_steps", "queue_bytes")) >= 1
            assert feed.delivered["wait_s"] < WAIT_S
            assert feed.close(timeout_s=WAIT_S)

    in_threads(go)


def test_a_pass_can_be_broken_off_and_begun_again() -> None:
    def go(channel: ThreadChannel) -> None:
        feed = feed_of(channel, plan_ahead=2)
        (iterator,) = feed.iterators
        passes = []
        for most in (3, None, 1, None):
            assert iter(iterator) is iterator
            passes.append(named(read(feed, most=most)))
        assert feed.close(timeout_s=WAIT_S)
        assert len(passes[1]) == 10
        assert passes[1] == passes[3]
        assert (passes[0], passes[2]) == (passes[1][:3], passes[1][:1])

    in_threads(go)


# --- closing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan_ahead", "after"), [(1, 0), (2, 4), (5, 1)])
def test_a_replica_that_closes_stops_all(plan_ahead: int, after: int) -> None:
    """Steps that were made everywhere are trained by those who go on, and no more."""

    def go(channel: ThreadChannel) -> tuple[list[Any], Any]:
        feed = feed_of(channel, plan_ahead=plan_ahead)
        steps, error = [], None
        try:
            if channel.replica == 1:
                steps = read(feed, most=after)
            while channel.replica != 1:
                steps += read(feed, most=1)
        except Exception as found:
            error = found
        assert feed.close(timeout_s=WAIT_S)
        assert feed.close(timeout_s=0.0)
        with pytest.raises(RuntimeError, match="is closed: no step can be taken from it any more"):
            feed.next_item(0)
        return [header.totals for header, _, _ in steps], error

    first, second, third = in_threads(go, 3)
    assert second[1] is None
    for other in (first, third):
        assert isinstance(other[1], LoaderClosedError)
        assert other[0][:after] == second[0]
        assert after <= len(other[0]) <= after + plan_ahead + 1
    assert first[0] == third[0]


@pytest.mark.parametrize(("plan_ahead", "stop"), [(1, 0), (2, 3), (5, 3), (2, 99)])
def test_all_can_stop_after_the_same_step(plan_ahead: int, stop: int) -> None:
    """As an iteration limit, an exit interval or the end of the data; nobody waits for anybody."""

    def go(channel: ThreadChannel) -> int:
        feed = feed_of(channel, plan_ahead=plan_ahead)
        steps = read(feed, most=None if stop == 99 else stop, delay_s=0.01)
        assert feed.close(timeout_s=WAIT_S)
        # The channel is at rest: whatever comes next on it finds its peers.
        assert channel.gather(b"next") == [b"next"] * 3
        return len(steps)

    assert in_threads(go, 3) == [min(stop, 10)] * 3


def test_closing_does_not_wait_for_ever_and_wakes_the_trainer() -> None:
    """The thread is in a step that others hold up; a signal handler closes."""
    feed = feed_of(thread_channels(2, timeout_s=5.0)[0], plan_ahead=1)  # nobody is there
    found: list[str] = []

    def train() -> None:
        try:
            feed.next_item(0)
        except RuntimeError as error:
            found.append(str(error))

    trainer = threading.Thread(target=train)
    trainer.start()
    time.sleep(0.5)
    with pytest.raises(RuntimeError, match="the pass before this one did not end within 0 s: a r"):
        feed.restart(timeout_s=0.01)
    trainer.join(WAIT_S)
    assert found == ["the step queue is closed: no step can be taken from it any more"]
    assert feed.close(timeout_s=WAIT_S)


# --- errors -----------------------------------------------------------------------------------


def _errors(**how: Any) -> list[tuple[int, Exception]]:
    """Train until an error; return the steps before it, and the error, by replica."""

    def go(channel: ThreadChannel) -> tuple[int, Exception]:
        feed, count = feed_of(channel, plan_ahead=3, **how), 0
        try:
            while True:
                count += len(read(feed, most=1))
        except Exception as error:
            return count, error
        finally:
            assert feed.close(timeout_s=WAIT_S)

    return in_threads(go)


def test_a_bad_record_reaches_all_trainers_after_the_steps_before_it() -> None:
    limits = {"context": 32, "token_budget": 32}
    stream = single_stream(Records([3] * 40 + [0]), sample_rules=rules(**limits))
    position = next(at for at in range(41) if stream.locate(at).record == 40)
    found = _errors(stream=stream, global_batch_size=2)
    guilty, other = found[position % 2][1], found[1 - position % 2][1]
    assert isinstance(guilty, BadRecordError)
    frames = traceback.extract_tb(guilty.__traceback__)
    assert {"take", "make_step"} <= {frame.name for frame in frames}
    assert isinstance(other, ReplicaFailedError)
    assert str(other).startswith(f"replica {position % 2} failed: BadRecordError: synthetic:41: ")
    assert found[0][0] == found[1][0] == position // 2  # every step before it was trained


def test_an_error_after_the_gather_reaches_all_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = StepLoop._pack

    def broken(self: StepLoop, rows: Any, plan: Any, totals: Any) -> Any:
        if self._replica == 1 and totals.step == 4:
            raise OSError("no memory to pack in")
        return pack(self, rows, plan, totals)

    monkeypatch.setattr(StepLoop, "_pack", broken)
    (made, other), (count, error) = _errors()
    assert (count, str(error)) == (4, "no memory to pack in")
    assert isinstance(other, ReplicaFailedError)
    assert str(other) == "replica 1 failed: OSError: no memory to pack in"
    assert made == 5  # its own part of the step was fine


# --- the other ranks of a replica --------------------------------------------------------------


class RankChannel:
    """A replica's channel between threads: rank 2 is a middle pipeline stage, without tokens."""

    def __init__(self, queues: list[queue.Queue[Any]], rank: int) -> None:
        self._queues, self._rank = queues, rank
        self.num_collectives = self.num_bytes = 0

    has_attachment = False

    @property
    def has_payload(self) -> bool:
        return self._rank != 2

    def header(self, data: bytes | None = None) -> bytes:
        self.num_collectives += 1
        if data is None:
            found: bytes = self._queues[self._rank].get(timeout=WAIT_S)
            return found
        for other in self._queues[1:]:
            other.put(data)
        return data

    def payload(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        self.num_collectives += 1
        if self._rank:
            data[:] = self._queues[self._rank].get(timeout=WAIT_S)
        else:
            for other in (self._queues[1], self._queues[3]):
                other.put(data.copy())
        return data


def in_ranks(
    function: Callable[[StepFeed, RankChannel], Any],
    *,
    stream: Any = None,
    parts: int = 1,
    **more: Any,
) -> list[Any]:
    """Run `function` on the four ranks of a replica; return its results, or what it raised."""
    queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(4)]
    stream = stream or lenient_stream(LENGTHS)
    (source,) = thread_channels(1)
    results: list[Any] = [None] * 4

    def run(rank: int) -> None:
        config = step_config(total=len(stream), num_replicas=1, **more)
        channel = RankChannel(queues, rank)
        feed = StepFeed(
            StepLoader(stream, config, channel=source) if rank == 0 else None,
            channel=channel,
            part=(parts, rank % parts),
            num_chunks=2,
            plan_ahead=rank + 1,
        )
        try:
            results[rank] = function(feed, channel)
        except Exception as error:
            results[rank] = error
        finally:
            feed.close(timeout_s=WAIT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("sizes", [(), (32,)])
def test_every_rank_gets_the_source_ranks_steps(sizes: tuple[int, ...]) -> None:
    def go(feed: StepFeed, channel: RankChannel) -> Any:
        first, second = feed.iterators
        items = list(first)
        assert [next(second) for _ in items] == items  # the other chunk has the same objects
        with pytest.raises(StopIteration):
            next(second)
        return items, channel.num_collectives

    expected, *others = in_ranks(go, sizes=sizes)
    stream = lenient_stream(LENGTHS)
    check_content([item for item in expected[0] if isinstance(item, MicroBatch)], stream)
    num_steps = sum(isinstance(item, StepHeader) for item in expected[0])
    assert num_steps == 10
    for rank, (items, num_collectives) in enumerate(others, 1):
        # Two broadcasts a step, one where no tokens are used, and one for the end.
        assert num_collectives == num_steps * (1 if rank == 2 else 2) + 1
        for item, wanted in zip(items, expected[0], strict=True):
            if isinstance(wanted, StepHeader):
                assert item == wanted
                continue
            names = ["cu_seqlens", "cu_seqlens_padded"]
            if rank == 2:
                assert type(item) is MicroBatchLayout
            else:
                names += ["tokens", "labels", "loss_mask", "position_ids"]
            assert item.positions == wanted.positions
            for name in names:
                assert torch.equal(getattr(item, name), getattr(wanted, name))
    if sizes:
        assert {item.tokens.numel() for item in expected[0] if isinstance(item, MicroBatch)} == {32}


def test_context_parallel_ranks_get_their_parts() -> None:
    def go(feed: StepFeed, channel: RankChannel) -> list[MicroBatch]:
        return [item for item in feed.iterators[0] if isinstance(item, MicroBatch)]

    whole = in_ranks(go, multiple=4)[0]
    parts = in_ranks(go, multiple=4, parts=2)
    for item, first, second in zip(whole, parts[0], parts[1], strict=True):
        assert first.tokens.size(1) == second.tokens.size(1) == item.tokens.size(1) // 2
        together = torch.cat([first.tokens, second.tokens], dim=1)
        assert torch.equal(together.sort().values, item.tokens.sort().values)
        assert torch.equal(first.cu_seqlens_padded, item.cu_seqlens_padded)


def test_an_end_of_the_source_rank_reaches_all_ranks() -> None:
    stream = single_stream(Records(LENGTHS, failing=5), sample_rules=rules(**LENIENT | ERROR))
    source, *others = in_ranks(lambda feed, _: list(feed.iterators[0]), stream=stream)
    assert isinstance(source, BadRecordError)
    for error in others:
        assert isinstance(error, ReplicaFailedError)
        assert "the source rank of this replica failed" in str(error)
        assert str(source).partition("\n")[0] in str(error)

    def close(feed: StepFeed, channel: RankChannel) -> int:
        count = 0
        for item in feed.iterators[0]:
            count += isinstance(item, StepHeader)
            if channel._rank == 0 and count == 3:
                assert feed.close(timeout_s=WAIT_S)
                return count
        return count

    first, *others = in_ranks(close)
    assert first == 3
    for error in others:
        assert isinstance(error, LoaderClosedError)
        assert "the source rank of this replica stopped" in str(error)
