"""The example with pictures: what it makes, and that it trains."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training", reason="needs megatron.training (Python 3.12)")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "multimodal" / "train_pictures.py"
_STEP = re.compile(r"odb step \d+ \| loss (\S+) ")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_the_same_pictures_each_time(script: dict[str, Any], tmp_path: Path) -> None:
    made = [script["made_pictures"](tmp_path / name, num=9) for name in "ab"]
    (data, folder, answers), (other, _, others) = made
    assert answers == others
    assert data.read_bytes() == other.read_bytes()
    names = sorted(path.name for path in folder.glob("*.png"))
    assert 9 < len(names) <= 18
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    records = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(records) == len(answers) == 9


def run(tmp_path: Path, *flags: str) -> list[float]:
    command = [sys.executable, str(EXAMPLE), "--cache", str(tmp_path), "--nproc-per-node", "1"]
    ended = subprocess.run(
        [*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return [float(loss) for loss in _STEP.findall(ended.stdout)]


@pytest.mark.megatron
@pytest.mark.slow
def test_it_trains(tmp_path: Path) -> None:
    losses = run(tmp_path, "--train-samples", "160", "--num-workers", "1")
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="needs scikit-image")
def test_it_trains_on_photographs(tmp_path: Path) -> None:
    losses = run(tmp_path, "--pictures", "real")  # as documented, without a length
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 2


@pytest.mark.skipif(importlib.util.find_spec("skimage") is not None, reason="scikit-image is there")
def test_without_photographs(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--pictures real needs scikit-image"):
        script["real_pictures"](tmp_path)
