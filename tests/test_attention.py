"""CPU core attention in Megatron's GPTModel: packed samples against the same samples alone.

The reference is mcore's own local DotProductAttention, one sample at a time. All cases run in one
process with the CPU device layer (`attention_measurements`); the tests judge what it measured.
"""

from __future__ import annotations

from typing import Any

import pytest
from attention_measurements import MODELS, REFUSED_BY_BACKEND, REFUSED_BY_SPEC, measure_all

from odb_megatron.testing.gloo import run_replicas

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    results = run_replicas(measure_all, 1, timeout_s=120, device_layer=True, model_parallel={})
    found: dict[str, Any] = results[0]
    return found


@pytest.mark.parametrize(
    "layout", ["packed", "padded_segments", "one_batch", "max_seqlen_is_total"]
)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_as_alone(
    measured: dict[str, Any], model: str, layout: str
) -> None:
    result = measured[f"{model}/{layout}"]
    assert result["num_parameters"] >= 15
    assert result["smallest_gradient"] > 0
    assert result["loss"] <= TOLERANCE
    assert result["gradient"] <= TOLERANCE, result["worst"]


@pytest.mark.parametrize("case", ["fills_the_pack", "all_of_length_1", "zero_length_between"])
def test_edges_as_alone(measured: dict[str, Any], case: str) -> None:
    result = measured[case]
    assert result["smallest_gradient"] >= 0
    assert result["loss"] <= TOLERANCE
    assert result["gradient"] <= TOLERANCE, result["worst"]


def test_multi_latent_attention_as_alone(measured: dict[str, Any]) -> None:
    result = measured["latent"]
    if "missing" in result:
        pytest.skip(result["missing"])
    assert result["smallest_gradient"] > 0
    assert result["loss"] <= TOLERANCE
    assert result["gradient"] <= TOLERANCE, result["worst"]
    assert result["unpacked"] <= TOLERANCE


def test_no_sample_sees_another(measured: dict[str, Any]) -> None:
    """Changing sample 1's tokens leaves every bit of the others' losses."""
    result = measured["leak"]
    assert result["changed"] > 0.01
    assert result["others_equal"]


def test_padding_outputs_are_zero_and_carry_no_gradient(measured: dict[str, Any]) -> None:
    result = measured["padding"]
    assert result["num_padding"] == 6
    assert result["outputs_at_padding"] == 0.0
    assert result["gradient_at_padding"] == 0.0
    assert result["gradient_elsewhere"] > 0.0


def test_dropout_follows_megatrons_generator(measured: dict[str, Any]) -> None:
    result = measured["dropout"]
    assert result["same_state_equal"]
    assert not result["next_state_equal"]
    assert not result["equal_to_evaluation"]
    assert result["evaluation_repeats"]


def test_moe_block_spec_has_the_backend_in_every_layer(measured: dict[str, Any]) -> None:
    assert measured["moe_layers"] == ["CpuCoreAttention", "CpuCoreAttention"]


@pytest.mark.parametrize("flag", [*REFUSED_BY_BACKEND, *REFUSED_BY_SPEC])
def test_unsupported_flags_are_refused_by_name(measured: dict[str, Any], flag: str) -> None:
    assert measured["refused"][flag].startswith("ValueError")
    assert flag in measured["refused"][flag]
    assert "drop" in measured["refused"][flag]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("bias", "ValueError: attention backend cpu has no attention_bias: use rope"),
        ("mask_type", "got attn_mask_type no_mask, supports causal and padding_causal here"),
        ("padded_mask_type", "got attn_mask_type padding_causal, supports causal here"),
        ("reset_mask", "--reset-attention-mask is not supported, pack the documents instead"),
        ("key_value_cache", "got 1 queries for 8 keys"),
        ("layout", "must come as qkv_format 'thd', got 'sbhd'"),
        ("beyond_pack", "end at the pack's 8 tokens"),
        ("short_of_pack", "[0, 5] must hold a sample, start at 0, be equally long, and the latter"),
        ("not_from_0", "must hold a sample, start at 0"),
        ("overlap", "sample 0 of the pack has 5 tokens from 0 on, but the next one starts at 4"),
        ("key_lengths", "differ from those of queries"),
        ("cross", "has self-attention only, got 'cross'"),
        ("constructor_mask", "is causal, got attn_mask_type padding"),
    ],
)
def test_error_texts(measured: dict[str, Any], case: str, text: str) -> None:
    assert measured["errors"][case].startswith("ValueError")
    assert text in measured["errors"][case]


def test_causal_mask_is_accepted(measured: dict[str, Any]) -> None:
    assert measured["errors"]["causal_mask"] == ""
