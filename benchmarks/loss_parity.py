"""Step-by-step comparison of packed training (`--odb`) with the padded baseline.

Real `pretrain()` runs of one tiny GPT in fp32 without dropout, on the same seed and data: the
padded baseline, then ODB at two token budgets. Nothing is averaged over steps.

    python benchmarks/loss_parity.py --steps 50 --dp 2 --json build/bench/loss_parity.json
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from common import (
    Launch,
    MissingDataError,
    ModelSize,
    TrainingRun,
    data_flags,
    data_name,
    parser_of,
    prepare,
    run_training,
    sample_ids,
    whole,
    write_json,
)

MAX_LOSS_DIFF = 1e-5
MODEL = ModelSize(num_layers=2, hidden=64, num_heads=4, ffn_hidden=176, seq_length=256)

# Samples over the context are left out, in all runs: on chitchat that is one in three.
TRAIN_FLAGS = shlex.split(
    "--odb-overlong drop --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95"
)
BASELINE_MICRO_BATCH_SIZE = 3
SAMPLES_PER_REPLICA = 12


def main() -> int:
    """Run, compare, report; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--steps", type=whole(1), default=50, help="optimizer steps of each run")
    add("--dp", type=whole(1), default=2, help="data-parallel replicas")
    add("--seed", type=whole(1), default=50, help="of model and data order")
    add("--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file")
    add("--loss-per", choices=["sample", "token"], help="--odb-loss-per, in all runs")
    options = parser.parse_args()
    try:
        chosen = launches(options)
    except (MissingDataError, ValueError) as error:
        print(f"loss_parity.py: error: {error}", file=sys.stderr)
        return 2
    result = compare([run_training(launch) for launch in chosen])
    setting = {name: str(value) for name, value in vars(options).items() if name != "json"}
    result["setting"] = setting | {"model": str(MODEL), "train_flags": TRAIN_FLAGS}
    write_json(options.json, result)
    for name, value in result.items():
        if name not in ("runs", "setting"):
            print(f"{name}: {value}", flush=True)
    problems = find_problems(result, num_steps=options.steps)
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


def launches(options: argparse.Namespace) -> list[Launch]:
    """The runs: the padded baseline, then ODB at each token budget."""
    data = prepare(options.data)
    batch = SAMPLES_PER_REPLICA * options.dp
    shared = [*MODEL.flags(), *data_flags(data.path, data.tokenizer), *TRAIN_FLAGS]
    shared += ["--seed", str(options.seed), "--global-batch-size", str(batch)]
    shared += ["--train-samples", str(options.steps * batch)]
    if options.loss_per is not None:
        shared += ["--odb-loss-per", options.loss_per]
    variants = {"padded": ["--micro-batch-size", str(BASELINE_MICRO_BATCH_SIZE)]}
    for budget in (MODEL.seq_length, 3 * MODEL.seq_length):
        odb = ["--odb", "--odb-token-budget", str(budget), "--micro-batch-size", "1"]
        variants[f"odb_budget_{budget}"] = odb
    return [
        Launch(name=name, flags=[*shared, *flags], num_replicas=options.dp)
        for name, flags in variants.items()
    ]


def compare(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Compare every run with the first, step by step."""
    firsts = [run.steps[0] for run in runs]
    columns = {
        name: [[getattr(step, name) for step in steps] for steps in firsts]
        for name in ("loss", "grad_norm", "consumed_samples", "learning_rate")
    }

    def largest(name: str) -> float:
        """Return the largest difference from the first run; NaN where a value is missing or NaN."""
        base, *others = columns[name]
        found = [
            math.nan if one is None or other is None else abs(one - other)
            for values in others
            for one, other in zip(values, base, strict=False)
        ]
        return math.nan if not found or any(map(math.isnan, found)) else max(found)

    ids = [sample_ids(run.steps) for run in runs]
    values = [value for name in ("loss", "grad_norm") for own in columns[name] for value in own]
    counts = ("num_micro_batches", "idle", "moved", "tokens", "computed_tokens")
    details = []
    for run, steps in zip(runs, firsts, strict=True):
        found = {name: [getattr(step, name) for step in steps] for name in (*columns, *counts)}
        sums = {name: sum(found.pop(name)) for name in counts[1:]}
        names = {"name": run.name, "command": list(run.command), "wall_s": round(run.wall_s, 1)}
        details.append({**names, **sums, "m": found.pop("num_micro_batches"), **found})
    return {
        "steps": min(map(len, firsts)),
        "max_abs_loss_diff": largest("loss"),
        "max_abs_grad_norm_diff": largest("grad_norm"),
        "all_finite": all(value is not None and math.isfinite(value) for value in values),
        "same_samples": all(own == ids[0] for own in ids),
        **{
            f"{name}_equal": all(own == columns[name][0] for own in columns[name])
            for name in ("consumed_samples", "learning_rate")
        },
        "m_values": sorted({m for one in details[1:] for m in one["m"]}),
        "idle_microbatches": sum(one["idle"] for one in details[1:]),
        "samples_left_out": sum(step.left_out for step in firsts[0]),
        "first_loss": columns["loss"][0][0] if firsts[0] else None,
        "last_loss": columns["loss"][0][-1] if firsts[0] else None,
        "runs": details,
    }


def find_problems(result: dict[str, Any], *, num_steps: int) -> list[str]:
    """What makes the comparison fail, in words."""
    problems = []
    difference = result["max_abs_loss_diff"]
    if not difference < MAX_LOSS_DIFF:
        problems.append(f"losses differ by up to {difference:.3g}; the limit is {MAX_LOSS_DIFF:g}")
    if result["steps"] != num_steps:
        problems.append(f"a run logged {result['steps']} steps; {num_steps} were asked for")
    messages = {
        "all_finite": "a loss or gradient norm is missing, infinite or NaN",
        "same_samples": "the runs trained different samples in some step",
        "consumed_samples_equal": "consumed samples differ in some step",
        "learning_rate_equal": "learning rates differ in some step",
    }
    return problems + [message for name, message in messages.items() if not result[name]]


if __name__ == "__main__":
    sys.exit(main())
