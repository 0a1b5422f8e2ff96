"""`odb_megatron.megatron.topology`: where replicas wait for each other, and multiples."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from odb_megatron.megatron.topology import padding_multiple, sync_of
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.record import Sync

STEP, MICROBATCH = Sync.STEP, Sync.MICROBATCH
GLOBAL = {"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}


@pytest.mark.parametrize(
    ("values", "sync", "reason"),
    [
        ({}, STEP, "replicas meet once per optimizer step"),
        (
            {
                "expert_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "tensor_model_parallel_size": 8,
                "context_parallel_size": 4,
                "use_megatron_fsdp": False,
                "data_parallel_sharding_strategy": "optim_grads_params",  # Megatron's default
                "num_experts": None,
                "moe_router_load_balancing_type": "aux_loss",
            },
            *(STEP, "replicas meet once per optimizer step"),
        ),
        ({"expert_model_parallel_size": 2}, MICROBATCH, "expert parallelism"),
        ({"pipeline_model_parallel_size": 2}, MICROBATCH, "pipeline parallelism"),
        ({"use_megatron_fsdp": True}, MICROBATCH, "parameters are sharded over replicas"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            *(MICROBATCH, "parameters are sharded over replicas"),
        ),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            *(STEP, "replicas meet once per optimizer step"),
        ),
        ({"use_torch_fsdp2": True}, MICROBATCH, "parameters are sharded over replicas"),
        (GLOBAL, MICROBATCH, "global auxiliary loss"),
        (
            {**GLOBAL, "moe_router_load_balancing_type": "global_aux_loss"},
            *(MICROBATCH, "global auxiliary loss"),
        ),
        (
            {"num_experts": None, "moe_router_load_balancing_type": ["global_aux_loss"]},
            *(STEP, "replicas meet once per optimizer step"),
        ),
        ({"num_experts": 8}, STEP, "replicas meet once per optimizer step"),
        (
            {**GLOBAL, "expert_model_parallel_size": 8, "pipeline_model_parallel_size": 4},
            *(MICROBATCH, "expert parallelism, global auxiliary loss, pipeline parallelism"),
        ),
    ],
)
def test_table(values: dict[str, Any], sync: Sync, reason: str) -> None:
    assert sync_of(argparse.Namespace(**values)) == (sync, reason)


def test_the_names_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument that is looked at exists in Megatron's parser, with the value compared."""
    arguments = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr("sys.argv", ["script"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    known = vars(arguments.add_megatron_arguments(parser).parse_args([]))
    for name in (
        "expert_model_parallel_size",
        "pipeline_model_parallel_size",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "num_experts",
    ):
        assert name in known
    strategies = [a for a in parser._actions if a.dest == "data_parallel_sharding_strategy"]
    assert known["data_parallel_sharding_strategy"] in ("optim_grads_params", "no_shard")  # 0.17
    assert "optim_grads_params" in (strategies[0].choices or ())
    kinds = next(a for a in parser._actions if a.dest == "moe_router_load_balancing_type").choices
    assert kinds is not None
    assert "global_aux_loss" in kinds


@pytest.mark.parametrize(
    ("values", "multiple"),
    [
        ({}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "fp8": "hybrid"}, 32),
        ({"tensor_model_parallel_size": 2, "fp8": "hybrid"}, 16),
        ({"context_parallel_size": 4, "fp8": "hybrid", "fp8_recipe": "mxfp8"}, 128),
        ({"context_parallel_size": 2}, 4),
    ],
)
def test_the_multiple_of_every_flag_together(values: dict[str, Any], multiple: int) -> None:
    assert padding_multiple(argparse.Namespace(**values)) == multiple


@pytest.mark.parametrize(
    ("recipe", "size", "padded"), [("delayed", 16, 11488), ("mxfp8", 32, 11520)]
)
def test_a_rank_s_share_in_fp8(recipe: str, size: int, padded: int) -> None:
    """pitfalls.md, FP8 shapes: 11486 tokens, TP 2, sequence parallel."""
    args = argparse.Namespace(
        tensor_model_parallel_size=2, sequence_parallel=True, fp8="hybrid", fp8_recipe=recipe
    )
    assert padded_length(11486, padding_multiple(args)) == padded
    assert padded // 2 % size == 0


def test_megatrons_own_multiples() -> None:
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    from megatron.core.enums import Fp8Recipe

    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        args = argparse.Namespace(fp8="hybrid", fp8_recipe=recipe)
        assert padding_multiple(args) == fp8_utils.get_fp8_align_size(Fp8Recipe[recipe])
