"""torchdata's StatefulDataLoader as the train dataset; skipped where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from iterables import Lines
from test_item_stream import config_of, emitted, run, stream_of

from odb_megatron.data.iterable import IterableShards

loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

NUM = 300


class WorkerLines(torch.utils.data.IterableDataset[Any]):
    """Lines that the loader's workers share out among themselves."""

    def __init__(self, names: list[int]) -> None:
        self.names = names
        self.lines: Lines | None = None
        self.begin: Any = None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        names = self.names if info is None else self.names[info.id :: info.num_workers]
        self.lines = Lines(names, [1 + name % 30 for name in range(NUM)])
        if self.begin is not None:
            self.lines.load_state_dict(self.begin)
            self.begin = None
        return iter(self.lines)

    def state_dict(self) -> Any:
        """Where it is."""
        return None if self.lines is None else self.lines.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on there."""
        self.begin = state


@dataclass(frozen=True)
class MakeLoader:
    """Makes a replica's loader."""

    workers: int

    def __call__(self, index: int, num_shards: int) -> Any:
        dataset = WorkerLines(list(range(index, NUM, num_shards)))
        return loaders.StatefulDataLoader(
            dataset, batch_size=None, num_workers=self.workers, collate_fn=dict
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_join_and_resume(workers: int) -> None:
    stream = stream_of(IterableShards(make=MakeLoader(workers)))
    names, states, _ = run(stream, config_of())
    assert emitted(names) == dict.fromkeys(range(NUM), 1)
    source = json.loads(states[40][0])["source"]
    assert source["parts"][0]["at"] > 0
    rest, _, _ = run(stream, config_of(), states=states[40])
    assert rest == names[41:]
