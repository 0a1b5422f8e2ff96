"""`odb_megatron.data.order`: Megatron's own samplers as the reference, and shuffled passes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data import order as order_module
from odb_megatron.data.order import CyclicOrder, PassOrder, build_order

needs_megatron = pytest.mark.megatron

GOLDEN = [4, 5, 3, 1, 2, 0, 6, 7, 5, 7, 1, 3, 4, 2, 0, 6]
"""Two passes over 8 records with seed 1234, as the first version drew them."""


def _endless(make: Any) -> Iterator[list[int]]:
    """Micro-batches of a sampler that is iterated again at its end (Megatron's cyclic_iter)."""
    sampler = make()
    while True:
        yield from sampler


def _megatron_stream(
    kind: str, *, total: int, replicas: int, rows: int, consumed: int = 0, **more: Any
) -> list[list[list[int]]]:
    """Micro-batches [row][replica][index] that Megatron's samplers draw."""
    from megatron.training.datasets import data_samplers

    size = more.pop("micro_batch_size", 1)

    def make(replica: int) -> Any:
        common = {
            "total_samples": total,
            "consumed_samples": consumed,
            "micro_batch_size": size,
            "data_parallel_rank": replica,
            "data_parallel_size": replicas,
        }
        if kind == "single":
            return data_samplers.MegatronPretrainingSampler(**common)
        return data_samplers.MegatronPretrainingRandomSampler(dataset=None, **common, **more)

    streams = [list(islice(_endless(lambda r=r: make(r)), rows)) for r in range(replicas)]
    return [list(row) for row in zip(*streams, strict=True)]


@needs_megatron
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_is_megatrons_order_over_three_epochs(replicas: int, sharding: bool) -> None:
    total = 24
    rows = _megatron_stream(
        "cyclic", total=total, replicas=replicas, rows=3 * total // replicas, data_sharding=sharding
    )
    drawn = [replica[0] for row in rows for replica in row]
    ours = CyclicOrder(total=total, num_replicas=replicas, data_sharding=sharding)
    assert [ours[position] for position in range(3 * total)] == drawn
    epochs = [drawn[at : at + total] for at in range(0, 3 * total, total)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])


@needs_megatron
@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_steps_hold_the_baselines_samples_at_any_micro_batch_size(sharding: bool) -> None:
    """The padded baseline may run larger micro-batches; its steps hold the same samples."""
    total, replicas, size, batch = 48, 2, 4, 16
    rows = _megatron_stream(
        "cyclic",
        total=total,
        replicas=replicas,
        rows=2 * total // (replicas * size),
        micro_batch_size=size,
        data_sharding=sharding,
    )
    per_step = batch // (replicas * size)
    ours = CyclicOrder(total=total, num_replicas=replicas, data_sharding=sharding)
    for step in range(2 * total // batch):
        theirs = [
            index
            for row in rows[step * per_step : (step + 1) * per_step]
            for micro_batch in row
            for index in micro_batch
        ]
        assert sorted(theirs) == sorted(ours[step * batch + i] for i in range(batch))


@needs_megatron
@pytest.mark.parametrize(("replicas", "size"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 3)])
def test_single_is_megatrons_order(replicas: int, size: int) -> None:
    total, width = 24, replicas * size
    for consumed in (0, 12):
        rows = _megatron_stream(
            "single",
            total=total,
            replicas=replicas,
            rows=(total - consumed) // width,
            consumed=consumed,
            micro_batch_size=size,
        )
        drawn = [index for row in rows for replica in row for index in replica]
        assert drawn == list(range(consumed, total))


@pytest.mark.parametrize(("total", "replicas", "left_out"), [(25, 2, 1), (7, 4, 3)])
def test_cyclic_refuses_a_remainder(total: int, replicas: int, left_out: int) -> None:
    with pytest.raises(
        ValueError, match=f"cyclic leaves out {left_out} of {total} samples .*--dataloader-type sin"
    ):
        build_order("cyclic", total=total, num_replicas=replicas, data_sharding=True)


def test_build_order() -> None:
    assert build_order("single", total=25, num_replicas=2, data_sharding=True) is None
    assert build_order("cyclic", total=24, num_replicas=2, data_sharding=False) == CyclicOrder(
        total=24, num_replicas=2, data_sharding=False
    )
    with pytest.raises(ValueError, match="--dataloader-type external has no order of its own: use"):
        build_order("external", total=24, num_replicas=2, data_sharding=True)


@given(
    size=st.integers(1, 40),
    start=st.integers(0, 50),
    seed=st.integers(-(2**31), 2**40),
    first_pass=st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 4)),
)
def test_every_pass_visits_every_record_once(
    size: int, start: int, seed: int, first_pass: int
) -> None:
    indices = np.arange(start, start + size)
    places = range(first_pass * size, (first_pass + 3) * size)
    passes = PassOrder(indices, seed=seed)
    assert len(passes) == size
    drawn = [passes[place] for place in places]
    for at in range(0, 3 * size, size):
        assert sorted(drawn[at : at + size]) == indices.tolist()
    again = PassOrder(indices, seed=seed)
    assert [again[place] for place in reversed(places)] == drawn[::-1]
    if size >= 20:  # equal permutations by chance: never
        assert drawn[:size] != drawn[size : 2 * size] != drawn[2 * size :]
        other = PassOrder(indices, seed=seed + 1)
        assert [other[place] for place in places] != drawn


def test_the_order_of_a_released_version_stays() -> None:
    passes = PassOrder(np.arange(8), seed=1234)
    assert [passes[i] for i in range(16)] == GOLDEN


def _count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    built: list[int] = []
    make = np.random.RandomState

    def counting(seed: list[int]) -> np.random.RandomState:
        built.append(seed[1])
        return make(seed)

    monkeypatch.setattr(order_module.np.random, "RandomState", counting)
    return built


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_CACHED_RECORDS", 25)
    built = _count_builds(monkeypatch)
    many, few = PassOrder(np.arange(5), seed=1), PassOrder(np.arange(20), seed=1)
    for number in range(9):
        many[5 * number], few[20 * number]
    assert len(many._passes) == 5
    assert len(few._passes) == 2
    built.clear()
    many[5 * 8], many[5 * 4], few[20 * 7], few[20 * 8]
    assert built == []
    many[0]
    assert built == [0]
