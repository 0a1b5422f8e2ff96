"""Iterable data sets: replicas as threads, from each one's own iterator to micro-batches."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from iterables import BASE, Lines, MakeLines, Stateless
from made_up_data import rules

from odb_megatron.comm.blocks import ControlError
from odb_megatron.data.finished_step import FinishedStep
from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.iterable import (
    IterableShards,
    SourceError,
    as_shards,
    has_own_workers,
    is_iterable,
)
from odb_megatron.data.preprocess import BadRecordPolicy
from odb_megatron.data.replica_stream import WorkerError
from odb_megatron.data.sample import BadRecordError
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.workers import WorkerStart
from odb_megatron.plan.config import OPEN_TOTAL, PlanConfig, ShardLength
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.elastic import elastic_state
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

BUDGET = 64


def _config(**changes: Any) -> PlanConfig:
    values: dict[str, Any] = {
        "policy": PolicyName.SAMPLES,
        "total": OPEN_TOTAL,
        "global_batch_size": 4,
        "num_replicas": 2,
        "token_budget": BUDGET,
        "window": 8,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
        "shard_length": ShardLength.UNKNOWN,
    }
    values |= changes
    if values["shard_length"] is ShardLength.ENDLESS:
        values["total"] = changes["total"]
    return PlanConfig(**values)


def _stream(
    shards: IterableShards | Any, *, total: int | None = None, passes: int = 1, **more: Any
) -> ItemStream:
    policies = {"context": BUDGET, "token_budget": BUDGET}
    policies["overlong"] = OverlongPolicy.DROP
    policies["bad_record"] = more.pop("bad_record", BadRecordPolicy.SKIP)
    return ItemStream(
        shards=as_shards(shards, name="train dataset"),
        rules=rules(**policies),
        name="train dataset",
        passes=passes if total is None else None,
        num_samples=OPEN_TOTAL if total is None else total,
        **more,
    )


def _is_follow_up(error: BaseException) -> bool:
    """Whether an error only tells that another replica has failed."""
    return isinstance(error, (ReplicaFailedError, ControlError))


def _names(step: FinishedStep) -> list[int]:
    """Items of a step on one replica, by their first tokens."""
    found = []
    for batch in step.micro_batches:
        bounds = batch.cu_seqlens_padded.tolist()[: len(batch.positions)]
        found += [int(batch.tokens[0, start]) // BASE for start in bounds]
    return found


def _run(
    stream: ItemStream,
    config: PlanConfig,
    *,
    steps: int | None = None,
    states: Sequence[str] = (),
    **options: Any,
) -> tuple[list[list[list[int]]], list[list[str]], list[FinishedStep]]:
    """Run all replicas; return names by step and replica, JSON states, and replica 0's steps."""

    def go(exchange: ThreadExchange) -> list[tuple[list[int], str, FinishedStep]]:
        loader = StepLoader(stream, config, exchange=exchange, **options)
        if states:
            saved = json.loads(states[exchange.replica])
            loader.load_state_dict(saved["planner"], source=saved["source"])
        found = []
        while len(found) != steps and (step := loader.make_step()) is not None:
            assert step.progress is not None
            state = {"planner": step.progress.state_dict(), "source": step.progress.source}
            found.append((_names(step), json.dumps(state, allow_nan=False), step))
        loader._draws.end()
        return found

    results: list[Any] = run_in_threads(go, thread_exchanges(config.num_replicas, timeout_s=100.0))
    failed = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(failed, key=_is_follow_up):
        raise error
    names = [[part[0] for part in step] for step in zip(*results, strict=True)]
    saved = [[part[1] for part in step] for step in zip(*results, strict=True)]
    return names, saved, [part[2] for part in results[0]]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MakeLines, int, PlanConfig]:
    """Data sets in shards of any size, also none, and how they are planned."""
    replicas, parts = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 3]))
    sizes = [draw(st.sampled_from([0, 1, 2, 5, 17, 40])) for _ in range(replicas * parts)]
    rng = random.Random(draw(st.integers(0, 2**32)))
    owners = [owner for owner, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(owners)
    skipped = draw(st.sampled_from([0.0, 0.3]))
    lengths = [0 if rng.random() < skipped else rng.randint(1, BUDGET + 6) for _ in owners]
    share = draw(st.integers(1, 4))
    config = _config(
        policy=draw(st.sampled_from(PolicyName)),
        num_replicas=replicas,
        global_batch_size=share * replicas,
        window=share * draw(st.integers(1, 3)),
        exchange=draw(st.sampled_from([ExchangeMode.NONE, ExchangeMode.TOKENS])),
    )
    return MakeLines(lengths, owners), parts, config


def _usable(made: MakeLines) -> set[int]:
    return {name for name, length in enumerate(made.lengths) if 0 < length <= BUDGET}


def _check_drain(states: list[list[str]], steps: list[FinishedStep], config: PlanConfig) -> None:
    """From the first step before which all shards have ended, the bound of dgap.md holds."""
    deadlines = [json.loads(step[0])["planner"]["deadline"] for step in states]
    first = next(at for at, deadline in enumerate(deadlines) if deadline >= 0)
    assert len({*deadlines[first:-1]}) <= 1
    left = sum(step.header.totals.num_samples for step in steps[first:])
    batch = config.global_batch_size
    if config.policy is PolicyName.SAMPLES:
        most = -(-left // batch)
    else:
        most = left // batch + (4 * (left % batch) > batch)
    assert len(steps) - first <= max(1, most)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(1, 2), st.randoms(use_true_random=False))
def test_join_emits_every_item_once_per_pass_and_resumes(
    world: tuple[MakeLines, int, PlanConfig], passes: int, rng: random.Random
) -> None:
    made, parts, config = world
    stream = _stream(IterableShards(make=made, parts=parts), passes=passes)
    if not _usable(made):
        return
    names, states, steps = _run(stream, config)
    emitted = Counter(name for step in names for part in step for name in part)
    assert emitted == dict.fromkeys(_usable(made), passes)
    assert [step.header.totals.is_final for step in steps] == [False] * (len(steps) - 1) + [True]
    consumed = sum(step.header.totals.num_consumed for step in steps)
    assert consumed == passes * len(made.lengths)
    if config.exchange is ExchangeMode.NONE:
        for step in names:
            for replica, part in enumerate(step):
                own = range(replica * parts, (replica + 1) * parts)
                num = parts * config.num_replicas
                assert all(made.owners[name] % num in own for name in part)
    if config.policy is PolicyName.SAMPLES:
        assert all(step.header.totals.num_consumed <= config.global_batch_size for step in steps)
    _check_drain(states, steps, config)
    at = rng.randrange(len(names))
    rest, _, _ = _run(stream, config, states=states[at])
    assert rest == names[at + 1 :]
    more = _stream(IterableShards(make=made, parts=parts), passes=passes + 1)
    rest, _, _ = _run(more, config, states=states[at])
    both = Counter(name for step in names[: at + 1] + rest for part in step for name in part)
    assert both == dict.fromkeys(_usable(made), passes + 1)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(1, 90), st.randoms(use_true_random=False))
def test_quota_emits_exactly_as_many_and_resumes(
    world: tuple[MakeLines, int, PlanConfig], total: int, rng: random.Random
) -> None:
    made, parts, config = world
    num = parts * config.num_replicas
    owners = {owner % num // parts for owner in made.owners}
    if len(owners) < config.num_replicas or not _usable(made):
        return
    config = _config(
        policy=config.policy,
        num_replicas=config.num_replicas,
        global_batch_size=config.global_batch_size,
        window=config.window,
        exchange=config.exchange,
        shard_length=ShardLength.ENDLESS,
        total=total,
    )
    stream = _stream(IterableShards(make=made, parts=parts), total=total)
    names, states, steps = _run(stream, config)
    assert sum(step.header.totals.num_consumed for step in steps) == total
    if config.policy is PolicyName.SAMPLES:
        sizes = [step.header.totals.num_consumed for step in steps]
        assert sizes[:-1] == [config.global_batch_size] * (len(sizes) - 1)
    emitted = Counter(name for step in names for part in step for name in part)
    assert set(emitted) <= _usable(made)
    for replica in range(config.num_replicas):  # no item's next pass before the others' this one
        own = [
            emitted[name] for name in _usable(made) if made.owners[name] % num // parts == replica
        ]
        held = config.window + 1
        assert not own or max(own) - min(own) <= 1 + held
    if len(names) > 1:
        at = rng.randrange(len(names) - 1)
        rest, _, _ = _run(stream, config, states=states[at])
        assert rest == names[at + 1 :]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize(
    ("num_replicas", "owners"),
    [(4, [0, 0, 0, 0, 0]), (4, [0, 1, 2, 3, 0]), (2, [1] * 9), (3, [0]), (2, [0] * 30 + [1])],
)
def test_the_tail_of_an_epoch(policy: PolicyName, num_replicas: int, owners: list[int]) -> None:
    made = MakeLines([7] * len(owners), owners)
    config = _config(policy=policy, num_replicas=num_replicas, global_batch_size=2 * num_replicas)
    names, _, steps = _run(_stream(IterableShards(make=made)), config)
    emitted = sorted(name for step in names for part in step for name in part)
    assert emitted == list(range(len(owners)))
    per_replica = -(-max(Counter(owners).values()) // 2)
    assert len(steps) <= per_replica + 1
    assert steps[-1].header.totals.is_final


def test_workers_do_not_change_plans() -> None:
    rng = random.Random(5)
    owners = [rng.randrange(6) for _ in range(150)]
    made = MakeLines([rng.randint(0, 40) for _ in owners], owners)
    config = _config(policy=PolicyName.COST, global_batch_size=8)
    stream = _stream(IterableShards(make=made, parts=3), passes=2)
    expected = _run(stream, config)
    for num, start in ((1, WorkerStart.FORK), (2, WorkerStart.FORK), (8, WorkerStart.FORKSERVER)):
        found = _run(stream, config, num_workers=num, worker_start=start)
        assert found[:2] == expected[:2]
    middle = len(expected[0]) // 2
    options = {"num_workers": 2, "worker_start": WorkerStart.FORK}
    rest = _run(stream, config, states=expected[1][middle], **options)
    assert rest[0] == expected[0][middle + 1 :]


def test_a_resume_reads_little_again() -> None:
    made = MakeLines([5] * 4000, [0] * 4000)
    config = _config(num_replicas=1, policy=PolicyName.COST)
    names, states, _ = _run(_stream(IterableShards(make=made)), config, steps=600)
    source = json.loads(states[-1][0])["source"]
    assert sum(len(part) for step in names for part in step) > 2000
    assert source["next"] - source["from"]["number"] <= 64 + config.window
    assert source["from"]["parts"][0]["__kind__"] == "dict"


def _refused(stream: ItemStream, config: PlanConfig, kind: type[Exception], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        _run(stream, config, **options)
    return str(caught.value)


def test_replicas_that_read_the_same_shard_are_refused() -> None:
    same = IterableShards(make=lambda index, num: Lines(range(20), [5] * 20))
    text = _refused(_stream(same), _config(), SourceError)
    assert "replicas 0 and 1 begin with the same" in text
    assert "IterableShards(make=...)" in text
    constant = IterableShards(make=lambda index, num: Lines([0] * 20, [5]))
    assert len(_run(_stream(constant), _config())[0]) == 10  # tells nothing


def test_no_data_at_all_is_refused() -> None:
    text = _refused(_stream(IterableShards(make=MakeLines([], []))), _config(), SourceError)
    assert "no replica has any data" in text


def test_an_empty_shard_cannot_take_part_in_a_quota() -> None:
    stream = _stream(IterableShards(make=MakeLines([5] * 4, [0] * 4)), total=20)
    config = _config(shard_length=ShardLength.ENDLESS, total=20)
    found = run_in_threads(
        lambda e: StepLoader(stream, config, exchange=e).make_step(), thread_exchanges(2)
    )
    assert isinstance(found[1], SourceError)
    assert "gives replica 1 no item" in str(found[1])
    assert "use --odb-epochs" in str(found[1])
    assert isinstance(found[0], ReplicaFailedError)


def test_an_iterator_that_raises_ends_the_run_whatever_the_policy() -> None:
    made = MakeLines([5] * 20, [0, 1] * 10, failing=10)
    text = _refused(_stream(IterableShards(make=made)), _config(), SourceError)
    assert "shard 0 of 2 raised KeyError" in text
    assert "no such thing in item 10" in text
    assert "Original traceback" in text


def test_a_bad_item_is_an_error_or_skipped() -> None:
    shards = IterableShards(make=MakeLines([5, 5, 0, 5] * 4, [0, 1] * 8))
    text = _refused(_stream(shards, bad_record=BadRecordPolicy.ERROR), _config(), BadRecordError)
    assert "train dataset, shard 0 of 2:2: no token to learn from" in text
    _, _, steps = _run(_stream(shards), _config())
    assert sum(step.header.totals.num_left_out for step in steps) == 4


def test_a_worker_that_dies_is_named() -> None:
    made = MakeLines([5] * 20, [0, 1] * 10, failing=10, kills=True)
    options = {"num_workers": 1, "worker_start": WorkerStart.FORK}
    text = _refused(_stream(IterableShards(make=made)), _config(), WorkerError, **options)
    assert "while it read train dataset" in text
    assert "lower --num-workers" in text


@dataclass(frozen=True)
class MakeLoader:
    """Makes shards that are loaders themselves."""

    made: MakeLines

    def __call__(self, index: int, num_shards: int) -> Any:
        shard = self.made(index, num_shards)
        return torch.utils.data.DataLoader(Stream(shard), batch_size=None, collate_fn=list)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, shard: Stateless) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shard)


def test_a_loader_runs_in_the_trainer_process_only() -> None:
    made = MakeLines([5] * 20, [0, 1] * 10)
    loader = MakeLoader(made)(0, 1)
    assert has_own_workers(as_shards(loader, name="train dataset"))
    options = {"num_workers": 1, "worker_start": WorkerStart.FORK}
    stream = _stream(IterableShards(make=MakeLoader(made)))
    assert "hand over the loader itself" in _refused(stream, _config(), ValueError, **options)


def test_a_source_without_a_state_trains_and_is_not_resumed() -> None:
    made = MakeLines([5] * 40, [0, 1] * 20, kind=Stateless)
    stream = _stream(IterableShards(make=made))
    names, states, _ = _run(stream, _config())
    assert len(names) == 10
    assert json.loads(states[3][0])["source"]["has_state"] is False
    text = _refused(stream, _config(), ValueError, states=states[3])
    assert "had no state of its own" in text
    assert "state_dict() and load_state_dict()" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passes": None}, "resume with the same kind of run length"),
        ({"passes": 3}, "ask for at least as many"),
        ({"version": 9}, "of another version"),
        ({"held": [0, 0]}, "do not belong together"),
        ({"next": True}, "damaged or of another version"),
        ({"from": {}}, "no place to go on from"),
        ({"next": 10_000}, "the data has changed"),
        ({"more": 1}, "holds no state of an iterable source"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    stream = _stream(IterableShards(make=MakeLines([5] * 40, [0, 1] * 20)))
    _, states, _ = _run(stream, _config(), steps=3)
    changed = []
    for text in states[-1]:
        state = json.loads(text)
        state["source"] |= change
        changed.append(json.dumps(state))
    assert message in _refused(stream, _config(), ValueError, states=changed)


def test_other_parts_are_refused_at_resume() -> None:
    made = MakeLines([5] * 400, [0, 1, 2, 3] * 100)
    _, states, _ = _run(_stream(IterableShards(make=made, parts=2)), _config(), steps=80)
    text = _refused(_stream(IterableShards(make=made)), _config(), ValueError, states=states[-1])
    assert "saved with 2 parts for each replica, this run has 1" in text


@pytest.mark.parametrize("length", [ShardLength.UNKNOWN, ShardLength.ENDLESS])
def test_another_number_of_replicas_is_refused(length: ShardLength) -> None:
    total = 40 if length is ShardLength.ENDLESS else OPEN_TOTAL
    config = _config(policy=PolicyName.COST, shard_length=length, total=total)
    made = MakeLines([5] * 40, [0, 1] * 20)
    stream = _stream(IterableShards(make=made), total=40 if total == 40 else None)
    _, states, _ = _run(stream, config, steps=2)
    planners = [json.loads(text)["planner"] for text in states[-1]]
    other = _config(policy=PolicyName.COST, shard_length=length, total=total, num_replicas=4)
    with pytest.raises(ValueError, match="belong to their replicas and cannot be dealt anew"):
        elastic_state(planners, other, replica=0)


class Forgetful(Lines):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fail."""
        raise KeyError("at")


def test_what_a_data_set_raises_is_named() -> None:
    def make(index: int, num_shards: int) -> Any:
        raise FileNotFoundError(f"no part {index}")

    text = _refused(_stream(IterableShards(make=make)), _config(), ValueError)
    assert "train dataset: make(0, 2) of IterableShards raised FileNotFoundError: no part 0" in text
    assert "Original traceback" in text
    made = MakeLines([5] * 400, [0, 1] * 200)
    _, states, _ = _run(_stream(IterableShards(make=made)), _config(), steps=60)
    stream = _stream(IterableShards(make=replace(made, kind=Forgetful)))
    text = _refused(stream, _config(), ValueError, states=states[-1])
    assert "train dataset, shard 0 of 2, going on with its saved state, raised KeyError" in text
    stream = _stream(IterableShards(make=replace(made, kind=Stateless)))
    text = _refused(stream, _config(), ValueError, states=states[-1])
    assert "it has no state of its own, and had one when it was saved" in text
    failing = _stream(IterableShards(make=replace(made, failing=200)))
    assert "raised KeyError" in _refused(failing, _config(), ValueError, states=states[-1])


def test_what_counts_as_iterable() -> None:
    assert is_iterable(Lines([], []))
    assert is_iterable(IterableShards(make=MakeLines([], [])))
    assert not is_iterable([1, 2])
    assert not is_iterable(3)
    with pytest.raises(ValueError, match="which can be run through only once"):
        as_shards(iter([1]), name="train dataset")
    with pytest.raises(ValueError, match="parts must be at least 1"):
        IterableShards(make=MakeLines([], []), parts=0)
