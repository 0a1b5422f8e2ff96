"""Flags of Megatron's parallelisms, and what tests of several of them ask of their runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from megatron_world import Megatron, Run

__all__ = [
    "CP",
    "EP",
    "EXPERTS",
    "LENGTH",
    "MODEL",
    "NO_ROUTER_LOSS",
    "PP",
    "RECOMPUTE",
    "SHARDED",
    "SP",
    "TP",
    "VPP",
    "assert_equal",
    "train_changed",
]

MODEL = ("--num-layers", 4, "--make-vocab-size-divisible-by", 256)
LENGTH = ("--odb", "--train-samples", 25)
"""Four steps of 8, 8, 8 and 1 samples."""

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP, SP = "--context-parallel-size 2", "--sequence-parallel"
EP = "--expert-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
SHARDED, RECOMPUTE = "--use-distributed-optimizer", "--recompute-granularity"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05"
)
NO_ROUTER_LOSS = EXPERTS.replace("aux_loss --moe-aux-loss-coeff 0.05", "none")


def assert_equal(run: Run, expected: Run) -> None:
    """Same samples per step, same losses, same gradient norms."""
    assert [step.all_ids for step in run.steps] == [step.all_ids for step in expected.steps]
    assert run.losses == pytest.approx(expected.losses, abs=1e-5)
    norms, others = ([step.record["grad_norm"] for step in one.steps] for one in (run, expected))
    assert norms == pytest.approx(others, rel=1e-4)


def train_changed(
    megatron: Megatron, flags: tuple[Any, ...], num_ranks: int, *, seed: int, **case: Any
) -> Run:
    """Train steps of 8, 8 and 1 samples, of which half have loss on their first token alone; the
    seed changes what comes behind it.
    """
    fixed, changing = random.Random(0), random.Random(seed)
    items = []
    for at in range(17):
        tokens = [fixed.randrange(1, 300) for _ in range(fixed.randrange(6, 25) + 1)]
        if at % 2:
            tokens[2:] = [changing.randrange(1, 300) for _ in tokens[2:]]
        mask = [1] + [1 - at % 2] * (len(tokens) - 2)
        items.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask})
    run = megatron.train(
        *(*flags, "--odb", "--train-samples", 17, "--eval-iters", 0),
        replicas=num_ranks,
        items=(items, None, None),
        **case,
    )
    packed = [part for replica in run.replicas for step in replica.steps for part in step["ids"]]
    assert any(len(part) > 1 for part in packed)  # samples do share micro-batches
    return run
