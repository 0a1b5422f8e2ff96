"""`odb_megatron.megatron.warmup`: which micro-batches, how many, and what the optimizer will take.

That a run is not changed, and what is said when memory does not suffice: `test_pretrain_parallel`.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_megatron.data.worst_case import WorstCase
from odb_megatron.megatron.device_memory import MemoryUse
from odb_megatron.megatron.warmup import WarmUp, num_in_flight, optimizer_bytes, run_cases
from odb_megatron.plan.padding import OverlongPolicy, SizeRule


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "count"),
    [(1, None, None, 1), (4, None, None, 4), (2, 2, None, 4), (4, 3, 8, 16)],
)
def test_the_pipeline_is_full(
    stages: int, chunks: int | None, group: int | None, count: int
) -> None:
    args = argparse.Namespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=group,
    )
    assert num_in_flight(args) == count
    if chunks:  # schedules.py, get_pp_rank_microbatches: passes before the first backward
        warm_up = 2 * (stages - 1) + (chunks - 1) * (group or stages)
        assert warm_up + 1 <= count * chunks


def _config(**values: Any) -> Any:
    defaults = {
        "token_budget": 64,
        "context": 64,
        "overlong": OverlongPolicy.ERROR,
        "size_rule": lambda multiple: SizeRule(multiple=multiple),
    }
    return SimpleNamespace(**{**defaults, **values})


@pytest.mark.parametrize(
    ("config", "long", "most"),
    [
        (_config(), (64,), 8),
        (_config(token_budget=96), (64, 32), 8),
        (_config(context=96), (64,), 8),
        (_config(context=96, overlong=OverlongPolicy.SOLO), (96,), 8),
    ],
)
def test_what_a_run_can_have(config: Any, long: tuple[int, ...], most: int) -> None:
    longest, samples = run_cases(argparse.Namespace(global_batch_size=8), config)
    assert longest.lengths == long
    assert len(samples.lengths) == most
    assert sum(samples.lengths) == config.token_budget


def _args(optimizer: str = "adam", **values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"optimizer": optimizer, "sgd_momentum": 0.9, **values})


PRECISE = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.uint8,
}


@pytest.mark.parametrize(
    ("args", "num_bytes"),
    [
        (_args(), 2 * 4 * 100),
        (_args("sgd"), 4 * 100),
        (_args("sgd", sgd_momentum=0.0), 0),
        (_args("lion"), 4 * 100),
        (_args(optimizer_cpu_offload=True), 0),
        (_args(**PRECISE, main_params_dtype=torch.float32), 3 * 100),
        (_args(**PRECISE, main_params_dtype=torch.float16), 5 * 100),
    ],
)
def test_what_the_optimizer_will_allocate(args: argparse.Namespace, num_bytes: int) -> None:
    inner = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(60)), torch.nn.Parameter(torch.zeros(40))]
    )
    part = SimpleNamespace(optimizer=inner)
    assert optimizer_bytes(part, args) == num_bytes
    chained = SimpleNamespace(chained_optimizers=[part, SimpleNamespace(optimizer=None), part])
    assert optimizer_bytes(chained, args) == 2 * num_bytes


def test_adam_allocates_as_much_as_was_set_aside() -> None:
    param = torch.nn.Parameter(torch.zeros(1000))
    inner = torch.optim.AdamW([param])
    expected = optimizer_bytes(SimpleNamespace(optimizer=inner), _args())
    param.grad = torch.ones(1000)
    inner.step()
    states = inner.state[param].values()
    assert sum(state.nbytes for state in states if state.numel() > 1) == expected
    assert optimizer_bytes(SimpleNamespace(optimizer=inner), _args()) == 0
    assert optimizer_bytes(None, _args()) == 0


def test_what_is_said_of_several_ranks() -> None:
    cases = [
        WorstCase(name="longest samples", lengths=(64,)),
        WorstCase(name="most samples", lengths=(8,) * 8),
    ]
    gib = 2**30
    one, other = (
        WarmUp(
            set_aside=set_aside * gib,
            took=tuple(
                (case, MemoryUse(peak=peak * gib, reserved=50 * gib, total=80 * gib))
                for case, peak in zip(cases, peaks, strict=True)
            ),
        )
        for set_aside, peaks in ((2, (40, 30)), (1, (20, 45)))
    )
    most = one.with_numbers(list(map(max, one.numbers(), other.numbers())))
    assert str(most) == (
        "worst case: longest samples (1 in 64 tokens, up to 64 each): peak 40.00 GiB, reserved "
        "50.00 GiB of 80.00 GiB; most samples (8 in 64 tokens, up to 8 each): peak 45.00 GiB, "
        "reserved 50.00 GiB of 80.00 GiB; 2.00 GiB of it set aside for states that the optimizer "
        "will allocate"
    )
    assert str(WarmUp(set_aside=0, took=())).endswith(
        "the optimizer allocates no states on the device"
    )
