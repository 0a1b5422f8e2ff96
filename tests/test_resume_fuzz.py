"""The fuzzer of resuming: its cases occur, and it sees each way of restoring wrongly."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from odb_megatron.plan import elastic
from odb_megatron.plan.cost_policy import CostPolicy
from odb_megatron.plan.holding import Holding
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.termination import Termination
from odb_megatron.testing import resume_fuzz
from odb_megatron.testing.resume_fuzz import ResumeTally, Trial, main, random_trial, run_trial

Patch = Callable[[pytest.MonkeyPatch], None]


def small_trials(number: int) -> Iterator[Trial]:
    """Trials of runs that are planned in no time."""
    trials = (random_trial(random.Random(f"small {number}")) for number in itertools.count())
    small = (trial for trial in trials if 20 < len(trial.world.lengths) < 250)
    return itertools.islice(small, number)


def test_no_difference_and_every_case() -> None:
    total = ResumeTally()
    for trial in small_trials(60):
        total.add(run_trial(trial))
    cases = asdict(total)
    assert cases.pop("differences") == 0
    assert all(cases.values()), cases


def restoring(change: Callable[[dict[str, Any]], None]) -> Patch:
    """Restore the window and what is in flight from a state that is changed."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Holding.restore

        def restore(self: Holding, state: dict[str, Any], **rest: Any) -> None:
            state = json.loads(json.dumps(state))
            change(state)
            original(self, state, **rest)

        monkeypatch.setattr(Holding, "restore", restore)

    return patch


def drop_in_flight(state: dict[str, Any]) -> None:
    del state["upcoming"][-1:]


def drop_held(state: dict[str, Any]) -> None:
    del state["window"][-1:]


def draw_again(state: dict[str, Any]) -> None:
    state["cursor"] -= state["cursor"] > 0


def forget_due(state: dict[str, Any]) -> None:
    state["window"] = [[position, arrival, -1] for position, arrival, _ in state["window"]]


def observe_again(state: dict[str, Any]) -> None:
    state["num_recorded"] = 0


def forget_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostPolicy, "restore", lambda self, knowledge: None)


def forget_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Termination.restore
    monkeypatch.setattr(
        Termination, "restore", lambda self, _, consumed: original(self, -1, consumed=consumed)
    )


def forget_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReplicaPlanner.load_state_dict

    def load(self: ReplicaPlanner, state: dict[str, Any], **rest: Any) -> None:
        cost = self.config.cost
        kept = [cost.quadratic, cost.fixed, cost.per_patch, -1]
        original(self, {**state, "cost": kept}, **rest)

    monkeypatch.setattr(ReplicaPlanner, "load_state_dict", load)


def lose_a_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    original = elastic.leftovers
    kept: list[int] = []  # the check that states belong together sees all of them

    def leftovers(states: Any) -> list[int]:
        kept.append(1)
        return original(states)[: None if len(kept) % 2 else -1]

    monkeypatch.setattr(elastic, "leftovers", leftovers)


@pytest.mark.parametrize(
    "patch",
    [
        restoring(drop_in_flight),
        restoring(drop_held),
        restoring(draw_again),
        restoring(forget_due),
        restoring(observe_again),
        forget_knowledge,
        forget_deadline,
        forget_cost,
        lose_a_leftover,
    ],
    ids=lambda patch: getattr(patch, "__qualname__", ""),
)
def test_a_wrong_restoration_is_seen(monkeypatch: pytest.MonkeyPatch, patch: Patch) -> None:
    patch(monkeypatch)
    for trial in small_trials(100):
        try:
            run_trial(trial)
        except Exception:
            return
    pytest.fail("not seen in 100 trials")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--trials", "3", "--processes", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["trials"], found["differences"], found["failures"]) == (3, 0, [])
    assert '"same_topology"' in capsys.readouterr().out


def test_a_difference_is_named_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(numbers: range, **_: Any) -> Any:
        failed = [{"trial": numbers[0], "what": "AssertionError: lost: [7]"}]
        return ResumeTally(differences=1), failed

    monkeypatch.setattr(resume_fuzz, "_run_all", run_all)
    assert main(["--trials", "1", "--first", "12", "--seed", "5"]) == 1
    error = capsys.readouterr().err
    assert "trial 12 (--seed 5 --first 12 --trials 1): AssertionError: lost: [7]" in error


def test_cases_that_never_occur_fail_a_long_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume_fuzz, "_run_all", lambda *_, **__: (ResumeTally(elastic=1), []))
    assert main(["--trials", "100"]) == 1
    assert "never occurred in 100 trials: same_topology, reshaped" in capsys.readouterr().err
    assert main(["--trials", "99"]) == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--trials", "0"], "--trials and --processes must be at least 1"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json: there is no folder"),
    ],
)
def test_refusals(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert text in capsys.readouterr().err
