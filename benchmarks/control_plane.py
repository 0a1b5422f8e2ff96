"""Cost of a step's gathers between source ranks: real gloo, 4 to 64 processes, several blocks.

    python benchmarks/control_plane.py --json control_plane.json

Per number of source ranks and largest block: milliseconds of a round of `gather` (a header and 16
bytes for each of 32 samples), of `gather_blocks` and of an `exchange` in which each replica sends
4 KB to the next one of its block; processor time of one rank for all three; and the sockets that a
source group takes. All processes share this machine's cores, so the times here grow with the work
of all of them; on a cluster each source rank has a host of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import output_file, whole

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.plan.record import HEADER, ROW

RANKS = (4, 16, 64)
BLOCKS = (2, 8, 64)
ROUNDS = 100
WARM_UP = 10
SAMPLES = 32  # of a replica, in a round
SUMMARY_BYTES = 64
SENT_BYTES = 4096


def main() -> None:
    """Measure every number of source ranks asked for and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=output_file, required=True, metavar="OUT")
    parser.add_argument("--ranks", type=whole(2), nargs="+", default=RANKS)
    parser.add_argument("--blocks", type=whole(2), nargs="+", default=BLOCKS)
    parser.add_argument("--rounds", type=whole(1), default=ROUNDS, help="rounds timed per row")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for block in sorted({min(block, ranks) for block in args.blocks}):
            rows.append(measure(ranks, block=block, rounds=args.rounds))
            row = rows[-1]
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
    record_bytes = HEADER.itemsize + SAMPLES * ROW.itemsize
    result = {"record_bytes": record_bytes, "cores": os.cpu_count(), "rows": rows}
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(ranks: int, *, block: int, rounds: int) -> dict[str, Any]:
    """Return a row: medians over the ranks, and the most sockets that one has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["odb_megatron.comm.groups"])  # torch is imported once
    results: Queue[dict[str, float]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_source_rank, args=(results, store, rank, ranks, block, rounds), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    row: dict[str, Any] = {"source_ranks": ranks, "block": block}
    for name in found[0]:
        row[name] = round(statistics.median(one[name] for one in found), 3)
    return {**row, "sockets": int(max(one["sockets"] for one in found))}


def _source_rank(
    results: Queue[dict[str, float]], store: str, rank: int, ranks: int, block: int, rounds: int
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    before = _num_sockets()
    group = SourceGroup(range(ranks), name="bench", timeout_s=300, block=block)
    group.gather_all(b"connect")
    sockets = _num_sockets() - before
    record = bytes(HEADER.itemsize + SAMPLES * ROW.itemsize)
    first, size = group.block.start, len(group.block)
    following, preceding = (first + (rank - first + by) % size for by in (1, -1))
    took = {"gather_ms": 0.0, "gather_blocks_ms": 0.0, "exchange_ms": 0.0}
    spent = 0.0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            took, spent = dict.fromkeys(took, 0.0), time.process_time()
        at = time.perf_counter()
        group.gather(record)
        took["gather_ms"] -= at - (at := time.perf_counter())
        group.gather_blocks(bytes(SUMMARY_BYTES))
        took["gather_blocks_ms"] -= at - (at := time.perf_counter())
        sends, receives = {following: bytes(SENT_BYTES)}, {preceding: SENT_BYTES}
        group.exchange(number, sends, receives)
        took["exchange_ms"] -= at - time.perf_counter()
    spent = time.process_time() - spent
    results.put(
        {name: 1e3 * seconds / rounds for name, seconds in {**took, "cpu_ms": spent}.items()}
        | {"sockets": sockets}
    )


def _num_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # closed meanwhile
            continue
    return found


if __name__ == "__main__":
    main()
