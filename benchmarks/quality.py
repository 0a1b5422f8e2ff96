"""Does the composition of batches change what is learned? Validation loss and gradient variance.

    python benchmarks/quality.py --json quality.json

Real `pretrain()` runs of one tiny GPT on the same data, sample count and learning-rate schedule:
padded baseline, `--odb-policy samples` and `cost`, once per seed (of model and data order), each
with an exact evaluation of all validation samples at the end. Differences are taken within a seed.
Then the variance of a step's gradient at fixed weights (`gradient_variance`).
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from chat_data import ChatData, MissingDataError, prepare
from flags import data_name, output_file, whole
from gradient_variance import Setting, measure_gradients
from intervals import Interval, difference_interval
from training_runs import Launch, ModelSize, TrainingRun, data_flags, run_training, write_json

MODEL = ModelSize(num_layers=2, hidden=64, num_heads=4, ffn_hidden=176, seq_length=512)
VARIANTS = {
    "padded": ["--micro-batch-size", "2"],
    "samples": shlex.split("--micro-batch-size 1 --odb --odb-policy samples"),
    "cost": shlex.split("--micro-batch-size 1 --odb --odb-policy cost"),
}
PAIRS = {
    "samples_minus_padded": ("samples", "padded"),
    "cost_minus_padded": ("cost", "padded"),
    "cost_minus_samples": ("cost", "samples"),
}
TRAIN_FLAGS = shlex.split(
    "--odb-overlong truncate --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 "
    "--full-validation --eval-iters 1"
)
_FINAL_LOSS = re.compile(r"validation loss at .*? on validation set \| lm loss value: (\S+) \|")


def main() -> int:
    """Run, compare, report; return the exit code: 1 if `cost` is worse beyond its interval."""
    options = _parse()
    try:
        data = prepare(options.data)
    except (MissingDataError, ValueError) as error:
        print(f"quality.py: error: {error}", file=sys.stderr)
        return 2
    runs = [
        {name: run_training(_launch(options, data, name, seed)) for name in VARIANTS}
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    losses = [{name: final_loss(run) for name, run in one.items()} for one in runs]
    differences = {
        pair: difference_interval([one[left] - one[right] for one in losses])
        for pair, (left, right) in PAIRS.items()
    }
    gradients = measure_gradients(
        Setting(
            path=str(data.path),
            tokenizer=str(data.tokenizer),
            context=MODEL.seq_length,
            num_samples=options.gradient_samples,
            batch=options.global_batch_size,
        )
    )
    write_json(
        options.json,
        {
            "validation_loss": losses,
            "difference": {pair: found.as_json() for pair, found in differences.items()},
            "gradient_variance": gradients,
            "first_loss": [{n: run.steps[0][0].loss for n, run in one.items()} for one in runs],
            "samples": [
                {n: sum(s.samples for s in run.steps[0]) for n, run in one.items()} for one in runs
            ],
            "steps": [{n: len(run.steps[0]) for n, run in one.items()} for one in runs],
            "setting": {
                **{name: str(value) for name, value in vars(options).items() if name != "json"},
                "model": asdict(MODEL),
                "train_flags": TRAIN_FLAGS,
                "command": list(runs[0]["cost"].command),
            },
        },
    )
    for pair, found in differences.items():
        print(f"validation loss, {pair}: {found.mean:+.5f}{_bounds(found)}", flush=True)
    for name, row in gradients["rows"].items():
        low, high = row["ratio"]["ci95"]
        print(
            f"gradient variance of {name} steps over that of random steps of the same sizes: "
            f"{row['ratio']['mean']:.3f} (95 % interval {low:.3f} to {high:.3f})",
            flush=True,
        )
    worst = [differences[pair].low for pair in ("cost_minus_padded", "cost_minus_samples")]
    return 1 if any(low is not None and low > 0 for low in worst) else 0


def final_loss(run: TrainingRun) -> float:
    """Return the last validation loss a run printed.

    Raises:
        ValueError: it printed none.
    """
    found = _FINAL_LOSS.findall(run.output)
    if not found:
        raise ValueError(
            f"the run {run.name} printed no validation loss: is --eval-iters or the validation "
            "split 0?"
        )
    return float(found[-1])


def _launch(options: argparse.Namespace, data: ChatData, name: str, seed: int) -> Launch:
    flags = [*MODEL.flags(), *data_flags(data.path, data.tokenizer, split="90,10,0")]
    flags += [*TRAIN_FLAGS, "--seed", str(seed), "--train-samples", str(options.samples)]
    flags += ["--global-batch-size", str(options.global_batch_size), *VARIANTS[name]]
    if name != "padded":
        flags += ["--odb-token-budget", str(2 * MODEL.seq_length)]
    return Launch(name=f"{name}, seed {seed}", flags=flags, num_replicas=options.dp)


def _bounds(found: Interval) -> str:
    if found.low is None or found.high is None:
        return " (one seed: no interval)"
    return f" (95 % interval {found.low:+.5f} to {found.high:+.5f})"


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=whole(1), default=5, help="paired repeats")
    parser.add_argument("--first-seed", type=whole(1), default=1)
    parser.add_argument(
        "--samples", type=whole(1), default=2048, help="training samples of each run"
    )
    parser.add_argument("--global-batch-size", type=whole(1), default=32)
    parser.add_argument("--dp", type=whole(1), default=2, help="data-parallel replicas")
    parser.add_argument(
        "--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file"
    )
    parser.add_argument(
        "--gradient-samples",
        type=whole(1),
        default=2048,
        help="samples whose gradients are compared",
    )
    parser.add_argument("--json", type=output_file, help="write the result here")
    options = parser.parse_args(arguments)
    if options.global_batch_size % options.dp:
        parser.error(
            f"--global-batch-size {options.global_batch_size} is no multiple of the {options.dp} "
            "replicas (--dp): Megatron refuses it"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
