"""Scoring: every figure on cases small enough to be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.policy import BalanceScope
from odb_megatron.simulation.compare import compare
from odb_megatron.simulation.composition import compare_composition
from odb_megatron.simulation.delay import max_delay_steps
from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.score import (
    bound_time,
    measure_times,
    online_time,
    score,
    steady_steps,
)
from odb_megatron.simulation.setting import CostShares, Setting, Stream

FIXED = 2  # tokens' worth of a micro-batch's fixed price


def _setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "num_replicas": 2,
        "token_budget": 10,
        "window": 2,
        "global_batch_size": 4,
        "cost": CostModel.from_ratios(quadratic=0, fixed_tokens=FIXED),
    }
    return Setting(**{**values, **changes})


def _stream(*lengths: int, setting: Setting) -> Stream:
    return Stream.of_epochs(np.array(lengths), epochs=1, cost=setting.cost, seed=0)


def _scored(schedule: Schedule, stream: Stream, setting: Setting) -> dict[str, Any]:
    times = measure_times(schedule, stream, setting)
    return score(schedule, times, stream, setting, steps=(0, len(schedule)))


# Replica 0 runs [8], [2, 3], replica 1 runs [5], [5, 1]; then [4] and nothing.
LENGTHS = (8, 2, 3, 5, 5, 1, 4)
STEPS = [[[[0], [1, 2]], [[3], [4, 5]]], [[[6]], [[]]]]


@pytest.mark.parametrize(
    ("sync", "times"),
    [
        # replicas: 8 + 5 = 13 and 5 + 6 = 11; micro-batches: 8 and 6; then 4
        (BalanceScope.STEP, [13 + 2 * FIXED, 4 + FIXED]),
        (BalanceScope.MICROBATCH, [8 + 6 + 2 * FIXED, 4 + FIXED]),
    ],
)
def test_figures_of_packed_steps(sync: BalanceScope, times: list[int]) -> None:
    setting = _setting(sync=sync)
    stream = _stream(*LENGTHS, setting=setting)
    schedule = Schedule.build(STEPS, num_replicas=2)
    found = measure_times(schedule, stream, setting)
    assert (found.step / COST_UNIT).tolist() == times
    figures = _scored(schedule, stream, setting)
    # 28 tokens need 3 micro-batches; two replicas share all evenly
    assert figures["fraction_of_bound"] == pytest.approx((28 + 3 * FIXED) / 2 / sum(times))
    assert figures["samples_per_step"] == 3.5
    assert figures["mean_M"] == 1.5
    assert figures["num_steps"] == 2
    assert figures["fill"] == pytest.approx(28 / 60)
    assert figures["padding_fraction"] == 0
    assert figures["over_budget"] == 0
    assert figures["bytes_moved_per_step"] == 0
    # replicas 17 and 15, then 6 and 2 (idle micro-batches have their price)
    assert figures["balance_step"] == pytest.approx((16 / 17 + 4 / 6) / 2)
    # micro-batches: means (10 + 7) / 2 and (7 + 8) / 2, largest 10 and 8; then 4 of 6
    assert figures["balance_microbatch"] == pytest.approx((16 / 18 + 4 / 6) / 2)
    assert "pipeline_efficiency" not in figures


def test_figures_of_padded_steps() -> None:
    setting = _setting(token_budget=5, cost=CostModel.from_ratios(quadratic=1, fixed_tokens=0))
    stream = _stream(1, 3, 2, 2, setting=setting)
    schedule = Schedule.build([[[[0, 1]], [[2, 3]]]], num_replicas=2, is_padded=True)
    figures = _scored(schedule, stream, setting)
    # [1, 3] is computed as [3, 3]: 6 tokens (over the budget of 5), cost 2 * (3 + 9) = 24
    assert figures["padding_fraction"] == pytest.approx(1 - 8 / 10)
    assert figures["over_budget"] == 1
    assert figures["fraction_of_bound"] == pytest.approx((2 + 12 + 6 + 6) / 2 / 24)
    assert figures["balance_step"] == pytest.approx((24 + 12) / 2 / 24)
    assert figures["fill"] == pytest.approx(8 / 10)


def test_the_pipeline_figure() -> None:
    setting = _setting(num_stages=2, cost=CostModel())
    stream = _stream(3, 3, 3, 3, setting=setting)
    schedule = Schedule.build([[[[0], [1]], [[2], [3]]]], num_replicas=2)
    # two equal micro-batches through two stages: 3 slots of which 2 are busy
    assert _scored(schedule, stream, setting)["pipeline_efficiency"] == pytest.approx(2 / 3)


def test_the_bound() -> None:
    setting = _setting(num_replicas=4)
    unit = COST_UNIT
    assert bound_time(work=100 * unit, tokens=31, setting=setting) == (100 + 4 * FIXED) * unit / 4


def test_the_online_bound() -> None:
    """4 and 1, then 2 to the second, 1 to it (3 of 4), 5 to the first that is least: 4 + 5."""
    setting = _setting()
    stream = _stream(4, 1, 2, 1, 5, setting=setting)
    assert online_time(stream, setting) == (9 + 2 * FIXED / 2) * COST_UNIT


def test_steady_leaves_out_the_first_and_the_last_windows() -> None:
    setting = _setting(window=3)  # six samples on both replicas
    stream = _stream(*[1] * 24, setting=setting)
    steps = rectangular([[i, i + 1] for i in range(0, 24, 2)], num_replicas=2, count=1)
    schedule = Schedule.build(steps, num_replicas=2)
    assert schedule.step_samples.tolist() == [4] * 6
    assert steady_steps(schedule, stream, setting) == (2, 4)  # samples 8 to 16 of 6 to 18
    assert steady_steps(schedule, stream, _setting(window=12)) == (0, 0)


def test_the_deal_of_micro_batches() -> None:
    steps = rectangular([[0], [1], [2], [3], [4]], num_replicas=2, count=2)
    assert [[list(map(list, mbs)) for mbs in step] for step in steps] == [
        [[[0], [2]], [[1], [3]]],
        [[[4]], [[]]],
    ]


# --- composition -------------------------------------------------------------------------------


def test_composition_of_random_steps_is_about_one() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 20000)
    found = compare_composition(lengths, sizes=np.full(200, 100), seed=0)
    assert found["ks_ratio"] == pytest.approx(1, abs=0.05)
    assert found["long_sample_weight"] == pytest.approx(1, abs=0.01)
    assert found["outlier_share_p99_ratio"] == pytest.approx(1, abs=0.2)
    assert abs(found["mean_length_lag1"] or 0) < 0.3


def test_composition_of_sorted_steps() -> None:
    """Long samples sit among long ones: small weight, all outliers in one step."""
    lengths = np.sort(np.random.default_rng(0).integers(1, 1000, 20000))
    found = compare_composition(lengths, sizes=np.full(40, 500), seed=0)
    assert (found["ks_ratio"] or 0) > 5
    assert (found["long_sample_weight"] or 1) < 0.6
    assert (found["outlier_share_p99_ratio"] or 0) > 5
    assert (found["mean_length_lag1"] or 0) > 0.9


def test_composition_by_hand() -> None:
    """Two steps of the lengths 1 and 3: KS distance 1/2 sorted; by chance 1/2, 0, 0 or 1/2."""
    found = compare_composition(np.array([1, 1, 3, 3]), sizes=np.array([2, 2]), seed=0)
    random = np.random.default_rng([0, 2])
    chance = []
    for _ in range(16):
        order = random.permutation([1, 1, 3, 3])
        chance += [0.5 if part.min() == part.max() else 0.0 for part in (order[:2], order[2:])]
    assert found["ks_ratio"] == pytest.approx(0.5 / np.mean(chance))
    assert found["mean_length_lag1"] is None  # two steps


def test_composition_where_nothing_varies() -> None:
    found = compare_composition(np.full(8, 5), sizes=np.array([2, 2, 2, 2]), seed=0)
    assert found == {
        "ks_ratio": None,
        "long_sample_weight": 1.0,
        "outlier_share_p99_ratio": 1.0,
        "mean_length_lag1": None,
    }
    empty = compare_composition(np.zeros(0, np.int64), sizes=np.zeros(0, np.int64), seed=0)
    assert set(empty.values()) == {None}


# --- delay -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "delay"),
    [
        ([[0, 1], [2, 3], [4, 5]], 0),
        ([[1, 0], [3, 2], [5, 4]], 0),  # within a step there is no order
        ([[1, 2], [0, 3], [4, 5]], 1),
        ([[1, 2], [3, 4], [0, 5]], 2),
    ],
)
def test_delay_in_stream_order(order: list[list[int]], delay: int) -> None:
    schedule = Schedule.build([[[step]] for step in order], num_replicas=1)
    assert max_delay_steps(schedule) == delay


def test_delay_counts_from_what_a_replica_drew() -> None:
    """Replica 1 drew 6 before 1, so it is 1 that is on time."""
    steps = [[[[0]], [[6]]], [[[2]], [[3]]], [[[4]], [[1]]]]
    arrivals = [np.array([0, 2, 4]), np.array([6, 1, 3])]
    assert max_delay_steps(Schedule.build(steps, num_replicas=2, arrivals=arrivals)) == 1
    assert max_delay_steps(Schedule.build(steps, num_replicas=2)) == 2


def test_a_deep_window_is_no_delay() -> None:
    """First in, first out, however late: a window that is k steps deep delays nothing by k."""
    steps = [[[[]]], [[[]]], [[[0, 1]]], [[[2, 3]]]]
    assert max_delay_steps(Schedule.build(steps, num_replicas=1)) == 0


# --- setting and comparison --------------------------------------------------------------------


def test_the_cost_model_has_the_shares_asked_for() -> None:
    lengths = np.full(10, 400)
    cost = CostShares(attention=0.3, fixed=0.05).model(lengths, token_budget=4000)
    assert cost.sample(400) == pytest.approx(400 * COST_UNIT / 0.7, rel=1e-6)
    assert cost.fixed == pytest.approx(0.05 * 10 * cost.sample(400), rel=1e-6)


def test_epochs_are_permutations_of_the_first() -> None:
    lengths = np.arange(1, 101)
    stream = Stream.of_epochs(lengths, epochs=3, cost=CostModel(), seed=0)
    parts = [stream.lengths[positions] for positions in stream.epochs()]
    assert np.array_equal(parts[0], lengths)
    assert all(sorted(part) == lengths.tolist() for part in parts)
    assert not np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[1], parts[2])
    assert np.array_equal(stream.costs, stream.lengths * COST_UNIT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_replicas": 0}, "--dp must be at least 1, got 0"),
        ({"token_budget": 0}, "--token-budget must be at least 1"),
        ({"window": 0}, "--window must be at least 1"),
        ({"global_batch_size": 0}, "--global-batch-size must be at least 1"),
        ({"num_stages": 0}, "--pp must be at least 1"),
        ({"num_chunks": 0}, "--vpp must be at least 1"),
        ({"max_delay_steps": 0}, "--max-delay-steps must be at least 1"),
        ({"num_chunks": 2}, "--vpp 2 needs a pipeline: pass --pp with at least 2 stages"),
    ],
)
def test_a_wrong_setting(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _setting(**changes)


def test_wrong_shares_and_epochs() -> None:
    with pytest.raises(ValueError, match=r"--attention-share 1 is not in \[0, 1\)"):
        CostShares(attention=1)
    with pytest.raises(ValueError, match=r"--fixed-cost -0.1 is not in \[0, 1\)"):
        CostShares(fixed=-0.1)
    with pytest.raises(ValueError, match="--epochs must be at least 1, got 0"):
        Stream.of_epochs(np.ones(1, np.int64), epochs=0, cost=CostModel(), seed=0)


def test_relative_figures() -> None:
    """Against the padded baseline, against the ideal with the same steps, and the bound's row."""
    setting = _setting(cost=CostModel.from_ratios(quadratic=0, fixed_tokens=0))
    stream = _stream(8, 1, 1, 6, setting=setting)
    names = ["standard", "ffd", "bound-online", "bound"]
    found = compare(names, stream, setting).policies
    # standard: 10 // 4 = 2 samples each, padded: 16 and 12; ffd: [8, 1, 1] and [6]: 10
    assert found["standard"]["samples_per_s_rel"] == 1
    assert found["ffd"]["samples_per_s_rel"] == pytest.approx(16 / 10)
    assert found["standard"]["fraction_of_reachable"] == pytest.approx(8 / 16)  # [8] and [6, 1, 1]
    assert found["ffd"]["fraction_of_reachable"] == pytest.approx(8 / 10)
    assert found["bound"]["samples_per_s_rel"] == pytest.approx(16 / 8)
    assert found["bound-online"]["fraction_of_bound"] == 1  # 8, and 1 + 1 + 6
    assert found["bound-online"]["steady"] is None
    assert found["ffd"]["steady"] is None  # windows cover the whole run
