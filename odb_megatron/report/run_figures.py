"""Figures of a logged run: per step, binned over many steps, as a whole; steps worth showing.

Pure: takes what `run_log` has read. A figure that the log does not have is NaN per step and None in
a summary, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.report.steps import LoggedStep, RunLog

__all__ = ["Bins", "ChosenSteps", "RunFigures", "bins_of", "choose_steps", "measured_balance"]

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run's figures.

    Attributes:
        iterations: of the steps.
        per_step: by name (`STEP_FIGURES`), float64 [steps].
        num_replicas: of the last process start.
        is_late: steps that are not the first one of a process start, bool [steps]; all where every
            step is.
    """

    iterations: Values
    per_step: Mapping[str, Values]
    num_replicas: int
    is_late: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, run: RunLog) -> RunFigures:
        """Take the figures of a run."""
        rows = [[figure(step) for figure in STEP_FIGURES.values()] for step in run.steps]
        columns = np.array(rows, dtype=np.float64).T
        parts = np.array([step.part for step in run.steps])
        is_late = np.diff(parts, prepend=-1) == 0
        return cls(
            iterations=np.array([step.iteration for step in run.steps], dtype=np.float64),
            per_step=dict(zip(STEP_FIGURES, columns, strict=True)),
            num_replicas=run.headers[-1].num_replicas,
            is_late=is_late if is_late.any() else ~is_late,
        )

    def summary(self) -> dict[str, float | None]:
        """Return the run as a whole, by name.

        Rates leave out the first step of each process start, which pays for what is done once, if
        there are others.
        """
        step = self.per_step
        late = {name: values[self.is_late] for name, values in step.items()}
        seconds = float(np.nansum(late["step_s"]))
        tokens, computed = float(step["tokens"].sum()), float(step["computed_tokens"].sum())
        return {
            "steps": len(self.iterations),
            "replicas": self.num_replicas,
            "samples": float(step["samples"].sum()),
            "tokens": tokens,
            "tokens_per_step": tokens / len(self.iterations),
            "micro_batches_mean": float(step["micro_batches"].mean()),
            "micro_batches_max": float(step["micro_batches"].max()),
            "fill": _mean(step["fill"]),
            "padding": 1 - tokens / computed if computed else None,
            "balance": _mean(step["balance"]),
            "balance_lowest": _least(step["balance"]),
            "balance_measured": _mean(step["balance_measured"]),
            "idle": float(step["idle"].sum()),
            "patches_max": _greatest(step["patches"]),
            "seconds_per_step": seconds / len(late["step_s"]),
            "tokens_per_second": float(late["tokens"].sum()) / seconds if seconds else None,
            "wait_share": float(late["wait_s"].sum()) / seconds if seconds else None,
            "plan_seconds_per_step": _mean(late["plan_s"]),
            "moved": float(step["moved"].sum()),
            "queue_bytes_max": float(step["queue_bytes"].max()),
            "peak_memory_bytes": float(step["peak_memory_bytes"].max()),
            "left_out": float(step["left_out"].sum()),
            "bad_records": float(step["bad_records"].sum()),
            "truncated": float(step["truncated"].sum()),
            "loss_first": _at(step["loss"], 0),
            "loss_last": _at(step["loss"], -1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A figure over stretches of steps; where there are few steps, each is a stretch of its own.

    Attributes:
        first: first x of each stretch, float64 [bins].
        last: last x.
        mean: mean of the figure; NaN where no step has it.
        least: smallest value.
        most: largest value.
    """

    first: Values
    last: Values
    mean: Values
    least: Values
    most: Values

    @property
    def middle(self) -> Values:
        """Where to draw them."""
        return (self.first + self.last) / 2

    @property
    def is_binned(self) -> bool:
        """Whether a stretch has more than one step."""
        return bool((self.first != self.last).any())


def bins_of(x: Values, values: Values, *, most: int) -> Bins:
    """Return a figure over at most `most` stretches of equally many steps.

    Args:
        x: of the steps, ascending.
        values: same length.
        most: largest number of stretches.
    """
    parts = np.array_split(np.arange(len(x)), min(most, len(x)))
    found = [values[part][~np.isnan(values[part])] for part in parts]
    return Bins(
        first=np.array([x[part[0]] for part in parts]),
        last=np.array([x[part[-1]] for part in parts]),
        mean=np.array([part.mean() if len(part) else math.nan for part in found]),
        least=np.array([part.min() if len(part) else math.nan for part in found]),
        most=np.array([part.max() if len(part) else math.nan for part in found]),
    )


def measured_balance(step: LoggedStep) -> float:
    """Return mean over max of the replicas' measured time; NaN where one is not known."""
    times = [sum(record.micro_batch_s) for record in step.records.values()]
    return sum(times) / len(times) / max(times) if min(times) > 0 else math.nan


def _first(name: str) -> Callable[[LoggedStep], float]:
    def take(step: LoggedStep) -> float:
        value = getattr(step.first, name)
        return math.nan if value is None else float(value)

    return take


def _most(name: str) -> Callable[[LoggedStep], float]:
    return lambda step: float(max(getattr(record, name) for record in step.records.values()))


def _loss(step: LoggedStep) -> float:
    found = [record.loss for record in step.records.values() if record.loss is not None]
    return found[0] if found else math.nan


def _patches(step: LoggedStep) -> float:
    return float(
        max((max(r.patches) for r in step.records.values() if r.patches), default=math.nan)
    )


def _padding(step: LoggedStep) -> float:
    record = step.first
    return 1 - record.tokens / record.computed_tokens if record.computed_tokens else math.nan


STEP_FIGURES: dict[str, Callable[[LoggedStep], float]] = {
    "samples": _first("samples"),
    "consumed_samples": _first("consumed_samples"),
    "tokens": _first("tokens"),
    "computed_tokens": _first("computed_tokens"),
    "micro_batches": _first("num_micro_batches"),
    "fill": _first("fill"),
    "padding": _padding,
    "balance": _first("balance"),
    "balance_measured": measured_balance,
    "idle": _first("idle"),
    "moved": _first("moved"),
    "bytes_moved": _first("bytes_moved"),
    "patches": _patches,
    "left_out": _first("left_out"),
    "bad_records": _first("bad_records"),
    "truncated": _first("truncated"),
    "step_s": _most("step_s"),
    "wait_s": _most("wait_s"),
    "plan_s": _most("plan_s"),
    "queue_steps": lambda step: float(min(r.queue_steps for r in step.records.values())),
    "queue_bytes": _most("queue_bytes"),
    "peak_memory_bytes": _most("peak_memory_bytes"),
    "loss": _loss,
    "grad_norm": _first("grad_norm"),
}
"""Figures of a step: sums over replicas, else the largest of any replica (of `queue_steps` the
smallest)."""


def _mean(values: Values) -> float | None:
    found = values[~np.isnan(values)]
    return float(found.mean()) if len(found) else None


def _least(values: Values) -> float | None:
    found = values[~np.isnan(values)]
    return float(found.min()) if len(found) else None


def _greatest(values: Values) -> float | None:
    found = values[~np.isnan(values)]
    return float(found.max()) if len(found) else None


def _at(values: Values, index: int) -> float | None:
    found = values[~np.isnan(values)]
    return float(found[index]) if len(found) else None


# --- which single steps are worth showing --------------------------------------------------------

_NUM_USUAL = 2  # what a phone's width has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSteps:
    """Steps, by their places in the run.

    Attributes:
        usual: one or two whose balance is nearest the median; where none has one, of the middle.
        worst: the one of least balance, none of `usual`; None where no step is below the median.
        kind: `measured`, or `predicted` where nothing was timed.
        values: balance of each step, NaN where it is not known or not looked at.
        median: of `values`; NaN where none is known.
        has_aside: whether the first step of each start is not looked at.
    """

    usual: tuple[int, ...]
    worst: int | None = None
    kind: str = ""
    values: npt.NDArray[np.float64]
    median: float = math.nan
    has_aside: bool = False


def choose_steps(figures: RunFigures) -> ChosenSteps:
    """Choose steps; the first one of each start is looked at only where there is no other."""
    measured = figures.per_step["balance_measured"]
    is_timed = not np.isnan(measured).all()
    balance = measured if is_timed else figures.per_step["balance"]
    values = np.where(figures.is_late, balance, math.nan)  # others pay for what is done once
    has_aside = not figures.is_late.all() and not np.isnan(values).all()
    if not has_aside:
        values = balance
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        middle = max(0, len(values) // 2 - 1)
        places = range(middle, min(middle + _NUM_USUAL, len(values)))
        return ChosenSteps(usual=tuple(places), values=values)
    median = float(np.median(values[known]))
    worst = int(known[np.argmin(values[known])])
    nearest = known[np.argsort(np.abs(values[known] - median), kind="stable")[:_NUM_USUAL]]
    has_worst = values[worst] < median
    usual = [int(at) for at in nearest if not (has_worst and at == worst)]
    return ChosenSteps(
        usual=tuple(sorted(usual)),
        worst=worst if has_worst else None,
        kind="measured" if is_timed else "predicted",
        values=values,
        median=median,
        has_aside=has_aside,
    )
