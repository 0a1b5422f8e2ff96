"""`odb_megatron.comm.delivery` over real gloo processes, many cases in one spawn."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from odb_megatron.comm.delivery import DeliveryError, ReplicaGroup
from odb_megatron.testing.gloo import run_replicas

HEADERS = (b"", b"short", b"x" * 4088, b"y" * 4089, b"z" * 9000, b"w" * 16376)


def _cases(rank: int) -> dict[str, Any]:
    """Replica 0 has ranks 2 (leader), 0 and 1, of which 1 gets no payload; replica 1 has rank 3."""
    own = [3] if rank == 3 else [2, 0, 1]
    payload_ranks = [3] if rank == 3 else [2, 0]
    train = ReplicaGroup(own, payload_ranks=payload_ranks, name="train", timeout_s=60)
    valid = ReplicaGroup(own, payload_ranks=payload_ranks, name="valid", timeout_s=12)
    seen: dict[str, Any] = {"leads": train.is_leader, "has_payload": train.has_payload}
    headers, counts = [], []
    for data in HEADERS:
        headers.append(train.header(data if train.is_leader else None))
        counts.append(train.num_collectives)
        valid.header(b"between" if valid.is_leader else None)
    seen["headers"], seen["counts"] = headers, counts
    if train.has_payload:
        for size in (0, 5, 100_000):
            sent = np.arange(size, dtype=np.uint32).astype(np.uint8)
            buffer = sent.copy() if train.is_leader else np.zeros(size, dtype=np.uint8)
            assert np.array_equal(train.payload(buffer), sent)
    seen["collectives"], seen["bytes"] = train.num_collectives, train.num_bytes
    dist.barrier()
    if rank == 3:
        return seen
    if rank == 0:  # does not come: the others give up, and then find it closed
        time.sleep(20)
        return seen
    started = time.monotonic()
    try:
        for _ in range(2):  # a sender may have its bytes out before anyone reads them
            valid.header(b"?" if valid.is_leader else None)
    except DeliveryError as error:
        seen["error"] = str(error)
    seen["waited_s"] = time.monotonic() - started
    try:
        for _ in range(2):
            valid.header(b"?" if valid.is_leader else None)
    except DeliveryError as error:
        seen["closed"] = str(error)
    return seen


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_replicas(_cases, 4, timeout_s=150)


@pytest.mark.slow
def test_what_arrives(results: list[dict[str, Any]]) -> None:
    assert [seen["leads"] for seen in results] == [False, False, True, True]
    assert [seen["has_payload"] for seen in results] == [True, False, True, True]
    for seen in results:
        assert seen["headers"] == list(HEADERS)
        # One broadcast each, and a second where a header is twice as large as all before it.
        assert seen["counts"] == [1, 2, 3, 4, 6, 7]
    assert [seen["collectives"] for seen in results] == [9, 7, 9, 7]
    assert results[0]["bytes"] - results[1]["bytes"] == 100_005


@pytest.mark.slow
def test_a_rank_that_does_not_come(results: list[dict[str, Any]]) -> None:
    failed = [seen for seen in results[1:3] if "error" in seen]
    assert failed
    for seen in failed:
        assert "of the valid loader failed after at most 12 s" in seen["error"]
        assert "A rank of [2, 0, 1] has stopped or is stuck" in seen["error"]
        assert seen["waited_s"] < 60
        assert seen["closed"] == "delivery of the valid loader is closed: it had failed"


def test_ranks_that_make_no_replica() -> None:
    for payload_ranks in ([1, 0], [0, 5]):
        with pytest.raises(ValueError, match="must begin with the leader 0"):
            ReplicaGroup([0, 1], payload_ranks=payload_ranks, name="train", timeout_s=1)
