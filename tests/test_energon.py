"""Loaders of Megatron-Energon as the train dataset; skipped where it is not installed.

A process can run one Energon loader without workers at a time, so each replica's has one.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_item_stream import config_of, emitted, run, stream_of

from odb_megatron.data.iterable import IterableShards

energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
pytestmark = pytest.mark.slow

NUM = 60


@pytest.fixture(autouse=True)
def _workers_ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Energon's workers do not end when told to: torch waits for each before it kills it, 5 s."""
    yield
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    gc.collect()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file with Energon's index."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexWriter

    made = tmp_path_factory.mktemp("energon") / "data.jsonl"
    lines = [json.dumps({"name": name}) + "\n" for name in range(NUM)]
    made.write_text("".join(lines))
    index, end = IJsonlIndexWriter(EPath(made)), 0
    for line in lines:
        index.append(end)
        end += len(line)
    index.append(end)
    index.close()
    return made


def _cook(sample: Any) -> dict[str, Any]:
    return {**energon.basic_sample_keys(sample), "name": sample["json"]["name"]}


def _make_loader(path: Path, *, workers: int, repeat: bool) -> Any:
    """Return what makes a replica's loader."""

    class Encoder(energon.TaskEncoder):  # type: ignore[misc,name-defined]
        cookers = (energon.Cooker(energon.stateless(_cook)),)

        def encode_sample(self, sample: Any) -> Any:
            tokens = [sample["name"] * 1000 + at for at in range(3 + sample["name"] % 20)]
            return {"tokens": tokens, "labels": tokens, "loss_mask": [1] * len(tokens)}

    def make(index: int, num_shards: int) -> Any:
        place = energon.WorkerConfig(rank=index, world_size=num_shards, num_workers=workers)
        dataset = energon.get_train_dataset(
            path,
            worker_config=place,
            batch_size=None,
            shuffle_buffer_size=8,
            max_samples_per_sequence=4,
            task_encoder=Encoder(),
            repeat=repeat,
        )
        return energon.get_savable_loader(dataset, watchdog_timeout_seconds=None)

    return make


@pytest.mark.parametrize("workers", [1, 2])
def test_quota_and_resume(path: Path, workers: int) -> None:
    shards = IterableShards(make=_make_loader(path, workers=workers, repeat=True))
    config = config_of(total=150)
    stream = stream_of(shards, total=150)
    names, states, steps = run(stream, config)
    assert sum(step.totals.num_samples for step in steps) == 150
    source = json.loads(states[-2][0])["source"]
    assert source["parts"][0]["at"] > 0
    middle = len(names) // 2
    for at in (2, middle, len(names) - 2) if workers == 1 else (middle,):
        rest, _, _ = run(stream, config, states=states[at])
        assert rest == names[at + 1 :]


def test_join(path: Path) -> None:
    shards = IterableShards(make=_make_loader(path, workers=1, repeat=False))
    names, _, _ = run(stream_of(shards), config_of())
    assert emitted(names) == dict.fromkeys(range(NUM), 1)
