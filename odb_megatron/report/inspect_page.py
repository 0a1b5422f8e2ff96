"""What an inspection found, in words, pictures and a page; nothing is computed but their shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.command import aligned, rows_of
from odb_megatron.report.inspect import BASE, ODB, RIVALS, Inspection, Run
from odb_megatron.report.page import (
    Axis,
    Bar,
    Chart,
    Line,
    Panel,
    replica_axis,
    row_bar,
    row_bars,
    write_page,
)

__all__ = ["as_text", "balance_chart", "lengths_chart", "micro_batch_chart", "sections_of"]
__all__ += ["speed_chart", "tokens_chart", "write_inspection"]

Section = tuple[list[str], list[list[str]]]
"""Lines, and a table whose first row is its head."""

_METHOD = (
    ("budget", "token_budget", ""), ("speed", "speed", ".2f"),
    ("padding", "padding_fraction", ".1%"), ("fill", "fill", ".3f"),
    ("over budget", "over_budget", ""), ("balance", "balance", ".3f"), ("M", "mean_M", ".2f"),
    ("least", "min_M", ""), ("most", "max_M", ""), ("samples/step", "samples_per_step", ".1f"),
)  # fmt: skip
_TRIAL = (
    ("logits peak, GiB", "logits_peak_gib", ".2f"), ("rate", "rate", ".3f"), ("M", "mean_M", ".2f"),
    ("balance", "balance", ".3f"),
)  # fmt: skip

# --- words -----------------------------------------------------------------------------------


def sections_of(found: Inspection) -> dict[str, Section]:
    """Return what text and page have in common, by heading."""
    values = found.values
    data, lengths, overlong, advice = (
        values[name] for name in ("data", "lengths", "overlong", "advice")
    )
    setting, padding, prediction = (values[name] for name in ("setting", "padding", "prediction"))
    part = "a random sample"
    if data["num_read"] == data["num_records"]:
        part = "all"
    elif found.is_run and data["num_read"] == prediction["epoch_samples"]:
        part = "those that the run takes"
    read = f"{data['name']}: {data['num_read']} of {data['num_records']} records read ({part})"
    if data["read_s"] is not None:
        read += f" in {data['read_s']:.1f} s by {data['num_workers'] or 1} process(es)"
    bad = "bad records: none"
    if data["num_bad"]:
        bad = (
            f"bad records: {data['num_bad']} of {data['num_read']}. The first ends the run, unless "
            "--odb-max-bad-records N lets up to N be left out of their steps, as predicted here. "
            "The first of the files:"
        )
    cuts = lengths["cut_offs"]
    counts = (
        f"{overlong['num_truncated']} samples cut, {overlong['num_cut_tokens']} tokens lost, "
        f"{overlong['num_dropped']} samples left out, {overlong['num_solo']} alone over the budget"
    )
    sections: dict[str, Section] = {
        "Lengths and bad records": (
            [
                read,
                bad,
                *data["bad"],
                f"{lengths['count']} samples, {lengths['num_tokens']} tokens; mean "
                f"{lengths['mean']:.1f}, median {lengths['median']:.0f}, 95 % up to "
                f"{lengths['p95']:.0f}, longest {lengths['max']}, CV {lengths['cv']:.2f}",
                f"* is the limit in force; --overlong {overlong['policy']}: {counts}",
            ],
            [
                ["cut at", *(f"{c['at']}{'*' * (c['at'] == overlong['limit'])}" for c in cuts)],
                ["samples cut", *(f"{cut['samples']:.1%}" for cut in cuts)],
                ["tokens lost", *(f"{cut['tokens']:.1%}" for cut in cuts)],
            ],
        ),
        "Prediction": (
            [
                f"{prediction['num_samples']} samples planned at DP {setting['dp']}, token budget "
                f"{setting['token_budget']}, context {setting['seq_length']}, global batch size "
                f"{setting['global_batch_size']}",
                f"cost model: {values['setting']['cost']}",
                f"padded to the context {padding['context_padded']:.1%} of all tokens would be "
                f"padding; ODB avoids {padding['avoided']:.1%}",
                *_speed_notes(found),
            ],
            rows_of([*_METHOD, ("steps", "steps_per_epoch", "")], _methods(found), "method"),
        ),
        "Memory of the logits": ([_memory(found)], []),
    }
    if advice is not None:
        trials = [(str(one["token_budget"]), one) for one in advice["trials"]]
        sections["Advice"] = (
            [
                f"{advice['flags']}: {advice['reason']}",
                *(f"warning: {warning}" for warning in advice["warnings"]),
                f"planned on {advice['num_samples']} samples; rates are work per time, 1 is ideal",
            ],
            rows_of(_TRIAL, trials, "token budget"),
        )
    return sections


def _methods(found: Inspection) -> list[tuple[str, dict[str, Any]]]:
    """Return the figures of each method, with its speed over the fixed batch's."""
    methods = found.values["prediction"]["methods"]
    base = methods[BASE]["rate"]
    return [(name, {"speed": one["rate"] / base, **one}) for name, one in methods.items()]


def _speed_notes(found: Inspection) -> list[str]:
    """Return the speeds, and what they should not be read without."""
    prediction = found.values["prediction"]
    fair, budget = prediction["fair_speedup"], found.values["setting"]["token_budget"]
    notes = [
        f"speed is relative to {BASE} at the token budget {budget}, predicted from cost; kernels, "
        "network and reading are not in it"
    ]
    if fair["token_budget"] != budget:
        notes.append(
            f"{found.planned} has the token budget {fair['token_budget']}: over {BASE} at "
            f"{fair['fixed_token_budget']} it is {fair['value']:.2f}"
        )
    sizes = {name: one["samples_per_step"] for name, one in prediction["methods"].items()}
    others = [
        f"{name} {num:.1f}" for name, num in sizes.items() if abs(num / sizes[ODB] - 1) > 0.05
    ]
    if others:
        notes.append(
            f"samples per step differ from the {sizes[ODB]:.1f} that ODB has: {', '.join(others)}; "
            "larger steps are easier to balance"
        )
    for name, speedups in prediction["speedup"].items():
        shown = ", ".join(f"{rival} {value:.2f}" for rival, value in speedups.items())
        notes.append(f"{name} over: {shown}")
    return notes


def _memory(found: Inspection) -> str:
    logits = found.values["logits"]
    if logits is None:
        return "unknown without a tokenizer, or vocab in --model-shape"
    return (
        f"{found.values['setting']['token_budget']} tokens x {logits['vocab']} entries / TP "
        f"{logits['tensor_parallel']} / CP {logits['context_parallel']}: "
        f"{logits['logits_gib']:.2f} GiB, peak {logits['peak_gib']:.2f} GiB. {logits['note']}"
    )


def as_text(found: Inspection) -> str:
    """Return what is printed."""
    parts = []
    for heading, (lines, table) in sections_of(found).items():
        parts += ["\n".join([heading, *(f"  {line}" for line in lines)])]
        parts += [aligned(table)] if table else []
    return "\n\n".join(parts)


# --- pictures --------------------------------------------------------------------------------

_NUM_BINS, _NUM_POINTS = 32, 200
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_MAX_SHOWN = 8  # micro-batches of ours
_MAX_ROWS = 24  # fixed batches of a panel
_MIN_FILLED = 0.25  # of the axis, else the token budget is not on it
_MAX_REPLICAS = 16


def lengths_chart(found: Inspection) -> Chart:
    """Return how many samples are how long."""
    lengths = found.lengths
    edges = np.geomspace(lengths.min(), lengths.max() + 1, _NUM_BINS + 1)
    edges = np.unique(edges.round())
    counts = np.histogram(lengths, bins=edges)[0].tolist()
    names = [f"{low:.0f} to {high - 1:.0f}" for low, high in pairwise(edges)]
    bars = [
        Bar(left, 0, width, count, "blue", f"{name} tokens: {count} samples")
        for left, width, name, count in zip(edges, np.diff(edges), names, counts, strict=False)
    ]
    y = Axis(label="samples", ends=(0, None), is_whole=True, has_grid=True)
    x = _length_axis(found, "tokens of a sample")
    return Chart(
        title="How long samples are",
        panels=[Panel(bars=bars, marks=_limit(found), x=x, y=y)],
        columns=["tokens", "samples"],
        rows=[[name, str(num)] for name, num in zip(names, counts, strict=True) if num],
        narrow_height=260,
    )


def tokens_chart(found: Inspection) -> Chart:
    """Return the shares of samples and of tokens in samples up to a length."""
    lengths, x = np.sort(found.lengths), _length_axis(found, "samples up to so many tokens")
    before = np.concatenate(([0], np.cumsum(lengths)))

    def shares(at: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        num = np.searchsorted(lengths, at, side="right")
        return num / len(lengths), before[num] / before[-1]

    within = np.geomspace(lengths[0], lengths[-1], _NUM_POINTS).round()
    marks = [*x.ends, *(at for at, _ in _limit(found))]
    at = np.unique(np.concatenate((within, np.array(marks, dtype=np.float64))))
    looks = zip(shares(at), ("blue", "orange"), ("-", "--"), ("samples", "tokens"), strict=True)
    lines = [
        Line(x=at, y=100 * own, colour=colour, style=style, label=f"of {name}", is_step=True)
        for own, colour, style, name in looks
    ]
    quantiles = np.unique(np.quantile(lengths, _QUANTILES, method="inverted_cdf"))
    y = Axis(label="per cent", ends=(-1, 101), has_grid=True)
    return Chart(
        title="Where the tokens are",
        panels=[Panel(lines=lines, marks=_limit(found), x=x, y=y)],
        columns=["up to tokens", "of samples", "of tokens"],
        rows=[
            [f"{length}", f"{samples:.1%}", f"{tokens:.1%}"]
            for length, samples, tokens in zip(quantiles, *shares(quantiles), strict=True)
        ],
        narrow_height=280,
    )


def _limit(found: Inspection) -> list[tuple[float, str]]:
    """Return the mark of the limit in force, where it is among the lengths."""
    limit = found.values["overlong"]["limit"]
    is_among = found.lengths.min() < limit < found.lengths.max() + 1
    return [(limit, f"limit {limit}")] if is_among else []


def _length_axis(found: Inspection, label: str) -> Axis:
    low, high = int(found.lengths.min()), int(found.lengths.max()) + 1
    margin = max(1.2, (high / low) ** 0.05)
    return Axis(label=label, ends=(low / margin, high * margin), is_log=True, most=10)


def micro_batch_chart(found: Inspection) -> tuple[Chart, dict[str, Any]]:
    """Return the same samples in fixed batches and packed, and what the caption says of them."""
    run, fixed = found.runs[found.planned], found.fixed
    size = len(fixed.schedule.steps[0][0][0])
    step, packed = _some_micro_batches(run, most=_MAX_ROWS * size)
    positions = sorted(position for batch in packed for position in batch)
    cut = [positions[at : at + size] for at in range(0, len(positions), size)]
    before, after = (
        [run.stream.lengths[batch].tolist() for batch in side] for side in (cut, packed)
    )
    longest = max(*(max(own) * len(own) for own in before), *map(sum, after))
    budgets = [fixed.setting.token_budget, run.setting.token_budget]
    near = sorted({budget for budget in budgets if longest >= _MIN_FILLED * budget})
    num_rows = max(len(before), len(after))
    panels, rows = [], []
    for title, batches, budget in zip(
        (f"before: fixed batch of {size}", f"after: {found.planned}"),
        (before, after),
        budgets,
        strict=True,
    ):
        bars: list[Bar] = []
        for row, own in enumerate(batches):
            wide = max(own) if batches is before else 0
            parts = []
            for index, length in enumerate(own):
                tip = f"micro-batch {row + 1}, sample {index + 1}: {length} tokens"
                parts.append((length, ("blue", "green")[index % 2], tip))
                parts.append((wide - length, "waste", f"padding: {wide - length} tokens"))
            bars += row_bars(row, parts)
            computed = wide * len(own) or sum(own)
            name = f"{title.partition(':')[0]} {row + 1}"
            rows.append([name, str(len(own)), str(sum(own)), str(computed)])
        x = Axis(label="tokens computed", ends=(0, 1.04 * max([longest, *near])), most=5)
        y = replica_axis(range(1, num_rows + 1), "micro-batch", room=3)
        marks = [(budget, "")] if budget in near else []
        panels.append(Panel(title=title, bars=bars, marks=marks, x=x, y=y))
    chart = Chart(
        title="Padding before and after",
        panels=panels,
        columns=["micro-batch", "samples", "tokens", "computed"],
        rows=rows,
        narrow_height=520,
    )
    about = {"num": len(positions), "step": step + 1, "size": size, "near": near}
    return chart, {**about, "far": sorted({*budgets} - {*near})}


def _some_micro_batches(run: Run, *, most: int) -> tuple[int, list[list[int]]]:
    """Return a step, the middle one or the next with samples, and its first micro-batches.

    Args:
        run: of ours.
        most: samples wanted; only of the first micro-batch are some left out for that.
    """
    filled = np.flatnonzero(run.times.samples)
    middle = np.searchsorted(filled, len(run.schedule) // 2)
    step = int(filled[middle.clip(max=len(filled) - 1)])
    found: list[list[int]] = []
    for batch in (batch for row in run.schedule.steps[step] for batch in row if batch):
        if found and (sum(map(len, found)) + len(batch) > most or len(found) == _MAX_SHOWN):
            break
        found.append(list(batch)[:most])
    return step, found


def speed_chart(found: Inspection) -> Chart:
    """Return the predicted rate of each method over that of the fixed batch."""
    bars, methods = [], _methods(found)
    for row, (name, one) in enumerate(methods):
        look, speed = "rival" if name in RIVALS else "blue", f"{one['speed']:.2f}"
        bars.append(row_bar(row, 0, one["speed"], look, f"{name}: {speed}", speed))
    columns, *rows = rows_of(_METHOD, methods, "method")
    ends = (0, 1.15 * max(bar.width for bar in bars))
    x = Axis(label=f"times as fast as {BASE}", ends=ends, has_grid=True)
    y = replica_axis([name for name, _ in methods], "")
    return Chart(
        title="Predicted speed",
        panels=[Panel(bars=bars, dividers=[1.0], x=x, y=y)],
        columns=columns,
        rows=rows,
        height=270,
    )


def balance_chart(found: Inspection) -> Chart:
    """Return what a step of median balance costs each replica, of many those with the most."""
    names = (BASE, "dp-balanced", found.planned)
    loads = {}
    for name in names:
        times = found.runs[name].times
        order = np.argsort(times.balance_step, kind="stable")
        own = times.costs[order[len(order) // 2]].sum(axis=1)
        loads[name] = own / own.mean()
        if len(own) > _MAX_REPLICAS:
            loads[name] = np.sort(loads[name])[: -_MAX_REPLICAS - 1 : -1]
    num, most = len(loads[BASE]), max(own.max() for own in loads.values())
    label = "replica" if num == found.values["setting"]["dp"] else "replica, most first"
    panels = []
    for name, own in loads.items():
        bars: list[Bar] = []
        for row, load in enumerate(own.tolist()):
            waits = own.max() - load
            busy = (load, "blue", f"replica {row}: cost {load:.2f} of the mean")
            bars += row_bars(row, [busy, (waits, "waste", f"replica {row} waits {waits:.2f}")])
        x = Axis(label="cost, 1 = mean of replicas", ends=(0, 1.03 * most), most=5)
        panels.append(Panel(title=name, bars=bars, x=x, y=replica_axis(range(num), label)))
    return Chart(
        title="Balance over replicas",
        panels=panels,
        columns=["replica", *names],
        rows=[
            [str(row), *(f"{load:.3f}" for load in own)]
            for row, own in enumerate(zip(*loads.values(), strict=True))
        ],
        height=90 + 26 * min(num, 8),
        narrow_height=(90 + 16 * min(num, 8)) * 3,
    )


# --- the page --------------------------------------------------------------------------------


def write_inspection(path: str, found: Inspection, command: str) -> None:
    """Write the page."""
    micro_batches, about = micro_batch_chart(found)
    name = " ".join(part.rpartition("/")[2] for part in found.values["data"]["name"].split())
    write_page(
        path,
        "inspect.html.j2",
        title=f"Inspection of {name}",
        found=found,
        values=found.values,
        sections=sections_of(found),
        fixed=found.fixed.figures,
        own=found.values["prediction"]["methods"][found.planned],
        lengths_chart=lengths_chart(found),
        tokens_chart=tokens_chart(found),
        micro_batches=micro_batches,
        shown=about,
        speed_chart=speed_chart(found),
        balance_chart=balance_chart(found) if found.values["setting"]["dp"] > 1 else None,
        notes=[command],
    )
