"""The planner's invariants over many worlds, and each part by a table of small cases."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.alignment import common_count, fit_to_count, num_idle, num_split
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import COST_UNIT, CostModel, ModelShape
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.packing import pack, spread
from odb_megatron.plan.padding import (
    OverlongError,
    OverlongPolicy,
    Quantization,
    SizeRule,
    judge_length,
    length_multiple,
    padded_length,
    size_rule,
)
from odb_megatron.plan.planner import ReplicaPlanner
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.plan.records import (
    RECORD_BYTES,
    PlanRecord,
    ReplicaFailedError,
    WindowRecord,
    check_agreement,
)
from odb_megatron.testing.invariants import tally_run
from odb_megatron.testing.worlds import World, observe_drawn, plan_step

BUDGET = 64


def config(**changes: object) -> PlanConfig:
    values: dict[str, object] = {
        "policy": PolicyName.SAMPLES,
        "total": 20,
        "global_batch_size": 4,
        "num_replicas": 2,
        "token_budget": BUDGET,
        "window": 8,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    }
    return PlanConfig(**{**values, **changes})  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    policy = draw(st.sampled_from(PolicyName))
    replicas = draw(st.sampled_from([1, 2, 3, 6, 16]))
    batch = draw(st.integers(1, 24))
    total = draw(st.integers(0, 120))
    multiple = draw(st.sampled_from([1, 2, 4, 16]))
    window = draw(st.integers(-(-batch // replicas), 64))
    longest = draw(st.sampled_from([4, 20, BUDGET, BUDGET + 40]))
    skipped = draw(st.sampled_from([0.0, 0.1, 0.9]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    lengths = [0 if rng.random() < skipped else rng.randint(1, longest) for _ in range(total)]
    patches = [rng.randint(0, 12) for _ in range(total)] if draw(st.booleans()) else []
    return World(
        config=config(
            policy=policy,
            total=total,
            global_batch_size=batch,
            num_replicas=replicas,
            multiple=multiple,
            window=window,
            max_delay_steps=draw(st.integers(1, 4)),
            assignment=draw(st.sampled_from(Assignment)),
            draw_lead=draw(st.sampled_from([None, 0, 3])),
            count_multiple=draw(st.sampled_from([1, 1, 2, 4])),
            balance=draw(st.sampled_from(BalanceScope)),
            max_patches=10 if patches else 0,
            exchange=draw(st.sampled_from(ExchangeMode)),
        ),
        lengths=lengths,
        patches=patches,
    )


class TestInvariants:
    @settings(max_examples=400, deadline=None)
    @given(worlds())
    def test_every_world(self, world: World) -> None:
        steps = world.run(most_steps=len(world.lengths) + 1)
        tally = tally_run(world, steps)
        assert tally.num_violations == 0, tally
        assert sum(plans[0].totals.num_consumed for plans in steps) == len(world.lengths)

    def test_the_meant_cases_occur(self) -> None:
        """Idling, splitting, an uneven end and a window that reorders: else nothing was tested."""
        idle = split = reordered = 0
        for seed in range(30):
            rng = random.Random(seed)
            lengths = [rng.choice([2, 5, 60, BUDGET]) for _ in range(90)]
            world = World(
                config=config(policy=PolicyName.COST, total=90, global_batch_size=12, window=24),
                lengths=lengths,
            )
            steps = world.run()
            idle += sum(plans[0].totals.num_idle for plans in steps)
            split += sum(plans[0].totals.num_split for plans in steps)
            own = [p for plans in steps for m in plans[0].micro_batches for p in m]
            reordered += own != sorted(own)
        assert idle > 0
        assert split > 0
        assert reordered > 0

    @pytest.mark.parametrize("cv", [0.3, 1.0])
    def test_samples_per_step_follow_the_batch_size(self, cv: float) -> None:
        rng = random.Random(7)
        lengths = [max(1, min(BUDGET, round(rng.lognormvariate(2.5, cv)))) for _ in range(6400)]
        world = World(
            config=config(policy=PolicyName.COST, total=6400, global_batch_size=64, window=128),
            lengths=lengths,
        )
        steps = world.run()
        body = steps[:-1]
        mean = sum(plans[0].totals.num_consumed for plans in body) / len(body)
        assert abs(mean / 64 - 1) < 0.01
        balance = [plans[0].totals.balance for plans in body[:-3]]
        assert sum(balance) / len(balance) > 0.95

    def test_drain_spreads_the_rest(self) -> None:
        """One replica's shard is far heavier: it never carries more than its share per step."""
        lengths = [60 if p % 2 else 2 for p in range(400)]
        world = World(
            config=config(policy=PolicyName.COST, total=400, global_batch_size=40, window=80),
            lengths=lengths,
        )
        steps = world.run(most_steps=40)
        heavy = [sum(len(m) for m in plans[1].micro_batches) for plans in steps]
        assert max(heavy) <= 2.5 * (200 / len(steps))


class TestResume:
    @settings(max_examples=60, deadline=None)
    @given(worlds(), st.integers(0, 30))
    def test_same_steps_after_a_stop(self, world: World, stop: int) -> None:
        whole = world.run()
        planners = world.planners()
        for _ in range(min(stop, len(whole))):
            plan_step(planners, world.lengths, patches=world.patches)
        states = [planner.state_dict() for planner in planners]
        resumed = world.planners()
        for planner, state in zip(resumed, states, strict=True):
            before = repr(state)
            planner.load_state_dict(state, fetched=world.fetched(state))
            assert repr(state) == before
        rest = []
        while not resumed[0].is_finished:
            rest.append(plan_step(resumed, world.lengths, patches=world.patches))
        assert rest == whole[min(stop, len(whole)) :]

    def test_samples_resume_from_the_consumed_count_with_another_size(self) -> None:
        lengths = list(range(1, 41))
        first = World(config=config(total=40), lengths=lengths)
        planners = first.planners()
        done = [plan_step(planners, lengths) for _ in range(3)]
        second = World(config=config(total=40, num_replicas=5), lengths=lengths, consumed=12)
        emitted = [
            p
            for plans in done + second.run()
            for plan in plans
            for m in plan.micro_batches
            for p in m
        ]
        assert sorted(emitted) == list(range(40))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"version": 99}, "saved with version=99, this run has 4"),
            ({"num_replicas": 4}, "saved with num_replicas=4, this run has 2"),
            ({"policy": "cost"}, "saved with policy=cost, this run has samples"),
            ({"extra": 1}, "written by another version"),
        ],
    )
    def test_refusals(self, change: dict[str, object], text: str) -> None:
        planner = ReplicaPlanner(config(), replica=0)
        with pytest.raises(ValueError, match=text):
            planner.load_state_dict({**planner.state_dict(), **change}, fetched={})

    def test_a_window_sample_that_is_gone(self) -> None:
        planner = ReplicaPlanner(config(policy=PolicyName.COST), replica=0)
        observe_drawn(planner, [5] * 20)
        state = planner.state_dict()
        other = ReplicaPlanner(config(policy=PolicyName.COST), replica=0)
        with pytest.raises(ValueError, match="can no longer be used"):
            other.load_state_dict(state, fetched=dict.fromkeys(range(20), (0, 0, False)))


class TestPacking:
    @given(st.lists(st.integers(1, BUDGET), max_size=60))
    def test_pack(self, lengths: list[int]) -> None:
        bins = pack(lengths, token_budget=BUDGET)
        assert sorted(slot for slots in bins for slot in slots) == list(range(len(lengths)))
        assert all(sum(lengths[s] for s in slots) <= BUDGET for slots in bins)
        assert all(bins)
        least = -(-sum(lengths) // BUDGET)
        assert len(bins) <= max(
            least, 11 * max(least, 1) // 9 + 1 + sum(n > BUDGET // 2 for n in lengths)
        )

    @pytest.mark.parametrize(
        ("lengths", "count"),
        [
            ([], 0),
            ([64], 1),
            ([65], 1),  # solo: over the budget, alone
            ([65, 1], 2),
            ([32, 32], 1),
            ([33, 32], 2),
            ([40, 30, 24, 20, 10], 2),  # 40+24, 30+20+10: best fit finds what next fit misses
        ],
    )
    def test_pack_counts(self, lengths: list[int], count: int) -> None:
        assert len(pack(lengths, token_budget=BUDGET)) == count

    @pytest.mark.parametrize(
        ("lengths", "patches", "expected"),
        [
            ([9, 9], [4, 4], [[0, 1]]),
            ([9, 9], [4, 5], [[0], [1]]),
            ([9, 8], [9, 0], [[0], [1]]),  # over the cap: alone, also without other patches
            ([8, 9], [9, 0], [[1], [0]]),
            ([9, 9, 9], [9, 9, 0], [[0], [1], [2]]),
            ([9, 8, 7, 6], [8, 0, 9, 0], [[0, 1, 3], [2]]),
        ],
    )
    def test_pack_under_a_patch_cap(
        self, lengths: list[int], patches: list[int], expected: list[list[int]]
    ) -> None:
        caps: dict[str, Any] = {"token_budget": BUDGET, "patches": patches, "max_patches": 8}
        assert pack(lengths, **caps) == expected
        for extra in range(3):
            bins = spread(lengths, lengths, count=len(expected) + extra, **caps)
            assert len(bins) == min(len(expected) + extra, len(lengths))
            for slots in bins:
                assert sum(patches[s] for s in slots) <= 8 or len(slots) == 1

    @given(st.lists(st.integers(1, BUDGET + 8), min_size=1, max_size=40), st.integers(0, 20))
    def test_spread(self, lengths: list[int], extra: int) -> None:
        least = len(pack(lengths, token_budget=BUDGET))
        bins = spread(lengths, [n * n for n in lengths], count=least + extra, token_budget=BUDGET)
        assert len(bins) == min(least + extra, len(lengths))
        assert all(bins)
        assert sorted(slot for slots in bins for slot in slots) == list(range(len(lengths)))
        assert all(sum(lengths[s] for s in slots) <= BUDGET or len(slots) == 1 for slots in bins)

    def test_spread_refuses_too_few(self) -> None:
        with pytest.raises(ValueError, match="2 samples need 2 micro-batches; got 1"):
            spread([40, 40], [1, 1], count=1, token_budget=BUDGET)


class TestAlignment:
    @pytest.mark.parametrize(
        ("counts", "multiple", "expected"),
        [([1, 3], 1, 3), ([0, 0], 1, 1), ([3, 5], 4, 8), ([0], 2, 2)],
    )
    def test_common_count(self, counts: list[int], multiple: int, expected: int) -> None:
        assert common_count(counts, multiple=multiple) == expected

    def test_uneven_counts(self) -> None:
        """pitfalls.md, uneven counts hang: replica 0 [8], replica 1 [8, 8, 8], budget 8."""
        world = World(
            config=config(total=6, global_batch_size=6, token_budget=8), lengths=[8, 8, 0, 8, 0, 8]
        )
        (plans,) = world.run()
        assert [len(plan.micro_batches) for plan in plans] == [3, 3]
        assert plans[0].micro_batches == ((0,), (), ())
        assert plans[0].totals.num_idle == 2

    @pytest.mark.parametrize(
        ("lengths", "budget", "count"), [([2, 2, 2, 2], 10, 1), ([12, 1, 1, 1], 12, 2)]
    )
    def test_empty_micro_batches(self, lengths: list[int], budget: int, count: int) -> None:
        """pitfalls.md, empty micro-batch: neither idle nor over the cap where samples suffice."""
        world = World(config=config(total=4, token_budget=budget), lengths=lengths)
        (plans,) = world.run()
        totals = plans[0].totals
        assert totals.num_micro_batches == count
        assert totals.num_idle == 0
        assert all(
            sum(lengths[p] for p in m) <= budget for plan in plans for m in plan.micro_batches
        )

    def test_split_before_idle(self) -> None:
        assert fit_to_count([4, 4, 4], [4, 4, 4], count=2, token_budget=12) == [[0, 2], [1]]
        assert fit_to_count([4], [4], count=3, token_budget=12) == [[0], [], []]
        assert fit_to_count([], [], count=2, token_budget=12) == [[], []]
        assert num_idle(1, count=3) == 2
        assert num_split(3, 1, count=2) == 1


class TestPadding:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({}, 1),
            ({"context_parallel_size": 2}, 4),
            ({"sequence_parallel_size": 2}, 2),
            ({"context_parallel_size": 2, "sequence_parallel_size": 3}, 12),
            ({"quantization": Quantization.FP8}, 16),
            ({"quantization": Quantization.MXFP8, "context_parallel_size": 2}, 64),
            ({"quantization": Quantization.FP8, "sequence_parallel_size": 2}, 32),
        ],
    )
    def test_multiple(self, arguments: dict[str, int], expected: int) -> None:
        assert length_multiple(**arguments) == expected  # type: ignore[arg-type]

    def test_fp8_shapes(self) -> None:
        """pitfalls.md, FP8 shapes: 11486 tokens, TP 2, sequence parallel."""
        multiple = length_multiple(sequence_parallel_size=2, quantization=Quantization.FP8)
        assert padded_length(11486, multiple) // 2 % 16 == 0
        multiple = length_multiple(sequence_parallel_size=2, quantization=Quantization.MXFP8)
        assert padded_length(11486, multiple) // 2 % 32 == 0

    @given(
        st.lists(st.integers(1, 12_000), min_size=1, max_size=6),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2, 8]),
        st.sampled_from(Quantization),
        st.booleans(),
    )
    def test_every_rank_has_a_legal_share(
        self, lengths: list[int], cp: int, tp: int, quantization: Quantization, fixed: bool
    ) -> None:
        """Also of a micro-batch of a fixed size, and of each sample's zigzag chunks."""
        multiple = length_multiple(
            context_parallel_size=cp, sequence_parallel_size=tp, quantization=quantization
        )
        budget = 80_001
        rule = size_rule(
            (50_001, budget) if fixed else (),
            token_budget=budget,
            context=12_800,
            multiple=multiple,
        )
        samples = [rule.padded(length) for length in lengths]
        size = rule.size_of(sum(samples))
        parts = [*samples, *rule.padding(size - sum(samples))]
        assert sum(parts) == size
        assert size // (cp * tp) % quantization.value == 0
        assert all(part % (2 * cp if cp > 1 else 1) == 0 for part in parts)
        assert all(part >= length for part, length in zip(parts, lengths, strict=False))

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"sizes": (8, 4)}, "sizes must ascend and numbers must not be negative"),
            ({"sizes": (8,), "multiple": 3}, r"sizes \(8,\) must be multiples of 3"),
            ({"least": -1}, "must not be negative"),
        ],
    )
    def test_size_rules_that_are_none(self, values: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            SizeRule(**values)

    def test_refuses_zero(self) -> None:
        with pytest.raises(ValueError, match="parallel sizes must be at least 1"):
            length_multiple(context_parallel_size=0)

    @pytest.mark.parametrize(
        ("length", "multiple", "policy", "keep", "solo"),
        [
            (60, 1, "error", 60, False),
            (59, 4, "error", 59, False),
            (121, 1, "truncate", 60, False),  # pitfalls.md, overlong: 121 tokens, cap 60
            (121, 8, "truncate", 56, False),
            (121, 1, "drop", 0, False),
            (121, 1, "solo", 121, True),
        ],
    )
    def test_judge(self, length: int, multiple: int, policy: str, keep: int, solo: bool) -> None:
        verdict = judge_length(
            length, multiple=multiple, token_budget=60, context=128, policy=OverlongPolicy(policy)
        )
        assert (verdict.keep, verdict.solo) == (keep, solo)
        assert verdict.truncated == (length - keep if policy == "truncate" else 0)

    def test_past_the_cap_after_padding(self) -> None:
        """pitfalls.md: length = budget - 1 with a multiple; exactly full after alignment."""
        kwargs = {"token_budget": 62, "context": 128, "policy": OverlongPolicy.ERROR}
        with pytest.raises(OverlongError, match=r"61 tokens \(64 after padding to 4\)"):
            judge_length(61, multiple=4, **kwargs)  # type: ignore[arg-type]
        assert judge_length(60, multiple=4, **kwargs).keep == 60  # type: ignore[arg-type]
        world = World(
            config=config(total=4, num_replicas=1, multiple=4, token_budget=16),
            lengths=[5, 5, 15, 16],
        )
        (plans,) = world.run()
        assert sorted(map(sorted, plans[0].micro_batches)) == [[0, 1], [2], [3]]

    @pytest.mark.parametrize(
        ("policy", "text"),
        [("error", "use --odb-overlong truncate, drop or solo"), ("solo", "raise --seq-length")],
    )
    def test_overlong_errors(self, policy: str, text: str) -> None:
        with pytest.raises(OverlongError, match=text):
            judge_length(
                129, multiple=1, token_budget=60, context=128, policy=OverlongPolicy(policy)
            )

    def test_nothing_fits(self) -> None:
        with pytest.raises(ValueError, match="below the padding multiple 16"):
            judge_length(20, multiple=16, token_budget=8, context=8, policy=OverlongPolicy.TRUNCATE)


class TestCost:
    def test_values(self) -> None:
        model = CostModel.from_ratios(quadratic=0.5, fixed_tokens=2)
        assert model.sample(4) == 4 * COST_UNIT + 8 * COST_UNIT
        assert model.fixed == 2 * COST_UNIT

    def test_model_shape(self) -> None:
        shape = ModelShape(
            num_layers=2, hidden=8, ffn_hidden=32, query=8, key_value=4, vocab=100, gated_mlp=True
        )
        assert shape.linear_flops() == 2 * (2 * (8 * 24 + 8 * 32 * 3) + 800)
        assert shape.quadratic_flops() == 2 * 2 * 8
        model = CostModel.from_model_shape(shape, fixed_tokens=0)
        expected = 32 / shape.linear_flops() * 10_000**2 + 10_000
        assert model.sample(10_000) / COST_UNIT == pytest.approx(expected, rel=1e-5)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="must not be negative"):
            CostModel(quadratic=-1)
        with pytest.raises(ValueError, match="more than the"):
            CostModel.from_ratios(quadratic=1e6, fixed_tokens=0).sample(10**6)


class TestRecords:
    def test_round_trip(self) -> None:
        window = WindowRecord(
            config=-5, step=3, position=12, cost_held=2**61, failed=True, message="ä" * 80
        )
        data = window.to_bytes()
        assert len(data) == RECORD_BYTES
        back = WindowRecord.from_bytes(data)
        assert back.cost_held == 2**61
        assert back.message.startswith("ä" * 40)
        assert back.message.endswith("...")
        offering = WindowRecord(config=1, step=3, position=12, offer_0=2**62, offer_3=-1)
        assert WindowRecord.from_bytes(offering.to_bytes()) == offering
        plan = PlanRecord(target=1, num_samples=3, failed=True, message="no")
        assert PlanRecord.from_bytes(plan.to_bytes()) == plan

    def test_refusals(self) -> None:
        with pytest.raises(ReplicaFailedError, match="a record of 3 bytes"):
            PlanRecord.from_bytes(b"abc")
        good = WindowRecord(config=1, step=0, position=0)
        bad = WindowRecord(config=1, step=0, position=0, failed=True, message="data.jsonl:3: no")
        with pytest.raises(ReplicaFailedError, match="replica 1 failed: data.jsonl:3: no"):
            check_agreement([good, bad], names=("config",))
        other = WindowRecord(config=2, step=0, position=0)
        with pytest.raises(ReplicaFailedError, match="disagree on config: replica 0 has 1, rep"):
            check_agreement([good, other], names=("config", "step"))


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"num_replicas": 0}, "must be at least 1; got 0"),
            ({"token_budget": 3, "multiple": 4}, "below the length multiple 4"),
            ({"global_batch_size": 0}, "global batch size of at least 1"),
            ({"policy": PolicyName.COST, "window": 1}, "below the 2 samples that a replica needs"),
            ({"policy": PolicyName.COST, "max_delay_steps": 0}, "must be at least 1, got 0"),
        ],
    )
    def test_refusals(self, changes: dict[str, object], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            ReplicaPlanner(config(**changes), replica=0)

    def test_replica_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="replica 2 is not below num_replicas 2"):
            ReplicaPlanner(config(), replica=2)

    def test_digest_covers_everything(self) -> None:
        assert config().digest() == config().digest()
        assert config().digest() != config(data="other").digest()
        assert config().digest() != config(cost=CostModel()).digest()
        assert config().digest() != config(pads_to_budget=True).digest()

    def test_the_length_that_all_are_padded_to(self) -> None:
        assert config(token_budget=30, multiple=4).size_rule.sizes == ()
        padded = config(token_budget=30, multiple=4, pads_to_budget=True)
        assert padded.size_rule.sizes == (28,)
        bucketed = config(token_budget=30, multiple=4, shape_buckets=(3, 9, 21), context=10)
        assert bucketed.size_rule == SizeRule(sizes=(8, 20, 28), least=4, longest=8, multiple=4)
        long = config(token_budget=8192, multiple=16, pads_to_budget=True)
        assert (long.size_rule.least, long.size_rule.num_segments(8192)) == (32, 257)
