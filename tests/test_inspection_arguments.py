"""`odb-megatron inspect`: arguments that would be ignored or changed are refused, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb_megatron.cli import main
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.inspection.lengths import Reading, read_length_file
from odb_megatron.inspection.options import make_parser, refuse

SPEC = "lognormal:mean=60,cv=1.0,max=512,n=64"
SHAPE = "layers=2,hidden=64,heads=4"


def _refused(*flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *flags])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--split 9,1,0", "--split '9,1,0' would do nothing: --lengths lognormal"),
        ("--workers 2", "--workers 2 would do nothing: --lengths lognormal"),
        ("--vocab-divisible-by 64", "--vocab-divisible-by 64 would do nothing"),
        ("--max-logits-gib 1", "--max-logits-gib 1 cannot be kept to: the vocabulary is not known"),
        ("--max-logits-gib 1 --no-advice", "--max-logits-gib 1 would do nothing"),
        ("--global-batch-size 0", "--global-batch-size must be at least 1, got 0"),
        (f"--model-shape {SHAPE},vocab=9 --vocab-divisible-by 0", "-by must be at least 1, got 0"),
        ("--model-shape layers=2,hidden=2,heads=4", "4 heads do not divide hidden 2"),
        ("--model-shape layers=2,hidden=64,heads=4,groups=3", "3 groups do not divide 4 heads"),
        ("--model-shape layers=2,layers=3,hidden=64,heads=4", "gives layers twice"),
        ("--model-shape layers=2,hidden=8,heads=4,mlp=gated", "hidden 8 is too small"),
        ("--token-budget -5", "--token-budget must be at least 1, got -5"),
        ("--seq-length -5", "--seq-length must be at least 1, got -5"),
        ("--cost linear=0", "linear must be above 0"),
        ("--cost linear=1,quadratic=nan", "quadratic must be a number of at least 0, got nan"),
        ("--cost linear=1,cubic=2", "gives linear, cubic; expected KEY=NUMBER"),
        ("--json a --html ./a", "--html ./a would overwrite what --json a writes"),
        ("--plot a.png --html a.png", "--html a.png would overwrite what --plot a.png writes"),
    ],
)
def test_what_would_be_ignored_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: str, expected: str
) -> None:
    said = _refused("--lengths", SPEC, *flags.split(), capsys=capsys)
    assert expected in said
    assert said.startswith("odb-megatron inspect: error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--max-logits-gib nan", "'nan' is not a finite number above 0"),
        ("--max-logits-gib inf", "'inf' is not a finite number above 0"),
        ("--train-samples 0", "'0' is not a whole number of at least 1"),
    ],
)
def test_what_does_not_parse_is_refused_with_the_usage(
    capsys: pytest.CaptureFixture[str], flags: str, expected: str
) -> None:
    said = _refused("--lengths", SPEC, *flags.split(), capsys=capsys)
    assert said.startswith("usage: ")
    assert expected in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lengths", "FOLDER.jsonl"], "is a folder: name a file in it"),
        (["--lengths", "FOLDER.npy"], "is a folder: name a file in it"),
        (["--lengths", "FILE.txt", "--json", "FILE.txt"], "would overwrite the data FILE.txt"),
        (["--lengths", SPEC, "--json", ""], "--json '' names no file"),
        (["--lengths", SPEC, "--html", ""], "--html '' names no file"),
        (["nan", "a.jsonl", "1", "b.jsonl"], "must be above 0 and finite"),
        (["a.jsonl", "--split", "nan,1"], "--split 'nan,1' is not understood"),
    ],
)
def test_names_of_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.txt").write_text("5\n")
    for folder in ("FOLDER.jsonl", "FOLDER.npy"):
        (tmp_path / folder).mkdir()
    assert expected in _refused(*flags, capsys=capsys)
    assert (tmp_path / "FILE.txt").read_text() == "5\n"


def test_a_planners_flags_become_this_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        refuse("--odb-cost, --odb-token-budgets and --odb-pad-to", make_parser())
    assert "error: --cost, --odb-token-budgets and --odb-pad-to\n" in capsys.readouterr().err


def test_part_is_a_random_sample_in_order() -> None:
    values = np.arange(1, 1001, dtype=np.int64)
    reading = Reading(name="a", positions=values, num_records=1000, num_read=1000)
    part = reading.part(first=0, most=100, seed=1)
    assert part.num_read == len(part.positions) == 100
    assert part.num_records == 1000
    assert np.all(np.diff(part.positions) > 0)
    assert 400 < part.positions.mean() < 600, "not the first"
    assert np.array_equal(part.positions, reading.part(first=0, most=100, seed=1).positions)
    assert not np.array_equal(part.positions, reading.part(first=0, most=100, seed=2).positions)
    assert reading.part(first=7, most=100, seed=1).positions.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert reading.part(first=0, most=0, seed=1).num_read == 1000


def test_max_samples_draws_from_a_length_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(map(str, range(1, 401))))
    assert read_length_file(str(path)).num_read == 400
    flags = ["--lengths", str(path), "--max-samples", "40", "--dp", "2", "--no-advice"]
    assert main(["inspect", *flags, "--json", "-"]) == 0
    told = capsys.readouterr()
    found: dict[str, Any] = json.loads(told.out)
    assert found["data"]["num_read"] == 40
    assert found["lengths"]["max"] > 200
    assert "40 of 400 records read (a random sample)" in told.err


def test_bad_records_are_named_in_file_order_and_the_way_out_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps({"messages": [{"role": "assistant", "content": "a few words"}]})
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join("{" if line % 3 == 2 else good for line in range(1, 31)) + "\n")
    tokenizer = train_bpe([good], vocab_size=300, folder=tmp_path / "tokenizer")
    flags = [str(data), "--tokenizer", str(tokenizer), "--workers", "0", "--no-advice"]
    assert main(["inspect", *flags]) == 0
    out = capsys.readouterr().out
    named = [line for line in out.splitlines() if line.startswith(f"  {data}:")]
    assert [line.split(":")[1] for line in named] == ["2", "5", "8", "11", "14"]
    assert out.count("--odb-max-bad-records") == 1
    assert "Mend the record" not in out


def test_records_are_shown_token_by_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "So."}]
    chats.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"text": "So."}) + "\n")
    tokenizer = train_bpe(["What? So."] * 3, vocab_size=300, folder=tmp_path / "tokenizer")
    flags = [str(chats), "--tokenizer", str(tokenizer), "--show", "9", "--json", "-"]
    assert main(["inspect", *flags]) == 0
    out, err = capsys.readouterr()
    chat, text = map(json.loads, out.splitlines())
    assert set(chat) == {"ids", "loss", "text", "template"}
    learnt = [part for part, weight in zip(chat["text"], chat["loss"], strict=True) if weight]
    assert "".join(learnt) == "So.<|im_end|>"
    assert "marked" in chat["template"]
    assert "".join(text["text"]) == "So.<|endoftext|>"
    assert f"{chats}:1: " in err
    assert "\n+       2  '<|im_end|>'\n" in err
