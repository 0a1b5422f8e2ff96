"""`odb_megatron.comm.payload` over real gloo processes: overlap, order, mismatches, lost peers."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_megatron.comm.control import ControlError, ControlGroup
from odb_megatron.comm.payload import PayloadGroup, check_frame, frame
from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.step_feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatch
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.testing.gloo import run_replicas

NUM = 4
BUDGET = 64


def _cases(rank: int) -> dict[str, Any]:
    """Cases that need live peers, many in one spawn."""
    ranks = [2, 0, 3, 1]  # replica order, not rank order
    group = PayloadGroup(ranks, name="train", timeout_s=60)
    outsider = PayloadGroup([0, 1], name="pair", timeout_s=60)
    replica = ranks.index(rank)
    seen: dict[str, Any] = {"rounds": [], "wrong": []}
    for step in range(30):
        sizes = {  # the same on all: who sends how much to whom
            (source, target): random.Random(f"{step} {source} {target}").choice([0, 1, 9, 300_000])
            for source in range(NUM)
            for target in range(NUM)
            if source != target and (source + target + step) % 3
        }
        transfer = group.post(
            step,
            sends={t: _bytes(step, s, t) * n for (s, t), n in sizes.items() if s == replica},
            receives={s: n for (s, t), n in sizes.items() if t == replica},
        )
        if step % 5 == rank:
            time.sleep(0.02)
        for (source, target), size in sizes.items():
            if target == replica:
                got = bytes(transfer.receive(source))
                if got != _bytes(step, source, target) * size:
                    seen["wrong"].append((step, source))
        transfer.finish()
        seen["rounds"].append(len(sizes))
    if rank == 2:
        try:
            outsider.post(0, sends={}, receives={})
        except ControlError as error:
            seen["refused"] = str(error)
    seen["loader"] = {policy.value: _loader_case(rank, policy) for policy in PolicyName}
    return seen


def _bytes(step: int, source: int, target: int) -> bytes:
    return bytes([step * 16 + source * 4 + target & 255])


def _loader_case(rank: int, policy: PolicyName) -> dict[str, Any]:
    """A step loader whose samples travel between processes."""
    from made_up_data import Records, rules, single_stream

    control = ControlGroup(list(range(NUM)), name="train", timeout_s=60)
    control.payloads = PayloadGroup(list(range(NUM)), name="train", timeout_s=60)
    random_ = random.Random(7)
    lengths = [random_.choice([1, 2, 5, BUDGET]) for _ in range(90)]
    stream = single_stream(
        Records(lengths), sample_rules=rules(context=BUDGET, token_budget=BUDGET)
    )
    config = PlanConfig(
        policy=policy,
        total=90,
        global_batch_size=24,
        num_replicas=NUM,
        token_budget=BUDGET,
        window=12,
        cost=CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
        exchange=ExchangeMode.TOKENS,
    )
    iterator = StepFeed(StepLoader(stream, config, exchange=control), plan_ahead=2).iterators[0]
    positions: list[int] = []
    wrong, moved, left = [], 0, 0
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            break
        if isinstance(item, StepHeader):
            moved += item.totals.num_moved
            continue
        assert isinstance(item, MicroBatch)
        for slot, position in enumerate(item.positions):
            start = int(item.cu_seqlens_padded[slot])
            sample: Any = stream.fetch(position)
            end = start + len(sample)
            if item.tokens[0, start:end].tolist() != sample.tokens.tolist():
                wrong.append(position)
            if item.loss_mask[0, start:end].tolist() != sample.loss_mask.tolist():
                wrong.append(position)
            left += position % NUM != rank
        positions += item.positions
    return {"positions": positions, "wrong": wrong, "moved": moved, "foreign": left}


@pytest.mark.slow
def test_between_live_peers() -> None:
    results = run_replicas(_cases, NUM, timeout_s=120)
    for seen in results:
        assert seen["wrong"] == []
        assert sum(seen["rounds"]) > 200
    assert results[2]["refused"] == "rank 2 is no leader of payload group pair"
    for policy in ("samples", "cost"):
        cases = [seen["loader"][policy] for seen in results]
        assert sorted(p for case in cases for p in case["positions"]) == list(range(90))
        assert all(case["wrong"] == [] for case in cases)
        assert cases[0]["moved"] > 3
    assert sum(seen["loader"]["samples"]["foreign"] for seen in results) > 3


def test_what_belongs_elsewhere_is_refused() -> None:
    data = memoryview(frame(b"abc", step=4, replica=1))
    assert bytes(check_frame(data, step=4, replica=0, peer=1)) == b"abc"
    for step, peer in ((5, 1), (4, 2)):
        with pytest.raises(ControlError, match=f"replica 0: expected 3 bytes of step {step} from"):
            check_frame(data, step=step, replica=0, peer=peer)
    longer = memoryview(frame(b"abc", step=4, replica=1) + b"d")
    with pytest.raises(ControlError, match="3 bytes of step 4 from replica 1 arrived. Start every"):
        check_frame(longer, step=4, replica=0, peer=1)


def _lose_a_peer(rank: int, folder: str, connection: Connection) -> None:
    """Rank 1 does not send what rank 0 expects, then dies while rank 0 waits again."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = [
        PayloadGroup([0, 1], name="valid", timeout_s=2.0),
        PayloadGroup([0, 1], name="train", timeout_s=60),
    ]
    dist.barrier()
    for index, group in enumerate(groups):
        if rank == 1:
            connection.recv()
            time.sleep(0.3)
            if index:
                os.kill(os.getpid(), signal.SIGKILL)
            continue
        started = time.monotonic()
        try:
            group.post(7, sends={}, receives={1: 1000}).receive(1)
        except ControlError as error:
            connection.send((str(error), time.monotonic() - started))
        else:
            connection.send(("no error", 0.0))
        connection.recv()


@pytest.mark.slow
def test_a_stuck_or_dead_peer_ends_the_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(
            target=_lose_a_peer, args=(rank, str(tmp_path), pipes[rank][1]), daemon=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for name, longest in (("valid", 25.0), ("train", 40.0)):
            if name == "train":
                pipes[1][0].send("die")
            assert pipes[0][0].poll(60)
            text, waited_s = pipes[0][0].recv()
            assert text.startswith(
                f"replica 0: handing samples of step 7 of the {name} loader to or from replica 1 "
                "failed ("
            )
            assert "has stopped, is stuck or planned another step" in text
            assert waited_s < longest
            pipes[0][0].send("go on")
            if name == "valid":
                assert processes[1].is_alive()
                pipes[1][0].send("go on")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _leave_in_mid_step(rank: int, folder: str, connection: Connection) -> None:
    """End with transfers under way: no abort, no hang."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    group = PayloadGroup([0, 1], name="train", timeout_s=5.0)
    dist.barrier()
    group.post(0, sends={1 - rank: bytes(3_000_000)}, receives={1 - rank: 3_000_000})
    dist.barrier()
    connection.send("end")


@pytest.mark.slow
def test_a_process_ends_with_transfers_under_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_leave_in_mid_step, args=(rank, str(tmp_path), pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
