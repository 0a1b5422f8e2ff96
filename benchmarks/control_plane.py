"""Cost of a step's gathers between source ranks: real gloo, 4 to 64 processes, several blocks.

    python benchmarks/control_plane.py --json control_plane.json

Per number of source ranks and largest block: milliseconds of a round of `gather` (a header and 16
bytes for each of 32 samples), of `gather_blocks` and of an `exchange` in which each replica sends
4 KB to the next one of its block; processor time of one rank for all three; and the sockets that a
source group takes. All processes share this machine's cores, so the times here grow with the work
of all of them; on a cluster each source rank has a host of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
from common import parser_of, whole, write_json

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.plan.record import HEADER, ROW
from odb_megatron.testing.gloo import run_replicas

WARM_UP = 10
RECORD_BYTES = HEADER.itemsize + 32 * ROW.itemsize  # of a replica with 32 samples
SUMMARY_BYTES, SENT_BYTES = 64, 4096


def main() -> None:
    """Measure every number of source ranks asked for and write the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=whole(2), nargs="+", default=(4, 16, 64))
    parser.add_argument("--blocks", type=whole(2), nargs="+", default=(2, 8, 64))
    parser.add_argument("--rounds", type=whole(1), default=100, help="rounds timed per row")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for block in sorted({min(block, ranks) for block in args.blocks}):
            found = run_replicas(measure, ranks, ranks, block, args.rounds, timeout_s=600.0)
            row: dict[str, Any] = {"source_ranks": ranks, "block": block}
            for name in found[0]:
                row[name] = round(statistics.median(one[name] for one in found), 3)
            rows.append({**row, "sockets": int(max(one["sockets"] for one in found))})
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    write_json(args.json, {"record_bytes": RECORD_BYTES, "cores": os.cpu_count(), "rows": rows})


def measure(rank: int, ranks: int, block: int, rounds: int) -> dict[str, float]:
    """Return one source rank's figures, per round."""
    before = len(psutil.Process().net_connections())
    group = SourceGroup(range(ranks), name="bench", timeout_s=300, block=block)
    group.gather_all(b"connect")
    sockets = len(psutil.Process().net_connections()) - before
    first, size = group.block.start, len(group.block)
    following, preceding = (first + (rank - first + by) % size for by in (1, -1))
    calls: dict[str, Callable[[int], Any]] = {
        "gather_ms": lambda _: group.gather(bytes(RECORD_BYTES)),
        "gather_blocks_ms": lambda _: group.gather_blocks(bytes(SUMMARY_BYTES)),
        "exchange_ms": lambda number: group.exchange(
            number, {following: bytes(SENT_BYTES)}, {preceding: SENT_BYTES}
        ),
    }
    took, spent = dict.fromkeys(calls, 0.0), 0.0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            took, spent = dict.fromkeys(calls, 0.0), time.process_time()
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            took[name] += time.perf_counter() - began
    took["cpu_ms"] = time.process_time() - spent
    return {name: 1e3 * seconds / rounds for name, seconds in took.items()} | {"sockets": sockets}


if __name__ == "__main__":
    main()
