"""Cost of planning on one core: microseconds per sample of the block, and per step.

    python benchmarks/planner.py --json build/bench/planner.json

Timed is what every replica does for a step: the gathered records are read, blocks are evened out
where there are several, and the block's table is planned. Lengths are lognormal, mean 500, at most
8192; budget 8192; 131 samples per replica and step, as 8 micro-batches hold. Times are processor
time of the one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from common import parser_of, whole, write_json

from odb_megatron.plan.blocks import MAX_OFFERS, blocks_of, even_blocks, offered
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.record import HEADER, ROW, Sync
from odb_megatron.plan.step_planner import plan_step
from odb_megatron.report.lengths import read_lengths

BUDGET = 8192
SHARE = 131
REPLICAS = (1, 8, 64, 1024)
WARM_UP = 2


def main() -> None:
    """Measure every combination asked for and write the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=whole(1), nargs="+", default=REPLICAS)
    parser.add_argument("--cv", type=float, default=1.0, help="coefficient of variation")
    parser.add_argument("--steps", type=whole(1), default=20, help="steps timed per row")
    args = parser.parse_args()
    rows = []
    for sync in Sync:
        for replicas in args.replicas:
            row = measure(replicas=replicas, sync=sync, cv=args.cv, steps=args.steps)
            rows.append(row)
            print(
                f"sync {sync.value:10s} replicas {replicas:5d}  {row['us_per_sample']:6.2f} µs per "
                f"sample of the block  {row['us_per_step']:9.1f} µs per step",
                flush=True,
            )
    steps = {row["replicas"]: row["us_per_step"] for row in rows if row["sync"] == "step"}
    whole_block, many = steps.get(64), steps.get(1024)
    over = many / whole_block if whole_block and many else None
    write_json(args.json, {"rows": rows, "over_one_block": over})


def measure(*, replicas: int, sync: Sync, cv: float, steps: int) -> dict[str, Any]:
    """Time `steps` steps; return a row of medians."""
    blocks = blocks_of(replicas)
    cost = CostModel.from_ratios(quadratic=0.3 / 0.7 / 500, fixed_tokens=0.05 * BUDGET)
    block = blocks[0]
    num = SHARE * len(block)
    spent = []
    for step in range(WARM_UP + steps):
        lengths = read_lengths(f"lognormal:mean=500,cv={cv},max={BUDGET},n={num},seed={step}")
        sums = [int(cost.samples(own, own * 0).sum()) for own in (lengths,) * len(blocks)]
        records = [_record(part) for part in np.split(lengths, len(block))]
        started = time.thread_time()
        read = np.concatenate([np.frombuffer(one, ROW, SHARE, HEADER.itemsize) for one in records])
        table = read["tokens"].astype(np.int64)
        if len(blocks) > 1:
            costs = cost.samples(table, table * 0)
            offers = costs[offered(costs)].tolist()[:MAX_OFFERS]
            even_blocks(sums, [len(one) for one in blocks], [offers] * len(blocks))
        plan_step(
            table,
            num_replicas=len(block),
            token_budget=BUDGET,
            sync=sync.value,
            cost=cost,
            owner=np.repeat(np.arange(len(block)), SHARE),
        )
        if step >= WARM_UP:
            spent.append(time.thread_time() - started)
    middle = statistics.median(spent) * 1e6
    return {
        "sync": sync.value,
        "replicas": replicas,
        "us_per_sample": round(middle / num, 3),
        "us_per_step": round(middle, 1),
        "header_bytes": HEADER.itemsize,
        "bytes_per_sample": ROW.itemsize,
    }


def _record(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    """Return a replica's record of a step."""
    rows = np.zeros(len(lengths), dtype=ROW)
    rows["tokens"] = lengths
    return np.zeros((), dtype=HEADER).tobytes() + rows.tobytes()


if __name__ == "__main__":
    main()
