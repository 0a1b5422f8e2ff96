"""`odb_megatron.megatron.replica_ranks`: against the groups that Megatron itself makes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from odb_megatron.testing.gloo import run_replicas

WORLD = 8


def _compare(rank: int) -> list[dict[str, Any]]:
    from megatron.core import parallel_state as mpu

    from odb_megatron.comm.control import ranks_of
    from odb_megatron.megatron.replica_ranks import replica_ranks

    found = []
    for tensor, pipeline, context, mapping in [
        (2, 2, 1, False),
        (2, 2, 1, True),
        (1, 2, 2, False),
        (2, 1, 2, False),
        (2, 2, 2, False),
        (1, 4, 1, True),
        (1, 1, 1, False),
    ]:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            order="tp-cp-ep-pp-dp" if mapping else "tp-cp-ep-dp-pp",
        )
        args = Namespace(
            world_size=WORLD,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            use_tp_pp_dp_mapping=mapping,
        )
        place = replica_ranks(args, rank=rank)
        stage = mpu.get_pipeline_model_parallel_rank()
        others = mpu.get_tensor_model_parallel_rank() + mpu.get_context_parallel_rank()
        leads = stage == others == 0
        found.append(
            {
                "replica": mpu.get_data_parallel_rank(),
                "ranks": place.ranks,
                "size": tensor * pipeline * context,
                "leads": (place.is_leader, leads),
                "uses_tokens": (place.uses_tokens, stage in (0, pipeline - 1)),
                "context": (place.context_rank, mpu.get_context_parallel_rank()),
                "reporter": (
                    place.reporter in ranks_of(mpu.get_pipeline_model_parallel_group())
                    or others > 0
                ),
                "model_parallel": set(ranks_of(mpu.get_model_parallel_group())),
                "reports": place.reporter == rank,
                "is_last": stage == pipeline - 1 and others == 0,
            }
        )
        mpu.destroy_model_parallel()
    return found


@pytest.mark.slow
@pytest.mark.megatron
def test_as_megatrons_groups() -> None:
    results = run_replicas(_compare, WORLD, timeout_s=250, device_layer=True)
    for case in zip(*results, strict=True):
        by_replica: dict[int, set[int]] = {}
        for rank, seen in enumerate(case):
            by_replica.setdefault(seen["replica"], set()).add(rank)
        for rank, seen in enumerate(case):
            assert set(seen["ranks"]) == by_replica[seen["replica"]]
            assert len(seen["ranks"]) == seen["size"]
            assert seen["model_parallel"] <= set(seen["ranks"])
            assert rank in seen["ranks"]
            for name in ("leads", "uses_tokens", "context"):
                assert seen[name][0] == seen[name][1], name
            assert seen["reporter"]
            assert seen["reports"] == seen["is_last"]
