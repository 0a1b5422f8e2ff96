"""What `make train` adds to the user's flags, and its default data."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "train_chat.py"))


@pytest.mark.parametrize(
    ("flags", "num_records", "expected"),
    [
        ([], 5000, "--train-samples 2048 --split 98,1,1 --eval-iters 2"),
        (["--odb-epochs", "2"], 5000, "--split 98,1,1 --eval-iters 2"),
        (["--train-samples=64"], 5000, "--split 98,1,1 --eval-iters 2"),
        (["--train-iters", "3", "--eval-iters", "1"], 5000, "--split 98,1,1"),
        (["--split", "90,5,5"], 5, "--train-samples 2048 --eval-iters 2"),
        ([], 5, "--train-samples 2048 --split 100,0,0 --eval-iters 0"),
    ],
)
def test_the_users_flags_win(
    script: dict[str, Any], flags: list[str], num_records: int, expected: str
) -> None:
    assert " ".join(script["default_flags"](flags, num_records=num_records)) == expected


def test_the_default_data_is_whole(script: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("chitchat_dataset")
    path = script["chitchat"](tmp_path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    roles = [{message["role"] for message in record["messages"]} for record in records]
    assert (len(records), sum(present == {"assistant"} for present in roles)) == (7168, 3150)
    assert all("assistant" in present for present in roles)
    assert script["chitchat"](tmp_path) == path  # made once
