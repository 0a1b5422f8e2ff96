"""`odb-megatron simulate`: what each way to form steps makes of given sample lengths.

No model runs; the time of a step is a cost model's. docs/reports.md says what each figure means.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from odb_megatron import __version__
from odb_megatron.output_files import check_output, write_json
from odb_megatron.plan.blocks import BLOCK
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.report.lengths import (
    LENGTHS,
    DataRequest,
    length_summary,
    read_data,
    read_lengths,
)
from odb_megatron.report.schedules import (
    ATTENTION_SHARE,
    FIXED_SHARE,
    POLICIES,
    REFERENCE,
    Schedule,
    Setting,
    Stream,
    Times,
    bound_time,
    measure,
    odb,
    shares_model,
)

__all__ = ["POLICY_NAMES", "above_zero", "aligned", "compare", "main", "parse", "select_names"]
__all__ += ["simulate", "whole"]

Figures = dict[str, Any]

BOUND, BASELINE = "bound", "standard-safe"
POLICY_NAMES = (*POLICIES, BOUND)
DEFAULT_COUNT, DEFAULT_FILL = 8, 0.93


def main(argv: Sequence[str]) -> int:
    """Simulate, print one table, write the JSON.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.json not in (None, "-"):
            check_output("--json", options.json)
        report, text = simulate(options)
        print(text, file=sys.stderr if options.json == "-" else sys.stdout)
        write_json(options.json, report)
    except ValueError as error:
        parser.error(str(error))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for `simulate`; a SystemExit for arguments that do not parse."""
    return _parser().parse_args(argv)


def simulate(options: argparse.Namespace) -> tuple[Figures, str]:
    """Return the report, and the table to print.

    Raises:
        ValueError: an argument cannot be used.
    """
    names = select_names(options.policy)
    lengths, about = _lengths(options)
    batch = options.global_batch_size
    if batch is None:
        room = DEFAULT_COUNT * options.dp * options.token_budget
        batch = max(options.dp, int(DEFAULT_FILL * room / float(lengths.mean())))
    setting = Setting(
        num_replicas=options.dp,
        token_budget=options.token_budget,
        global_batch_size=batch,
        cost=shares_model(
            lengths,
            token_budget=options.token_budget,
            attention=options.attention_share,
            fixed=options.fixed_cost,
        ),
        sync=options.sync or ("microbatch" if options.pp > 1 else "step"),
        pipeline=Pipeline(stages=options.pp, chunks=options.vpp, group=options.vpp_group),
        max_share=options.share_long,
        seed=options.seed,
    )
    stream = Stream.of_epochs(lengths, epochs=options.epochs, cost=setting.cost, seed=options.seed)
    policies, left_out = compare(names, stream, setting)
    report = {
        "policies": policies,
        "left_out": left_out,
        "config": {
            **{key: value for key, value in vars(options).items() if key != "json"},
            "sync": setting.sync,
            "global_batch_size": batch,
            "cost_quadratic": setting.cost.quadratic,
            "cost_fixed": setting.cost.fixed,
        },
        "lengths": about,
        "versions": {
            "odb_megatron": __version__,
            "online_dynamic_batching": next(
                (found.version for found in metadata.distributions(name=REFERENCE)), None
            ),
        },
    }
    how = "" if options.global_batch_size else f" (what M = {DEFAULT_COUNT} holds)"
    lines = [
        f"{about['num_samples']} samples, mean {about['mean']:.1f}, CV {about['cv']:.2f}, longest "
        f"{about['max']} ({about['num_truncated']} cut, {about['num_left_out']} left out); "
        f"{options.epochs} epoch(s); {options.dp} replicas, token budget {options.token_budget}, "
        f"global batch size {batch}{how}, sync {setting.sync}",
        _table(policies),
    ]
    if not any(figures["steady"] for name, figures in policies.items() if name != BOUND):
        lines.append(
            f"warning: no steady steps: {len(stream)} samples are two global batches of {batch} or "
            "less: give more samples or --epochs"
        )
    lines += [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    return report, "\n".join(lines)


def select_names(text: str) -> tuple[str, ...]:
    """Return the policies asked for, separated by commas, or `all`; in the order of the table.

    Raises:
        ValueError: a name is not known, or none is given.
    """
    asked = {name.strip() for name in text.split(",") if name.strip()}
    if asked == {"all"}:
        return POLICY_NAMES
    if not asked or not asked <= {*POLICY_NAMES}:
        raise ValueError(
            f"--policy {text!r}: expected all, or some of {', '.join(POLICY_NAMES)}, separated by "
            "commas"
        )
    return tuple(name for name in POLICY_NAMES if name in asked)


def compare(
    names: Sequence[str], stream: Stream, setting: Setting
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return the figures of each policy, and why one has none."""
    base = POLICIES[BASELINE](stream, setting)
    times = measure(base, stream, setting)
    spans = base.spans(stream, setting)
    rates = [
        [float(times.work[span].sum() / own[span].sum()) for own in (times.step, times.pipeline)]
        if span.stop
        else []
        for span in spans
    ]
    policies: dict[str, Figures] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if name == BOUND:
            work, tokens = float(stream.costs.sum()), int(stream.lengths.sum())
            best = work / bound_time(work=work, tokens=tokens, setting=setting)
            found: list[Figures | None] = [
                {"fraction_of_bound": 1.0, "samples_per_s_rel": best / own[0]} if own else None
                for own in rates
            ]
        else:
            try:
                schedule = POLICIES[name](stream, setting)
            except ImportError as error:
                left_out[name] = str(error)
                continue
            times = measure(schedule, stream, setting)
            found = [
                _score(schedule, times, setting, span=span, base=own)
                for span, own in zip(schedule.spans(stream, setting), rates, strict=True)
            ]
            if name == "odb" and setting.pipeline.stages > 1:
                other = measure(odb(stream, setting, is_ordered=False), stream, setting)
                for figures, span in zip(found, schedule.spans(stream, setting), strict=True):
                    if figures is not None:
                        ratio = times.pipeline[span].sum() / other.pipeline[span].sum()
                        figures["pipeline_efficiency_unordered"] = float(
                            figures["pipeline_efficiency"] * ratio
                        )
        policies[name] = {**(found[0] or {}), "steady": found[1]}
    return policies, left_out


def _score(
    schedule: Schedule, times: Times, setting: Setting, *, span: slice, base: Sequence[float]
) -> Figures | None:
    """Return the figures of some steps against the baseline's rates; None where there are none."""
    if not span.stop:
        return None
    tokens, computed = float(times.tokens[span].sum()), int(times.computed[span].sum())
    work, time, path = (float(own[span].sum()) for own in (times.work, times.step, times.pipeline))
    counts = schedule.counts[span]
    num_micro_batches = int(counts.sum()) * setting.num_replicas
    figures: Figures = {
        "fraction_of_bound": bound_time(work=work, tokens=tokens, setting=setting) / time,
        "samples_per_s_rel": work / time / base[0] if base else None,
        "samples_per_step": float(schedule.step_samples[span].mean()),
        "balance_step": float(times.balance_step[span].mean()),
        "balance_microbatch": float(times.balance_microbatch[span].mean()),
        "fill": tokens / (num_micro_batches * setting.token_budget),
        "padding_fraction": max(0.0, 1 - tokens / computed) if computed else None,
        "over_budget": int(times.over_budget[span].sum()),
        "mean_M": float(counts.mean()),
        "bytes_moved_per_step": float(times.bytes_moved[span].mean()),
        "num_steps": len(counts),
    }
    if setting.max_share > 1:
        figures["shared_per_step"] = float(times.shared[span].mean())
    if setting.pipeline.stages > 1:
        needed = work + num_micro_batches * setting.cost.fixed
        busy = needed / (setting.num_replicas * setting.pipeline.stages)
        figures["pipeline_efficiency"] = busy / path
        figures["pipeline_samples_per_s_rel"] = work / path / base[1] if base else None
    return figures


# --- the command -----------------------------------------------------------------------------


def _lengths(options: argparse.Namespace) -> tuple[Any, dict[str, float | int]]:
    """Return the lengths, and what describes them."""
    spec, longest = options.lengths, options.token_budget
    longest *= max(1, min(options.share_long, options.dp, BLOCK))
    num_left_out = num_truncated = 0
    if ":" in spec.split(os.sep)[0] and not os.path.exists(spec):
        if options.tokenizer is not None:
            raise ValueError(
                f"--tokenizer {options.tokenizer!r} would do nothing: --lengths {spec!r} has "
                "lengths, no text; drop it"
            )
        values = read_lengths(spec, seed=options.seed)
        if values.max() > longest:
            raise ValueError(
                f"--lengths {spec!r} has a sample of {values.max()} tokens; the token budget is "
                f"{options.token_budget}: raise --token-budget or --share-long, or leave such "
                "samples out"
            )
    else:
        request = DataRequest(paths=(spec,), tokenizer=options.tokenizer, seed=options.seed)
        found = read_data(request)
        num_left_out, num_truncated = found.num_bad, int((found.lengths > longest).sum())
        values = np.minimum(found.lengths, longest)
    cut = {"num_truncated": num_truncated, "num_left_out": num_left_out}
    return values, {**length_summary(values), **cut}


_COLUMNS = (
    ("fraction_of_bound", "bound", 4),
    ("samples_per_s_rel", "speed", 3),
    ("pipeline_efficiency", "pipe", 4),
    ("pipeline_efficiency_unordered", "unordered", 4),
    ("pipeline_samples_per_s_rel", "pipe speed", 3),
    ("samples_per_step", "smp/step", 1),
    ("mean_M", "M", 2),
    ("balance_step", "bal step", 4),
    ("balance_microbatch", "bal mb", 4),
    ("fill", "fill", 3),
    ("padding_fraction", "pad", 3),
    ("over_budget", "over", 0),
    ("shared_per_step", "shared", 2),
    ("bytes_moved_per_step", "moved B", 0),
)


def _table(policies: Mapping[str, Figures]) -> str:
    """Return one row per policy for the whole run, then one for its steady part."""
    shown = [column for column in _COLUMNS if any(column[0] in p for p in policies.values())]
    rows = [["policy", "part", *(title for _, title, _ in shown)]]
    for part in ("whole", "steady"):
        for name, figures in policies.items():
            found = figures if part == "whole" else figures["steady"]
            if found is not None:
                cells = [(found.get(key), decimals) for key, _, decimals in shown]
                rows.append([name, part, *("-" if v is None else f"{v:.{n}f}" for v, n in cells)])
    return aligned(rows, names=2)


def aligned(rows: Sequence[Sequence[str]], *, names: int) -> str:
    """Return a table as text: the first columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return value

    return parse


def above_zero(text: str) -> float:
    """An argparse type: a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron simulate",
        description="Compare the planner that training runs (odb), padded and packed rivals and "
        "the bound on the lengths of samples alone. docs/reports.md says what figures mean.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    lengths = f"{LENGTHS}; or a data file (JSON or JSONL, or a Megatron .bin/.idx prefix)"
    add("--lengths", required=True, metavar="SPEC", help=lengths)
    add("--tokenizer", metavar="FOLDER", help="tokenizer of a JSON or JSONL data file")
    add("--dp", type=whole(1), default=8, metavar="N", help="replicas (default 8)")
    add("--token-budget", type=whole(1), default=8192, metavar="B", help="default 8192")
    add(
        "--epochs", type=whole(1), default=1, metavar="E", help="one stream of E epochs (default 1)"
    )
    policies = f"all (default), or of {', '.join(POLICY_NAMES)}"
    add("--policy", default="all", metavar="P[,P...]", help=policies)
    sync = "where replicas wait for each other (default step; with --pp microbatch)"
    add("--sync", choices=("step", "microbatch"), help=sync)
    batch = f"samples per step (default: what {DEFAULT_COUNT} micro-batches hold)"
    add("--global-batch-size", type=whole(1), metavar="G", help=batch)
    share = "let up to K replicas share a sample over the budget or a replica's share (odb)"
    add("--share-long", type=whole(1), default=1, metavar="K", help=share)
    fixed = "per-micro-batch overhead, as a share of a full one's cost (default 0.05)"
    add("--fixed-cost", type=float, default=FIXED_SHARE, metavar="SHARE", help=fixed)
    attention = "of attention in the cost of all samples (default 0.3)"
    add("--attention-share", type=float, default=ATTENTION_SHARE, metavar="SHARE", help=attention)
    add(
        "--pp", type=whole(1), default=1, metavar="P", help="pipeline stages: adds the 1F1B figures"
    )
    add("--vpp", type=whole(1), default=1, metavar="V", help="virtual chunks per stage (with --pp)")
    group = "micro-batches that a virtual chunk takes in turn (default: --pp)"
    add("--vpp-group", type=whole(1), default=0, metavar="G", help=group)
    add("--seed", type=int, default=0, help="of epochs' orders and comparisons (default 0)")
    add("--json", metavar="OUT", help="write the figures as JSON; '-' for stdout")
    return parser
