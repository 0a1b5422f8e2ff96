"""Steps made ahead of the trainer: same plans and states, clean closing, errors that arrive."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_data import Records, rules, single_stream
from test_calibrated_loader import AFTER, LENGTHS, Calibrated
from test_step_loader import (
    BUDGET,
    LENIENT,
    _config,
    _lengths,
    _read_feed,
    _results,
    _stream,
    _totals,
    runs,
)

from odb_megatron.data.finished_step import FinishedStep
from odb_megatron.data.sample import BadRecordError
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.step_feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import WorkerStart
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.plan.termination import LoaderClosedError
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a trainer can know after one step."""

    totals: Any
    micro_batches: Any
    tokens: list[list[int]]
    state: str
    counts: tuple[SourceCounts, ...]
    window_bytes: int


class Delayed(Records):
    """Records that take a random time each, other times in every run."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(random.SystemRandom().choice([0.0, 0.0, 0.0, 0.003]))
        return super().__getitem__(index)


def _feed(
    stream: SampleStream, config: PlanConfig, exchange: ThreadExchange, **options: Any
) -> StepFeed:
    plan_ahead = options.pop("plan_ahead")
    return StepFeed(StepLoader(stream, config, exchange=exchange, **options), plan_ahead=plan_ahead)


def _watch(feed: StepFeed, *, most: int | None = None, delay_s: float = 0.0) -> list[Seen]:
    """Train up to `most` steps, looking at everything after each."""
    seen = []
    for step in islice(_read_feed(feed), most):
        time.sleep(random.SystemRandom().random() * delay_s)
        progress = feed.progress
        seen.append(
            Seen(
                totals=_totals(step),
                micro_batches=step.header.micro_batches,
                tokens=[batch.tokens.view(-1).tolist() for batch in step.micro_batches],
                state=json.dumps(feed.state_dict()),
                counts=progress.source_counts,
                window_bytes=feed.handed_out.window_bytes,
            )
        )
    return seen


def _run(
    stream: SampleStream, config: PlanConfig, *, delay_s: float = 0.0, **options: Any
) -> list[list[Seen]]:
    def go(exchange: ThreadExchange) -> list[Seen]:
        feed = _feed(stream, config, exchange, **options)
        try:
            return _watch(feed, delay_s=delay_s)
        finally:
            assert feed.close(timeout_s=WAIT_S)

    return _results(run_in_threads(go, thread_exchanges(config.num_replicas)))


@pytest.mark.parametrize("policy", PolicyName)
def test_plans_and_states_do_not_depend_on_timing(policy: PolicyName) -> None:
    limits = {"context": BUDGET, "token_budget": BUDGET, **LENIENT}
    stream = single_stream(
        Delayed(_lengths(25, seed=5)), num_samples=48, sample_rules=rules(**limits)
    )
    config = _config(policy=policy, total=48, exchange=ExchangeMode.TOKENS)
    first = _run(stream, config, plan_ahead=0)
    assert len(first[0]) > 5
    assert len({seen.state for seen in first[0]}) == len(first[0])
    if policy is PolicyName.COST:
        assert max(seen.window_bytes for seen in first[0]) > 0
    for plan_ahead, num_workers in ((1, 0), (2, 0), (5, 0), (2, 1), (5, 4), (0, 4)):
        found = _run(stream, config, plan_ahead=plan_ahead, num_workers=num_workers, delay_s=0.01)
        assert found == first, (plan_ahead, num_workers)


@settings(max_examples=40, deadline=None)
@given(runs(), st.sampled_from([1, 2, 5]), st.integers(0, 6))
def test_a_state_is_that_of_the_last_step_handed_out(
    run: tuple[SampleStream, PlanConfig], plan_ahead: int, stop: int
) -> None:
    """So a run that is saved after step t goes on with step t + 1, however far ahead it was."""
    stream, config = run
    whole = _run(stream, config, plan_ahead=0)

    def interrupted(exchange: ThreadExchange) -> list[Seen]:
        feed = _feed(stream, config, exchange, plan_ahead=plan_ahead)
        before = _watch(feed, most=stop)
        state = json.loads(json.dumps(feed.state_dict()))
        assert feed.close(timeout_s=WAIT_S)
        assert feed.state_dict() == state
        later = _feed(stream, config, exchange, plan_ahead=plan_ahead)
        later.load_state_dict(state)
        assert later.state_dict() == state
        rest = _watch(later)
        assert later.close(timeout_s=WAIT_S)
        return [_uncounted(seen) for seen in before + rest]

    results = _results(run_in_threads(interrupted, thread_exchanges(config.num_replicas)))
    for steps, found in zip(whole, results, strict=True):
        assert found == [_uncounted(seen) for seen in steps]


def _uncounted(seen: Seen) -> tuple[Any, ...]:
    """Counts begin anew with a process."""
    return seen.totals, seen.micro_batches, seen.tokens, seen.state, seen.window_bytes


@pytest.mark.parametrize("start", WorkerStart)
def test_every_way_to_start_workers_gives_the_same(start: WorkerStart) -> None:
    stream = _stream(_lengths(25, seed=3), num_samples=30, **LENIENT)
    config = _config(policy=PolicyName.COST, total=30)
    found = _run(stream, config, plan_ahead=2, num_workers=1, worker_start=start)
    assert found == _run(stream, config, plan_ahead=0)


def test_three_loaders_at_once() -> None:
    """Train, valid and test, in turns, each with a thread and workers of its own."""
    stream = _stream(_lengths(20, seed=4), num_samples=20, **LENIENT)
    config = _config(total=20)
    groups = [thread_exchanges(2) for _ in range(3)]

    def go(exchange: ThreadExchange) -> list[list[Any]]:
        feeds = [
            _feed(stream, config, group[exchange.replica], plan_ahead=2, num_workers=1)
            for group in groups
        ]
        readers = [_read_feed(feed) for feed in feeds]
        steps = [[_totals(next(reader)) for reader in readers] for _ in range(4)]
        assert all(feed.is_running for feed in feeds)
        for feed in feeds:
            assert feed.close(timeout_s=WAIT_S)
        return steps

    for steps in _results(run_in_threads(go, thread_exchanges(2))):
        assert all(len(set(step)) == 1 for step in steps)


@pytest.mark.parametrize("policy", PolicyName)
def test_a_calibration_waits_for_the_trainer(policy: PolicyName) -> None:
    def go(exchange: ThreadExchange, plan_ahead: int) -> Any:
        run = Calibrated(exchange, policy=policy)
        trained = 0
        measure = run._measure

        def measured() -> Any:
            assert trained == AFTER
            return measure()

        run.loader.calibrate(measured, after=AFTER, on_fit=run.fits.append)
        feed = StepFeed(run.loader, plan_ahead=plan_ahead)
        seen = []
        for step in _read_feed(feed):
            assert len(run.fits) == (trained >= AFTER)  # told before the step is handed out
            seen.append((_totals(step), step.header.micro_batches, feed.state_dict()))
            time.sleep(0.002)
            trained += 1
        assert feed.close(timeout_s=WAIT_S)
        return seen, run.fits

    found = [
        _results(run_in_threads(lambda exchange: go(exchange, depth), thread_exchanges(2)))  # noqa: B023
        for depth in (0, 1, 3)
    ]
    assert found[0] == found[1] == found[2]
    seen, fits = found[0][0]
    assert len(fits) == 1
    assert sum(totals.num_samples for totals, _, _ in seen) == len(LENGTHS)


# --- closing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How one replica left."""

    steps: list[Any]
    error: str
    kind: type[BaseException] | None


def _train_and_close(
    plan_ahead: int, *, closing: int, after: int, policy: PolicyName, exchange: ThreadExchange
) -> Left:
    """Train; one replica closes after some steps, the others go on while they get steps."""
    stream = _stream(_lengths(200, seed=9), num_samples=200, **LENIENT)
    config = _config(policy=policy, total=200, num_replicas=exchange.num_replicas)
    feed = _feed(stream, config, exchange, plan_ahead=plan_ahead)
    steps, error, kind = [], "", None
    reader = _read_feed(feed)
    try:
        for step in islice(reader, after if exchange.replica == closing else None):
            steps.append((_totals(step), step.header.micro_batches))
    except Exception as found:
        error, kind = str(found), type(found)
    assert feed.close(timeout_s=WAIT_S)
    assert not feed.is_running
    assert feed.close(timeout_s=0.0)
    with pytest.raises(RuntimeError, match="is closed: no step can be taken from it any more"):
        next(reader if exchange.replica == closing else _read_feed(feed))
    return Left(steps=steps, error=error, kind=kind)


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("plan_ahead", [1, 2, 5])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_replica_that_closes_stops_all(policy: PolicyName, plan_ahead: int, after: int) -> None:
    def go(exchange: ThreadExchange) -> Left:
        return _train_and_close(
            plan_ahead, closing=1, after=after, policy=policy, exchange=exchange
        )

    first, second, third = _results(run_in_threads(go, thread_exchanges(3)))
    assert (second.error, len(second.steps)) == ("", after)
    for other in (first, third):
        assert other.kind is LoaderClosedError
        assert other.error.startswith("replica 1 closed its loader in step ")
        stopped_in = int(other.error.rsplit(" ", 1)[1])
        assert len(other.steps) == stopped_in  # what was committed is trained, and no more
        assert after <= stopped_in <= after + plan_ahead + 1
    totals = [[totals for totals, _ in left.steps] for left in (first, second, third)]
    assert totals[0] == totals[2]
    assert totals[1] == totals[0][:after]


@pytest.mark.parametrize("plan_ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("stop", [0, 1, 3, 99])
def test_all_can_stop_after_the_same_step(plan_ahead: int, stop: int) -> None:
    """As an iteration limit, an exit interval or the end of the data; nobody waits for anybody."""
    stream = _stream(_lengths(40, seed=9), num_samples=40, **LENIENT)
    config = _config(policy=PolicyName.COST, total=40, num_replicas=3)
    exchanges = thread_exchanges(3)

    def go(exchange: ThreadExchange) -> int:
        feed = _feed(stream, config, exchange, plan_ahead=plan_ahead)
        steps = _watch(feed, most=stop, delay_s=0.01)
        assert feed.close(timeout_s=WAIT_S)
        return len(steps)

    counts = _results(run_in_threads(go, exchanges))
    assert len(set(counts)) == 1
    assert stop == 99 or counts[0] == stop
    # The channel is at rest: whatever comes next on it finds its peers.
    assert (
        _results(run_in_threads(lambda one: one.exchange(b"next"), exchanges))
        == [[b"next"] * 3] * 3
    )


@pytest.mark.parametrize("plan_ahead", [0, 2])
def test_a_pass_can_be_broken_off_and_begun_again(plan_ahead: int) -> None:
    stream = _stream(_lengths(40, seed=9), num_samples=40, **LENIENT)
    config = _config(total=40)

    def go(exchange: ThreadExchange) -> list[list[Any]]:
        feed = _feed(stream, config, exchange, plan_ahead=plan_ahead)
        (iterator,) = feed.iterators
        passes = []
        for stop in (3, None, 1, None):
            assert iter(iterator) is iterator
            passes.append([(s.totals, s.tokens, s.state) for s in _watch(feed, most=stop)])
        assert feed.close(timeout_s=WAIT_S)
        return passes

    for passes in _results(run_in_threads(go, thread_exchanges(2))):
        assert len(passes[1]) == 10
        assert passes[1] == passes[3]
        assert passes[0] == passes[1][:3]
        assert passes[2] == passes[1][:1]


def test_a_pass_that_does_not_end_is_not_begun_again() -> None:
    stream, config = _stream([3] * 20), _config()
    exchanges = thread_exchanges(2, timeout_s=1.0)  # nobody is at the other end
    feed = _feed(stream, config, exchanges[0], plan_ahead=2)
    with pytest.raises(RuntimeError, match="the pass before this one did not end within 0 s: a r"):
        feed.restart(timeout_s=0.01)
    feed.close(timeout_s=WAIT_S)


# --- errors ----------------------------------------------------------------------------------


def _errors(
    make: Callable[[ThreadExchange], StepFeed], num_replicas: int
) -> list[tuple[int, BaseException]]:
    """Train until an error; return the steps before it, and the error, by replica."""

    def go(exchange: ThreadExchange) -> tuple[int, BaseException]:
        feed, count = make(exchange), 0
        try:
            for _ in _read_feed(feed):
                count += 1
        except Exception as error:
            return count, error
        finally:
            assert feed.close(timeout_s=WAIT_S)
        raise AssertionError("no error")

    return _results(run_in_threads(go, thread_exchanges(num_replicas)))


@pytest.mark.parametrize("plan_ahead", [0, 1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_record_reaches_all_trainers(plan_ahead: int, num_workers: int) -> None:
    lengths = [3] * 40 + [0]
    stream = _stream(lengths)
    position = next(p for p in range(41) if stream.locate(p).record == 40)
    config = _config(total=41, num_replicas=2, global_batch_size=2)
    found = _errors(
        lambda exchange: _feed(
            stream, config, exchange, plan_ahead=plan_ahead, num_workers=num_workers
        ),
        2,
    )
    guilty = position % 2
    assert isinstance(found[guilty][1], BadRecordError)
    frames = traceback.extract_tb(found[guilty][1].__traceback__)
    assert {"take", "make_step"} <= {frame.name for frame in frames}
    other = found[1 - guilty][1]
    assert isinstance(other, ReplicaFailedError)
    assert str(other).startswith(f"replica {guilty} failed: BadRecordError: made up:41: ")
    assert found[0][0] == found[1][0] == position // 2  # every step before it was trained


@pytest.mark.parametrize("plan_ahead", [1, 3])
def test_an_error_after_the_exchanges_reaches_all_trainers(plan_ahead: int) -> None:
    class Broken(StepLoader):
        def _finish_step(self, plan: Any) -> FinishedStep:
            if self._exchange.replica == 1 and plan.totals.step == 4:
                raise OSError("no memory to assemble in")
            return super()._finish_step(plan)

    stream, config = _stream([3] * 80), _config(total=80)
    found = _errors(
        lambda exchange: StepFeed(Broken(stream, config, exchange=exchange), plan_ahead=plan_ahead),
        2,
    )
    assert found[1][0] == 4
    assert str(found[1][1]) == "no memory to assemble in"
    assert isinstance(found[0][1], ReplicaFailedError)
    assert str(found[0][1]) == "replica 1 failed: OSError: no memory to assemble in"


def test_threads_end() -> None:
    before = set(threading.enumerate())  # of other tests, which may end meanwhile
    stream, config = _stream([3] * 40), _config(total=40)
    for _ in range(3):
        _run(stream, config, plan_ahead=3)
    assert set(threading.enumerate()) <= before


def test_a_queue_reports_its_bytes() -> None:
    stream, config = _stream([BUDGET] * 40), _config(total=40, num_replicas=1)
    feed = _feed(stream, config, thread_exchanges(1)[0], plan_ahead=3)
    reader = _read_feed(feed)
    next(reader)
    deadline = time.monotonic() + WAIT_S
    while feed._queue.num_bytes < 3 * 4 * BUDGET * 20 and time.monotonic() < deadline:
        time.sleep(0.001)  # until three steps of four samples wait
    next(reader)
    assert 2 * 4 * BUDGET * 20 <= feed.handed_out.queue_bytes < 4 * 4 * BUDGET * 40
    assert len(list(reader)) == 8
    assert feed.handed_out.queue_bytes == 0
    assert feed.close(timeout_s=WAIT_S)
