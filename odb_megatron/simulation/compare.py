"""Runs policies and rivals on one stream and scores them all alike.

The registry of names lives here; how a policy forms steps does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from odb_megatron.plan.policy import PolicyName
from odb_megatron.simulation.drive import check_plannable, run_planners
from odb_megatron.simulation.names import BOUND
from odb_megatron.simulation.rivals.ideal import lpt_window
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
from odb_megatron.simulation.score import Times, bound_time, measure_times, score, steady_steps
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
    "lpt-window": lambda stream, setting: lpt_window(
        stream, setting, sizes=_even_sizes(stream, setting)
    ),
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
    policies: dict[str, Figures] = {}
    left_out: dict[str, str] = {}
    for name in names:
        progress(name)
        if name == BOUND:
            policies[name] = runs.bound()
            continue
        try:
            schedule = _POLICIES[name](stream, setting)
        except ReferenceMissingError as error:
            left_out[name] = str(error)
            continue
        policies[name] = runs.figures(schedule)
    return Comparison(policies=policies, left_out=left_out)


class _Runs:
    """Scores schedules against the baseline and against what is reachable."""

    def __init__(self, stream: Stream, setting: Setting) -> None:
        self._stream, self._setting = stream, setting
        self._reachable: dict[bytes, Times] = {}
        baseline = standard(stream, setting)
        times = measure_times(baseline, stream, setting)
        self._baseline = {
            is_steady: _rates(times, steps)
            for is_steady, steps in _spans(baseline, stream, setting).items()
        }

    def figures(self, schedule: Schedule) -> Figures:
        """Return a schedule's figures, `steady` among them."""
        stream, setting = self._stream, self._setting
        times = measure_times(schedule, stream, setting)
        reachable = self._times_of_ideal(schedule)
        found: dict[bool, Figures | None] = {}
        for is_steady, steps in _spans(schedule, stream, setting).items():
            if steps[0] == steps[1]:
                found[is_steady] = None
                continue
            figures: Figures = score(schedule, times, stream, setting, steps=steps)
            own, base = _rates(times, steps), self._baseline[is_steady]
            figures["fraction_of_reachable"] = own["step"] / _rates(reachable, steps)["step"]
            for name, key in _RELATIVE.items():
                if name in own:
                    figures[key] = own[name] / base[name] if name in base else None
            found[is_steady] = figures
        whole = found[False]
        assert whole is not None, "a run has steps"
        return {**whole, "steady": found[True]}

    def bound(self) -> Figures:
        """Return the bound's figures; it has no steps, so most are not defined."""
        work = float(self._stream.costs.sum())
        tokens = int(self._stream.lengths.sum())
        time = bound_time(work=work, tokens=tokens, setting=self._setting)
        figures: Figures = {
            "fraction_of_bound": 1.0,
            "samples_per_s_rel": work / time / self._baseline[False]["step"],
        }
        return {**figures, "steady": dict(figures)}

    def _times_of_ideal(self, schedule: Schedule) -> Times:
        sizes = schedule.step_samples
        key = sizes.tobytes()
        if key not in self._reachable:
            ideal = lpt_window(self._stream, self._setting, sizes=sizes.tolist())
            self._reachable[key] = measure_times(ideal, self._stream, self._setting)
        return self._reachable[key]


_RELATIVE = {"step": "samples_per_s_rel", "pipeline": "pipeline_samples_per_s_rel"}


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
