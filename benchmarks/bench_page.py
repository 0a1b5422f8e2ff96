"""The page of `make bench`: each goal beside the measured value, and what was run.

Shows what the report has and nothing else: no figure is computed here but counts and ratios to a
goal. Must not run a benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_megatron.pages import Chart, Form, Page, Section, Table, Tile, theme, write_page

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

__all__ = ["bench_page", "shown", "write_bench_page"]

_MET = {True: "met", False: "missed", None: "-"}
_SPREADS = ("0.29", "0.48", "1.0", "2.0")
_VARIANTS = {
    "standard": "padded, worst case fits",
    "standard_mean": "padded, by mean length",
    "sorted": "padded, sorted oracle",
    "odb": "ODB",
}
_POLICIES = ("odb", "odb-reference", "dp-balanced", "ffd", "sorted-bucketed")


def write_bench_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page.

    Raises:
        ValueError: matplotlib or jinja2 is missing; it says what to install.
    """
    write_page(path, bench_page(report))


def bench_page(report: Mapping[str, Any]) -> Page:
    """Return the page of a report of `bench.py`."""
    parts: Sequence[Mapping[str, Any]] = list(report["parts"].values())
    judged = [goal["is_met"] for part in parts for goal in part["goals"]]
    failed = [part for part in parts if part.get("exit_code", 0) != 0]
    not_run = [part for part in parts if "exit_code" not in part]
    ran = [part for part in parts if "exit_code" in part]
    machine = report["machine"]
    return Page(
        title="Benchmarks: goals and measured values",
        summary=(
            "Every value was measured by the command named with it, on the machine described "
            "below. A goal without a value is not met."
        ),
        tiles=[
            Tile(
                label="goals met",
                value=f"{judged.count(True)} of {len(judged) - judged.count(None)}",
            ),
            Tile(label="commands failed", value=str(len(failed)), note=f"of {len(ran)} that ran"),
            Tile(label="not run", value=str(len(not_run)), note="reasons are in the last table"),
            Tile(
                label="time of all commands",
                value=f"{sum(part['seconds'] for part in ran) / 60:.1f} min",
            ),
        ],
        sections=[
            *_goal_sections(parts),
            *_charts(report["parts"]),
            *_failures(failed),
            _commands(parts),
            _machine(machine),
        ],
        notes=[f"commit {report['commit']}; make bench"],
    )


def shown(value: Any) -> str:
    """A measured value as text: four significant digits, yes and no, a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _goal_sections(parts: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    for part in parts:
        if "exit_code" not in part:
            continue
        rows = [
            [
                goal["what"].replace("`", ""),
                goal["goal"] or "-",
                shown(goal["measured"]),
                _MET[goal["is_met"]],
            ]
            for goal in part["goals"]
        ]
        size = "full size" if part["is_full"] else "short form"
        yield Section(
            title=part["title"],
            paragraphs=[f"{part['status']} in {part['seconds']:.0f} s ({size})."],
            table=Table(columns=["measured", "goal", "value", "met"], rows=rows),
            code=part["command"],
        )


def _charts(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[Chart]:
    stream = (parts.get("simulate_stream") or {}).get("result")
    if stream and stream["rows"]:
        yield _stream_chart(stream)
    speed = (parts.get("train_throughput") or {}).get("result")
    if speed and "variants" in speed:
        yield _speed_chart(speed)


def _stream_chart(result: Mapping[str, Any]) -> Chart:
    rows = {
        row["name"].rpartition("cv")[2]: row
        for row in result["rows"]
        if "step/dp8/share1" in row["name"]
    }
    spreads = [spread for spread in _SPREADS if spread in rows]
    values = {
        policy: [
            rows[spread]["policies"][policy]["steady"]["fraction_of_bound"] for spread in spreads
        ]
        for policy in _POLICIES
        if all(policy in rows[spread]["policies"] for spread in spreads)
    }

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        for number, (policy, line) in enumerate(values.items()):
            axes.plot(
                range(len(spreads)),
                line,
                color=theme.SERIES[number % len(theme.SERIES)],
                marker=theme.MARKERS[number % len(theme.MARKERS)],
                linestyle="-" if number < len(theme.SERIES) else "--",
                label=policy,
            )
        axes.set_xticks(range(len(spreads)), spreads)
        axes.set_xlabel("coefficient of variation of the lengths")
        axes.set_ylabel("fraction of the bound")
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=2 if form.is_narrow else 4)

    cells = [[policy, *(f"{value:.4f}" for value in line)] for policy, line in values.items()]
    return Chart(
        title="Simulated: how much of the best possible speed is reached",
        draw=draw,
        caption=(
            "8 replicas, window 1024, lognormal lengths of mean 500, token budget 8192, a fixed "
            "price of 5 % per micro-batch; the steady part of three epochs. 1 is no schedule's: "
            "all cost shared evenly, no padding."
        ),
        table=Table(columns=["policy", *(f"CV {spread}" for spread in spreads)], rows=cells),
        height=340,
        narrow_height=420,
    )


def _speed_chart(result: Mapping[str, Any]) -> Chart:
    variants = {name: result["variants"][name] for name in _VARIANTS if name in result["variants"]}
    names = [_VARIANTS[name] for name in variants]
    rates = [variant["samples_per_s"] for variant in variants.values()]
    is_ours = [name.startswith("odb") for name in variants]

    def draw(figure: FigureBase, form: Form) -> None:
        axes = figure.subplots()
        places = range(len(names))
        bars = axes.barh(
            places,
            rates,
            color=[theme.BLUE if own else theme.GREY for own in is_ours],
            hatch=["" if own else "///" for own in is_ours],
        )
        axes.bar_label(bars, [f"{rate:.1f}" for rate in rates], padding=4)
        axes.set_yticks(places, [_wrapped(name) if form.is_narrow else name for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("samples per second")

    cells = [
        [name, f"{rate:.1f}", _speedup(variant), f"{variant['padding_fraction']:.1%}"]
        for name, rate, variant in zip(names, rates, variants.values(), strict=True)
    ]
    return Chart(
        title="Trained samples per second, real runs on this CPU",
        draw=draw,
        caption=(
            "The same samples, model and global batch size; chat data, two replicas. Padded by "
            "mean length overruns the token budget. What a CPU computes faster or slower than a "
            "GPU shifts these ratios."
        ),
        table=Table(
            columns=["batches", "samples/s", "over padded, worst case fits (95 %)", "padding"],
            rows=cells,
        ),
        height=280,
        narrow_height=320,
    )


def _speedup(variant: Mapping[str, Any]) -> str:
    ratio = variant["speedup_vs_standard"]
    if ratio["mean"] is None:
        return "-"
    low, high = ratio["ci95"]
    return f"{ratio['mean']:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _wrapped(name: str) -> str:
    return name.replace(", ", ",\n")


def _failures(failed: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    for part in failed:
        yield Section(
            title=f"{part['name']}: {part['status']}",
            paragraphs=["Its last lines:"],
            code="\n".join(part["output"]),
        )


def _commands(parts: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        [
            part["name"],
            part["status"],
            f"{part['seconds']:.0f} s" if "seconds" in part else "-",
            str(part.get("load_before", "-")),
            part.get("commit", "-"),
            part.get("date", "-"),
        ]
        for part in parts
    ]
    return Section(
        title="What was run",
        paragraphs=["A load above the number of cores makes every time on this page longer."],
        table=Table(
            columns=["part", "outcome", "time", "load before", "commit", "when"], rows=rows
        ),
    )


def _machine(machine: Mapping[str, Any]) -> Section:
    rows = [
        ["processor", machine["processor"]],
        ["cores", str(machine["cores"])],
        ["memory", f"{machine['memory_bytes'] / 2**30:.0f} GiB"],
        ["system", machine["system"]],
        *([name, version] for name, version in machine["versions"].items()),
    ]
    return Section(title="The machine", table=Table(columns=["what", "value"], rows=rows))
