"""Samples per second of real training: ODB against padded micro-batches, on the CPU.

Real `pretrain()` runs of one model over the same samples, one process group per run, variants
interleaved. The first steps of a run are left out of the times. Ratios are taken within a repeat.

    python benchmarks/train_throughput.py --data chitchat --json build/bench/train_throughput.json
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from common import (
    ROOT,
    MissingDataError,
    ModelSize,
    TrainingRun,
    data_flags,
    data_name,
    mean_length,
    parser_of,
    prepare,
    ratio_interval,
    run_training,
    sample_ids,
    whole,
    write_json,
)

EXAMPLE_SCRIPT = ROOT / "examples" / "pretrain_gpt_odb.py"
SORTED_SCRIPT = ROOT / "benchmarks" / "sorted_padded.py"
NUM_WARM_UP_STEPS = 2
MODEL = ModelSize(num_layers=3, hidden=96, num_heads=4, ffn_hidden=288, seq_length=1024)
QUICK_MODEL = ModelSize(num_layers=1, hidden=32, num_heads=2, ffn_hidden=64, seq_length=256)
TRAIN_FLAGS = shlex.split("--odb-overlong truncate --lr 1e-3 --lr-decay-style constant --seed 1234")


def batching_of(options: argparse.Namespace, *, seq_length: int, mean: float) -> dict[str, Any]:
    """Fit batch sizes to the budget; the global batch size is rounded to both of them.

    Returns:
        `token_budget`: most tokens of a micro-batch; what the padded variants exceed is said there.
        `mean_length`: of a sample cut to the context. `standard`: micro-batch size whose worst case
        fits the budget; `standard_mean`: of which the mean fits. `global_batch_size`: samples per
        step; `num_samples`: of a run, a multiple of it.
    """
    budget = options.token_budget or 2 * seq_length
    if budget < seq_length:
        raise ValueError(
            f"--token-budget {budget} is below the context of {seq_length} tokens: raise it"
        )
    standard = budget // seq_length
    standard_mean = max(standard, int(budget // mean))
    unit = math.lcm(standard, standard_mean) * options.dp
    batch = unit * max(1, round(options.global_batch_size / unit))
    return {
        "token_budget": budget,
        "mean_length": mean,
        "standard": standard,
        "standard_mean": standard_mean,
        "global_batch_size": batch,
        "num_samples": batch * max(NUM_WARM_UP_STEPS + 2, -(-options.samples // batch)),
    }


def main() -> int:
    """Run, measure, report; return the exit code."""
    options = _parse()
    model = QUICK_MODEL if options.quick else MODEL
    try:
        data = prepare(options.data)
    except MissingDataError as error:
        print(f"skipped: {error}", flush=True)
        write_json(options.json, {"skipped": str(error)})
        return 0
    mean = mean_length(data, seq_length=model.seq_length)
    batching = batching_of(options, seq_length=model.seq_length, mean=mean)
    print(f"{model}\n{batching}", flush=True)
    shared = [*model.flags(), *data_flags(data.path, data.tokenizer), *TRAIN_FLAGS]
    shared += ["--global-batch-size", str(batching["global_batch_size"])]
    shared += ["--train-samples", str(batching["num_samples"])]
    budget, size = str(batching["token_budget"]), "--micro-batch-size"
    variants = {  # speed-ups are relative to the first
        "standard": ([size, str(batching["standard"])], EXAMPLE_SCRIPT),
        "standard_mean": ([size, str(batching["standard_mean"])], EXAMPLE_SCRIPT),
        "sorted": ([size, "1", "--sorted-token-budget", budget], SORTED_SCRIPT),
        "odb": (["--odb", "--odb-token-budget", budget, size, "1"], EXAMPLE_SCRIPT),
    }
    runs: dict[str, list[TrainingRun]] = {name: [] for name in variants}
    names = list(variants)
    for repeat in range(options.repeats):
        print(f"repeat {repeat + 1} of {options.repeats}", flush=True)
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            flags, script = variants[name]
            run = run_training(name, [*shared, *flags], num_replicas=options.dp, script=script)
            runs[name].append(run)
    result = summarize(runs)
    result["setting"] = {
        "data": options.data,
        "repeats": options.repeats,
        "num_replicas": options.dp,
        "threads_per_replica": 1,
        "num_warm_up_steps": NUM_WARM_UP_STEPS,
        "model": asdict(model),
        "batching": batching,
        "cores": os.cpu_count(),
        "machine": platform.platform(),
    }
    write_json(options.json, result)
    if not result["same_samples"]:
        print("FAILED: the variants did not train the same samples", flush=True)
        return 1
    return 0


def summarize(runs: Mapping[str, Sequence[TrainingRun]]) -> dict[str, Any]:
    """Summarize the runs, `runs[variant][repeat]`, and print them."""
    measured = {name: [measure(run) for run in own] for name, own in runs.items()}
    rates = {name: [one["samples_per_s"] for one in own] for name, own in measured.items()}

    def ratio(over: str, under: str) -> dict[str, object]:
        pairs = zip(rates[over], rates[under], strict=True)
        interval = ratio_interval([one / other for one, other in pairs])
        print(f"{over} over {under}: {interval}", flush=True)
        return interval.as_json()

    summaries: dict[str, object] = {}
    for name, own in measured.items():
        shown = ("samples_per_s", "tokens_per_s", "padding_fraction", "samples_per_step")
        means = {key: sum(one[key] for one in own) / len(own) for key in shown}
        print(name, *(f"{key} {value:.4g}" for key, value in means.items()), sep="  ")
        summaries[name] = {
            **means,
            "max_micro_batch_tokens": max(map(_max_micro_batch_tokens, runs[name])),
            "speedup_vs_standard": ratio(name, "standard"),
            "runs": [
                {**one, "command": run.command} for one, run in zip(own, runs[name], strict=True)
            ],
        }
    ids = {
        tuple(sorted(name for step in sample_ids(run.steps) for name in step))
        for own in runs.values()
        for run in own
    }
    return {
        "variants": summaries,
        "ratios": {
            f"odb_over_{other}": ratio("odb", other) for other in ("sorted", "standard_mean")
        },
        "same_samples": len(ids) == 1,
    }


def measure(run: TrainingRun) -> dict[str, float]:
    """Numbers of one run; rates are over the steps behind the warm-up.

    `samples_per_s` is the timed steps' rate in tokens over the mean length of *all* samples of the
    run: which samples fall into the warm-up differs between variants, and counting those of the
    timed steps would favour a variant that happened to begin with long ones. The plain count is
    `timed_samples_per_s`.
    """
    steps = run.steps[0]
    timed = list(zip(*run.steps, strict=True))[NUM_WARM_UP_STEPS:]
    seconds = sum(max(step.step_s for step in replicas) for replicas in timed)
    tokens_per_s = sum(replicas[0].tokens for replicas in timed) / seconds
    timed_samples = sum(replicas[0].samples for replicas in timed)
    num_samples = sum(step.samples for step in steps)
    num_tokens = sum(step.tokens for step in steps)
    return {
        "samples_per_s": tokens_per_s * num_samples / num_tokens,
        "tokens_per_s": tokens_per_s,
        "timed_samples_per_s": timed_samples / seconds,
        "padding_fraction": 1 - num_tokens / sum(step.computed_tokens for step in steps),
        "samples_per_step": num_samples / len(steps),
        "num_steps": len(steps),
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "timed_steps": len(steps) - NUM_WARM_UP_STEPS,
        "timed_s": seconds,
        "wall_s": run.wall_s,
        "load_average": run.load_average,
    }


def _max_micro_batch_tokens(run: TrainingRun) -> int:
    """Tokens of the largest micro-batch, padding included where the run pads."""
    is_packed = "--odb" in run.command
    return max(
        sum(lengths) if is_packed else len(lengths) * max(lengths, default=0)
        for replica in run.steps
        for step in replica
        for lengths in step.lengths
    )


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file")
    add("--repeats", type=whole(1), default=3, help="runs of each variant (default 3)")
    add("--samples", type=whole(1), default=640, help="samples of a run, rounded up to whole steps")
    add("--token-budget", type=whole(1), help="tokens of a micro-batch; default twice the context")
    add("--global-batch-size", type=whole(1), default=32, help="rounded to the micro-batch sizes")
    add("--dp", type=whole(1), default=2, help="data-parallel replicas")
    add("--quick", action="store_true", help="tiny model, few steps, one repeat: for the tests")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.samples = 1, 64
    return options


if __name__ == "__main__":
    sys.exit(main())
