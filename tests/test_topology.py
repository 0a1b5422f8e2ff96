"""`odb_megatron.megatron.topology`: where replicas wait for each other, and multiples."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from odb_megatron.megatron.topology import (
    count_multiple,
    padding_multiple,
    pipeline_of,
    sync_of,
)
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.plan.record import Sync

STEP, MICROBATCH = Sync.STEP, Sync.MICROBATCH
GLOBAL = {"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}


ONCE = (STEP, "replicas meet once per optimizer step")
SHARDED = (MICROBATCH, "parameters are sharded over replicas")
STRATEGY = "data_parallel_sharding_strategy"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, ONCE),
        ({"tensor_model_parallel_size": 8, "context_parallel_size": 4}, ONCE),
        ({"num_experts": 8, "expert_model_parallel_size": 1}, ONCE),
        ({**GLOBAL, "num_experts": None}, ONCE),
        ({"use_megatron_fsdp": False, STRATEGY: "optim_grads_params"}, ONCE),  # the default
        ({"use_megatron_fsdp": True, STRATEGY: "optim_grads"}, ONCE),
        ({"use_megatron_fsdp": True, STRATEGY: "optim_grads_params"}, SHARDED),
        ({"use_megatron_fsdp": True}, SHARDED),
        ({"use_torch_fsdp2": True}, SHARDED),
        ({"pipeline_model_parallel_size": 2}, (MICROBATCH, "pipeline parallelism")),
        (GLOBAL, (MICROBATCH, "global auxiliary loss")),
        (
            {
                "num_experts": 8,
                "moe_router_load_balancing_type": "global_aux_loss",
                "expert_model_parallel_size": 8,
                "pipeline_model_parallel_size": 4,
            },
            (MICROBATCH, "expert parallelism, global auxiliary loss, pipeline parallelism"),
        ),
    ],
)
def test_table(values: dict[str, Any], found: tuple[Sync, str]) -> None:
    assert sync_of(argparse.Namespace(**values)) == found


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
    ("stages", "chunks", "group", "pipeline", "multiple"),
    [
        (1, None, None, Pipeline(), 1),
        (4, None, 4, Pipeline(stages=4), 1),
        (4, 2, None, Pipeline(stages=4, chunks=2), 4),
        (4, 2, 6, Pipeline(stages=4, chunks=2, group=6), 6),
    ],
)
def test_the_pipeline_and_its_multiple(
    stages: int, chunks: int | None, group: int | None, pipeline: Pipeline, multiple: int
) -> None:
    args = argparse.Namespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=group,
    )
    assert pipeline_of(args) == pipeline
    assert count_multiple(args) == multiple


def test_megatrons_own_multiples() -> None:
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    from megatron.core.enums import Fp8Recipe

    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        args = argparse.Namespace(fp8="hybrid", fp8_recipe=recipe)
        assert padding_multiple(args) == fp8_utils.get_fp8_align_size(Fp8Recipe[recipe])
