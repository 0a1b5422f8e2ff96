"""The 1F1B critical path: known orders, closed forms, and an event simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.simulation.pipeline import critical_path, stage_order


def _names(stage: int, *, num_stages: int, num_chunks: int, num_micro_batches: int) -> str:
    order = stage_order(
        stage,
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_micro_batches=num_micro_batches,
    )
    return " ".join(f"{'FB'[one.is_backward]}{one.chunk}{one.micro_batch}" for one in order)


@pytest.mark.parametrize(
    ("stage", "stages", "chunks", "count", "expected"),
    [
        (0, 1, 1, 2, "F00 B00 F01 B01"),
        (0, 2, 1, 3, "F00 F01 B00 F02 B01 B02"),
        (1, 2, 1, 3, "F00 B00 F01 B01 F02 B02"),
        (0, 4, 1, 2, "F00 F01 B00 B01"),
        (0, 2, 2, 2, "F00 F01 F10 F11 B10 B11 B00 B01"),
        (1, 2, 2, 2, "F00 F01 F10 B10 F11 B11 B00 B01"),
    ],
)
def test_the_order_of_passes(
    stage: int, stages: int, chunks: int, count: int, expected: str
) -> None:
    found = _names(stage, num_stages=stages, num_chunks=chunks, num_micro_batches=count)
    assert found == expected


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(1, 1, 5), (4, 1, 8), (4, 2, 8), (4, 4, 4)]
)
def test_equal_micro_batches_have_the_known_bubble(stages: int, chunks: int, count: int) -> None:
    """(M + (P - 1) / V) passes of a stage: Narayanan et al., arXiv 2104.04473, section 2.2."""
    found = critical_path(np.ones((2, count)), num_stages=stages, num_chunks=chunks)
    assert found == pytest.approx([(count + (stages - 1) / chunks) / stages] * 2)


def _simulated(times: list[float], num_stages: int, num_chunks: int) -> float:
    """Run the stages by the clock: each does its next pass as soon as what it needs has ended."""
    last = num_stages * num_chunks - 1
    plans = [
        [
            (one.is_backward, one.chunk * num_stages + stage, one.micro_batch)
            for one in stage_order(
                stage,
                num_stages=num_stages,
                num_chunks=num_chunks,
                num_micro_batches=len(times),
            )
        ]
        for stage in range(num_stages)
    ]
    ended: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * num_stages
    while any(plans):
        options = []
        for stage, plan in enumerate(plans):
            if not plan:
                continue
            backward, layer, index = plan[0]
            if backward:
                needed = (True, layer + 1, index) if layer < last else (False, last, index)
            else:
                needed = (False, layer - 1, index) if layer else None
            if needed is None or needed in ended:
                start = max(free[stage], ended[needed] if needed else 0.0)
                options.append((start, stage))
        start, stage = min(options)
        backward, layer, index = task = plans[stage].pop(0)
        share = times[index] / (num_stages * num_chunks) * (2 / 3 if backward else 1 / 3)
        ended[task] = free[stage] = start + share
    return max(ended.values())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), chunks=st.integers(1, 3))
def test_unequal_micro_batches(data: st.DataObject, stages: int, chunks: int) -> None:
    chunks = chunks if stages > 1 else 1
    multiple = stages if chunks > 1 else 1
    count = multiple * data.draw(st.integers(1, 3))
    times = data.draw(st.lists(st.floats(0.1, 10), min_size=2 * count, max_size=2 * count))
    found = critical_path(np.array(times).reshape(2, count), num_stages=stages, num_chunks=chunks)
    expected = [_simulated(part, stages, chunks) for part in (times[:count], times[count:])]
    assert found == pytest.approx(expected)
    assert (found >= np.array(times).reshape(2, count).sum(axis=1) / stages - 1e-9).all()
