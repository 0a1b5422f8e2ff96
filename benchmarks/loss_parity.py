"""Step-by-step comparison of packed training (`--odb`) with the padded baseline.

Real `pretrain()` runs of one tiny GPT in fp32 without dropout, on the same seed and data: the
padded baseline, then ODB at two token budgets. Must not average anything over steps.

    python benchmarks/loss_parity.py --steps 50 --dp 2 --json build/bench/loss_parity.json
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence

from chat_data import MissingDataError, prepare
from flags import data_name, output_file, whole
from training_runs import Launch, ModelSize, TrainingRun, data_flags, run_training, write_json

from odb_megatron.report.steps import StepRecord

MAX_LOSS_DIFF = 1e-5
BASELINE = "padded"
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
    options = _parse()
    try:
        chosen = launches(options)
    except (MissingDataError, ValueError) as error:
        print(f"loss_parity.py: error: {error}", file=sys.stderr)
        return 2
    runs = [run_training(launch) for launch in chosen]
    result = compare(runs)
    result["setting"] = {
        name: str(value) for name, value in vars(options).items() if name != "json"
    } | {"model": str(MODEL), "train_flags": TRAIN_FLAGS}
    write_json(options.json, result)
    _print_result(result)
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
    variants = {BASELINE: ["--micro-batch-size", str(BASELINE_MICRO_BATCH_SIZE)]}
    for budget in (MODEL.seq_length, 3 * MODEL.seq_length):
        odb = ["--odb", "--odb-token-budget", str(budget)]
        variants[f"odb_budget_{budget}"] = [*odb, "--micro-batch-size", "1"]
    return [
        Launch(name=name, flags=[*shared, *flags], num_replicas=options.dp)
        for name, flags in variants.items()
    ]


def compare(runs: Sequence[TrainingRun]) -> dict[str, object]:
    """Compare every run with the first, step by step."""
    baseline, *packed = runs
    first = baseline.steps[0]
    return {
        "steps": min(len(run.steps[0]) for run in runs),
        "max_abs_loss_diff": _largest_difference(runs, lambda step: step.loss),
        "max_abs_grad_norm_diff": _largest_difference(runs, lambda step: step.grad_norm),
        "all_finite": all(
            value is not None and math.isfinite(value)
            for run in runs
            for step in run.steps[0]
            for value in (step.loss, step.grad_norm)
        ),
        "same_samples": all(_ids(run) == _ids(baseline) for run in packed),
        "consumed_samples_equal": _are_equal(runs, lambda step: step.consumed_samples),
        "learning_rate_equal": _are_equal(runs, lambda step: step.learning_rate),
        "m_values": sorted({step.num_micro_batches for run in packed for step in run.steps[0]}),
        "idle_microbatches": sum(step.idle for run in packed for step in run.steps[0]),
        "samples_left_out": sum(step.left_out for step in first),
        "first_loss": first[0].loss if first else None,
        "last_loss": first[-1].loss if first else None,
        "runs": [_run_details(run) for run in runs],
    }


def find_problems(result: dict[str, object], *, num_steps: int) -> list[str]:
    """What makes the comparison fail, in words."""
    problems = []
    loss_diff = result["max_abs_loss_diff"]
    assert isinstance(loss_diff, float)
    if not loss_diff < MAX_LOSS_DIFF:
        problems.append(f"losses differ by up to {loss_diff:.3g}; the limit is {MAX_LOSS_DIFF:g}")
    if result["steps"] != num_steps:
        problems.append(f"a run logged {result['steps']} steps; {num_steps} were asked for")
    messages = {
        "all_finite": "a loss or gradient norm is missing, infinite or NaN",
        "same_samples": "the runs trained different samples in some step",
        "consumed_samples_equal": "consumed samples differ in some step",
        "learning_rate_equal": "learning rates differ in some step",
    }
    return problems + [message for name, message in messages.items() if not result[name]]


def _largest_difference(
    runs: Sequence[TrainingRun], value: Callable[[StepRecord], float | None]
) -> float:
    """Largest absolute difference from the first run; NaN where a value is missing or NaN."""
    differences = []
    for run in runs[1:]:
        for step, expected in zip(run.steps[0], runs[0].steps[0], strict=False):
            one, other = value(step), value(expected)
            differences.append(math.nan if one is None or other is None else abs(one - other))
    if not differences or any(math.isnan(difference) for difference in differences):
        return math.nan
    return max(differences)


def _are_equal(
    runs: Sequence[TrainingRun], value: Callable[[StepRecord], int | float | None]
) -> bool:
    """Whether all runs have the same value in each step."""
    return len({tuple(value(step) for step in run.steps[0]) for run in runs}) == 1


def _ids(run: TrainingRun) -> list[list[str]]:
    """Sample ids of each step, over all replicas, sorted."""
    return [
        sorted(id_ for step in replicas for micro_batch in step.ids for id_ in micro_batch)
        for replicas in zip(*run.steps, strict=True)
    ]


def _run_details(run: TrainingRun) -> dict[str, object]:
    steps = run.steps[0]
    return {
        "name": run.name,
        "command": list(run.command),
        "wall_s": round(run.wall_s, 1),
        "idle": sum(step.idle for step in steps),
        "moved": sum(step.moved for step in steps),
        "tokens": sum(step.tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "m": [step.num_micro_batches for step in steps],
        "loss": [step.loss for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        "learning_rate": [step.learning_rate for step in steps],
        "consumed_samples": [step.consumed_samples for step in steps],
    }


def _print_result(result: dict[str, object]) -> None:
    for name, value in result.items():
        if name not in ("runs", "setting"):
            print(f"{name}: {value}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=whole(1), default=50, help="optimizer steps of each run")
    parser.add_argument("--dp", type=whole(1), default=2, help="data-parallel replicas")
    parser.add_argument("--seed", type=whole(1), default=50, help="of model and data order")
    parser.add_argument(
        "--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file"
    )
    parser.add_argument(
        "--loss-per", choices=["sample", "token"], help="--odb-loss-per, in all runs"
    )
    parser.add_argument("--json", type=output_file, help="write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
