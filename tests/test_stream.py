"""`odb_megatron.data.stream`: which record lies at which position."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_data import BASE, Letters, Records, rules, single_stream

from odb_megatron.data.chat import ChatFormatError, ChatRenderer
from odb_megatron.data.order import CyclicOrder, PassOrder
from odb_megatron.data.sample import BadRecordError, Sample, Skipped
from odb_megatron.data.sources import ChatSource, MapSource
from odb_megatron.data.stream import (
    Blend,
    PaddedDataset,
    SampleStream,
    SourcePart,
    StreamReader,
    own_positions,
)
from odb_megatron.data.thd import PAD_TOKEN
from odb_megatron.plan.padding import OverlongError
from odb_megatron.plan.record import PlanConfig


def _parts(sizes: Sequence[int], *, seed: int = 7, lengths: int = 3) -> list[SourcePart]:
    return [
        SourcePart(
            source=MapSource(Records([lengths] * size), rules=rules(), name=f"source {number}"),
            order=PassOrder(np.arange(size), seed=seed),
        )
        for number, size in enumerate(sizes)
    ]


def _blend(source_index: Sequence[int], *, num_sources: int) -> Blend:
    """What Megatron's helpers make: places counted per source."""
    seen = [0] * num_sources
    places = []
    for source in source_index:
        places.append(seen[source])
        seen[source] += 1
    return Blend(source_index=np.array(source_index, np.int16), source_place=np.array(places))


def _drawn(stream: SampleStream, positions: range) -> list[tuple[int, int]]:
    return [(where.source, where.record) for where in map(stream.locate, positions)]


@given(size=st.integers(1, 30), seed=st.integers(0, 2**32), epochs=st.integers(1, 3))
def test_every_epoch_of_a_source_visits_each_record_once(size: int, seed: int, epochs: int) -> None:
    stream = single_stream(Records([2] * size), seed=seed)
    assert (len(stream), stream.epoch_size) == (size, size)
    for epoch in range(epochs):
        places = range(epoch * size, (epoch + 1) * size)
        located = [stream.locate(position) for position in places]
        assert sorted(where.record for where in located) == list(range(size))
        assert [(where.epoch, where.place) for where in located] == [
            (epoch, place) for place in range(size)
        ]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    data=st.data(),
    epochs=st.integers(1, 6),
)
def test_a_weighted_blend_goes_on_where_it_stopped(
    sizes: list[int], data: st.DataObject, epochs: int
) -> None:
    """Each source's draws, over all epochs, are its shuffled passes without gap or repeat."""
    order = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=25))
    parts = _parts(sizes)
    stream = SampleStream(parts, blend=_blend(order, num_sources=len(sizes)))
    drawn = _drawn(stream, range(epochs * len(order)))
    for source, part in enumerate(parts):
        records = [record for at, record in drawn if at == source]
        assert len(records) == epochs * order.count(source)
        assert records == [part.order[i] for i in range(len(records))]
        counts = Counter(records)
        if records:  # no record is a whole pass ahead of another
            assert max(counts.values()) - min(counts[r] for r in range(sizes[source])) <= 1


def test_locate_and_fetch_agree() -> None:
    lengths = [1 + i % 5 for i in range(20)]
    stream = single_stream(Records(lengths))
    for position in range(45):
        where, sample = stream.locate(position), stream.fetch(position)
        assert isinstance(sample, Sample)
        assert sample.tokens[0] == where.record * BASE
        assert len(sample) == lengths[where.record]
    parts = _parts([2, 3])
    blend = SampleStream(parts, blend=_blend([1, 0, 1], num_sources=2))
    sources = [blend.fetch(position).source for position in range(6)]
    assert sources == [1, 0, 1, 1, 0, 1]
    assert blend.source_names == ("source 0", "source 1")


def test_cyclic_over_several_epochs_still_visits_each_record_equally() -> None:
    order = CyclicOrder(total=40, num_replicas=2, data_sharding=True)
    stream = single_stream(Records([2] * 10), num_samples=40, order=order)
    assert len(stream) == 40
    located = [stream.locate(position) for position in range(40)]
    assert Counter(where.record for where in located) == dict.fromkeys(range(10), 4)
    assert len({(where.epoch, where.place) for where in located}) == 40
    assert [where.epoch for where in located] != sorted(where.epoch for where in located)


def test_an_empty_split_is_refused() -> None:
    source = MapSource(Records([2] * 5), rules=rules(), name="few")
    part = SourcePart(source=source, order=PassOrder(np.arange(0), seed=1))
    text = "few has 5 records and none of them falls into the valid split: change --split"
    with pytest.raises(ValueError, match=text):
        SampleStream([part], split="valid")


def test_the_fingerprint_follows_all_that_replicas_must_share() -> None:
    def stream(
        sizes: Sequence[int] = (4, 6), order: Sequence[int] = (0, 1, 1, 0, 1), **more: Any
    ) -> SampleStream:
        num_samples = more.pop("num_samples", None)
        return SampleStream(
            _parts(sizes, **more),
            blend=_blend(order, num_sources=len(sizes)),
            num_samples=num_samples,
        )

    def cyclic(sharding: bool) -> SampleStream:
        order = CyclicOrder(total=4, num_replicas=2, data_sharding=sharding)
        return single_stream(Records([3] * 4), order=order)

    base = stream().fingerprint()
    assert base == stream().fingerprint()
    others = [stream(sizes=(4, 7)), stream(order=(0, 1, 0, 1, 1)), stream(seed=8),
              stream(num_samples=9), single_stream(Records([3] * 4)), cyclic(True), cyclic(False),
              *(single_stream(Records([2]), seed=seed) for seed in range(3))]  # fmt: skip
    assert len({base, *(other.fingerprint() for other in others)}) == 1 + len(others)


# --- worker processes ------------------------------------------------------------------------


def _tokens(item: Any) -> Any:
    return item.tokens.tolist() if isinstance(item, Sample) else item


class _ProcessIds(Records):
    """Each item says which process made it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.array([os.getpid()])
        return {"tokens": ids, "labels": ids, "loss_mask": [1]}


def _reader(
    stream: SampleStream, *, num_workers: int = 0, replica: int = 0, num_replicas: int = 1
) -> StreamReader:
    config = PlanConfig(
        total=len(stream),
        global_batch_size=4 * num_replicas,
        num_replicas=num_replicas,
        token_budget=64,
    )
    return StreamReader(stream, config, replica=replica, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_are_processes_and_end_with_the_reader(num_workers: int) -> None:
    reader = _reader(single_stream(_ProcessIds([1] * 40)), num_workers=num_workers)
    seen = {_tokens(item)[0] for _, item in reader.read(36)}
    assert len(seen) == max(1, num_workers)
    assert (os.getpid() in seen) == (num_workers == 0)
    start = time.monotonic()
    reader.close()
    assert time.monotonic() - start < 4  # 5 s is torch's time-out
    assert num_workers == 0 or not any(map(psutil.pid_exists, seen))


def test_workers_give_what_this_process_gives() -> None:
    lengths = [i % 4 for i in range(24)]  # every fourth is a bad record
    sample_rules = rules(skip_bad=True)
    stream = single_stream(Records(lengths), sample_rules=sample_rules, num_samples=60)
    for replica in range(2):
        runs = [
            _reader(stream, num_workers=num, replica=replica, num_replicas=2).read(30)
            for num in (0, 2)
        ]
        named = [[(position, _tokens(item)) for position, item in run] for run in runs]
        expected = [(at, _tokens(stream.fetch(at))) for at in range(replica, 60, 2)]
        assert named[0] == named[1] == expected
    assert sum(isinstance(item, Skipped) for _, item in runs[0]) > 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_come_out_of_a_worker_as_they_are(tmp_path: Path, num_workers: int) -> None:
    """With file and line; a user's with its traceback, a template's without."""
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"text": "ab"}\n\n{"text": "cd"}\n{"txt": "ef"}\n{"text": "0123456789"}\n')
    other.write_text('{"question": "hi", "answer": "yo"}\n')
    limits = rules(context=8, token_budget=8)
    broken = ChatRenderer(Letters("{{ messages[0].content"))
    for source, expected in (
        (ChatSource(str(path), rules=limits, renderer=ChatRenderer(Letters())),
         {2: (BadRecordError, f"{path}:4: "), 3: (OverlongError, f"{path}:5: ")}),
        (ChatSource(str(other), rules=limits, renderer=broken),
         {0: (ChatFormatError, f"{other}:1: ")}),
        (MapSource(Records([2, 2, 2], failing=1), rules=limits, name="mine"),
         {1: (BadRecordError, "mine:2: record 1 raised KeyError: 'no such thing in record 1'")}),
    ):  # fmt: skip
        order = PassOrder(np.arange(len(source)), seed=3)
        stream = SampleStream([SourcePart(source=source, order=order)])
        reader, seen = _reader(stream, num_workers=num_workers), {}
        for position in range(len(source)):
            try:
                reader.read(1)
            except Exception as error:  # with its frames it would keep the workers alive
                seen[order[position]] = error.with_traceback(None)
        assert seen.keys() == expected.keys()
        for record, (kind, text) in expected.items():
            assert type(seen[record]) is kind
            assert str(seen[record]).startswith(text)
            is_users = "raised" in text
            assert ("synthetic_data.py" in str(seen[record])) == is_users
            assert ("Traceback" in str(seen[record])) == is_users


def test_reading_leaves_the_models_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    for num_workers in (0, 1):
        _reader(single_stream(Records([2] * 4)), num_workers=num_workers).read(1)
    assert torch.equal(torch.random.get_rng_state(), before)


@given(
    total=st.integers(0, 40),
    replicas=st.integers(1, 5),
    share=st.integers(1, 4),
    steps=st.integers(0, 3),
)
def test_each_step_is_divided_among_the_replicas(
    total: int, replicas: int, share: int, steps: int
) -> None:
    """From any step on, and alike for all that come after it."""
    batch = share * replicas
    config = PlanConfig(
        total=total, global_batch_size=batch, num_replicas=replicas, token_budget=64
    )
    consumed = min(steps * batch, total)
    own = [list(own_positions(config, replica=r, consumed=consumed)) for r in range(replicas)]
    assert sorted(at for part in own for at in part) == list(range(consumed, total))
    for part, whole in zip(
        own, (own_positions(config, replica=r, consumed=0) for r in range(replicas)), strict=True
    ):
        assert part == [at for at in whole if at >= consumed]
    for begin in range(consumed, total, batch):
        sizes = [sum(begin <= at < begin + batch for at in part) for part in own]
        assert max(sizes) - min(sizes) <= 1


# --- the padded baseline -----------------------------------------------------------------------


def test_items_are_the_streams_samples_padded_to_the_sequence_length() -> None:
    lengths_of = [1, 7, 8, 3, 0]
    stream = single_stream(Records(lengths_of), num_samples=11, sample_rules=rules(skip_bad=True))
    dataset = PaddedDataset(stream, sequence_length=8, split="train")
    assert (len(dataset), dataset.split) == (11, "train")
    lengths = []
    for position in range(11):
        item, sample = dataset[position], stream.fetch(position)
        length = item["length"]
        lengths.append(length)
        assert item["position"] == position
        if isinstance(sample, Skipped):  # carries no loss
            assert (length, item["loss_mask"].sum(), item["message"]) == (0, 0, sample.message)
            assert item["tokens"].tolist() == [PAD_TOKEN] * 8
            continue
        assert length == len(sample)
        for name in ("tokens", "labels", "loss_mask"):
            assert item[name].dtype == getattr(sample, name).dtype
            assert item[name][:length].tolist() == getattr(sample, name).tolist()
        assert item["tokens"][length:].tolist() == [PAD_TOKEN] * (8 - length)
        assert item["loss_mask"][length:].tolist() == [0.0] * (8 - length)
        assert item["position_ids"].tolist() == list(range(8))
    assert set(lengths) == set(lengths_of)  # also one that fills the row
