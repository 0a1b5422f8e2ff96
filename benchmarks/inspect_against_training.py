"""What `odb-megatron inspect` predicts, against what `make train` then measures, on the CPU.

Real runs of `examples/train_chat.py`'s training (its data and flags, fewer samples), each in
processes of its own: ODB, and the best padded baseline whose worst case fits the budget. The
prediction is what the command prints for the same flags.

    python benchmarks/inspect_against_training.py --dp 2 1 --json build/bench/inspect.json
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from common import (
    ChatData,
    Launch,
    MissingDataError,
    TrainingRun,
    data_flags,
    data_name,
    example,
    parser_of,
    prepare,
    run_training,
    timed_rate,
    whole,
    write_json,
)

from odb_megatron.report.inspect import EXAMPLE_FLAGS, inspect, parse

SPLIT = "98,1,1"
LIMIT = 0.05
METHODS = ("odb", "standard-safe")


def main() -> int:
    """Predict, train, compare; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file")
    add("--dp", type=whole(1), nargs="+", default=[2, 1], help="data-parallel sizes (default 2 1)")
    add("--samples", type=whole(128), default=256, help="of each run (default 256: 8 steps)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default all")
    options = parser.parse_args()
    try:
        data = prepare(options.data)
    except MissingDataError as error:
        print(f"skipped: {error}", flush=True)
        write_json(options.json, {"skipped": str(error)})
        return 0
    results: dict[str, Any] = {}
    for num_replicas in options.dp:
        print(f"DP {num_replicas}", flush=True)
        predicted = predict(data, num_replicas=num_replicas, num_samples=options.samples)
        fixed = predicted["prediction"]["methods"]["standard-safe"]
        size = round(fixed["samples_per_step"] / (num_replicas * fixed["mean_M"]))
        runs = {}
        for name in options.methods:
            flags = train_flags(name, data, num_samples=options.samples, size=size)
            launch = Launch(name=name, flags=flags, num_replicas=num_replicas, timeout_s=3600.0)
            runs[name] = run_training(launch)
        own = results[f"dp{num_replicas}"] = compare(predicted, runs)
        for row in own["figures"]:
            print(
                f"  {row['method']:14s} {row['figure']:16s} predicted {row['predicted']:9.4f} "
                f"measured {row['measured']:9.4f} error {row['error']:7.2%}"
            )
        for pair, speed in own["speedups"].items():
            print(f"  {pair}: {', '.join(f'{what} {n:.2f}' for what, n in speed.items())}")
        about = {"data": options.data, "num_samples": options.samples, "cores": os.cpu_count()}
        # After each, so that an interrupted benchmark leaves what it has.
        values = {"results": results, **about, "machine": platform.platform()}
        write_json(options.json, values)
    worst = max(row["error"] for one in results.values() for row in one["figures"])
    print(f"largest error of padding and M: {worst:.2%} (limit {LIMIT:.0%})", flush=True)
    return 0 if worst <= LIMIT else 1


def predict(data: ChatData, *, num_replicas: int, num_samples: int) -> dict[str, Any]:
    """Return the command's report for the training's flags."""
    flags = [str(data.path), "--tokenizer", str(data.tokenizer), "--split", SPLIT, "--no-advice"]
    names = ("seq_length", "token_budget", "global_batch_size", "overlong", "model_shape")
    for name in (*names, "vocab_divisible_by"):
        flags += [f"--{name.replace('_', '-')}", str(EXAMPLE_FLAGS[name])]
    flags += ["--dp", str(num_replicas), "--train-samples", str(num_samples)]
    flags += ["--max-samples", str(num_samples)]  # the first of the order: those trained on
    return inspect(parse(flags)).values


def train_flags(method: str, data: ChatData, *, num_samples: int, size: int) -> list[str]:
    """Return the flags of `examples/train_chat.py` for a method, or a fixed batch of `size`."""
    flags = list(example()["TRAIN_FLAGS"])
    flags += [*data_flags(data.path, data.tokenizer, split=SPLIT), "--eval-iters", "0"]
    flags += ["--train-samples", str(num_samples)]
    if method == "standard-safe":
        at = flags.index("--odb-token-budget")
        flags = [flag for flag in [*flags[:at], *flags[at + 2 :]] if flag != "--odb"]
        return [*flags, "--micro-batch-size", str(size)]
    return flags


def compare(predicted: Mapping[str, Any], runs: Mapping[str, TrainingRun]) -> dict[str, Any]:
    """Return predicted beside measured: padding, micro-batches per step, and speed-up."""
    figures, rates = [], {}
    methods = predicted["prediction"]["methods"]
    for name, run in runs.items():
        steps, own = run.steps[0], methods[name]
        computed = sum(step.computed_tokens for step in steps)
        padding = 1 - sum(step.tokens for step in steps) / computed
        mean = sum(step.num_micro_batches for step in steps) / len(steps)
        pairs = {
            "padding": (own["padding_fraction"], padding),
            "M": (own["mean_M"], mean),
            "steps": (own["steps_per_epoch"], len(steps)),
        }
        if name != "standard-safe":
            context = predicted["setting"]["seq_length"] * steps[-1].consumed_samples
            pairs["padding avoided"] = (predicted["padding"]["avoided"], 1 - computed / context)
        for figure, (expected, measured) in pairs.items():
            values = {"method": name, "figure": figure, "predicted": expected}
            error = abs(expected - measured) / max(abs(measured), 1e-3)
            figures.append({**values, "measured": measured, "error": error})
        rates[name] = timed_rate(run)[0]
    base = "standard-safe"
    return {
        "figures": figures,
        "speedups": {
            f"{name} over {base}": {
                "predicted": methods[name]["rate"] / methods[base]["rate"],
                "measured": rates[name] / rates[base],
            }
            for name in rates
            if name != base and base in rates
        },
        "tokens_per_s": rates,
        "load_average": {name: run.load_average for name, run in runs.items()},
        "commands": {name: list(run.command) for name, run in runs.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
