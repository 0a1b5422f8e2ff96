"""`odb-megatron simulate`: what each way to form steps makes of given sample lengths.

No model runs; the time of a step is a cost model's. docs/simulator.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron import __version__
from odb_megatron.output_files import check_output, write_output
from odb_megatron.simulation.lengths import SampleLengths, read_lengths
from odb_megatron.simulation.schedules import (
    MAX_BLOCK,
    POLICIES,
    ReferenceMissingError,
    Schedule,
    Setting,
    Stream,
    Times,
    bound_time,
    measure,
    reference_version,
    shares_model,
)

__all__ = ["POLICY_NAMES", "compare", "main", "parse", "select_names", "simulate"]

Figures = dict[str, Any]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BOUND, BASELINE = "bound", "standard-safe"
POLICY_NAMES = (*POLICIES, BOUND)
DEFAULT_COUNT, DEFAULT_FILL = 8, 0.93
RANDOM_STEPS, MAX_ORDERS = 1000, 16


def main(argv: Sequence[str]) -> int:
    """Simulate, print one table, write the JSON.

    Args:
        argv: arguments behind `odb-megatron simulate`.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    parser = _parser()
    options = parser.parse_args(argv)
    table = sys.stderr if options.json == "-" else sys.stdout
    try:
        if options.json not in (None, "-"):
            check_output("--json", options.json)
        report, text = simulate(options)
        print(text, file=table)
        if options.json == "-":
            print(json.dumps(report, indent=1))
        elif options.json:
            write_output("--json", options.json, json.dumps(report, indent=1) + "\n")
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
    for flag in ("dp", "token_budget", "share_long"):
        if getattr(options, flag) < 1:
            shown = flag.replace("_", "-")
            raise ValueError(f"--{shown} must be at least 1, got {getattr(options, flag)}")
    lengths = read_lengths(
        options.lengths,
        token_budget=options.token_budget,
        longest=options.token_budget * min(options.share_long, options.dp, MAX_BLOCK),
        tokenizer=options.tokenizer,
        seed=options.seed,
    )
    setting = _setting(options, lengths.values)
    stream = Stream.of_epochs(
        lengths.values, epochs=options.epochs, cost=setting.cost, seed=options.seed
    )
    policies, left_out = compare(names, stream, setting, progress=_say)
    report = {
        "policies": policies,
        "left_out": left_out,
        "config": {
            **{key: value for key, value in vars(options).items() if key != "json"},
            "sync": setting.sync,
            "global_batch_size": setting.global_batch_size,
            "cost_quadratic": setting.cost.quadratic,
            "cost_fixed": setting.cost.fixed,
        },
        "lengths": lengths.summary(),
        "versions": {
            "odb_megatron": __version__,
            "online_dynamic_batching": reference_version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    lines = [_headline(options, setting, lengths), _table(policies)]
    if not any(figures["steady"] for name, figures in policies.items() if name != BOUND):
        lines.append(
            f"warning: no steady steps: {len(stream)} samples are two global batches of "
            f"{setting.global_batch_size} or less: give more samples or --epochs"
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
    if not asked or not asked <= set(POLICY_NAMES):
        raise ValueError(
            f"--policy {text!r}: expected all, or some of {', '.join(POLICY_NAMES)}, separated by "
            "commas"
        )
    return tuple(name for name in POLICY_NAMES if name in asked)


def compare(
    names: Sequence[str],
    stream: Stream,
    setting: Setting,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return the figures of each policy, and why one has none.

    Args:
        names: of `POLICY_NAMES`.
        stream: the samples.
        setting: what the policies have in common.
        progress: told each name before its turn.
    """
    schedule = POLICIES[BASELINE](stream, setting)
    base = _parts(schedule, measure(schedule, stream, setting), stream, setting)
    policies: dict[str, Figures] = {}
    left_out: dict[str, str] = {}
    for name in names:
        progress(name)
        if name == BOUND:
            policies[name] = _bound(base, stream, setting)
            continue
        try:
            schedule = POLICIES[name](stream, setting)
        except ReferenceMissingError as error:
            left_out[name] = str(error)
            continue
        times = measure(schedule, stream, setting)
        own = _parts(schedule, times, stream, setting)
        found: dict[str, Figures | None] = {"whole": None, "steady": None}
        for part, (span, rate, pipeline_rate) in own.items():
            figures = _score(schedule, times, stream, setting, span=span)
            _, base_rate, base_pipeline = base.get(part, (span, None, None))
            figures["samples_per_s_rel"] = base_rate and rate / base_rate
            if setting.num_stages > 1:
                figures["pipeline_samples_per_s_rel"] = (
                    base_pipeline and pipeline_rate / base_pipeline
                )
            found[part] = figures
        policies[name] = {**(found["whole"] or {}), "steady": found["steady"]}
    return policies, left_out


Parts = dict[str, tuple[slice, float, float]]


def _parts(schedule: Schedule, times: Times, stream: Stream, setting: Setting) -> Parts:
    """Return steps, work per time and per pipeline time; of the whole run and its steady part."""
    found = {}
    for part, span in (
        ("whole", slice(0, len(schedule))),
        ("steady", schedule.steady(stream, setting)),
    ):
        work, step, path = (
            float(values[span].sum()) for values in (times.work, times.step, times.pipeline)
        )
        if step:
            found[part] = span, work / step, work / path
    return found


def _bound(base: Parts, stream: Stream, setting: Setting) -> Figures:
    work = float(stream.costs.sum())
    least = bound_time(work=work, tokens=int(stream.lengths.sum()), setting=setting)
    found = {
        part: {"fraction_of_bound": 1.0, "samples_per_s_rel": work / least / rate}
        for part, (_, rate, _) in base.items()
    }
    return {**found["whole"], "steady": found.get("steady")}


def _score(
    schedule: Schedule, times: Times, stream: Stream, setting: Setting, *, span: slice
) -> Figures:
    """Return the figures of some steps; None for what is not defined there."""
    tokens, computed = float(times.tokens[span].sum()), int(times.computed[span].sum())
    work, time = float(times.work[span].sum()), float(times.step[span].sum())
    samples, counts = schedule.step_samples, schedule.counts[span]
    num_micro_batches = int(counts.sum()) * setting.num_replicas
    at = np.concatenate(([0], np.cumsum(samples)))
    order = schedule.positions[_firsts(schedule)][at[span.start] : at[span.stop]]
    figures: Figures = {
        "fraction_of_bound": bound_time(work=work, tokens=tokens, setting=setting) / time,
        "samples_per_step": float(samples[span].mean()),
        **_composition(stream.lengths[order], samples[span], seed=setting.seed),
        "balance_step": float(times.balance_step[span].mean()),
        "balance_microbatch": float(times.balance_microbatch[span].mean()),
        "fill": tokens / (num_micro_batches * setting.token_budget),
        "padding_fraction": max(0.0, 1 - tokens / computed) if computed else None,
        "over_budget": int(times.over_budget[span].sum()),
        "mean_M": float(counts.mean()),
        "bytes_moved_per_step": float(schedule.bytes_moved[span].mean()),
        "num_steps": len(counts),
    }
    if setting.max_share > 1:
        starts = schedule.sample_starts[schedule.micro_batch_starts]
        parts = schedule.parts[starts[span.start] : starts[span.stop]]
        figures["shared_fraction"] = float((1 / parts[parts > 1]).sum() / len(order))
    if setting.num_stages > 1:
        needed = work + num_micro_batches * setting.cost.fixed
        busy = needed / (setting.num_replicas * setting.num_stages)
        figures["pipeline_efficiency"] = busy / float(times.pipeline[span].sum())
    return figures


def _firsts(schedule: Schedule) -> Integers:
    """Return where `positions` names a sample for the first time."""
    if schedule.parts.max(initial=1) == 1:
        return np.arange(len(schedule.positions), dtype=np.int64)
    _, first = np.unique(schedule.positions, return_index=True)
    return np.sort(first)


def _composition(lengths: Integers, sizes: Integers, *, seed: int) -> Figures:
    """Return how far the composition of steps is from chance.

    * `ks_ratio`: mean over steps of the Kolmogorov-Smirnov distance of the step's lengths to all;
      over that of the same samples in random order, in steps of the same sizes.
    * `long_sample_weight`: mean of 1 / (tokens of the step) over the longest tenth of the samples,
      relative to all; over that of random order.
    * `mean_length_lag1`: correlation of the mean lengths of successive steps.

    Args:
        lengths: of the samples in the order of steps.
        sizes: samples of each step; 0 where a step has none.
        seed: of the random orders.
    """
    sizes = sizes[sizes > 0]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    values, counts = np.unique(lengths, return_counts=True)
    share = np.cumsum(counts) / len(lengths)
    long = np.quantile(lengths, 0.9, method="lower")

    def figures(order: Integers) -> tuple[float, float]:
        ranks = np.searchsorted(values, order)
        distances = [
            np.abs(np.cumsum(np.bincount(part, minlength=len(values))) / len(part) - share).max()
            for part in np.split(ranks, starts[1:-1])
        ]
        weights = np.repeat(1 / np.add.reduceat(order, starts[:-1]), sizes)
        return float(np.mean(distances)), float(weights[order >= long].mean() / weights.mean())

    random = np.random.default_rng([seed, 2])
    orders = min(MAX_ORDERS, -(-RANDOM_STEPS // len(sizes)))
    chance = np.mean([figures(random.permutation(lengths)) for _ in range(orders)], axis=0)
    distance, weight = figures(lengths)
    means = np.add.reduceat(lengths, starts[:-1]) / sizes
    varies = len(means) > 3 and means[1:].std() and means[:-1].std()
    return {
        "ks_ratio": distance / float(chance[0]) if chance[0] else None,
        "long_sample_weight": weight / float(chance[1]),
        "mean_length_lag1": float(np.corrcoef(means[1:], means[:-1])[0, 1]) if varies else None,
    }


# --- the command -----------------------------------------------------------------------------


def _setting(options: argparse.Namespace, lengths: Integers) -> Setting:
    batch = options.global_batch_size
    if batch is None:
        room = DEFAULT_COUNT * options.dp * options.token_budget
        batch = max(options.dp, int(DEFAULT_FILL * room / float(lengths.mean())))
    return Setting(
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
        num_stages=options.pp,
        num_chunks=options.vpp,
        max_share=options.share_long,
        seed=options.seed,
    )


def _headline(options: argparse.Namespace, setting: Setting, lengths: SampleLengths) -> str:
    about = lengths.summary()
    how = "" if options.global_batch_size is not None else f" (what M = {DEFAULT_COUNT} holds)"
    cut = ""
    if lengths.num_truncated or lengths.num_left_out:
        cut = f", {lengths.num_truncated} cut, {lengths.num_left_out} left out"
    return (
        f"{about['num_samples']} samples, mean {about['mean']:.1f}, CV {about['cv']:.2f}, longest "
        f"{about['max']}{cut}; {options.epochs} epoch(s); {setting.num_replicas} replicas, token "
        f"budget {setting.token_budget}, global batch size {setting.global_batch_size}{how}, sync "
        f"{setting.sync}"
    )


_COLUMNS = (
    ("fraction_of_bound", "bound", 4),
    ("samples_per_s_rel", "speed", 3),
    ("pipeline_efficiency", "pipe", 4),
    ("pipeline_samples_per_s_rel", "pipe speed", 3),
    ("samples_per_step", "smp/step", 1),
    ("mean_M", "M", 2),
    ("balance_step", "bal step", 4),
    ("balance_microbatch", "bal mb", 4),
    ("fill", "fill", 3),
    ("padding_fraction", "pad", 3),
    ("over_budget", "over", 0),
    ("shared_fraction", "shared", 4),
    ("bytes_moved_per_step", "moved B", 0),
    ("ks_ratio", "ks", 3),
    ("long_sample_weight", "long w", 4),
    ("mean_length_lag1", "lag1", 2),
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
                rows.append(
                    [name, part, *("-" if v is None else f"{v:.{n}f}" for v, n in cells)]
                )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers).rstrip())
    return "\n".join(lines)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _say(name: str) -> None:
    if sys.stderr.isatty():
        print(f"... {name}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron simulate",
        description="Compare ways to form the steps of data-parallel training on the lengths of "
        "samples alone: the planner that training runs (odb), padded and packed rivals, and the "
        "bound. No model runs; time is a cost model's. docs/simulator.md says what each figure "
        "means.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--lengths",
        required=True,
        metavar="SPEC",
        help="lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, "
        "file:PATH.json[#key], or a data file",
    )
    add("--tokenizer", metavar="FOLDER", help="tokenizer of a JSON or JSONL data file")
    add("--dp", type=int, default=8, metavar="N", help="replicas (default 8)")
    add(
        "--token-budget", type=int, default=8192, metavar="B", help="per micro-batch (default 8192)"
    )
    add("--epochs", type=int, default=1, metavar="E", help="one stream of E epochs (default 1)")
    add(
        "--policy",
        default="all",
        metavar="P[,P...]",
        help=f"all (default), or of {', '.join(POLICY_NAMES)}",
    )
    add(
        "--sync",
        choices=("step", "microbatch"),
        help="where replicas wait for each other (default step; with --pp microbatch)",
    )
    add(
        "--global-batch-size",
        type=int,
        metavar="G",
        help=f"samples per step (default: what {DEFAULT_COUNT} micro-batches hold)",
    )
    add(
        "--share-long",
        type=int,
        default=1,
        metavar="K",
        help="let up to K replicas share a sample over the budget or a replica's share (odb)",
    )
    add(
        "--fixed-cost",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="per-micro-batch overhead, as a share of a full one's cost (default 0.05)",
    )
    add(
        "--attention-share",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of attention in the cost of a sample of mean length (default 0.3)",
    )
    add("--pp", type=int, default=1, metavar="P", help="pipeline stages: adds the 1F1B figures")
    add("--vpp", type=int, default=1, metavar="V", help="virtual chunks per stage (with --pp)")
    add("--seed", type=_whole, default=0, help="of epochs' orders and comparisons (default 0)")
    add("--json", metavar="OUT", help="write the figures as JSON; '-' for stdout")
    return parser
