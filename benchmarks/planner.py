"""Cost of planning on one core: microseconds per sample and per step of one replica.

    python benchmarks/planner.py --json planner.json

One real planner (policy `cost`, online assignment) beside made-up peers: their records are copies
of its own. Timed is all that one replica does for a step: drawing, observing, both records, reading
the gathered bytes of all replicas (one buffer), selecting, packing, committing. Lengths are
lognormal, mean 500, coefficient of variation 1, at most 8192; budget 8192; 131 samples per replica
and step (fewer in smaller windows).
Times are processor time of the one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from flags import output_file, whole

from odb_megatron.plan.config import MAX_WINDOW, PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import BalanceScope, PolicyName
from odb_megatron.plan.records import RECORD_BYTES, PlanRecord, RecordTable, WindowRecord

BUDGET = 8192
SHARE = 131  # samples per replica and step, as 8 micro-batches hold; at most the window
WINDOWS = (128, 256, 1024, 4096, 16384, 65536)
REPLICAS = (1, 8, 64, 1024, 8192)
WARM_UP = 5


def main() -> None:
    """Measure every combination asked for and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=output_file, required=True, metavar="OUT")
    parser.add_argument("--windows", type=whole(1, MAX_WINDOW), nargs="+", default=WINDOWS)
    parser.add_argument("--replicas", type=whole(1), nargs="+", default=REPLICAS)
    parser.add_argument("--steps", type=whole(1), default=40, help="steps timed per row")
    parser.add_argument("--balance", choices=[scope.value for scope in BalanceScope])
    args = parser.parse_args()
    scope = BalanceScope(args.balance or BalanceScope.STEP.value)
    rows = []
    for window in args.windows:
        for replicas in args.replicas:
            row = measure(window=window, replicas=replicas, steps=args.steps, scope=scope)
            rows.append(row)
            print(
                f"window {window:6d}  replicas {replicas:5d}  {row['us_per_sample']:6.2f} µs per "
                f"sample  {row['us_per_step']:8.1f} µs per step",
                flush=True,
            )
    args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def measure(*, window: int, replicas: int, steps: int, scope: BalanceScope) -> dict[str, Any]:
    """Time `steps` steps; return a row of medians."""
    share = min(SHARE, window)
    config = PlanConfig(
        policy=PolicyName.COST,
        total=replicas * (2 * window + share * (steps + WARM_UP + 20)),
        global_batch_size=share * replicas,
        num_replicas=replicas,
        token_budget=BUDGET,
        window=window,
        balance=scope,
        cost=CostModel.from_ratios(quadratic=0.3 / 0.7 / 500, fixed_tokens=0.05 * BUDGET),
    )
    planner = ReplicaPlanner(config, replica=0)
    lengths = _lengths()
    _observe(planner, lengths)  # the first window is filled once per run
    per_step, per_sample = [], []
    for step in range(WARM_UP + steps):
        started = time.thread_time()
        _observe(planner, lengths)
        record = planner.window_record().to_bytes()
        spent = time.thread_time() - started
        gathered = record * replicas

        started = time.thread_time()
        planner.set_target(RecordTable(WindowRecord, gathered))
        _observe(planner, lengths)
        record = planner.plan_record().to_bytes()
        spent += time.thread_time() - started
        gathered = record * replicas

        started = time.thread_time()
        plan = planner.commit(RecordTable(PlanRecord, gathered))
        spent += time.thread_time() - started
        if step >= WARM_UP:
            per_step.append(spent)
            per_sample.append(spent / max(1, sum(map(len, plan.micro_batches))))
    return {
        "window": window,
        "replicas": replicas,
        "us_per_sample": round(statistics.median(per_sample) * 1e6, 3),
        "us_per_step": round(statistics.median(per_step) * 1e6, 1),
        "record_bytes": RECORD_BYTES,
    }


def _observe(planner: ReplicaPlanner, lengths: Iterator[int]) -> None:
    while positions := planner.draw():
        for position in positions:
            length = next(lengths)
            planner.observe(position, num_tokens=length, num_loss_tokens=length)


def _lengths() -> Iterator[int]:
    sigma2 = np.log(2.0)
    random = np.random.RandomState(0)
    while True:
        drawn = random.lognormal(np.log(500) - sigma2 / 2, np.sqrt(sigma2), size=4096)
        yield from np.clip(np.round(drawn), 1, BUDGET).astype(int).tolist()


if __name__ == "__main__":
    main()
