"""`odb_megatron.megatron.cost_model`: what is said of the model, for each outcome of a fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_arguments import _config
from test_calibration import _times

from odb_megatron.megatron.cost_model import RunCost
from odb_megatron.plan.calibration import CostFit, MicroBatchTime
from odb_megatron.plan.cost import CostModel

SHAPE = CostModel.from_ratios(quadratic=0.5, fixed_tokens=3)
FITTED = CostModel.from_ratios(quadratic=0.25, fixed_tokens=8)


class Loader:
    """Stands in for a StepLoader."""

    def __init__(self, cost: CostModel = SHAPE, *, is_calibrated: bool = False) -> None:
        self.config = SimpleNamespace(cost=cost)
        self.is_calibrated = is_calibrated
        self.asked: list[int] = []

    def calibrate(
        self,
        measure: Callable[[], Sequence[MicroBatchTime]],
        *,
        after: int,
        on_fit: Callable[[CostFit], None],
    ) -> None:
        self.asked.append(after)
        self.on_fit = on_fit

    def finish(self, fit: CostFit) -> None:
        self.on_fit(fit)
        self.config.cost = fit.cost


def _cost(loader: Any, flags: str, **values: Any) -> RunCost:
    args = argparse.Namespace(**{"rank": 0, "curr_iteration": 20, **values})
    return RunCost(args, _config(flags), loader)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_shape_and_given_prices(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Loader()
    cost = _cost(loader, "--odb")
    cost.start(None)
    shape = "--odb-cost-linear 1.0 --odb-cost-quadratic 0.5 --odb-cost-fixed 3.0"
    assert _lines(capsys) == [f"odb: cost model {shape} (the model's shape)"]
    assert (cost.is_timing, loader.asked) == (False, [])
    given = "--odb-cost-linear 4.0 --odb-cost-quadratic 1.0 --odb-cost-fixed 32.0"
    _cost(Loader(FITTED), f"--odb {given}").start(None)
    assert _lines(capsys) == [f"odb: cost model {given} (as given)"]
    _cost(Loader(), "--odb", rank=1).start(None)
    assert _lines(capsys) == []


def test_a_fit(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Loader()
    cost = _cost(loader, "--odb --odb-cost auto")
    cost.start(None)
    assert (cost.is_timing, loader.asked) == (True, [20])
    (line,) = _lines(capsys)
    assert line.endswith("(the model's shape; not calibrated yet), to be calibrated over 20 steps")
    cost._timer.times = lambda: _times(1, 20)  # type: ignore[method-assign, union-attr]
    loader.finish(CostFit(cost=FITTED, linear_ps=1_234_567, num_rows=40))
    prices = "--odb-cost-linear 1.2346 --odb-cost-quadratic 0.30865 --odb-cost-fixed 9.8768"
    (line,) = _lines(capsys)
    assert line.startswith(f"odb: cost calibrated over steps 4 to 20: reproduce with {prices} (med")
    assert line.endswith("% of this replica's times; 40 micro-batches of all replicas)")
    assert cost.describe() == f"{prices} (calibrated over steps 4 to 20, in microseconds)"
    assert not cost.is_timing
    assert _config(f"--odb {prices}").prices.model() == FITTED  # type: ignore[union-attr]


@pytest.mark.parametrize("overlaps", [False, True])
def test_no_fit(capsys: pytest.CaptureFixture[str], overlaps: bool) -> None:
    loader = Loader()
    cost = _cost(loader, "--odb --odb-cost auto", overlap_param_gather=overlaps, curr_iteration=51)
    loader.finish(CostFit(cost=SHAPE, note="too few"))
    note = "too few"
    if overlaps:
        note += " (the first micro-batch of each step is left out with --overlap-param-gather)"
    shape = "--odb-cost-linear 1.0 --odb-cost-quadratic 0.5 --odb-cost-fixed 3.0"
    assert _lines(capsys) == [
        f"odb: cost not calibrated over steps 35 to 51: {note}; it stays {shape}"
    ]
    assert cost.describe() == f"{shape} (the model's shape; not calibrated: {note})"


@pytest.mark.parametrize(
    ("linear_ps", "text"),
    [
        (2_000_000, "--odb-cost-linear 2.0 --odb-cost-quadratic 0.5 --odb-cost-fixed 16.0 (calib"),
        (0, "--odb-cost-linear 1.0 --odb-cost-quadratic 0.25 --odb-cost-fixed 8.0 (the model's "),
    ],
)
def test_a_resume(capsys: pytest.CaptureFixture[str], linear_ps: int, text: str) -> None:
    state = {"cost": [FITTED.quadratic, FITTED.fixed, 0, linear_ps]}
    cost = _cost(Loader(FITTED, is_calibrated=True), "--odb --odb-cost auto")
    cost.start(state)
    assert not cost.is_timing
    (line,) = _lines(capsys)
    assert line.startswith(f"odb: cost model {text}")
    assert line.endswith("before the resume)" if linear_ps else "shape, kept)")


def test_a_resume_with_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    cost = _cost(Loader(), "--odb")
    cost.start({"cost": [FITTED.quadratic, FITTED.fixed, 0, -1]})
    replaced = "--odb-cost-linear 1.0 --odb-cost-quadratic 0.25 --odb-cost-fixed 8.0"
    assert _lines(capsys)[0] == f"odb: the data state's cost model {replaced} is replaced"
