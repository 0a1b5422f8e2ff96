"""Assignment of a step's samples: invariants, distance to the bound, bytes, and mode `auto`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan import exchange
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.exchange import Assignment, assign
from odb_megatron.plan.exchange_choice import choose_for_run, is_worth_it
from odb_megatron.plan.packing import Caps, pack
from odb_megatron.plan.placement import ExchangeRules, step_cost_bound
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.plan.records import PlanRecord, RecordTable, ReplicaFailedError, WindowRecord
from odb_megatron.plan.sample_list import (
    LIST_HEADER_BYTES,
    SAMPLE_ENTRY_BYTES,
    StepSamples,
    failed_list,
    pack_list,
    unpack_lists,
)
from odb_megatron.plan.window import Column
from odb_megatron.testing.worlds import World, plan_step

BUDGET = 8192
COST = CostModel.from_ratios(quadratic=0.3 / 0.7 / 500, fixed_tokens=0.05 * BUDGET)
"""Attention is 30 % of the cost of a sample of 500 tokens; a micro-batch's price is 5 %."""


def _rules(num_replicas: int, **changes: Any) -> ExchangeRules:
    values: dict[str, Any] = {
        "num_replicas": num_replicas,
        "caps": Caps(token_budget=BUDGET),
        "count_multiple": 1,
        "fixed": COST.fixed,
        "scope": BalanceScope.STEP,
    }
    return ExchangeRules(**values | changes)


def _samples(lengths: list[list[int]], *, patches: list[int] | None = None) -> StepSamples:
    """Samples from the lengths that each replica holds."""
    flat = np.array([n for own in lengths for n in own], dtype=np.int64)
    owner = np.repeat(np.arange(len(lengths)), [len(own) for own in lengths]).astype(np.int64)
    used = np.zeros_like(flat) if patches is None else np.array(patches, dtype=np.int64)
    return StepSamples(
        owner=owner,
        position=np.arange(len(flat), dtype=np.int64),
        padded=flat,
        patches=used,
        payload=5 * flat,
        cost=COST.samples(flat, used),
    )


def _lognormal(count: int, *, cv: float, seed: int) -> list[int]:
    variance = np.log(1 + cv * cv)
    drawn = np.random.RandomState(seed).lognormal(
        np.log(500) - variance / 2, np.sqrt(variance), count
    )
    lengths: list[int] = np.clip(np.round(drawn), 1, BUDGET).astype(int).tolist()
    return lengths


def _local_count(samples: StepSamples, rules: ExchangeRules) -> int:
    caps = rules.caps
    counts = [
        len(
            pack(
                samples.padded[samples.owner == replica].tolist(),
                token_budget=caps.token_budget,
                patches=samples.patches[samples.owner == replica].tolist(),
                max_patches=caps.max_patches,
            )
        )
        for replica in range(rules.num_replicas)
    ]
    return -(-max(1, *counts) // rules.count_multiple) * rules.count_multiple


def _check(samples: StepSamples, rules: ExchangeRules, found: Assignment) -> None:
    """Each sample once, within the limits, equally many micro-batches, no needless idling."""
    caps, seen, idle = rules.caps, [], 0
    by_cost = rules.scope is BalanceScope.MICROBATCH
    assert found.count % rules.count_multiple == 0
    for replica in range(rules.num_replicas):
        bins = found.micro_batches(replica, caps=caps, by_cost=by_cost)
        assert len(bins) == found.count
        for positions in bins:
            at = list(positions)
            assert at == sorted(at)
            assert samples.padded[at].sum() <= caps.token_budget or len(at) == 1
            assert not caps.max_patches or samples.patches[at].sum() <= caps.max_patches
            seen += at
            idle += not at
    assert sorted(seen) == list(range(len(samples)))
    if not found.is_local:
        assert idle == max(0, rules.num_replicas * found.count - len(samples))


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepSamples, ExchangeRules]:
    num = draw(st.integers(2, 8))
    generator = random.Random(draw(st.integers(0, 2**32)))
    longest = draw(st.sampled_from([300, 4000, BUDGET, BUDGET + 4000]))
    most = draw(st.sampled_from([1, 4, 30]))
    lengths = [
        [generator.randint(1, longest) for _ in range(generator.randint(0, most))]
        for _ in range(num)
    ]
    lengths[0].append(generator.randint(1, longest))
    total = sum(map(len, lengths))
    has_patches = draw(st.booleans())
    patches = [generator.randint(0, 9) for _ in range(total)] if has_patches else None
    rules = _rules(
        num,
        caps=Caps(token_budget=BUDGET, max_patches=9 if has_patches else 0),
        count_multiple=draw(st.sampled_from([1, 1, 2, 4])),
        scope=draw(st.sampled_from(BalanceScope)),
    )
    return _samples(lengths, patches=patches), rules


class TestAssign:
    @settings(max_examples=150, deadline=None)
    @given(steps())
    def test_every_step(self, step: tuple[StepSamples, ExchangeRules]) -> None:
        samples, rules = step
        local_count = _local_count(samples, rules)
        found = assign(samples, rules, local_count=local_count)
        _check(samples, rules, found)
        again = assign(samples, rules, local_count=local_count)
        assert again.replica_of.tolist() == found.replica_of.tolist()
        if rules.scope is BalanceScope.STEP:
            loads = np.bincount(samples.owner, samples.cost, minlength=rules.num_replicas)
            assert found.time <= int(loads.max()) + local_count * rules.fixed
        assert found.bytes_moved == int(samples.payload[found.moved].sum())

    @pytest.mark.parametrize("cv", [0.29, 0.48, 1.0, 2.0])
    def test_256_samples_on_8_replicas_are_within_two_percent(self, cv: float) -> None:
        """Of the step's bound: the mean cost or the costliest sample, and the fewest packs."""
        rules, behind, local = _rules(8), [], []
        for seed in range(20):
            lengths = _lognormal(256, cv=cv, seed=seed)
            samples = _samples([lengths[at : at + 32] for at in range(0, 256, 32)])
            count = _local_count(samples, rules)
            found = assign(samples, rules, local_count=count)
            bound = step_cost_bound(
                sum(samples.cost.tolist()), int(samples.cost.max()), num_replicas=8
            )
            assert max(found.costs(8)) <= bound * 1.02
            bound += -(-sum(lengths) // (8 * BUDGET)) * rules.fixed
            behind.append(bound / found.time)
            loads = np.bincount(samples.owner, samples.cost)
            local.append(bound / (loads.max() + count * rules.fixed))
            assert found.bytes_moved < 0.95 * samples.payload.sum()
        assert np.mean(behind) > 0.98
        assert np.mean(local) < 0.95  # guard: there was something to gain

    def test_an_even_step_moves_nothing(self) -> None:
        samples = _samples([[500] * 8] * 4)
        found = assign(samples, _rules(4), local_count=1)
        assert found.is_local
        assert found.bytes_moved == 0

    def test_the_longest_fitting_sample_goes(self) -> None:
        """One replica has two long samples, the other short ones: one long one changes sides."""
        samples = _samples([[4000, 4000, 100], [100]])
        found = assign(samples, _rules(2), local_count=1)
        assert found.moved.tolist() in ([True, False, False, False], [False, True, False, False])

    def test_fewer_micro_batches_than_without(self) -> None:
        samples = _samples([[8000, 8000, 8000], [100]])
        found = assign(samples, _rules(2), local_count=3)
        assert (found.count, found.needed) == (2, 2)
        doubled = assign(samples, _rules(2, count_multiple=4), local_count=4)
        assert doubled.count == 4

    def test_no_replica_idles_while_another_could_split(self) -> None:
        samples = _samples([[8192], [8000, 5, 5, 5]])
        for scope in BalanceScope:
            found = assign(samples, _rules(2, scope=scope), local_count=2)
            _check(samples, _rules(2, scope=scope), found)

    def test_large_samples_meet_under_scope_microbatch(self) -> None:
        samples = _samples([[4000, 4000, 50], [50, 60, 70]])
        rules = _rules(2, scope=BalanceScope.MICROBATCH)
        found = assign(samples, rules, local_count=1)
        first = [found.micro_batches(r, caps=rules.caps, by_cost=True)[0] for r in (0, 1)]
        assert [max(samples.padded[list(m)]) for m in first] == [4000, 4000]


def _rows(samples: list[tuple[int, int, int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = np.zeros((len(Column), len(samples)), dtype=np.int64)
    for at, (position, tokens, patches, payload) in enumerate(samples):
        rows[Column.POSITION, at], rows[Column.NUM_TOKENS, at] = position, tokens
        rows[Column.PATCHES, at], rows[Column.PAYLOAD, at] = patches, payload
    return rows


class TestSampleList:
    CONFIG = PlanConfig(
        policy=PolicyName.SAMPLES, total=9, global_batch_size=9, num_replicas=3,
        token_budget=64, multiple=4, cost=CostModel.from_ratios(quadratic=0.1, fixed_tokens=1),
    )  # fmt: skip

    def test_round_trip(self) -> None:
        held = [[(1 << 40, 5, 0, 25), ((1 << 40) + 3, 8, 2, 40)], [], [(7, 1, 1, 5)]]
        parts = [pack_list(_rows(own), room=2) for own in held]
        assert {len(part) for part in parts} == {LIST_HEADER_BYTES + 2 * SAMPLE_ENTRY_BYTES}
        found = unpack_lists(parts, np.array([2, 0, 1]), config=self.CONFIG)
        assert found.owner.tolist() == [0, 0, 2]
        assert found.position.tolist() == [1 << 40, (1 << 40) + 3, 7]
        assert found.padded.tolist() == [8, 8, 4]
        assert found.patches.tolist() == [0, 2, 1]
        assert found.payload.tolist() == [25, 40, 5]
        cost = self.CONFIG.cost
        assert found.cost.tolist() == [cost.sample(8), cost.sample(8), cost.sample(4)]

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="position 9 has 4 tokens, 0 patches and 4294967296 b"):
            pack_list(_rows([(2, 4, 0, 20), (9, 4, 0, 1 << 32)]), room=2)
        good, counts = pack_list(_rows([(2, 4, 0, 20)]), room=1), np.array([1, 1, 1])
        with pytest.raises(ReplicaFailedError, match="replica 1 failed while listing its samples"):
            unpack_lists([good, failed_list(room=1), good], counts, config=self.CONFIG)
        with pytest.raises(ReplicaFailedError, match="replica 2 sent a sample list of 31 bytes"):
            unpack_lists([good, good, good[:-1]], counts, config=self.CONFIG)


class TestAuto:
    CONFIG = PlanConfig(
        policy=PolicyName.COST, total=900, global_batch_size=40, num_replicas=2,
        token_budget=64, window=40, exchange=ExchangeMode.AUTO,
        cost=CostModel.from_ratios(quadratic=0, fixed_tokens=0),
    )  # fmt: skip

    @pytest.mark.parametrize(("window", "exchanges"), [(40, False), (39, True)])
    def test_for_a_run(self, window: int, exchanges: bool) -> None:
        record = WindowRecord(
            config=0, step=0, position=0, num_observed=20, tokens_observed=200, cost_observed=2000
        )
        config = replace(self.CONFIG, window=window)
        found = choose_for_run(RecordTable.from_records([record, record]), config)
        assert found.exchanges is exchanges
        # A step of 40 samples has a share of 20 samples, of 10 tokens each.
        assert (found.share, found.num_micro_batches) == (20, 100 * 200 // 64)
        mode = "tokens" if exchanges else "none"
        assert found.reason().startswith(f"exchange {mode}: 3.1 micro-batches per step")
        assert found.reason().endswith(f"--odb-exchange {mode} reproduces it")

    @pytest.mark.parametrize(("batch", "exchanges"), [(32, False), (31, True)])
    def test_a_share_of_few_samples(self, batch: int, exchanges: bool) -> None:
        record = WindowRecord(
            config=0, step=0, position=0, num_observed=40, tokens_observed=400, cost_observed=4000
        )
        config = replace(self.CONFIG, global_batch_size=batch)
        found = choose_for_run(RecordTable.from_records([record, record]), config)
        assert found.exchanges is exchanges

    @pytest.mark.parametrize(
        ("costs", "largest", "counts", "worth"),
        [
            ((1000, 1000), 100, (1, 1), False),
            ((1000, 980), 100, (1, 1), False),  # half a percent to gain
            ((1000, 900), 100, (1, 1), True),
            ((1000, 100), 1000, (1, 1), False),  # one sample is all of it
        ],
    )
    def test_for_a_step(
        self, costs: tuple[int, int], largest: int, counts: tuple[int, int], worth: bool
    ) -> None:
        table = RecordTable.from_records(
            [
                PlanRecord(target=0, cost=cost, cost_largest=largest, num_micro_batches=count)
                for cost, count in zip(costs, counts, strict=True)
            ]
        )
        assert is_worth_it(table, self.CONFIG, local_count=max(counts)) is worth
        aligned = replace(self.CONFIG, balance=BalanceScope.MICROBATCH)
        assert is_worth_it(table, aligned, local_count=max(counts)) is worth
        assert is_worth_it(table, aligned, local_count=2)

    def test_a_run_keeps_its_choice(self) -> None:
        """Chosen in the first step, kept in the state."""
        lengths = [random.Random(p).randint(1, 60) for p in range(900)]
        for window, chosen in ((20, 1), (80, 0)):
            world = World(config=replace(self.CONFIG, window=window), lengths=lengths)
            planners = world.planners()
            assert planners[0].state_dict()["exchanges"] == -1
            plans = plan_step(planners, lengths)
            assert planners[0].exchange_choice is not None
            assert planners[0].state_dict()["exchanges"] == chosen
            assert bool(plans[0].totals.costs_before) is bool(chosen)


@pytest.mark.parametrize("cv", [0.48, 1.0])
def test_samples_per_step_follow_the_batch_size(cv: float) -> None:
    """Policy `cost` with an exchange, half a dozen samples per replica and step."""
    lengths = _lognormal(9000, cv=cv, seed=3)
    config = PlanConfig(
        policy=PolicyName.COST, total=9000, global_batch_size=48, num_replicas=8,
        token_budget=BUDGET, window=24, cost=COST, exchange=ExchangeMode.TOKENS,
    )  # fmt: skip
    body = World(config=config, lengths=lengths).run()[:-1]
    mean = sum(plans[0].totals.num_consumed for plans in body) / len(body)
    assert abs(mean / 48 - 1) < 0.01
    balances = [plans[0].totals.balance for plans in body]
    before = [plans[0].totals.balance_before for plans in body]
    assert np.mean(balances) > np.mean(before) + 0.03


@pytest.mark.parametrize("scope", BalanceScope)
def test_more_micro_batches_have_to_gain_even_without_a_price(
    scope: BalanceScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At price 0 any gain would do, and M would rise for a step that is hardly shorter."""
    rules = _rules(4, fixed=0, scope=scope)
    counts: dict[int, list[int]] = {}
    times: dict[int, list[int]] = {}
    for bits in (exchange._LEAST_GAIN_BITS, 60):
        monkeypatch.setattr(exchange, "_LEAST_GAIN_BITS", bits)
        found = [
            assign(samples, rules, local_count=_local_count(samples, rules))
            for samples in (
                _samples([_lognormal(60, cv=1.0, seed=10 * seed + at) for at in range(4)])
                for seed in range(6)
            )
        ]
        counts[bits], times[bits] = [one.count for one in found], [one.time for one in found]
    few, many = counts.values()
    assert all(map(int.__le__, few, many))
    assert sum(few) < sum(many), (few, many)
    for time, least in zip(*times.values(), strict=True):
        assert time <= least * (1 + 4 / 512)
