"""`odb-megatron inspect`: what it reads, predicts, advises and refuses."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.cli import main
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.inspection.advice import advise
from odb_megatron.inspection.command import parse
from odb_megatron.inspection.findings import cut_offs
from odb_megatron.inspection.lengths import read_length_file
from odb_megatron.inspection.logits import LogitsMemory, padded_vocabulary
from odb_megatron.inspection.options import EXAMPLE_FLAGS, example_data
from odb_megatron.inspection.prediction import (
    METHODS,
    RIVALS,
    fixed_batch_like,
    predict,
    replica_costs,
)
from odb_megatron.inspection.reading import DataRequest, read_data
from odb_megatron.inspection.setting import TrainingSetting, parse_shape
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import PlanConfig
from odb_megatron.simulation.schedules import Stream

ROOT = Path(__file__).resolve().parents[1]
SPEC = "lognormal:mean=60,cv=1.0,max=512,n=600"
RUN = ["--dp", "2", "--token-budget", "512", "--global-batch-size", "32"]


def _lengths(n: int = 600, *, longest: int = 512) -> np.ndarray[Any, np.dtype[np.int64]]:
    drawn = np.random.default_rng(0).lognormal(4, 0.8, size=n)
    return np.clip(drawn, 1, longest).astype(np.int64)


def _setting(**changes: Any) -> TrainingSetting:
    values = {"seq_length": 512, "token_budget": 512, "dp": 2, "global_batch_size": 32}
    return TrainingSetting(**{**values, **changes})


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
    return capsys.readouterr().err


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
    assert methods["odb"]["steps_per_epoch"] == 19  # 600 over 32
    assert methods["odb"]["padding_fraction"] == 0
    assert all(method["over_budget"] == 0 for method in methods.values())
    assert set(found["prediction"]["speedup"]["odb"]) == set(RIVALS)
    assert min(found["prediction"]["speedup"]["odb"].values()) > 1
    assert found["advice"]["flags"].startswith("--odb-token-budget ")
    assert found["logits"] is None


def test_text_names_what_it_read_and_advises(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "layers=2,hidden=64,heads=4,vocab=1000"
    assert main(["inspect", "--lengths", SPEC, *RUN, "--model-shape", shape]) == 0
    out = capsys.readouterr().out
    for expected in (
        "600 of 600 records read (all)",
        "bad records: none",
        "cut at",
        "DP 2, token budget 512, context 512, global batch size 32",
        "cost model: FLOPs of the model's shape",
        "standard-safe",
        "512 tokens x 1024 entries / TP 1",
        "--odb-token-budget",
    ):
        assert expected in out


def test_chats(chats: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, tokenizer = chats
    flags = [str(path), "--tokenizer", str(tokenizer), *RUN, "--workers", "0", "--no-advice"]
    found = _run(*flags, capsys=capsys)
    assert found["data"]["num_read"] == found["data"]["num_records"] == 43
    assert found["data"]["num_bad"] == 3
    assert len(found["data"]["bad"]) == 3
    assert any(f"{path}:4:" in message for message in found["data"]["bad"])
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


def test_lengths_and_order_are_the_trainings_own(chats: tuple[Path, Path]) -> None:
    from odb_megatron.data.sample import Sample

    path, tokenizer = chats
    request = DataRequest(paths=(str(path),), tokenizer=str(tokenizer), split=(0.0, 0.9), seed=5)
    reading = read_data(request, start=lambda total: lambda num: None)
    stream = _stream(chats, num=39, seed=5)
    samples = [stream.fetch(position) for position in range(len(stream))]
    expected = [len(sample) if isinstance(sample, Sample) else 0 for sample in samples]
    assert reading.positions.tolist() == expected
    assert reading.lengths.tolist() == [length for length in expected if length]
    assert 0 < reading.num_bad == expected.count(0)
    assert reading.num_records == len(stream)


@pytest.mark.parametrize("overlong", [OverlongPolicy.TRUNCATE, OverlongPolicy.DROP])
def test_steps_are_those_of_the_training_bad_records_and_all(
    chats: tuple[Path, Path], overlong: OverlongPolicy
) -> None:
    """The training's loaders of two replicas emit the very micro-batches that are predicted."""
    from odb_megatron.data.step_loader import StepLoader
    from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels
    from odb_megatron.testing.worlds import decoded

    longest = 56
    setting = _setting(
        seq_length=longest, token_budget=2 * longest, global_batch_size=8, overlong=overlong
    )
    request = DataRequest(paths=(str(chats[0]),), tokenizer=str(chats[1]), seed=5)
    reading = read_data(request, start=lambda total: lambda num: None)
    kept = setting.keep(reading.positions)
    assert reading.num_bad == 3
    assert kept.num_dropped or kept.num_truncated, "guard: some samples are too long"
    cost = setting.cost(kept.lengths)
    predicted = predict(
        Stream.of_epochs(kept.positions, epochs=1, cost=cost, seed=0), setting.simulated(cost)
    )["odb"].schedule
    stream = _stream(
        chats, num=43, seed=5, context=longest, token_budget=2 * longest, overlong=overlong
    )
    config = PlanConfig(
        total=len(stream),
        global_batch_size=8,
        num_replicas=2,
        token_budget=2 * longest,
        max_bad_records=len(stream),
        cost=cost,
    )

    def emitted(channel: ThreadChannel) -> list[list[list[int]]]:
        loader = StepLoader(stream, config, channel=channel)
        steps = iter(loader.make_step, None)
        return [[sorted(batch) for batch in decoded(step).positions] for step in steps]

    replicas: Any = run_in_threads(emitted, thread_channels(2))
    expected = [
        [[sorted(batch) for batch in row] for row in predicted.step(index)]
        for index in range(len(predicted))
    ]
    assert [list(step) for step in zip(*replicas, strict=True)] == expected
    assert len(expected) == 6  # 43 positions over 8, though 40 samples at most are left


def test_every_method_bears_positions_without_a_sample() -> None:
    """A whole global batch of bad records is a step of idle micro-batches, or is left out."""
    positions = _lengths(64)
    positions[8:16] = 0
    setting = _setting(global_batch_size=8)
    kept = setting.keep(positions)
    cost = setting.cost(kept.lengths)
    stream = Stream.of_epochs(kept.positions, epochs=1, cost=cost, seed=0)
    for name, run in predict(stream, setting.simulated(cost)).items():
        done = run.schedule.positions
        assert stream.lengths[done].sum() == kept.num_tokens, name
        keeps_place = name == "standard-safe"
        assert len(done) == (64 if keeps_place else 56), name
        assert run.method.samples_per_step == pytest.approx(56 / run.method.num_steps)
        if name in ("odb", "dp-balanced"):
            assert run.method.num_steps == 8
            assert run.schedule.step_samples[1] == 0
            assert run.times.balance_step[1] == 1.0


def test_nothing_but_bad_records_is_refused() -> None:
    setting = _setting()
    positions = np.array([0] * 80_000 + [5], dtype=np.int64)
    cost = setting.cost(setting.keep(positions).lengths)
    with pytest.raises(ValueError, match="the first 8192 records are all bad or dropped"):
        advise(positions, setting, cost)


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
    assert found["data"]["num_bad"] == 0
    assert found["lengths"]["num_tokens"] == sum(sizes[:50]) - 50  # the last is a label only
    assert found["lengths"]["max"] == max(sizes) - 1
    assert found["logits"] is None
    said = _error(prefix, "--tokenizer", "t", *RUN, capsys=capsys)
    assert "has tokens already; drop it" in " ".join(said.split())


def test_a_blend_draws_by_weight(chats: tuple[Path, Path], tmp_path: Path) -> None:
    path, tokenizer = chats
    other = tmp_path / "other.jsonl"
    message = {"role": "assistant", "content": "word0 " * 60}
    other.write_text(json.dumps({"messages": [message]}) + "\n")

    def read(weights: tuple[float, ...]) -> int:
        request = DataRequest(
            paths=(str(path), str(other)), weights=weights, tokenizer=str(tokenizer)
        )
        reading = read_data(request, start=lambda total: lambda num: None)
        assert reading.num_read == 44
        return int((reading.lengths > 100).sum())

    assert read(()) == 1
    assert read((0.5, 0.5)) == 22


@pytest.mark.slow
def test_workers_read_the_same(tmp_path: Path, chats: tuple[Path, Path]) -> None:
    path, tokenizer = chats
    many = tmp_path / "many.jsonl"
    many.write_text(path.read_text() * 10)
    told: list[int] = []
    found = [
        read_data(
            DataRequest(paths=(str(many),), tokenizer=str(tokenizer), num_workers=num),
            start=lambda total: told.append,
        )
        for num in (0, 2)
    ]
    assert found[0].num_workers == 0
    assert found[1].num_workers == 2
    assert found[0].lengths.tolist() == found[1].lengths.tolist()
    assert found[0].bad == found[1].bad
    assert sum(told) == 2 * 430


@pytest.mark.parametrize("name", ["a.npy", "a.json", "a.txt"])
def test_length_files(tmp_path: Path, name: str) -> None:
    path, values = tmp_path / name, [5, 900, 3]
    if name.endswith(".npy"):
        np.save(path, np.array(values))
    elif name.endswith(".json"):
        path.write_text(json.dumps(values))
    else:
        path.write_text("5\n900\n\n3\n")
    assert sorted(read_length_file(str(path)).lengths.tolist()) == [3, 5, 900]


# --- example ---------------------------------------------------------------------------------


def test_example_is_what_make_train_runs() -> None:
    script = runpy.run_path(str(ROOT / "examples" / "train_chat.py"))
    flags = script["TRAIN_FLAGS"]

    def value(flag: str) -> str:
        return str(flags[flags.index(flag) + 1])

    pairs = {
        "seq_length": "--seq-length",
        "token_budget": "--odb-token-budget",
        "global_batch_size": "--global-batch-size",
        "overlong": "--odb-overlong",
        "vocab_divisible_by": "--make-vocab-size-divisible-by",
    }
    for name, flag in pairs.items():
        assert str(EXAMPLE_FLAGS[name]) == value(flag)
    shape = parse_shape(str(EXAMPLE_FLAGS["model_shape"]))
    assert shape.num_layers == int(value("--num-layers"))
    assert shape.hidden == shape.query == int(value("--hidden-size"))
    assert shape.key_value == shape.hidden // 2
    assert shape.ffn_hidden == int(value("--ffn-hidden-size"))
    assert shape.gated_mlp
    assert EXAMPLE_FLAGS["split"] in script["default_flags"]([], num_records=5000)


def test_example_data_is_where_make_train_puts_it(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "train_chat.py"))
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
    cp=st.sampled_from([1, 2, 4]),
)
def test_overlong_policies_account_for_every_sample(
    lengths: list[int], limit: int, cp: int
) -> None:
    values = np.array(lengths, dtype=np.int64)
    multiple = 2 * cp if cp > 1 else 1
    longest = min(limit, 512) // multiple * multiple  # 512: the budget
    cut = _setting(seq_length=limit, cp=cp, overlong=OverlongPolicy.TRUNCATE).keep(values)
    assert len(cut.lengths) == len(values)
    assert cut.num_tokens + cut.num_cut_tokens == values.sum()
    assert cut.num_truncated == (values > longest).sum()
    assert cut.lengths.max() <= longest
    assert not (cut.lengths % multiple).any()
    if (values <= longest).any():
        dropped = _setting(seq_length=limit, cp=cp, overlong=OverlongPolicy.DROP).keep(values)
        assert len(dropped.lengths) + dropped.num_dropped == len(values)
        assert dropped.num_dropped == cut.num_truncated


def test_solo_runs_alone_over_the_budget() -> None:
    setting = _setting(seq_length=900, token_budget=512, overlong=OverlongPolicy.SOLO)
    kept = setting.keep(np.array([900, *[100] * 63], dtype=np.int64))
    assert kept.num_solo == 1
    cost = setting.cost(kept.lengths)
    stream = Stream.of_epochs(kept.lengths, epochs=1, cost=cost, seed=0)
    runs = predict(stream, setting.simulated(cost))
    assert runs["odb"].method.over_budget == 1


def test_replica_costs_are_of_the_scored_balance() -> None:
    setting = _setting()
    lengths = _lengths()
    cost = setting.cost(lengths)
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=0)
    for run in predict(stream, setting.simulated(cost)).values():
        for step in range(3):
            own = replica_costs(run, step=step)
            assert 1 / max(own) == pytest.approx(run.times.balance_step[step])


def test_cut_offs() -> None:
    found = cut_offs(np.array([10, 100, 300], dtype=np.int64), limit=200)
    assert [cut["at"] for cut in found] == [32, 64, 128, 200, 256]
    assert found[3] == {"at": 200, "samples": 1 / 3, "tokens": 100 / 410}


def test_logits() -> None:
    memory = LogitsMemory(token_budget=8192, vocab=128256, tp=2, cp=2)
    assert memory.num_logits == 4096 * 64128
    assert memory.peak_gib == 3 * memory.logits_gib == 6 * memory.num_logits / (1 << 30)
    assert padded_vocabulary(128001, divisible_by=128, tp=2) == 128256


def test_shape_has_megatrons_defaults() -> None:
    plain = parse_shape("layers=2,hidden=64,heads=4")
    assert (plain.ffn_hidden, plain.query, plain.key_value, plain.vocab) == (256, 64, 64, 0)
    gated = parse_shape("layers=2,hidden=4096,heads=32,groups=8,mlp=gated")
    assert (gated.ffn_hidden, gated.key_value, gated.gated_mlp) == (10880, 1024, True)


def test_advice_follows_its_rule() -> None:
    setting = _setting(dp=4, global_batch_size=64)
    lengths = _lengths(640)
    advice = advise(lengths, setting, setting.cost(lengths), vocab=1024)
    budgets = [trial.token_budget for trial in advice.trials]
    assert budgets == sorted(budgets)
    assert len(budgets) > 1
    best = max(trial.method.rate for trial in advice.trials)
    first = next(trial for trial in advice.trials if trial.method.rate >= 0.98 * best)
    assert advice.advised is first
    assert advice.flags == f"--odb-token-budget {first.token_budget}"
    asked = next(trial for trial in advice.trials if trial.token_budget == 512)
    assert advice.gain == first.method.rate / asked.method.rate


def test_advice_warns_of_few_samples() -> None:
    few = _setting(dp=8, global_batch_size=4)
    lengths = _lengths()
    advice = advise(lengths, few, few.cost(lengths))
    assert any("is below the 8 replicas" in warning for warning in advice.warnings)


def test_the_rival_is_the_best_fixed_batch_that_fits() -> None:
    """Two to the budget advised would be padded; one is not, and faster."""
    setting = _setting(seq_length=1 << 17, token_budget=1 << 17, dp=4)
    drawn = np.random.default_rng(0).lognormal(11, 1.6, 3000)
    lengths = np.clip(drawn, 1, 1 << 17).astype(np.int64)
    cost = setting.cost(lengths)
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=0)
    odb = predict(stream, setting.simulated(cost))["odb"]
    fixed = fixed_batch_like(odb, token_budget=1 << 18)
    assert fixed.schedule.sizes.max() == 1
    assert 1.2 < odb.method.rate / fixed.method.rate < 1.4


def test_advice_keeps_to_a_memory_limit() -> None:
    setting = _setting(seq_length=256, token_budget=256, overlong=OverlongPolicy.TRUNCATE)
    lengths = setting.keep(_lengths(800)).lengths
    cost = setting.cost(lengths)
    limit = LogitsMemory(token_budget=512, vocab=1 << 16).peak_gib
    advice = advise(lengths, setting, cost, vocab=1 << 16, max_logits_gib=limit)
    assert [trial.token_budget for trial in advice.trials] == [256, 512]
    with pytest.raises(ValueError, match="--max-logits-gib 0.01 is below what the logits of any"):
        advise(lengths, setting, cost, vocab=1 << 16, max_logits_gib=0.01)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lengths", "none.npy"], "cannot be read ([Errno 2] No such file"),
        (["--lengths", "none"], "--lengths 'none': there is no such file; expected PATH.npy"),
        (["--lengths", SPEC, "--dp", "0"], "--dp must be at least 1, got 0"),
        (["--lengths", SPEC, "--token-budget", "0"], "--token-budget must be at least 1, got 0"),
        (
            ["--lengths", SPEC, "--token-budget", "64"],
            "samples are longer than 64 tokens, the smaller of --seq-length 64 and --token-budget "
            "64 (the longest has",
        ),
        (
            ["--lengths", SPEC, "--token-budget", "64", "--overlong", "solo"],
            "which --overlong solo does not allow",
        ),
        (
            ["--lengths", SPEC, "--token-budget", "1", "--overlong", "drop"],
            "--overlong drop leaves them out",
        ),
        (["--lengths", SPEC, "--tokenizer", "t"], "--tokenizer 't' would do nothing"),
        (["a.jsonl", "--lengths", SPEC], "name one of them"),
        (["none.jsonl", "--tokenizer", "t"], "none.jsonl does not exist; check the path"),
        (["none"], "no data at 'none': expected a file ending in"),
        (["--lengths", SPEC, "--model-shape", "layers=2"], "lacks hidden, heads: expected layers="),
        (["--lengths", SPEC, "--model-shape", "layers=x"], "'layers=x' is not understood"),
        (["--lengths", SPEC, "--json", "no/a.json"], "there is no folder 'no'; make it first"),
        (["--lengths", SPEC, "--html", "."], "--html . is a folder: name a file in it"),
        (["--lengths", SPEC, "--plot", "a.pdf"], "expected a name that ends in .png"),
        (["--lengths", SPEC, "--cp", "512", "--token-budget", "512"], "no sample fits"),
        (["0", "a", "1", "b"], "weights of a blend must be above 0"),
        (["--lengths", SPEC, "--vpp", "2"], "--vpp 2 needs a pipeline"),
    ],
)
def test_what_cannot_be_used(
    capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    assert expected in " ".join(_error(*flags, capsys=capsys).split())


def test_bad_data(
    tmp_path: Path, chats: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, tokenizer = chats

    def error(text: str, *flags: str) -> str:
        # A file of its own: each is indexed once per process.
        data = tmp_path / f"data{len(list(tmp_path.iterdir()))}.jsonl"
        data.write_text(text)
        return " ".join(_error(str(data), *flags, capsys=capsys).split())

    given = ("--tokenizer", str(tokenizer))
    assert "is text and needs the tokenizer of the training" in error("{}\n")
    assert "all 2 records that were read are bad; the first:" in error("{}\n{}\n", *given)
    missing = error("{}\n", "--tokenizer", str(tmp_path / "none"))
    assert "cannot be loaded" in missing
    assert "holds no tokenizer that can be loaded" in missing
    few = '{"messages": []}\n'
    assert "no record to train on" in error(few, *given, "--split", "1,99,0")
    assert "--split 'a' is not understood" in error(few, *given, "--split", "a")
    assert "holds no record; expected one JSON object per line" in error("", *given)


def test_lengths_in_text_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("5\n-1\n")
    with pytest.raises(ValueError, match="a.txt:2: '-1' is no length; expected one whole number"):
        read_length_file(str(path))
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty; expected one whole number per line"):
        read_length_file(str(path))


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_refused_before_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = _error("--lengths", SPEC, "--html", "a.html", capsys=capsys)
    assert f"--html needs {package}, which is not installed" in said
    assert "pip install 'odb-megatron[pages]'" in said


def test_defaults_of_the_command_line() -> None:
    options = parse([])
    assert options.data == []
    assert options.max_samples == 100_000
