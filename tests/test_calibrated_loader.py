"""`StepLoader.calibrate` over replicas as threads; patches from the data to the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from made_up_data import Records, single_stream
from test_calibration import _times
from test_step_loader import BUDGET, Step, _config, _read, _results, _steps, _stream, _totals

from odb_megatron.data.step_loader import StepLoader
from odb_megatron.plan.calibration import CostFit, MicroBatchTime
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

AFTER = 4
LENGTHS = [length % BUDGET + 1 for length in range(0, 80 * 7, 7)]


class Calibrated:
    """A loader with a calibration, and what its calibration did."""

    def __init__(
        self,
        exchange: ThreadExchange,
        *,
        policy: PolicyName,
        state: dict[str, Any] | None = None,
        times: Sequence[MicroBatchTime] | None = None,
    ) -> None:
        self.fits: list[CostFit] = []
        self.num_measured = 0
        self._times = _times(exchange.replica, 40, budget=BUDGET) if times is None else times
        config = _config(policy=policy, total=len(LENGTHS))
        self.loader = StepLoader(_stream(LENGTHS), config, exchange=exchange)
        self.loader.calibrate(self._measure, after=AFTER, on_fit=self.fits.append)
        if state is not None:
            self.loader.load_state_dict(state)

    def _measure(self) -> Sequence[MicroBatchTime]:
        self.num_measured += 1
        return self._times


def _both(go: Any, num: int = 2) -> list[Any]:
    return _results(run_in_threads(go, thread_exchanges(num)))


def _plans(steps: Sequence[Step]) -> list[Any]:
    return [(_totals(step), step.header.micro_batches) for step in steps]


@pytest.mark.parametrize("policy", PolicyName)
def test_all_replicas_fit_once_and_go_on_alike(policy: PolicyName) -> None:
    def go(exchange: ThreadExchange) -> Any:
        run = Calibrated(exchange, policy=policy)
        first = list(islice(_read(run.loader), AFTER))
        assert (run.fits, run.loader.is_calibrated) == ([], False)
        steps = first + _steps(run.loader)
        assert run.num_measured == 1
        return steps, run

    (steps, run), (other_steps, other) = _both(go)
    assert run.fits == other.fits
    assert len(run.fits) == 1
    assert run.fits[0].linear_ps > 0
    assert run.loader.is_calibrated
    assert run.loader.config == other.loader.config
    assert run.loader.config.cost == run.fits[0].cost != _config().cost
    assert [_totals(s) for s in steps] == [_totals(s) for s in other_steps]
    emitted = [p for s in steps + other_steps for m in s.header.micro_batches for p in m]
    assert sorted(emitted) == list(range(len(LENGTHS)))
    if policy is PolicyName.SAMPLES:
        assert [step.header.totals.num_samples for step in steps] == [4] * (len(LENGTHS) // 4)
    stream: Any = _stream(LENGTHS)
    for step in steps[AFTER:]:
        totals = step.header.totals
        lengths = [len(stream.fetch(p)) for m in step.header.micro_batches for p in m]
        cost = sum(map(run.fits[0].cost.sample, lengths))
        assert cost + totals.num_micro_batches * run.fits[0].cost.fixed == totals.costs[0]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("stop", [AFTER + 1, AFTER + 3])
def test_a_resume_after_the_fit_keeps_the_model(policy: PolicyName, stop: int) -> None:
    def whole(exchange: ThreadExchange) -> Any:
        run = Calibrated(exchange, policy=policy)
        first = list(islice(_read(run.loader), stop))
        state = json.loads(json.dumps(run.loader.state_dict()))
        return first, state, _steps(run.loader), run.fits

    before = _both(whole)

    def rest(exchange: ThreadExchange) -> Any:
        _, state, _, _ = before[exchange.replica]
        run = Calibrated(exchange, policy=policy, state=state)
        assert run.loader.is_calibrated
        steps = _steps(run.loader)
        assert (run.fits, run.num_measured) == ([], 0)
        return steps, run.loader.config.cost

    for (_, _, expected, fits), (steps, cost) in zip(before, _both(rest), strict=True):
        assert cost == fits[0].cost
        assert _plans(steps) == _plans(expected)


def test_a_resume_before_the_fit_measures_anew() -> None:
    def go(exchange: ThreadExchange) -> Any:
        run = Calibrated(exchange, policy=PolicyName.COST)
        list(islice(_read(run.loader), AFTER - 1))
        again = Calibrated(exchange, policy=PolicyName.COST, state=dict(run.loader.state_dict()))
        list(islice(_read(again.loader), AFTER))
        assert again.fits == []
        list(islice(_read(again.loader), 1))
        return again.fits

    first, second = _both(go)
    assert first == second
    assert len(first) == 1


def test_a_calibration_that_tells_nothing_is_final_too() -> None:
    def go(exchange: ThreadExchange) -> Any:
        run = Calibrated(exchange, policy=PolicyName.COST, times=[])
        list(islice(_read(run.loader), AFTER + 1))
        state: Any = run.loader.state_dict()
        again = Calibrated(exchange, policy=PolicyName.COST, state=state)
        _steps(again.loader)
        return run.fits, state["cost"], again.fits

    cost = _config().cost
    note = "only 0 micro-batches were measured, 16 are needed"
    for fits, saved, later in _both(go):
        assert fits == [CostFit(cost=cost, note=note)]
        assert saved == [cost.quadratic, cost.fixed, cost.per_patch, 0]
        assert later == []


@pytest.mark.parametrize("asks", [False, True])
def test_without_auto_the_flags_decide_after_a_resume(asks: bool) -> None:
    """A state's model is kept by a run that would calibrate, and replaced by another one."""

    def go(exchange: ThreadExchange) -> Any:
        run = Calibrated(exchange, policy=PolicyName.COST)
        list(islice(_read(run.loader), AFTER + 1))
        other = CostModel.from_ratios(quadratic=0.5, fixed_tokens=9)
        config = replace(_config(policy=PolicyName.COST, total=len(LENGTHS)), cost=other)
        loader = StepLoader(_stream(LENGTHS), config, exchange=exchange)
        if asks:
            loader.calibrate(list, after=AFTER, on_fit=run.fits.append)
        loader.load_state_dict(run.loader.state_dict())
        found = loader.config.cost
        _steps(loader)
        return found == run.fits[0].cost, found == other, loader.is_calibrated, len(run.fits)

    assert _both(go) == [(asks, not asks, asks, 1)] * 2


def test_a_clock_that_fails_ends_all_replicas() -> None:
    def go(exchange: ThreadExchange) -> None:
        run = Calibrated(exchange, policy=PolicyName.COST)
        if exchange.replica == 1:
            run.loader.calibrate(lambda: 1 // 0, after=AFTER, on_fit=run.fits.append)  # type: ignore[arg-type, return-value]
        _steps(run.loader)

    first, second = run_in_threads(go, thread_exchanges(2))
    assert isinstance(first, ReplicaFailedError)
    assert "replica 1 failed: ZeroDivisionError" in str(first)
    assert isinstance(second, ZeroDivisionError)


class Pictures(Records):
    """Records with `num_patches` equal to their length modulo 16."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "num_patches": np.int32(item["tokens"].size % 16)}


@pytest.mark.parametrize("policy", PolicyName)
def test_patches_are_capped_counted_and_resumed(policy: PolicyName) -> None:
    stream = single_stream(Pictures(LENGTHS), num_samples=len(LENGTHS))
    cap = 12
    config = _config(
        policy=policy,
        total=len(LENGTHS),
        max_patches=cap,
        token_budget=64,
        cost=CostModel.from_ratios(quadratic=0, fixed_tokens=1, patch_tokens=3),
    )

    def go(exchange: ThreadExchange) -> Any:
        loader = StepLoader(stream, config, exchange=exchange)
        steps = list(islice(_read(loader), 6))
        state = loader.state_dict()
        rest = _steps(loader)
        solo = loader.progress().source_counts[0].solo
        fresh = StepLoader(stream, config, exchange=exchange)
        fresh.load_state_dict(state)
        assert _plans(_steps(fresh)) == _plans(rest)
        return steps + rest, solo

    found = _both(go)
    over = [length for length in LENGTHS if length % 16 > cap]
    assert over
    assert sum(solo for _, solo in found) == len(over)
    alone = 0
    for steps, _ in found:
        for step in steps:
            for batch in step.micro_batches:
                samples: list[Any] = [stream.fetch(position) for position in batch.positions]
                patches = [len(sample) % 16 for sample in samples]
                assert batch.num_patches == sum(patches)
                assert sum(patches) <= cap or len(patches) == 1
                alone += sum(patches) > cap
    assert alone == len(over)
    batches = [batch for steps, _ in found for step in steps for batch in step.micro_batches]
    assert any(len(batch.positions) > 1 for batch in batches)
