"""`odb-megatron simulate`: what each way to form steps makes of given sample lengths.

No model runs; the time of a step is a cost model's. docs/reports.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from odb_megatron import __version__
from odb_megatron.command import Report, aligned, new_parser, rows_of, run_command, whole
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
    Setting,
    Stream,
    Times,
    bound_time,
    load_figures,
    measure,
    odb,
    shares_model,
)

__all__ = ["POLICY_NAMES", "compare", "main", "parse", "select_names", "simulate"]

Figures = dict[str, Any]

BOUND, BASELINE = "bound", "standard-safe"
POLICY_NAMES = (*POLICIES, BOUND)
DEFAULT_COUNT, DEFAULT_FILL = 8, 0.93


def main(argv: list[str]) -> int:
    """Simulate, print one table, write the JSON."""

    def work(options: argparse.Namespace) -> Report:
        report, text = simulate(options)
        return Report(values=report, text=text)

    return run_command(_parser(), argv, work)


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
    shares = {"attention": options.attention_share, "fixed": options.fixed_cost}
    setting = Setting(
        num_replicas=options.dp,
        token_budget=options.token_budget,
        global_batch_size=batch,
        cost=shares_model(lengths, token_budget=options.token_budget, **shares),
        sync=options.sync or ("microbatch" if options.pp > 1 else "step"),
        pipeline=Pipeline(stages=options.pp, chunks=options.vpp, group=options.vpp_group),
        max_share=options.share_long,
        seed=options.seed,
    )
    stream = Stream.of_epochs(lengths, epochs=options.epochs, cost=setting.cost, seed=options.seed)
    policies, left_out = compare(names, stream, setting)
    versions = [found.version for found in metadata.distributions(name=REFERENCE)]
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
            "online_dynamic_batching": versions[0] if versions else None,
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
    base = measure(POLICIES[BASELINE](stream, setting), stream, setting)
    rates = [_rates(base, span) for span in _spans(base)]
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
                times = measure(POLICIES[name](stream, setting), stream, setting)
            except ImportError as error:
                left_out[name] = str(error)
                continue
            spans = _spans(times)
            found = [_score(times, setting, *both) for both in zip(spans, rates, strict=True)]
            if name == "odb" and setting.pipeline.stages > 1:
                other = measure(odb(stream, setting, is_ordered=False), stream, setting)
                for figures, span in zip(found, spans, strict=True):
                    if figures is not None:
                        ratio = float(times.pipeline[span].sum() / other.pipeline[span].sum())
                        ordered = figures["pipeline_efficiency"]
                        figures["pipeline_efficiency_unordered"] = ordered * ratio
        policies[name] = {**(found[0] or {}), "steady": found[1]}
    return policies, left_out


def _spans(times: Times) -> tuple[slice, slice]:
    return slice(0, len(times.counts)), times.steady


def _rates(times: Times, span: slice) -> list[float]:
    """Return work per time without and with the pipeline; nothing of no steps."""
    work = times.work[span].sum()
    both = (times.step, times.pipeline)
    return [float(work / own[span].sum()) for own in both] if span.stop else []


def _score(times: Times, setting: Setting, span: slice, base: Sequence[float]) -> Figures | None:
    """Return the figures of some steps against the baseline's rates; None where there are none."""
    if not span.stop:
        return None
    tokens, work = float(times.tokens[span].sum()), float(times.work[span].sum())
    over = [own / other for own, other in zip(_rates(times, span), base, strict=False)]
    figures: Figures = {
        "fraction_of_bound": bound_time(work=work, tokens=tokens, setting=setting)
        / float(times.step[span].sum()),
        "samples_per_s_rel": over[0] if over else None,
        "samples_per_step": float(times.samples[span].mean()),
        "balance_step": float(times.balance_step[span].mean()),
        "balance_microbatch": float(times.balance_microbatch[span].mean()),
        **load_figures(times, setting, span),
        "num_steps": len(times.counts[span]),
    }
    if setting.max_share > 1:
        figures["shared_per_step"] = float(times.shared[span].mean())
    if setting.pipeline.stages > 1:
        num_micro_batches = int(times.counts[span].sum()) * setting.num_replicas
        busy = (work + num_micro_batches * setting.cost.fixed) / setting.num_replicas
        path = float(times.pipeline[span].sum())
        figures["pipeline_efficiency"] = busy / setting.pipeline.stages / path
        figures["pipeline_samples_per_s_rel"] = over[1] if over else None
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
        found = read_data(
            DataRequest(paths=(spec,), tokenizer=options.tokenizer, seed=options.seed)
        )
        lengths = found.positions[found.positions > 0]
        num_left_out, num_truncated = found.about["num_bad"], int((lengths > longest).sum())
        values = np.minimum(lengths, longest)
    cut = {"num_truncated": num_truncated, "num_left_out": num_left_out}
    return values, {**length_summary(values), **cut}


_COLUMNS = (
    ("part", "part", ""),
    ("bound", "fraction_of_bound", ".4f"),
    ("speed", "samples_per_s_rel", ".3f"),
    ("pipe", "pipeline_efficiency", ".4f"),
    ("unordered", "pipeline_efficiency_unordered", ".4f"),
    ("pipe speed", "pipeline_samples_per_s_rel", ".3f"),
    ("smp/step", "samples_per_step", ".1f"),
    ("M", "mean_M", ".2f"),
    ("bal step", "balance_step", ".4f"),
    ("bal mb", "balance_microbatch", ".4f"),
    ("fill", "fill", ".3f"),
    ("pad", "padding_fraction", ".3f"),
    ("over", "over_budget", ".0f"),
    ("shared", "shared_per_step", ".2f"),
    ("moved B", "bytes_moved_per_step", ".0f"),
)


def _table(policies: Mapping[str, Figures]) -> str:
    """Return one row per policy for the whole run, then one for its steady part."""
    named = [(name, {"part": "whole", **own}) for name, own in policies.items()]
    steady = [(name, own["steady"]) for name, own in policies.items() if own["steady"]]
    named += [(name, {"part": "steady", **own}) for name, own in steady]
    known = {key for _, own in named for key in own}
    columns = [column for column in _COLUMNS if column[1] in known]
    return aligned(rows_of(columns, named, "policy"), names=2)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "simulate",
        "Compare the planner that training runs (odb), padded and packed rivals and the bound on "
        "the lengths of samples alone. docs/reports.md says what figures mean.",
    )
    add = parser.add_argument
    count: dict[str, Any] = {"type": whole(1), "metavar": "N"}
    lengths = f"{LENGTHS}; or a data file (JSON or JSONL, or a Megatron .bin/.idx prefix)"
    add("--lengths", required=True, metavar="SPEC", help=lengths)
    add("--tokenizer", metavar="FOLDER", help="tokenizer of a JSON or JSONL data file")
    add("--dp", default=8, help="replicas (default 8)", **count)
    add("--token-budget", default=8192, help="default 8192", **count)
    add("--epochs", default=1, help="one stream of N epochs (default 1)", **count)
    policies = f"all (default), or of {', '.join(POLICY_NAMES)}"
    add("--policy", default="all", metavar="P[,P...]", help=policies)
    sync = "where replicas wait for each other (default step; with --pp microbatch)"
    add("--sync", choices=("step", "microbatch"), help=sync)
    batch = f"samples per step (default: what {DEFAULT_COUNT} micro-batches hold)"
    add("--global-batch-size", help=batch, **count)
    share = "let up to N replicas share a sample over the budget or a replica's share (odb)"
    add("--share-long", default=1, help=share, **count)
    fixed = "per-micro-batch overhead, as a share of a full one's cost (default 0.05)"
    add("--fixed-cost", type=float, default=FIXED_SHARE, metavar="SHARE", help=fixed)
    attention = "of attention in the cost of all samples (default 0.3)"
    add("--attention-share", type=float, default=ATTENTION_SHARE, metavar="SHARE", help=attention)
    add("--pp", default=1, help="pipeline stages: adds the 1F1B figures", **count)
    add("--vpp", default=1, help="virtual chunks per stage (with --pp)", **count)
    group = "micro-batches that a virtual chunk takes in turn (default: --pp)"
    add("--vpp-group", default=0, help=group, **count)
    add("--seed", type=int, default=0, help="of epochs' orders and comparisons (default 0)")
    return parser
