"""The step loop of all replicas in one thread: what must hold of every run, case by case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from odb_megatron.data.iterable import SourceError
from odb_megatron.data.loop import Progress, StepLoop
from odb_megatron.data.sample import Skipped, SkipReason, TooManyBadRecordsError
from odb_megatron.data.wire import StepHeader
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.plan.record import (
    OPEN_TOTAL,
    LoaderClosedError,
    PlanConfig,
    ReplicaFailedError,
    Sync,
)
from odb_megatron.testing.fuzz import run_world
from odb_megatron.testing.replicas import Lockstep
from odb_megatron.testing.worlds import (
    FAULTS,
    Fault,
    InjectedError,
    SyntheticReader,
    World,
    check_run,
    decoded,
)

START = Progress(consumed=0)


def world(
    lengths: Sequence[int], *, shards: tuple[int, ...] = (), starts_again: bool = False, **more: Any
) -> World:
    """A run over samples of these lengths; item k of replica r has the length `k * replicas + r`.

    Lengths of items beyond the list are 1.
    """
    values: dict[str, Any] = {
        "total": OPEN_TOTAL if shards else len(lengths),
        "global_batch_size": 4,
        "num_replicas": len(shards) or 2,
        "token_budget": 64,
        "has_iterators": bool(shards),
    }
    config = PlanConfig(**values | more)
    items = dict.fromkeys(range((max(shards, default=0) + 99) * config.num_replicas), 1)
    return World(
        config=config,
        lengths=items | dict(enumerate(lengths)),
        shards=shards,
        starts_again=starts_again,
    )


def run(made: World) -> list[list[StepHeader]]:
    """Run to the end, hold every invariant, and return what each step says, by replica."""
    steps = made.run()
    tally = check_run(made, steps, is_whole=True)
    assert not tally.num_violations, tally
    return [[decoded(one) for one in step] for step in steps]


def ended(loops: Sequence[StepLoop], made: World, *, rng: random.Random | None = None) -> Lockstep:
    """Run loops to their ends."""
    lockstep = Lockstep(loops, made.config, rng=rng)
    lockstep.run()
    return lockstep


def random_lengths(count: int, *, longest: int = 64, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, longest) for _ in range(count)]


class TestSteps:
    """Rows of small cases, most of them reports against other systems."""

    @pytest.mark.parametrize(
        ("lengths", "more", "expected"),
        [
            # Uneven counts: a replica with one sample beside one with three.
            ([8, 8, 8, 8], {"token_budget": 8}, [[[8], [8]], [[8], [8]]]),
            ([8, 8, 8], {"token_budget": 8}, [[[8], [8]], [[8], []]]),
            # No micro-batch is empty where all samples fit one, or one of them fills its own.
            ([2, 2, 2, 2], {"token_budget": 10}, [[[2, 2]], [[2, 2]]]),
            ([12, 1, 1, 1], {"token_budget": 12}, [[[12]], [[1, 1, 1]]]),
            # The tail of an epoch: fewer samples than replicas.
            ([5], {}, [[[5]], [[]]]),
            ([9, 9], {"num_replicas": 4}, [[[9]], [[9]], [[]], [[]]]),
            # Past the cap after padding: 15 of 16 with a multiple of 4; 5 and 5 fill it exactly.
            (
                [5, 5, 15, 16],
                {"num_replicas": 1, "multiple": 4, "token_budget": 16},
                [[[5, 5], [15], [16]]],
            ),
            # Overlong, and let through: alone in a micro-batch, over the budget.
            ([121, 3, 3, 3], {"token_budget": 60}, [[[121]], [[3, 3, 3]]]),
            # Nothing to learn: all samples are skipped, all replicas idle.
            ([0, 0, 0, 0], {}, [[[]], [[]]]),
            ([7, 0, 0, 0], {"count_multiple": 2}, [[[7], []], [[], []]]),
        ],
    )
    def test_one_step(
        self, lengths: list[int], more: dict[str, Any], expected: list[list[list[int]]]
    ) -> None:
        (step,) = run(world(lengths, **more))
        found = [[sorted(row) for row in one.lengths] for one in step]
        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
        assert step[0].totals.num_idle == sum(not row for one in expected for row in one)

    @pytest.mark.parametrize(
        ("size", "sizes"), [(0, []), (5, [4, 1]), (8, [4, 4]), (13, [4, 4, 4, 1])]
    )
    def test_a_step_is_the_next_global_batch(self, size: int, sizes: list[int]) -> None:
        steps = run(world(random_lengths(size), num_replicas=4))
        assert [step[0].totals.num_consumed for step in steps] == sizes
        assert [step[0].totals.consumed_before for step in steps] == [
            4 * at for at in range(len(sizes))
        ]

    def test_totals_are_those_of_the_samples(self) -> None:
        lengths = [30, 3, 0, 20, 10]
        first, last = run(world(lengths, multiple=4))
        totals = first[0].totals
        assert (totals.num_samples, totals.num_left_out) == (3, 1)
        assert (totals.num_tokens, totals.num_padded_tokens) == (53, 32 + 4 + 20)
        assert totals.num_squared_tokens == 30**2 + 3**2 + 20**2
        assert totals.num_loss_tokens == 15 + 1 + 10
        assert 0 < totals.balance <= 1
        assert (totals.is_final, last[0].totals.is_final) == (False, True)

    def test_patches_are_capped(self) -> None:
        """But of a single sample that has more, which is alone."""
        made = world([5] * 12, max_patches=8, num_replicas=1, global_batch_size=12)
        patches = dict(enumerate([4, 4, 4, 4, 9, 0, 0, 8, 1, 7, 0, 0]))
        (step,) = run(replace(made, patches=patches))
        held = [sorted(patches[at] for at in row) for row in step[0].positions]
        assert [9] in held
        assert all(sum(row) <= 8 for row in held if row != [9])
        assert step[0].totals.num_patches == sum(patches.values())

    def test_costly_samples_are_evened_out_and_arrive_whole(self) -> None:
        """All long samples are read by one replica; `check_run` looks at every token."""
        lengths = [64 if at % 2 else 1 for at in range(32)]
        cost = CostModel.from_ratios(quadratic=1 / 16, fixed_tokens=2)
        for sync in Sync:
            steps = run(world(lengths, global_batch_size=16, cost=cost, sync=sync))
            assert all(step[0].totals.num_moved and step[0].totals.bytes_moved for step in steps)
            assert all(step[0].totals.balance > 0.95 for step in steps)


class TestBlocks:
    @pytest.mark.parametrize("num", [4, 5, 8])
    @pytest.mark.parametrize("kind", ["positions", "iterators", "quota"])
    @pytest.mark.parametrize("ordered", [True, False])
    def test_blocks_of_two(self, num: int, kind: str, ordered: bool) -> None:
        shards = () if kind == "positions" else tuple(range(3, 3 + num))
        more = {"total": 60} if kind == "quota" else {}
        made = world(
            random_lengths(60 if not shards else 400, seed=num),
            shards=shards,
            starts_again=kind == "quota",
            num_replicas=num,
            global_batch_size=2 * num,
            block=2,
            **more,
        )
        rng = None if ordered else random.Random(7)
        tally = run_world(made, rng=rng)
        assert (tally.num_violations, tally["several_blocks"]) == (0, 1)

    @pytest.mark.parametrize("block", [4, 2])
    def test_all_replicas_of_a_block_have_one_order_for_the_pipeline(self, block: int) -> None:
        more: dict[str, Any] = {"sync": Sync.MICROBATCH, "count_multiple": 4, "block": block}
        made = world(random_lengths(144), num_replicas=4, global_batch_size=48, **more)
        pipeline = Pipeline(stages=4, chunks=2)
        ordered = replace(made, config=replace(made.config, pipeline=pipeline))
        has_changed = False
        for steps in zip(run(made), run(ordered), strict=True):
            for first in range(0, 4, block):
                before, after = (
                    list(zip(*(one.positions for one in step[first : first + block]), strict=True))
                    for step in steps
                )
                assert sorted(before) == sorted(after)
                has_changed |= before != after
        assert has_changed


class TestIterators:
    @pytest.mark.parametrize("shards", [(1, 9, 4, 20), (0, 0, 0, 7), (6, 6, 6, 6), (0, 3), (30,)])
    def test_steps_keep_their_size_until_the_last_ends(
        self, shards: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records: list[int] = []  # who has sent one
        record = StepLoop._record

        def counted(loop: StepLoop, *args: int) -> bytes:
            records.append(loop._replica)
            return record(loop, *args)

        monkeypatch.setattr(StepLoop, "_record", counted)
        made = world(random_lengths(200), shards=shards, global_batch_size=2 * len(shards))
        steps = made.run()
        assert not check_run(made, steps, is_whole=True).num_violations
        sizes = [decoded(step[0]).totals.num_consumed for step in steps]
        assert sum(sizes) == sum(shards)
        assert set(sizes[:-1]) <= {2 * len(shards)}
        assert len({records.count(replica) for replica in range(len(shards))}) == 1
        # One before the first step, one that finds the end, one more where an iterator ends early.
        assert records.count(0) <= len(steps) + 2 + len(shards)

    def test_nobody_has_any_data(self) -> None:
        assert run(world([], shards=(0, 0, 0))) == []

    def test_an_iterator_that_is_empty_trains_what_others_read(self) -> None:
        steps = run(world([9] * 99, shards=(12, 0)))
        assert len(steps) == 3
        assert all(sum(map(len, one.positions)) == 2 for step in steps for one in step)

    def test_a_quota(self) -> None:
        made = world([9] * 99, shards=(3, 5), starts_again=True, total=30)
        assert [step[0].totals.num_consumed for step in run(made)] == [4] * 7 + [2]


class _Heads(SyntheticReader):
    """A reader that finds what the others begin with to be wrong."""

    seen: tuple[int, ...] = ()

    def head(self) -> bytes:
        return bytes([self._next])

    def check_heads(self, heads: Sequence[bytes]) -> None:
        raise SourceError(f"heads {[one[0] for one in heads]}")


@pytest.mark.parametrize(
    ("shards", "batch", "expected"),
    [
        ((40, 40), 32, [16, 16]),  # in the first step
        ((40, 40), 2, [8, 8]),  # as soon as so many are read
        ((3, 2), 2, [3, 2]),  # at the end
        ((0, 0), 2, [0, 0]),
    ],
)
def test_iterators_are_compared_once_enough_is_read(
    shards: tuple[int, ...], batch: int, expected: list[int]
) -> None:
    made = world([1] * 99, shards=shards, global_batch_size=batch)
    loops = [StepLoop(_Heads(made, at, START), made.config, replica=at) for at in (0, 1)]
    assert [str(error) for error in ended(loops, made).errors] == [f"heads {expected}"] * 2


class TestErrors:
    @pytest.mark.parametrize("block", [64, 2])
    @pytest.mark.parametrize("where", [*FAULTS, "close"])
    @pytest.mark.parametrize("step", [0, 3])
    @pytest.mark.parametrize("replica", [0, 1, 3])
    def test_an_error_in_each_verb_ends_all(
        self, where: str, step: int, replica: int, block: int
    ) -> None:
        lengths = [64 if at % 4 == replica else 1 for at in range(96)]
        made = world(lengths, num_replicas=4, global_batch_size=16, block=block)
        fault = Fault(step=step, replica=replica, where=where)
        lockstep = ended(made.loops(fault=fault), made, rng=random.Random(step))
        errors = lockstep.errors
        own = errors.pop(replica)
        if where == "close":
            assert {type(one) for one in (own, *errors)} == {LoaderClosedError}
        else:
            assert isinstance(own, InjectedError)
            told = f"replica {replica} failed: InjectedError: {where} of step {step}"
            assert [str(one) for one in errors] == [told] * 3
        # The trainer of a replica that fails after the gather learns it before the others.
        failed = isinstance(lockstep.failures[replica], InjectedError)
        assert failed == (where not in ("read", "measure", "close"))
        steps = [len(one) for one in lockstep.steps]
        assert {*steps} <= {step, step + 1}
        assert steps[replica] == step

    def test_errors_are_all_named_and_cut(self) -> None:
        class Long(SyntheticReader):
            def read(self, count: int) -> Any:
                raise ValueError("é" * 100_000)

        made = world([3] * 12, num_replicas=3, global_batch_size=3)
        loops: list[StepLoop] = made.loops(fault=Fault(step=0, replica=0, where="read"))
        loops[2] = StepLoop(Long(made, 2, START), made.config, replica=2)
        text = str(ended(loops, made).errors[1])
        assert text.startswith(
            "replica 0 failed: InjectedError: read of step 0; replica 2 failed: ValueError: ééé"
        )
        assert len(text) < 5000

    @pytest.mark.parametrize("num", [3, 6])
    @pytest.mark.parametrize(
        "changes",
        [
            {"token_budget": 31},
            {"data": "another file"},
            {"global_batch_size": 12},
            {"total": OPEN_TOTAL, "has_iterators": True},
            {"cost": CostModel(quadratic=5)},
        ],
    )
    def test_configurations_that_differ_are_named_field_by_field(
        self, changes: dict[str, Any], num: int
    ) -> None:
        """Also those from which the size of the records follows."""
        made = world([3] * 24, num_replicas=num, global_batch_size=6, block=3)
        other = replace(made, config=replace(made.config, **changes))
        loops = [(other if at == 2 else made).loops()[at] for at in range(num)]
        lockstep = ended(loops, made)
        for error in lockstep.errors:
            assert isinstance(error, ReplicaFailedError)
            for name in changes:
                assert f"{name} is " in str(error)
            assert " on replica 2 and " in str(error)
            assert "replica 1" not in str(error)
        assert not any(lockstep.steps)

    def test_too_many_bad_records_end_all_in_one_step(self) -> None:
        class Bad(SyntheticReader):
            def read(self, count: int) -> list[tuple[int, Any]]:
                return [
                    (at, replace(one, reason=SkipReason.BAD_RECORD))
                    if isinstance(one, Skipped)
                    else (at, one)
                    for at, one in super().read(count)
                ]

        made = world([3] * 8 + [0, 3] * 20, max_bad_records=3)

        def bad(start: Progress) -> Lockstep:
            readers = [Bad(made, at, start) for at in (0, 1)]
            loops = [
                StepLoop(reader, made.config, replica=at, start=start)
                for at, reader in enumerate(readers)
            ]
            return ended(loops, made)

        lockstep = bad(START)
        assert all(isinstance(one, TooManyBadRecordsError) for one in lockstep.errors)
        assert [len(steps) for steps in lockstep.steps] == [3, 3]  # the fourth has one too many
        first, second = map(str, lockstep.errors)
        assert first == (
            "4 of the 16 samples consumed so far are bad records, and --odb-max-bad-records 3 are "
            "allowed. The first of this replica: sample 8 | sample 10 | sample 12. Mend the data, "
            "or raise it"
        )
        assert "The first of this replica: none; other replicas name theirs" in second
        # A resumed run goes on counting.
        assert [len(steps) for steps in bad(replace(START, num_bad=2)).steps] == [2, 2]


def test_where_a_loop_stands() -> None:
    """After each step: consumed samples, bad records, what was read of each source."""
    made = world([3, 0, 3, 3, 5, 5])
    lockstep = ended(made.loops(), made)
    assert [one.progress.consumed for one in lockstep.steps[0]] == [4, 6]
    counts = [steps[-1].progress.source_counts[0] for steps in lockstep.steps]
    assert sum(one.samples for one in counts) == 5
    assert sum(one.tokens for one in counts) == 19
    assert [one.overlong for one in counts] == [0, 1]
