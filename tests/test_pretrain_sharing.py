"""Samples longer than a micro-batch holds, shared by replicas in `pretrain()`.

Every topology starts from one checkpoint and is compared with one process whose budget holds them.
"""

from __future__ import annotations

import random
import shlex
from typing import Any

import pytest
from megatron_world import Megatron, Run
from parallel_runs import CP, EP, MODEL, NO_ROUTER_LOSS, PP, RECOMPUTE, SP, TP, assert_equal

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

BUDGET, CONTEXT = 64, 256
LONG = ("--seq-length", CONTEXT, "--max-position-embeddings", CONTEXT)

RECOMPUTED = f"{RECOMPUTE} full --recompute-method uniform --recompute-num-layers 1"
CASES: dict[str, tuple[int, str]] = {
    "share2": (2, ""),
    "share4": (4, ""),
    "share4_recomputed": (
        4,
        f"{RECOMPUTE} full --recompute-method uniform --recompute-num-layers 1",
    ),
    "share2_tp2_sp": (4, f"{TP} {SP}"),
    "share2_pp2": (4, PP),
    "share2_cp2": (4, CP),
    "share2_ep2": (2, f"{NO_ROUTER_LOSS} {EP}"),
}


@pytest.fixture(scope="module")
def initial(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of a dense model and of one with experts, and of checkpoints for any topology."""
    found = {}
    for kind, flags in (("dense", ()), ("experts", tuple(shlex.split(NO_ROUTER_LOSS)))):
        folder = tmp_path_factory.mktemp(kind)
        save = ("--save", folder, "--save-interval", 100, "--ckpt-format", "torch_dist")
        length = ("--odb", "--train-samples", 8, "--eval-iters", 0)
        items = (_items(128), None, None)
        megatron.train(*MODEL, *LONG, *flags, *length, *save, items=items, replicas=1)
        load = ("--load", folder, "--ckpt-format", "torch_dist", "--finetune")
        found[kind] = (*MODEL, *LONG, *flags, *load, "--no-load-optim", "--no-load-rng")
    return found


def _items(longest: int) -> list[dict[str, Any]]:
    """Samples of 30 to 61 tokens, and some as long as two or more replicas hold."""
    rng = random.Random(0)
    items = []
    for at in range(33):
        length = rng.randrange(30, 62) if at % 5 else rng.randrange(BUDGET + 4, longest - 8)
        tokens = [rng.randrange(1, 300) for _ in range(length + 1)]
        mask = [float(rng.random() < 0.7) for _ in range(length - 1)]
        items.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": [1.0, *mask]})
    return items


def _train(megatron: Megatron, flags: tuple[Any, ...], longest: int, **case: Any) -> Run:
    length = ("--odb", "--train-samples", 33, "--eval-iters", 0)
    return megatron.train(*flags, *length, items=(_items(longest), None, None), **case)


@pytest.mark.parametrize("name", CASES)
def test_as_one_process_with_a_budget_that_holds_them(
    megatron: Megatron, initial: dict[str, Any], name: str
) -> None:
    num_ranks, flags = CASES[name]
    longest = BUDGET * (4 if "share4" in name else 2)
    budget = ("--odb-token-budget", BUDGET, "--odb-share-long", 8)
    model = initial["experts" if "ep2" in name else "dense"]
    run = _train(megatron, (*model, *shlex.split(flags), *budget), longest, replicas=num_ranks)
    expected = _train(megatron, (*model, "--odb-token-budget", CONTEXT), longest, replicas=1)
    assert_equal(run, expected)
    shared = [step.record["shared"] for step in run.steps]
    assert sum(shared) >= 5
    widths = {k for replica in run.replicas for step in replica.steps for k in step["shares"]}
    assert max(widths) == (4 if "share4" in name else 2)
    if "share4" in name:  # groups of different sizes meet in a micro-batch index
        mixed, logs = False, [replica.steps for replica in run.replicas]
        for step in zip(*logs, strict=True):
            rows = [one["shares"] or [1] * one["num_micro_batches"] for one in step]
            mixed = mixed or any(len({*column}) > 1 for column in zip(*rows, strict=True))
        assert mixed
