"""Megatron's micro-batch counter under ODB: products that are whole, in the loop's own order."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.megatron.counters import SamplesPerReplica, StepCalculator
from odb_megatron.plan.record import StepTotals


def _totals(num_samples: int, *, left_out: int = 0) -> StepTotals:
    return StepTotals(
        step=0,
        num_micro_batches=3,
        num_replicas=1,
        num_bad=0,
        num_patches=0,
        num_moved=0,
        bytes_moved=0,
        cost_sum=0,
        cost_max=0,
        num_consumed=num_samples + left_out,
        consumed_before=0,
        num_samples=num_samples,
        num_left_out=left_out,
        num_truncated=0,
        num_tokens=0,
        num_padded_tokens=0,
        num_squared_tokens=0,
        num_loss_tokens=0,
        loss_weight=0,
        num_idle=0,
        wait_us=0,
        is_final=False,
    )


@dataclass
class _Base:
    """Megatron's constant calculator, as far as the loop uses it."""

    count: int
    updates: list[tuple[Any, ...]] = field(default_factory=list)

    def get(self) -> int:
        return self.count

    def update(self, consumed: int, consistency_check: bool, verbose: bool = False) -> None:
        self.updates.append((consumed, consistency_check, verbose))

    def get_current_global_batch_size(self) -> int:
        return 8


@given(st.integers(1, 10**9), st.integers(1, 4096))
def test_every_product_megatron_forms_is_the_sample_count(samples: int, replicas: int) -> None:
    """The orders of train_step, training_log and train; micro-batch size and remat size are 1."""
    count = SamplesPerReplica(samples, replicas)
    products = [count * 1 * replicas * 1, 1 * replicas * 1 * count, replicas * 1 * count]
    assert products == [samples] * 3
    assert all(type(product) is int for product in products)


def test_half_a_sample_stays_exact() -> None:
    count = SamplesPerReplica(7, 2)
    assert type(count * 1) is SamplesPerReplica
    assert type(1 * count) is SamplesPerReplica
    assert count * 3 == 3 * count == Fraction(21, 2)
    assert type(count * 4) is int
    assert count != 3
    assert 1 / count == Fraction(2, 7)
    assert count * 0.5 == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("totals", "replicas", "expected"),
    [
        (_totals(8), 2, 4),
        (_totals(7), 2, Fraction(7, 2)),
        (_totals(5, left_out=3), 2, 4),
        (_totals(1), 4, Fraction(1, 4)),
        (_totals(0, left_out=2), 2, 1),
    ],
)
def test_a_step_counts_consumed_positions(
    totals: StepTotals, replicas: int, expected: Fraction
) -> None:
    calculator = StepCalculator(_Base(4), num_replicas=replicas)
    calculator.begin_step(totals)
    count = calculator.get()
    assert count == expected
    assert replicas * count == totals.num_consumed
    assert type(replicas * count) is int


def test_the_base_value_shows_between_steps() -> None:
    """So the loop's check for a count that decreases or grows sees a constant."""
    base = _Base(4)
    calculator = StepCalculator(base, num_replicas=2)
    assert calculator.get() == 4
    for samples in (9, 5):
        calculator.begin_step(_totals(samples))
        assert 2 * calculator.get() == samples
        calculator.update(samples, consistency_check=False, verbose=True)
        assert calculator.get() == 4
        calculator.update(samples, consistency_check=True)
        assert calculator.get() == 4
    assert base.updates[:2] == [(9, False, True), (9, True, False)]
    assert calculator.get_current_global_batch_size() == 8


def test_install_and_remove() -> None:
    megatron = pytest.importorskip("megatron.core.num_microbatches_calculator")
    before = megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    try:
        megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR = base = _Base(4)
        calculator = StepCalculator.install(num_replicas=2)
        calculator.begin_step(_totals(6))
        assert megatron.get_num_microbatches() == 3
        megatron.update_num_microbatches(6, consistency_check=False)
        assert megatron.get_num_microbatches() == 4
        calculator.remove()
        assert megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR is base
        megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR = other = _Base(5)
        calculator.remove()
        assert megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR is other
    finally:
        megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR = before
