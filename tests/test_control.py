"""`odb_megatron.comm.control` over real gloo processes: order, refusals, dead and stuck peers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_megatron.comm.control import ControlError, ControlGroup, cluster_size, ranks_of
from odb_megatron.testing.gloo import run_replicas

TIMEOUT_S = 2.0


def _exchange_cases(rank: int) -> dict[str, Any]:
    """Cases that need live peers, many in one spawn."""
    seen: dict[str, Any] = {}
    all_ranks = ControlGroup([0, 1, 2], name="train", timeout_s=60)
    pair = ControlGroup([0, 2], name="valid", timeout_s=60)
    turned = ControlGroup([2, 1, 0], name="test", timeout_s=60)
    alone = ControlGroup([1], name="alone", timeout_s=60)
    seen["replicas"] = [group.replica for group in (all_ranks, pair, turned, alone)]
    seen["sizes"] = [group.num_replicas for group in (all_ranks, pair, turned, alone)]
    rounds = []
    for number in range(10):
        if rank == number % 3:
            time.sleep(0.01)  # another rank is late each time
        rounds.append(all_ranks.exchange(b"%d:%d" % (number, rank)))
        if rank != 1:  # the second group runs on its own count
            rounds[-1] += pair.exchange(bytes([rank, number]))
    seen["rounds"] = rounds
    seen["exchanges"] = (all_ranks.num_exchanges, pair.num_exchanges)
    seen["turned"] = turned.exchange(b"rank %d" % rank)
    seen["counts"] = all_ranks.gather_counts([rank, -rank, 1 << 40, -(1 << 63), (1 << 63) - 1])
    seen["zeros"] = all_ranks.exchange(bytes(256))
    try:
        (alone if rank == 0 else pair).exchange(b"x") if rank < 2 else None
    except ControlError as error:
        seen["refused"] = str(error)
    seen["alone"] = alone.exchange(b"me") if rank == 1 else None
    seen["ranks"] = ranks_of(dist.group.WORLD)
    return seen


@pytest.mark.slow
def test_exchanges_between_live_peers() -> None:
    results = run_replicas(_exchange_cases, 3, timeout_s=120)
    assert [seen["replicas"] for seen in results] == [[0, 0, 2, -1], [1, -1, 1, 0], [2, 1, 0, -1]]
    assert [seen["sizes"] for seen in results] == [[3, 2, 3, 1]] * 3
    for rank, seen in enumerate(results):
        for number, records in enumerate(seen["rounds"]):
            expected = [b"%d:%d" % (number, other) for other in range(3)]
            if rank != 1:
                expected += [bytes([0, number]), bytes([2, number])]
            assert records == expected
        assert seen["exchanges"] == (10, 0 if rank == 1 else 10)
        assert seen["turned"] == [b"rank 2", b"rank 1", b"rank 0"]  # replica order, not rank order
        assert seen["counts"] == [
            [other, -other, 1 << 40, -(1 << 63), (1 << 63) - 1] for other in range(3)
        ]
        assert seen["zeros"] == [bytes(256)] * 3
        assert seen["ranks"] == [0, 1, 2]
    assert results[0]["refused"] == "rank 0 is no leader of control group alone"
    assert results[1]["refused"] == "rank 1 is no leader of control group valid"
    assert "refused" not in results[2]
    assert results[1]["alone"] == [b"me"]


def _clustered_cases(rank: int) -> dict[str, Any]:
    """Five leaders out of six ranks, in clusters of several sizes."""
    seen: dict[str, Any] = {}
    leaders = [5, 0, 3, 1, 2]
    for cluster in (1, 2, 3, 5):
        group = ControlGroup(leaders, name="train", timeout_s=60, cluster=cluster)
        if rank in leaders:
            seen[str(cluster)] = [group.exchange(b"%d of %d" % (rank, n)) for n in range(3)]
    return seen


@pytest.mark.slow
def test_clusters_give_what_a_ring_gives() -> None:
    results = run_replicas(_clustered_cases, 6, timeout_s=120)
    expected = [[b"%d of %d" % (rank, n) for rank in (5, 0, 3, 1, 2)] for n in range(3)]
    for rank, seen in enumerate(results):
        assert seen == ({} if rank == 4 else dict.fromkeys(("1", "2", "3", "5"), expected))


@pytest.mark.parametrize(
    ("num_replicas", "size"),
    [(1, 1), (8, 8), (128, 128), (129, 12), (144, 12), (145, 13), (1024, 32), (8192, 91)],
)
def test_cluster_size(num_replicas: int, size: int) -> None:
    assert cluster_size(num_replicas) == size


def _lose_a_peer(rank: int, folder: str, connection: Connection, cluster: int) -> None:
    """Rank 2 does not come to one group's exchange, then dies while the others wait in another."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=60),
    )
    groups = [
        ControlGroup([0, 1, 2], name="valid", timeout_s=TIMEOUT_S),
        ControlGroup([0, 1, 2], name="train", timeout_s=60, cluster=cluster),
    ]
    for group in groups:
        group.exchange(b"fine")
        group.exchange(b"fine")
    if rank == 2:
        connection.recv()  # both have given up on the first group
        time.sleep(0.5)  # and wait in the second by now
        os.kill(os.getpid(), signal.SIGKILL)
    for group in groups:
        start = time.monotonic()
        try:
            group.exchange(b"wait")
        except ControlError as error:
            cause = type(error.__cause__).__name__
            connection.send((str(error), cause, time.monotonic() - start))
        else:
            connection.send(("no error", "", 0.0))
        with pytest.raises(ControlError, match="is closed: an exchange had failed"):
            group.exchange(b"again")
        connection.recv()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3, 2])
def test_a_stuck_or_dead_peer_ends_the_wait_of_the_others(tmp_path: Path, cluster: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    processes = [
        context.Process(
            target=_lose_a_peer,
            args=(rank, str(tmp_path), pipes[rank][1], cluster),
            daemon=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            process.start()
        stuck = _failures(pipes, name="valid", timeout_s=TIMEOUT_S)
        assert all(TIMEOUT_S - 1 < waited_s < TIMEOUT_S + 20 for waited_s in stuck)
        assert processes[2].is_alive()  # guard: it was stuck, not gone
        for connection, _ in pipes:
            connection.send("go on")
        dead = _failures(pipes, name="train", timeout_s=60)
        assert all(0.2 < waited_s < 40 for waited_s in dead)  # long before the time-out
        processes[2].join(10)
        assert processes[2].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()


def _failures(pipes: Any, *, name: str, timeout_s: float) -> list[float]:
    """How long ranks 0 and 1 waited; what they raised is checked."""
    waits = []
    for rank in range(2):
        assert pipes[rank][0].poll(60), f"rank {rank} hangs"
        text, cause, waited_s = pipes[rank][0].recv()
        assert text.startswith(
            f"replica {rank}: exchange 2 of the {name} loader failed after at most "
            f"{timeout_s:.0f} s ("
        )
        assert "A rank of [0, 1, 2] has stopped or is stuck; its own output says why" in text
        assert cause != "NoneType"
        waits.append(waited_s)
    return waits
