"""`odb-megatron inspect`: what it reads, predicts, advises, refuses and shows."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.cli import main
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import PlanConfig
from odb_megatron.report.inspect import (
    EXAMPLE_FLAGS,
    METHODS,
    ODB,
    RIVALS,
    Inspection,
    advise,
    example_data,
    inspect,
    keep,
    logits_memory,
    parse,
    parse_shape,
    run_method,
)
from odb_megatron.report.inspect_page import as_text, micro_batch_chart, tokens_chart
from odb_megatron.report.lengths import DataRequest, read_data
from odb_megatron.report.schedules import Setting, Stream, shares_model
from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]

ROOT = Path(__file__).resolve().parents[1]
SPEC = "lognormal:mean=60,cv=1.0,max=512,n=600"
RUN = ["--dp", "2", "--token-budget", "512", "--global-batch-size", "32"]
SHAPE = "layers=2,hidden=64,heads=4"
TAIL = np.clip(np.random.default_rng(0).lognormal(4.6, 1.9, 3000), 1, 33390).astype(np.int64)


def _setting(lengths: Any, **changes: Any) -> tuple[Stream, Setting]:
    values = {"num_replicas": 2, "token_budget": 512, "global_batch_size": 32, **changes}
    cost = shares_model(lengths[lengths > 0], token_budget=values["token_budget"])
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=0)
    return stream, Setting(cost=cost, **values)


def _found(folder: Path, lengths: Sequence[int], flags: str) -> Inspection:
    path = folder / "a.txt"
    path.write_text("\n".join(map(str, lengths)))
    return inspect(parse(["--lengths", str(path), "--overlong", "truncate", *flags.split()]))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Forty chats and three bad records, and a tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    lines = []
    for number in range(40):
        answer = " ".join(f"word{word}" for word in range(3 + number % 17))
        messages = [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    for at, bad in ((3, "{"), (20, json.dumps({"other": 1})), (43, '{"messages": []}')):
        lines.insert(at, bad)
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    tokenizer = train_bpe(lines, vocab_size=300, folder=folder / "tokenizer")
    return path, tokenizer


def _run(*flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", *flags, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _error(*flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *flags])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


# --- end to end ------------------------------------------------------------------------------


def test_lengths_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("--lengths", SPEC, *RUN, capsys=capsys)
    assert found["lengths"]["count"] == found["data"]["num_read"] == 600
    methods = found["prediction"]["methods"]
    assert set(methods) <= set(METHODS)
    for name, method in methods.items():
        assert method["min_M"] <= method["mean_M"] <= method["max_M"], name
        assert 0 <= method["padding_fraction"] < 1
        assert 0 < method["balance"] <= 1
        assert method["over_budget"] == 0
    assert methods["odb"]["steps_per_epoch"] == 19  # 600 over 32
    assert methods["odb"]["padding_fraction"] == 0
    assert set(found["prediction"]["speedup"]["odb"]) == set(RIVALS)
    assert min(found["prediction"]["speedup"]["odb"].values()) > 1
    assert found["advice"]["flags"].startswith("--odb-token-budget ")
    assert found["logits"] is None
    assert main(["inspect", "--lengths", SPEC, *RUN, "--model-shape", f"{SHAPE},vocab=1000"]) == 0
    out = capsys.readouterr().out
    for expected in ("records read (all)", "cut at", "FLOPs of the", "512 tokens x 1024 entries"):
        assert expected in out
    sampled = _run("--lengths", SPEC, "--max-samples", "40", "--no-advice", capsys=capsys)
    assert (sampled["data"]["num_read"], sampled["prediction"]["epoch_samples"]) == (40, 600)


def test_chats(chats: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, tokenizer = chats
    flags = [str(path), "--tokenizer", str(tokenizer), *RUN, "--workers", "0", "--no-advice"]
    found = _run(*flags, capsys=capsys)
    assert found["data"]["num_read"] == found["data"]["num_records"] == 43
    assert found["data"]["num_bad"] == 3
    lines = [re.search(rf"{path}:(\d+):", message) for message in found["data"]["bad"]]
    assert [line and line[1] for line in lines] == ["4", "21", "43"], "in file order"
    assert found["lengths"]["count"] == 40
    assert found["advice"] is None
    assert found["logits"]["vocab"] == 384  # 300, padded to a multiple of 128
    sampled = _run(*flags, "--max-samples", "10", capsys=capsys)
    assert sampled["data"]["num_read"] == 10
    assert sampled["prediction"]["epoch_samples"] == 43


def _stream(chats: tuple[Path, Path], *, num: int, seed: int, **changes: Any) -> Any:
    """Return the training's own stream over the first `num` records."""
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.order import PassOrder
    from odb_megatron.data.sample import SampleRules
    from odb_megatron.data.sources import ChatSource
    from odb_megatron.data.stream import SampleStream, SourcePart
    from odb_megatron.data.tokenizer import load_tokenizer

    path, tokenizer = chats
    values = {"context": 512, "token_budget": 512, **changes}
    rules = SampleRules(skip_bad=True, **values)
    renderer = ChatRenderer(load_tokenizer(tokenizer))
    source = ChatSource(str(path), rules=rules, renderer=renderer)
    order = PassOrder(np.arange(num), seed=seed)
    return SampleStream([SourcePart(source=source, order=order)])


@pytest.mark.parametrize("overlong", [OverlongPolicy.TRUNCATE, OverlongPolicy.DROP])
def test_steps_are_those_of_the_training_bad_records_and_all(
    chats: tuple[Path, Path], overlong: OverlongPolicy
) -> None:
    """The training's loaders of two replicas emit the very micro-batches that are predicted."""
    from odb_megatron.data.step_loader import StepLoader
    from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels
    from odb_megatron.testing.worlds import decoded

    sizes = {"seq_length": 56, "token_budget": 112}
    request = DataRequest(paths=(str(chats[0]),), tokenizer=str(chats[1]), seed=5)
    kept, counts = keep(read_data(request).positions, overlong, multiple=1, **sizes)
    assert counts["num_dropped"] or counts["num_truncated"], "guard: some are too long"
    planned, setting = _setting(kept, token_budget=112, global_batch_size=8)
    predicted = run_method(ODB, planned, setting).schedule
    stream = _stream(chats, num=43, seed=5, context=56, token_budget=112, overlong=overlong)
    config = PlanConfig(
        total=len(stream),
        global_batch_size=8,
        num_replicas=2,
        token_budget=112,
        max_bad_records=len(stream),
        cost=setting.cost,
    )

    def emitted(channel: ThreadChannel) -> list[list[list[int]]]:
        loader = StepLoader(stream, config, channel=channel)
        steps = iter(loader.make_step, None)
        return [[sorted(batch) for batch in decoded(step).positions] for step in steps]

    replicas: Any = run_in_threads(emitted, thread_channels(2))
    expected = [[[sorted(batch) for batch in row] for row in step] for step in predicted.steps]
    assert [list(step) for step in zip(*replicas, strict=True)] == expected
    assert len(expected) == 6  # 43 positions over 8, though 40 samples at most are left


def test_a_megatron_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = str(tmp_path / "documents")
    builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    sizes = [3 + number % 40 for number in range(60)]
    for size in sizes:
        builder.add_document(np.arange(1, size + 1), [size])
    builder.finalize(f"{prefix}.idx")
    found = _run(prefix, *RUN, "--no-advice", "--split", "5,1,0", capsys=capsys)
    assert found["data"]["num_read"] == found["data"]["num_records"] == 50
    assert found["lengths"]["num_tokens"] == sum(sizes[:50]) - 50  # the last is a label only
    assert "has tokens already; drop it" in _error(prefix, "--tokenizer", "t", capsys=capsys)


def test_a_blend_draws_by_weight(chats: tuple[Path, Path], tmp_path: Path) -> None:
    path, tokenizer = chats
    other = tmp_path / "other.jsonl"
    message = {"role": "assistant", "content": "word0 " * 60}
    other.write_text(json.dumps({"messages": [message]}) + "\n")
    for weights, expected in (((), 1), ((0.5, 0.5), 22)):
        reading = read_data(
            DataRequest(paths=(str(path), str(other)), weights=weights, tokenizer=str(tokenizer))
        )
        assert reading.about["num_read"] == 44
        assert (reading.positions > 100).sum() == expected


@pytest.mark.slow
def test_workers_read_the_same(tmp_path: Path, chats: tuple[Path, Path]) -> None:
    path, tokenizer = chats
    many = tmp_path / "many.jsonl"
    many.write_text(path.read_text() * 10)
    one, two = (
        read_data(DataRequest(paths=(str(many),), tokenizer=str(tokenizer), num_workers=num))
        for num in (0, 2)
    )
    assert (one.about["num_workers"], two.about["num_workers"]) == (0, 2)
    assert one.positions.tolist() == two.positions.tolist()
    assert one.about["bad"] == two.about["bad"]


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
    assert "".join(text["text"]) == "So.<|endoftext|>"
    assert f"{chats}:1: " in err
    assert "\n+       2  '<|im_end|>'\n" in err


def test_example_is_what_make_train_runs(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "train_chat.py"))
    words = list(map(str, script["TRAIN_FLAGS"]))
    flags = dict(pairwise(words))
    names = ("--seq-length", "--odb-token-budget", "--global-batch-size", "--odb-overlong")
    own = ("seq_length", "token_budget", "global_batch_size", "overlong")
    assert [str(EXAMPLE_FLAGS[name]) for name in own] == [flags[name] for name in names]
    shape = parse_shape(str(EXAMPLE_FLAGS["model_shape"]))
    assert shape.num_layers == int(flags["--num-layers"])
    assert shape.hidden == shape.query == 2 * shape.key_value == int(flags["--hidden-size"])
    assert EXAMPLE_FLAGS["split"] in script["default_flags"]([], num_records=5000)
    data = tmp_path / "chitchat.jsonl"
    data.write_text(json.dumps({"text": "a few words of text " * 9}) + "\n")
    with pytest.raises(ValueError, match="run 'make train' in a checkout first"):
        example_data(str(tmp_path))
    tokenizer = script["tokenizer_for"](data, tmp_path)
    assert example_data(str(tmp_path)) == (str(data), str(tokenizer))


# --- parts -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=60),
    limit=st.integers(16, 600),
    multiple=st.sampled_from([1, 4, 8]),
)
def test_overlong_policies_account_for_every_sample(
    lengths: list[int], limit: int, multiple: int
) -> None:
    values = np.array(lengths, dtype=np.int64)
    sizes = {"seq_length": limit, "token_budget": 512, "multiple": multiple}
    longest = min(limit, 512) // multiple * multiple
    cut, counts = keep(values, OverlongPolicy.TRUNCATE, **sizes)
    assert cut.sum() + counts["num_cut_tokens"] == values.sum()
    assert counts["num_truncated"] == (values > longest).sum()
    assert 0 < cut.min() <= cut.max() <= longest
    if (values <= longest).any():
        dropped, left_out = keep(values, OverlongPolicy.DROP, **sizes)
        assert (dropped == 0).sum() == left_out["num_dropped"] == counts["num_truncated"]
    alone, solo = keep(values, OverlongPolicy.SOLO, **{**sizes, "seq_length": 1000})
    assert solo["num_solo"] == (values > 512 // multiple * multiple).sum()
    assert run_method(ODB, *_setting(alone)).figures["over_budget"] == solo["num_solo"]


def test_cut_offs_logits_and_shapes(tmp_path: Path) -> None:
    found = _found(tmp_path, [10, 100, 300], "--dp 1 --token-budget 200 --no-advice")
    cuts = found.values["lengths"]["cut_offs"]
    assert [cut["at"] for cut in cuts] == [32, 64, 128, 200, 256]
    assert cuts[3] == {"at": 200, "samples": 1 / 3, "tokens": 100 / 410}
    memory = logits_memory(8192, 128256, tp=2, cp=2)
    assert memory["num_logits"] == 4096 * 64128
    assert memory["peak_gib"] == 3 * memory["logits_gib"] == 6 * memory["num_logits"] / (1 << 30)
    plain = parse_shape(SHAPE)  # Megatron's defaults
    assert (plain.ffn_hidden, plain.query, plain.key_value, plain.vocab) == (256, 64, 64, 0)
    gated = parse_shape("layers=2,hidden=4096,heads=32,groups=8,mlp=gated")
    assert (gated.ffn_hidden, gated.key_value, gated.gated_mlp) == (10880, 1024, True)


def test_advice_follows_its_rule() -> None:
    lengths = TAIL[:640].clip(max=512)
    _, setting = _setting(lengths, num_replicas=4, global_batch_size=64)
    advice, budget = advise(lengths, setting, seq_length=512)
    trials = advice["trials"]
    budgets = [trial["token_budget"] for trial in trials]
    assert budgets == [512, 1024, 1536, 2048, 3072, 4096], "none that could not be half full"
    best = max(trial["rate"] for trial in trials)
    first = next(trial for trial in trials if trial["rate"] >= 0.98 * best)
    assert first["token_budget"] == budget
    assert advice["flags"] == f"--odb-token-budget {budget}"
    assert advice["gain"] == first["rate"] / trials[0]["rate"]
    limited, _ = advise(lengths, setting, seq_length=512, peak_gib=lambda b: b / 1024, max_gib=1)
    assert [trial["token_budget"] for trial in limited["trials"]] == [512, 1024]
    with pytest.raises(ValueError, match="--max-logits-gib 0.1 is below what the logits of any"):
        advise(lengths, setting, seq_length=512, peak_gib=lambda b: b / 1024, max_gib=0.1)
    few, _ = advise(lengths, _setting(lengths, num_replicas=64)[1], seq_length=512)
    assert any("is below the 64 replicas" in warning for warning in few["warnings"])
    with pytest.raises(ValueError, match="the first 8192 records are all bad or dropped"):
        advise(np.array([0] * 9000 + [5]), setting, seq_length=512)


def test_the_headline_is_over_the_best_fixed_batch_that_fits(tmp_path: Path) -> None:
    """Two to the budget advised would be padded; one is not, and faster (1.82 was shown once)."""
    drawn = np.random.default_rng(0).lognormal(11, 1.6, 3000)
    lengths = np.clip(drawn, 1, 1 << 17).astype(np.int64)
    flags = "--token-budget 131072 --dp 4 --global-batch-size 32"
    found = _found(tmp_path, lengths.tolist(), flags)
    assert len(found.fixed.schedule.steps[0][0][0]) == 1
    assert 1.33 <= found.values["prediction"]["fair_speedup"]["value"] <= 1.39


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lengths SPEC --max-logits-gib nan", "'nan' is not a finite number above 0"),
        ("--lengths SPEC --token-budget 64", "samples are too long for --overlong error: the long"),
        ("--lengths SPEC --token-budget 64 --overlong solo", "too long for --overlong solo: the l"),
        ("--lengths SPEC --cp 512 --token-budget 512", "a multiple of 1024 of which fits"),
        ("--lengths SPEC --tokenizer t", "--tokenizer 't' would do nothing: --lengths lognormal:"),
        ("--lengths SPEC --split 9,1,0", "--split '9,1,0' would do nothing: --lengths lognormal"),
        ("--lengths SPEC --vocab-divisible-by 64", "--vocab-divisible-by 64 would do nothing"),
        ("--lengths SPEC --max-logits-gib 1", "cannot be kept to: the vocabulary is not known"),
        ("--lengths SPEC --max-logits-gib 1 --no-advice", "--max-logits-gib 1.0 would do nothing"),
        ("--lengths SPEC --model-shape layers=2", "'layers=2' cannot be used ('hidden'): expected"),
        (
            "--lengths SPEC --model-shape layers=2,hidden=2,heads=4",
            "groups divide heads, and heads",
        ),
        ("--lengths SPEC --model-shape SHAPE,groups=3", "groups divide heads, and heads hidden"),
        ("--lengths SPEC --model-shape SHAPE,layers=3", "known are layers, hidden, heads, groups"),
        ("--lengths SPEC --cost linear=1,quadratic=nan", "quadratic must be a number of at least"),
        ("--lengths SPEC --json a --html ./a", "--json a would overwrite what html names"),
        ("--lengths FILE.txt --json ./FILE.txt", "would overwrite what lengths names"),
        ("a.jsonl --lengths SPEC", "name one of them"),
        ("none.jsonl --tokenizer t", "none.jsonl does not exist; check the path"),
        ("0 a 1 b", "weights of a blend must be above 0"),
        ("a.jsonl --split nan,1", "--split 'nan,1' is not understood"),
    ],
)
def test_what_cannot_be_used(
    flags: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.txt").write_text("5\n")
    words = flags.replace("SPEC", SPEC).replace("SHAPE", SHAPE).split()
    said = _error(*words, capsys=capsys)
    assert expected in said
    assert (tmp_path / "FILE.txt").read_text() == "5\n"


def test_bad_data(
    tmp_path: Path, chats: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def error(text: str, *flags: str) -> str:
        # A file of its own: each is indexed once per process.
        data = tmp_path / f"data{len(list(tmp_path.iterdir()))}.jsonl"
        data.write_text(text)
        return _error(str(data), *flags, capsys=capsys)

    given = ("--tokenizer", str(chats[1]))
    assert "is text and needs the training's tokenizer" in error("{}\n")
    assert "all 2 records that were read are bad; the first:" in error("{}\n{}\n", *given)
    assert "cannot be loaded" in error("{}\n", "--tokenizer", str(tmp_path / "none"))
    few = '{"messages": []}\n'
    assert "no record to train on" in error(few, *given, "--split", "1,99,0")
    assert "holds no record; expected one JSON object per line" in error("", *given)


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_refused_before_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = _error("--lengths", SPEC, "--html", "a.html", capsys=capsys)
    assert f"--html needs {package}, which is not installed: pip install 'odb-megatron[" in said


# --- what is shown ---------------------------------------------------------------------------


LONG = "--lengths lognormal:mean=500,cv=1.2,max=4096,n=600 --dp 4 --seq-length 4096 --model-shape "
PAGES = {
    "long-tail": f"{LONG} layers=4,hidden=256,heads=4,vocab=32000",
    "many-replicas": "--lengths lognormal:mean=80,cv=0.5,max=300,n=480 --dp 24 "
    "--token-budget 2048 --global-batch-size 96 --no-advice",
    "one-length": "70 70 70",
    "one-token": "1",
    "no-power-of-two": "70 80 90 120",
    "huge-range": "1 2 5 900 33390 1048576",
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_look_well_in_a_browser(browser: Browser, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    flags, page = PAGES[name], tmp_path / f"inspect-{name}.html"
    if flags[0] != "-":
        (tmp_path / "a").write_text(flags)
        flags = f"--lengths {tmp_path / 'a'} --overlong truncate --dp 1 --no-advice"
    assert main(["inspect", *flags.split(), "--html", str(page)]) == 0
    assert page_problems(browser, page) == []
    heads = re.findall("<h2>(.*?)</h2>", page.read_text(encoding="utf-8"))
    assert {"How long samples are", "Padding before and after", "Predicted speed"} <= {*heads}
    assert ("Balance over replicas" in heads) == ("--dp 1" not in flags)


def test_shares_of_samples_and_tokens_are_exact(tmp_path: Path) -> None:
    found = _found(tmp_path, TAIL.tolist(), "--token-budget 2048 --dp 1 --no-advice")
    samples, tokens = tokens_chart(found).panels[0].lines
    for line, weights in ((samples, np.ones_like(TAIL)), (tokens, TAIL)):
        marks, values = np.array(line.x), np.array(line.y)
        assert {2048, int(TAIL.max())} <= {*marks.tolist()}
        assert (values[0], values[-1]) == (0, 100)
        exact = [100 * weights[mark >= TAIL].sum() / weights.sum() for mark in marks]
        assert values.tolist() == pytest.approx(exact)
    ties = tokens_chart(_found(tmp_path, [10] * 9 + [30], "--dp 1 --no-advice"))
    assert ties.rows == [["10", "90.0%", "75.0%"], ["30", "100.0%", "100.0%"]]


def test_before_and_after_are_the_same_samples(tmp_path: Path) -> None:
    flags = "--dp 2 --token-budget 8192 --seq-length 64 --global-batch-size 512 --no-advice"
    chart, about = micro_batch_chart(_found(tmp_path, TAIL.tolist(), flags))
    sides = {"before": np.zeros(2), "after": np.zeros(2)}
    for name, samples, tokens, computed in chart.rows:
        side = name.partition(" ")[0]
        sides[side] += int(samples), int(tokens)
        assert int(computed) >= int(tokens)
        assert side == "before" or computed == tokens
    assert sides["before"].tolist() == sides["after"].tolist()
    assert (about["num"], about["size"]) == (sides["before"][0], 128)
    assert sum(row[0].startswith("before") for row in chart.rows) <= 24


def test_a_runs_samples_are_what_is_read_and_avoided(tmp_path: Path) -> None:
    flags = "--dp 2 --token-budget 4096 --seq-length 2048 --no-advice"
    run = _found(tmp_path, TAIL.tolist(), f"{flags} --train-samples 500")
    assert run.values["data"]["num_read"] == 500
    kept = run.lengths.clip(max=2048)
    assert run.values["padding"]["avoided"] == pytest.approx(1 - kept.sum() / (500 * 2048))
    assert "500 of 3000 records read (those that the run takes)" in as_text(run)
    few = "--token-budget 512 --seq-length 512 --dp 8 --global-batch-size 4 --no-advice"
    said = "samples per step differ from the 4.0 that ODB has: standard-safe 8.0"
    assert said in as_text(_found(tmp_path, list(range(20, 420)), few))


@pytest.mark.parametrize(("asked", "is_larger"), [(2048, True), (65536, False)])
def test_the_speed_up_is_over_a_budget_no_smaller(
    tmp_path: Path, asked: int, is_larger: bool
) -> None:
    flags = f"--dp 2 --seq-length 2048 --global-batch-size 32 --token-budget {asked}"
    found = _found(tmp_path, TAIL.tolist(), f"{flags} --model-shape {SHAPE},vocab=1024")
    advised = found.runs["advised"].setting.token_budget
    assert (advised > asked) == is_larger, "guard"
    rate = found.runs["advised"].figures["rate"] / found.fixed.figures["rate"]
    assert found.values["prediction"]["fair_speedup"] == {
        "method": "advised",
        "token_budget": advised,
        "fixed_token_budget": max(advised, asked),
        "value": rate,
    }
    text = as_text(found)
    assert f"over standard-safe at {max(advised, asked)} it is {rate:.2f}" in text
