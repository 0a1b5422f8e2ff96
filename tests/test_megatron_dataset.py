"""`odb_megatron.data.megatron_dataset`: splits, blends and caches by Megatron's own builder.

One spawn of two gloo processes covers what needs process groups; the rest runs here without.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split
from synthetic_data import Letters, Records, rules

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.megatron_dataset import (
    SampleDataset,
    SampleDatasetConfig,
    build_datasets,
    count_epoch,
    stream_from_dataset,
)
from odb_megatron.data.sample import Sample
from odb_megatron.data.sources import MapSource
from odb_megatron.data.stream import SampleStream
from odb_megatron.testing.gloo import run_replicas

NO_SIZES = (None, None, None)


@pytest.fixture(scope="module")
def write_chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a file of `size` records; each text says which it is."""
    folder = tmp_path_factory.mktemp("chats")

    def write(name: str, size: int) -> str:
        path = folder / f"{name}-{size}.jsonl"
        if not path.exists():
            path.write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(size)))
        return str(path)

    return write


def _config(**changes: Any) -> SampleDatasetConfig:
    values: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 64,
        "rules": rules(),
        "renderer": ChatRenderer(Letters()),
    }
    return SampleDatasetConfig(**values | changes)


def _build(config: SampleDatasetConfig, sizes: Sequence[int | None] = NO_SIZES) -> list[Any]:
    return build_datasets(config, num_samples=sizes, is_built_on_rank=lambda: True)


def _stream(dataset: Any, *, num_samples: int | None = None) -> SampleStream:
    return stream_from_dataset(dataset, num_samples=num_samples)


def _texts(stream: SampleStream, positions: Sequence[int] | None = None) -> list[str]:
    texts = []
    for position in range(stream.epoch_size) if positions is None else positions:
        sample = stream.fetch(position)
        assert isinstance(sample, Sample)
        texts.append(Letters.decode([*sample.tokens.tolist(), int(sample.labels[-1])])[:-1])
    return texts


def _all(name: str, size: int, *, first: int = 0) -> list[str]:
    return [f"{name} {i}" for i in range(first, size)]


# --- splits ----------------------------------------------------------------------------------

SPLITS = st.one_of(
    st.sampled_from(["969, 30, 1", "99,1,0", "1,0,1", "100", "0.5,0.25,0.25", "1,1,1", "0,0,1"]),
    st.tuples(*[st.integers(0, 1000)] * 3).filter(any).map(lambda parts: ",".join(map(str, parts))),
)


@settings(max_examples=150)
@given(size=st.integers(1, 400), split=SPLITS)
def test_splits_are_disjoint_and_cover_the_data(size: int, split: str) -> None:
    source = MapSource(Records([1] * size), rules=rules(), name="synthetic")
    config = _config(blend=(["synthetic"], None), split=split, opened={"synthetic": source})
    built = _build(config)
    records: list[int] = []
    for each, dataset in zip(Split, built, strict=True):
        assert (dataset is None) == (config.split_matrix[each.value] is None)  # type: ignore[index]
        if dataset is None:
            continue
        assert isinstance(dataset, SampleDataset)
        records += dataset.indices.tolist()
        assert len(dataset) == len(dataset.indices)
        if len(dataset) == 0:
            with pytest.raises(ValueError, match=f"synthetic has {size} records and none of them"):
                _stream(dataset)
            continue
        stream = _stream(dataset)
        located = [stream.locate(position).record for position in range(2 * len(dataset))]
        assert Counter(located) == dict.fromkeys(dataset.indices.tolist(), 2)
    assert records == list(range(size))  # in order: train first, test last


def test_each_split_may_have_paths_of_its_own(write_chats: Any) -> None:
    paths = [write_chats(name, size) for name, size in (("a", 6), ("b", 4), ("c", 5))]
    config = _config(blend_per_split=[([paths[0], paths[1]], None), ([paths[2]], [1.0]), None])
    train, valid, test = _build(config, (None, 7, None))
    assert test is None
    assert sorted(_texts(_stream(train))) == _all("a", 6) + _all("b", 4)
    assert sorted(_texts(_stream(valid))) == _all("c", 5)
    assert _stream(train).source_names == tuple(paths[:2])


# --- blends ----------------------------------------------------------------------------------


def test_a_blend_without_weights_is_exhaustive(write_chats: Any) -> None:
    paths = [write_chats("a", 10), write_chats("b", 30)]
    (train, valid, test) = _build(_config(blend=(paths, None), split="8,2,0"), (99, 99, 99))
    assert test is None
    assert isinstance(train, BlendedDataset)
    stream = _stream(train, num_samples=64)
    assert (len(stream), stream.epoch_size) == (64, 32)
    assert sorted(_texts(stream)) == sorted(_all("a", 8) + _all("b", 24))
    assert sorted(_texts(stream, range(32, 64))) == sorted(_texts(stream))
    assert sorted(_texts(_stream(valid))) == sorted(
        _all("a", 10, first=8) + _all("b", 30, first=24)
    )
    sources = [stream.locate(position).source for position in range(32)]
    for start in range(0, 32, 8):  # evenly mixed, not one after the other
        assert 1 <= sources[start : start + 8].count(0) <= 3


def test_weights_set_the_proportions_and_draws_go_on(write_chats: Any) -> None:
    paths = [write_chats("a", 10), write_chats("b", 30)]
    config = _config(blend=(paths, [3.0, 1.0]), split="1,0,0")
    dataset = _build(config, (40, 0, 0))[0]
    stream = _stream(dataset, num_samples=120)
    assert stream.epoch_size == 40
    texts = _texts(stream, range(120))
    counts = Counter(texts)
    assert sum(counts[text] for text in _all("a", 10)) == 90
    assert {counts[text] for text in _all("a", 10)} == {9}
    assert {counts[text] for text in _all("b", 30)} == {1}
    from_a = [text for text in texts if text.startswith("a")]
    assert all(sorted(from_a[at : at + 10]) == _all("a", 10) for at in range(0, 90, 10))
    item = dataset[0]
    assert isinstance(item["sample"], Sample)


def test_a_weighted_blend_needs_a_size(write_chats: Any) -> None:
    paths = [write_chats("a", 10), write_chats("b", 30)]
    config = _config(blend=(paths, [3.0, 1.0]), split="8,2,0")
    per_split = _config(blend_per_split=[(paths, None), (paths, [1.0, 1.0]), None])
    for one, sizes in ((config, (10, None, None)), (per_split, NO_SIZES)):
        with pytest.raises(ValueError, match="the valid split is a weighted blend, which has no e"):
            _build(one, sizes)
    assert [one is None for one in _build(config, (10, 0, None))] == [False, False, True]


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("flag", ["data_path", "valid_data_path"])
def test_a_weight_that_is_none_is_refused(write_chats: Any, flag: str, weight: str) -> None:
    pytest.importorskip("megatron.training", reason="megatron.training is not installed")
    from odb_megatron.megatron.setup import dataset_config

    bad = write_chats("b", 30)
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    args = argparse.Namespace(
        **dict.fromkeys((*names, "data_args_path", "per_split_data_args_path", "fim_data")),
        mock_data=False,
    )
    setattr(args, flag, ["0.7", write_chats("a", 10), weight, bad])
    with pytest.raises(ValueError, match="; expected a number above 0: leave out the p") as caught:
        dataset_config(args, rules=rules())
    assert str(caught.value).startswith(f"the weight of {bad} is {weight}; ")
    assert "\n" not in str(caught.value)


def test_what_an_epoch_of_a_weighted_blend_repeats_is_said(write_chats: Any) -> None:
    """0.7 a 0.3 b, for as many draws as there are records: what a user might take for a pass."""
    paths = [write_chats("a", 120), write_chats("b", 30)]
    config = _config(blend=(paths, [0.7, 0.3]), split="1,0,0")
    stream = _stream(_build(config, (150, 0, 0))[0], num_samples=150)
    assert stream.repeats() == (
        f"an epoch of the blend is 150 draws by weight: 105 of the 120 samples of {paths[0]} (15 "
        f"not in this epoch), 45 of the 30 samples of {paths[1]} (15 of them again)"
    )
    counts = Counter(_texts(stream, range(150)))
    assert len(counts.keys() & set(_all("a", 120))) == 105
    assert sorted(counts[text] for text in _all("b", 30)) == [1] * 15 + [2] * 15
    unweighted = _build(_config(blend=(paths, None), split="1,0,0"))[0]
    assert _stream(unweighted).repeats() == ""


def test_a_source_without_a_record_in_the_split_is_named(write_chats: Any) -> None:
    few = write_chats("few", 3)
    config = _config(blend=([write_chats("a", 100), few], None), split="9,1,0")
    with pytest.raises(
        ValueError, match=f"{few} has 3 records and none of them falls into the valid split: chan"
    ):
        _build(config)


@pytest.mark.parametrize("sizes", [(1, 1), (7, 10), (10, 13), (33, 50)])
@pytest.mark.parametrize("shares", ["8,1,1", "1,2,3", "50,25,25", "1,0,0"])
def test_count_epoch_is_what_is_built(
    write_chats: Any, sizes: tuple[int, int], shares: str
) -> None:
    """Rounding included, for one source and for a blend, without opening a tokenizer."""
    paths = [write_chats("a", sizes[0]), write_chats("b", sizes[1])]

    def counted(blend: list[str]) -> list[int | None]:
        config = _config(blend=(blend, None), split=shares, renderer=None, rules=None)
        shares_of = config.split_matrix
        assert shares_of is not None
        return [count_epoch(config, one) if shares_of[one.value] else None for one in Split]

    for blend in ([paths[0]], paths):
        config = _config(blend=(blend, None), split=shares)
        if len(blend) > 1 and 0 in [*counted(blend[:1]), *counted(blend[1:])]:
            with pytest.raises(ValueError, match="none of them falls into"):
                _build(config)
            continue
        for dataset, count in zip(_build(config), counted(blend), strict=True):
            if count == 0:
                with pytest.raises(ValueError, match="none of them falls into"):
                    _stream(dataset)
            else:
                assert (None if dataset is None else _stream(dataset).epoch_size) == count


def test_count_epoch_of_splits_with_paths_of_their_own(write_chats: Any) -> None:
    paths = [write_chats("a", 6), write_chats("b", 4)]
    config = _config(blend_per_split=[(paths, [0.5, 0.5]), ([paths[1]], None), None])
    assert count_epoch(config) == 10
    assert count_epoch(config, Split.valid) == 4
    with pytest.raises(ValueError, match="needs data for the test split: .* or --test-data-path"):
        count_epoch(config, Split.test)
    assert _stream(_build(config, (10, None, None))[1]).epoch_size == 4


# --- opening and caching ---------------------------------------------------------------------


def test_a_path_is_opened_once(write_chats: Any) -> None:
    path = write_chats("a", 12)
    config = _config(blend=([path], None), split="8,2,2")
    built = _build(config)
    assert len({id(dataset.part.source) for dataset in built}) == 1
    assert config.open(path) is built[0].part.source


def test_the_cache_is_written_and_read(
    write_chats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_chats("a", 10), write_chats("b", 30)]

    def config() -> SampleDatasetConfig:
        return _config(blend=(paths, None), split="8,2,0", path_to_cache=str(tmp_path))

    first = [_stream(dataset) for dataset in _build(config())[:2]]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 8  # description and two indices of train and valid, lines of both files
    index = next(tmp_path.glob("*-train-dataset_index.npy"))
    stamp = index.stat().st_mtime_ns
    again = [_stream(dataset) for dataset in _build(config())[:2]]
    assert index.stat().st_mtime_ns == stamp
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for old, new in zip(first, again, strict=True):
        assert _texts(old) == _texts(new)
        assert old.fingerprint() == new.fingerprint()
    np.save(index, np.load(index)[::-1])  # guard: it is really read
    assert _stream(_build(config())[0]).fingerprint() != first[0].fingerprint()


# --- with process groups ---------------------------------------------------------------------


def _build_in_process(rank: int, folder: str, paths: list[str]) -> dict[str, Any]:
    """All kinds of builds on one rank, with a cold cache each."""
    cases: dict[str, tuple[dict[str, Any], Sequence[int | None]]] = {
        "single": ({"blend": (paths[:1], None), "split": "8,1,1"}, NO_SIZES),
        "exhaustive": ({"blend": (paths, None), "split": "8,1,1"}, NO_SIZES),
        "weighted": ({"blend": (paths, [3.0, 1.0]), "split": "8,1,1"}, (40, 8, 4)),
        "per split": ({"blend_per_split": [(paths, None), (paths[:1], None), None]}, NO_SIZES),
        "no cache": ({"blend": (paths, None), "split": "8,1,1", "path_to_cache": None}, NO_SIZES),
    }
    results: dict[str, Any] = {}
    for name, (values, sizes) in cases.items():
        cache = {"path_to_cache": str(Path(folder) / name)}
        built = [one and _stream(one) for one in _build(_config(**cache | values), sizes)]
        results[name] = [one and (one.fingerprint(), _texts(one)) for one in built]
    config = _config(blend=(paths, None), split="8,1,1")
    leaders = build_datasets(config, num_samples=NO_SIZES, is_built_on_rank=lambda: rank == 0)
    results["leaders"] = [dataset is None for dataset in leaders]
    return results


@pytest.mark.slow
def test_ranks_build_the_same_from_a_cold_cache(write_chats: Any, tmp_path: Path) -> None:
    paths = [write_chats("a", 40), write_chats("b", 60)]
    first, second = run_replicas(_build_in_process, 2, str(tmp_path), paths, timeout_s=120)
    assert first.pop("leaders") == [False] * 3
    assert second.pop("leaders") == [True] * 3
    assert first == second
    everything = sorted(_all("a", 40) + _all("b", 60))
    for name, expected in (("single", sorted(_all("a", 40))), ("exhaustive", everything)):
        assert sorted(text for _, texts in first[name] for text in texts) == expected
    assert [len(texts) for _, texts in first["weighted"]] == [40, 8, 4]
    assert sorted(first["per split"][0][1]) == everything
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"exhaustive", "per split", "single", "weighted"}  # single: lines of its file
    assert first["no cache"] == first["exhaustive"]
    here = _build(_config(blend=(paths, None), split="8,1,1"))
    assert [_texts(_stream(one)) for one in here] == [texts for _, texts in first["exhaustive"]]
