"""`plan.calibration`, `plan.least_squares`: known prices found again, the same on all replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.calibration import (
    CostFit,
    MicroBatchTime,
    calibration_record,
    fit_cost,
    median_error,
    trim,
)
from odb_megatron.plan.cost import COST_UNIT, CostModel, CostPrices
from odb_megatron.plan.least_squares import dot, form, inverse, non_negative
from odb_megatron.plan.records import (
    RECORD_BYTES,
    CalibrationRecord,
    RecordTable,
    ReplicaFailedError,
    check_agreement,
)

BUDGET = 8192
PRIOR = CostModel.from_ratios(quadratic=1e-4, fixed_tokens=400)
PRICES = CostPrices(linear=3000.0, quadratic=0.9, fixed=1e6)  # nanoseconds
WITH_PATCHES = replace(PRICES, patch=2e4)


def _times(
    seed: int,
    num: int,
    *,
    prices: CostPrices = PRICES,
    noise: float = 0.0,
    outliers: float = 0.0,
    lengths: Sequence[int] = (),
    budget: int = BUDGET,
) -> list[MicroBatchTime]:
    """Micro-batches of log-normal lengths (or of given ones), timed with noise and outliers."""
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        room = rng.uniform(0.5, 1.0) * budget
        tokens = squares = patches = 0
        while True:
            drawn = (
                rng.choice(lengths) if lengths else rng.lognormvariate(5.9, 0.83) * budget / BUDGET
            )
            length = min(budget, max(1, int(drawn)))
            if tokens and tokens + length > room:
                break
            tokens += length
            squares += length * length
            patches += rng.randint(0, 40) if prices.patch else 0
        time = prices.linear * tokens + prices.quadratic * squares + prices.fixed
        time += prices.patch * patches
        time *= 1 + rng.gauss(0, noise) if noise else 1
        time *= rng.uniform(1.5, 8) if rng.random() < outliers else 1
        found.append(
            MicroBatchTime(tokens=tokens, squares=squares, patches=patches, time_ns=round(time))
        )
    return found


def _table(*replicas: Sequence[MicroBatchTime]) -> RecordTable[CalibrationRecord]:
    records = [calibration_record(times, token_budget=BUDGET, step=20) for times in replicas]
    return RecordTable(CalibrationRecord, [record.to_bytes() for record in records])


def _fit(*replicas: Sequence[MicroBatchTime], prior: CostModel = PRIOR) -> CostFit:
    return fit_cost(_table(*replicas), prior=prior, token_budget=BUDGET)


def _predict(cost: CostModel, times: Sequence[MicroBatchTime]) -> list[float]:
    return [
        time.tokens + cost.quadratic * time.squares / 2**32 + cost.fixed / COST_UNIT
        for time in times
    ]


class TestKnownPrices:
    @pytest.mark.parametrize("seed", range(5))
    def test_without_noise(self, seed: int) -> None:
        fit = _fit(_times(seed, 40), _times(seed + 100, 40))
        assert not fit.note
        assert fit.linear_ps == pytest.approx(3000_000, rel=1e-5)
        assert fit.cost.quadratic == pytest.approx(PRICES.model().quadratic, rel=1e-4)
        assert fit.cost.fixed == pytest.approx(PRICES.model().fixed, rel=1e-3)
        assert fit.cost.per_patch == PRIOR.per_patch

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_and_outliers(self, seed: int) -> None:
        """5 % noise, every tenth micro-batch up to 8 times slower: predictions within 3 % on
        average, 8 % for the smallest."""
        times = [_times(seed + 10 * r, 60, noise=0.05, outliers=0.1) for r in range(4)]
        fit = _fit(*times)
        assert fit.linear_ps
        fresh = _times(seed + 1000, 200)
        found = _predict(fit.cost, fresh)
        exact = _predict(PRICES.model(), fresh)
        scale = sum(found) / sum(exact)
        assert scale == pytest.approx(1, abs=0.15)  # the unit is a token: it may shift
        errors = [abs(a / scale / b - 1) for a, b in zip(found, exact, strict=True)]
        assert sum(errors) / len(errors) < 0.03
        assert max(errors) < 0.08
        assert median_error(times[0], fit) < 0.06

    def test_patches(self) -> None:
        times = [_times(seed, 60, prices=WITH_PATCHES, noise=0.02) for seed in (1, 2)]
        fit = _fit(*times)
        assert not fit.note
        assert fit.cost.per_patch == pytest.approx(WITH_PATCHES.model().per_patch, rel=0.1)
        assert fit.cost.quadratic == pytest.approx(WITH_PATCHES.model().quadratic, rel=0.1)
        assert median_error(times[0], fit) < 0.03

    def test_a_linear_model_has_no_quadratic_price(self) -> None:
        linear = CostPrices(linear=3000.0, fixed=1e6)
        fit = _fit(_times(1, 60, prices=linear, noise=0.01), _times(2, 60, prices=linear))
        quadratic = fit.cost.quadratic / 2**32 * BUDGET
        assert 0 <= quadratic < 0.02  # of the linear part, at the longest sample

    def test_units_of_time_do_not_matter(self) -> None:
        """Micro-batches of a second and of ten hours: the records hold both."""
        times = _times(3, 60)
        longer = [replace(time, time_ns=time.time_ns << 20) for time in times]
        fast, slow = _fit(times, times), _fit(longer, longer)
        assert slow.cost.quadratic == pytest.approx(fast.cost.quadratic, rel=1e-4)
        assert slow.linear_ps == pytest.approx(fast.linear_ps << 20, rel=1e-4)


class TestAgreement:
    @pytest.mark.parametrize("num", [1, 2, 16])
    def test_records_are_of_one_size_and_give_one_result(self, num: int) -> None:
        replicas = [_times(seed, 30 + seed, noise=0.05, outliers=0.1) for seed in range(num)]
        records = [calibration_record(t, token_budget=BUDGET, step=20) for t in replicas]
        data = [record.to_bytes() for record in records]
        assert {len(part) for part in data} == {RECORD_BYTES}
        assert [CalibrationRecord.from_bytes(part) for part in data] == records
        fits = {
            fit_cost(RecordTable(CalibrationRecord, list(data)), prior=PRIOR, token_budget=BUDGET)
            for _ in range(3)
        }
        assert len(fits) == 1
        joined = RecordTable(CalibrationRecord, b"".join(data))
        assert fit_cost(joined, prior=PRIOR, token_budget=BUDGET) in fits

    def test_the_order_of_replicas_does_not_matter(self) -> None:
        a, b = _times(1, 50, noise=0.1), _times(2, 70, noise=0.1)
        assert _fit(a, b) == _fit(b, a)

    def test_steps_must_be_equal(self) -> None:
        with pytest.raises(ReplicaFailedError, match="replicas disagree on step: replica 0 has 20"):
            check_agreement([CalibrationRecord(step=s) for s in (20, 21)], names=("step",))


class TestDegenerate:
    @pytest.mark.parametrize("num", [0, 1, 7])
    def test_too_few(self, num: int) -> None:
        fit = _fit(_times(1, num), _times(2, num))
        assert fit == CostFit(
            cost=PRIOR, note=f"only {2 * num} micro-batches were measured, 16 are needed"
        )

    def test_equal_lengths_keep_the_quadratic_ratio(self) -> None:
        """Tokens and squares then grow alike; the price of a micro-batch can still be told."""
        fit = _fit(*(_times(seed, 60, lengths=[512], noise=0.01) for seed in (1, 2)))
        assert fit.note.startswith("lengths vary too little to tell the quadratic price")
        assert fit.cost.quadratic == PRIOR.quadratic
        assert fit.linear_ps
        each = (3000 * 512 + 0.9 * 512**2) / (512 + PRIOR.quadratic / 2**32 * 512**2)
        assert fit.cost.fixed / COST_UNIT == pytest.approx(1e6 / each, rel=0.1)

    def test_equal_sizes_keep_the_fixed_ratio(self) -> None:
        """Every micro-batch has 8000 tokens, of few or many samples."""
        times = [
            MicroBatchTime(tokens=8000, squares=squares, time_ns=3000 * 8000 + squares)
            for squares in range(10**6, 6 * 10**7, 10**6)
        ]
        fit = _fit(times)
        assert fit.note.startswith("a micro-batch's price is not told apart")
        assert fit.cost.fixed == PRIOR.fixed
        assert fit.linear_ps == pytest.approx(3_000_000 * 8000 / 8400, rel=1e-3)

    def test_one_size_and_one_length(self) -> None:
        fit = _fit([MicroBatchTime(tokens=512, squares=512**2, time_ns=10**6)] * 40)
        assert fit.cost == PRIOR
        assert fit.note == "the measured times do not follow the lengths clearly enough"

    @pytest.mark.parametrize("sign", [0, -1])
    def test_times_that_do_not_grow(self, sign: int) -> None:
        times = [replace(t, time_ns=10**8 + sign * 5000 * t.tokens) for t in _times(5, 60)]
        fit = _fit(times, times)
        assert (fit.cost, fit.linear_ps) == (PRIOR, 0)
        assert fit.note == "the measured times do not follow the lengths clearly enough"

    def test_noise_alone(self) -> None:
        rng = random.Random(3)
        times = [replace(t, time_ns=rng.randint(10**6, 10**9)) for t in _times(5, 60)]
        fit = _fit(times)
        assert (fit.cost, fit.linear_ps) == (PRIOR, 0)

    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_whatever_is_measured(self, data: Any) -> None:
        """No crash, no negative price, a model that fits the records; at least half is kept."""
        sizes = st.integers(0, 2**20)
        times = st.lists(
            st.builds(
                lambda tokens, mean, patches, time: MicroBatchTime(
                    tokens=tokens, squares=tokens * min(mean, tokens), patches=patches, time_ns=time
                ),
                *(sizes, st.integers(1, 2**17), st.integers(0, 2**20), st.integers(0, 2**50)),
            ),
            max_size=60,
        )
        replicas = data.draw(st.lists(times, min_size=1, max_size=3))
        budget = data.draw(st.sampled_from([1, 64, BUDGET, 2**20]))
        table = RecordTable(
            CalibrationRecord,
            [calibration_record(t, token_budget=budget, step=1).to_bytes() for t in replicas],
        )
        fit = fit_cost(table, prior=PRIOR, token_budget=budget)
        assert fit.linear_ps or fit.cost == PRIOR
        fit.cost.sample(budget)
        for measured in replicas:
            kept, fitted = trim(measured)
            assert len(kept) == len(fitted)
            assert 2 * len(kept) >= len([t for t in measured if t.time_ns and t.tokens])
            assert all(time > 0 for time in fitted)


class TestPrices:
    @given(
        st.builds(
            CostModel,
            quadratic=st.integers(0, 1 << 44),
            fixed=st.integers(0, (1 << 46) - 1),
            per_patch=st.integers(0, 1 << 44),
        ),
        st.floats(1e-9, 1e9),
    )
    def test_printed_prices_give_the_same_integers(self, model: CostModel, linear: float) -> None:
        prices = CostPrices.of(model, linear=linear)
        assert prices.model() == model
        again = CostPrices(
            linear=float(repr(prices.linear)),
            quadratic=float(repr(prices.quadratic)),
            fixed=float(repr(prices.fixed)),
            patch=float(repr(prices.patch)),
        )
        assert again.model() == model

    def test_few_digits(self) -> None:
        model = CostModel.from_ratios(quadratic=1e-4, fixed_tokens=204.8, patch_tokens=3)
        prices = CostPrices.of(model)
        assert prices == CostPrices(linear=1.0, quadratic=1e-4, fixed=204.8, patch=3.0)

    def test_only_ratios_count(self) -> None:
        one = CostPrices(linear=0.5, quadratic=0.25, fixed=8, patch=2).model()
        assert one == CostPrices(linear=1, quadratic=0.5, fixed=16, patch=4).model()
        assert one == CostModel.from_ratios(quadratic=0.5, fixed_tokens=16, patch_tokens=4)
        assert CostPrices(linear=7).model() == CostModel()

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"linear": 0.0}, "--odb-cost-linear must be above 0, because costs are counted in"),
            ({"linear": -1.0}, "--odb-cost-linear must be a finite number of at least 0, got -1.0"),
            ({"linear": 1.0, "fixed": float("nan")}, "--odb-cost-fixed must be a finite .* nan"),
            ({"linear": 1.0, "patch": float("inf")}, "--odb-cost-patch must be a finite .* inf"),
        ],
    )
    def test_refusals(self, values: dict[str, float], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            CostPrices(**values)

    def test_what_no_decimal_number_says(self) -> None:
        with pytest.raises(ValueError, match=r"cost \d+/4294967296 is too large to be written"):
            CostPrices.of(CostModel(quadratic=(1 << 80) + 1))


class TestLeastSquares:
    def test_inverse(self) -> None:
        matrix = ((Fraction(2), Fraction(1)), (Fraction(1), Fraction(3)))
        found = inverse(matrix)
        assert found == ((Fraction(3, 5), Fraction(-1, 5)), (Fraction(-1, 5), Fraction(2, 5)))
        assert inverse(((Fraction(1), Fraction(2)), (Fraction(2), Fraction(4)))) is None
        assert inverse(((Fraction(0), Fraction(1)), (Fraction(1), Fraction(0)))) == (
            (0, 1),
            (1, 0),
        )

    @given(
        st.lists(st.lists(st.integers(-9, 9), min_size=4, max_size=4), min_size=1, max_size=8),
        st.integers(1, 3),
    )
    def test_no_other_non_negative_prices_are_better(
        self, rows: list[list[int]], size: int
    ) -> None:
        """Optimality (Karush-Kuhn-Tucker) wherever the normal equations are not singular."""
        columns = [[Fraction(row[at]) for row in rows] for at in range(size)]
        target = [Fraction(row[3]) for row in rows]
        gram = tuple(tuple(dot(a, b) for b in columns) for a in columns)
        right = tuple(dot(column, target) for column in columns)
        found, explained = non_negative(gram, right)
        assert min(found) >= 0
        assert explained == 2 * dot(found, right) - form(found, gram, found)
        if inverse(gram) is None:
            return
        slopes = [b - dot(row, found) for row, b in zip(gram, right, strict=True)]
        for price, slope in zip(found, slopes, strict=True):
            assert slope == 0 if price else slope <= 0
