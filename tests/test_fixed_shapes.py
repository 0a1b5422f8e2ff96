"""`--odb-pad-to`: shapes over many steps, losses, what is counted.

Megatron's CUDA graphs compare what they were captured with to what they get (cuda_graphs.py
`get_mismatch_errors`, 0.19.2); that comparison is made here, without a GPU.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_world import Megatron
from synthetic_data import Records, rules, single_stream

from odb_megatron.data.feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.wire import StepHeader
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels

pytest_plugins = ["megatron_fixtures"]

CONTEXT, BUDGET, NUM_STEPS = 300, 600, 110
LENGTHS = np.random.RandomState(0).randint(1, CONTEXT - 20, size=8 * NUM_STEPS).tolist()


def _micro_batches(*, sizes: tuple[int, ...] = (), multiple: int = 1) -> list[MicroBatch]:
    """All micro-batches of one of two replicas."""
    config = PlanConfig(
        total=len(LENGTHS),
        global_batch_size=8,
        num_replicas=2,
        token_budget=BUDGET,
        context=CONTEXT,
        sizes=sizes,
        multiple=multiple,
        cost=CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    )
    limits = {"context": CONTEXT, "token_budget": BUDGET, "multiple": multiple}

    def go(channel: ThreadChannel) -> list[MicroBatch]:
        stream = single_stream(Records(LENGTHS), sample_rules=rules(**limits))
        items = list(StepFeed(StepLoader(stream, config, channel=channel)).iterators[0])
        assert sum(isinstance(item, StepHeader) for item in items) == NUM_STEPS
        return [item for item in items if isinstance(item, MicroBatch)]

    first, _ = run_in_threads(go, thread_channels(2))
    if isinstance(first, BaseException):
        raise first
    return first


def _shapes(item: MicroBatch) -> dict[str, Any]:
    found: dict[str, Any] = {"max_seqlen": item.max_seqlen}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = (value.dtype, tuple(value.shape))
    return found


@pytest.mark.parametrize("multiple", [1, 32])
def test_one_shape_in_all_steps(multiple: int) -> None:
    items = _micro_batches(sizes=(BUDGET,), multiple=multiple)
    first = _shapes(items[0])
    assert first["tokens"] == (torch.int64, (1, BUDGET // multiple * multiple))
    assert all(_shapes(item) == first for item in items)
    assert len({len(item.positions) for item in items}) > 1  # guard: contents do vary
    assert len({int(item.cu_seqlens[-1]) for item in items}) > 50


@pytest.mark.megatron
def test_megatrons_cuda_graphs_would_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one shape, type and device, and everything else equal, 100 steps on."""
    from odb_megatron.megatron.forward_step import packed_batch

    graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))

    def errors(one: MicroBatch, other: MicroBatch) -> list[str]:
        packs = [packed_batch(item, has_state_layers=True) for item in (one, other)]
        hidden = [torch.zeros(item.tokens.shape[1], 1, 4) for item in (one, other)]
        captured = SimpleNamespace(
            fwd_graph_input_arg_metas=[graphs.ArgMetadata(hidden[0])],
            fwd_graph_input_kwarg_metas={
                "packed_seq_params": graphs.ArgMetadata(packs[0].packed_seq_params)
            },
        )
        given = {"packed_seq_params": packs[1].packed_seq_params}
        compare = graphs._CudaGraphRunner.get_mismatch_errors
        found: list[str] = compare(captured, (hidden[1],), given)
        return found

    fixed = _micro_batches(sizes=(BUDGET,))
    for item in fixed[1:]:
        assert errors(fixed[0], item) == []
    varying = _micro_batches()
    assert errors(varying[0], varying[1])  # guard: without padding it would not


@pytest.mark.megatron
def test_buckets_are_counted(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """Of both replicas, in each step and in the summary."""
    flags = ("--odb", "--train-samples", 41, *data_flags)
    plain = megatron.train(*flags)
    bucketed = megatron.train(*flags, "--odb-pad-to", 32, 48)
    assert bucketed.losses == pytest.approx(plain.losses, abs=1e-5)
    total = 0
    for number, step in enumerate(bucketed.steps):
        expected = 0
        for replica in bucketed.replicas:
            for lengths in replica.steps[number]["lengths"]:
                expected += min(size for size in (32, 48, 64) if sum(lengths) <= size)
        assert step.record["computed_tokens"] == expected >= step.record["tokens"]
        total += expected
    assert f"computed: {total}" in bucketed.summary
    assert bucketed.steps[-1].record["num_shapes"] in (2, 3)
