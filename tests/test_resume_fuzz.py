"""The fuzzer of resuming: its cases occur, and it sees each way of restoring wrongly."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from odb_megatron.data.loop import Progress
from odb_megatron.testing import resume_fuzz
from odb_megatron.testing.resume_fuzz import Kill, ResumeTally, main, random_trial, run_trial
from odb_megatron.testing.worlds import World


def small_trials(count: int) -> Iterator[tuple[World, tuple[Kill, ...]]]:
    """Trials of runs that are planned in no time."""
    trials = (random_trial(random.Random(f"small {number}")) for number in itertools.count())
    small = (trial for trial in trials if len(trial[0].lengths) < 800)
    return itertools.islice(small, count)


def all_trials(count: int) -> ResumeTally:
    total = ResumeTally()
    for world, kills in small_trials(count):
        total.update(run_trial(world, kills))
    return total


def test_no_difference_and_every_case() -> None:
    found = all_trials(40)
    assert found["differences"] == 0
    assert all(found[name] for name in ResumeTally.CASES), found


def read_one_again(saved: dict[str, Any]) -> None:
    if saved["source"]:
        saved["source"]["next"] -= saved["source"]["next"] > 0


def skip_one(saved: dict[str, Any]) -> None:
    if saved["source"]:
        saved["source"]["next"] += 1


def forget_the_iterator(saved: dict[str, Any]) -> None:
    saved["source"] = None


def consume_less(saved: dict[str, Any]) -> None:
    saved["consumed"] -= saved["consumed"] > 0


@pytest.mark.parametrize("change", [read_one_again, skip_one, forget_the_iterator, consume_less])
def test_a_wrong_restoration_is_seen(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    original = resume_fuzz._saved

    def saved(progress: Progress) -> str:
        values = json.loads(original(progress))
        change(values)
        return json.dumps(values)

    monkeypatch.setattr(resume_fuzz, "_saved", saved)
    with pytest.raises(AssertionError):
        all_trials(100)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--trials", "2", "--processes", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["trials"], found["differences"], found["failures"]) == (2, 0, [])
    assert '"same_replicas"' in capsys.readouterr().out
