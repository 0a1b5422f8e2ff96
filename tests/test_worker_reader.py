"""`odb_megatron.data.worker_reader`: a worker that dies while it sends does not stop the reader."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
from made_up_data import rules

from odb_megatron.data import worker_reader as module
from odb_megatron.data.order import PassOrder
from odb_megatron.data.replica_stream import StreamReader, WorkerError
from odb_megatron.data.sources import MapSource
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.worker_reader import DeadWorkerError, WorkerReader
from odb_megatron.data.workers import Workers
from odb_megatron.plan.record import PlanConfig

SIZE = 20_000
"""Tokens of a sample: 400 kB, more than a pipe holds."""


def test_items_and_errors_come_as_they_are() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise KeyError("no third")

    reader = WorkerReader(items(), dead=list)
    assert [next(reader), next(reader)] == [1, 2]
    with pytest.raises(KeyError, match="no third"):
        next(reader)
    with pytest.raises(StopIteration):
        next(reader)
    thread = reader._thread
    del reader
    thread.join(20)
    assert not thread.is_alive()


def test_one_that_never_comes_is_waited_for_while_all_workers_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    release, looks = threading.Event(), []

    def items() -> Iterator[int]:
        release.wait()
        yield 7
        threading.Event().wait()

    def dead() -> list[int]:
        looks.append(0)
        if len(looks) == 9:
            release.set()
        return [4711] if len(looks) > 9 else []

    reader = WorkerReader(items(), dead=dead)
    assert next(reader) == 7
    looks += [0] * 9
    with pytest.raises(DeadWorkerError, match="worker process 4711 ended in the middle of sending"):
        next(reader)


class Large:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {name: [1] * SIZE for name in ("tokens", "labels", "loss_mask")}


@pytest.mark.slow
def test_a_worker_killed_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker and a full pipe it is always sending."""
    monkeypatch.setattr(module, "_GRACE_S", 0.5)
    limits = rules(context=SIZE, token_budget=SIZE)
    source = MapSource(Large(), rules=limits, name="large")
    order = PassOrder(np.arange(64), seed=1)
    before = set(active_children())
    stream = SampleStream([SourcePart(source=source, order=order)])
    config = PlanConfig(total=64, global_batch_size=64, num_replicas=1, token_budget=SIZE)
    reader = StreamReader(stream, config, replica=0, workers=Workers(num=1))
    reader.read(1)
    (worker,) = set(active_children()) - before
    thread = threading.Timer(3.0, os.kill, (worker.pid, signal.SIGKILL))  # its pipe is full by then
    thread.start()
    thread.join()
    with pytest.raises(WorkerError, match="a data-loader worker has ended .*record .* of large"):
        reader.read(63)
