"""What `make bench` runs, and which goal each measured value is held against.

Plain data: runs nothing and reads no file. A part's command writes the JSON that its goals read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PARTS", "Goal", "Part"]

Result = Mapping[str, Any]

_SPREADS = ("0.29", "0.48", "1.0", "2.0")
_RIVALS = ("odb-reference", "dp-balanced", "ffd", "sorted-bucketed", "standard-safe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One measured value and what it is to be; without a limit it is reported only.

    Attributes:
        what: is measured, with its unit.
        read: takes it out of the part's result; it may raise LookupError, which is no value.
        least: the value must reach this.
        most: the value must not exceed this.
        equals: the value must be this.
    """

    what: str
    read: Callable[[Result], Any]
    least: float | None = None
    most: float | None = None
    equals: Any = None

    def __post_init__(self) -> None:
        limits = [self.least is not None, self.most is not None, self.equals is not None]
        if sum(limits) > 1:
            raise ValueError(f"goal {self.what!r} has {sum(limits)} limits; give one at most")

    @property
    def text(self) -> str:
        """The goal as it is shown; empty where the value is reported only."""
        if self.least is not None:
            return f"at least {self.least:g}"
        if self.most is not None:
            return f"at most {self.most:g}"
        if isinstance(self.equals, bool):
            return "yes" if self.equals else "no"
        return "" if self.equals is None else str(self.equals)

    def is_met(self, value: Any) -> bool | None:
        """Whether a value reaches the goal; None without one. No value reaches none."""
        if not self.text:
            return None
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return False
        if self.least is not None:
            return bool(value >= self.least)
        if self.most is not None:
            return bool(value <= self.most)
        return bool(value == self.equals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command and its goals.

    Attributes:
        name: of `--only`, and of the JSON that it writes.
        title: what it answers.
        command: behind the interpreter; `--json FILE` is added.
        full: the same with `--full`; the same command where empty.
        timeout_s: of `command`.
        full_timeout_s: of `full`.
        goals: what its result is held against.
        is_full_only: it takes too long to be run without `--full`.
        needs: a program without which it is skipped.
    """

    name: str
    title: str
    command: tuple[str, ...]
    full: tuple[str, ...] = ()
    timeout_s: float = 300.0
    full_timeout_s: float = 7200.0
    goals: tuple[Goal, ...] = ()
    is_full_only: bool = False
    needs: str = ""


def _row(result: Result, name: str) -> Result:
    for row in result["rows"]:
        if row["name"] == name:
            found: Result = row
            return found
    raise KeyError(name)


def _simulated(name: str, key: str) -> Callable[[Result], Any]:
    return lambda result: _row(result, name)["policies"]["odb"]["steady"][key]


def _best_rival(name: str) -> Callable[[Result], float]:
    def read(result: Result) -> float:
        policies = _row(result, name)["policies"]
        found = [policies[rival]["steady"] for rival in _RIVALS if rival in policies]
        return max(float(one["fraction_of_bound"]) for one in found if one is not None)

    return read


def _planner(replicas: int, key: str) -> Callable[[Result], float]:
    def read(result: Result) -> float:
        rows = {row["replicas"]: row for row in result["rows"] if row["sync"] == "step"}
        return float(rows[replicas][key])

    return read


def _count(name: str) -> Callable[[Result], int]:
    return lambda result: int(result[name])


def _all_faults(key: str, wanted: object) -> Callable[[Result], bool]:
    return lambda result: all(case[key] == wanted for case in result["faults"].values())


def _cases(key: str, choose: Callable[[Any], Any]) -> Callable[[Result], Any]:
    return lambda result: choose([case[key] for case in result["cases"].values()])


_STREAM_GOALS = tuple(
    goal
    for spread in _SPREADS
    for goal in (
        Goal(
            what=f"CV {spread}: `odb`, fraction of the bound",
            read=_simulated(f"step/dp8/share1/cv{spread}", "fraction_of_bound"),
            least=0.994,
        ),
        Goal(
            what=f"CV {spread}: the best rival's fraction of the bound",
            read=_best_rival(f"step/dp8/share1/cv{spread}"),
        ),
    )
)

_SIMULATE = ("benchmarks/simulate_table.py", "--only")

PARTS = (
    Part(
        name="loss_parity",
        title="Is the loss that of the padded run?",
        command=("benchmarks/loss_parity.py", "--steps", "50", "--dp", "2"),
        goals=(
            Goal(
                what="largest difference of a step's loss",
                read=lambda r: r["max_abs_loss_diff"],
                most=1e-5,
            ),
            Goal(
                what="largest difference of a step's gradient norm",
                read=lambda r: r["max_abs_grad_norm_diff"],
            ),
            Goal(
                what="the same samples in every step", read=lambda r: r["same_samples"], equals=True
            ),
            Goal(
                what="learning rates and consumed samples equal",
                read=lambda r: r["learning_rate_equal"] and r["consumed_samples_equal"],
                equals=True,
            ),
            Goal(
                what="distinct numbers of micro-batches", read=lambda r: len(r["m_values"]), least=3
            ),
        ),
    ),
    Part(
        name="train_throughput",
        title="How many samples per second are trained?",
        command=("benchmarks/train_throughput.py", "--repeats", "3", "--samples", "320"),
        full=("benchmarks/train_throughput.py", "--repeats", "5"),
        timeout_s=480.0,
        goals=(
            Goal(
                what="ODB over padded, worst case fits",
                read=lambda r: r["variants"]["odb"]["speedup_vs_standard"]["mean"],
            ),
            Goal(
                what="ODB over the sorted oracle",
                read=lambda r: r["ratios"]["odb_over_sorted"]["mean"],
            ),
            Goal(
                what="ODB over sorted, lower end of the 95 % interval",
                read=lambda r: r["ratios"]["odb_over_sorted"]["ci95"][0],
                least=0.97,
            ),
            Goal(
                what="all variants trained the same samples",
                read=lambda r: r["same_samples"],
                equals=True,
            ),
        ),
    ),
    Part(
        name="parallel_parity",
        title="Is parallelism invisible?",
        command=("benchmarks/parallel_parity.py", "--cases", "dp2,tp2_sp,pp2,cp2"),
        full=("benchmarks/parallel_parity.py",),
        timeout_s=420.0,
        goals=(
            Goal(
                what="largest difference of a step's loss",
                read=_cases("max_abs_loss_diff", max),
                most=1e-5,
            ),
            Goal(
                what="largest relative difference of a parameter's gradient",
                read=_cases("max_rel_grad_diff", max),
                most=1e-4,
            ),
            Goal(what="the same samples in every step", read=_cases("ids_equal", all), equals=True),
            Goal(
                what="most collectives per step inside a replica",
                read=_cases("collectives_per_step", max),
                most=2,
            ),
            Goal(
                what="fewest idle micro-batches of a case",
                read=_cases("idle_microbatches", min),
                least=1,
            ),
        ),
    ),
    Part(
        name="simulate_stream",
        title="How evenly and fully are 8 replicas loaded? Replicas meet once per step",
        command=(*_SIMULATE, "step/dp8/*"),
        full=(*_SIMULATE, "*"),
        timeout_s=600.0,
        full_timeout_s=14400.0,
        goals=_STREAM_GOALS,
    ),
    Part(
        name="inspect",
        title="Does odb-megatron inspect predict what training then measures?",
        command=("benchmarks/inspect_against_training.py", "--dp", "2", "--methods", "odb"),
        full=("benchmarks/inspect_against_training.py",),
        goals=(
            Goal(
                what="largest relative error of padding, micro-batches and steps",
                read=lambda r: max(
                    row["error"] for one in r["results"].values() for row in one["figures"]
                ),
                most=0.05,
            ),
        ),
    ),
    Part(
        name="planner",
        title="What does planning cost?",
        command=("benchmarks/planner.py", "--replicas", "8", "64", "1024", "--steps", "8"),
        full=("benchmarks/planner.py",),
        timeout_s=120.0,
        goals=(
            Goal(
                what="µs per sample, 8 replicas",
                read=_planner(8, "us_per_sample"),
                most=10,
            ),
            Goal(
                what="µs per sample of the block, 64 replicas",
                read=_planner(64, "us_per_sample"),
                most=10,
            ),
            Goal(
                what="1024 replicas over 64, per step",
                read=lambda r: _planner(1024, "us_per_step")(r) / _planner(64, "us_per_step")(r),
                most=1.2,
            ),
            Goal(
                what="bytes of a sample in a record", read=_planner(8, "bytes_per_sample"), most=16
            ),
        ),
    ),
    Part(
        name="control_plane",
        title="What does a gather between source ranks cost?",
        command=("benchmarks/control_plane.py", "--ranks", "4", "--rounds", "50"),
        full=("benchmarks/control_plane.py",),
        timeout_s=180.0,
        goals=(
            Goal(
                what="ms per gather, 4 source ranks on this machine",
                read=lambda r: r["rows"][-1]["gather_ms"],
            ),
            Goal(
                what="sockets of a source rank's channel, 4 ranks",
                read=lambda r: r["rows"][-1]["sockets"],
            ),
        ),
    ),
    Part(
        name="data_path",
        title="Does a trainer wait for data?",
        command=("benchmarks/data_path.py", "--repeats", "3", "--samples", "1000"),
        full=("benchmarks/data_path.py",),
        goals=(
            Goal(
                what="share of the time that the trainer waited",
                read=lambda r: r["wait_fraction"],
                most=0.01,
            ),
            Goal(what="99th percentile of next(), µs", read=lambda r: r["p99_next_us"]),
            Goal(what="longest wait of a step, µs", read=lambda r: r["worst_step_wait_us"]),
            Goal(
                what="samples per second over those of a plain DataLoader",
                read=lambda r: r["relative_to_dataloader"],
                least=0.95,
            ),
            Goal(
                what="samples per second over those of online-dynamic-batching 0.1.2",
                read=lambda r: r["relative_to_online_dynamic_batching"],
            ),
        ),
    ),
    Part(
        name="interference",
        title="What does the data side take from the trainer's thread?",
        command=("benchmarks/interference.py",),
        goals=(
            Goal(
                what="slowdown of a thread that only launches work",
                read=lambda r: r["slowdown"],
                most=0.02,
            ),
        ),
    ),
    Part(
        name="faults",
        title="What becomes of a run when something goes wrong?",
        command=("benchmarks/faults.py", "--quick"),
        full=("benchmarks/faults.py",),
        goals=(
            Goal(
                what="most seconds from the fault to the last rank's end",
                read=lambda r: max(case["seconds_to_exit"] for case in r["faults"].values()),
            ),
            Goal(
                what="every case names its cause",
                read=_all_faults("names_the_cause", wanted=True),
                equals=True,
            ),
            Goal(
                what="processes left behind",
                read=lambda r: sum(case["orphans"] for case in r["faults"].values()),
                equals=0,
            ),
            Goal(
                what="every case ended as it has to (15 s after a dead rank)",
                read=_all_faults("passed", wanted=True),
                equals=True,
            ),
        ),
    ),
    Part(
        name="fuzz",
        title="Do the planner's invariants hold in random worlds?",
        command=("-m", "odb_megatron.testing.fuzz", "--worlds", "150", "--processes", "2"),
        full=("-m", "odb_megatron.testing.fuzz", "--worlds", "10000"),
        goals=tuple(
            Goal(what=f"`{name}`", read=_count(name), equals=0)
            for name in (*("lost", "duplicated", "over_budget", "misaligned"),)
        ),
    ),
    Part(
        name="resume_fuzz",
        title="Are resumed runs the uninterrupted ones?",
        command=("-m", "odb_megatron.testing.resume_fuzz", "--trials", "40", "--processes", "2"),
        full=("-m", "odb_megatron.testing.resume_fuzz", "--trials", "1000"),
        goals=(Goal(what="`differences`", read=_count("differences"), equals=0),),
    ),
    Part(
        name="verify",
        title="Does the protocol's model hold?",
        command=("verification/run.py", "--quick"),
        full=("verification/run.py",),
        timeout_s=180.0,
        needs="spin",
        goals=(
            Goal(
                what="states searched",
                read=lambda r: sum(c["num_states"] for c in r["checks"] if not c["expected"]),
            ),
            Goal(
                what="searches and negative checks with the wrong outcome",
                read=lambda r: r["failed"],
                equals=0,
            ),
        ),
    ),
    Part(
        name="backends",
        title="Which attention backends are checked here?",
        command=("-m", "odb_megatron.testing.backends"),
        timeout_s=180.0,
        goals=(
            Goal(
                what="backends that ran, or whose contract was checked",
                read=lambda r: ", ".join(
                    name for name, one in r["backends"].items() if one["checked"] != "skipped"
                ),
            ),
            Goal(
                what="backends found wrong",
                read=lambda r: sum(not one["ok"] for one in r["backends"].values()),
                equals=0,
            ),
        ),
    ),
    Part(
        name="long_run",
        title="Does anything grow over 20 epochs?",
        command=("benchmarks/long_run.py",),
        is_full_only=True,
        goals=(Goal(what="quantities that grow", read=lambda r: len(r["grows"]), equals=0),),
    ),
)
