"""Replicas in gloo processes: results by rank, the first failure named, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from odb_megatron.testing.gloo import Nursery, ReplicaError, nursery, run_replicas


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, float, str]:
    import torch

    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    return rank * factor, total.item(), os.environ["WORLD_SIZE"]


def _misbehave(rank: int, how: str) -> None:
    """Rank 1 misbehaves while rank 0 waits for it in a collective."""
    import torch

    if rank == 1:
        if how == "raise":
            raise KeyError("sample 4711")
        if how == "exit hard":
            os._exit(7)
        if how == "unpicklable":
            return (_ for _ in ())  # type: ignore[return-value]
        _hang_here()
    torch.distributed.barrier()


def _hang_here() -> None:
    time.sleep(600)


@pytest.fixture(autouse=True)
def no_replica_is_left() -> Iterator[None]:
    """What a test started has ended; replicas that other tests share live on."""
    before = _replicas()
    yield
    assert _replicas() - before == set()


def _replicas() -> set[psutil.Process]:
    """What the nurseries started and has not ended; they live on."""
    nurseries = {nursery(device_layer=layer).pid for layer in (False, True)}
    return {
        child
        for one in nurseries
        for child in psutil.Process(one).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


def test_results_come_by_rank() -> None:
    assert run_replicas(_sum_of_ranks, 2, 10, timeout_s=60) == [(0, 3.0, "2"), (10, 3.0, "2")]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"(?s)replica 1 raised:\n.*_misbehave.*KeyError: 'sample 4711'"),
        ("exit hard", r"replica 1 ended without a result, exit code 7"),
        ("unpicklable", r"(?s)replica 1 raised:\n.*cannot pickle 'generator' object"),
    ],
)
def test_a_failure_names_its_replica_and_ends_the_others(how: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(ReplicaError, match=text) as caught:
        run_replicas(_misbehave, 2, how, timeout_s=60)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 30


def test_a_hang_ends_in_time_and_shows_where() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_replicas(_misbehave, 2, "hang", timeout_s=8)
    assert time.monotonic() - start < 15
    text = str(caught.value)
    assert text.startswith("no result in time from replica 0, 1\n")
    assert "_hang_here" in text.split("replica 1 was here:")[1]


def test_a_nursery_that_has_ended_is_named() -> None:
    one = Nursery(device_layer=False)
    assert one.pid is not None
    psutil.Process(one.pid).kill()
    with pytest.raises(RuntimeError, match="the nursery has ended, exit code -9"):
        one.start(print, None)
