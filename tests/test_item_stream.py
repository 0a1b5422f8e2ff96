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


@settings(max_examples=50)
@given(
    worlds(), st.integers(1, 2), st.none() | st.integers(1, 90), st.randoms(use_true_random=False)
)
def test_a_run_and_its_resume(
    world: tuple[MakeLines, int, PlanConfig], passes: int, total: int | None, rng: random.Random
) -> None:
    """Every item is trained once per pass, or a quota is met exactly; and a resume goes on."""
    made, parts, config = world
    num = parts * config.num_replicas
    if not made.owners:
        return
    if total and len({owner % num // parts for owner in made.owners}) < config.num_replicas:
        return  # an empty shard is refused
    config = replace(config, total=total or OPEN_TOTAL)
    shards = IterableShards(make=made, parts=parts)
    stream = stream_of(shards, passes=passes, total=total)
    names, states, steps = run(stream, config)
    sizes = [step.totals.num_consumed for step in steps]
    assert sum(sizes) == (total or passes * len(made.lengths))
    assert set(sizes[:-1]) <= {config.global_batch_size}
    assert [step.totals.is_final for step in steps] == [False] * (len(steps) - 1) + [True]
    at = rng.randrange(len(names))
    rest, _, _ = run(stream, config, states=states[at])
    assert rest == names[at + 1 :]
    if total:
        assert set(emitted(names)) <= usable(made)
        return
    assert emitted(names) == dict.fromkeys(usable(made), passes)
    rest, _, _ = run(stream_of(shards, passes=passes + 1), config, states=states[at])
    assert emitted(names[: at + 1] + rest) == dict.fromkeys(usable(made), passes + 1)


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


def refused(stream: ItemStream, config: PlanConfig, **options: Any) -> str:
    with pytest.raises((ValueError, SourceError, WorkerError)) as caught:
        run(stream, config, **options)
    return f"{caught.type.__name__}: {caught.value}"


class Broken(Lines):
    def state_dict(self) -> dict[str, Any]:
        """Fail."""
        raise OSError("disk quota exceeded")


class Forgetful(Lines):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fail."""
        raise KeyError("at")


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


def same(index: int, num_shards: int) -> Lines:
    return Lines(range(40), [5] * 40)


def absent(index: int, num_shards: int) -> Lines:
    raise FileNotFoundError(f"no part {index}")


TWO = [0, 1] * 100
HALF = MakeLines([5] * 20, TWO[:20], failing=10)
BROKEN = MakeLines([5] * 200, TWO, kind=Broken)
NO_STATE = "ValueError: train dataset, shard 0 of 2, saying where it is, raised OSError: disk quota"


@pytest.mark.parametrize(
    ("make", "how", "expected"),
    [
        # Also where each reads a single item in a step.
        (same, {"global_batch_size": 2}, "SourceError: replicas 0 and 1 begin with the same 8 sam"),
        (same, {"global_batch_size": 4}, "SourceError: replicas 0 and 1 begin with the same 8 sam"),
        (same, {"global_batch_size": 40}, "pass IterableShards(make=...)"),
        (MakeLines([], []), {}, "SourceError: no replica has any data"),
        (MakeLines([5] * 4, [0] * 4), {"total": 20}, "gives replica 1 no item"),
        # Whatever the policy for bad records.
        (HALF, {}, "SourceError: train dataset, shard 0 of 2 raised KeyError: 'no such thing"),
        (HALF, {}, "Original traceback"),
        (MakeLines([5, 5, 0, 5] * 4, TWO[:16]), {"skip_bad": False}, "shard 0 of 2:2: no token to"),
        (BROKEN, {}, NO_STATE),
        (BROKEN, {"num_workers": 1}, NO_STATE),
        (replace(HALF, kills=True), {"num_workers": 1}, "while it read train dataset"),
        (absent, {}, "train dataset: make(0, 2) of IterableShards raised FileNotFoundError: no"),
        (MakeLoader(HALF), {"num_workers": 1}, "hand over the loader itself"),
    ],
)
def test_what_is_refused(make: Any, how: dict[str, Any], expected: str) -> None:
    options = {name: how[name] for name in {"num_workers"} & how.keys()}
    policies = {name: how[name] for name in {"skip_bad", "total"} & how.keys()}
    config = config_of(**{name: how[name] for name in {"global_batch_size", "total"} & how.keys()})
    shards = IterableShards(make=make)
    assert expected in refused(stream_of(shards, **policies), config, **options)


def test_what_is_not_refused() -> None:
    """Equal items tell nothing; a state that nobody asks for; bad items that may be skipped."""
    constant = IterableShards(make=lambda index, num: Lines([0] * 20, [5]))
    assert len(run(stream_of(constant), config_of())[0]) == 10
    broken = stream_of(IterableShards(make=MakeLines([5] * 200, TWO, kind=Broken)))
    names, _, _ = run(replace(broken, keeps_state=False), config_of())
    assert sum(emitted(names).values()) == 200
    bad = stream_of(IterableShards(make=MakeLines([5, 5, 0, 5] * 4, TWO[:16])))
    assert sum(step.totals.num_bad for step in run(bad, config_of())[2]) == 4


# --- states that do not fit -------------------------------------------------------------------


def _place(**changes: Any) -> dict[str, Any]:
    return {"count": 3, "ended": False, "at": 0, "state": None} | changes


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
    stream = stream_of(IterableShards(make=MakeLines([5] * 40, TWO[:40])))
    _, states, _ = run(stream, config_of(), steps=3)
    changed = [json.loads(text) for text in states[-1]]
    for state in changed:
        state["source"] |= change
    assert message in refused(stream, config_of(), states=list(map(json.dumps, changed)))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"parts": 1}, "saved with 2 parts for each replica, this run has 1"),
        ({}, {"kind": Forgetful}, "shard 0 of 4, going on with its saved state, raised KeyError"),
        ({}, {"kind": Stateless}, "it has no state of its own, and had one when it was saved"),
        ({}, {"failing": 300}, "raised KeyError"),
        ({"kind": Stateless}, {"kind": Stateless}, "had no state of its own when the checkpoint"),
    ],
)
def test_other_shards_than_those_saved(
    then: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    def shards(parts: int = 2, **changes: Any) -> IterableShards:
        made = MakeLines([5] * 400, [0, 1, 2, 3] * 100)
        return IterableShards(make=replace(made, **changes), parts=parts)

    _, states, _ = run(stream_of(shards(**then)), config_of(), steps=80)
    assert message in refused(stream_of(shards(**now)), config_of(), states=states[-1])


def test_what_counts_as_iterable() -> None:
    assert is_iterable(Lines([], []))
    assert is_iterable(IterableShards(make=MakeLines([], [])))
    assert not is_iterable([1, 2])
    assert not is_iterable(3)
    loader = MakeLoader(MakeLines([], []))(0, 1)
    assert as_shards(loader, name="train dataset").has_own_workers
    with pytest.raises(ValueError, match="which can be run through only once"):
        as_shards(iter([1]), name="train dataset")
    with pytest.raises(ValueError, match="parts must be at least 1"):
        IterableShards(make=MakeLines([], []), parts=0)
    with pytest.raises(ValueError, match="parts is 2 and total_parts 8: give one of them"):
        IterableShards(make=MakeLines([], []), parts=2, total_parts=8)
