"""The GPU benchmark: whole runs on the CPU, its flags and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ARMS = ["standard", "sorted", "dp_balanced", "odb"]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.append(str(BENCHMARKS))
    import gpu_throughput

    return gpu_throughput


def run_script(*flags: str, folder: Path) -> dict[str, Any]:
    """Run the benchmark from another folder; return its JSON."""
    target = folder / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_throughput.py"), *flags, "--json", str(target)],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(target.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    result = run_script("--device", "cpu", "--tiny", "--minutes", "60", folder=tmp_path)
    assert result["complete"]
    assert result["left_out"] == {}
    assert result["setting"]["attention"] == "torch"
    assert result["backends"]["torch"]["attention_ms"] > 0
    assert result["packed_against_padded"]["passed"]
    assert [row["name"] for row in result["rows"]] == ["chat", "cv1.0", "cv2.0", "cv0.48", "cv0.29"]
    for row in result["rows"]:
        assert row["rounds"] == 2
        assert sorted(row["arms"]) == sorted(ARMS)
        for name, arm in row["arms"].items():
            assert arm["num_steps"] == 2
            assert 0 < arm["balance_measured"] <= 1
            assert (arm["padding_fraction"] == 0) or name in ("standard", "sorted")
        over = row["arms"]["odb"]["tokens_per_s"] / row["arms"]["sorted"]["tokens_per_s"]
        assert row["ratios"]["odb_over_sorted"]["mean"] == pytest.approx(over)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_model_on_a_gpu(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--hidden", "256", "--heads", "4", "--ffn-hidden", "512")
    flags = ("--minutes", "3", "--rows", "cv1.0", "--rounds", "2")
    (row,) = run_script(*sizes, *flags, folder=tmp_path)["rows"]
    assert all(arm["peak_memory_bytes"] > 0 for arm in row["arms"].values())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--minutes nan", "--minutes must be above 0, got nan"),
        ("--token-budget 4095", "--token-budget 4095 is below the context of 4096 tokens"),
        ("--global-batch-size 255", "255 is no multiple of the 4 replicas"),
        ("--heads 7", "--hidden 1536 over 7 heads is no multiple of 8"),
        ("--layers 0", "argument --layers: '0' is not a whole number of at least 1"),
        ("--arms best", "argument --arms: invalid choice: 'best'"),
    ],
)
def test_wrong_flags_are_refused(
    script: Any, flags: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse(script._parser(), flags.split())
    assert text in capsys.readouterr().err


def test_lengths_of_the_rows(script: Any, tmp_path: Path) -> None:
    options = script.parse(script._parser(), [])
    for row in script.ROWS:
        lengths = script.row_lengths(row, options)
        assert len(lengths) == 256 * 17
        assert 1 <= lengths.min() <= lengths.max() <= 4096
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"lengths": [5, 9000]}))
    options.chat_lengths = path
    found = script.row_lengths("chat", options)
    assert set(found.tolist()) == {5, 4096}


def test_figures_of_an_arm(script: Any) -> None:
    sys.path.append(str(BENCHMARKS))
    from gpu_model import Step

    def step(replica_s: tuple[float, float], tokens: int) -> Any:
        return Step(
            replica_s=replica_s,
            optimizer_s=0.5,
            samples=4,
            tokens=tokens,
            computed=2 * tokens,
            flops=6e12,
            loss=1.0,
            peak_bytes=7,
        )

    steps = {"odb": [step((1.5, 1.0), 60)], "standard": [step((2.5, 1.5), 60)], "sorted": []}
    options, setting = Namespace(replicas=2), {"peak_tflops": 6.0}
    found = script.summary(steps, {"dp_balanced": "out of memory"}, options, setting)
    assert found["arms"]["odb"]["tokens_per_s"] == 30
    assert found["arms"]["odb"]["mfu"] == 0.25
    assert found["arms"]["odb"]["padding_fraction"] == 0.5
    assert found["arms"]["odb"]["balance_measured"] == pytest.approx(1.25 / 1.5)
    assert found["arms"]["dp_balanced"] == {"out_of_memory": "out of memory"}
    assert found["ratios"]["odb_over_standard"]["mean"] == pytest.approx(1.5)
    assert list(found["ratios"]) == ["odb_over_standard"]
