"""Which cost model a run goes by, how it is calibrated, and what is printed of it.

Must not plan: the fit is in `plan.calibration`, the switch in the loader.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatch
from odb_megatron.megatron.config import CostSource, OdbConfig, cost_flags
from odb_megatron.megatron.step_timer import CpuClock, CudaClock, MicroBatchTimer
from odb_megatron.plan.calibration import (
    CALIBRATION_STEPS,
    WARM_UP_STEPS,
    CostFit,
    median_error,
)
from odb_megatron.plan.cost import CostModel, CostPrices
from odb_megatron.plan.state import saved_cost

__all__ = ["RunCost"]

_SKIPPED = "the first micro-batch of each step is left out with --overlap-param-gather"


class RunCost:
    """The cost model of a run's training loader.

    Args:
        args: Megatron's arguments.
        config: ODB's.
        loader: the training loader, before its state is loaded.
    """

    def __init__(self, args: argparse.Namespace, config: OdbConfig, loader: StepLoader) -> None:
        self._args = args
        self._loader = loader
        self._timer: MicroBatchTimer | None = None
        self._other_thread: Callable[[], int] | None = None
        self._origin = "as given" if config.prices else "the model's shape"
        self._prices = config.prices
        self._linear_ps = 0
        self._skips_first = bool(getattr(args, "overlap_param_gather", False))
        if config.cost is CostSource.AUTO:
            clock = CudaClock() if torch.cuda.is_available() else CpuClock(self._others_ns)
            self._timer = MicroBatchTimer(clock, skips_first=self._skips_first)
            loader.calibrate(self._timer.times, after=CALIBRATION_STEPS, on_fit=self._on_fit)

    def leave_out(self, cpu_ns: Callable[[], int]) -> None:
        """Leave the CPU time of a thread of this process out of measured times.

        Args:
            cpu_ns: returns it, in nanoseconds.
        """
        self._other_thread = cpu_ns

    @property
    def model(self) -> CostModel:
        """The model of the step that the trainer has: the next ones wait for a new model's."""
        return self._loader.config.cost

    @property
    def is_timing(self) -> bool:
        """Whether micro-batches are being timed."""
        return self._timer is not None

    def start(self, state: Mapping[str, Any] | None) -> None:
        """Say which model the run starts with; `state` is the planner's that was loaded, if any."""
        saved, linear_ps = saved_cost(state) if state else (None, 0)
        if self._loader.is_calibrated:
            self._timer = None
            self._linear_ps = linear_ps
            self._origin = "calibrated before the resume" if linear_ps else f"{self._origin}, kept"
        elif saved is not None and saved != self._loader.config.cost:
            self._print(f"the data state's cost model {self._text(saved)} is replaced")
        plan = f", to be calibrated over {CALIBRATION_STEPS} steps" if self._timer else ""
        self._print(f"cost model {self.describe()}{plan}")

    def begin_step(self, header: StepHeader) -> None:
        """A training step starts."""
        if self._timer is not None:
            self._timer.begin_step(header.totals.step)

    def begin_micro_batch(self, item: MicroBatch) -> None:
        """A micro-batch was taken for training."""
        if self._timer is not None:
            self._timer.begin_micro_batch(item)

    def end_backward(self) -> None:
        """See `MicroBatchTimer.end_step`."""
        if self._timer is not None:
            self._timer.end_step()

    def describe(self) -> str:
        """Return the flags of the model in force and where it comes from."""
        origin = self._origin
        if self._timer is not None:
            origin += "; not calibrated yet"
        return f"{self._text(self._loader.config.cost)} ({origin})"

    def _others_ns(self) -> int:
        return 0 if self._other_thread is None else self._other_thread()

    def _on_fit(self, fit: CostFit) -> None:
        assert self._timer is not None
        times = self._timer.times()
        self._timer = None
        last = self._args.curr_iteration
        steps = f"steps {last - CALIBRATION_STEPS + WARM_UP_STEPS + 1} to {last}"
        if not fit.linear_ps:
            if self._skips_first:
                fit = replace(fit, note=f"{fit.note} ({_SKIPPED})")
            self._origin += f"; not calibrated: {fit.note}"
            flags = self._text(fit.cost)
            self._print(f"cost not calibrated over {steps}: {fit.note}; it stays {flags}")
            return
        self._linear_ps = fit.linear_ps
        note = f"; {fit.note}" if fit.note else ""
        self._origin = f"calibrated over {steps}, in microseconds{note}"
        self._print(
            f"cost calibrated over {steps}: reproduce with {self._text(fit.cost)} "
            f"(median error {median_error(times, fit):.1%} of this replica's times; "
            f"{fit.num_rows} micro-batches of all replicas{note})"
        )

    def _text(self, cost: CostModel) -> str:
        linear = self._prices.linear if self._prices is not None else 1.0
        if self._linear_ps > 0:
            linear = float(f"{self._linear_ps / 1e6:.5g}")
        return cost_flags(CostPrices.of(cost, linear=linear))

    def _print(self, text: str) -> None:
        if self._args.rank == 0:
            print(f"odb: {text}", flush=True)
