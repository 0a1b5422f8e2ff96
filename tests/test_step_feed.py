"""`odb_megatron.data.step_feed`: what each rank of a replica gets, ranks as threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from made_up_data import Records, rules, single_stream

from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.sample import BadRecordError
from odb_megatron.data.step_feed import ContextPart, StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.records import ReplicaFailedError
from odb_megatron.testing.replicas import thread_exchanges

LENGTHS = [3, 9, 1, 14, 5, 7, 12, 2, 8, 6, 4]


class ThreadChannel:
    """A replica's channel between threads; one object per rank."""

    def __init__(self, queues: list[queue.Queue[Any]], rank: int, *, has_payload: bool) -> None:
        self._queues, self._rank, self._has_payload = queues, rank, has_payload
        self.num_headers = self.num_payloads = 0
        self.num_collectives = self.num_bytes = 0

    @property
    def has_payload(self) -> bool:
        return self._has_payload

    def header(self, data: bytes | None = None) -> bytes:
        self.num_headers += 1
        if data is None:
            found: bytes = self._queues[self._rank].get(timeout=20)
            return found
        for other in self._queues[1:]:
            other.put(data)
        return data

    def payload(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        self.num_payloads += 1
        if self._rank:
            data[:] = self._queues[self._rank].get(timeout=20)
        else:
            for rank, other in enumerate(self._queues):
                if rank and rank != 2:  # rank 2 is the middle stage
                    other.put(data.copy())
        return data


def loader(*, failing: int | None = None, multiple: int = 4, padded: bool = False) -> StepLoader:
    stream = single_stream(
        Records(LENGTHS, failing=failing),
        sample_rules=rules(context=16, token_budget=32, multiple=multiple),
    )
    config = PlanConfig(
        policy=PolicyName.SAMPLES,
        total=len(LENGTHS),
        global_batch_size=4,
        num_replicas=1,
        token_budget=32,
        multiple=multiple,
        pads_to_budget=padded,
    )
    return StepLoader(stream, config, exchange=thread_exchanges(1)[0])


def run_ranks(make: Callable[[int, ThreadChannel], StepFeed]) -> list[Any]:
    """Read every rank's first iterator to its end; return items and channel, or the error."""
    queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(4)]
    channels = [ThreadChannel(queues, rank, has_payload=rank != 2) for rank in range(4)]
    results: list[Any] = [None] * 4

    def run(rank: int) -> None:
        try:
            feed = make(rank, channels[rank])
            results[rank] = (list(feed.iterators[0]), channels[rank], feed)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def timeless(header: Any) -> StepHeader:
    return replace(header, totals=replace(header.totals, wait_us=0))


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    )


@pytest.mark.parametrize("padded", [False, True])
def test_every_rank_gets_the_leaders_steps(padded: bool) -> None:
    expected = list(StepFeed(loader(padded=padded)).iterators[0])
    results = run_ranks(
        lambda rank, channel: StepFeed(
            loader(padded=padded) if rank == 0 else None,
            channel=channel,
            plan_ahead=2,
            num_chunks=2,
        )
    )
    sizes = {item.tokens.numel() for item in expected if isinstance(item, MicroBatch)}
    assert (sizes == {32}) == padded  # the budget
    num_steps = sum(isinstance(item, StepHeader) for item in expected)
    assert num_steps == 3
    for rank, (items, channel, feed) in enumerate(results):
        assert len(items) == len(expected)
        for item, wanted in zip(items, expected, strict=True):
            if isinstance(wanted, StepHeader):
                assert timeless(item) == timeless(wanted)
            elif rank == 2:
                assert type(item) is MicroBatchLayout
                assert torch.equal(item.cu_seqlens, wanted.cu_seqlens)
                assert torch.equal(item.cu_seqlens_padded, wanted.cu_seqlens_padded)
                assert item.positions == wanted.positions
            else:
                assert same(item, wanted)
        assert channel.num_headers == num_steps + 1  # and one for the end
        assert channel.num_payloads == (0 if rank == 2 else num_steps)
        second = feed.iterators[1]  # the other chunk has the same objects, fetched once
        assert [next(second) for _ in expected] == items


def test_context_parallel_ranks_get_their_parts() -> None:
    items = StepFeed(loader()).iterators[0]
    expected = [item for item in items if isinstance(item, MicroBatch)]
    results = run_ranks(
        lambda rank, channel: StepFeed(
            loader() if rank == 0 else None,
            channel=channel,
            part=ContextPart(size=2, rank=rank % 2),
        )
    )
    parts = [[item for item in results[rank][0] if isinstance(item, MicroBatch)] for rank in (0, 1)]
    for whole, first, second in zip(expected, *parts, strict=True):
        assert first.tokens.size(1) == second.tokens.size(1) == whole.tokens.size(1) // 2
        together = torch.cat([first.tokens, second.tokens], dim=1)
        assert torch.equal(together.sort().values, whole.tokens.sort().values)
        assert torch.equal(first.cu_seqlens_padded, whole.cu_seqlens_padded)


def test_the_leaders_error_reaches_all() -> None:
    results = run_ranks(
        lambda rank, channel: StepFeed(
            loader(failing=5) if rank == 0 else None, channel=channel, plan_ahead=1
        )
    )
    assert isinstance(results[0], (BadRecordError, KeyError, RuntimeError))
    for error in results[1:]:
        assert isinstance(error, ReplicaFailedError)
        assert "the leader of this replica failed" in str(error)
        assert "no such thing in record 5" in str(error)


def test_a_restart_begins_again() -> None:
    feed = StepFeed(loader())
    first = [next(feed.iterators[0]) for _ in range(4)]
    feed.restart()
    again = list(feed.iterators[0])
    assert timeless(again[0]) == timeless(first[0])
    assert len(again) > len(first)


def test_a_rank_without_leader_and_channel() -> None:
    with pytest.raises(ValueError, match="needs a channel to its leader"):
        StepFeed(None, channel=None)
