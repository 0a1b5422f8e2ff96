"""The simulator: every way to form steps, what a schedule is charged, and the command."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron import __version__
from odb_megatron.cli import main
from odb_megatron.plan.blocks import blocks_of
from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.report.lengths import length_summary, read_lengths
from odb_megatron.report.schedules import POLICIES, Schedule, Setting, Stream, measure, shares_model
from odb_megatron.report.simulate import POLICY_NAMES, compare

FLAGS = ["--lengths", "lognormal:mean=100,cv=1.0,max=1000,n=3000", "--dp", "2"]
FLAGS += ["--token-budget", "1000"]
FIXED = 2  # tokens' worth of a micro-batch's overhead
RIVALS = ["standard-safe", "sorted-bucketed", "dp-balanced", "ffd"]
PADDED = ("standard-safe", "sorted-bucketed")


def _world(lengths: Any, *, epochs: int = 1, **changes: Any) -> tuple[Stream, Setting]:
    lengths = np.asarray(lengths, dtype=np.int64)
    budget = changes.get("token_budget", 10)
    values = {
        "num_replicas": 2,
        "token_budget": budget,
        "global_batch_size": 4,
        "cost": shares_model(lengths[lengths > 0], token_budget=budget),
    }
    setting = Setting(**{**values, **changes})
    return Stream.of_epochs(lengths, epochs=epochs, cost=setting.cost, seed=0), setting


def _positions(schedule: Schedule) -> list[int]:
    return [at for step in schedule.steps for row in step for batch in row for at in batch]


# --- ways to form steps ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RIVALS, "odb"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_sample_once_and_within_the_budget(name: str, data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([1, 2]))
    stream, setting = _world(
        data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=120).filter(any)),
        token_budget=40,
        num_replicas=data.draw(st.integers(1, 5)),
        global_batch_size=data.draw(st.integers(1, 50)),
        epochs=data.draw(st.integers(1, 3)),
        sync=data.draw(st.sampled_from(["step", "microbatch"])),
        pipeline=Pipeline(stages=stages, chunks=data.draw(st.sampled_from([1, stages]))),
    )
    schedule = POLICIES[name](stream, setting)
    times = measure(schedule, stream, setting)
    trained = Counter(at for at in _positions(schedule) if stream.lengths[at])
    assert trained == Counter(np.flatnonzero(stream.lengths).tolist())
    assert not times.over_budget.any()
    assert schedule.is_padded == (name in PADDED)
    assert not (times.counts % setting.pipeline.count_multiple).any()


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("num_replicas", [4, 66, 130])
def test_odb_steps_are_the_next_global_batch(sync: str, num_replicas: int) -> None:
    """Beyond 64 replicas in blocks, all with the same M."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4, 1, 6000), 1, 1000).astype(int)
    stream, setting = _world(
        lengths, token_budget=1000, num_replicas=num_replicas, global_batch_size=1000, sync=sync
    )
    for index, step in enumerate(POLICIES["odb"](stream, setting).steps):
        samples = sorted(p for row in step for batch in row for p in batch)
        assert samples == list(range(1000 * index, 1000 * (index + 1)))
        assert len({len(row) for row in step}) == 1
        moved = sum(
            not any({p % 1000 % num_replicas, replica} <= {*one} for one in blocks_of(num_replicas))
            for replica, row in enumerate(step)
            for batch in row
            for p in batch
        )
        assert moved <= 30, "few samples move between blocks, to even them out"
        assert moved > 0 or num_replicas == 4


def test_odb_shares_long_samples() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4, 1.3, 4000), 1, 3000).astype(int)
    common = {"token_budget": 1000, "num_replicas": 8, "global_batch_size": 400}
    stream, setting = _world(lengths, sync="microbatch", max_share=8, **common)
    assert (lengths > 1000).any(), "guard"
    schedule = POLICIES["odb"](stream, setting)
    counts = Counter(_positions(schedule))
    assert {at: num for at, num in counts.items() if num > 1} == schedule.shares
    assert set(counts) == set(range(4000))
    times = measure(schedule, stream, setting)
    assert not times.over_budget.any()
    assert times.tokens.sum() == pytest.approx(lengths.sum())
    assert (times.samples == 400).all()
    alone = measure(POLICIES["odb"](*_world(np.minimum(lengths, 1000), **common)), stream, setting)
    assert times.shared.sum() > 0 == alone.shared.sum()


@pytest.mark.parametrize("overhead", [0, 5])
def test_standard_safe_is_the_fastest_fixed_batch_that_fits(overhead: int) -> None:
    """Two fit; they save overhead, one has no padding."""
    cost = CostModel.from_ratios(quadratic=0, fixed_tokens=overhead)
    steps = POLICIES["standard-safe"](*_world([5, 1, 5, 1], cost=cost)).steps
    found = [[[list(batch) for batch in row] for row in step] for step in steps]
    assert found == [[[[0, 1]], [[2, 3]]]] if overhead else [[[[0], [2]], [[1], [3]]]]


@pytest.mark.parametrize("batch", [4, 10, 22, 64, 256])
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("chunks", [1, 2])
def test_padded_steps_keep_to_the_global_batch_size(name: str, batch: int, chunks: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=600)
    pipeline = Pipeline(stages=chunks, chunks=chunks)
    stream, setting = _world(lengths, token_budget=300, global_batch_size=batch, pipeline=pipeline)
    times = measure(POLICIES[name](stream, setting), stream, setting)
    whole = times.samples[:-1]
    if name == "sorted-bucketed":
        assert times.computed.sum() / lengths.sum() < 1.3, "like lengths"
    assert 0.6 * batch <= whole.mean() <= 1.06 * max(batch, 2 * setting.pipeline.count_multiple)


@pytest.mark.parametrize(
    ("name", "lengths", "bins"),
    [
        ("dp-balanced", [4, 4, 4, 4], [[0, 1], [2, 3]]),
        ("dp-balanced", [6, 4, 4, 6], [[0, 1], [2, 3]]),
        ("dp-balanced", [6, 6, 4, 6], [[0], [1], [3], [2]]),  # [1, 2] at first
        ("dp-balanced", [2, 2, 2, 2], [[0, 1, 2], [3]]),
        ("dp-balanced", [10], [[0], []]),  # where Megatron's own asserts
        ("ffd", [6, 6, 4, 4], [[0, 2], [1, 3]]),
        ("ffd", [2, 6, 4, 5], [[1, 2], [3, 0]]),
    ],
)
def test_packed_bins(name: str, lengths: list[int], bins: list[list[int]]) -> None:
    (step,) = POLICIES[name](*_world(lengths)).steps
    assert [step[r][m] for m in range(len(step[0])) for r in range(2)] == bins


def test_the_reference_package() -> None:
    """Its own loop in this process: equal counts, padded groups within the budget."""
    grouping = pytest.importorskip("odb.grouping", reason="online-dynamic-batching is missing")
    lengths = np.random.default_rng(0).integers(1, 400, 9000)
    stream, setting = _world(lengths, token_budget=2000, num_replicas=3, global_batch_size=90)
    before = grouping.dist
    schedule = POLICIES["odb-reference"](stream, setting)
    assert grouping.dist is before
    assert schedule.is_padded
    counted = Counter(_positions(schedule))
    assert set(counted.values()) == {1}
    assert len(counted) > 0.97 * len(stream)
    assert not measure(schedule, stream, setting).over_budget.any()
    for step in schedule.steps[:3]:
        assert all(all(row) for row in step), "no idle group before the end"
        assert [{p % 3 for batch in row for p in batch} for row in step] == [{0}, {1}, {2}]


def test_without_the_reference_package_there_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("odb", "odb.collate"):
        monkeypatch.setitem(sys.modules, name, None)
    policies, left_out = compare(["odb-reference", "ffd"], *_world([1, 2, 3, 4]))
    assert list(policies) == ["ffd"]
    assert "pip install online-dynamic-batching==0.1.2" in left_out["odb-reference"]


# --- what a schedule is charged ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "times"),
    [
        # replicas: 8 + 5 = 13 and 5 + 6 = 11; micro-batches: 8 and 6; then 4
        ("step", [13 + 2 * FIXED, 4 + FIXED]),
        ("microbatch", [8 + 6 + 2 * FIXED, 4 + FIXED]),
    ],
)
def test_figures_of_packed_steps(sync: str, times: list[int], monkeypatch: Any) -> None:
    """Replica 0 runs [8], [2, 3], replica 1 runs [5], [5, 1]; then [4] and nothing."""
    cost = CostModel.from_ratios(quadratic=0, fixed_tokens=FIXED)
    stream, setting = _world([8, 2, 3, 5, 5, 1, 4], sync=sync, cost=cost, global_batch_size=6)
    schedule = Schedule([[[[0], [1, 2]], [[3], [4, 5]]], [[[6]], [[]]]])
    assert (measure(schedule, stream, setting).step / COST_UNIT).tolist() == times
    monkeypatch.setitem(POLICIES, "odb", lambda stream, setting: schedule)
    figures = compare(["odb"], stream, setting)[0]["odb"]
    # 28 tokens need 3 micro-batches; two replicas share all evenly
    assert figures["fraction_of_bound"] == pytest.approx((28 + 3 * FIXED) / 2 / sum(times))
    assert figures["samples_per_step"] == 3.5
    assert figures["mean_M"] == 1.5
    assert figures["num_steps"] == 2
    assert figures["fill"] == pytest.approx(28 / 60)
    assert figures["padding_fraction"] == figures["over_budget"] == 0
    # 2, 3 (read by replicas 1 and 0) ... of lengths 2, 5, 5 were read elsewhere
    assert figures["bytes_moved_per_step"] == 4 * (2 + 5) / 2
    # replicas 17 and 15, then 6 and 2 (idle micro-batches have their overhead)
    assert figures["balance_step"] == pytest.approx((16 / 17 + 4 / 6) / 2)
    # micro-batches: means (10 + 7) / 2 and (7 + 8) / 2, largest 10 and 8; then 4 of 6
    assert figures["balance_microbatch"] == pytest.approx((16 / 18 + 4 / 6) / 2)
    assert "pipeline_efficiency" not in figures


@pytest.mark.parametrize(
    ("lengths", "quadratic", "budget", "schedule", "expected"),
    [
        # [1, 3] is computed as [3, 3]: 6 tokens (over the budget of 5), cost 2 * (3 + 9) = 24
        (
            [1, 3, 2, 2], 1, 5, Schedule([[[[0, 1]], [[2, 3]]]], is_padded=True),
            {"computed": 10, "over_budget": 1, "bytes_moved": 0, "costs": [24, 12]},
        ),
        # Nine tokens on both replicas: five each, as pairs of pieces; costs 8 % more.
        (
            [9, 1], 0, 7, Schedule([[[[0], [1]], [[0], []]]], {0: 2}),
            {"tokens": 10, "computed": 6 + 6 + 1, "shared": 1, "samples": 2,
             "costs": [4.86, 1, 4.86, 0]},
        ),
    ],
    ids=["padded", "shared"],
)  # fmt: skip
def test_figures_of_a_step(
    lengths: list[int], quadratic: int, budget: int, schedule: Schedule, expected: dict[str, Any]
) -> None:
    cost = CostModel.from_ratios(quadratic=quadratic, fixed_tokens=0)
    found = measure(schedule, *_world(lengths, cost=cost, token_budget=budget))
    costs = (found.costs[0].ravel() / COST_UNIT).tolist()
    assert costs == pytest.approx(expected.pop("costs"), abs=1e-4)
    assert {name: getattr(found, name).tolist() for name in expected} == {
        name: [value] for name, value in expected.items()
    }


def test_steady_leaves_out_the_first_and_the_last_global_batch() -> None:
    stream, setting = _world([1] * 23, global_batch_size=4)
    assert measure(POLICIES["odb"](stream, setting), stream, setting).steady == slice(1, 4)
    few = _world([1] * 8)
    assert measure(POLICIES["odb"](*few), *few).steady == slice(0, 0)


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(1, 1, 5), (4, 1, 8), (4, 2, 8), (4, 4, 4)]
)
def test_equal_micro_batches_have_the_known_bubble(stages: int, chunks: int, count: int) -> None:
    """(M + (P - 1) / V) passes of a stage: Narayanan et al., arXiv 2104.04473, section 2.2."""
    stream, setting = _world(
        [10] * count * 2,
        global_batch_size=2 * count,
        cost=CostModel(),
        pipeline=Pipeline(stages=stages, chunks=chunks),
    )
    found = measure(POLICIES["odb"](stream, setting), stream, setting).pipeline / COST_UNIT
    assert found == pytest.approx([10 * (count + (stages - 1) / chunks) / stages])


def test_the_cost_model_has_the_shares_asked_for() -> None:
    lengths = np.array([100, 700] * 5)
    cost = shares_model(lengths, attention=0.3, fixed=0.05, token_budget=4000)
    total = cost.samples(lengths, np.zeros_like(lengths)).sum()
    assert total == pytest.approx(lengths.sum() * COST_UNIT / 0.7, rel=1e-6)
    assert cost.fixed == pytest.approx(0.05 * 10 / 10 * total, rel=1e-6)


# --- lengths -----------------------------------------------------------------------------------


def test_lognormal_lengths() -> None:
    about = length_summary(read_lengths("lognormal:mean=500,cv=0.5,max=100000"))
    assert about["num_samples"] == 131072
    assert about["mean"] == pytest.approx(500, rel=0.01)
    assert about["cv"] == pytest.approx(0.5, rel=0.02)
    spec = "lognormal:mean=50,cv=2.0,max=64,n=1000"
    values = read_lengths(spec)
    assert (values.min(), values.max()) == (1, 64)
    assert not np.array_equal(values, read_lengths(f"{spec},seed=1"))


def test_files_are_read_and_put_in_random_order(tmp_path: Path) -> None:
    lengths = list(range(1, 101))
    np.save(tmp_path / "a.npy", np.array(lengths, dtype=np.int32))
    (tmp_path / "a.json").write_text(json.dumps({"other": [1], "mine": {"x": lengths}}))
    (tmp_path / "a.txt").write_text("\n\n".join(map(str, lengths)))
    orders = [
        read_lengths(f"file:{tmp_path / name}").tolist()
        for name in ("a.npy", "a.json#mine/x", "a.txt")
    ]
    assert sorted(orders[0]) == lengths
    assert orders[0] == orders[1] == orders[2] != lengths


def test_a_data_file_goes_through_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from odb_megatron.data.tokenizer import train_bpe

    texts = ["one two three " * count for count in (1, 2, 40)]
    folder = train_bpe(texts, vocab_size=300, folder=tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    records = [*({"text": text} for text in texts), {"neither": 1}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--lengths", str(data), "--dp", "1", "--token-budget", "32", "--json", "-"]
    assert main(["simulate", *flags, "--tokenizer", str(folder)]) == 0
    about = json.loads(capsys.readouterr().out)["lengths"]
    names = ("num_samples", "max", "num_truncated", "num_left_out")
    assert [about[name] for name in names] == [3, 32, 1, 1]
    with pytest.raises(SystemExit):
        main(["simulate", *flags])
    assert "is text and needs the training's tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "lognormal:mean=500,cv=1.0",
            "is not understood ('max'): expected NAME=NUMBER of mean 1 to",
        ),
        ("lognormal:mean=500,cv=1.0,max=10,sd=4", "is not understood ('sd')"),
        ("lognormal:mean=5,cv=nan,max=10", "is not understood (cv=nan)"),
        ("uniform:1,2", "'uniform:1,2' is not understood: expected lognormal:mean"),
        ("file:none.npy", "cannot be read (["),
        ("file:{}", "(no list of whole numbers, at least one)"),
        ("file:{}#z", "(no list of whole numbers, at least one)"),
        ("file:{}#x", "cannot be read (a length of 0, or one of 3)"),
    ],
)
def test_a_wrong_specification(tmp_path: Path, spec: str, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"x": [3, 0]}')
    with pytest.raises(ValueError, match="(?s).*") as caught:
        read_lengths(spec.format(path))
    assert text in str(caught.value)


# --- the command -------------------------------------------------------------------------------


def _run(*flags: str, folder: Path) -> dict[str, Any]:
    target = folder / "out.json"
    assert main(["simulate", *FLAGS, *flags, "--json", str(target)]) == 0
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return report


def test_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _run("--epochs", "2", folder=tmp_path)
    policies = report["policies"]
    assert {*policies, *report["left_out"]} == set(POLICY_NAMES)
    for name, figures in policies.items():
        for part in (figures, figures["steady"]):
            assert 0 < part["fraction_of_bound"] <= 1, name
            assert part["samples_per_s_rel"] >= 1 or name == "odb-reference"
            assert name == "bound" or part["over_budget"] == 0
    steady = {name: figures["steady"]["fraction_of_bound"] for name, figures in policies.items()}
    assert steady["odb"] > max(steady[name] for name in RIVALS)
    assert policies["odb"]["padding_fraction"] == 0
    assert policies["odb"]["steady"]["samples_per_step"] == report["config"]["global_batch_size"]
    assert report["config"]["sync"] == "step"
    assert report["lengths"]["num_samples"] == 3000
    assert report["versions"]["odb_megatron"] == __version__
    out = capsys.readouterr().out
    assert f"global batch size {report['config']['global_batch_size']} (what M = 8 holds)" in out
    for name in policies:
        assert sum(line.split()[:1] == [name] for line in out.splitlines()) == 2
    for name in report["left_out"]:
        assert f"{name} is left out: not importable" in out


def test_a_batch_size_sharing_and_the_order_for_pipelines(tmp_path: Path) -> None:
    flags = ["--policy", "odb,dp-balanced", "--global-batch-size", "64", "--share-long", "64"]
    flags += ["--pp", "8", "--vpp", "2", "--vpp-group", "8"]
    report = _run(*flags, folder=tmp_path)
    own, rival = report["policies"]["odb"], report["policies"]["dp-balanced"]
    assert report["config"]["sync"] == "microbatch"
    for figures in (own, own["steady"], rival["steady"]):
        assert figures["samples_per_step"] == pytest.approx(64, rel=0.02)
        assert 0 < figures["pipeline_efficiency"] < 1
        assert figures["pipeline_samples_per_s_rel"] > 0
    assert own["pipeline_efficiency"] > 1.01 * own["pipeline_efficiency_unordered"]
    assert own["pipeline_efficiency"] > rival["pipeline_efficiency"]
    assert own["shared_per_step"] > 0
    assert "pipeline_efficiency_unordered" not in rival
    assert _run(*flags, folder=tmp_path) == report


def test_no_steady_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *FLAGS, "--policy", "ffd", "--global-batch-size", "2000"]) == 0
    told = capsys.readouterr().out
    assert "warning: no steady steps: 3000 samples are two global batches of 2000" in told


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--policy best", "--policy 'best': expected all, or some of standard-safe,"),
        ("--tokenizer t", "--tokenizer 't' would do nothing: --lengths 'lognormal:"),
        ("--dp 0", "'0' is not a whole number of at least 1"),
        ("--token-budget 500", "tokens; the token budget is 500: raise --token-budget"),
        ("--fixed-cost 1", "--fixed-cost 1.0 is not in [0, 1)"),
        ("--share-long 3", "--share-long 3 is not a power of two"),
        ("--vpp 2", "--vpp 2 needs a pipeline"),
        ("--pp 4 --vpp 2 --vpp-group 3", "--vpp-group 3 needs --vpp, and at least --pp 4"),
    ],
)
def test_a_wrong_argument(flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *FLAGS, *flags.split()])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
