"""The cost model that a run plans with, and the text it is written as."""

from __future__ import annotations

import argparse

from test_arguments import _config

from odb_megatron.megatron.cost_model import cost_model
from odb_megatron.plan.cost import COST_UNIT, CostModel, CostPrices

SHAPE = argparse.Namespace(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    group_query_attention=True,
    kv_channels=4,
    padded_vocab_size=64,
    swiglu=True,
)


def test_it_follows_from_the_models_shape() -> None:
    found = cost_model(SHAPE, _config("--odb --odb-token-budget 1000"))
    linear = 2 * (2 * (8 * (2 * 16 + 2 * 8) + 3 * 8 * 16) + 8 * 64)
    assert found.quadratic == round((2 * 2 * 16 << 32) / linear)
    assert (found.fixed, found.per_patch) == (50 * COST_UNIT, 0)


def test_or_it_is_given() -> None:
    config = _config("--odb --odb-cost linear=4,quadratic=1,overhead=32,patch=8")
    expected = CostModel.from_ratios(quadratic=0.25, fixed_tokens=8, patch_tokens=2)
    assert cost_model(argparse.Namespace(), config) == expected


def test_a_model_is_written_with_few_digits_and_read_back() -> None:
    model = CostModel.from_ratios(quadratic=0.0001234567, fixed_tokens=204.8, patch_tokens=3)
    prices = CostPrices.of(model)
    assert CostPrices.parse(str(prices)) == prices
    assert prices.model() == model
    exact = CostPrices.of(CostModel.from_ratios(quadratic=1e-4, fixed_tokens=204.8, patch_tokens=3))
    assert str(exact) == "linear=1.0,quadratic=0.0001,overhead=204.8,patch=3.0"


def test_the_unit_cancels() -> None:
    one = CostPrices.parse("linear=0.5, quadratic=0.25, overhead=8, patch=2").model()
    assert one == CostPrices(linear=1, quadratic=0.5, overhead=16, patch=4).model()
    assert CostPrices.parse("linear=7").model() == CostModel()
