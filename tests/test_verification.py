"""Ties the step loop to the model of verification/: same rules, same traces, same ends."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb_megatron.plan.record import OPEN_TOTAL, PlanConfig
from odb_megatron.plan.step_planner import plan_step
from odb_megatron.testing.fuzz import run_world
from odb_megatron.testing.replicas import Lockstep
from odb_megatron.testing.worlds import FAULTS, Fault, World, check_run, decoded

MODEL = Path(__file__).resolve().parents[1] / "verification" / "odb.pml"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None, reason="spin is not installed (Debian package spin)"
)


def world(
    shards: Sequence[int], *, batch: int, quota: int = OPEN_TOTAL, block: int = 64, by: str = ""
) -> World:
    """Return a run of samples of one token, one or two to a micro-batch."""
    by_position = by == "position"
    config = PlanConfig(
        total=sum(shards) if by_position else quota,
        global_batch_size=batch,
        num_replicas=len(shards),
        token_budget=1 + batch % 2,
        count_multiple=1 + sum(shards) % 2,
        has_iterators=not by_position,
        block=block,
    )
    lengths = dict.fromkeys(range(100), 1)
    return World(config=config, lengths=lengths, shards=() if by_position else tuple(shards))


def small_worlds() -> Iterator[World]:
    for replicas, batch in ((2, 1), (2, 3), (3, 2), (3, 5)):
        for shards in itertools.product(range(6 - replicas), repeat=replicas):
            for block, by in itertools.product((64, replicas - 1), ("position", "iterator")):
                yield world(shards, batch=batch, block=block, by=by)


class TestLoops:
    def test_every_small_world_keeps_the_rules(self) -> None:
        """Theorems 1, 3 and 4: `check_run` holds equal M, whole steps, each sample once."""
        for case in small_worlds():
            steps = case.run()
            assert check_run(case, steps, is_whole=True).num_violations == 0, case
            assert len(steps) == -(-len(case.expected()) // case.config.global_batch_size)

    @pytest.mark.parametrize("by", ["position", "iterator"])
    @pytest.mark.parametrize("block", [64, 2, 1])
    def test_an_error_anywhere_ends_all(self, block: int, by: str) -> None:
        """Theorems 7 and 8: the model's FAULT=ERROR and STOPS, at each step of each replica."""
        case = world((2, 3, 1), batch=3, block=block, by=by)
        ended = 0
        for step, replica in itertools.product(range(3), range(3)):
            for where in (*FAULTS, "close"):
                tally = run_world(case, Fault(step=step, replica=replica, where=where))
                ended += tally["failed"] + tally["closed_early"]
        assert ended > 20

    def test_a_plan_has_as_many_micro_batches_as_asked(self) -> None:
        """A4, without which blocks would not come to one M; and any M is within the model's."""
        for num, replicas, budget in itertools.product(range(1, 8), range(1, 4), range(1, 3)):
            ones = np.ones(num, dtype=np.int64)
            plan = plan_step(ones, num_replicas=replicas, token_budget=budget)
            assert -(-num // (replicas * budget)) <= plan.num_micro_batches <= num
            for least in range(num, num + 3):
                plan = plan_step(
                    ones, num_replicas=replicas, token_budget=budget, min_micro_batches=least
                )
                assert plan.num_micro_batches == least


def simulate(macros: str, *, seed: int, folder: Path) -> str:
    """Run the model once at random; it must get to its end without a violation."""
    command = ["spin", "-T", f"-n{seed}", *(f"-D{one}" for one in macros.split()), str(MODEL)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert "error" not in done.stdout.lower() + done.stderr.lower(), done.stdout + done.stderr
    assert "timeout" not in done.stdout, done.stdout
    return done.stdout


@needs_spin
class TestTraces:
    @pytest.mark.parametrize(
        "macros",
        [
            "N=2 TOTAL=7 BATCH=4",
            "N=3 BLOCKS=2 TOTAL=7 BATCH=4",
            "N=2 OPEN TOTAL=7 BATCH=5",
            "N=3 OPEN TOTAL=7 BATCH=5",
            "N=3 OPEN BLOCKS=2 TOTAL=7 BATCH=5",
            "N=2 OPEN QUOTA TOTAL=7 BATCH=4",
        ],
    )
    def test_the_loops_replay_the_model(self, macros: str, tmp_path: Path) -> None:
        """After each step all have consumed as much, and each has read as far, as in the model."""
        most = 0
        for seed in range(6):
            text = simulate(f"{macros} LEAST=6", seed=seed, folder=tmp_path)
            batch, quota = map(int, re.findall(r"world batch (\d+) quota (\d+)", text)[0])
            replicas = int(macros[2])
            shards = [int(size) for size in re.findall(r"iterator (\d+)", text)]
            case = world(
                shards or [quota, *[0] * (replicas - 1)],
                batch=batch,
                quota=quota if "QUOTA" in macros else OPEN_TOTAL,
                block=replicas - 1 if "BLOCKS=2" in macros else 64,
                by="iterator" if shards else "position",
            )
            found = {}
            for number, step in enumerate(case.run(), 1):
                for replica, packed in enumerate(step):
                    progress = packed.progress
                    consumed = decoded(packed).totals.consumed_before
                    consumed += decoded(packed).totals.num_consumed
                    found[replica, number] = consumed, (progress.source or {"next": 0})["next"]
            pattern = r"replica (\d+) step (\d+) consumed (\d+) next (\d+)"
            rows = [tuple(map(int, row)) for row in re.findall(pattern, text)]
            assert {row[:2]: row[2:] for row in rows} == found
            most = max(most, len(found))
        assert most > 2 * replicas

    def test_the_model_takes_every_order(self) -> None:
        """A replay that compared nothing would tie nothing: another share is another trace."""
        case = world((3, 1), batch=2)
        lockstep = Lockstep(case.loops(), case.config)
        lockstep.run()
        assert [step.progress.source for step in lockstep.steps[0]] == [{"next": 1}, {"next": 3}]


class TestRunner:
    @needs_spin
    @pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
    @pytest.mark.parametrize(
        ("macros", "expected", "passes"),
        [
            ("N=2 TOTAL=2", "", True),
            ("N=2 MUTATE=NO_SENDS", "invalid end state", True),
            ("N=2 MUTATE=NO_SENDS", "another violation", False),
            ("N=2 MUTATE=NO_SENDS", "", False),
        ],
    )
    def test_verdicts(self, macros: str, expected: str, passes: bool) -> None:
        runner = load_runner()
        spin, compiler = runner["find_tools"]()
        check = runner["Check"](name="one", macros=tuple(macros.split()), expected=expected)
        assert runner["run"](check, spin=spin, compiler=compiler).passed == passes

    def test_says_how_to_install_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = load_runner()
        monkeypatch.setenv("PATH", "")
        with pytest.raises(runner["CheckError"], match="apt-get install -y spin gcc"):
            runner["find_tools"]()

    def test_every_mutation_and_case_is_checked(self) -> None:
        """A flag in the model that no negative check sets proves nothing."""
        text = MODEL.read_text(encoding="utf-8")
        flags = {f"MUTATE={rule}" for rule in re.findall(r"BROKEN\(([A-Z_]+)\)", text)}
        flags |= {f"OCCURS={case}" for case in re.findall(r"NEVER\(([A-Z_]+),", text)}
        checked = {m for c in load_runner()["all_checks"]() if c.expected for m in c.macros}
        assert len(flags) > 40
        assert flags <= checked

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--jobs", "0"], "--jobs must be at least 1, got 0"),
            (["--json", "none/out.json"], "name a file in a folder that exists"),
            (["--json", "."], "name a file in a folder that exists"),
        ],
    )
    def test_wrong_flags(
        self, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            load_runner()["main"](flags)
        assert ended.value.code == 2
        assert text in capsys.readouterr().err


@lru_cache(maxsize=1)
def load_runner() -> dict[str, Any]:
    name = "verification_run"
    module = type(sys)(name)
    sys.modules[name] = module  # dataclasses look their module up
    module.__dict__.update(runpy.run_path(str(MODEL.parent / "run.py"), run_name=name))
    return module.__dict__
