"""Megatron's micro-batch counter under ODB: exact sample counts in every step.

Megatron multiplies `get_num_microbatches()` by micro-batch size and data-parallel size wherever it
counts samples (train_step 2523, training_log 2661, train 3937; 0.19.2). With micro-batch size 1 its
count is "samples per replica", and that is what it gets here; the schedule's own M is passed by
`hooks`. Must not plan.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from odb_megatron.plan.record import StepTotals

__all__ = ["SamplesPerReplica", "StepCalculator"]


class SamplesPerReplica(Fraction):
    """A step's samples over the data-parallel size; its product with that size is an int again."""

    def __mul__(self, other: Any) -> Any:
        return _whole(Fraction.__mul__(self, other))

    def __rmul__(self, other: Any) -> Any:
        return _whole(Fraction.__rmul__(self, other))


def _whole(value: Any) -> Any:
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else SamplesPerReplica(value)
    return value


class StepCalculator:
    """Stands in for Megatron's global calculator during a run.

    Between `begin_step` and the loop's next `update` it answers with the step's own sample count;
    otherwise with the base calculator's, so the loop's check that the count never decreases
    (training.py 3766) and its save on an increase see a constant.

    Args:
        base: the calculator Megatron made.
        num_replicas: data-parallel size.
    """

    def __init__(self, base: Any, *, num_replicas: int) -> None:
        self._base = base
        self._num_replicas = num_replicas
        self._totals: StepTotals | None = None

    @classmethod
    def install(cls, *, num_replicas: int) -> StepCalculator:
        """Put a StepCalculator in the place of Megatron's global calculator."""
        from megatron.core import num_microbatches_calculator as megatron

        calculator = cls(megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR, num_replicas=num_replicas)
        megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator
        return calculator

    def remove(self) -> None:
        """Put Megatron's own calculator back; harmless when called twice."""
        from megatron.core import num_microbatches_calculator as megatron

        if megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR is self:
            megatron._GLOBAL_NUM_MICROBATCHES_CALCULATOR = self._base

    def begin_step(self, totals: StepTotals) -> None:
        """The trainer is about to run this step."""
        self._totals = totals

    def get(self) -> int | SamplesPerReplica:
        """Samples per replica of the step in progress."""
        if self._totals is None:
            count: int = self._base.get()
            return count
        exact = Fraction(self._totals.num_consumed, self._num_replicas)
        return exact.numerator if exact.denominator == 1 else SamplesPerReplica(exact)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """The loop is between steps."""
        self._totals = None
        self._base.update(consumed_samples, consistency_check, verbose)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)
