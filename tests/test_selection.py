"""`odb_megatron.plan.selection` and `aligned`: what a replica picks, and in which micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.aligned import select_aligned
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.selection import Aim, Selection, select
from odb_megatron.plan.window import Column

BUDGET = 64
CAPS = Caps(token_budget=BUDGET)


def rows(lengths: list[int], *, patches: list[int] | None = None) -> Any:
    """A window of samples that cost `length + length**2 / 64`."""
    columns = np.zeros((len(Column), len(lengths)), dtype=np.int64)
    columns[Column.POSITION] = columns[Column.ARRIVAL] = np.arange(len(lengths))
    columns[Column.NUM_TOKENS] = columns[Column.PADDED] = lengths
    columns[Column.COST] = [64 * n + n * n for n in lengths]
    columns[Column.PATCHES] = patches or 0
    columns[Column.DUE] = -1
    return columns


def aim(window: Any, *, cost: int, tokens: int, count: int | None = 4) -> Aim:
    rate = int(window[Column.COST].sum()) // max(1, int(window[Column.PADDED].sum()))
    return Aim(
        cost=cost, tokens=tokens, cost_per_token=max(1, rate), num_micro_batches=count, hold=1000
    )


def none_due(window: Any) -> Any:
    return np.zeros(window.shape[1], dtype=np.bool_)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Any, Any, Aim, Caps]:
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60))
    patches = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    caps = Caps(token_budget=BUDGET, max_patches=draw(st.sampled_from([0, 8])))
    window = rows(lengths, patches=patches)
    due = np.zeros(len(lengths), dtype=np.bool_)
    due[: draw(st.integers(0, 2))] = True  # two always fit into two micro-batches
    count = draw(st.sampled_from([None, 2, 5]))
    return (
        window,
        due,
        aim(
            window,
            cost=draw(st.integers(1, 30_000)),
            tokens=draw(st.integers(1, 400)),
            count=count,
        ),
        caps,
    )


def check(found: Selection, window: Any, due: Any, wanted: Aim, caps: Caps) -> None:
    assert found.micro_batches is not None
    slots = sorted(slot for micro_batch in found.micro_batches for slot in micro_batch)
    assert slots == np.flatnonzero(found.chosen).tolist()
    assert found.chosen[due].all()
    for micro_batch in found.micro_batches:
        assert sum(window[Column.PADDED][micro_batch]) <= caps.token_budget
        if caps.max_patches:
            assert sum(window[Column.PATCHES][micro_batch]) <= caps.max_patches
    if wanted.num_micro_batches is not None:
        assert len(found.micro_batches) <= wanted.num_micro_batches


class TestSelect:
    @settings(max_examples=300, deadline=None)
    @given(windows())
    def test_invariants(self, case: tuple[Any, Any, Aim, Caps]) -> None:
        window, due, wanted, caps = case
        found = select(window, due, aim=wanted, caps=caps)
        check(found, window, due, wanted, caps)
        cost = int(window[Column.COST][found.chosen].sum())
        assert cost <= max(wanted.cost, int(window[Column.COST][due].sum()))

    def test_oldest_first(self) -> None:
        window = rows([8] * 20)
        wanted = aim(window, cost=5 * 576, tokens=40)
        found = select(window, none_due(window), aim=wanted, caps=CAPS)
        assert np.flatnonzero(found.chosen).tolist() == [0, 1, 2, 3, 4]

    def test_the_cost_comes_out_exactly_by_one_exchange(self) -> None:
        """9 + 9 is short of the target; 9 + 10 meets it."""
        window = rows([9, 9, 10, 30, 31])
        target = 64 * 19 + 81 + 100
        wanted = aim(window, cost=target, tokens=19, count=1)
        found = select(window, none_due(window), aim=wanted, caps=CAPS)
        assert int(window[Column.COST][found.chosen].sum()) == target

    @pytest.mark.parametrize(("tokens", "long_ones"), [(120, True), (255, False)])
    def test_tokens_decide_whether_long_samples_wait(self, tokens: int, long_ones: bool) -> None:
        """The same cost from few tokens takes long samples, from many tokens short ones."""
        window = rows([8, 60] + [8] * 60 + [60] * 3)
        wanted = aim(window, cost=64 * 150 + 9000, tokens=tokens)
        found = select(window, none_due(window), aim=wanted, caps=CAPS)
        picked = window[Column.PADDED][found.chosen]
        assert bool((picked == 60).sum() > 1) is long_ones

    def test_a_sample_larger_than_the_target_waits_until_it_is_due(self) -> None:
        window = rows([64, 4, 4, 4])
        wanted = aim(window, cost=1000, tokens=12)
        waits = select(window, none_due(window), aim=wanted, caps=CAPS)
        assert not waits.chosen[0]
        due = none_due(window)
        due[0] = True
        assert select(window, due, aim=wanted, caps=CAPS).chosen.tolist() == [True] + [False] * 3

    def test_what_is_due_and_does_not_fit_is_a_defect(self) -> None:
        window = rows([60, 60, 60])
        due = np.ones(3, dtype=np.bool_)
        wanted = aim(window, cost=10**6, tokens=180, count=2)
        with pytest.raises(AssertionError, match="samples that are due do not fit"):
            select(window, due, aim=wanted, caps=CAPS)


class TestAligned:
    @settings(max_examples=200, deadline=None)
    @given(windows(), st.lists(st.integers(2000, 9000), max_size=2))
    def test_invariants(self, case: tuple[Any, Any, Aim, Caps], raised: list[int]) -> None:
        window, due, wanted, caps = case
        if wanted.num_micro_batches is None or len(raised) >= wanted.num_micro_batches:
            return
        heights = tuple(sorted(raised, reverse=True))
        aligned = replace(wanted, heights=heights)
        found = select_aligned(window, due, pressing=due, aim=aligned, caps=caps)
        if found is None:
            assert due.any()
            return
        check(found, window, due, wanted, caps)
        if not due.any():
            assert found.micro_batches is not None
            costs = [int(window[Column.COST][slots].sum()) for slots in found.micro_batches]
            level = max(
                1, (wanted.cost - sum(heights)) // (wanted.num_micro_batches - len(heights))
            )
            targets = sorted([*heights] + [level] * wanted.num_micro_batches, reverse=True)
            assert all(
                cost <= target
                for cost, target in zip(sorted(costs, reverse=True), targets, strict=False)
            )

    def test_large_samples_meet_their_heights(self) -> None:
        """One above the ordinary level goes into the micro-batch meant for it, the rest is even."""
        window = rows([10] * 30 + [60, 50] + [10] * 10)
        height = 64 * 60 + 3600
        wanted = aim(window, cost=height + 3 * 4440, tokens=60 + 180)
        none = none_due(window)
        wanted = replace(wanted, heights=(height,))
        found = select_aligned(window, none, pressing=none, aim=wanted, caps=CAPS)
        assert found is not None
        assert found.micro_batches is not None
        costs = [int(window[Column.COST][slots].sum()) for slots in found.micro_batches]
        assert costs == [height] + [4440] * 3
        assert (found.num_large, found.cost_large, found.missing) == (1, height, 0)

    def test_what_presses_goes_first(self) -> None:
        """It takes the least height that fits; the largest of the others takes what is left."""
        window = rows([10] * 60 + [50, 60, 64])
        small, tall = (64 * length + length * length for length in (60, 64))
        none = none_due(window)
        for slots, chosen in (((), [False, True, True]), ((60,), [True, False, True])):
            pressing = none.copy()
            pressing[list(slots)] = True
            wanted = aim(window, cost=tall + small + 2 * 4440, tokens=250)
            wanted = replace(wanted, heights=(tall, small))
            found = select_aligned(window, none, pressing=pressing, aim=wanted, caps=CAPS)
            assert found is not None
            assert found.chosen[60:].tolist() == chosen
