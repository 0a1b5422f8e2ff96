"""Sample lengths of a simulation: every form of a specification, and every way to get one wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from odb_megatron.simulation.lengths import read_lengths


def test_lognormal_has_the_mean_and_spread_asked_for() -> None:
    found = read_lengths("lognormal:mean=500,cv=0.5,max=100000,n=50000", token_budget=100000)
    about = found.summary()
    assert about["num_samples"] == 50000
    assert about["mean"] == pytest.approx(500, rel=0.01)
    assert about["cv"] == pytest.approx(0.5, rel=0.02)


def test_lognormal_is_clipped_and_follows_its_seed() -> None:
    spec = "lognormal:mean=50,cv=2.0,max=64,n=1000"
    values = read_lengths(spec, token_budget=64).values
    assert values.dtype == np.int64
    assert values.min() >= 1
    assert values.max() == 64
    assert np.array_equal(values, read_lengths(spec + ",seed=0", token_budget=64).values)
    assert not np.array_equal(values, read_lengths(spec + ",seed=1", token_budget=64).values)


def test_the_default_number_of_samples() -> None:
    assert len(read_lengths("lognormal:mean=5,cv=0,max=8", token_budget=8).values) == 131072


def test_files_are_read_and_put_in_random_order(tmp_path: Path) -> None:
    lengths = list(range(1, 101))
    np.save(tmp_path / "a.npy", np.array(lengths, dtype=np.int32))
    (tmp_path / "a.json").write_text(json.dumps(lengths))
    (tmp_path / "b.json").write_text(json.dumps({"other": [1], "mine": lengths}))
    orders = []
    for name in ("a.npy", "a.json", "b.json#mine"):
        values = read_lengths(f"file:{tmp_path / name}", token_budget=100).values
        assert sorted(values.tolist()) == lengths
        orders.append(values.tolist())
    assert orders[0] == orders[1] == orders[2] != lengths
    other = read_lengths(f"file:{tmp_path / 'a.npy'}", token_budget=100, seed=1).values
    assert other.tolist() != orders[0]


def test_a_data_file_goes_through_the_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from odb_megatron.data.tokenizer import train_bpe

    texts = ["one two three " * count for count in (1, 2, 40)]
    folder = train_bpe(texts, vocab_size=300, folder=tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    records = [*({"text": text} for text in texts), {"neither": 1}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = read_lengths(str(data), token_budget=32, tokenizer=str(folder))
    assert len(found.values) == 3
    assert found.values.max() == 32
    assert (found.num_truncated, found.num_left_out) == (1, 1)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("lognormal:mean=500,cv=1.0", "lacks max"),
        ("lognormal:", "'' is not understood"),
        ("lognormal:mean=500,cv=1.0,max=10,sd=4", "'sd=4' is not understood; expected NAME=NUMBER"),
        ("lognormal:mean=x,cv=1.0,max=10", "mean=x is not a number"),
        ("lognormal:mean=5,cv=1.0,max=1.5", "max=1.5 is not a whole number"),
        ("lognormal:mean=5,cv=-1,max=10", "cv=-1 must be from 0 to 100"),
        ("lognormal:mean=5,cv=nan,max=10", "cv=nan must be from 0 to 100"),
        ("lognormal:mean=5,cv=1,max=10,n=0", "n=0 must be from 1 to 1e"),
        ("lognormal:mean=5,cv=0,max=20", "a sample of 5 tokens; the token budget is 4"),
        ("file:none.npy", "there is no file 'none.npy'"),
        ("uniform:1,2", "'uniform:1,2' is not understood: expected lognormal:mean"),
        ("none.jsonl", "there is no such file"),
        ("none", "no data at 'none'"),
    ],
)
def test_a_wrong_specification(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match="(?s).*") as caught:
        read_lengths(spec, token_budget=4)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "suffix", "text"),
    [
        ("a.txt", "[1]", "", "expected a file ending in .npy or .json"),
        ("a.npy", "[1]", "", "not a readable .npy file"),
        ("a.npy", "[1]", "#key", "a .npy file has no key; leave out '#key'"),
        ("a.json", "[1", "", "not a readable JSON file"),
        ("a.json", '{"x": [1], "y": 2}', "", "append '#KEY'; its keys are x, y"),
        ("a.json", '{"x": [1]}', "#z", "the file has no key 'z'"),
        ("a.json", "[1]", "#z", "the file has no key 'z'"),
        ("a.json", "[]", "", "is an empty list"),
        ("a.json", '{"x": {"y": [1]}}', "#x", "names an object: append '/KEY'; its keys are y"),
        ("a.json", '{"x": {"y": [1]}}', "#x/z", "no key 'z' there; its keys are y"),
        ("a.json", '{"x": [1]}', "#x/z", "no key 'z' there; it is a list"),
        ("a.json", "[18446744073709551615]", "", "at index 0 is above 1e"),
        ("a.json", "[1.5]", "", "expected a list of whole numbers, got float64"),
        ("a.json", "[[1], [1, 2]]", "", "expected a list of whole numbers"),
        ("a.json", "[3, 0]", "", "length 0 at index 1 is below 1"),
        ("a.json", "[3, 9]", "", "a sample of 9 tokens; the token budget is 4: raise"),
    ],
)
def test_a_wrong_file(tmp_path: Path, name: str, content: str, suffix: str, text: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="(?s).*") as caught:
        read_lengths(f"file:{tmp_path / name}{suffix}", token_budget=4)
    assert text in str(caught.value)


def test_a_data_file_needs_a_tokenizer_that_loads(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a b c"}\n')
    with pytest.raises(ValueError, match="needs a tokenizer: pass --tokenizer FOLDER"):
        read_lengths(str(data), token_budget=8)
    pytest.importorskip("transformers")
    for name, files in {
        "none": None,
        "empty": {},
        "no JSON": {"tokenizer.json": "{"},
        "other": {"tokenizer.json": '{"a": 1}'},
        "unknown": {"tokenizer_config.json": '{"tokenizer_class": "No"}'},
    }.items():
        folder = tmp_path / name
        if files is not None:
            folder.mkdir()
            for file, text in files.items():
                (folder / file).write_text(text)
        with pytest.raises(ValueError, match="(?s).*") as caught:
            read_lengths(str(data), token_budget=8, tokenizer=str(folder))
        assert str(caught.value).startswith(f"--tokenizer '{folder}' cannot be loaded (")
        assert "): name the folder of a Hugging Face tokenizer (tokenizer.json" in str(caught.value)
        assert len(str(caught.value)) < 400 + 2 * len(str(folder))
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*data.jsonl is no folder on this"):
        read_lengths(str(data), token_budget=8, tokenizer=str(data))


@pytest.mark.parametrize("spec", ["lognormal:mean=5,cv=0,max=20", "file:a.npy", "prefix"])
def test_a_tokenizer_that_would_do_nothing(spec: str) -> None:
    with pytest.raises(ValueError, match=r"--tokenizer 't' would do nothing: --lengths '.*; drop"):
        read_lengths(spec, token_budget=8, tokenizer="t")


def test_a_data_file_without_a_sample(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from odb_megatron.data.tokenizer import train_bpe

    folder = train_bpe(["a b c"], vocab_size=270, folder=tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    data.write_text('\n{"neither": 1}\nnot JSON\n')
    with pytest.raises(ValueError, match="(?s).*") as caught:
        read_lengths(str(data), token_budget=8, tokenizer=str(folder))
    expected = f"--lengths '{data}' has 2 records and none that can be used; the first: line 2: "
    assert str(caught.value).startswith(f"{expected}columns neither fit no known layout")
    assert "--odb" not in str(caught.value)
