"""Packed against padded: a step has the samples that Megatron's own samplers give it."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_world import ChatFile, Megatron, Run, chat_file

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

NUM_SAMPLES = 32  # four full steps: Megatron drops a partial one
TRAIN = ("--train-samples", NUM_SAMPLES)
EVAL = ("--eval-iters", 1)


def test_orders(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    orders = ("single", "cyclic", "cyclic --no-data-sharding")
    seen = set()
    for order in orders:
        flags = ("--dataloader-type", *order.split(), *data_flags)
        packed, _ = _both(megatron, *TRAIN, *flags, "--eval-interval", 2)
        assert len(set(packed.all_ids)) == NUM_SAMPLES
        assert len(packed.evaluations) == 3
        seen.add(tuple(tuple(step.all_ids) for step in packed.steps))
    assert len(seen) == len(orders)


def test_cyclic_refuses_what_it_would_leave_out(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    errors = megatron.refused(
        "--odb", "--train-samples", 33, "--dataloader-type", "cyclic", *data_flags
    )
    assert all("leaves out 1 of 33 samples" in error for error in errors)


def test_a_partial_step_is_what_padded_drops(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    flags = ("--train-samples", 35, *data_flags)
    packed, padded = megatron.train("--odb", *flags), megatron.train(*flags)
    assert [step.all_ids for step in packed.steps[:4]] == [s.all_ids for s in padded.steps]
    assert len(packed.steps) == len(padded.steps) + 1
    assert "not reached         3 requested samples" in padded.summary


def test_weighted_blend(megatron: Megatron, tokenizer_folder: Path, chats: ChatFile) -> None:
    other = chat_file(tokenizer_folder, name="blended", num_records=40, seed=5)
    packed, _ = _both(
        megatron,
        *(*TRAIN, *EVAL, "--split", "80,20,0"),
        *("--data-path", 0.75, chats.path, 0.25, other.path),
    )
    sources = Counter(name.partition(":")[0] for name in packed.all_ids)
    assert sources == {"0": 24, "1": 8}
    for path, count in ((chats.path, 24), (other.path, 8)):
        assert f"{path}: {count} samples" in packed.summary
    said = re.findall("^odb: (an epoch of the blend .*)$", packed.replicas[0].output, re.M)
    expected = (
        f"32 draws by weight: 24 of the 49 samples of {chats.path} (25 not in this epoch), "
        f"8 of the 32 samples of {other.path} (24 not in this epoch)"
    )
    assert said == [f"an epoch of the blend is {expected}"]


def test_blend_without_weights_and_more_than_an_epoch(
    megatron: Megatron, tokenizer_folder: Path
) -> None:
    """12 + 8 records, 32 samples: each once before any comes again."""
    sizes = {"few": 12, "fewer": 8}
    files = [
        chat_file(tokenizer_folder, name=name, num_records=size, seed=6)
        for name, size in sizes.items()
    ]
    packed, _ = _both(
        megatron,
        *(*TRAIN, "--eval-iters", 0, "--train-data-path", *(file.path for file in files)),
    )
    first = {name for name in packed.all_ids if name.endswith("@0")}
    expected = {f"{source}:{record}@0" for source in (0, 1) for record in range((12, 8)[source])}
    assert first == expected
    assert len(packed.all_ids) == len(set(packed.all_ids)) == NUM_SAMPLES


def test_one_file_with_a_split(megatron: Megatron, chats: ChatFile) -> None:
    packed, _ = _both(megatron, *TRAIN, *EVAL, "--data-path", chats.path, "--split", "70,20,10")
    assert max(int(name[2:].partition("@")[0]) for name in packed.all_ids) < 43  # 70 % of 61
    assert [where for where, _ in packed.evaluations] == [
        "iteration 4 on validation set",
        "iteration 4 on test set",
    ]


def test_indexed_dataset_with_null_tokenizer(megatron: Megatron, tmp_path: Path) -> None:
    """Documents as they are, never cut or joined, loss on every token."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 65, size=40).tolist()
    prefix = _write_indexed(tmp_path / "documents", lengths, generator)
    packed, _ = _both(
        megatron,
        *(*TRAIN, *EVAL, "--data-path", prefix, "--split", "90,10,0"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 300, "--tokenizer-model", ""),
    )
    for step in packed.steps:
        records = [int(name[2:].partition("@")[0]) for name in step.all_ids]
        expected = sum(lengths[record] - 1 for record in records)
        assert step.record["tokens"] == step.record["loss_tokens"] == expected


def test_own_map_style_datasets(megatron: Megatron) -> None:
    """Arrays, lists and tensors; fractional steps of the order are Megatron's."""
    import torch

    generator = np.random.default_rng(1)
    kinds = (np.asarray, list, torch.tensor)
    items = []
    for index in range(50):
        ids = generator.integers(0, 256, size=int(generator.integers(3, 64)))
        mask = [float(place % 3 > 0) for place in range(len(ids) - 1)]
        tokens, labels = (kinds[index % 3](part.tolist()) for part in (ids[:-1], ids[1:]))
        items.append({"tokens": tokens, "labels": labels, "loss_mask": kinds[index % 3](mask)})
    packed, _ = _both(megatron, *TRAIN, *EVAL, items=(items[:40], items[40:], None))
    masks = [sum(1 for place in range(len(item["tokens"])) if place % 3) for item in items[:40]]
    for step in packed.steps:
        records = [int(name[2:].partition("@")[0]) for name in step.all_ids]
        assert step.record["loss_tokens"] == sum(masks[record] for record in records)


def _both(megatron: Megatron, *flags: Any, items: Any = None) -> tuple[Run, Run]:
    """A packed and a padded run, which must agree step by step."""
    packed = megatron.train("--odb", *flags, items=items)
    padded = megatron.train(*flags, items=items)
    assert len(packed.steps) == len(padded.steps) == NUM_SAMPLES // 8
    for one, other in zip(packed.steps, padded.steps, strict=True):
        assert one.all_ids == other.all_ids
        for name in ("tokens", "loss_tokens", "samples", "consumed_samples"):
            assert one.record[name] == other.record[name]
        assert one.record["learning_rate"] == other.record["learning_rate"]
        assert one.record["grad_norm"] == pytest.approx(other.record["grad_norm"], rel=1e-4)
    assert packed.losses == pytest.approx(padded.losses, abs=1e-5)
    assert [where for where, _ in packed.evaluations] == [w for w, _ in padded.evaluations]
    for (_, one), (_, other) in zip(packed.evaluations, padded.evaluations, strict=True):
        assert math.isclose(one, other, abs_tol=1e-5)
    used = [sorted(p for replica in run.evaluated for p in replica) for run in (packed, padded)]
    assert used[0] == used[1]
    return packed, padded


def _write_indexed(prefix: Path, lengths: list[int], generator: np.random.Generator) -> str:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        ids = torch.from_numpy(generator.integers(0, 300, size=length))
        builder.add_document(ids, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
