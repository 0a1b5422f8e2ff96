"""What `odb-megatron inspect` predicts, against what `make train` then measures, on the CPU.

Real runs of `examples/train_chat.py`'s training (its data and flags, fewer samples), each in
processes of its own: ODB, and the best padded baseline whose worst case fits the budget. The
prediction is what the command prints for the same flags.

    python benchmarks/inspect_against_training.py --dp 2 1 --json build/bench/inspect.json
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from chat_data import ChatData, MissingDataError, prepare
from flags import data_name, output_file, whole
from training_runs import ROOT, Launch, TrainingRun, data_flags, run_training, write_json

from odb_megatron.report.inspect import EXAMPLE_FLAGS, inspect, parse

SPLIT = "98,1,1"
NUM_WARM_UP_STEPS = 2
LIMIT = 0.05
METHODS = ("odb", "standard-safe")


def main() -> int:
    """Predict, train, compare; return the exit code."""
    options = _parse()
    try:
        data = prepare(options.data)
    except MissingDataError as error:
        print(f"skipped: {error}", flush=True)
        write_json(options.json, {"skipped": str(error)})
        return 0
    results = {}
    for num_replicas in options.dp:
        print(f"DP {num_replicas}", flush=True)
        predicted = predict(data, num_replicas=num_replicas, num_samples=options.samples)
        runs = {
            name: run_training(
                Launch(
                    name=name,
                    flags=train_flags(
                        name,
                        data,
                        num_samples=options.samples,
                        size=fixed_size(predicted, num_replicas=num_replicas),
                    ),
                    num_replicas=num_replicas,
                    timeout_s=3600.0,
                )
            )
            for name in options.methods
        }
        own = compare(predicted, runs)
        _print(own)
        results[f"dp{num_replicas}"] = own
        write_json(  # after each, so that an interrupted benchmark leaves what it has
            options.json,
            {
                "results": results,
                "data": options.data,
                "num_samples": options.samples,
                "cores": os.cpu_count(),
                "machine": platform.platform(),
            },
        )
    worst = max(row["error"] for one in results.values() for row in one["figures"])
    print(f"largest error of padding and M: {worst:.2%} (limit {LIMIT:.0%})", flush=True)
    return 0 if worst <= LIMIT else 1


def predict(data: ChatData, *, num_replicas: int, num_samples: int) -> dict[str, Any]:
    """Return the command's report for the training's flags."""
    flags = [str(data.path), "--tokenizer", str(data.tokenizer), "--split", SPLIT, "--no-advice"]
    for name in ("seq_length", "token_budget", "global_batch_size", "overlong", "model_shape"):
        flags += [f"--{name.replace('_', '-')}", str(EXAMPLE_FLAGS[name])]
    flags += ["--vocab-divisible-by", str(EXAMPLE_FLAGS["vocab_divisible_by"])]
    flags += ["--dp", str(num_replicas), "--train-samples", str(num_samples)]
    flags += ["--max-samples", str(num_samples)]  # the first of the order: those trained on
    return inspect(parse(flags)).values


def fixed_size(predicted: Mapping[str, Any], *, num_replicas: int) -> int:
    """Return the samples per micro-batch of the fixed batch that was predicted to be the best."""
    own = predicted["prediction"]["methods"]["standard-safe"]
    size: int = round(own["samples_per_step"] / (num_replicas * own["mean_M"]))
    return size


def train_flags(method: str, data: ChatData, *, num_samples: int, size: int) -> list[str]:
    """Return the flags of `examples/train_chat.py` for a method, or a fixed batch of `size`."""
    example = runpy.run_path(str(ROOT / "examples" / "train_chat.py"))
    flags = list(example["TRAIN_FLAGS"])
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
        steps = run.steps[0]
        tokens = sum(step.tokens for step in steps)
        computed = sum(step.computed_tokens for step in steps)
        mean = sum(step.num_micro_batches for step in steps) / len(steps)
        own = methods[name]
        if name == "standard-safe":
            figures.append(_row(name, "padding", own["padding_fraction"], 1 - tokens / computed))
        else:
            context = int(str(EXAMPLE_FLAGS["seq_length"])) * steps[-1].consumed_samples
            avoided = predicted["padding"]["avoided"]
            figures.append(_row(name, "padding avoided", avoided, 1 - computed / context))
            figures.append(
                _row(name, "padding added", own["padding_fraction"], 1 - tokens / computed)
            )
        figures.append(_row(name, "M", own["mean_M"], mean))
        figures.append(_row(name, "steps", own["steps_per_epoch"], len(steps)))
        timed = list(zip(*run.steps, strict=True))[NUM_WARM_UP_STEPS:]
        seconds = sum(max(step.step_s for step in replicas) for replicas in timed)
        rates[name] = sum(replicas[0].tokens for replicas in timed) / seconds
    speedups = {
        f"{name} over {other}": {
            "predicted": methods[name]["rate"] / methods[other]["rate"],
            "measured": rates[name] / rates[other],
        }
        for name in rates
        for other in rates
        if name != other and other == "standard-safe"
    }
    return {
        "figures": figures,
        "speedups": speedups,
        "tokens_per_s": rates,
        "load_average": {name: run.load_average for name, run in runs.items()},
        "commands": {name: list(run.command) for name, run in runs.items()},
    }


def _row(method: str, what: str, predicted: float, measured: float) -> dict[str, Any]:
    base = max(abs(measured), 1e-3)
    return {
        "method": method,
        "figure": what,
        "predicted": predicted,
        "measured": measured,
        "error": abs(predicted - measured) / base,
    }


def _print(one: Mapping[str, Any]) -> None:
    print("  method, figure, predicted, measured, error")
    for row in one["figures"]:
        print(
            f"  {row['method']:14s} {row['figure']:16s} {row['predicted']:9.4f} "
            f"{row['measured']:9.4f} {row['error']:7.2%}"
        )
    for pair, speed in one["speedups"].items():
        print(f"  {pair}: predicted {speed['predicted']:.2f}, measured {speed['measured']:.2f}")
    load = ", ".join(f"{name} {value:.1f}" for name, value in one["load_average"].items())
    print(f"  load average of the machine before each run: {load}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file")
    add("--dp", type=whole(1), nargs="+", default=[2, 1], help="data-parallel sizes (default 2 1)")
    add("--samples", type=whole(128), default=256, help="of each run (default 256: 8 steps)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default all")
    add("--json", type=output_file, help="write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
