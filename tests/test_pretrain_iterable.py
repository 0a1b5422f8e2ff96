"""Iterable train datasets in real `pretrain()` runs on two replicas."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from iterables import MakeLines, Stateless
from megatron_world import Megatron

from odb_megatron.data.iterable import IterableShards

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

NUM = 45


def _shards(owners: list[int], **more: Any) -> IterableShards:
    rng = random.Random(3)
    return IterableShards(
        make=MakeLines([rng.randint(2, 30) for _ in owners], owners, base=1, **more)
    )


def _uneven() -> list[int]:
    return [0] * 30 + [1] * 15


FLAGS = ("--odb", "--eval-iters", 0, "--ckpt-format", "torch", "--num-workers", 0)


def _saving(folder: Path) -> tuple[Any, ...]:
    return "--save", folder, "--save-interval", 100


def test_quota_saved_and_resumed(megatron: Megatron, tmp_path: Path) -> None:
    items = (_shards(_uneven()), None, None)
    flags = (*FLAGS, "--train-samples", 60)
    whole = megatron.train(*flags, items=items)
    assert whole.steps[-1].record["consumed_samples"] == 60
    assert "(60 of 60 requested)" in whole.summary
    first = megatron.train(*flags, "--exit-interval", 3, *_saving(tmp_path), items=items)
    (path,) = tmp_path.glob("iter_0000003/*/*.pt")
    state = json.loads(torch.load(path, weights_only=False)["args"].odb_data_state)
    assert [source["next"] for source in state["sources"]] == [12, 12]
    rest = megatron.train(*flags, "--load", tmp_path, "--num-workers", 1, items=items)
    both = [*first.steps, *rest.steps]
    assert len(first.steps) == 3 < len(whole.steps)
    assert [step.all_ids for step in both] == [step.all_ids for step in whole.steps]
    assert [step.loss for step in both] == pytest.approx(whole.losses, abs=1e-6)
    for error in megatron.refused(*flags, "--load", tmp_path, items=items, replicas=1):
        assert "the data was saved with 2 of them: resume with that data-parallel size" in error


def test_join_ends_with_the_longest_shard(megatron: Megatron, tmp_path: Path) -> None:
    items = (_shards(_uneven()), None, None)
    flags = (*FLAGS, "--odb-epochs", 1, "--lr-decay-samples", 100)
    run = megatron.train(*flags, *_saving(tmp_path), items=items)
    assert run.steps[-1].record["consumed_samples"] == NUM
    batches = [len(step.all_ids) for step in run.steps]
    assert batches == [8] * (NUM // 8) + [NUM % 8]  # a replica without items trains the other's
    assert "45 samples (45 with those before)" in run.summary
    again = megatron.train(*flags, "--load", tmp_path, items=items)
    assert again.steps == []
    more = (*FLAGS, "--odb-epochs", 2, "--lr-decay-samples", 100, "--load", tmp_path)
    rest = megatron.train(*more, items=items)
    assert rest.steps[-1].record["consumed_samples"] == 2 * NUM


def test_what_does_not_work_is_refused_by_name(megatron: Megatron, tmp_path: Path) -> None:
    shards = _shards(_uneven())
    quota = ("--train-samples", 24)

    def errors(*flags: Any, items: Any = (shards, None, None)) -> str:
        return "\n".join(megatron.refused(*flags, items=items))

    unknown = errors(*FLAGS, "--odb-epochs", 1)
    assert "give --lr-decay-samples N" in unknown
    assert "where files are to be trained, --data-path" in unknown
    assert "the valid dataset is an iterable" in errors(
        *FLAGS, *quota, "--eval-iters", 1, items=(shards, shards, None)
    )
    assert "an iterable train dataset needs --odb" in errors(
        "--eval-iters", 0, "--num-workers", 0, *quota
    )
    epochs = ("--odb-epochs", 1, "--lr-decay-samples", 100)
    assert "give --train-samples N instead" in errors(*FLAGS, *epochs, items=([{}], None, None))
    stateless = (_shards(_uneven(), kind=Stateless), None, None)
    flags = (*FLAGS, *quota)
    run = megatron.train(*flags, "--exit-interval", 1, *_saving(tmp_path), items=stateless)
    assert "has no state of its own" in run.replicas[0].output
    assert "had no state of its own" in errors(*flags, "--load", tmp_path, items=stateless)
