"""The training loop on megatron-core alone, run in two gloo processes."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["red", "green", "blue", "one", "two", "three", "north", "south", "east", "west"]
NUM_RECORDS = 45
BATCH = 8
_LINE = re.compile(r"^step (\d+) \| samples (\d+) \| M (\d+) \| loss (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    num_samples: int
    num_micro_batches: int
    loss: float


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name conversations of widely varied lengths and a tokenizer."""
    from odb_megatron.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("core")
    texts = ["user assistant\n", " ".join(WORDS), *WORDS] * 20
    tokenizer = train_bpe(texts, vocab_size=400, folder=folder / "tokenizer")
    generator, path = random.Random(3), folder / "chat.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(NUM_RECORDS):
            words = min(46, int(generator.lognormvariate(2.0, 1.0)) + 2)
            answer = " ".join(generator.choice(WORDS) for _ in range(words))
            turns = [("user", "red"), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return ["--data-path", str(path), "--tokenizer-model", str(tokenizer)]


def train(data: list[str], *flags: str, code: int = 0) -> tuple[list[Step], str]:
    """Run the example; return its steps, and all that it printed."""
    command = [
        *(sys.executable, "-m", "odb_megatron.elastic", "--standalone", "--nproc-per-node=2"),
        *("-m", "odb_megatron.cpu", str(ROOT / "examples" / "train_core_only.py"), *data),
        *("--seq-length", "64", "--train-samples", str(NUM_RECORDS), "--hidden-size", "32"),
        *("--global-batch-size", str(BATCH), "--num-attention-heads", "2", *flags),
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    printed = ran.stdout + ran.stderr
    assert ran.returncode == code, printed[-4000:]
    found = [
        Step(num_samples=int(samples), num_micro_batches=int(count), loss=float(loss))
        for _, samples, count, loss in _LINE.findall(ran.stdout)
    ]
    return found, printed


def test_losses_do_not_depend_on_the_packing(data: list[str]) -> None:
    small, _ = train(data, "--odb-token-budget", "64")
    large, _ = train(data, "--odb-token-budget", "256")
    assert [step.num_samples for step in small] == [8, 8, 8, 8, 8, 5]
    assert len({step.num_micro_batches for step in small}) > 1
    assert {step.num_micro_batches for step in large} == {1}
    assert [step.loss for step in small] == pytest.approx([step.loss for step in large], abs=1e-5)
    assert small[-1].loss < small[0].loss - 0.1


def test_pipeline(data: list[str]) -> None:
    """Stages run the same M, which changes from step to step."""
    steps, _ = train(data, "--pipeline-model-parallel-size", "2")
    assert [step.num_samples for step in steps] == [8, 8, 8, 8, 8, 5]
    assert len({step.num_micro_batches for step in steps}) > 1
    assert steps[-1].loss < steps[0].loss - 0.1


def test_what_does_not_fit_is_named(data: list[str]) -> None:
    _, printed = train(data, "--odb-token-budget", "32", code=2)
    assert "--odb-token-budget 32 is below --seq-length 64" in printed


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--odb-epochs", "1"), "this loop does not have --odb-epochs"),
        (("--odb-dry-run",), "this loop does not have --odb-dry-run"),
    ],
)
def test_a_flag_that_would_do_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    reason: str,
) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "train_core_only.py"))
    given = ["train_core_only.py", "--data-path", "a", "--tokenizer-model", "b", *flags]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="2"):
        script["parse_args"]()
    assert reason in capsys.readouterr().err
