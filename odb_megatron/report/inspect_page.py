"""What an inspection found, in words, pictures and a page; nothing is computed but their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.report.inspect import BASE, ODB, RIVALS, Inspection, Run
from odb_megatron.report.page import Axis, Bar, Chart, Line, Panel, row_bar, write_page
from odb_megatron.report.simulate import aligned

__all__ = ["as_text", "balance_chart", "lengths_chart", "micro_batch_chart", "prediction_rows"]
__all__ += ["speed_chart", "speed_notes", "tokens_chart", "words_of", "write_inspection"]

Integers = npt.NDArray[np.int64]

# --- words -----------------------------------------------------------------------------------


def prediction_rows(found: Inspection) -> list[list[str]]:
    """Return the head and a row per method."""
    methods = found.values["prediction"]["methods"]
    steps = "steps" if found.is_run else "steps/epoch"
    head = ["method", "budget", "speed", "padding", "fill", "balance", "M", "M range"]
    rows = [[*head, "samples/step", steps]]
    for name, one in methods.items():
        over = f" ({one['over_budget']} over)" if one["over_budget"] else ""
        rows.append(
            [
                name,
                str(one["token_budget"]),
                f"{one['rate'] / methods[BASE]['rate']:.2f}",
                f"{one['padding_fraction']:.1%}",
                f"{one['fill']:.3f}{over}",
                f"{one['balance']:.3f}",
                f"{one['mean_M']:.2f}",
                f"{one['min_M']}-{one['max_M']}",
                f"{one['samples_per_step']:.1f}",
                str(one["steps_per_epoch"]),
            ]
        )
    return rows


def words_of(found: Inspection) -> dict[str, Any]:
    """Return the lines and rows that text and page have in common."""
    values = found.values
    data, lengths, overlong = values["data"], values["lengths"], values["overlong"]
    setting, prediction = values["setting"], values["prediction"]
    part = "a random sample"
    if data["num_read"] == data["num_records"]:
        part = "all"
    elif found.is_run and data["num_read"] == prediction["epoch_samples"]:
        part = "those that the run takes"
    read = f"{data['name']}: {data['num_read']} of {data['num_records']} records read ({part})"
    if data["read_s"] is not None:
        how = f"{data['num_workers']} processes" if data["num_workers"] else "one process"
        read += f" in {data['read_s']:.1f} s by {how}"
    if prediction["num_samples"] < data["num_read"]:
        read += f"; the first {prediction['num_samples']} are planned"
    bad = "bad records: none"
    if data["num_bad"]:
        bad = (
            f"bad records: {data['num_bad']} of {data['num_read']} "
            f"({data['num_bad'] / data['num_read']:.2%}). The first ends the run, unless "
            "--odb-max-bad-records N lets up to N be left out of their steps, as predicted here. "
            "Mend them, or pass it. The first of the files:"
        )
    what = "no sample is longer"
    if overlong["num_truncated"]:
        what = f"{overlong['num_truncated']} samples lose {overlong['num_cut_tokens']} tokens"
    elif overlong["num_dropped"]:
        what = f"{overlong['num_dropped']} samples are left out"
    elif overlong["num_solo"]:
        what = f"{overlong['num_solo']} samples run alone, over the budget"
    limit, logits, advice = overlong["limit"], values["logits"], values["advice"]
    cuts = lengths["cut_offs"]
    memory = "unknown without a tokenizer, or vocab in --model-shape"
    if logits is not None:
        cp = f" / CP {logits['context_parallel']}" if logits["context_parallel"] > 1 else ""
        memory = (
            f"{setting['token_budget']} tokens x {logits['vocab']} entries / TP "
            f"{logits['tensor_parallel']}{cp}: {logits['logits_gib']:.2f} GiB, peak "
            f"{logits['peak_gib']:.2f} GiB"
        )
        budget = prediction["fair_speedup"]["token_budget"]
        if advice is not None and budget != setting["token_budget"]:
            (own,) = (one for one in advice["trials"] if one["token_budget"] == budget)
            memory += f"; at the advised budget {budget}, peak {own['logits_peak_gib']:.2f} GiB"
        memory += f". {logits['note']}"
    return {
        "read": read,
        "bad": bad,
        "setting": f"DP {setting['dp']}, token budget {setting['token_budget']}, context "
        f"{setting['seq_length']}, global batch size {setting['global_batch_size']}",
        "lengths": [
            ["samples", "tokens", "mean", "median", "p95", "max", "CV"],
            [
                str(lengths["count"]),
                str(lengths["num_tokens"]),
                f"{lengths['mean']:.1f}",
                *(f"{lengths[name]:.0f}" for name in ("median", "p95", "max")),
                f"{lengths['cv']:.2f}",
            ],
        ],
        "cuts": [
            ["cut at", *(f"{cut['at']}{'*' * (cut['at'] == limit)}" for cut in cuts)],
            ["samples cut", *(f"{cut['samples']:.1%}" for cut in cuts)],
            ["tokens lost", *(f"{cut['tokens']:.1%}" for cut in cuts)],
        ],
        "overlong": f"the limit in force, {limit}; --overlong {overlong['policy']}: {what}",
        "prediction": prediction_rows(found),
        "speed": speed_notes(found),
        "memory": memory,
    }


def speed_notes(found: Inspection) -> list[str]:
    """Return what the predicted speeds should not be read without."""
    prediction = found.values["prediction"]
    fair, budget = prediction["fair_speedup"], found.values["setting"]["token_budget"]
    notes = [
        f"speed is relative to {BASE} at the token budget {budget}, predicted from cost, kernels "
        "not measured"
    ]
    own = fair["token_budget"]
    if own > budget:
        notes.append(
            f"{found.planned} has the token budget {own}: over {BASE} at {own} too it is "
            f"{fair['value']:.2f}"
        )
    elif own < budget:
        notes.append(f"{found.planned} has the smaller token budget {own}")
    sizes = {name: one["samples_per_step"] for name, one in prediction["methods"].items()}
    others = {name: num for name, num in sizes.items() if abs(num / sizes[ODB] - 1) > 0.05}
    if others:
        shown = ", ".join(f"{name} {num:.1f}" for name, num in others.items())
        notes.append(
            f"samples per step differ from the {sizes[ODB]:.1f} that ODB has: {shown}; larger "
            "steps are easier to balance"
        )
    return notes


def as_text(found: Inspection) -> str:
    """Return what is printed."""
    words, values = words_of(found), found.values
    padding, advice = values["padding"], values["advice"]
    lines = [words["read"], words["bad"], *(f"  {message}" for message in values["data"]["bad"])]
    lines += ["", aligned(words["lengths"], names=0), "", aligned(words["cuts"], names=1)]
    lines += [
        f"* {words['overlong']}",
        "",
        f"prediction: {words['setting']}",
        f"cost model: {values['setting']['cost']}",
        f"padded to the context {padding['context_padded']:.1%} of all tokens would be padding; "
        f"ODB avoids {padding['avoided']:.1%}",
        "",
        aligned(words["prediction"], names=1),
        "",
        *words["speed"],
    ]
    for name, speedups in values["prediction"]["speedup"].items():
        shown = ", ".join(f"{rival} {value:.2f}" for rival, value in speedups.items())
        lines.append(f"{name} over: {shown}")
    lines += ["", f"logits memory: {words['memory']}"]
    if advice is not None:
        lines += ["", f"advice (planned on {advice['num_samples']} samples):"]
        lines.append(f"  {advice['flags']}  {advice['reason']}")
        lines += [f"  warning: {warning}" for warning in advice["warnings"]]
    return "\n".join(lines)


# --- pictures --------------------------------------------------------------------------------

_NUM_BINS = 32
_NUM_POINTS = 200  # of each line
_MAX_SHOWN = 8  # micro-batches of ours
_MAX_ROWS = 24  # fixed batches of a panel
_MIN_FILLED = 0.25  # of the axis, else the token budget is not on it
_MAX_REPLICAS = 16


def lengths_chart(found: Inspection) -> Chart:
    """Return how many samples are how long."""
    lengths = found.lengths
    low, high = int(lengths.min()), int(lengths.max()) + 1
    edges = np.unique(np.round(np.geomspace(low, high, _NUM_BINS + 1)))
    if high - low == 1:
        edges = np.array([low, high])
    counts = np.histogram(lengths, bins=edges)[0].tolist()
    names = [f"{low:.0f} to {high - 1:.0f}" for low, high in pairwise(edges)]
    bars = [
        Bar(
            edges[at],
            0,
            edges[at + 1] - edges[at],
            count,
            "blue",
            f"{name} tokens: {count} samples",
        )
        for at, (name, count) in enumerate(zip(names, counts, strict=True))
    ]
    return Chart(
        title="How long samples are",
        panels=[
            Panel(
                bars=bars,
                marks=_limit(found),
                x=_length_axis(lengths, "tokens of a sample"),
                y=Axis(label="samples", ends=(0, None), is_whole=True, has_grid=True),
            )
        ],
        columns=["tokens", "samples"],
        rows=[[name, str(num)] for name, num in zip(names, counts, strict=True) if num],
        narrow_height=260,
    )


def tokens_chart(found: Inspection) -> Chart:
    """Return the shares of samples and of tokens in samples up to a length."""
    lengths = np.sort(found.lengths)
    before = np.concatenate(([0], np.cumsum(lengths)))

    def shares(at: Sequence[int]) -> tuple[list[float], list[float]]:
        num = np.searchsorted(lengths, at, side="right")
        return (num / len(lengths)).tolist(), (before[num] / before[-1]).tolist()

    every: list[int] = np.unique(lengths).tolist()
    limit = found.values["overlong"]["limit"]
    if len(every) > _NUM_POINTS:  # so many that it rises a little between them
        by_samples = np.linspace(0, len(lengths) - 1, _NUM_POINTS).astype(np.int64)
        wanted = np.linspace(0, int(before[-1]), _NUM_POINTS)
        by_tokens = np.searchsorted(before[1:], wanted).clip(max=len(lengths) - 1)
        drawn = {*lengths[by_samples].tolist(), *lengths[by_tokens].tolist(), limit}
        drawn |= {*_powers(every[0], every[-1])}
        every = sorted(at for at in drawn if every[0] <= at <= every[-1])
    left, right = _span(lengths)
    lines = [
        Line(
            x=[left, *every, right],
            y=[0, *(100 * share for share in own), 100],
            colour=colour,
            style=style,
            label=name,
            is_step=True,
        )
        for own, colour, style, name in zip(
            shares(every), ("blue", "orange"), ("-", "--"), ("of samples", "of tokens"), strict=True
        )
    ]
    quantiles = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    places = [max(0, math.ceil(share * len(lengths)) - 1) for share in quantiles]
    shown: list[int] = np.unique(lengths[places]).tolist()
    return Chart(
        title="Where the tokens are",
        panels=[
            Panel(
                lines=lines,
                marks=_limit(found),
                x=_length_axis(lengths, "samples up to so many tokens"),
                y=Axis(label="per cent", ends=(-1, 101), has_grid=True),
            )
        ],
        columns=["up to tokens", "of samples", "of tokens"],
        rows=[
            [str(length), f"{samples:.1%}", f"{tokens:.1%}"]
            for length, samples, tokens in zip(shown, *shares(shown), strict=True)
        ],
        narrow_height=280,
    )


def _limit(found: Inspection) -> list[tuple[float, str]]:
    """Return the mark of the limit in force, where it is among the lengths."""
    limit = found.values["overlong"]["limit"]
    is_among = found.lengths.min() < limit < found.lengths.max() + 1
    return [(limit, f"limit {limit}")] if is_among else []


def _length_axis(lengths: Integers, label: str) -> Axis:
    wide, narrow = (
        {float(at): f"{at // 1024}k" if at % 1024 == 0 else str(at) for at in ticks(lengths, most)}
        for most in (10, 5)
    )
    return Axis(label=label, ends=_span(lengths), ticks=wide, narrow_ticks=narrow, is_log=True)


def _span(lengths: Integers) -> tuple[float, float]:
    """Return the ends of the axis: beyond the data, and never so near that one bar fills it."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    margin = 2 if high - low == 1 else max(1.04, (high / low) ** 0.05)
    return low / margin, high * margin


def ticks(lengths: Integers, most: int) -> list[int]:
    """Return where the axis is labelled: at powers of two, or at lengths where they are too few."""
    low, high = int(lengths.min()), int(lengths.max())
    found = _powers(low, high)
    if len(found) < 3:
        left, right = _span(lengths)
        nearest = (right / left) ** max(0.09, 0.8 / most)  # shares of the axis
        found = [low]
        for tick in np.geomspace(low, high, 4).round().astype(int).tolist():
            if tick >= found[-1] * nearest:
                found.append(tick)
    return found[:: -(-len(found) // most)]


def _powers(low: int, high: int) -> list[int]:
    return [1 << bits for bits in range(41) if low <= 1 << bits <= high]


def micro_batch_chart(found: Inspection) -> tuple[Chart, dict[str, Any]]:
    """Return the same samples in fixed batches and packed, and what the caption says of them."""
    run, fixed = found.runs[found.planned], found.fixed
    size = int(fixed.schedule.sizes.max())
    step, packed = _some_micro_batches(run, most=_MAX_ROWS * size)
    positions = sorted(position for batch in packed for position in batch)
    cut = [positions[at : at + size] for at in range(0, len(positions), size)]
    lengths = run.stream.lengths
    before, after = ([lengths[batch].tolist() for batch in side] for side in (cut, packed))
    sides = {f"before: fixed batch of {size}": before, f"after: {found.planned}": after}
    computed = [[max(own) * len(own) for own in before], list(map(sum, after))]
    budgets = [fixed.setting.token_budget, run.setting.token_budget]
    longest = max(map(max, computed))
    near = [budget for budget in budgets if longest >= _MIN_FILLED * budget]
    num_rows = max(map(len, sides.values()))
    panels, rows = [], []
    for (title, batches), nums, budget in zip(sides.items(), computed, budgets, strict=True):
        side = title.partition(":")[0]
        bars: list[Bar] = []
        for row, (own, num) in enumerate(zip(batches, nums, strict=True)):
            bars += _sample_bars(row, own, is_padded=num > sum(own))
            rows.append([f"{side} {row + 1}", str(len(own)), str(sum(own)), str(num)])
        panels.append(
            Panel(
                title=title,
                bars=bars,
                marks=[(budget, "")] if budget in near else [],
                x=Axis(label="tokens computed", ends=(0, 1.04 * max([longest, *near])), most=5),
                y=Axis(
                    label="micro-batch",
                    ends=(max(num_rows, 3) - 0.4, -0.6),
                    ticks={row: str(row + 1) for row in range(0, num_rows, -(-num_rows // 8))},
                ),
            )
        )
    chart = Chart(
        title="Padding before and after",
        panels=panels,
        columns=["micro-batch", "samples", "tokens", "computed"],
        rows=rows,
        narrow_height=520,
    )
    far = sorted({*budgets} - {*near})
    about = {"num": len(positions), "step": step + 1, "size": size, "near": sorted({*near})}
    return chart, {**about, "far": far}


def _some_micro_batches(run: Run, *, most: int) -> tuple[int, list[list[int]]]:
    """Return a step, the middle one or the next with samples, and its first micro-batches.

    Args:
        run: of ours.
        most: samples wanted; only of the first micro-batch are some left out for that.

    Returns:
        The step, and the stream positions of each micro-batch, those without a sample left out.
    """
    schedule = run.schedule
    filled = np.flatnonzero(schedule.step_samples)
    step = int(filled[np.searchsorted(filled, len(schedule) // 2).clip(max=len(filled) - 1)])
    found: list[list[int]] = []
    num = 0
    for batch in [batch for replica in schedule.step(step) for batch in replica if batch]:
        if found and (num + len(batch) > most or len(found) == _MAX_SHOWN):
            break
        found.append(batch[:most])
        num += len(found[-1])
    return step, found


def _sample_bars(row: int, lengths: Sequence[int], *, is_padded: bool) -> list[Bar]:
    """Return a micro-batch's samples, each followed by its padding."""
    bars, left = [], 0
    for index, length in enumerate(lengths):
        tip = f"micro-batch {row + 1}, sample {index + 1}: {length} tokens"
        bars.append(row_bar(row, left, length, ("blue", "green")[index % 2], tip))
        left += length
        if is_padded and (padding := max(lengths) - length):
            bars.append(row_bar(row, left, padding, "waste", f"padding: {padding} tokens"))
            left += padding
    return bars


def speed_chart(found: Inspection) -> Chart:
    """Return the predicted rate of each method over that of the fixed batch."""
    methods = found.values["prediction"]["methods"]
    bars, rows = [], []
    for row, (name, one) in enumerate(methods.items()):
        speed = one["rate"] / methods[BASE]["rate"]
        look = "rival" if name in RIVALS else "blue"
        bars.append(row_bar(row, 0, speed, look, f"{name}: {speed:.2f}", f"{speed:.2f}"))
        shares = [f"{one['padding_fraction']:.1%}", f"{one['fill']:.1%}"]
        cells = [name, str(one["token_budget"]), f"{speed:.2f}", *shares]
        rows.append([*cells, f"{one['samples_per_step']:.1f}"])
    ends = (0, 1.15 * max(bar.width for bar in bars))
    return Chart(
        title="Predicted speed",
        panels=[
            Panel(
                bars=bars,
                dividers=[1.0],
                x=Axis(label=f"times as fast as {BASE}", ends=ends, has_grid=True),
                y=Axis(ends=(len(bars) - 0.5, -0.5), ticks=dict(enumerate(methods))),
            )
        ],
        columns=["method", "budget", "speed", "padding", "fill", "samples/step"],
        rows=rows,
        height=270,
    )


def balance_chart(found: Inspection) -> Chart:
    """Return what a step of median balance costs each replica."""
    names = (BASE, "dp-balanced", found.planned)
    loads = [replica_costs(found.runs[name]) for name in names]
    dp, num = found.values["setting"]["dp"], len(loads[0])
    right = 1.03 * max(map(max, loads))
    y = Axis(
        label="replica" if num == dp else "replica, most first",
        ends=(num - 0.4, -0.6),
        ticks={row: str(row) for row in range(0, num, -(-num // 8))},
    )
    panels = []
    for name, own in zip(names, loads, strict=True):
        bars = [
            row_bar(row, 0, load, "blue", f"replica {row}: cost {load:.2f} of the mean")
            for row, load in enumerate(own)
        ]
        bars += [
            row_bar(
                row, load, max(own) - load, "waste", f"replica {row} waits {max(own) - load:.2f}"
            )
            for row, load in enumerate(own)
            if load < max(own)
        ]
        x = Axis(label="cost, 1 = mean of replicas", ends=(0, right), most=5)
        panels.append(Panel(title=name, bars=bars, x=x, y=y))
    return Chart(
        title="Balance over replicas",
        panels=panels,
        columns=["replica", *names],
        rows=[
            [str(row), *(f"{load:.3f}" for load in own)]
            for row, own in enumerate(zip(*loads, strict=True))
        ],
        height=90 + 26 * min(num, 8),
        narrow_height=(90 + 16 * min(num, 8)) * 3,
    )


def replica_costs(run: Run) -> list[float]:
    """Return each replica's cost over their mean, in the step of median balance.

    Where there are many, those with the most, most first.
    """
    order = np.argsort(run.times.balance_step, kind="stable")
    step = int(order[len(order) // 2])
    first, last = run.schedule.micro_batch_starts[step : step + 2]
    own = run.times.costs[first:last].reshape(run.setting.num_replicas, -1).sum(axis=1)
    loads: list[float] = (own / own.mean()).tolist()
    return loads if len(loads) <= _MAX_REPLICAS else sorted(loads)[: -_MAX_REPLICAS - 1 : -1]


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
        words=words_of(found),
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
