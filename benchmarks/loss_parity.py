"""Step-by-step comparison of packed training (`--odb`) with the padded baseline.

Real `pretrain()` runs of one tiny GPT in fp32 without dropout, on the same seed and data: the
padded baseline, then ODB at two token budgets. Nothing is averaged over steps.

    python benchmarks/loss_parity.py --steps 50 --dp 2 --json build/bench/loss_parity.json
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    ROOT,
    MissingDataError,
    ModelSize,
    Steps,
    data_flags,
    data_name,
    parser_of,
    prepare,
    read_steps,
    run_batch,
    sample_ids,
    whole,
    write_json,
)

SCRIPT = ROOT / "benchmarks" / "parity_script.py"
MAX_LOSS_DIFF = 1e-5
MODEL = ModelSize(num_layers=2, hidden=64, num_heads=4, ffn_hidden=176, seq_length=256)

# Samples over the context are left out, in all runs: on chitchat that is one in three.
TRAIN_FLAGS = shlex.split(
    "--odb-overlong drop --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95"
)
SAMPLES_PER_REPLICA = 12
RUNS = {"padded": ["--micro-batch-size", "3"]}
for _budget in (MODEL.seq_length, 3 * MODEL.seq_length):
    _flags = f"--odb --odb-token-budget {_budget} --micro-batch-size 1"
    RUNS[f"odb_budget_{_budget}"] = _flags.split()


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
        data = prepare(options.data)
    except (MissingDataError, ValueError) as error:
        print(f"loss_parity.py: error: {error}", file=sys.stderr)
        return 2
    batch = SAMPLES_PER_REPLICA * options.dp
    shared = [*MODEL.flags(), *data_flags(data.path, data.tokenizer), *TRAIN_FLAGS]
    shared += ["--seed", str(options.seed), "--global-batch-size", str(batch)]
    shared += ["--train-samples", str(options.steps * batch)]
    shared += ["--odb-loss-per", options.loss_per] if options.loss_per else []
    with tempfile.TemporaryDirectory(prefix="odb-loss-") as folder:
        logs = {name: str(Path(folder) / name) for name in RUNS}
        flags = {name: [*shared, *own, "--odb-log-dir", logs[name]] for name, own in RUNS.items()}
        run_batch([*flags.values()], script=SCRIPT, num_processes=options.dp, timeout_s=1800.0)
        result = compare(
            {name: [read_steps(log, at) for at in range(options.dp)] for name, log in logs.items()}
        )
    for run in result["runs"]:
        run["command"] = flags[run["name"]]
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


def compare(runs: Mapping[str, Steps]) -> dict[str, Any]:
    """Compare every run with the first, step by step.

    Args:
        runs: step records, `[replica][step]`, by name.
    """
    num = min(len(steps[0]) for steps in runs.values())
    firsts = {name: steps[0][:num] for name, steps in runs.items()}
    names = ("loss", "grad_norm", "consumed_samples", "learning_rate")
    columns = {  # [run, step]; NaN where a value is missing
        name: np.array([[getattr(step, name) for step in one] for one in firsts.values()], float)
        for name in names
    }
    counts = ("idle", "moved", "tokens", "computed_tokens")
    details: list[dict[str, Any]] = [
        {
            "name": name,
            "m": [step.num_micro_batches for step in steps],
            **{key: values[at].tolist() for key, values in columns.items()},
            **{key: sum(getattr(step, key) for step in steps) for key in counts},
        }
        for at, (name, steps) in enumerate(firsts.items())
    ]
    base, *packed = details
    ids = [sample_ids(steps) for steps in runs.values()]
    found = {key: columns[key] for key in ("loss", "grad_norm")}
    equal = {f"{key}_equal": bool((columns[key] == columns[key][0]).all()) for key in names[2:]}
    return {
        "steps": num,
        **{f"max_abs_{key}_diff": float(abs(own - own[0]).max()) for key, own in found.items()},
        "all_finite": bool(np.isfinite([*found.values()]).all()),
        "same_samples": all(own == ids[0] for own in ids),
        **equal,
        "m_values": sorted({m for one in packed for m in one["m"]}),
        "idle_microbatches": sum(one["idle"] for one in packed),
        "samples_left_out": sum(step.left_out for step in next(iter(firsts.values()))),
        "first_loss": base["loss"][0],
        "last_loss": base["loss"][-1],
        "runs": details,
    }


def find_problems(result: dict[str, Any], *, num_steps: int) -> list[str]:
    """What makes the comparison fail, in words."""
    difference, steps = result["max_abs_loss_diff"], result["steps"]
    checks = {
        f"losses differ by up to {difference:.3g}; the limit is {MAX_LOSS_DIFF:g}": (
            difference < MAX_LOSS_DIFF
        ),
        f"a run logged {steps} steps; {num_steps} were asked for": steps == num_steps,
        "a loss or gradient norm is missing, infinite or NaN": result["all_finite"],
        "the runs trained different samples in some step": result["same_samples"],
        "consumed samples differ in some step": result["consumed_samples_equal"],
        "learning rates differ in some step": result["learning_rate_equal"],
    }
    return [text for text, holds in checks.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
