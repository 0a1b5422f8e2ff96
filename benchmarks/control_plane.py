"""Cost of an exchange of 256-byte records between leaders: real gloo, 4 to 64 processes.

    python benchmarks/control_plane.py --json control_plane.json

Per number of leaders and shape (one ring, or clusters as used above 128 leaders): latency of an
exchange, bytes that one leader sends (as the kernel counts them for its TCP sockets, gloo's own
headers and notices included), processor time of one leader, and the file descriptors that a
control group takes. All processes share this machine's cores, so the latency here grows with the
work of all of them; on a cluster each leader has a host of its own.

Extrapolated, model: `latency = hops * (busy + network) + bytes / bandwidth`. `hops` is the number
of messages that follow one another (ring: leaders - 1; clusters: the largest cluster - 1, the
number of clusters - 1, the depth of the broadcast tree); `busy` is the processor time per message
that is measured here; `network` (one-way time of a small message) and `bandwidth` are assumed, see
the flags. `bytes` are those of the records that the busiest leader sends.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flags import output_file, whole

from odb_megatron.comm.control import ControlGroup, cluster_size
from odb_megatron.plan.records import RECORD_BYTES

LEADERS = (4, 8, 16, 32, 64)
EXTRAPOLATED = (64, 128, 129, 1024, 8192)
WARM_UP = 20
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)


def main() -> None:
    """Measure every number of leaders asked for and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=output_file, required=True, metavar="OUT")
    parser.add_argument("--leaders", type=whole(2), nargs="+", default=LEADERS)
    parser.add_argument("--exchanges", type=whole(1), default=200, help="exchanges timed per row")
    parser.add_argument(
        "--network-us", type=float, default=30.0, help="one-way time of a small message, assumed"
    )
    parser.add_argument(
        "--bandwidth-gbytes", type=float, default=1.0, help="bandwidth of a leader in GB/s, assumed"
    )
    args = parser.parse_args()
    if args.network_us < 0 or args.bandwidth_gbytes <= 0:
        parser.error("--network-us must be at least 0 and --bandwidth-gbytes above 0")

    rows = []
    for leaders in args.leaders:
        for cluster in sorted({leaders, _root(leaders)}, reverse=True):
            rows.append(measure(leaders, cluster=cluster, exchanges=args.exchanges))
            row = rows[-1]
            print(
                f"{leaders:5d} leaders  {row['shape']:8s} {row['latency_us']:9.0f} µs  "
                f"{row['cpu_us']:7.0f} µs processor  {row['bytes_sent']:7d} bytes sent  "
                f"{row['file_descriptors']:4d} file descriptors",
                flush=True,
            )
    busy = statistics.median(row["cpu_us_per_message"] for row in rows)
    extrapolated = [
        _extrapolate(n, hop_us=busy + args.network_us, gbytes=args.bandwidth_gbytes)
        for n in EXTRAPOLATED
    ]
    for row in extrapolated:
        print(
            f"{row['leaders']:5d} leaders  {row['shape']:8s} {row['hops']:4d} hops  about "
            f"{row['latency_us']:7.0f} µs  {row['bytes_sent_most']:8d} bytes sent at most  "
            f"{row['connections_most']:4d} connections (extrapolated)"
        )
    result = {
        "record_bytes": RECORD_BYTES,
        "cores": os.cpu_count(),
        "rows": rows,
        "model": {
            "latency": "hops * (busy_us + network_us) + bytes / bandwidth",
            "busy_us": round(busy, 1),
            "network_us": args.network_us,
            "bandwidth_gbytes": args.bandwidth_gbytes,
        },
        "extrapolated": extrapolated,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(leaders: int, *, cluster: int, exchanges: int) -> dict[str, Any]:
    """Time `exchanges` exchanges of so many processes; return a row of medians over the leaders."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["odb_megatron.comm.control"])  # torch is imported once
    results: Queue[dict[str, Any]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_leader,
                args=(results, store, rank, leaders, cluster, exchanges),
                daemon=True,
            )
            for rank in range(leaders)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
    hops = _hops(leaders, cluster)
    return {
        "leaders": leaders,
        "shape": "ring" if cluster >= leaders else "clusters",
        "cluster": cluster,
        "latency_us": round(middle["latency_us"], 1),
        "latency_p99_us": round(max(one["latency_p99_us"] for one in found), 1),
        "cpu_us": round(middle["cpu_us"], 1),
        "cpu_us_per_message": round(middle["cpu_us"] / hops, 2),
        "bytes_sent": round(statistics.mean(one["bytes_sent"] for one in found)),
        "bytes_sent_most": max(one["bytes_sent"] for one in found),
        "file_descriptors": int(max(one["file_descriptors"] for one in found)),
    }


def _leader(
    results: Queue[dict[str, Any]],
    store: str,
    rank: int,
    leaders: int,
    cluster: int,
    exchanges: int,
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=leaders,
        timeout=timedelta(seconds=300),
    )
    before = len(os.listdir("/proc/self/fd"))
    group = ControlGroup(range(leaders), name="bench", timeout_s=300, cluster=cluster)
    group.exchange(b"connect")
    descriptors = len(os.listdir("/proc/self/fd")) - before
    record = bytes(RECORD_BYTES)
    for _ in range(WARM_UP):
        group.exchange(record)

    waits = []
    sent, spent = _bytes_sent(), time.process_time()
    for _ in range(exchanges):
        started = time.perf_counter()
        group.exchange(record)
        waits.append(time.perf_counter() - started)
    spent = time.process_time() - spent
    group.exchange(record)  # all have acknowledged what is counted
    sent = _bytes_sent() - sent
    results.put(
        {
            "latency_us": 1e6 * statistics.mean(waits),
            "latency_p99_us": 1e6 * sorted(waits)[len(waits) * 99 // 100],
            "cpu_us": 1e6 * spent / exchanges,
            "bytes_sent": round(sent / (exchanges + 1)),
            "file_descriptors": descriptors,
        }
    )


def _bytes_sent() -> int:
    """Return the payload bytes of all TCP sockets of this process that peers have acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            continue  # closed meanwhile, or no TCP socket
        if len(info) >= _BYTES_ACKED + 8:
            total += int.from_bytes(info[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)
    return total


def _root(leaders: int) -> int:
    return max(2, round(math.sqrt(leaders)))


def _hops(leaders: int, cluster: int) -> int:
    if cluster >= leaders:
        return leaders - 1
    clusters = -(-leaders // cluster)
    return (cluster - 1) + (clusters - 1) + (cluster - 1).bit_length()


def _extrapolate(leaders: int, *, hop_us: float, gbytes: float) -> dict[str, Any]:
    cluster = cluster_size(leaders)
    hops, clusters = _hops(leaders, cluster), -(-leaders // cluster)
    ring = (cluster - 1) * RECORD_BYTES
    whole = cluster * clusters * RECORD_BYTES
    # The first leader of a cluster: its own ring, the ring of the first leaders, the broadcast.
    depth = (cluster - 1).bit_length()
    most = ring if clusters == 1 else ring + whole * (clusters - 1) // clusters + depth * whole
    return {
        "leaders": leaders,
        "shape": "ring" if clusters == 1 else "clusters",
        "hops": hops,
        "latency_us": round(hops * hop_us + most / (1e3 * gbytes)),
        "bytes_sent_most": most,
        "connections_most": cluster - 1 + (clusters - 1 if clusters > 1 else 0),
    }


if __name__ == "__main__":
    main()
