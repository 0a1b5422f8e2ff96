"""The pictures of docs/concepts.md: real steps of the planner, drawn into docs/pictures.

    python tools/draw_concepts.py            # writes them
    python tools/draw_concepts.py --check    # compares them; exit code 1 if one differs

Nothing in them is made up but the lengths, and nothing is random: the same versions of the
packages draw the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from odb_megatron.plan.step_planner import StepPlan, plan_step
from odb_megatron.report.lengths import read_lengths
from odb_megatron.report.page import Axis, Bar, Chart, Panel, row_bar, standalone_svg
from odb_megatron.report.schedules import Setting, Stream, odb, shares_model

__all__ = ["FOLDER", "charts", "drawn", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
CONTEXT, BUDGET = 4096, 8192
LENGTHS = f"lognormal:mean=500,cv=1.0,max={CONTEXT},n=8192"
NUM_REPLICAS, BATCH = 4, 128
FIRST_STEP, NUM_STEPS = 20, 3

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
        f"{name}-{width}.svg": standalone_svg(chart, is_narrow=width == "narrow")
        for name, chart in charts().items()
        for width in ("wide", "narrow")
    }


def charts() -> dict[str, Chart]:
    """Plan, and return the pictures by name."""
    lengths = read_lengths(LENGTHS)
    cost = shares_model(lengths, token_budget=BUDGET)
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=0)
    setting = Setting(
        num_replicas=NUM_REPLICAS, token_budget=BUDGET, global_batch_size=BATCH, cost=cost
    )
    steps = range(FIRST_STEP, FIRST_STEP + NUM_STEPS)
    planned: dict[str, list[Step]] = {
        "each trains what it has read": [_as_read(stream, setting, step) for step in steps],
        "planned together": [odb(stream, setting).steps[step] for step in steps],
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

    panels = [
        Panel(
            title=f"{name}: {len(rows)} micro-batches",
            bars=list(_row_bars(rows, stream, is_padded=name == "padded")),
            dividers=[BUDGET],
            x=Axis(
                label="tokens; a token budget of 8192 ends at the line",
                ends=(0, BUDGET * 1.01),
                ticks={at: str(at) for at in (0, BUDGET // 4, BUDGET // 2, BUDGET)},
                narrow_ticks={0: "0", BUDGET: str(BUDGET)},
            ),
            y=Axis(ends=(len(rows) - 0.4, -0.6), ticks={}),
        )
        for name, rows in (("padded", padded), ("packed", packed))
    ]
    return Chart(
        title=f"{len(samples)} samples of one replica's step, padded and packed",
        panels=panels,
        caption=(
            f"Each row is a micro-batch, each block a sample, hatched is padding: {computed} "
            f"tokens computed, against {real}."
        ),
        height=460,
        is_stacked=True,
    )


def _row_bars(rows: MicroBatches, stream: Stream, *, is_padded: bool) -> Iterator[Bar]:
    for number, row in enumerate(rows):
        longest, at = int(stream.lengths[list(row)].max()), 0
        for position in row:
            length = int(stream.lengths[position])
            yield row_bar(number, at, length, "blue", f"{length} tokens")
            at += length
            if is_padded and longest > length:
                yield row_bar(number, at, longest - length, "waste", "padding")
                at += longest - length


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

    panels = []
    for name, steps in times.items():
        bars, ends = _timeline(steps)
        replicas = {float(replica): str(replica) for replica in range(NUM_REPLICAS)}
        panels.append(
            Panel(
                title=f"{name}: {_busy(steps):.1%} of the time computing",
                bars=bars,
                dividers=ends,
                x=Axis(label="predicted time, in full micro-batches", ends=(0, end * 1.01)),
                y=Axis(label="replica", ends=(NUM_REPLICAS - 0.5, -0.6), ticks=replicas),
            )
        )
    return Chart(
        title=f"{NUM_STEPS} steps of {NUM_REPLICAS} replicas, not planned and planned together",
        panels=panels,
        caption="Each block is a micro-batch, hatched is waiting for the slowest replica.",
        height=400,
        is_stacked=True,
    )


def _busy(steps: Sequence[Sequence[Sequence[float]]]) -> float:
    work = sum(sum(map(sum, step)) for step in steps)
    return work / sum(len(step) * max(map(sum, step)) for step in steps)


def _timeline(steps: Sequence[Sequence[Sequence[float]]]) -> tuple[list[Bar], list[float]]:
    """Return the bars, and where each step ends."""
    bars, ends, start = [], [], 0.0
    for number, step in enumerate(steps):
        longest = max(map(sum, step))
        for replica, parts in enumerate(step):
            at = start
            for part in parts:
                look = ("blue", "orange")[number % 2]
                bars.append(row_bar(replica, at, part, look, f"step {number + 1}"))
                at += part
            if start + longest - at > 1e-9:
                bars.append(row_bar(replica, at, start + longest - at, "waste", "waits"))
        start += longest
        ends.append(start)
    return bars, ends


if __name__ == "__main__":
    sys.exit(main())
