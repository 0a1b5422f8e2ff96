"""`odb_megatron.comm.heartbeat` between real processes: late, silent, failed and dead ranks."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_megatron.comm.heartbeat import Heartbeat, parent_of
from odb_megatron.testing.gloo import nursery

WAIT_S = 150.0


def test_the_tree_has_few_hops() -> None:
    parents = [parent_of(rank) for rank in (0, 1, 64, 65, 128, 129, 8191)]
    assert parents == [None, 0, 0, 1, 1, 2, 127]
    rank, hops = 8191, 0
    while rank:
        rank, hops = parent_of(rank) or 0, hops + 1
    assert hops == 3


def _serve(job: tuple[int, str], connection: Connection) -> None:
    """Make a heartbeat and do what the test says."""
    rank, folder = job
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=WAIT_S),
    )
    told: list[str] = []
    heartbeat = Heartbeat(f"replica {rank}", timeout_s=WAIT_S, silent_s=0.5, tell=told.append)
    connection.send(heartbeat.who)
    while True:
        name, *arguments = connection.recv()
        if name == "told":
            connection.send(list(told))
        elif name == "loss":
            connection.send((heartbeat.wait_for_loss(0), heartbeat.gone))
        else:
            method = getattr(heartbeat, name)
            named = {"within_step": arguments[0]} if name == "leave" else {}
            connection.send(method(**named) if named else method(*arguments))


class _World:
    def __init__(self, folder: Path) -> None:
        self.processes = [
            nursery(device_layer=False).start(_serve, (rank, str(folder))) for rank in range(3)
        ]
        self.ends = [process.connection for process in self.processes]
        self.who = [self._receive(rank) for rank in range(3)]

    def call(self, rank: int, *order: Any) -> Any:
        self.ends[rank].send(order)
        return self._receive(rank)

    def until(self, rank: int, text: str, *what: str) -> str:
        """Wait until a rank's diagnosis contains a text, or is empty for an empty one."""
        limit = time.monotonic() + WAIT_S
        while True:
            found: str = self.call(rank, "diagnosis", *what)
            if (text in found) if text else not found:
                return found
            assert time.monotonic() < limit, f"rank {rank} knows {found!r}, not {text!r}"
            time.sleep(0.05)

    def _receive(self, rank: int) -> Any:
        assert self.ends[rank].poll(WAIT_S), f"rank {rank} hangs"
        return self.ends[rank].recv()


@pytest.mark.slow
def test_every_rank_learns_what_became_of_another(tmp_path: Path) -> None:
    world = _World(tmp_path)
    try:
        # Late: those that note the same thing and have not come so far.
        for rank, number in ((0, 5), (1, 5), (2, 3)):
            world.call(rank, "note", "train exchange", number)
        world.call(0, "note", "valid exchange", -1)
        world.call(1, "ask", "train exchange", 5)
        for rank in (0, 1):
            found = world.until(rank, "is late", "train exchange")
            assert found.startswith(f"{world.who[2]} answers but is late; it has come to train ")
            assert "train exchange 3 since " in found
            assert "rank 0" not in found
        assert world.call(0, "diagnosis") == ""  # it is no loss
        world.call(2, "ask", "valid exchange", 0)
        assert "valid exchange: none yet" in world.until(1, "rank 0", "valid exchange")

        # Silent: stopped, and back; nobody takes it for gone.
        world.processes[1].send_signal(signal.SIGSTOP)
        for rank in (0, 2):
            found = world.until(rank, "has not answered since")
            assert found.startswith(world.who[1])
        world.processes[1].send_signal(signal.SIGCONT)
        for rank in range(3):
            world.until(rank, "")
            assert world.call(rank, "loss") == (False, {})
        told = world.call(0, "told")
        assert told[0].startswith(f"odb: warning: {world.who[1]} has not answered since")
        assert told[-1] == f"odb: {world.who[1]} answers again"

        # Failed: it says so itself.
        world.call(2, "tell_failure", "ValueError: no luck")
        for rank in (0, 1):
            found = world.until(rank, "no luck")
            assert found == f"{world.who[2]} failed: ValueError: no luck"
            assert world.call(rank, "loss") == (True, {})
        assert world.call(2, "loss") == (False, {})  # it knows

        # Gone without a word, also the one that all others are connected to.
        world.processes[2].kill()
        for rank in (0, 1):
            assert world.until(rank, "is gone").startswith(f"{world.who[2]} is gone, noticed at ")
        world.processes[0].kill()
        assert "(it hosted the rendezvous store)" in world.until(1, world.who[0])
        assert sorted(world.call(1, "loss")[1]) == [0, 2]
    finally:
        for process in world.processes:
            process.kill()
            process.join()


@pytest.mark.slow
def test_a_rank_that_leaves(tmp_path: Path) -> None:
    """As it should, after the last step, or while others train on."""
    world = _World(tmp_path)
    try:
        for rank in range(3):
            world.call(rank, "begin_step")
        world.call(2, "leave", False)
        for _ in range(2):
            world.call(2, "close")
        world.call(1, "tell_failure", "later than the others' news")
        assert "rank 2" not in world.until(0, "later than")
        assert world.call(1, "loss") == (False, {})
        world.call(1, "begin_step")  # another one
        for rank in range(2):
            early = f"{world.who[2]} has left the run early: its script has ended, and others train"
            assert early in world.until(rank, "has left")
            assert 2 in world.call(rank, "loss")[1]
        world.call(0, "leave", True)  # in a step; it knows that, too
        for rank in range(2):
            assert f"{world.who[0]} has left the run early" in world.until(rank, world.who[0])
    finally:
        for process in world.processes:
            process.kill()
            process.join()
