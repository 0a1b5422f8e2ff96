"""`odb_megatron.data.step_loader`: replicas as threads, from a user's dataset to micro-batches.

Shape suffixes as in `data.thd`.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_data import BASE, Records, rules, single_stream

from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.order import CyclicOrder
from odb_megatron.data.preprocess import BadRecordPolicy
from odb_megatron.data.sample import BadRecordError, Sample
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.step_feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.workers import WorkerStart
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.plan.step import StepTotals
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

BUDGET = 32
LENIENT = {"bad_record": BadRecordPolicy.SKIP, "overlong": OverlongPolicy.DROP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one replica got of one step."""

    header: StepHeader
    micro_batches: list[MicroBatch]


def _config(**changes: Any) -> PlanConfig:
    values: dict[str, Any] = {
        "policy": PolicyName.SAMPLES,
        "total": 20,
        "global_batch_size": 4,
        "num_replicas": 2,
        "token_budget": BUDGET,
        "window": 8,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    }
    return PlanConfig(**values | changes)


def _stream(lengths: Sequence[int], *, num_samples: int | None = None, **policies: Any) -> Any:
    limits = {"context": BUDGET, "token_budget": BUDGET}
    return single_stream(
        Records(lengths), num_samples=num_samples, sample_rules=rules(**limits | policies)
    )


def _steps(loader: StepLoader, *, most: int | None = None) -> list[Step]:
    """Read the loader as the trainer does: a header, then exactly M micro-batches."""
    return list(islice(_read(loader), most))


def _read(loader: StepLoader, *, plan_ahead: int = 0) -> Iterator[Step]:
    return _read_feed(StepFeed(loader, plan_ahead=plan_ahead))


def _read_feed(feed: StepFeed) -> Iterator[Step]:
    (iterator,) = feed.iterators
    while True:
        try:
            header = next(iterator)
        except StopIteration:
            return
        assert isinstance(header, StepHeader)
        items = [next(iterator) for _ in range(header.totals.num_micro_batches)]
        micro_batches = [item for item in items if isinstance(item, MicroBatch)]
        assert len(micro_batches) == len(items)
        yield Step(header=header, micro_batches=micro_batches)


def _run(
    stream: SampleStream, config: PlanConfig, **options: Any
) -> tuple[list[list[Step]], list[list[SourceCounts]]]:
    """Run all replicas to the end; return steps and source counts by replica."""

    def go(exchange: ThreadExchange) -> tuple[list[Step], list[SourceCounts]]:
        loader = StepLoader(stream, config, exchange=exchange, **options)
        steps = _steps(loader)
        assert loader.make_step() is None
        assert loader.progress().window_bytes == 0
        return steps, list(loader.progress().source_counts)

    results = _results(run_in_threads(go, thread_exchanges(config.num_replicas)))
    return [steps for steps, _ in results], [counts for _, counts in results]


def _results(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def _totals(step: Step) -> StepTotals:
    """Totals without the one field that depends on timing."""
    return replace(step.header.totals, wait_us=0)


def _check_content(step: Step, stream: SampleStream, multiple: int) -> None:
    """Each packed micro-batch holds, in order, the samples it names, and nothing else."""
    assert [batch.positions for batch in step.micro_batches] == list(step.header.micro_batches)
    for batch in step.micro_batches:
        total = batch.tokens.shape[1]
        assert total == int(batch.cu_seqlens_padded[-1])
        if batch.is_idle:
            assert (total, float(batch.loss_mask.sum())) == (multiple, 0.0)
            continue
        assert total <= BUDGET
        carried = 0
        for slot, position in enumerate(batch.positions):
            sample = stream.fetch(position)
            assert isinstance(sample, Sample)
            start = int(batch.cu_seqlens_padded[slot])
            end = start + len(sample)
            assert int(batch.cu_seqlens[slot + 1] - batch.cu_seqlens[slot]) == len(sample)
            assert batch.tokens[0, start:end].tolist() == sample.tokens.tolist()
            assert batch.labels[0, start:end].tolist() == sample.labels.tolist()
            assert batch.loss_mask[0, start:end].tolist() == sample.loss_mask.tolist()
            carried += sample.num_loss_tokens
        assert int(batch.loss_mask.sum()) == carried


@st.composite
def runs(draw: st.DrawFn) -> tuple[SampleStream, PlanConfig]:
    """Small runs: uneven shards, tiny windows, several epochs, positions that emit nothing."""
    replicas = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 10))
    size = draw(st.integers(1, 30))
    total = draw(st.integers(0, 3 * size))
    policy = draw(st.sampled_from(PolicyName))
    multiple = draw(st.sampled_from([1, 4]))
    longest = draw(st.sampled_from([3, BUDGET, BUDGET + 8]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    skipped = draw(st.sampled_from([0.0, 0.3]))
    lengths = [0 if rng.random() < skipped else rng.randint(1, longest) for _ in range(size)]
    config = _config(
        policy=policy,
        total=total,
        global_batch_size=batch,
        num_replicas=replicas,
        multiple=multiple,
        window=draw(st.integers(-(-batch // replicas), 12)),
        exchange=draw(st.sampled_from(ExchangeMode)),
        balance=draw(st.sampled_from(BalanceScope)),
    )
    return _stream(lengths, num_samples=total, multiple=multiple, **LENIENT), config


@settings(max_examples=60)
@given(runs())
def test_every_position_is_emitted_once_or_counted(run: tuple[SampleStream, PlanConfig]) -> None:
    stream, config = run
    by_replica, counts = _run(stream, config)
    emitted: list[int] = []
    left_out = 0
    for steps in zip(*by_replica, strict=True):
        assert len({_totals(step) for step in steps}) == 1
        totals = steps[0].header.totals
        positions = [p for step in steps for batch in step.micro_batches for p in batch.positions]
        assert len(positions) == totals.num_samples
        assert totals.consumed_before == len(emitted) + left_out
        emitted += positions
        left_out += totals.num_left_out
        real = [int(batch.cu_seqlens[-1]) for step in steps for batch in step.micro_batches]
        assert sum(real) == totals.num_tokens
        assert totals.num_idle == sum(
            batch.is_idle for step in steps for batch in step.micro_batches
        )
        loss = sum(float(batch.loss_mask.sum()) for step in steps for batch in step.micro_batches)
        assert loss == totals.num_loss_tokens
        for step in steps:
            _check_content(step, stream, config.multiple)
    usable = [p for p in range(config.total) if isinstance(stream.fetch(p), Sample)]
    assert sorted(emitted) == usable
    assert left_out == config.total - len(usable)
    if by_replica[0]:
        assert [step.header.totals.is_final for step in by_replica[0]] == [False] * (
            len(by_replica[0]) - 1
        ) + [True]
    _check_counts(stream, config, [replica[0] for replica in counts])


def _check_counts(stream: SampleStream, config: PlanConfig, counts: Sequence[SourceCounts]) -> None:
    items = [stream.fetch(position) for position in range(config.total)]
    samples = [item for item in items if isinstance(item, Sample)]
    reasons = Counter(item.reason.value for item in items if not isinstance(item, Sample))
    assert sum(count.samples for count in counts) == len(samples)
    assert sum(count.tokens for count in counts) == sum(map(len, samples))
    assert sum(count.loss_tokens for count in counts) == sum(s.num_loss_tokens for s in samples)
    assert sum(count.bad_records for count in counts) == reasons["bad_record"]
    assert sum(count.overlong for count in counts) == reasons["overlong"]
    for count in counts:
        assert bool(count.first_message) == bool(count.bad_records + count.overlong)


def test_the_runs_above_are_not_trivial() -> None:
    """Guard: uneven shards, idle and split micro-batches, and M that varies do occur."""
    rng = random.Random(1)
    lengths = [rng.randint(1, BUDGET) for _ in range(30)]
    config = _config(total=70, num_replicas=4, global_batch_size=12)
    by_replica, _ = _run(_stream(lengths, num_samples=70), config)
    totals = [step.header.totals for step in by_replica[0]]
    assert len({total.num_micro_batches for total in totals}) > 1
    assert sum(total.num_split for total in totals) > 0
    tail, _ = _run(_stream([3] * 5), _config(total=5, num_replicas=4, global_batch_size=8))
    assert tail[0][0].header.totals.num_idle == 0  # two samples there, one micro-batch here
    uneven, _ = _run(_stream([30] * 5), _config(total=5, num_replicas=4, global_batch_size=8))
    assert uneven[0][0].header.totals.num_idle == 3


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize(
    ("size", "replicas", "batch", "window"),
    [
        (5, 4, 4, 2),  # 5 samples on 4 replicas
        (5, 4, 40, 50),  # fewer samples than a step, and than a window
        (1, 4, 4, 4),  # replicas without any sample
        (3, 2, 2, 100),
        (0, 2, 2, 2),  # nothing at all
    ],
)
def test_the_tail_of_an_epoch(
    policy: PolicyName, size: int, replicas: int, batch: int, window: int
) -> None:
    config = _config(
        policy=policy, total=size, num_replicas=replicas, global_batch_size=batch, window=window
    )
    by_replica, _ = _run(_stream([9, 20, 9, 1, 31], num_samples=size), config)
    emitted = [
        position
        for steps in by_replica
        for step in steps
        for batch_positions in step.header.micro_batches
        for position in batch_positions
    ]
    assert sorted(emitted) == list(range(size))
    assert len({len(steps) for steps in by_replica}) == 1


def test_an_epoch_on_cyclic_order_is_complete() -> None:
    order = CyclicOrder(total=12, num_replicas=3, data_sharding=True)
    stream = single_stream(Records([2] * 12), num_samples=12, order=order)
    by_replica, _ = _run(stream, _config(total=12, num_replicas=3, global_batch_size=6))
    tokens = [
        int(batch.tokens[0, start]) // BASE
        for steps in by_replica
        for step in steps
        for batch in step.micro_batches
        for start in batch.cu_seqlens[:-1]
    ]
    assert sorted(tokens) == list(range(12))


# --- handing samples over --------------------------------------------------------------------


@pytest.mark.parametrize("scope", BalanceScope)
@pytest.mark.parametrize("policy", PolicyName)
def test_samples_are_handed_over_whole(policy: PolicyName, scope: BalanceScope) -> None:
    """Every micro-batch holds what the stream has at its positions, whoever fetched it."""
    lengths = [1 if p % 3 else BUDGET for p in range(60)]
    stream = _stream(lengths, num_samples=60)
    config = _config(
        policy=policy, total=60, num_replicas=3, global_batch_size=12, balance=scope,
        exchange=ExchangeMode.TOKENS,
    )  # fmt: skip
    by_replica, counts = _run(stream, config)
    totals = [step.header.totals for step in by_replica[0]]
    assert sum(total.num_moved for total in totals) > 1
    assert sum(total.bytes_moved for total in totals) > BUDGET * 4
    for steps in by_replica:
        for step in steps:
            _check_content(step, stream, 1)
    trained = [sum(len(batch.positions) for s in steps for batch in s.micro_batches)
               for steps in by_replica]  # fmt: skip
    assert [replica[0].samples for replica in counts] == trained
    assert sum(trained) == 60
    plain, _ = _run(stream, replace(config, exchange=ExchangeMode.NONE))
    if policy is PolicyName.SAMPLES:
        for step, (one, other) in enumerate(
            zip(_step_ids(by_replica), _step_ids(plain), strict=True)
        ):
            assert one == other, step
        if scope is BalanceScope.STEP:
            assert all(max(total.costs) <= max(total.costs_before) for total in totals)


def _step_ids(by_replica: Sequence[Sequence[Step]]) -> list[list[int]]:
    return [
        sorted(p for step in steps for batch in step.micro_batches for p in batch.positions)
        for steps in zip(*by_replica, strict=True)
    ]


def test_own_micro_batches_come_first() -> None:
    """What is received may still be on its way while they are trained."""
    lengths = [1 if p % 2 else BUDGET for p in range(16)]
    config = _config(total=16, global_batch_size=16, exchange=ExchangeMode.TOKENS)
    by_replica, _ = _run(_stream(lengths, num_samples=16), config)
    batches = [list(batch.positions) for batch in by_replica[1][0].micro_batches]
    is_foreign = [any(p % 2 == 0 for p in positions) for positions in batches]
    assert True in is_foreign
    assert False in is_foreign
    assert is_foreign == sorted(is_foreign)


def test_an_exchange_needs_a_channel() -> None:
    class Bare(ThreadExchange):
        payloads = None  # type: ignore[assignment]

    exchange = thread_exchanges(2)[0]
    exchange.__class__ = Bare
    with pytest.raises(ValueError, match="exchange mode auto needs a channel for samples"):
        StepLoader(_stream([3] * 20), _config(exchange=ExchangeMode.AUTO), exchange=exchange)


def test_a_list_that_cannot_be_built_stops_all_replicas() -> None:
    class Huge(StepLoader):
        def _wire_size(self, sample: Sample) -> int:
            return 1 << 32 if self._exchange.replica == 0 else super()._wire_size(sample)

    config = _config(exchange=ExchangeMode.TOKENS)
    results = _all_fail(lambda exchange: Huge(_stream([3] * 20), config, exchange=exchange), 2)
    assert "what replicas hand to each other must stay below" in str(results[0])
    assert "use --odb-exchange none" in str(results[0])
    assert isinstance(results[1], ReplicaFailedError)
    assert str(results[1]).startswith("replica 0 failed while listing its samples")


def test_a_sample_of_another_size_than_announced_is_an_error() -> None:
    class Wrong(StepLoader):
        def _wire_size(self, sample: Sample) -> int:
            return super()._wire_size(sample) + 1

    lengths = [1 if p % 2 else BUDGET for p in range(16)]
    config = _config(total=16, global_batch_size=16, exchange=ExchangeMode.TOKENS)
    results = run_in_threads(
        lambda exchange: _steps(Wrong(_stream(lengths), config, exchange=exchange)),
        thread_exchanges(2, timeout_s=1.0),
    )
    texts = [str(result) for result in results]
    assert any("were announced to replica 1: this is a defect" in text for text in texts)


# --- workers and resume ----------------------------------------------------------------------


def _named(steps: Sequence[Step]) -> list[tuple[StepTotals, Any]]:
    return [(_totals(step), step.header.micro_batches) for step in steps]


def _lengths(size: int, *, seed: int, longest: int = BUDGET) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([0, *range(1, longest + 1)]) for _ in range(size)]


@pytest.mark.parametrize("policy", PolicyName)
def test_any_number_of_workers_gives_the_same_steps(policy: PolicyName) -> None:
    stream = _stream(_lengths(25, seed=3), num_samples=40, **LENIENT)
    config = _config(policy=policy, total=40)
    runs_by_workers = [_run(stream, config, num_workers=n)[0] for n in (0, 1, 3)]
    named = [[_named(steps) for steps in by_replica] for by_replica in runs_by_workers]
    assert named[0] == named[1] == named[2]
    assert len(named[0][0]) > 5
    for by_replica in runs_by_workers:
        for steps in by_replica:
            for step in steps:
                _check_content(step, stream, 1)


def test_a_reassigned_position_is_fetched_by_another_replica() -> None:
    """Its sample is dropped where it was held, and trained once, whatever the worker count."""
    random = np.random.RandomState(0)
    lengths = np.clip(random.lognormal(1.0, 1.0, size=120), 1, BUDGET).astype(int).tolist()
    stream = _stream(lengths, num_samples=120)
    config = _config(
        policy=PolicyName.COST, total=120, global_batch_size=16, num_replicas=4, window=12
    )
    by_workers = [_run(stream, config, num_workers=n)[0] for n in (0, 2)]
    for by_replica in by_workers:
        emitted = [
            position
            for steps in by_replica
            for step in steps
            for micro_batch in step.micro_batches
            for position in micro_batch.positions
        ]
        assert sorted(emitted) == list(range(120))
        assert sum(step.header.totals.num_reassigned for step in by_replica[0]) > 0
    named = [[_named(steps) for steps in by_replica] for by_replica in by_workers]
    assert named[0] == named[1]


class _Delayed(Records):
    """Records that take a random time each, other times in every run."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(random.SystemRandom().choice([0.0, 0.0, 0.001, 0.01]))
        return super().__getitem__(index)


@pytest.mark.parametrize(("window", "batch"), [(1, 2), (8, 4)])
def test_late_workers_change_no_plan(window: int, batch: int) -> None:
    limits = {"context": BUDGET, "token_budget": BUDGET, **LENIENT}
    stream = single_stream(
        _Delayed(_lengths(25, seed=5)), num_samples=30, sample_rules=rules(**limits)
    )
    config = _config(policy=PolicyName.COST, total=30, global_batch_size=batch, window=window)
    named = [
        [_named(steps) for steps in _run(stream, config, num_workers=n)[0]] for n in (0, 1, 4, 8)
    ]
    assert named[0] == named[1] == named[2] == named[3]
    assert len(named[0][0]) > 5


def test_workers_end_when_all_is_drawn() -> None:
    """Megatron never asks for an item after the last, so the end of iteration is too late."""
    loader = StepLoader(
        _stream([3] * 8),
        _config(total=8, num_replicas=1),
        exchange=thread_exchanges(1)[0],
        num_workers=2,
        worker_start=WorkerStart.FORK,
    )
    before = set(psutil.Process().children())
    steps = [loader.make_step()]
    assert len(set(psutil.Process().children()) - before) == 2
    steps.append(loader.make_step())
    assert [step and step.header.totals.is_final for step in steps] == [False, True]
    assert set(psutil.Process().children()) <= before


@settings(max_examples=25)
@given(runs(), st.integers(0, 8))
def test_a_resumed_run_gives_the_steps_of_the_uninterrupted_one(
    run: tuple[SampleStream, PlanConfig], stop: int
) -> None:
    stream, config = run
    whole, _ = _run(stream, config)

    def interrupted(exchange: ThreadExchange) -> tuple[list[Step], list[Step]]:
        first = StepLoader(stream, config, exchange=exchange)
        before = _steps(first, most=stop)
        state = json.loads(json.dumps(first.state_dict()))  # as the checkpoint keeps it
        kept = json.dumps(state)
        second = StepLoader(stream, config, exchange=exchange, num_workers=0)
        second.load_state_dict(state)
        assert json.dumps(state) == kept
        assert second.state_dict() == first.state_dict()
        return before, _steps(second)

    results = _results(run_in_threads(interrupted, thread_exchanges(config.num_replicas)))
    for steps, (before, after) in zip(whole, results, strict=True):
        assert _named(before) + _named(after) == _named(steps)
        assert len(before) == min(stop, len(steps))
        for step in after:
            _check_content(step, stream, config.multiple)


def test_a_resume_in_mid_window_with_workers() -> None:
    """Guard: samples are held over the stop, and in flight in workers."""
    stream = _stream(_lengths(60, seed=5), num_samples=60, **LENIENT)
    config = _config(policy=PolicyName.COST, total=60, window=9)
    whole, _ = _run(stream, config)

    def interrupted(exchange: ThreadExchange) -> tuple[int, list[Step]]:
        first = StepLoader(stream, config, exchange=exchange, num_workers=2)
        _steps(first, most=3)
        second = StepLoader(stream, config, exchange=exchange, num_workers=1)
        state: Any = first.state_dict()
        second.load_state_dict(state)
        return len(state["window"]), _steps(second)

    results = _results(run_in_threads(interrupted, thread_exchanges(2)))
    assert min(held for held, _ in results) > 3
    for steps, (_, after) in zip(whole, results, strict=True):
        assert _named(after) == _named(steps)[3:]


def test_samples_resume_with_another_number_of_replicas() -> None:
    stream = _stream(_lengths(30, seed=6), num_samples=30, **LENIENT)
    config = _config(total=30, global_batch_size=6)
    whole, _ = _run(stream, config)
    later, _ = _run(stream, replace(config, num_replicas=3), consumed=12)
    old = [step.header for step in whole[0]][2:]
    new = [step.header for step in later[0]]
    assert [h.totals.num_tokens for h in new] == [h.totals.num_tokens for h in old]
    emitted = sorted(
        position
        for steps in later
        for step in steps
        for positions in step.header.micro_batches
        for position in positions
    )
    assert emitted == [p for p in range(12, 30) if isinstance(stream.fetch(p), Sample)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 99}, "saved with version=99, this run has"),
        ({"replica": 1}, "saved with replica=1, this run has 0"),
        ({"num_replicas": 3}, "saved with num_replicas=3, this run has 1: resume with the same"),
        ({"policy": "samples"}, "saved with policy=samples, this run has cost"),
        ({"more": 1}, "data state has the keys"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changes: dict[str, object], text: str) -> None:
    config = _config(policy=PolicyName.COST, num_replicas=1)
    exchange = thread_exchanges(1)[0]
    loader = StepLoader(_stream([3] * 20), config, exchange=exchange)
    _steps(loader, most=1)
    fresh = StepLoader(_stream([3] * 20), config, exchange=exchange)
    with pytest.raises(ValueError, match=text):
        fresh.load_state_dict(loader.state_dict() | changes)


def test_a_held_sample_that_can_no_longer_be_used_is_refused() -> None:
    config = _config(policy=PolicyName.COST, num_replicas=1)
    exchange = thread_exchanges(1)[0]
    loader = StepLoader(_stream([3] * 20), config, exchange=exchange)
    _steps(loader, most=1)
    changed = StepLoader(_stream([0] * 20, **LENIENT), config, exchange=exchange)
    with pytest.raises(
        ValueError, match="was in the window when the state was saved and can no lo"
    ):
        changed.load_state_dict(loader.state_dict())


# --- errors reach everybody ------------------------------------------------------------------


def _all_fail(
    make: Callable[[ThreadExchange], StepLoader], replicas: int
) -> list[BaseException | Any]:
    def go(exchange: ThreadExchange) -> Exception | list[Step]:
        try:
            return _steps(make(exchange))
        except Exception as error:
            return error.with_traceback(None)  # its frames would keep the workers alive

    start = time.monotonic()
    results = run_in_threads(go, thread_exchanges(replicas, timeout_s=60))
    assert time.monotonic() - start < 40  # no one waited for the exchange's time-out
    return results


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_record_stops_all_replicas(policy: PolicyName, num_workers: int) -> None:
    lengths = [3] * 11 + [0]
    stream = _stream(lengths)
    position = next(p for p in range(12) if stream.locate(p).record == 11)
    config = _config(policy=policy, total=12, num_replicas=3, global_batch_size=3, window=1)
    results = _all_fail(
        lambda exchange: StepLoader(stream, config, exchange=exchange, num_workers=num_workers), 3
    )
    for replica, result in enumerate(results):
        if replica == position % 3:
            assert isinstance(result, BadRecordError)
            assert result.line == 12
        else:
            assert isinstance(result, ReplicaFailedError)
            assert f"replica {position % 3} failed: BadRecordError: made up:12: no" in str(result)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_datasets_own_failure_stops_all_replicas(num_workers: int) -> None:
    stream = single_stream(Records([3] * 12, failing=5))
    position = next(p for p in range(12) if stream.locate(p).record == 5)
    results = _all_fail(
        lambda exchange: StepLoader(
            stream,
            _config(total=12, num_replicas=2, global_batch_size=2),
            exchange=exchange,
            num_workers=num_workers,
        ),
        2,
    )
    guilty, other = results[position % 2], results[1 - position % 2]
    assert isinstance(guilty, BadRecordError)
    assert "no such thing in record 5" in str(guilty)
    assert isinstance(other, ReplicaFailedError)
    assert str(other).startswith(f"replica {position % 2} failed: BadRecordError")


def test_an_error_in_the_second_phase_stops_all_replicas() -> None:
    """The last step of `cost` draws what its window had no room for after the first exchange."""
    lengths = [3] * 20
    lengths[_stream(lengths).locate(17).record] = 0  # windows of 7 end at position 13
    config = _config(policy=PolicyName.COST, total=20, global_batch_size=14, window=7)
    results = _all_fail(lambda exchange: StepLoader(_stream(lengths), config, exchange=exchange), 2)
    assert isinstance(results[1], BadRecordError)
    assert isinstance(results[0], ReplicaFailedError)
    assert str(results[0]).startswith("replica 1 failed: BadRecordError: made up:")


def test_a_record_that_does_not_fit_the_wire_stops_all_replicas() -> None:
    class Heavy(StepLoader):
        def _window_record(self) -> Any:
            return replace(super()._window_record(), cost_held=1 << 70)

    def make(exchange: ThreadExchange) -> StepLoader:
        kind = Heavy if exchange.replica == 0 else StepLoader
        return kind(_stream([3] * 20), _config(), exchange=exchange)

    results = _all_fail(make, 2)
    assert isinstance(results[0], struct.error)
    assert isinstance(results[1], ReplicaFailedError)
    assert str(results[1]).startswith("replica 0 failed: error: ")


@pytest.mark.parametrize(
    "changes", [{"token_budget": 31}, {"data": "other file"}, {"global_batch_size": 5}]
)
def test_replicas_that_are_configured_differently_are_refused(changes: dict[str, Any]) -> None:
    def make(exchange: ThreadExchange) -> StepLoader:
        config = _config(num_replicas=3, **(changes if exchange.replica == 2 else {}))
        return StepLoader(_stream([3] * 20), config, exchange=exchange)

    results = _all_fail(make, 3)
    for result in results:
        assert isinstance(result, ReplicaFailedError)
        (name, value), own = next(iter(changes.items())), asdict(_config(num_replicas=3))
        assert str(result) == (
            f"replicas were started differently: {name} is {value} on replica 2 and {own[name]} on "
            "replica 0. Start every rank with the same flags, data and code version"
        )


# --- evaluation ------------------------------------------------------------------------------


def _worker_processes() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if _is_worker(p)}


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "pt_data" in process.name()
    return False


def test_evaluation_iterates_anew_each_time() -> None:
    stream = _stream(_lengths(10, seed=8), **LENIENT)
    config = _config(total=10, global_batch_size=4)
    before = _worker_processes()  # of failed loaders of other tests: a cycle may keep one a while

    def go(exchange: ThreadExchange) -> list[list[Any]]:
        loader = StepLoader(stream, config, exchange=exchange, num_workers=1)
        assert len(loader) == 3
        return [_named(_steps(loader.restarted())) for _ in range(3)]

    for passes in _results(run_in_threads(go, thread_exchanges(2))):
        assert passes[0] == passes[1] == passes[2]
        assert len(passes[0]) == 3
    assert not _worker_processes() - before


def test_length_and_properties() -> None:
    stream, config = _stream([3] * 20), _config(num_replicas=1, global_batch_size=3)
    loader = StepLoader(stream, config, exchange=thread_exchanges(1)[0], consumed=6)
    assert (len(loader), loader.config, loader.stream) == (5, config, stream)
    steps = _steps(loader)
    assert len(steps) == 5
    assert steps[0].header.totals.consumed_before == 6
    assert _named(_steps(loader.restarted())) == _named(steps)


def test_the_wait_for_data_is_measured() -> None:
    class Slow(Records):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.01)
            return super().__getitem__(index)

    by_replica, _ = _run(single_stream(Slow([3] * 8)), _config(total=8))
    waits = [step.header.totals.wait_us for step in by_replica[0]]
    assert min(waits) >= 20_000  # two samples per replica and step
    assert [step.header.totals.wait_us for step in by_replica[1]] == waits
