"""The GPU benchmark: its arithmetic, and whole runs on the CPU as on a bare machine."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.cost import COST_UNIT, CostModel, ModelShape
from odb_megatron.simulation.schedules import Setting, Stream

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"
SHAPE = ModelShape(num_layers=2, hidden=8, ffn_hidden=16, query=8, key_value=8, vocab=32)
ARMS = ("standard", "standard_mean", "sorted", "odb")


def module(name: str) -> ModuleType:
    """Import a benchmark's module as its scripts do: from the scripts' own folder."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


def run_script(
    *flags: str, folder: Path, bare: bool = True, code: int = 0
) -> tuple[dict[str, Any], str]:
    """Run the benchmark from another folder; return its JSON, if it wrote one, and its output."""
    target = folder / "result.json"
    head = [sys.executable, *([str(TESTS / "bare_machine.py")] if bare else [])]
    done = subprocess.run(
        [*head, str(BENCHMARKS / "gpu_throughput.py"), *flags, "--json", str(target)],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    return found, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed megatron.core, as a wheel."""
    import megatron.core

    core = Path(megatron.core.__path__[0])
    path = tmp_path_factory.mktemp("wheel") / "megatron_core-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in core.rglob("*.py"):
            archive.write(file, file.relative_to(core.parents[1]))
    return path


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_needs_torch_numpy_and_the_wheel_only(tmp_path: Path, wheel: Path) -> None:
    result, output = run_script(
        *("--device", "cpu", "--tiny", "--megatron-wheel", str(wheel)),
        *("--rows", "chat", "cv2.0", "--rounds", "2", "--minutes", "60"),
        folder=tmp_path,
    )
    assert "'tqdm'" in output.rpartition("refused: ")[2], "the bare machine hid nothing"
    assert result["complete"]
    assert result["left_out"] == {}
    assert result["setting"]["peak_flops"] is None
    assert "simulated" in result["setting"]["notes"][0]
    for case in result["backends"]["cpu"]["cases"].values():
        assert case["passed"]
        assert [each["of"] for each in case["differences"]] == ["out", "dq", "dk", "dv"]
    assert result["backends"]["cpu"]["attention_ms"] > 0
    assert result["packed_against_padded"]["abs_diff"] < 1e-5
    assert result["calibration"]["shape_check"]["num_micro_batches"] == 36
    assert [row["name"] for row in result["rows"]] == ["chat", "cv2.0"]
    for row in result["rows"]:
        check_row(row)


def check_row(row: dict[str, Any]) -> None:
    assert row["rounds"] == row["rounds_planned"] == 2
    assert row["stopped"] is None
    assert list(row["arms"]) == list(ARMS)
    arms = row["arms"]
    for name, arm in arms.items():
        assert arm["num_steps"] == 2
        assert 0 < arm["balance_measured"] <= 1
        assert 0 < arm["balance_predicted"] <= 1
        assert arm["tokens_per_s"] == pytest.approx(arm["samples_per_s"] * row["lengths"]["mean"])
        assert arm["tokens_per_s_per_device"] == pytest.approx(arm["tokens_per_s"] / 2)
        assert arm["padding_fraction"] == 0 or name != "odb"
        if name != "standard_mean":
            assert arm["max_micro_batch_tokens"] <= 256
    assert arms["odb"]["balance_predicted"] > arms["standard"]["balance_predicted"]
    assert arms["sorted"]["padding_fraction"] < arms["standard_mean"]["padding_fraction"]
    for ratio in row["ratios"].values():
        low, high = ratio["ci95"]
        assert 0 < low <= ratio["mean"] <= high
    over = row["ratios"]["odb_over_standard"]["mean"]
    expected = arms["odb"]["tokens_per_s"] / arms["standard"]["tokens_per_s"]
    assert over == pytest.approx(expected)
    for kind in ("packed", "padded"):
        for check in row["cost_model"][kind].values():
            assert check["num_micro_batches"] > 2
            assert check["worst_relative_error"] >= check["median_relative_error"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_model_on_a_gpu(tmp_path: Path) -> None:
    result, _ = run_script(
        *("--minutes", "3", "--layers", "2", "--hidden", "256", "--heads", "4"),
        *("--ffn-hidden", "512", "--rows", "cv1.0", "--rounds", "2", "--min-rounds", "2"),
        folder=tmp_path,
        bare=False,
    )
    (row,) = result["rows"]
    for arm in row["arms"].values():
        assert arm["peak_memory_bytes"] > 0
    assert result["packed_against_padded"]["passed"]


@pytest.mark.slow
def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    _, output = run_script(
        "--device", "cpu", "--tiny", "--attention", "none", folder=tmp_path, bare=False, code=2
    )
    assert "attention backend 'none' is unknown: choose auto or one of " in output


def test_without_megatron_core_the_way_to_carry_it_is_said(tmp_path: Path) -> None:
    _, output = run_script("--device", "cpu", "--tiny", folder=tmp_path, code=2)
    assert "megatron.core cannot be imported by " in output
    assert "pip download --no-deps -d wheels megatron-core==" in output
    assert "--megatron-wheel wheels/megatron_core-" in output


# --- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--minutes 0", "--minutes must be above 0, got 0"),
        ("--minutes nan", "--minutes must be above 0, got nan"),
        (
            "--token-budget 4095",
            "--token-budget 4095 is below the context of 4096 tokens",
        ),
        ("--min-rounds 13", "--min-rounds 13 is above --rounds 12"),
        ("--global-batch-size 255", "255 is no multiple of the 4 replicas"),
        ("--layers 0", "argument --layers: '0' is not a whole number of at least 1"),
        ("--arms best", "argument --arms: invalid choice: 'best'"),
        ("--json .", "argument --json: '.' is a folder: name a file in it"),
    ],
)
def test_wrong_flags_are_refused(flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = module("gpu_throughput")
    with pytest.raises(SystemExit):
        script.parse(script._parser(), flags.split())
    assert text in capsys.readouterr().err


def test_names_of_the_script_are_those_of_its_modules() -> None:
    script = module("gpu_throughput")
    assert tuple(module("gpu_arms").ARMS) == script.ARMS
    assert module("gpu_lengths").MIXES == script.ROWS
    kinds = tuple(kind.value for kind in module("gpu_model").Positions)
    assert ("auto", *kinds) == script.POSITIONS
    assert script.TINY.keys() == script.DEFAULTS.keys()


@pytest.mark.parametrize("content", [None, b"no zip", {"other/file.py": ""}])
def test_what_is_no_wheel_of_megatron_core_is_refused(content: Any, tmp_path: Path) -> None:
    packages = module("gpu_packages")
    path = tmp_path / "a.whl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text)
    expected = "has no megatron/core/package_info.py" if isinstance(content, dict) else "no wheel"
    with pytest.raises(packages.MissingPackageError, match=expected):
        packages._unpack(path)


# --- intervals ---------------------------------------------------------------------------------


def test_a_ratio_of_rates_is_that_of_the_totals() -> None:
    interval = module("intervals").rate_ratio_interval([(8, 2), (2, 3)], [(4, 2), (4, 8)])
    assert interval.mean == pytest.approx((10 / 5) / (8 / 10))
    assert 0 < interval.low < interval.mean < interval.high


def test_rounds_that_agree_have_no_interval_to_speak_of() -> None:
    interval = module("intervals").rate_ratio_interval([(6, 2), (9, 3)], [(2, 1), (8, 4)])
    assert interval.mean == pytest.approx(1.5)
    assert interval.low == pytest.approx(1.5)
    assert interval.high == pytest.approx(1.5)


def test_one_round_has_no_interval() -> None:
    interval = module("intervals").rate_ratio_interval([(6, 2)], [(1, 1)])
    assert interval.mean == pytest.approx(3)
    assert (interval.low, interval.high) == (None, None)


@pytest.mark.parametrize(
    ("over", "under"), [([], []), ([(1, 1)], [(1, 1), (1, 1)]), ([(1, 0)], [(1, 1)])]
)
def test_rounds_that_do_not_pair_are_refused(over: Any, under: Any) -> None:
    with pytest.raises(ValueError, match="work and time must be positive, of the same rounds"):
        module("intervals").rate_ratio_interval(over, under)


# --- time budget -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "rounds", "left_out"),
    [
        (1000, {"a": 5, "b": 5, "c": 5}, []),
        (150, {"a": 3, "b": 3, "c": 3}, []),  # 150 / (1.15 * 31) = 4.2, the warm-up included
        (70, {"a": 4, "c": 4}, ["b"]),  # what comes later may still fit
        (20, {"c": 5}, ["a", "b"]),
        (0, {}, ["a", "b", "c"]),
    ],
)
def test_rows_are_chosen_in_order_and_share_the_time(
    left_s: float, rounds: dict[str, int], left_out: list[str]
) -> None:
    budget = module("gpu_budget")
    limits = budget.RoundLimits(least=2, most=5)
    plan = budget.plan_rows({"a": 10, "b": 20, "c": 1}, left_s=left_s, limits=limits)
    assert plan.rounds == rounds
    assert list(plan.left_out) == left_out


def test_a_row_left_out_says_what_it_needs() -> None:
    budget = module("gpu_budget")
    limits = budget.RoundLimits(least=3, most=3)
    plan = budget.plan_rows({"a": 10.0}, left_s=40.0, limits=limits)
    assert plan.left_out == {"a": "its warm-up and 3 rounds need about 46 s, 40 s were left"}


@settings(deadline=None)
@given(
    seconds=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6),
    left_s=st.floats(-10, 5000),
    least=st.integers(1, 4),
    more=st.integers(0, 8),
)
def test_the_plan_never_takes_more_time_than_is_left(
    seconds: list[float], left_s: float, least: int, more: int
) -> None:
    budget = module("gpu_budget")
    limits = budget.RoundLimits(least=least, most=least + more)
    rows = {str(index): value for index, value in enumerate(seconds)}
    plan = budget.plan_rows(rows, left_s=left_s, limits=limits)
    assert rows.keys() == plan.rounds.keys() | plan.left_out.keys()
    spent = sum(rows[name] * (1 + count) for name, count in plan.rounds.items())
    assert not plan.rounds or spent <= left_s
    assert all(least <= count <= least + more for count in plan.rounds.values())


def test_rounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be 1 <= least <= most; got 3, 2"):
        module("gpu_budget").RoundLimits(least=3, most=2)


# --- lengths -----------------------------------------------------------------------------------


def choice(**changes: Any) -> Any:
    values = {"context": 4096, "mean": 500.0, "chat_file": None, "seed": 1} | changes
    return module("gpu_lengths").LengthChoice(**values)


def test_lengths_have_the_spread_that_their_name_says() -> None:
    draw = module("gpu_lengths").draw_lengths
    for name, spread in (("cv0.29", 0.29), ("cv0.48", 0.48), ("cv1.0", 1.0), ("cv2.0", 2.0)):
        values = draw(name, num_samples=20000, choice=choice(context=1 << 20)).values
        assert values.mean() == pytest.approx(500, rel=0.05)
        assert values.std() / values.mean() == pytest.approx(spread, rel=0.15)


def test_drawn_chat_lengths_follow_the_quantiles_and_are_cut() -> None:
    lengths = module("gpu_lengths")
    whole = lengths.draw_lengths("chat", num_samples=50000, choice=choice(context=1 << 20))
    expected = lengths.CHAT_QUANTILES[8::8]
    found = np.quantile(whole.values, [0.25, 0.5, 0.75, 1.0])
    assert found == pytest.approx(expected, rel=0.05)
    assert whole.num_cut == 0
    cut = lengths.draw_lengths("chat", num_samples=50000, choice=choice(context=1000))
    assert cut.values.max() == 1000
    assert cut.num_cut == int((whole.values > 1000).sum()) > 0
    assert cut.summary()["num_truncated"] == cut.num_cut


@pytest.mark.parametrize("content", ['{"lengths": [3, 5, 9000]}', "[3, 5, 9000]"])
def test_chat_lengths_come_from_a_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content, encoding="utf-8")
    found = module("gpu_lengths").draw_lengths("chat", num_samples=7, choice=choice(chat_file=path))
    assert sorted(found.values[:3].tolist()) == [3, 5, 4096]
    assert len(found.values) == 7
    assert found.num_cut == int((found.values == 4096).sum())
    assert found.origin == "lengths.json: 3 lengths"


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text('{"length": [3]}', encoding="utf-8")
    with pytest.raises(ValueError, match="--chat-lengths .* expected a list"):
        module("gpu_lengths").draw_lengths("chat", num_samples=7, choice=choice(chat_file=path))


# --- arms --------------------------------------------------------------------------------------


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "num_replicas": 2,
        "token_budget": 256,
        "global_batch_size": 32,
        "cost": CostModel.from_ratios(quadratic=0.003, fixed_tokens=12),
    }
    return Setting(**values | changes)


def stream_for(num_steps: int, own: Setting, *, seed: int = 0) -> Stream:
    needed = module("gpu_arms").num_samples_needed(num_steps, own)
    lengths = np.clip(np.random.default_rng(seed).lognormal(3, 1, needed), 1, 128).astype(np.int64)
    return Stream.of_epochs(lengths, epochs=1, cost=own.cost, seed=0)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_steps_of_an_arm(arm: str, replicas: int) -> None:
    own = setting(num_replicas=replicas)
    stream = stream_for(6, own)
    found = module("gpu_arms").arm_steps(arm, stream, own, context=128, num_steps=6)
    assert len(found.steps) == 6
    assert found.is_padded != (arm == "odb")
    seen: list[int] = []
    for step in found.steps:
        assert len(step) == replicas
        assert len({len(replica) for replica in step}) == 1, "every replica runs the same M"
        batches = [batch for replica in step for batch in replica]
        seen += [position for batch in batches for position in batch]
        for batch in batches:
            lengths = stream.lengths[list(batch)]
            tokens = len(batch) * lengths.max(initial=0) if found.is_padded else lengths.sum()
            assert arm == "standard_mean" or tokens <= 256
            assert arm != "standard" or len(batch) == 2
            assert batch or not found.is_padded, "no padded micro-batch idles"
    assert len(seen) == len(set(seen))
    if arm != "sorted":  # its few steps may all be of short samples
        assert len(seen) / 6 == pytest.approx(32, rel=0.25)


def test_a_stream_too_short_for_the_steps_is_refused() -> None:
    own = setting()
    stream = stream_for(1, own)
    with pytest.raises(ValueError, match="steps of .* samples, 90 are wanted: lower"):
        module("gpu_arms").arm_steps("odb", stream, own, context=128, num_steps=90)


# --- measuring ---------------------------------------------------------------------------------


class ListClock:
    """Marks are nanoseconds."""

    def elapsed_s(self, start: int, end: int) -> float:
        return (end - start) / 1e9


class FakeTrainer:
    """Takes a time that follows from a micro-batch's lengths; may run out of memory, or diverge."""

    def __init__(self, *, price: CostModel | None = None, largest: int = 1 << 40) -> None:
        self.clock = ListClock()
        self.price = price or CostModel()
        self.largest = largest
        self.now = 0
        self.loss = 1.0

    def begin_step(self) -> None:
        pass

    def run_replica(self, items: Sequence[Any]) -> tuple[list[int], Any]:
        marks = [self.now]
        for item in items:
            if isinstance(item, dict):
                rows, width = item["tokens"].shape
                lengths = [width] * rows
            else:
                lengths = item.cu_seqlens_padded.diff().tolist()
            if sum(lengths) > self.largest:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
            one = module("gpu_measure").MicroBatchTime(
                tokens=sum(lengths), squares=sum(each**2 for each in lengths), time_ns=0
            )
            self.now += module("gpu_measure").microbatch_cost(one, self.price) * 1000 // COST_UNIT
            marks.append(self.now)
        return marks, torch.tensor([2.0, 1.0])

    def end_step(self, sums: Any) -> tuple[list[int], float]:
        self.now += 500
        return [self.now - 500, self.now], self.loss


def maker_for(lengths: Sequence[int]) -> Any:
    stream = Stream.of_epochs(np.array(lengths), epochs=1, cost=CostModel(), seed=0)
    return module("gpu_measure").StepMaker(stream, vocab=16, seed=0)


def test_a_step_lasts_as_long_as_its_slowest_replica_and_the_optimizer() -> None:
    measure = module("gpu_measure")
    maker = maker_for([3, 5, 2, 4])
    step = (((0, 1), (2,)), ((3,), ()))
    packed = measure.run_step(FakeTrainer(), step, maker, is_padded=False, shape=SHAPE)
    assert [[one.tokens for one in replica] for replica in packed.times] == [[8, 2], [4, 1]]
    assert packed.times[0][0].squares == 9 + 25
    assert packed.replica_s == [10e-6, 5e-6]
    assert packed.step_s == pytest.approx(10.5e-6)
    assert (packed.num_samples, packed.num_tokens) == (4, 14)
    linear, quadratic = SHAPE.linear_flops(), SHAPE.quadratic_flops()
    assert packed.flops == 3 * (14 * linear + (9 + 25 + 4 + 16) * quadratic)
    padded = measure.run_step(FakeTrainer(), (((0, 1),),), maker, is_padded=True, shape=SHAPE)
    assert [[one.tokens for one in replica] for replica in padded.times] == [[10]]
    assert padded.computed_flops == 3 * (10 * linear + 2 * 25 * quadratic)
    assert padded.num_tokens == 8


def test_a_padded_micro_batch_holds_the_packed_ones_samples() -> None:
    maker = maker_for([3, 5])
    (packed,) = maker.items([(0, 1)], is_padded=False)
    (padded,) = maker.items([(0, 1)], is_padded=True)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        rows = padded[name]
        joined = torch.cat([rows[0, :3], rows[1, :5]])
        assert torch.equal(joined, getattr(packed, name)[0]), name
    assert padded["loss_mask"].sum() == 8
    assert padded["length"].tolist() == [3, 5]


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    trainer = FakeTrainer()
    trainer.loss = math.nan
    with pytest.raises(RuntimeError, match="the loss of a step is nan: a finite one was expected"):
        module("gpu_measure").run_step(
            trainer, (((0,),),), maker_for([3]), is_padded=False, shape=SHAPE
        )


def rounds(trainer: FakeTrainer, *, last: int = 9) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Measure three arms of four steps each; begin no round after `last`."""
    measure, arms = module("gpu_measure"), module("gpu_arms")
    step = (((0, 1),), ((2,),))
    wide = (((1, 2, 3),), ((0, 3),))
    own = {
        "standard": arms.ArmSteps(is_padded=True, steps=[step] * 4),
        "standard_mean": arms.ArmSteps(is_padded=True, steps=[wide] * 4),
        "odb": arms.ArmSteps(is_padded=False, steps=[step] * 4),
    }
    begun: list[tuple[int, str]] = []

    def may_begin(round_: int, name: str) -> bool:
        begun.append((round_, name))
        return len(begun) <= last * len(own)

    found = measure.measure_rounds(
        trainer,
        own,
        maker_for([3, 5, 2, 7]),
        shape=SHAPE,
        may_begin=may_begin,
        on_round=lambda round_, results: None,
    )
    return found, begun


def test_rounds_are_interleaved_and_the_first_is_not_counted() -> None:
    found, begun = rounds(FakeTrainer())
    assert [name for _, name in begun[:6]] == [
        *("standard", "standard_mean", "odb"),
        *("standard_mean", "odb", "standard"),
    ]
    assert {name: len(one.steps) for name, one in found.items()} == dict.fromkeys(found, 3)


def test_a_round_that_was_begun_and_not_finished_is_left_out() -> None:
    found, _ = rounds(FakeTrainer(), last=2)
    assert {name: len(one.steps) for name, one in found.items()} == dict.fromkeys(found, 1)


def test_an_arm_that_runs_out_of_memory_is_said_and_the_others_go_on() -> None:
    measure = module("gpu_measure")
    found, begun = rounds(FakeTrainer(largest=20))
    assert found["standard_mean"].out_of_memory == "CUDA out of memory"
    assert len(found["odb"].steps) == 3
    assert [name for _, name in begun].count("standard_mean") == 1
    figures = measure.summarize_arm(
        found["standard_mean"], mean_length=4, cost=CostModel(), peak_flops=None
    )
    assert figures == {"out_of_memory": "CUDA out of memory"}
    assert list(measure.summarize_ratios(found)) == ["odb_over_standard"]


def test_the_figures_of_an_arm() -> None:
    measure = module("gpu_measure")
    found, _ = rounds(FakeTrainer())
    figures = measure.summarize_arm(
        found["standard"], mean_length=4.0, cost=CostModel(), peak_flops=1e12
    )
    assert figures["step_s"] == pytest.approx(10.5e-6)  # 2 * 5 tokens and the optimizer
    assert figures["tokens_per_s"] == pytest.approx(10 / 10.5e-6)
    assert figures["samples_per_s"] == pytest.approx(10 / 10.5e-6 / 4)
    assert figures["padding_fraction"] == pytest.approx(1 - 10 / 12)
    assert figures["balance_measured"] == pytest.approx(6 / 10)
    assert figures["balance_predicted"] == pytest.approx(6 / 10)
    flops = 3 * (10 * SHAPE.linear_flops() + (9 + 25 + 4) * SHAPE.quadratic_flops())
    assert figures["mfu"] == pytest.approx(flops / (2 * 10.5e-6 * 1e12))
    assert figures["computed_mfu"] > figures["mfu"]


def test_the_known_peak_of_a_device_is_an_assumption() -> None:
    peak = module("gpu_report").peak_flops
    assert peak("NVIDIA H200", None) == (989.4e12, "assumed for H200: 989.4 TFLOP/s dense bf16")
    assert peak("NVIDIA H200", 700.0) == (700e12, "given with --peak-tflops")
    assert peak("Other", None) == (None, "not known for 'Other': pass --peak-tflops to have MFU")


# --- rows --------------------------------------------------------------------------------------


class FakeTime:
    """A clock that only moves when something is run."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SlowTrainer(FakeTrainer):
    """Takes `factor` of the time that was predicted, from its call `slow_from` on."""

    def __init__(self, fake: FakeTime, *, factor: float, slow_from: int) -> None:
        super().__init__()
        self._fake = fake
        self._factor = factor
        self._calls_left = slow_from

    def run_replica(self, items: Sequence[Any]) -> tuple[list[int], Any]:
        marks, sums = super().run_replica(items)
        factor = 1.0 if self._calls_left > 0 else self._factor
        self._calls_left -= 1
        self._fake.now += factor * (marks[-1] - marks[0]) / 1e9 * SECONDS_PER_S
        return marks, sums


SECONDS_PER_S = 1e5  # a token of FakeTrainer takes 1 µs; of the fake time, 0.1 s


def measured_rows(
    minutes: float,
    *flags: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    factor: float = 1.0,
    slow_from: int = 0,
) -> tuple[dict[str, Any], float]:
    """Measure rows on fake time; return the JSON as it is on disk, and the seconds spent."""
    script, rows, fake = module("gpu_throughput"), module("gpu_rows"), FakeTime()
    monkeypatch.setattr(rows, "time", fake)
    argv = ["--device", "cpu", "--tiny", "--minutes", str(minutes), *flags]
    options = script.parse(script._parser(), [*argv, "--json", str(folder / "out.json")])
    benchmark = rows.Benchmark(options, started=fake.now)
    benchmark._prior, benchmark._peak = CostModel(), None
    benchmark._ns_per_unit = 1000 * SECONDS_PER_S / COST_UNIT
    benchmark._result |= {"rows": [], "left_out": {}}
    benchmark._measure(SlowTrainer(fake, factor=factor, slow_from=slow_from), CostModel())
    benchmark._save()
    return json.loads((folder / "out.json").read_text(encoding="utf-8")), fake.now - 100


def test_all_rows_are_measured_where_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = measured_rows(600, folder=tmp_path, monkeypatch=monkeypatch)
    assert [row["name"] for row in result["rows"]] == list(module("gpu_lengths").MIXES)
    assert [row["rounds"] for row in result["rows"]] == [3] * 5
    assert result["left_out"] == {}
    assert not result["complete"], "what is not said to be whole is a usable file none the less"


@pytest.mark.parametrize("minutes", [20.0, 120.0, 200.0])
@pytest.mark.parametrize("factor", [1.0, 0.5, 6.0])
def test_the_minutes_are_obeyed(
    minutes: float, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, spent = measured_rows(minutes, folder=tmp_path, monkeypatch=monkeypatch, factor=factor)
    step_s = 0.1 * 2 * 32 * 128 * factor  # no arm's step can take longer
    assert spent <= 60 * minutes + (step_s if factor > 1 else 0)
    named = {row["name"] for row in result["rows"]} | result["left_out"].keys()
    assert named == set(module("gpu_lengths").MIXES)
    short = [row for row in result["rows"] if row["rounds"] < row["rounds_planned"]]
    assert all(row["stopped"] for row in short)
    assert result["left_out"] or short or minutes == 200.0
    for reason in result["left_out"].values():
        assert reason.startswith("its warm-up and 2 rounds need about ")


def test_a_row_that_becomes_slower_is_stopped_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--rows", "cv1.0")
    _, whole_s = measured_rows(600, *flags, folder=tmp_path, monkeypatch=monkeypatch)
    minutes = (1.2 * whole_s + 3) / 60
    result, spent = measured_rows(
        minutes, *flags, folder=tmp_path, monkeypatch=monkeypatch, factor=3.0, slow_from=20
    )
    (row,) = result["rows"]
    assert (row["rounds"], row["rounds_planned"]) == (1, 3)
    assert row["stopped"].startswith("round 2 of 3: ")
    assert {arm["num_steps"] for arm in row["arms"].values()} == {1}
    assert spent <= 60 * minutes


def test_rotary_positions_need_their_kernel() -> None:
    choose = module("gpu_model").Positions.choose
    with pytest.raises(ValueError, match="--positions rope needs Transformer Engine's kernel on"):
        choose("rope", "cpu")
    assert choose("auto", "cpu").value == "learned"
    assert choose("unfused-rope", "cpu").value == "unfused-rope"


# --- cost model --------------------------------------------------------------------------------


def test_the_predicted_cost_of_a_micro_batch_is_that_of_its_samples() -> None:
    cost = CostModel.from_ratios(quadratic=0.25, fixed_tokens=3)
    one = module("gpu_measure").MicroBatchTime(tokens=12, squares=80, time_ns=0)
    assert module("gpu_measure").microbatch_cost(one, cost) == cost.sample(4) + cost.sample(8) + (
        3 * COST_UNIT
    )


def timed(cost: CostModel, tokens: Sequence[int]) -> Iterator[Any]:
    for count in tokens:
        one = module("gpu_measure").MicroBatchTime(tokens=count, squares=count**2, time_ns=0)
        time_ns = module("gpu_measure").microbatch_cost(one, cost) * 10 // COST_UNIT
        yield module("gpu_measure").MicroBatchTime(tokens=count, squares=count**2, time_ns=time_ns)


def test_a_cost_model_that_is_right_has_no_error() -> None:
    cost = CostModel.from_ratios(quadratic=0.01, fixed_tokens=50)
    check = module("gpu_cost").check_cost(list(timed(cost, [100, 400, 900])), cost)
    assert check.r2 == pytest.approx(1, abs=1e-4)
    assert check.worst_relative_error < 1e-2


def test_the_micro_batch_that_is_predicted_worst_is_named() -> None:
    cost = CostModel.from_ratios(quadratic=0, fixed_tokens=0)
    times = [
        *timed(cost, [100] * 9),
        module("gpu_measure").MicroBatchTime(tokens=101, squares=7, time_ns=500),
    ]
    check = module("gpu_cost").check_cost(times, cost)
    assert check.worst == (101, 7)
    assert check.worst_relative_error > 0.5
    assert check.median_relative_error < 0.1
    assert check.r2 is not None
    assert check.r2 < 0.5


def test_nothing_measured_has_no_check() -> None:
    assert module("gpu_cost").check_cost([], CostModel()) is None


def test_calibration_finds_the_prices_of_the_device() -> None:
    cost = module("gpu_cost")
    true = CostModel.from_ratios(quadratic=0.01, fixed_tokens=100)
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 500), 1, 2000).astype(int).tolist()
    batches = cost.varied_micro_batches(lengths, count=48, token_budget=4000, seed=0)
    assert all(batches)
    assert all(sum(lengths[each] for each in batch) <= 4000 for batch in batches)
    found, note, times = cost.calibrate(
        FakeTrainer(price=true),
        maker_for(lengths),
        batches,
        shape=SHAPE,
        token_budget=4000,
    )
    assert len(times) == 36
    assert note == ""
    assert found.quadratic == pytest.approx(true.quadratic, rel=0.01)
    assert found.fixed == pytest.approx(true.fixed, rel=0.01)
    assert cost.check_cost(times, found).r2 > 0.9999


# --- attention ---------------------------------------------------------------------------------


def test_each_kind_of_micro_batch_runs_its_own_attention() -> None:
    def attention(name: str) -> Any:
        class Attention(torch.nn.Module):
            def __init__(self, *, layer_number: int) -> None:
                super().__init__()
                self.name = f"{name} {layer_number}"

            def forward(self, query: str, *, packed_seq_params: object, scale: int) -> Any:
                return self.name, query, packed_seq_params, scale

        return Attention

    switched = module("gpu_model").switch_attention(attention("packed"), attention("padded"))
    built = switched(layer_number=3)
    assert built("q", packed_seq_params="p", scale=2) == ("packed 3", "q", "p", 2)
    assert built("q", packed_seq_params=None, scale=2) == ("padded 3", "q", None, 2)


def test_a_model_size_that_kernels_cannot_take_is_refused() -> None:
    model = module("gpu_model")
    values = {"num_layers": 1, "ffn_hidden": 8, "vocab": 8, "context": 8}
    with pytest.raises(ValueError, match="hidden size 60 over 4 heads is no multiple of 8"):
        model.ModelSize(hidden=60, num_heads=4, positions=model.Positions.LEARNED, **values)
