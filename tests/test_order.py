"""`odb_megatron.data.order`: Megatron's own samplers as the reference, and shuffled passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data import order as order_module
from odb_megatron.data.order import PassOrder, build_order

needs_megatron = pytest.mark.megatron

GOLDEN = [4, 5, 3, 1, 2, 0, 6, 7, 5, 7, 1, 3, 4, 2, 0, 6]
"""Two passes over 8 records with seed 1234, as the first version drew them."""


@needs_megatron
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sharding", [True, False, None])
def test_the_order_is_megatrons(replicas: int, size: int, sharding: bool | None) -> None:
    """Over three epochs, of `cyclic` with and without shards, and of `single`.

    The padded baseline may run larger micro-batches; its steps hold the same samples.
    """
    from megatron.training.datasets import data_samplers

    total, width = 24, replicas * size
    common = {"total_samples": total, "consumed_samples": 0, "micro_batch_size": size}

    def epochs(rank: int) -> Iterator[list[int]]:
        place = {"data_parallel_rank": rank, "data_parallel_size": replicas}
        if sharding is None:
            make = partial(data_samplers.MegatronPretrainingSampler, **common, **place)
        else:
            make = partial(data_samplers.MegatronPretrainingRandomSampler, dataset=None,
                           data_sharding=sharding, **common, **place)  # fmt: skip
        sampler = make()
        for _ in range(3):  # as Megatron's cyclic_iter does
            yield from sampler

    rows = zip(*map(epochs, range(replicas)), strict=True)
    drawn = [sorted(index for batch in row for index in batch) for row in rows]
    name = "single" if sharding is None else "cyclic"
    order = build_order(name, total=total, num_replicas=replicas, data_sharding=bool(sharding))
    ours = [at % total if order is None else order[at] for at in range(3 * total)]
    assert [sorted(ours[at : at + width]) for at in range(0, 3 * total, width)] == drawn
    passes = [ours[at : at + total] for at in range(0, 3 * total, total)]
    assert all(sorted(one) == list(range(total)) for one in passes)
    assert (passes[0] == passes[1]) == (order is None)


@pytest.mark.parametrize(
    ("name", "total", "text"),
    [
        ("cyclic", 25, "cyclic leaves out 1 of 25 samples .*--dataloader-type single"),
        ("external", 24, "--dataloader-type external has no order of its own: use"),
    ],
)
def test_refusals(name: str, total: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_order(name, total=total, num_replicas=2, data_sharding=True)


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


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_CACHED_RECORDS", 25)
    many, few = PassOrder(np.arange(5), seed=1), PassOrder(np.arange(20), seed=1)
    for number in range(9):
        many[5 * number], few[20 * number]
    assert list(many._passes) == [4, 5, 6, 7, 8]
    assert list(few._passes) == [7, 8]
    many[0]
    assert list(many._passes) == [5, 6, 7, 8, 0]
