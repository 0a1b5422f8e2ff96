"""The pure parts that plans rest on: padding rules, the cost model, what replicas agree on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.plan.blocks import even_blocks
from odb_megatron.plan.cost import COST_UNIT, MAX_SAMPLE_COST, CostModel, ModelShape
from odb_megatron.plan.padding import (
    OverlongError,
    OverlongPolicy,
    SizeRule,
    judge_length,
    length_multiple,
    padded_length,
    size_rule,
)
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.plan.record import (
    HEADER,
    ROW,
    PlanConfig,
    StepTotals,
    Sync,
    config_differences,
)

CONFIG = PlanConfig(total=20, global_batch_size=4, num_replicas=2, token_budget=64)
TOTALS = StepTotals(
    **{
        field.name: at
        for at, field in enumerate(fields(StepTotals), 1)
        if field.name not in ("is_final", "num_replicas")
    },
    num_replicas=2,
    is_final=True,
)


class TestPadding:
    @pytest.mark.parametrize(
        ("cp", "tp", "kernels", "expected"),
        [
            (1, 1, 1, 1),
            (2, 1, 1, 4),
            (1, 2, 1, 2),
            (2, 3, 1, 12),
            (1, 1, 16, 16),
            (2, 1, 32, 64),
            (1, 2, 16, 32),
        ],
    )
    def test_multiple(self, cp: int, tp: int, kernels: int, expected: int) -> None:
        sizes = {"context_parallel_size": cp, "sequence_parallel_size": tp}
        multiple = length_multiple(**sizes, rank_multiple=kernels)
        assert multiple == expected
        assert padded_length(11486, multiple) // (cp * tp) % kernels == 0

    @given(
        st.lists(st.integers(1, 12_000), min_size=1, max_size=6),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2, 8]),
        st.sampled_from([1, 16, 32]),
        st.booleans(),
    )
    def test_every_rank_has_a_legal_share(
        self, lengths: list[int], cp: int, tp: int, kernels: int, fixed: bool
    ) -> None:
        """Also of a micro-batch of a fixed size, and of each sample's zigzag chunks."""
        multiple = length_multiple(
            context_parallel_size=cp, sequence_parallel_size=tp, rank_multiple=kernels
        )
        budget = 80_001
        sizes = (50_001, budget) if fixed else ()
        rule = size_rule(sizes, token_budget=budget, context=12_800, multiple=multiple)
        samples = [rule.padded(length) for length in lengths]
        assert rule.padded_all(np.array(lengths)).tolist() == samples
        size = rule.size_of(sum(samples))
        parts = [*samples, *rule.padding(size - sum(samples))]
        assert sum(parts) == size
        assert size // (cp * tp) % kernels == 0
        assert all(part % (2 * cp if cp > 1 else 1) == 0 for part in parts)
        assert all(part >= length for part, length in zip(parts, lengths, strict=False))

    @pytest.mark.parametrize(
        ("length", "multiple", "policy", "expected"),
        [
            (60, 1, "error", 60),
            (59, 4, "error", 59),
            (121, 1, "truncate", 60),
            (121, 8, "truncate", 56),
            (121, 1, "drop", 0),
            (121, 1, "solo", 121),
            (61, 4, "error", r"61 tokens \(64 after padding to 4\); the limit"),
            (129, 1, "solo", "the limit is 60"),
            (20, 64, "truncate", "the limit is 60"),
        ],
    )
    def test_an_overlong_sample(
        self, length: int, multiple: int, policy: str, expected: int | str
    ) -> None:
        limits = {"multiple": multiple, "token_budget": 60, "context": 128}
        if isinstance(expected, str):
            with pytest.raises(OverlongError, match=expected):
                judge_length(length, policy=OverlongPolicy(policy), **limits)
            return
        keep, message = judge_length(length, policy=OverlongPolicy(policy), **limits)
        assert (keep, bool(message)) == (expected, length > 60)


class TestCost:
    def test_values(self) -> None:
        model = CostModel.from_ratios(quadratic=0.5, fixed_tokens=2, patch_tokens=0.5)
        assert model.sample(4, num_patches=4) == (4 + 8 + 2) * COST_UNIT
        assert model.fixed == 2 * COST_UNIT

    def test_model_shape(self) -> None:
        shape = ModelShape(
            num_layers=2, hidden=8, ffn_hidden=32, query=8, key_value=4, vocab=100, gated_mlp=True
        )
        assert shape.linear_flops() == 2 * (2 * (8 * 24 + 8 * 32 * 3) + 800)
        assert shape.quadratic_flops() == 2 * 2 * 8
        model = CostModel.from_ratios(quadratic=shape.quadratic_ratio, fixed_tokens=0)
        expected = 32 / shape.linear_flops() * 10_000**2 + 10_000
        assert model.sample(10_000) / COST_UNIT == pytest.approx(expected, rel=1e-5)

    @given(st.lists(st.tuples(st.integers(1, 1 << 19), st.integers(0, 4000)), max_size=20))
    def test_many_cost_what_each_does(self, samples: list[tuple[int, int]]) -> None:
        model = CostModel.from_ratios(quadratic=1e-3, fixed_tokens=0, patch_tokens=3)
        lengths, patches = np.array(samples, dtype=np.int64).reshape(-1, 2).T
        expected = [model.sample(n, num_patches=p) for n, p in samples]
        assert model.samples(lengths, patches).tolist() == expected

    def test_refusals(self) -> None:
        huge = CostModel.from_ratios(quadratic=1.0, fixed_tokens=0, patch_tokens=2**20)
        for length, patches in ((1 << 20, 0), (1, 1 << 12)):
            with pytest.raises(ValueError, match="lower the quadratic or patch cost"):
                huge.samples(np.array([length]), np.array([patches]))
        for name in ("fixed", "per_patch"):
            with pytest.raises(ValueError, match="lower it"):
                CostModel(**{name: MAX_SAMPLE_COST})
        with pytest.raises(ValueError, match="the cost quadratic is"):
            CostModel(quadratic=-1)


class TestConfig:
    def test_a_budget_that_holds_no_sample(self) -> None:
        with pytest.raises(ValueError, match="below the length multiple 4"):
            replace(CONFIG, token_budget=3, multiple=4)

    def test_every_field_is_compared(self) -> None:
        others = {
            "total": 21, "global_batch_size": 8, "num_replicas": 4, "token_budget": 63,
            "multiple": 2, "sizes": (64,), "context": 9, "count_multiple": 2,
            "cost": CostModel(fixed=1), "sync": Sync.MICROBATCH, "max_patches": 1, "max_share": 2,
            "has_iterators": True, "max_bad_records": 0, "block": 2, "data": "other",
            "loss_per": "sample 4", "pipeline": Pipeline(stages=2),
        }  # fmt: skip
        assert others.keys() == {field.name for field in fields(PlanConfig)}
        for name, value in others.items():
            other = replace(CONFIG, **{name: value})
            assert other.digest() != CONFIG.digest(), name
            text = config_differences([CONFIG.to_text(), CONFIG.to_text(), other.to_text()])
            assert text.startswith(f"{name} is ")
            assert text.endswith(" on replica 0")
            assert " on replica 2 and " in text
        assert config_differences([CONFIG.to_text()] * 3) == ""

    def test_the_sizes_that_micro_batches_are_padded_to(self) -> None:
        config = replace(CONFIG, token_budget=30, multiple=4)
        assert config.size_rule == SizeRule(multiple=4)
        assert replace(config, sizes=(30,)).size_rule.sizes == (28,)
        bucketed = replace(config, sizes=(3, 9, 21), context=10)
        assert bucketed.size_rule == SizeRule(sizes=(8, 20, 28), least=4, longest=8, multiple=4)
        long = replace(config, token_budget=8192, multiple=16, sizes=(8192,)).size_rule
        assert (long.least, long.num_segments(8192)) == (32, 257)


class TestBlocks:
    @given(
        st.lists(
            st.tuples(st.integers(1, 64), st.lists(st.integers(1, 900))), min_size=2, max_size=5
        )
    )
    def test_moves_even_out_what_each_replica_has(self, blocks: list[tuple[int, Any]]) -> None:
        sizes, offers = [size for size, _ in blocks], [sorted(costs)[::-1] for _, costs in blocks]
        loads = [sum(costs) for costs in offers]
        fair = [sum(loads) * size // sum(sizes) for size in sizes]
        before = list(loads)
        for block, number, to in even_blocks(before, sizes, offers):
            loads[block] -= offers[block][number]
            loads[to] += offers[block][number]
        for was, load, even in zip(before, loads, fair, strict=True):
            assert min(was, even) <= load <= max(was, even)
        heavy = max(range(len(loads)), key=lambda at: loads[at] - fair[at])
        light = max(fair[at] - loads[at] for at in range(len(loads)))
        left = loads[heavy] - fair[heavy]
        if left == before[heavy] - fair[heavy]:  # it gave nothing away: nothing that fits was there
            assert all(cost > min(left, light) for cost in offers[heavy])

    def test_what_moves(self) -> None:
        assert even_blocks([90, 10, 50], [1, 1, 1], [[60, 30, 20], [10], [50]]) == [
            (0, 1, 1),
        ]


class TestRecord:
    def test_its_size(self) -> None:
        """A header, and 16 bytes for each sample, whatever the number of replicas."""
        assert (HEADER.itemsize, ROW.itemsize) == (64, 16)

    def test_totals_of_blocks(self) -> None:
        other = replace(TOTALS, cost_max=TOTALS.cost_max + 1, wait_us=0, num_samples=100)
        merged = StepTotals.merged([TOTALS.to_bytes(), other.to_bytes()])
        assert StepTotals.merged([TOTALS.to_bytes()]) == TOTALS
        assert merged.num_samples == TOTALS.num_samples + 100
        assert merged.cost_sum == 2 * TOTALS.cost_sum
        assert (merged.cost_max, merged.wait_us) == (TOTALS.cost_max + 1, TOTALS.wait_us)
        for name in ("step", "consumed_before", "num_consumed", "num_micro_batches", "is_final"):
            assert getattr(merged, name) == getattr(TOTALS, name)

    def test_balance(self) -> None:
        assert replace(TOTALS, cost_sum=30, cost_max=20).balance == 0.75
        assert replace(TOTALS, cost_sum=0, cost_max=0).balance == 1.0
