"""`odb_megatron.megatron.replica`: against groups written out by hand.

The first cases are those of parallel_state.py's own docstrings (`initialize_model_parallel`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

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

SCRIPT = """
import json, sys
from argparse import Namespace
from dataclasses import asdict
from odb_megatron.testing import cpu_device
cpu_device.activate()
from odb_megatron.megatron.replica import replica_ranks
found = []
for (tensor, pipeline, context, mapping), world, _ in json.loads(sys.argv[1]):
    args = Namespace(
        world_size=world, tensor_model_parallel_size=tensor, use_tp_pp_dp_mapping=mapping,
        pipeline_model_parallel_size=pipeline, context_parallel_size=context,
    )
    places = [replica_ranks(args, rank=rank) for rank in range(world)]
    found.append([
        {**asdict(place), "leads": place.is_source}
        for place in places
    ])
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parsed: list[Any] = json.loads(done.stdout.rpartition("FOUND")[2])
    return parsed


@pytest.mark.megatron
@pytest.mark.parametrize("at", range(len(CASES)))
def test_every_rank_finds_its_place(found: list[Any], at: int) -> None:
    (tensor, _, context, _), _, replicas = CASES[at]
    places = found[at]
    for stages in replicas:
        ranks = sorted(rank for stage in stages for rank in stage)
        ends = sorted({*stages[0], *stages[-1]})
        for stage in stages:
            for place_in_stage, rank in enumerate(stage):
                place = places[rank]
                assert place["ranks"] == ranks
                assert place["payload_ranks"] == ends
                assert place["leads"] == (rank == ranks[0])
                assert place["reporter"] == stages[-1][0]
                assert place["context_size"] == context
                assert place["context_rank"] == place_in_stage // tensor
                assert place["tensor_rank"] == place_in_stage % tensor
