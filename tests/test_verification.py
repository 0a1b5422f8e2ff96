"""Ties the planner to the model of verification/: same rules, same traces.

The pure part plans every small world and holds each step against the model's rules, written down
again here from plans alone. The other part moves traces between SPIN and the planner, both ways.
"""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import pytest

from odb_megatron.plan.alignment import common_count
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.records import PlanRecord, ReplicaFailedError, WindowRecord
from odb_megatron.plan.sample_list import failed_list
from odb_megatron.plan.step import StepPlan
from odb_megatron.plan.termination import LoaderClosedError
from odb_megatron.testing.worlds import World, observe_drawn, plan_step

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "verification" / "odb.pml"
BUDGET = 2

AnyRecord = TypeVar("AnyRecord", WindowRecord, PlanRecord)

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None, reason="spin is not installed (Debian package spin)"
)


def world(
    lengths: Sequence[int], *, policy: PolicyName, replicas: int, batch: int, **changes: int
) -> World:
    least = -(-batch // replicas)
    base = PlanConfig(
        policy=policy,
        total=len(lengths),
        global_batch_size=batch,
        num_replicas=replicas,
        token_budget=BUDGET,
        window=least,
    )
    return World(config=replace(base, **changes), lengths=lengths)


@dataclass
class Rules:
    """The model's rules, as a check of one run from its plans."""

    world: World
    emitted: list[int] = field(default_factory=list)
    consumed: int = 0
    num_steps: int = 0
    deadline: int = -1
    seen: Counter[str] = field(default_factory=Counter)

    def step(self, plans: Sequence[StepPlan], *, deadline: int) -> None:
        """Hold one step, and the deadline that was in force in it, against the rules."""
        config, lengths = self.world.config, self.world.lengths
        totals = plans[0].totals
        assert all(plan.totals == totals for plan in plans), "replicas disagree"
        assert self.consumed < config.total, "planned past the final step"
        assert totals.step == self.num_steps
        assert totals.consumed_before == self.consumed
        count = totals.num_micro_batches
        least = 1
        for plan in plans:
            assert len(plan.micro_batches) == count, "unequal M"
            own = [p for m in plan.micro_batches for p in m]
            tokens = [sum(lengths[p] for p in m) for m in plan.micro_batches]
            assert max(tokens, default=0) <= config.token_budget
            least = max(least, -(-sum(tokens) // config.token_budget))
            idle = sum(not m for m in plan.micro_batches)
            assert idle == max(0, count - len(own)), "idle although it could split"
            self.seen["idle"] += idle
            self.seen["nothing on one replica"] += not own
            self.emitted += own
        assert count >= least
        assert count % config.count_multiple == 0
        assert totals.num_consumed > 0, "no progress"
        self.consumed += totals.num_consumed
        self._check_deadline(deadline, before=totals.consumed_before)
        self.num_steps += 1
        assert totals.is_final == (self.consumed == config.total)

    def _check_deadline(self, deadline: int, *, before: int) -> None:
        """It is set once, to what steps the rest may take, and kept."""
        if self.deadline < 0 <= deadline:
            config = self.world.config
            rest, batch = config.total - before, config.global_batch_size
            exact = config.policy is PolicyName.SAMPLES
            steps = -(-rest // batch) if exact else -(-(4 * rest - batch) // (4 * batch))
            assert deadline == self.num_steps + max(1, steps) - 1
            self.deadline = deadline
        assert deadline == self.deadline
        if self.deadline >= 0:
            assert self.num_steps <= self.deadline, "past the bound"
            self.seen["drained before the final step"] += self.num_steps < self.deadline

    def end(self) -> None:
        """Coverage, and the step count of the policy `samples`."""
        config, lengths = self.world.config, self.world.lengths
        assert sorted(self.emitted) == [p for p, length in enumerate(lengths) if length]
        assert self.consumed == config.total
        if config.policy is PolicyName.SAMPLES:
            assert self.num_steps == -(-config.total // config.global_batch_size)


def check(world: World) -> tuple[Rules, list[list[StepPlan]]]:
    """Plan a world; every step and the end must keep the rules."""
    rules = Rules(world)
    planners = world.planners()
    steps: list[list[StepPlan]] = []
    while not planners[0].is_finished:
        assert len(steps) <= len(world.lengths), "does not end"
        steps.append(plan_step(planners, world.lengths))
        deadlines = [planner.state_dict()["deadline"] for planner in planners]
        assert len(set(deadlines)) == 1
        rules.step(steps[-1], deadline=int(str(deadlines[0])))
    assert all(planner.is_finished for planner in planners)
    rules.end()
    return rules, steps


def shards(sizes: Sequence[int], *, length: Callable[[int], int], epochs: int) -> list[int]:
    """Lengths by stream position: replica r owns the positions p with p % replicas == r.

    Shards differ in size because the rest of a shorter one emits nothing.
    """
    replicas = len(sizes)
    rows = [
        length(row * replicas + replica) if row < size else 0
        for row in range(max(sizes))
        for replica, size in enumerate(sizes)
    ]
    return rows * epochs


def small_worlds(
    replicas: int, policy: PolicyName, *, batches: Sequence[int] = (1, 2, 3)
) -> Iterator[World]:
    for sizes in itertools.product(range(4), repeat=replicas):
        for batch, epochs in itertools.product(batches, (1, 2)):
            for length in (lambda p: 1, lambda p: 1 + p % 2):
                for slack in (0, 1) if policy is PolicyName.COST else (0,):
                    yield world(
                        shards(sizes, length=length, epochs=epochs),
                        policy=policy,
                        replicas=replicas,
                        batch=batch,
                        window=-(-batch // replicas) + slack,
                        count_multiple=1 + (sum(sizes) + batch) % 2,
                    )


class TestSmallWorlds:
    @pytest.mark.parametrize("policy", PolicyName)
    @pytest.mark.parametrize("replicas", [2, 3])
    def test_every_world_keeps_the_rules(self, replicas: int, policy: PolicyName) -> None:
        seen: Counter[str] = Counter()
        for case in small_worlds(replicas, policy):
            rules, steps = check(case)
            seen += rules.seen
            if policy is PolicyName.SAMPLES:
                check_strict_order(case, steps)
        assert seen["idle"] > 0
        assert seen["nothing on one replica"] > 0
        assert seen["drained before the final step"] > 0 or policy is PolicyName.SAMPLES

    @pytest.mark.parametrize("policy", PolicyName)
    @pytest.mark.parametrize("replicas", [2, 3])
    def test_so_does_every_world_with_a_third_exchange(
        self, replicas: int, policy: PolicyName
    ) -> None:
        """Under `samples` each step takes the same samples as without one."""
        moved = 0
        cases = small_worlds(replicas, policy, batches=(replicas, replicas + 2))
        for case in itertools.islice(cases, 0, None, 3):
            _, steps = check(exchanging(case))
            moved += sum(plans[0].totals.num_moved for plans in steps)
            if policy is PolicyName.SAMPLES:
                _, alone = check(case)
                assert len(alone) == len(steps)
                for one, other in zip(alone, steps, strict=True):
                    assert sorted(emitted_by(one)) == sorted(emitted_by(other))
                    assert other[0].totals.num_micro_batches <= one[0].totals.num_micro_batches
        assert moved > 0

    @pytest.mark.parametrize("policy", PolicyName)
    def test_nothing_to_do(self, policy: PolicyName) -> None:
        rules, _ = check(world([], policy=policy, replicas=3, batch=2))
        assert rules.num_steps == 0

    def test_the_rules_notice(self) -> None:
        """A reference that accepts anything would tie nothing."""
        case = world([1] * 6, policy=PolicyName.SAMPLES, replicas=2, batch=4)
        _, steps = check(case)
        broken: list[tuple[str, list[StepPlan]]] = [
            ("unequal M", [steps[0][0], replace(steps[0][1], micro_batches=())]),
            ("disagree", [steps[0][0], steps[1][1]]),
        ]
        for message, plans in broken:
            with pytest.raises(AssertionError, match=message):
                Rules(case).step(plans, deadline=-1)
        twice = Rules(case)
        twice.emitted = [0, 0, 1, 2, 3, 4]
        with pytest.raises(AssertionError):
            twice.end()


def exchanging(case: World) -> World:
    """The same world where replicas hand samples to each other in every step."""
    return replace(case, config=replace(case.config, exchange=ExchangeMode.TOKENS))


def emitted_by(plans: Sequence[StepPlan]) -> list[int]:
    return [p for plan in plans for m in plan.micro_batches for p in m]


def check_strict_order(case: World, steps: Sequence[Sequence[StepPlan]]) -> None:
    """The policy `samples`: the model's BATCH draw, position by position."""
    batch, replicas = case.config.global_batch_size, case.config.num_replicas
    for index, plans in enumerate(steps):
        taken = range(index * batch, min((index + 1) * batch, case.config.total))
        for replica, plan in enumerate(plans):
            own = sorted(p for m in plan.micro_batches for p in m)
            assert own == [p for p in taken if p % replicas == replica and case.lengths[p]]


class TestEnds:
    """A stop and an error, as the model has them: everybody leaves in the same exchange."""

    @pytest.mark.parametrize("exchange", ["window", "plan"])
    @pytest.mark.parametrize("policy", PolicyName)
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    @pytest.mark.parametrize(("flag", "error"), [("closing", LoaderClosedError), ("failed", None)])
    def test_all_leave_and_nothing_is_lost(
        self,
        exchange: str,
        policy: PolicyName,
        num_steps: int,
        flag: str,
        error: type[Exception] | None,
    ) -> None:
        case = world([1] * 12, policy=policy, replicas=3, batch=3, window=2)
        planners = case.planners()
        emitted: list[int] = []
        for _ in range(num_steps):
            for plan in plan_step(planners, case.lengths):
                emitted += [p for m in plan.micro_batches for p in m]
        for planner in planners:
            observe_drawn(planner, case.lengths)
        windows = [planner.window_record() for planner in planners]
        error = error or ReplicaFailedError
        if exchange == "window":
            windows[1] = replace(windows[1], **{flag: True})
            for planner in planners:
                with pytest.raises(error):
                    planner.set_target(wire(windows))
        else:
            for planner in planners:
                planner.set_target(wire(windows))
                observe_drawn(planner, case.lengths)
            plans = [planner.plan_record() for planner in planners]
            plans[1] = replace(plans[1], **{flag: True})
            for planner in planners:
                with pytest.raises(error):
                    planner.commit(wire(plans))
        states = [planner.state_dict() for planner in planners]
        assert {state["step"] for state in states} == {num_steps}
        assert {state["consumed"] for state in states} == {len(emitted)}
        if policy is PolicyName.COST:
            check_kept(states, emitted, total=case.config.total)

    @pytest.mark.parametrize("policy", PolicyName)
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_a_failed_list_ends_all_and_drops_the_step(
        self, num_steps: int, policy: PolicyName
    ) -> None:
        """The model's FAULT=ERROR in the third exchange."""
        case = exchanging(world([1] * 12, policy=policy, replicas=3, batch=3, window=2))
        planners = case.planners()
        for _ in range(num_steps):
            plan_step(planners, case.lengths)
        for planner in planners:
            observe_drawn(planner, case.lengths)
        windows = [planner.window_record() for planner in planners]
        for planner in planners:
            planner.set_target(wire(windows))
            observe_drawn(planner, case.lengths)
        plans = wire([planner.plan_record() for planner in planners])
        states = [planner.state_dict() for planner in planners]
        assert all(planner.wants_exchange(plans) for planner in planners)
        lists = [planner.sample_list(plans) for planner in planners]
        lists[1] = failed_list(room=max(plan.num_samples for plan in plans))
        assert len({len(own) for own in lists}) == 1
        for planner, state in zip(planners, states, strict=True):
            with pytest.raises(ReplicaFailedError, match="replica 1"):
                planner.commit(plans, lists)
            assert planner.state_dict() == state


def check_kept(states: Sequence[dict[str, object]], emitted: list[int], *, total: int) -> None:
    """What was not emitted is in a window, assigned, or not assigned yet: once."""
    kept = list(emitted)
    for state in states:
        numbers = json.loads(json.dumps(state))
        kept += [row[0] for row in numbers["window"]] + numbers["upcoming"]
    cursors = {json.dumps(state["cursor"]) for state in states}
    assert len(cursors) == 1
    kept += range(int(cursors.pop()), total)
    assert sorted(kept) == list(range(total))


def wire(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Records as they arrive."""
    return [type(record).from_bytes(record.to_bytes()) for record in records]


@dataclass(frozen=True)
class Trace:
    """A random run of the model: its world, and samples and M by step and replica."""

    numbers: dict[str, int]
    samples: dict[tuple[int, int], list[int]]
    counts: dict[tuple[int, int], int]


def simulate(model: Path, macros: Sequence[str] = (), *, seed: int = 1) -> str:
    """Run the model once at random; it must get to its end without a violation."""
    command = ["spin", "-T", f"-n{seed}", *(f"-D{macro}" for macro in macros), str(model)]
    with tempfile.TemporaryDirectory() as folder:  # spin leaves its preprocessed input behind
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )
    assert "error" not in done.stdout.lower() + done.stderr.lower(), done.stdout + done.stderr
    assert "timeout" not in done.stdout, done.stdout
    return done.stdout


def read_trace(text: str) -> Trace:
    head = re.search(r"^world (.*)$", text, re.MULTILINE)
    assert head is not None, text
    words = head.group(1).split()
    numbers = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    samples, counts = {}, {}
    for match in re.finditer(r"^replica (\d+) step (\d+) samples (\d+) M (\d+)$", text, re.M):
        replica, step, mask, count = map(int, match.groups())
        samples[step, replica] = [p for p in range(16) if mask >> p & 1]
        counts[step, replica] = count
    return Trace(numbers, samples, counts)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--json", "none/out.json"], "--json none/out.json: name a file in a folder that exists"),
        (["--json", "."], "--json .: name a file in a folder that exists"),
    ],
)
def test_wrong_flags_of_the_checks(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_runner()["main"](flags)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@needs_spin
class TestTraces:
    @pytest.mark.parametrize("replicas", [2, 3])
    def test_the_planner_replays_the_model(self, replicas: int) -> None:
        """Policy `samples`: the model's run is the planner's, sample by sample."""
        seen: set[tuple[int, ...]] = set()
        for seed in range(12):
            total, fit, multiple = 4 + seed % 6, 1 + seed % 2, 1 + seed // 6
            macros = [f"N={replicas}", "DRAW=BATCH", f"LEAST={total}", f"TOTAL={total}"]
            text = simulate(MODEL, [*macros, f"FIT={fit}", f"MULTIPLE={multiple}"], seed=seed)
            trace = read_trace(text)
            case = world(
                [1] * total,
                policy=PolicyName.SAMPLES,
                replicas=replicas,
                batch=trace.numbers["batch"],
                token_budget=fit,
                count_multiple=multiple,
            )
            steps = case.run()
            assert len(trace.samples) == len(steps) * replicas
            for step, plans in enumerate(steps):
                for replica, plan in enumerate(plans):
                    own = sorted(p for m in plan.micro_batches for p in m)
                    assert own == trace.samples[step, replica]
                    assert plan.totals.num_micro_batches == trace.counts[step, replica]
            seen.add(tuple(trace.counts.values()))
        assert len(seen) > 3

    def test_the_count_is_the_models(self) -> None:
        """Free selections: M from the model's needs is `common_count`."""
        most = 0
        for seed in range(12):
            macros = ["N=3", "MOST=4", "WINDOW=4", f"MULTIPLE={1 + seed % 2}", "RULE=SOME"]
            trace = read_trace(simulate(MODEL, macros, seed=seed))
            for step in {step for step, _ in trace.counts}:
                needs = [len(trace.samples[step, replica]) for replica in range(3)]
                count = common_count(needs, multiple=1 + seed % 2)
                assert {trace.counts[step, replica] for replica in range(3)} == {count}
                most = max(most, count)
        assert most > 1

    @pytest.mark.parametrize("replicas", [2, 3])
    def test_the_model_accepts_the_planner(self, replicas: int, tmp_path: Path) -> None:
        """Policy `cost`: the model runs the planner's selections without a violation."""
        for batch, total in itertools.product((1, 2, 3, 5), (3, 7, 12)):
            case = world(
                [1] * total,
                policy=PolicyName.COST,
                replicas=replicas,
                batch=batch,
                token_budget=1,
                window=-(-batch // replicas) + 1,
            )
            _, steps = check(case)
            path = tmp_path / f"replay-{batch}-{total}.pml"
            path.write_text(replay(steps, replicas=replicas), encoding="utf-8")
            trace = read_trace(simulate(path, seed=batch))
            assert trace.numbers["total"] == total
            assert len(trace.counts) == len(steps) * replicas
            for step, plans in enumerate(steps):
                for replica in range(replicas):
                    assert trace.counts[step, replica] == plans[0].totals.num_micro_batches

    @pytest.mark.parametrize("replicas", [2, 3])
    def test_the_model_accepts_a_third_exchange(self, replicas: int, tmp_path: Path) -> None:
        """Steps that replicas even out: the model finds the planner's M."""
        fewer = 0
        for rows, sizes in itertools.product((1, 2, 3), ([3, 0, 1], [1, 3, 2], [2, 2, 2])):
            alone = world(
                shards(sizes[:replicas], length=lambda p: 1, epochs=1),
                policy=PolicyName.SAMPLES,
                replicas=replicas,
                batch=rows * replicas,  # so that each step emits
                token_budget=1,
            )
            _, steps = check(exchanging(alone))
            third = [bool(plans[0].totals.costs_before) for plans in steps]
            text = replay(alone.run(), replicas=replicas, third=third)
            path = tmp_path / f"third-{rows}-{sizes[0]}.pml"
            path.write_text(text, encoding="utf-8")
            trace = read_trace(simulate(path, seed=rows))
            assert len(trace.counts) == len(steps) * replicas
            for step, plans in enumerate(steps):
                count = plans[0].totals.num_micro_batches
                assert {trace.counts[step, replica] for replica in range(replicas)} == {count}
                fewer += count < max(len(trace.samples[step, r]) for r in range(replicas))
        assert fewer > 0

    def test_the_model_refuses_a_sample_twice(self, tmp_path: Path) -> None:
        case = world([1] * 4, policy=PolicyName.SAMPLES, replicas=2, batch=2, token_budget=1)
        text = replay(case.run(), replicas=2).replace("replayed[2] = 2;", "replayed[2] = 1;")
        path = tmp_path / "twice.pml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError, match="assertion violated"):
            simulate(path)


def replay(
    steps: Sequence[Sequence[StepPlan]], *, replicas: int, third: Sequence[bool] = ()
) -> str:
    """A model of one world: shards are what each replica emitted, with its selections.

    Where `third` says so, a step has a third exchange; `steps` are then those without.
    """
    own = [
        sorted(p for plans in steps for m in plans[replica].micro_batches for p in m)
        for replica in range(replicas)
    ]
    firsts = [sum(map(len, own[:replica])) for replica in range(replicas)]
    lines = [f"shard[{replica}] = {len(own[replica])};" for replica in range(replicas)]
    for step, plans in enumerate(steps):
        for replica, plan in enumerate(plans):
            slots = [own[replica].index(p) for m in plan.micro_batches for p in m]
            mask = sum(1 << (firsts[replica] + slot) for slot in slots)
            lines.append(f"replayed[{step * replicas + replica}] = {mask};")
    lines += [f"replayed_third[{step}] = {1 + has};" for step, has in enumerate(third)]
    body = "\n    ".join(["window = 12;", *lines, "skip"])
    return (
        f"#define N {replicas}\n#define REPLAY\n#define RULE SOME\n"
        + (f"#define THIRD\nbyte replayed_third[{len(steps)}];\n" if third else "")
        + f"byte shard[{replicas}];\nshort replayed[{len(steps) * replicas}];\n"
        f'inline given_world() {{\n    {body}\n}}\n#include "{MODEL}"\n'
    )


class TestRunner:
    @needs_spin
    @pytest.mark.parametrize(("name", "expected"), [("fixed", 0), ("COUNT_MIN", 0), ("wrong", 1)])
    def test_verdicts(self, name: str, expected: int) -> None:
        runner = load_runner()
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        spin, compiler = runner["find_tools"]()
        wanted = {"fixed": "", "COUNT_MIN": "common>=p_need", "wrong": "no such violation"}[name]
        macros = ("N=2",) if name == "fixed" else ("N=2", "MUTATE_COUNT_MIN")
        check = runner["Check"](name=name, macros=macros, expected=wanted)
        outcome = runner["run"](check, spin=spin, compiler=compiler)
        assert outcome.passed == (expected == 0)

    def test_says_how_to_install_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = load_runner()
        monkeypatch.setenv("PATH", "")
        with pytest.raises(runner["CheckError"], match="apt-get install -y spin gcc"):
            runner["find_tools"]()

    def test_every_mutation_and_case_is_checked(self) -> None:
        """A flag in the model that no negative check sets proves nothing."""
        text = "".join(p.read_text(encoding="utf-8") for p in MODEL.parent.glob("*.pml"))
        flags = set(re.findall(r"\bMUTATE_[A-Z_]+[A-Z]\b", text))
        flags |= {f"OCCURS={case}" for case in re.findall(r"NEVER\(([A-Z_]+),", text)}
        checked = {m for c in load_runner()["all_checks"]() if c.expected for m in c.macros}
        assert len(flags) > 20
        assert flags <= checked


@lru_cache(maxsize=1)
def load_runner() -> dict[str, object]:
    name = "verification_run"
    module = type(sys)(name)
    sys.modules[name] = module  # dataclasses look their module up
    module.__dict__.update(runpy.run_path(str(MODEL.parent / "run.py"), run_name=name))
    return module.__dict__
