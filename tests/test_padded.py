"""`odb_megatron.data.stream`: the baseline's items hold what the packed path packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_up_data import Records, rules, single_stream

from odb_megatron.data.sample import BadRecordError, Sample
from odb_megatron.data.stream import PaddedDataset, SampleStream
from odb_megatron.data.thd import PAD_TOKEN

LENGTHS = [1, 7, 8, 3]


def _padded(stream: SampleStream) -> PaddedDataset:
    return PaddedDataset(stream, sequence_length=8, split="train")


def test_items_are_the_streams_samples_padded_to_the_sequence_length() -> None:
    stream = single_stream(Records(LENGTHS), num_samples=11)
    dataset = _padded(stream)
    assert (len(dataset), dataset.split) == (11, "train")
    lengths = []
    for position in range(11):
        item, sample = dataset[position], stream.fetch(position)
        assert isinstance(sample, Sample)
        length = item["length"]
        lengths.append(length)
        assert (length, item["position"]) == (len(sample), position)
        for name in ("tokens", "labels", "loss_mask"):
            assert item[name].dtype == getattr(sample, name).dtype
            assert item[name][:length].tolist() == getattr(sample, name).tolist()
        assert item["tokens"][length:].tolist() == [PAD_TOKEN] * (8 - length)
        assert item["loss_mask"][length:].tolist() == [0.0] * (8 - length)
        assert item["position_ids"].tolist() == list(range(8))
    assert set(lengths) == set(LENGTHS)  # also one that fills the row


def test_a_position_that_emits_nothing_carries_no_loss() -> None:
    skip = rules(skip_bad=True)
    item = _padded(single_stream(Records([0]), sample_rules=skip))[0]
    assert (item["length"], item["loss_mask"].sum()) == (0, 0)
    assert item["tokens"].tolist() == [PAD_TOKEN] * 8
    with pytest.raises(BadRecordError, match="made up:1: no token to learn from"):
        _padded(single_stream(Records([0])))[0]


def test_torchs_default_collation_takes_the_items() -> None:
    dataset = _padded(single_stream(Records(LENGTHS)))
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=4)
    assert batch.pop("message") == [""] * 4
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "tokens": (4, 8), "labels": (4, 8), "loss_mask": (4, 8), "position_ids": (4, 8),
        "length": (4,), "position": (4,), "truncated": (4,), "skipped": (4,),
    }  # fmt: skip
    assert (batch["tokens"].dtype, batch["loss_mask"].dtype) == (torch.int64, torch.float32)
    assert np.isin(batch["length"].numpy(), LENGTHS).all()
