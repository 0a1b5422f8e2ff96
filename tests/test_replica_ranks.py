"""`odb_megatron.megatron.replica`: against groups written out by hand.

The first cases are those of parallel_state.py's own docstrings (`initialize_model_parallel`).
"""

from __future__ import annotations

import argparse

import pytest

pytestmark = pytest.mark.megatron

# (tensor, pipeline, context, use_tp_pp_dp_mapping), world size, replicas: ranks by pipeline stage
CASES: list[tuple[tuple[int, int, int, bool], int, list[list[list[int]]]]] = [
    (
        (2, 4, 1, False),
        16,
        [[[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]],
    ),
    ((2, 2, 1, True), 8, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ((1, 2, 2, False), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    ((2, 1, 2, False), 8, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
    ((1, 1, 1, False), 3, [[[0]], [[1]], [[2]]]),
]


@pytest.mark.parametrize(("sizes", "world", "replicas"), CASES)
def test_every_rank_finds_its_place(
    sizes: tuple[int, int, int, bool], world: int, replicas: list[list[list[int]]]
) -> None:
    from odb_megatron.megatron.replica import replica_ranks

    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    names += ("context_parallel_size", "use_tp_pp_dp_mapping")
    args = argparse.Namespace(world_size=world, **dict(zip(names, sizes, strict=True)))
    tensor, _, context, _ = sizes
    for stages in replicas:
        ranks = sorted(rank for stage in stages for rank in stage)
        for stage in stages:
            for place_in_stage, rank in enumerate(stage):
                place = replica_ranks(args, rank=rank)
                assert list(place.ranks) == ranks
                assert list(place.payload_ranks) == sorted({*stages[0], *stages[-1]})
                assert place.is_source == (rank == ranks[0])
                assert place.reporter == stages[-1][0]
                assert place.context_size == context
                assert place.context_rank == place_in_stage // tensor
                assert place.tensor_rank == place_in_stage % tensor
