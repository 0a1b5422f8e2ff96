"""The rivals: each on small cases, and on random ones every sample once and within its promises."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import BalanceScope, PolicyName
from odb_megatron.simulation.compare import compare
from odb_megatron.simulation.delay import max_delay_steps
from odb_megatron.simulation.drive import check_plannable, run_planners
from odb_megatron.simulation.names import POLICY_NAMES, select_names
from odb_megatron.simulation.rivals import reference
from odb_megatron.simulation.rivals.ideal import lpt_window
from odb_megatron.simulation.rivals.outliers import hold_outliers
from odb_megatron.simulation.rivals.packed import (
    dp_balanced,
    ffd,
    first_fit_decreasing,
    next_fit,
    raise_to_multiple,
)
from odb_megatron.simulation.rivals.padded import (
    sorted_aligned,
    sorted_batches,
    sorted_buckets,
    standard,
    standard_safe,
)
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.score import measure_times
from odb_megatron.simulation.setting import CostShares, Setting, Stream

Rival = Callable[[Stream, Setting], Schedule]
Nested = list[list[list[list[int]]]]


def _world(lengths: Any, *, epochs: int = 1, **changes: Any) -> tuple[Stream, Setting]:
    lengths = np.asarray(lengths, dtype=np.int64)
    budget = changes.get("token_budget", 10)
    values = {
        "num_replicas": 2,
        "token_budget": budget,
        "window": 4,
        "global_batch_size": 4,
        "cost": CostShares().model(lengths, token_budget=budget),
    }
    setting = Setting(**{**values, **changes})
    return Stream.of_epochs(lengths, epochs=epochs, cost=setting.cost, seed=0), setting


def _nested(schedule: Schedule) -> Nested:
    """Return `steps[step][replica][micro-batch]` as lists of positions."""
    parts = np.split(schedule.positions, schedule.sample_starts[1:-1])
    bins = iter(part.tolist() for part in parts)
    return [
        [[next(bins) for _ in range(count)] for _ in range(schedule.num_replicas)]
        for count in schedule.counts.tolist()
    ]


def _ideal(stream: Stream, setting: Setting) -> Schedule:
    batch, total = setting.global_batch_size, len(stream)
    sizes = [min(batch, total - start) for start in range(0, total, batch)]
    return lpt_window(stream, setting, steps=hold_outliers(stream, setting, sizes=sizes))


# --- small cases -------------------------------------------------------------------------------


def test_standard_goes_by_the_mean_and_overruns() -> None:
    stream, setting = _world([9, 1, 1, 1, 8, 1, 1, 2])  # mean 3: three samples
    schedule = standard(stream, setting)
    assert schedule.is_padded
    assert _nested(schedule) == [[[[0, 1, 2]], [[3, 4, 5]]], [[[6, 7]], [[]]]]
    assert measure_times(schedule, stream, setting).over_budget.tolist() == [2, 0]


def test_standard_safe_fits_the_longest() -> None:
    stream, setting = _world([5, 1, 1, 1, 1, 1])
    schedule = standard_safe(stream, setting)
    assert _nested(schedule) == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[]]]]
    assert not measure_times(schedule, stream, setting).over_budget.any()


def test_sorted_aligned_puts_like_lengths_side_by_side() -> None:
    stream, setting = _world([5, 1, 5, 1, 5, 5, 1, 1], global_batch_size=4)
    steps = _nested(sorted_aligned(stream, setting))
    assert sorted(steps) == [[[[0, 2]], [[4, 5]]], [[[1, 3, 6, 7]], [[]]]]


def test_sorted_sorts_each_epoch_by_itself() -> None:
    stream, setting = _world([5, 1, 5, 1, 5, 5, 1, 1], epochs=3)
    for make in (sorted_batches, sorted_aligned, sorted_buckets):
        order = np.concatenate(
            [np.sort(part) for part in np.split(make(stream, setting).positions, 3)]
        )
        assert order.tolist() == list(range(24))


def test_sorted_deals_its_micro_batches_one_by_one() -> None:
    """The same micro-batches as aligned, in another order: the balance is worse."""
    lengths = np.random.default_rng(0).integers(1, 100, 3200)
    stream, setting = _world(lengths, token_budget=400, global_batch_size=64)
    one, other = (make(stream, setting) for make in (sorted_batches, sorted_aligned))
    sets = [
        {frozenset(part.tolist()) for part in np.split(s.positions, s.sample_starts[1:-1])}
        for s in (one, other)
    ]
    assert sets[0] - {frozenset()} == sets[1] - {frozenset()}
    balance = [measure_times(s, stream, setting).balance_microbatch.mean() for s in (one, other)]
    assert balance[0] < balance[1]


def test_buckets_are_not_sorted_inside() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 640)
    stream, setting = _world(lengths, token_budget=400, global_batch_size=64)
    whole, buckets = (make(stream, setting) for make in (sorted_batches, sorted_buckets))
    padding = [measure_times(one, stream, setting).computed.sum() for one in (whole, buckets)]
    assert stream.lengths.sum() < padding[0] < padding[1]


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], []),
        ([4, 4, 4, 4], [[0, 1], [2, 3]]),
        ([6, 6, 4], [[0], [1, 2]]),
        ([6, 4, 4, 6], [[0, 1], [2, 3]]),
        ([12], [[0]]),
    ],
)
def test_next_fit(lengths: list[int], bins: list[list[int]]) -> None:
    assert next_fit(lengths, token_budget=10) == bins


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], []),
        ([2, 6, 4, 5, 3], [[1, 2], [3, 4, 0]]),
        ([6, 6, 4, 4], [[0, 2], [1, 3]]),
        ([3, 12], [[1], [0]]),
    ],
)
def test_first_fit_decreasing(lengths: list[int], bins: list[list[int]]) -> None:
    assert first_fit_decreasing(lengths, token_budget=10) == bins


@pytest.mark.parametrize(
    ("bins", "multiple", "expected"),
    [
        ([[0, 1], [2, 3]], 2, [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3], [4]], 2, [[0, 1], [2], [4], [3]]),
        ([[0, 1, 2]], 3, [[0], [2], [1]]),
        ([[0]], 2, [[0], []]),  # where Megatron's own asserts
    ],
)
def test_raising_to_a_multiple(
    bins: list[list[int]], multiple: int, expected: list[list[int]]
) -> None:
    assert raise_to_multiple(bins, multiple) == expected


def test_dp_balanced_deals_bins_in_order() -> None:
    stream, setting = _world([6, 6, 4, 6, 9, 1, 9, 1])
    assert _nested(dp_balanced(stream, setting)) == [
        [[[0], [3]], [[1], [2]]],  # [0] [1, 2] [3] and then 2 moved to the end
        [[[4, 5]], [[6, 7]]],
    ]


@pytest.mark.parametrize("lengths", [[2, 2, 2, 2], [12, 1, 1, 1]])
def test_a_global_batch_in_one_bin(lengths: list[int]) -> None:
    """Where Megatron's `dp_balanced` stops with an assertion (or nearly so)."""
    stream, setting = _world(lengths, token_budget=15)
    assert Counter(dp_balanced(stream, setting).positions.tolist()) == Counter(range(4))


def test_dp_balanced_is_megatrons() -> None:
    """Against `DpBalancedScheduler` of a Megatron that has it."""
    try:
        module = importlib.import_module("megatron.core.datasets.data_schedule")
        scheduler_class = module.DpBalancedScheduler
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this megatron-core has no DpBalancedScheduler ({error})")
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    stream, setting = _world(lengths, token_budget=100, global_batch_size=100)
    ours = _nested(dp_balanced(stream, setting))
    scheduler = scheduler_class(100, 1, 2, None)
    for step, start in enumerate(range(0, 400, 100)):
        pairs = list(enumerate(lengths[start : start + 100].tolist()))
        theirs = scheduler.get_groups_and_subsamples(pairs)
        expected = [[[start + slot for slot in slots] for slots in row] for row in theirs]
        assert [[ours[step][r][k] for r in range(2)] for k in range(len(theirs))] == expected


def test_the_ideal_balances_replicas() -> None:
    stream, setting = _world(
        [8, 7, 6, 5, 4], token_budget=100, global_batch_size=5, cost=CostModel()
    )
    (step,) = _nested(_ideal(stream, setting))
    assert sorted(sum(stream.lengths[one].sum() for one in bins) for bins in step) == [15, 15]


def test_the_ideal_takes_the_count_that_is_quickest() -> None:
    """One micro-batch each where the price is high; more where the budget asks for it."""
    price = CostModel.from_ratios(quadratic=0, fixed_tokens=50)
    for budget, count in ((20, 1), (10, 2)):
        stream, setting = _world([8, 8, 8, 8], token_budget=budget, cost=price)
        assert _ideal(stream, setting).counts.tolist() == [count]


def test_the_ideal_aligns_micro_batches() -> None:
    """Two long samples, one on each replica, in the same micro-batch: 9, then 4 (and not 9 + 9)."""
    stream, setting = _world(
        [9, 9, 4, 4], sync=BalanceScope.MICROBATCH, cost=CostModel(), global_batch_size=4
    )
    schedule = _ideal(stream, setting)
    assert _nested(schedule) == [[[[0], [2]], [[1], [3]]]]


@pytest.mark.parametrize(
    ("longest", "sync", "waits"),
    [
        (90, BalanceScope.MICROBATCH, True),  # more than an ordinary micro-batch
        (90, BalanceScope.STEP, True),  # more than all else of its step
        (40, BalanceScope.STEP, False),  # the others balance it
    ],
)
def test_the_ideal_waits_for_a_partner(longest: int, sync: BalanceScope, waits: bool) -> None:
    """One long sample per step: where it alone makes replicas wait, they run two by two."""
    lengths = ([longest] + [5] * 31) * 8
    stream, setting = _world(lengths, token_budget=100, global_batch_size=32, window=32, sync=sync)
    schedule = _ideal(stream, setting)
    steps = np.split(stream.lengths[schedule.positions], schedule.step_starts[1:-1])
    found = [int((part == longest).sum()) for part in steps]
    assert set(found) == ({0, 2} if waits else {1})
    assert max_delay_steps(schedule) <= setting.max_delay_steps
    assert (max_delay_steps(schedule) > 0) == waits


# --- random cases ------------------------------------------------------------------------------

PACKED: list[Rival] = [dp_balanced, ffd, _ideal]


@pytest.mark.parametrize("batch", [4, 10, 14, 22, 46, 64, 256])
@pytest.mark.parametrize("rival", [standard, standard_safe, sorted_buckets])
@pytest.mark.parametrize("chunks", [1, 2])
def test_within_the_global_batch_size(rival: Any, batch: int, chunks: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=600).tolist()
    stages = {"num_stages": 2, "num_chunks": 2} if chunks > 1 else {}
    stream, setting = _world(lengths, token_budget=300, global_batch_size=batch, **stages)
    schedule = rival(stream, setting, is_within=True)
    assert sorted(schedule.positions.tolist()) == list(range(600))
    assert (schedule.counts % setting.count_multiple == 0).all()
    whole = schedule.step_samples[:-1]
    least = setting.num_replicas * setting.count_multiple
    if rival is sorted_buckets:
        assert whole.mean() <= 1.06 * max(batch, least)
    else:
        assert whole.max() <= max(batch, least)
    assert whole.mean() >= 0.6 * batch
    if batch == 4:
        uncapped = rival(stream, setting)
        assert uncapped.step_samples[:-1].mean() > 4, "guard: the global batch size binds"


PADDED: list[Rival] = [standard_safe, sorted_batches, sorted_aligned, sorted_buckets]


@pytest.mark.parametrize("make", [standard, *PADDED, *PACKED], ids=lambda make: make.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_sample_once_and_within_the_budget(make: Rival, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=120))
    num_stages = data.draw(st.sampled_from([1, 2]))
    stream, setting = _world(
        lengths,
        token_budget=40,
        num_replicas=data.draw(st.integers(1, 5)),
        global_batch_size=data.draw(st.integers(1, 50)),
        epochs=data.draw(st.integers(1, 3)),
        sync=data.draw(st.sampled_from(BalanceScope)),
        num_stages=num_stages,
        num_chunks=data.draw(st.sampled_from([1, 2])) if num_stages > 1 else 1,
    )
    schedule = make(stream, setting)
    assert Counter(schedule.positions.tolist()) == Counter(range(len(stream)))
    if make is not standard:
        assert not measure_times(schedule, stream, setting).over_budget.any()
    assert schedule.is_padded == (make not in PACKED)
    assert (schedule.counts % setting.count_multiple == 0).all()


@pytest.mark.parametrize("policy", PolicyName)
def test_our_policies_through_the_wire(policy: PolicyName) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    stream, setting = _world(lengths, token_budget=100, global_batch_size=32, window=64)
    schedule = run_planners(policy, stream, setting)
    assert Counter(schedule.positions.tolist()) == Counter(range(len(stream)))
    assert not measure_times(schedule, stream, setting).over_budget.any()
    assert schedule.arrivals is not None
    assert Counter(np.concatenate(schedule.arrivals).tolist()) == Counter(range(len(stream)))
    delay = max_delay_steps(schedule)
    assert delay == 0 if policy is PolicyName.SAMPLES else 0 < delay <= setting.max_delay_steps


def test_a_window_too_small_is_refused_before_anything_runs() -> None:
    stream, setting = _world([1] * 100, global_batch_size=32, window=4)
    with pytest.raises(ValueError, match="window 4 is below the 16 samples"):
        check_plannable(PolicyName.COST, stream, setting)
    with pytest.raises(ValueError, match="window 4 is below the 16 samples"):
        compare(["cost"], stream, setting)


def test_cost_beats_the_rivals() -> None:
    """Without moving a payload; the ideal, which moves all, is no worse than anyone."""
    random = np.random.RandomState(0)
    lengths = np.clip(np.round(random.lognormal(5.9, 0.83, 12000)), 1, 8192).astype(np.int64)
    stream, setting = _world(
        lengths, token_budget=8192, num_replicas=4, global_batch_size=400, window=400
    )
    names = [name for name in POLICY_NAMES if name != "odb-reference"]
    found = {
        name: figures["steady"]["fraction_of_bound"]
        for name, figures in compare(names, stream, setting).policies.items()
        if figures["steady"] is not None
    }
    rivals = set(found) - {"cost", "lpt-window", "bound"}
    assert found["cost"] > 0.98
    assert all(found["cost"] > found[name] for name in rivals), found
    assert found["bound"] == 1
    assert all(found[name] <= found["lpt-window"] + 1e-3 for name in {"cost", *rivals}), found


# --- the reference package ---------------------------------------------------------------------


def test_the_reference_package() -> None:
    """Its own loop in this process: equal counts, padded groups within the budget."""
    pytest.importorskip("odb.grouping", reason=f"not installed: {reference.INSTALL}")
    lengths = np.random.default_rng(0).integers(1, 400, 3000)
    stream, setting = _world(
        lengths, token_budget=2000, num_replicas=3, global_batch_size=90, window=60
    )
    before = importlib.import_module("odb.grouping").dist
    schedule = reference.odb_reference(stream, setting)
    assert importlib.import_module("odb.grouping").dist is before
    assert schedule.is_padded
    counted = Counter(schedule.positions.tolist())
    assert set(counted.values()) == {1}
    assert len(counted) > 0.97 * len(stream)
    assert not measure_times(schedule, stream, setting).over_budget.any()
    for replicas in _nested(schedule)[:-8]:
        assert all(all(bins) for bins in replicas), "no idle group before the end"
    for replica in range(3):
        own = [p for step in _nested(schedule) for one in step[replica] for p in one]
        assert {position % 3 for position in own} == {replica}


def test_an_error_in_the_reference_package_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    collate = pytest.importorskip("odb.collate", reason=f"not installed: {reference.INSTALL}")

    def fail(*_: object, **__: object) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(collate, "grouping_data", fail)
    stream, setting = _world([1, 2, 3, 4])
    with pytest.raises(KeyError, match="mine"):
        reference.odb_reference(stream, setting)


def test_without_the_reference_package_there_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("odb."):
            raise ImportError("No module named 'odb'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    stream, setting = _world([1, 2, 3, 4])
    found = compare(["odb-reference", "ffd"], stream, setting)
    assert list(found.policies) == ["ffd"]
    assert found.left_out == {
        "odb-reference": "not importable (No module named 'odb'): "
        "pip install online-dynamic-batching==0.1.2"
    }


# --- names -------------------------------------------------------------------------------------


def test_names() -> None:
    assert select_names("all") == POLICY_NAMES
    assert select_names("cost, ffd,") == ("ffd", "cost")
    with pytest.raises(ValueError, match="no policy 'fdd': expected all, or some of standard, "):
        select_names("cost,fdd")
    with pytest.raises(ValueError, match="names no policy"):
        select_names(",")
    with pytest.raises(ValueError, match="all stands for every policy, cost included"):
        select_names("all,cost")
