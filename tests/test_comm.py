"""`odb_megatron.comm` over real gloo processes: many cases in few spawns."""

from __future__ import annotations

import os
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from odb_megatron.comm.groups import ControlError, ReplicaGroup, SourceGroup
from odb_megatron.testing.gloo import nursery, run_replicas

RANKS = [5, 0, 3, 7, 1, 6, 2]  # in replica order; rank 4 is no source rank
FAILED = {2, 5}
BLOCKS = {2: [[0], [1, 2], [3, 4], [5, 6]], 3: [[0, 1], [2, 3], [4, 5, 6]], 7: [[*range(7)]]}


def _blocks(rank: int) -> dict[int, Any]:
    """All operations, in blocks of several sizes."""
    found = {}
    for block in BLOCKS:
        if rank in RANKS:
            group = SourceGroup(RANKS, name="train", timeout_s=60, block=block)
            seen: dict[str, Any] = {"place": (group.replica, [*group.block])}
            own, first = b"%d" % group.replica, group.block[0] == group.replica
            if rank == 3:
                time.sleep(0.05)
            seen["gather"] = [group.gather(own + b"%d" % n) for n in range(3)]
            seen["blocks"] = [group.gather_blocks(own if first else b"?") for _ in range(2)]
            seen["all"] = [group.gather_all(own * size) for size in (1, 300)]
            seen["wrong"] = [step for step in range(12) if not _exchanged(group, step)]
            fails = group.replica in FAILED
            others = [one for one in group.block if one != group.replica]
            sends = None if fails else dict.fromkeys(others, b"sent")
            seen["failed"] = group.exchange(12, sends, {} if fails else dict.fromkeys(others, 4))
            seen["wrong"] += [13] * (not _exchanged(group, 13))
            group.close()
            found[block] = seen
    return found


def _exchanged(group: SourceGroup, step: int) -> bool:
    """Whether a step's samples, of any sizes, arrive where they should."""
    sizes = {
        (one, other): random.Random(f"{step} {one} {other}").choice([0, 1, 9, 300_000])
        for one in group.block
        for other in group.block
        if one != other and (one + other + step) % 3
    }
    sends = {t: bytes([s * 8 + t]) * n for (s, t), n in sizes.items() if s == group.replica}
    receives = {s: n for (s, t), n in sizes.items() if t == group.replica}
    found = group.exchange(step, sends, receives)
    return found == {s: bytes([s * 8 + group.replica]) * n for s, n in receives.items()}


@pytest.mark.slow
def test_blocks() -> None:
    results = run_replicas(_blocks, 8, timeout_s=150)
    for size, blocks in BLOCKS.items():
        for replica, rank in enumerate(RANKS):
            seen = results[rank][size]
            (own,) = [block for block in blocks if replica in block]
            assert seen["place"] == (replica, own)
            assert seen["gather"] == [[b"%d%d" % (one, n) for one in own] for n in range(3)]
            heads = [b"%d" % block[0] for block in blocks] if len(blocks) > 1 else None
            assert seen["blocks"] == [heads or [b"%d" % replica if replica == 0 else b"?"]] * 2
            assert seen["all"] == [[b"%d" % one * n for one in range(7)] for n in (1, 300)]
            assert seen["wrong"] == []
            others = [one for one in own if one != replica]
            failed = [one for one in own if one in FAILED and others]
            assert seen["failed"] == (dict.fromkeys(failed) or dict.fromkeys(others, b"sent"))


def _mismatches(rank: int) -> dict[str, str]:
    """Steps, sizes and senders that differ between two ranks: an error on both, no crash."""
    found = {}
    for case, step, sizes in (("step", rank, (3, 3)), ("more", 4, (9, 3)), ("less", 4, (1, 3))):
        group = SourceGroup([0, 1], name=case, timeout_s=20)
        sends, receives = ({1: bytes(sizes[0])}, {}) if rank == 0 else ({}, {0: sizes[1]})
        for again in ("", " again"):
            try:
                group.exchange(step, sends, receives)
            except ControlError as error:
                found[case + again] = str(error)
    return found


@pytest.mark.slow
def test_a_replica_with_another_plan() -> None:
    zero, one = run_replicas(_mismatches, 2, timeout_s=60)
    expected = "replica 1: step exchange: expected 3 bytes of step 1 from replica 0, which "
    assert one["step"].startswith(f"{expected}announced 3 bytes of step 0. Start every rank")
    for case, size in (("more", 9), ("less", 1)):
        assert f"from replica 0, which announced {size} bytes of step 4. " in one[case]
        assert f"replica 0: {case} exchange 4 failed after at most 20 s" in zero[case]
        assert zero[f"{case} again"] == f"replica 0: {case} exchange 4: the channel is closed"


STUCK_S = 2.0


def _away(rank: int) -> list[tuple[str, float]]:
    """Replica 3 of blocks of 2 does not come, or closes its channel; the others' errors."""
    found = []
    for name, timeout_s in (("stuck", STUCK_S), ("closed", 60.0)):
        group = SourceGroup([0, 1, 2, 3], name=name, timeout_s=timeout_s, block=2)
        group.gather_all(b"x")
        started, text = time.monotonic(), ""
        try:
            if rank < 3:
                group.gather_all(b"y")
            elif name == "closed":
                time.sleep(0.3)
                group.close()
        except ControlError as error:
            text = str(error)
        found.append((text, time.monotonic() - started))
        if name == "stuck":
            dist.barrier()
    return found


@pytest.mark.slow
def test_a_replica_that_does_not_come() -> None:
    """The block's other replica notices by itself, the other block as it closes its channel."""
    stuck, closed = zip(*run_replicas(_away, 4, timeout_s=150), strict=True)
    for name, texts in (("stuck", stuck), ("closed", closed)):
        assert [text.partition(" failed")[0] for text, _ in texts] == [
            f"replica 0: {name} blocks gather 1",
            f"replica 1: {name} gather between blocks 1",
            f"replica 2: block 1's {name} gather 1",
            "",
        ]
    assert "failed after at most 2 s" in stuck[2][0]
    assert "A rank of [2, 3] has stopped or is stuck; its own output says why" in stuck[2][0]
    assert all(STUCK_S - 1 < waited_s < STUCK_S + 20 for _, waited_s in stuck[:3])
    assert all(0.2 < waited_s < 30 for _, waited_s in closed[:3])  # long before the time-out


def _leave_in_exchange(job: tuple[int, str], connection: Connection) -> None:
    """End while a thread waits for a replica that does not come, which ends later."""
    rank, folder = job
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = SourceGroup([0, 1], name="train", timeout_s=60)
    group.gather(b"x")
    connection.send("ready")
    if rank == 1:
        connection.recv()
        return
    arguments = (0, {1: bytes(1000)}, {1: 1000})
    threading.Thread(target=group.exchange, args=arguments, daemon=True).start()
    time.sleep(0.3)


@pytest.mark.slow
def test_a_process_ends_with_an_exchange_under_way(tmp_path: Path) -> None:
    """Neither does it wait for its peer, nor is it aborted (exit code 134)."""
    children = [
        nursery(device_layer=False).start(_leave_in_exchange, (rank, str(tmp_path)))
        for rank in range(2)
    ]
    try:
        for child in children:
            assert child.connection.poll(60)
        assert children[0].join(20) == 0
        children[1].connection.send("end")
        assert children[1].join(20) == 0
    finally:
        for child in children:
            child.kill()
            child.join()


SHORT_S, HEADERS = 8.0, (b"", b"short", b"x" * 4088, b"y" * 4089, b"z" * 9000, b"w" * 16376)


def _replica(rank: int) -> dict[str, Any]:
    """Rank 2 is the source rank of ranks 0 and 1, of which 1 gets no payload; rank 3 is alone."""
    ranks, payload, attachment = ([3], [3], []) if rank == 3 else ([2, 0, 1], [2, 0], [2, 1])
    from odb_megatron.megatron.replica import differences

    values = {"seed": "7" if rank == 1 else "1", "lr": "0.1"}
    seen: dict[str, Any] = {
        "differ": differences(values, ranks=ranks, timeout_s=60),
        "same": differences({"lr": "0.1"}, ranks=ranks, timeout_s=60),
    }
    options: Any = {"payload_ranks": payload, "attachment_ranks": attachment}
    train = ReplicaGroup(ranks, name="train", timeout_s=60, **options)
    valid = ReplicaGroup(ranks, name="valid", timeout_s=SHORT_S, **options)
    seen["place"] = train.is_source, train.has_payload, train.has_attachment
    seen["headers"], seen["counts"] = [], []
    for data in HEADERS:
        seen["headers"].append(train.header(data if train.is_source else None))
        seen["counts"].append(train.num_collectives)
        valid.header(b"between" if valid.is_source else None)
    sent = np.arange(100_000, dtype=np.uint32).astype(np.uint8)
    for has, send in ((payload, train.payload), (attachment, train.attachment)):
        if rank in has:
            for size in (0, 5, 100_000):
                buffer = sent[:size].copy() if train.is_source else np.zeros(size, np.uint8)
                assert np.array_equal(send(buffer), sent[:size])
    seen["totals"] = train.num_collectives, train.num_bytes
    if rank in (0, 2):
        pair = ReplicaGroup([2, 0], payload_ranks=[2], name="report", timeout_s=60)
        seen["report"] = pair.report([0.5, -1.0] if rank == 0 else [0.0, 0.0])
    dist.barrier()
    for _ in range(4) if rank in (1, 2) else ():  # rank 0 does not come
        try:
            valid.header(b"?" if rank == 2 else None)
        except ControlError as error:
            seen.setdefault("errors", []).append(str(error))
    dist.barrier()
    return seen


@pytest.mark.megatron
@pytest.mark.slow
def test_inside_a_replica() -> None:
    results = run_replicas(_replica, 4, timeout_s=240, device_layer=True)
    differ = ["seed is 7 on rank 1 and 1 on rank 2"]
    assert [seen["differ"] for seen in results] == [differ] * 3 + [[]]
    assert [seen["same"] for seen in results] == [[]] * 4
    assert [seen["place"] for seen in results] == [
        (False, True, False),
        (False, False, True),
        (True, True, True),
        (True, True, False),
    ]
    for seen in results:
        assert seen["headers"] == list(HEADERS)
        # One broadcast each, and a second where a header is twice as large as all before it.
        assert seen["counts"] == [1, 2, 3, 4, 6, 7]
    assert [seen["totals"][0] for seen in results] == [9, 9, 11, 7]
    assert results[0]["totals"][1] == results[3]["totals"][1] + 100_005
    assert results[0]["report"] == results[2]["report"] == [0.5, -1.0]
    for rank in (1, 2):
        failed, *_, closed = results[rank]["errors"]
        assert f"rank {rank}: valid broadcast from rank 2: " in failed
        assert " failed after at most 8 s (" in failed
        assert "A rank of [2, 0, 1] has stopped or is stuck" in failed
        assert closed.endswith(": the channel is closed")
