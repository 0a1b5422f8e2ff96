"""The pictures of docs/concepts.md: real steps of the planner, drawn into docs/pictures.

    python tools/draw_concepts.py            # writes them
    python tools/draw_concepts.py --check    # compares them; exit code 1 if one differs

Nothing in them is made up but the lengths, and nothing is random: the same versions of the packages
draw the same files. Must not import torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from odb_megatron.pages import Chart, Form, Table, standalone_svg, theme
from odb_megatron.plan.step_planner import StepPlan, plan_step
from odb_megatron.simulation.lengths import read_lengths
from odb_megatron.simulation.schedules import Setting, Stream, odb, shares_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

__all__ = ["FOLDER", "charts", "drawn", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
CONTEXT, BUDGET = 4096, 8192
LENGTHS = f"lognormal:mean=500,cv=1.0,max={CONTEXT},n=8192"
NUM_REPLICAS, BATCH = 4, 128
FIRST_STEP, NUM_STEPS = 20, 3

EDGE: dict[str, Any] = {"edgecolor": theme.SURFACE, "linewidth": 1.2}
FREE: dict[str, Any] = {
    "color": theme.FAINT,
    "hatch": "////",
    "edgecolor": theme.GREY,
    "linewidth": 0.5,
}

MicroBatches = Sequence[Sequence[int]]
Step = Sequence[MicroBatches]


def main() -> int:
    """Write the pictures, or compare them; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    differing = []
    for name, svg in drawn().items():
        path = FOLDER / name
        if not options.check:
            path.write_text(svg, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != svg:
            differing.append(name)
    if differing:
        print(f"not what is drawn now: {', '.join(differing)}: run tools/draw_concepts.py")
    return 1 if differing else 0


def drawn() -> dict[str, str]:
    """Return every picture by its file's name."""
    return {
        f"{name}-{form.name.lower()}.svg": standalone_svg(chart, form)
        for name, chart in charts().items()
        for form in Form
    }


def charts() -> dict[str, Chart]:
    """Plan, and return the pictures by name."""
    lengths = read_lengths(LENGTHS, token_budget=BUDGET).values
    cost = shares_model(lengths, token_budget=BUDGET)
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=0)
    setting = Setting(
        num_replicas=NUM_REPLICAS, token_budget=BUDGET, global_batch_size=BATCH, cost=cost
    )
    steps = range(FIRST_STEP, FIRST_STEP + NUM_STEPS)
    planned = {
        "each trains what it has read": [_as_read(stream, setting, step) for step in steps],
        "planned together": [odb(stream, setting).step(step) for step in steps],
    }
    return {
        "packed": _packed_chart(planned["planned together"][0][0], stream),
        "replicas": _replicas_chart(planned, stream, setting),
    }


def _as_read(stream: Stream, setting: Setting, step: int) -> Step:
    """Return a step in which no sample moves: every replica plans its own, for the largest M."""
    shares = [
        range(step * BATCH + at, (step + 1) * BATCH, NUM_REPLICAS) for at in range(NUM_REPLICAS)
    ]

    def plan(share: Sequence[int], least: int) -> StepPlan:
        return plan_step(
            stream.lengths[share],
            num_replicas=1,
            token_budget=BUDGET,
            cost=setting.cost,
            min_micro_batches=least,
        )

    count = max(plan(share, 1).num_micro_batches for share in shares)
    return [
        [[share[at] for at in row] for row in plan(share, count).micro_batches[0]]
        for share in shares
    ]


def _packed_chart(packed: MicroBatches, stream: Stream) -> Chart:
    """One replica's share of a step, padded and packed."""
    samples = sorted(position for row in packed for position in row)
    size = BUDGET // CONTEXT
    padded = [samples[at : at + size] for at in range(0, len(samples), size)]
    computed = sum(len(row) * int(stream.lengths[row].max()) for row in padded)
    real = int(stream.lengths[samples].sum())

    def draw(figure: FigureBase, form: Form) -> None:
        ratios = [len(padded), len(packed)]
        upper, lower = figure.subplots(2, sharex=True, height_ratios=ratios)
        _rows(upper, padded, stream, is_padded=True)
        _rows(lower, packed, stream, is_padded=False)
        upper.set_title(f"padded: {len(padded)} micro-batches", loc="left")
        lower.set_title(f"packed: {len(packed)} micro-batches", loc="left")
        ticks = [0, BUDGET] if form.is_narrow else [0, BUDGET // 4, BUDGET // 2, BUDGET]
        lower.set_xticks(ticks, [f"{tick}" for tick in ticks])
        lower.set_xlabel("tokens; a token budget of 8192 ends at the line")

    return Chart(
        title=f"{len(samples)} samples of one replica's step, padded and packed",
        draw=draw,
        caption=(
            f"Each row is a micro-batch, each block a sample, hatched is padding: {computed} "
            f"tokens computed, against {real}."
        ),
        table=Table(
            columns=["form", "micro-batches", "tokens computed", "tokens of samples"],
            rows=[
                ["padded", str(len(padded)), str(computed), str(real)],
                ["packed", str(len(packed)), str(real), str(real)],
            ],
        ),
        height=460,
        narrow_height=460,
    )


def _rows(axes: Axes, rows: MicroBatches, stream: Stream, *, is_padded: bool) -> None:
    for number, row in enumerate(rows):
        longest = int(stream.lengths[list(row)].max())
        at = 0
        for position in row:
            length = int(stream.lengths[position])
            axes.barh(number, length, left=at, height=0.8, color=theme.BLUE, **EDGE)
            at += length
            if is_padded and longest > length:
                axes.barh(number, longest - length, left=at, height=0.8, **FREE)
                at += longest - length
    axes.axvline(BUDGET, color=theme.TEXT, linewidth=1.5)
    axes.set_xlim(0, BUDGET * 1.01)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _replicas_chart(
    planned: Mapping[str, Sequence[Step]], stream: Stream, setting: Setting
) -> Chart:
    """When each replica computes, and when it waits for the others, step by step."""
    full = BUDGET / int(stream.lengths.sum()) * float(stream.costs.sum()) + setting.cost.fixed
    times = {
        name: [
            [
                [(float(stream.costs[list(row)].sum()) + setting.cost.fixed) / full for row in rows]
                for rows in step
            ]
            for step in steps
        ]
        for name, steps in planned.items()
    }
    end = max(sum(max(map(sum, step)) for step in steps) for steps in times.values())

    def draw(figure: FigureBase, form: Form) -> None:
        panels = figure.subplots(len(times), sharex=True)
        for axes, (name, steps) in zip(panels, times.items(), strict=True):
            _timeline(axes, steps)
            axes.set_xlim(0, end * 1.01)
            share = _busy(steps)
            axes.set_title(f"{name}: {share:.1%} of the time computing", loc="left")
            axes.set_ylabel("replica")
        panels[-1].set_xlabel(
            "predicted time, in full micro-batches"
            if form.is_narrow
            else "predicted time; 1 is a full micro-batch of average tokens"
        )

    rows = [
        [
            name,
            f"{_busy(steps):.3f}",
            ", ".join(str(len(step[0])) for step in steps),
            ", ".join(f"{max(map(sum, step)):.2f}" for step in steps),
        ]
        for name, steps in times.items()
    ]
    return Chart(
        title=f"{NUM_STEPS} steps of {NUM_REPLICAS} replicas, not planned and planned together",
        draw=draw,
        caption="Each block is a micro-batch, hatched is waiting for the slowest replica.",
        table=Table(columns=["plan", "share of time computing", "M", "time of steps"], rows=rows),
        height=400,
        narrow_height=400,
    )


def _busy(steps: Sequence[Sequence[Sequence[float]]]) -> float:
    work = sum(sum(map(sum, step)) for step in steps)
    return work / sum(len(step) * max(map(sum, step)) for step in steps)


def _timeline(axes: Axes, steps: Sequence[Sequence[Sequence[float]]]) -> None:
    start = 0.0
    for number, step in enumerate(steps):
        longest = max(map(sum, step))
        colour = (theme.BLUE, theme.ORANGE)[number % 2]
        for replica, parts in enumerate(step):
            at = start
            for part in parts:
                axes.barh(replica, part, left=at, height=0.75, color=colour, **EDGE)
                at += part
            wait = start + longest - at
            if wait > 1e-9:
                axes.barh(replica, wait, left=at, height=0.75, **FREE)
        start += longest
        axes.axvline(start, color=theme.TEXT, linewidth=1.5)
    axes.set_yticks(range(len(steps[0])))
    axes.set_ylim(len(steps[0]) - 0.5, -0.6)


if __name__ == "__main__":
    sys.exit(main())
