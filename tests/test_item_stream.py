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
from synthetic_data import metadata_of, rules, step_config

from odb_megatron.comm.groups import ControlError
from odb_megatron.data.iterable import (
    ItemStream,
    IterableShards,
    SourceError,
    as_shards,
    is_iterable,
)
from odb_megatron.data.loop import PackedStep, Progress
from odb_megatron.data.sample import BadRecordError
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.wire import StepHeader, decode_step
from odb_megatron.data.workers import WorkerError
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import OPEN_TOTAL, LoaderClosedError, PlanConfig, ReplicaFailedError
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels

BUDGET = 64

Names = list[list[list[int]]]


def config_of(**changes: Any) -> PlanConfig:
    values = {"total": OPEN_TOTAL, "token_budget": BUDGET, "has_iterators": True}
    return step_config(**values | changes)


def stream_of(
    shards: IterableShards | Any, *, total: int | None = None, passes: int = 1, **policies: Any
) -> ItemStream:
    limits = {"context": BUDGET, "token_budget": BUDGET, "overlong": OverlongPolicy.DROP}
    policies = {"skip_bad": True, **policies}
    return ItemStream(
        shards=as_shards(shards, name="train dataset"),
        rules=rules(**limits, **policies),
        name="train dataset",
        passes=passes if total is None else None,
        num_samples=OPEN_TOTAL if total is None else total,
    )


def names_of(step: PackedStep) -> list[int]:
    """Items of a step on one replica, by their first tokens."""
    found = []
    for item in decode_step(metadata_of(step), step.payload):
        starts = item.cu_seqlens_padded.tolist()[: len(item.positions)]
        found += [int(item.tokens[0, start]) // BASE for start in starts]
    return found


def run(
    stream: ItemStream,
    config: PlanConfig,
    *,
    steps: int | None = None,
    states: Sequence[str] = (),
    num_workers: int = 0,
) -> tuple[Names, list[list[str]], list[StepHeader]]:
    """Run all replicas; return names by step and replica, JSON states, and replica 0's steps."""

    def go(channel: ThreadChannel) -> list[tuple[list[int], str, StepHeader]]:
        loader = StepLoader(stream, config, channel=channel, num_workers=num_workers)
        if states:
            loader.restore(Progress(**json.loads(states[channel.replica])))
        found = []
        while len(found) != steps and (step := loader.make_step()) is not None:
            state = {"consumed": step.progress.consumed, "source": step.progress.source}
            text = json.dumps(state, allow_nan=False)
            found.append((names_of(step), text, metadata_of(step)))
        if steps is not None:
            with pytest.raises(LoaderClosedError):
                loader.end()
        return found

    channels = thread_channels(config.num_replicas, timeout_s=100.0, block=config.block)
    results: list[Any] = run_in_threads(go, channels)
    failed = [result for result in results if isinstance(result, BaseException)]
    # First what is not an error broadcast by another replica.
    for error in sorted(failed, key=lambda e: isinstance(e, (ReplicaFailedError, ControlError))):
        raise error
    by_step = list(zip(*results, strict=True))
    names = [[part[0] for part in step] for step in by_step]
    return names, [[part[1] for part in step] for step in by_step], [s[0][2] for s in by_step]


def emitted(names: Names) -> Counter[int]:
    return Counter(name for step in names for part in step for name in part)


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
    config = config_of(
        num_replicas=replicas,
        global_batch_size=draw(st.integers(1, 4)) * replicas,
        block=draw(st.sampled_from([64, 2])),
    )
    return MakeLines(lengths, owners), parts, config


def usable(made: MakeLines) -> set[int]:
    return {name for name, length in enumerate(made.lengths) if 0 < length <= BUDGET}


@settings(max_examples=25)
@given(worlds(), st.integers(1, 2), st.randoms(use_true_random=False))
def test_every_item_is_trained_once_per_pass_and_a_resume_goes_on(
    world: tuple[MakeLines, int, PlanConfig], passes: int, rng: random.Random
) -> None:
    made, parts, config = world
    shards = IterableShards(make=made, parts=parts)
    if not made.owners:
        return
    names, states, steps = run(stream_of(shards, passes=passes), config)
    assert emitted(names) == dict.fromkeys(usable(made), passes)
    assert [step.totals.is_final for step in steps] == [False] * (len(steps) - 1) + [True]
    sizes = [step.totals.num_consumed for step in steps]
    assert sum(sizes) == passes * len(made.lengths)
    assert set(sizes[:-1]) <= {config.global_batch_size}
    at = rng.randrange(len(names))
    rest, _, _ = run(stream_of(shards, passes=passes), config, states=states[at])
    assert rest == names[at + 1 :]
    rest, _, _ = run(stream_of(shards, passes=passes + 1), config, states=states[at])
    assert emitted(names[: at + 1] + rest) == dict.fromkeys(usable(made), passes + 1)


@settings(max_examples=25)
@given(worlds(), st.integers(1, 90), st.randoms(use_true_random=False))
def test_a_quota_is_met_exactly_and_a_resume_goes_on(
    world: tuple[MakeLines, int, PlanConfig], total: int, rng: random.Random
) -> None:
    made, parts, config = world
    num = parts * config.num_replicas
    if len({owner % num // parts for owner in made.owners}) < config.num_replicas:
        return  # an empty shard is refused
    config = replace(config, total=total)
    stream = stream_of(IterableShards(make=made, parts=parts), total=total)
    names, states, steps = run(stream, config)
    sizes = [step.totals.num_consumed for step in steps]
    assert sum(sizes) == total
    assert set(sizes[:-1]) <= {config.global_batch_size}
    assert set(emitted(names)) <= usable(made)
    at = rng.randrange(len(names))
    rest, _, _ = run(stream, config, states=states[at])
    assert rest == names[at + 1 :]


@settings(max_examples=40)
@given(worlds(), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_other_replicas_go_on_with_a_fixed_total_of_parts(
    world: tuple[MakeLines, int, PlanConfig], replicas: list[int], data: st.DataObject
) -> None:
    """Each sample is trained once, however often the number of replicas changes."""
    made, parts, config = world
    if not made.owners:
        return
    total_parts = parts * config.num_replicas
    stream = stream_of(IterableShards(make=made, total_parts=total_parts))
    found: Counter[int] = Counter()
    states: list[str] = []
    for num in (config.num_replicas, *replicas):
        config = replace(config, num_replicas=num, global_batch_size=2 * num)
        states = assigned(stream, states, num)
        names, later, _ = run(stream, config, states=states)
        if states:  # the same replicas go on exactly as they would
            assert run(stream, config, states=states)[0] == names
        if not names:
            break
        at = data.draw(st.integers(0, len(names) - 1))
        rest, _, _ = run(stream, config, states=later[at])
        assert rest == names[at + 1 :]
        found += emitted(names[: at + 1])
        states = later[at]
    last = assigned(stream, states, 2)
    rest, _, _ = run(stream, replace(config, num_replicas=2, global_batch_size=4), states=last)
    assert found + emitted(rest) == dict.fromkeys(usable(made), 1)


def assigned(stream: ItemStream, states: Sequence[str], num_replicas: int) -> list[str]:
    """Return the states of so many replicas that go on, from those of the saved ones."""
    saved = list(map(json.loads, states))
    sources = [state["source"] for state in saved]
    return [
        json.dumps(
            saved[0] | {"source": stream.own_state(sources, replica=at, num_replicas=num_replicas)}
        )
        for at in range(num_replicas if states else 0)
    ]


def test_replicas_in_different_passes_are_not_assigned_anew() -> None:
    made = MakeLines([5] * 220, [0] * 20 + [1] * 200)
    stream = stream_of(IterableShards(make=made, total_parts=2), passes=3)
    _, states, _ = run(stream, config_of(), steps=20)
    with pytest.raises(ValueError, match="the 2 replicas were in different passes of train datas"):
        assigned(stream, states[-1], 3)


def test_workers_do_not_change_plans() -> None:
    rng = random.Random(5)
    owners = [rng.randrange(6) for _ in range(150)]
    made = MakeLines([rng.randint(0, 40) for _ in owners], owners)
    config = config_of(global_batch_size=8)
    stream = stream_of(IterableShards(make=made, parts=3), passes=2)
    expected = run(stream, config)
    assert run(stream, config, num_workers=2)[:2] == expected[:2]
    middle = len(expected[0]) // 2
    rest = run(stream, config, states=expected[1][middle], num_workers=8)
    assert rest[0] == expected[0][middle + 1 :]


def test_a_resume_reads_little_again() -> None:
    made = MakeLines([5] * 4000, [0] * 4000)
    _, states, steps = run(
        stream_of(IterableShards(make=made)),
        config_of(num_replicas=1, global_batch_size=40),
        steps=60,
    )
    assert sum(step.totals.num_samples for step in steps) == 2400
    source = json.loads(states[-1][0])["source"]
    (part,) = source["parts"]
    assert source["next"] == part["count"] == 2400
    assert part["count"] - part["at"] < 64


# --- what is refused --------------------------------------------------------------------------


def refused(stream: ItemStream, config: PlanConfig, kind: type[Exception], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        run(stream, config, **options)
    return str(caught.value)


@pytest.mark.parametrize("batch", [2, 4, 40])
def test_replicas_that_read_the_same_shard_are_refused(batch: int) -> None:
    """Also where each reads a single item in a step."""
    same = IterableShards(make=lambda index, num: Lines(range(40), [5] * 40))
    text = refused(stream_of(same), config_of(global_batch_size=batch), SourceError)
    assert "replicas 0 and 1 begin with the same 8 samples" in text
    assert "IterableShards(make=...)" in text


def test_equal_items_tell_nothing() -> None:
    constant = IterableShards(make=lambda index, num: Lines([0] * 20, [5]))
    assert len(run(stream_of(constant), config_of())[0]) == 10


def test_no_data_at_all_is_refused() -> None:
    empty = stream_of(IterableShards(make=MakeLines([], [])))
    assert "no replica has any data" in refused(empty, config_of(), SourceError)


def test_an_empty_shard_cannot_take_part_in_a_quota() -> None:
    stream = stream_of(IterableShards(make=MakeLines([5] * 4, [0] * 4)), total=20)
    text = refused(stream, config_of(total=20), SourceError)
    assert "gives replica 1 no item" in text
    assert "use --odb-epochs" in text


def test_an_iterator_that_raises_ends_the_run_whatever_the_policy() -> None:
    made = MakeLines([5] * 20, [0, 1] * 10, failing=10)
    text = refused(stream_of(IterableShards(make=made)), config_of(), SourceError)
    assert "shard 0 of 2 raised KeyError" in text
    assert "no such thing in item 10" in text
    assert "Original traceback" in text


def test_a_bad_item_is_an_error_or_skipped() -> None:
    shards = IterableShards(make=MakeLines([5, 5, 0, 5] * 4, [0, 1] * 8))
    strict = stream_of(shards, skip_bad=False)
    text = refused(strict, config_of(), BadRecordError)
    assert "train dataset, shard 0 of 2:2: no token to learn from" in text
    _, _, steps = run(stream_of(shards), config_of())
    assert sum(step.totals.num_bad for step in steps) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_taken_is_named(num_workers: int) -> None:
    made = MakeLines([5] * 200, [0, 1] * 100, kind=Broken)
    shards = IterableShards(make=made)
    text = refused(stream_of(shards), config_of(), ValueError, num_workers=num_workers)
    assert "train dataset, shard 0 of 2, saying where it is, raised OSError: disk quota" in text
    assert "Original traceback" in text
    names, _, _ = run(replace(stream_of(shards), keeps_state=False), config_of())
    assert sum(emitted(names).values()) == 200


def test_a_worker_that_dies_is_named() -> None:
    made = MakeLines([5] * 20, [0, 1] * 10, failing=10, kills=True)
    text = refused(stream_of(IterableShards(make=made)), config_of(), WorkerError, num_workers=1)
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
    assert as_shards(loader, name="train dataset").has_own_workers
    stream = stream_of(IterableShards(make=MakeLoader(made)))
    text = refused(stream, config_of(), ValueError, num_workers=1)
    assert "hand over the loader itself" in text


# --- states that do not fit -------------------------------------------------------------------


def _place(**changes: Any) -> dict[str, Any]:
    return {"count": 3, "ended": False, "at": 0, "state": None} | changes


def test_a_source_without_a_state_trains_and_is_not_resumed() -> None:
    made = MakeLines([5] * 40, [0, 1] * 20, kind=Stateless)
    stream = stream_of(IterableShards(make=made))
    names, states, _ = run(stream, config_of())
    assert len(names) == 10
    assert json.loads(states[3][0])["source"]["has_state"] is False
    text = refused(stream, config_of(), ValueError, states=states[3])
    assert "had no state of its own" in text
    assert "state_dict() and load_state_dict()" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passes": None}, "resume with the same kind of run length"),
        ({"passes": 3}, "ask for at least as many"),
        ({"version": 9}, "of another version"),
        ({"next": True}, "damaged or of another version"),
        ({"parts": [_place(at=9)]}, "damaged or of another version"),
        ({"parts": [_place(count=10_000)]}, "the data has changed"),
        ({"parts": [_place(state="AAAA")]}, "the source's state is damaged"),
        ({"parts": []}, "saved with 0 parts for each replica, this run has 1"),
        ({"more": 1}, "holds no state of an iterable source"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    stream = stream_of(IterableShards(make=MakeLines([5] * 40, [0, 1] * 20)))
    _, states, _ = run(stream, config_of(), steps=3)
    changed = [json.loads(text) for text in states[-1]]
    for state in changed:
        state["source"] |= change
    assert message in refused(
        stream, config_of(), ValueError, states=list(map(json.dumps, changed))
    )


class Broken(Lines):
    def state_dict(self) -> dict[str, Any]:
        """Fail."""
        raise OSError("disk quota exceeded")


class Forgetful(Lines):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fail."""
        raise KeyError("at")


def test_other_shards_than_those_saved() -> None:
    made = MakeLines([5] * 400, [0, 1, 2, 3] * 100)
    _, states, _ = run(stream_of(IterableShards(make=made, parts=2)), config_of(), steps=80)
    cases = [
        (IterableShards(make=made), "saved with 2 parts for each replica, this run has 1"),
        (
            IterableShards(make=replace(made, kind=Forgetful), parts=2),
            "train dataset, shard 0 of 4, going on with its saved state, raised KeyError",
        ),
        (
            IterableShards(make=replace(made, kind=Stateless), parts=2),
            "it has no state of its own, and had one when it was saved",
        ),
        (IterableShards(make=replace(made, failing=300), parts=2), "raised KeyError"),
    ]
    for shards, text in cases:
        assert text in refused(stream_of(shards), config_of(), ValueError, states=states[-1])


def test_what_making_a_shard_raises_is_named() -> None:
    def make(index: int, num_shards: int) -> Any:
        raise FileNotFoundError(f"no part {index}")

    text = refused(stream_of(IterableShards(make=make)), config_of(), ValueError)
    assert "train dataset: make(0, 2) of IterableShards raised FileNotFoundError: no part 0" in text
    assert "Original traceback" in text


def test_what_counts_as_iterable() -> None:
    assert is_iterable(Lines([], []))
    assert is_iterable(IterableShards(make=MakeLines([], [])))
    assert not is_iterable([1, 2])
    assert not is_iterable(3)
    with pytest.raises(ValueError, match="which can be run through only once"):
        as_shards(iter([1]), name="train dataset")
    with pytest.raises(ValueError, match="parts must be at least 1"):
        IterableShards(make=MakeLines([], []), parts=0)
    with pytest.raises(ValueError, match="parts is 2 and total_parts 8: give one of them"):
        IterableShards(make=MakeLines([], []), parts=2, total_parts=8)
