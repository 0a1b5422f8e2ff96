"""Runs policies and rivals on one stream and scores them all alike.

The registry of names lives here; how a policy forms steps does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from odb_megatron.plan.policy import PolicyName
from odb_megatron.simulation.drive import check_plannable, run_planners
from odb_megatron.simulation.names import BOUND, IDEAL, ONLINE_BOUND
from odb_megatron.simulation.rivals.ideal import lpt_window
from odb_megatron.simulation.rivals.outliers import hold_outliers
from odb_megatron.simulation.rivals.packed import dp_balanced, ffd
from odb_megatron.simulation.rivals.padded import (
    sorted_aligned,
    sorted_batches,
    sorted_buckets,
    standard,
    standard_safe,
)
from odb_megatron.simulation.rivals.reference import ReferenceMissingError, odb_reference
from odb_megatron.simulation.schedule import Schedule
from odb_megatron.simulation.score import (
    Times,
    bound_time,
    measure_times,
    online_time,
    score,
    steady_steps,
)
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["Comparison", "compare"]

Figures = dict[str, Any]

_POLICIES: dict[str, Callable[[Stream, Setting], Schedule]] = {
    "standard": standard,
    "standard-safe": standard_safe,
    "sorted": sorted_batches,
    "sorted-bucketed": sorted_buckets,
    "sorted-aligned": sorted_aligned,
    "odb-reference": odb_reference,
    "dp-balanced": dp_balanced,
    "ffd": ffd,
    "samples": partial(run_planners, PolicyName.SAMPLES),
    "cost": partial(run_planners, PolicyName.COST),
}

_PLANNED = {name.value: name for name in PolicyName}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a simulation found.

    Attributes:
        policies: figures of each policy, and under `steady` those without fill-up and drain (None
            where nothing lies between).
        left_out: why a policy that was asked for has no figures.
    """

    policies: dict[str, Figures]
    left_out: dict[str, str] = field(default_factory=dict)


def compare(
    names: Sequence[str],
    stream: Stream,
    setting: Setting,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run and score policies.

    Args:
        names: of `names.POLICY_NAMES`.
        stream: the samples.
        setting: what they have in common.
        progress: told each name before its turn.

    Raises:
        ValueError: the planner refuses the setting.
    """
    for name in names:
        if name in _PLANNED:
            check_plannable(_PLANNED[name], stream, setting)
    runs = _Runs(stream, setting)
    schedules: dict[str, Schedule] = {}
    if IDEAL in names:  # first, so that what has the same steps is compared with all of it
        progress(IDEAL)
        chosen = hold_outliers(stream, setting, sizes=_even_sizes(stream, setting))
        schedules[IDEAL] = lpt_window(stream, setting, steps=chosen)
        runs.know_ideal(schedules[IDEAL])
    policies: dict[str, Figures] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if name in (BOUND, ONLINE_BOUND):
            policies[name] = runs.bound(is_online=name == ONLINE_BOUND)
            continue
        if name not in schedules:
            progress(name)
            try:
                schedules[name] = _POLICIES[name](stream, setting)
            except ReferenceMissingError as error:
                left_out[name] = str(error)
                continue
        policies[name] = runs.figures(schedules.pop(name))
    return Comparison(policies=policies, left_out=left_out)


class _Runs:
    """Scores schedules against the baseline and against what is reachable."""

    def __init__(self, stream: Stream, setting: Setting) -> None:
        self._stream, self._setting = stream, setting
        self._ideals: dict[bytes, Times] = {}
        baseline = standard(stream, setting)
        times = measure_times(baseline, stream, setting)
        self._baseline = {
            is_steady: _rates(times, steps)
            for is_steady, steps in _spans(baseline, stream, setting).items()
        }

    def know_ideal(self, schedule: Schedule) -> None:
        """Take the ideal's schedule for steps of its sizes, to compare others with."""
        times = measure_times(schedule, self._stream, self._setting)
        self._ideals[schedule.step_samples.tobytes()] = times

    def figures(self, schedule: Schedule) -> Figures:
        """Return a schedule's figures, `steady` among them."""
        stream, setting = self._stream, self._setting
        times = measure_times(schedule, stream, setting)
        found: dict[bool, Figures | None] = {}
        for is_steady, steps in _spans(schedule, stream, setting).items():
            if steps[0] == steps[1]:
                found[is_steady] = None
                continue
            figures: Figures = score(schedule, times, stream, setting, steps=steps)
            ideal = self._reachable(schedule, steps, same_samples=False)
            figures["fraction_of_ideal"] = figures["fraction_of_bound"] / ideal
            if schedule.keeps_order:
                ideal = self._reachable(schedule, steps, same_samples=True)
            figures["fraction_of_reachable"] = figures["fraction_of_bound"] / ideal
            own, base = _rates(times, steps), self._baseline[is_steady]
            for name, key in _RELATIVE.items():
                if name in own:
                    figures[key] = own[name] / base[name] if name in base else None
            found[is_steady] = figures
        whole = found[False]
        assert whole is not None, "a run has steps"
        chosen = {"exchange": schedule.exchange} if schedule.exchange else {}
        return {**whole, **chosen, "steady": found[True]}

    def bound(self, *, is_online: bool) -> Figures:
        """Return a bound's figures; it has no steps, so most are not defined."""
        work = float(self._stream.costs.sum())
        tokens = int(self._stream.lengths.sum())
        least = time = bound_time(work=work, tokens=tokens, setting=self._setting)
        if is_online:
            time = online_time(self._stream, self._setting)
        found: dict[bool, Figures | None] = {
            is_steady: {
                "fraction_of_bound": least / time,
                "samples_per_s_rel": work / time / base["step"] if base else None,
            }
            for is_steady, base in self._baseline.items()
        }
        return {**(found[False] or {}), "steady": None if is_online else found[True]}

    def _reachable(
        self, schedule: Schedule, steps: tuple[int, int], *, same_samples: bool
    ) -> float:
        """Return which fraction of the bound the ideal reaches in steps of these sizes.

        With `same_samples` in the very steps of the schedule; else it composes its own. Where it
        has not run on these sizes anyway, it runs on some of the steps, evenly spaced: the
        fraction varies little from step to step.
        """
        (first, last), sizes = steps, schedule.step_samples
        known = None if same_samples else self._ideals.get(sizes.tobytes())
        if known is not None:
            return self._fraction(known, slice(first, last))
        stride = max(1, min(int(sizes[first:last].sum()) // _ENOUGH, (last - first) // _FEW_STEPS))
        only = range(first + (last - first - 1) % stride // 2, last, stride)
        if same_samples:
            chosen = np.split(schedule.positions, schedule.step_starts[1:-1])
        else:
            chosen = hold_outliers(self._stream, self._setting, sizes=sizes.tolist())
        ideal = lpt_window(self._stream, self._setting, steps=chosen, only=only)
        times = measure_times(ideal, self._stream, self._setting)
        return self._fraction(times, slice(0, len(only)))

    def _fraction(self, times: Times, span: slice) -> float:
        work, tokens = float(times.work[span].sum()), int(times.tokens[span].sum())
        bound = bound_time(work=work, tokens=tokens, setting=self._setting)
        return bound / float(times.step[span].sum())


_RELATIVE = {"step": "samples_per_s_rel", "pipeline": "pipeline_samples_per_s_rel"}
_ENOUGH = 1 << 15  # samples that the ideal is run on, at least
_FEW_STEPS = 16  # and steps


def _spans(schedule: Schedule, stream: Stream, setting: Setting) -> dict[bool, tuple[int, int]]:
    return {False: (0, len(schedule)), True: steady_steps(schedule, stream, setting)}


def _rates(times: Times, steps: tuple[int, int]) -> dict[str, float]:
    """Return work per time, by step time and, with a pipeline, by critical path."""
    span = slice(*steps)
    if steps[0] == steps[1]:
        return {}
    work = float(times.work[span].sum())
    rates = {"step": work / float(times.step[span].sum())}
    if times.pipeline is not None:
        rates["pipeline"] = work / float(times.pipeline[span].sum())
    return rates


def _even_sizes(stream: Stream, setting: Setting) -> list[int]:
    batch, total = setting.global_batch_size, len(stream)
    return [min(batch, total - start) for start in range(0, total, batch)]
