"""Tensor, sequence, pipeline, virtual-pipeline, context and expert parallelism in `pretrain()`.

Every topology starts from one checkpoint and is compared with two replicas of one rank each, which
`benchmarks/parallel_parity.py` compares with one process. Processes are kept alive between runs.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron_world import ChatFile, Megatron, Run
from parallel_runs import (
    CP,
    EP,
    EXPERTS,
    LENGTH,
    MODEL,
    PP,
    RECOMPUTE,
    SHARDED,
    SP,
    TP,
    VPP,
    assert_equal,
    train_changed,
)

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

TOPOLOGIES: dict[str, tuple[int, str]] = {
    "tp2": (2, TP),
    "tp2_sp": (2, f"{TP} {SP}"),
    "pp2": (2, PP),
    "vpp2x2": (2, VPP),
    "cp2": (2, CP),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "dp2_tp2": (4, TP),
    "dp2_pp2": (4, PP),
    "dp2_cp2": (4, CP),
    "tp2_pp2": (4, f"{TP} {PP}"),
}


@pytest.fixture(scope="module")
def initial(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ...]:
    """Flags of the model and of a checkpoint that any topology loads."""
    folder = tmp_path_factory.mktemp("initial")
    save = ("--save", folder, "--save-interval", 100, "--ckpt-format", "torch_dist")
    megatron.train(*MODEL, "--odb", "--train-samples", 8, *data_flags, *save)
    load = ("--load", folder, "--ckpt-format", "torch_dist", "--finetune")
    return (*MODEL, *load, "--no-load-optim", "--no-load-rng")


@pytest.fixture(scope="module")
def reference(megatron: Megatron, initial: tuple[Any, ...]) -> Run:
    """Two replicas of one rank each."""
    return train_changed(megatron, initial, 2, seed=1)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_same_samples_losses_and_gradients(
    megatron: Megatron, initial: tuple[Any, ...], reference: Run, name: str
) -> None:
    """As the reference, and no sample sees another: half of them have other tokens here, behind
    their only one with loss.
    """
    num_ranks, flags = TOPOLOGIES[name]
    run = train_changed(megatron, (*initial, *shlex.split(flags)), num_ranks, seed=2)
    assert_equal(run, reference)
    for step in run.steps:
        assert (step.record["collectives"], step.record["reports"]) == (2, int("pp" in name))
        assert step.record["bytes_delivered"] >= 4096
        assert (step.record["context_balance"] is not None) == ("cp" in name)
    assert "delivery            2.00 broadcasts (at most 2)" in run.summary
    assert ("  context parallel    attention balance " in run.summary) == ("cp" in name)
    if name.startswith("vpp"):
        assert {step.record["num_micro_batches"] % 2 for step in run.steps} == {0}
    if name.startswith("dp2"):
        assert sum(step.record["idle"] for step in run.steps) > 0


def test_a_stage_that_predicts_further_tokens(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    """It sends what it predicts beside the hidden states; the baseline by Megatron's exchange."""
    flags = (*MODEL, *data_flags, "--mtp-num-layers", 1, "--untie-embeddings-and-output-weights")
    flags += ("--pipeline-model-parallel-size", 4, "--train-samples", 25)
    flags += ("--pipeline-model-parallel-layout", "E|t|t|t|t||m|L")
    padded, packed = (megatron.train(*flags, *odb, replicas=4) for odb in ((), ("--odb",)))
    assert packed.losses[:3] == pytest.approx(padded.losses, abs=1e-5)
    norms, others = ([step.record["grad_norm"] for step in run.steps] for run in (packed, padded))
    assert norms[:3] == pytest.approx(others, rel=1e-4)


def test_a_middle_stage_without_sample_bounds_would_be_seen(
    megatron: Megatron, initial: tuple[Any, ...], reference: Run
) -> None:
    """The tests above can fail."""
    num_ranks, flags = TOPOLOGIES["pp4"]
    flags = (*initial, *shlex.split(flags))
    run = train_changed(megatron, flags, num_ranks, seed=2, merged_on=(1, 2))
    assert abs(run.losses[0] - reference.losses[0]) > 1e-5


def test_the_padded_baseline(
    megatron: Megatron, initial: tuple[Any, ...], data_flags: tuple[str, ...]
) -> None:
    flags = (*initial, "--train-samples", 25, *data_flags)
    alone = megatron.train(*flags)
    assert len(alone.steps) == 3
    for name in ("tp2_sp", "vpp2x2", "dp2_pp2"):
        num_ranks, topology = TOPOLOGIES[name]
        assert_equal(megatron.train(*flags, *shlex.split(topology), replicas=num_ranks), alone)


def test_evaluation(
    megatron: Megatron,
    initial: tuple[Any, ...],
    chats: ChatFile,
    valid_chats: ChatFile,
) -> None:
    flags = (*initial, "--odb", "--train-samples", 8, "--train-data-path", chats.path)
    flags += ("--valid-data-path", valid_chats.path, "--eval-interval", 1, "--eval-iters", 2)
    alone = megatron.train(*flags)
    losses = [loss for _, loss in alone.evaluations]
    assert len(losses) == 2
    for name in ("tp2", "vpp2x2"):
        run = megatron.train(*flags, *shlex.split(TOPOLOGIES[name][1]))
        assert [where for where, _ in run.evaluations] == [where for where, _ in alone.evaluations]
        assert [loss for _, loss in run.evaluations] == pytest.approx(losses, abs=1e-5)


@pytest.fixture(scope="module")
def saved(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[Any, ...], Path, Run]:
    """Flags of a run of two replicas of one rank, its checkpoints, itself."""
    folder = tmp_path_factory.mktemp("saved")
    flags = (*MODEL, "--odb", "--train-samples", 45, *data_flags, "--ckpt-format", "torch_dist")
    run = megatron.train(*flags, "--save", folder, "--save-interval", 2)
    return flags, folder, run


@pytest.mark.parametrize("name", ["cp2", "vpp2x2", "dp2_tp2"])
def test_resume_with_another_topology(
    megatron: Megatron, saved: tuple[tuple[Any, ...], Path, Run], tmp_path: Path, name: str
) -> None:
    """Two replicas of one rank, then the topology, then two replicas again."""
    num_ranks, topology = TOPOLOGIES[name]
    flags, folder, whole = saved
    stop = ("--save", tmp_path, "--save-interval", 100, "--exit-interval", 4)
    load = ("--load", folder, "--ckpt-step", 2)
    middle = megatron.train(*flags, *load, *stop, *shlex.split(topology), replicas=num_ranks)
    last = megatron.train(*flags, "--load", tmp_path)
    steps = [*whole.steps[:2], *middle.steps, *last.steps]
    assert [step.all_ids for step in steps] == [step.all_ids for step in whole.steps]
    assert [step.loss for step in steps] == pytest.approx(whole.losses, abs=1e-5)


def test_a_source_ranks_failure_ends_all_ranks(
    megatron: Megatron, initial: tuple[Any, ...]
) -> None:
    """A record that cannot be read turns up in the second step."""
    num_ranks, flags = TOPOLOGIES["tp2_pp2"]
    good = {"tokens": [1, 2, 3], "labels": [2, 3, 4], "loss_mask": [1, 1, 1]}
    bad = {**good, "loss_mask": [1, 1]}
    errors = megatron.refused(
        *(*initial, "--odb", "--train-samples", 16, "--eval-iters", 0, *shlex.split(flags)),
        replicas=num_ranks,
        items=([good] * 15 + [bad], None, None),
    )
    assert "loss_mask" in errors[0]
    assert all(
        error.startswith("ReplicaFailedError: the source rank of this replica failed: ")
        and "loss_mask" in error
        for error in errors[1:]
    ), errors


def test_a_source_rank_that_cannot_start_ends_all_ranks(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    errors = megatron.refused(
        *("--odb", "--train-samples", 8, *data_flags, *shlex.split(TP)),
        *("--odb-log-dir", tmp_path / "file"),
    )
    assert "the step log" in errors[0]
    assert "the source rank of this replica failed: ValueError: the step log" in errors[1]


def test_ranks_of_a_replica_with_different_arguments(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    others = ("--seed", "7", "--odb-token-budget", "128", "--lr", "0.5")
    flags = (*MODEL, "--odb", "--train-samples", 8, *data_flags, *shlex.split(PP))
    errors = megatron.refused(*flags, rank_flags={1: others})
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: ranks [0, 1] form one replica and were started with ")
    for argument in ("seed is 7", "odb_token_budget is 128", "lr is 0.5"):
        assert f"{argument} on rank 1 and " in errors[0]


def test_replicas_with_different_seeds(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    flags = ("--odb", "--train-samples", 8, *data_flags)
    first, second = megatron.refused(*flags, rank_flags={1: ("--seed", "7")})
    assert first == second
    assert first.startswith("ReplicaFailedError: data is ")
    assert ", --seed 7 on replica 1 and " in first
    assert first.endswith(", --seed 1234 on replica 0")


def test_a_cold_cache(
    megatron: Megatron, chats: ChatFile, valid_chats: ChatFile, tmp_path: Path
) -> None:
    """Megatron's builder of blends waits for all ranks, and writes the index only where built."""
    found = []
    for name, (num_ranks, topology) in {"alone": (2, ""), "tp2_pp2": TOPOLOGIES["tp2_pp2"]}.items():
        run = megatron.train(
            *(*MODEL, *LENGTH, "--data-path", 0.6, chats.path, 0.4, valid_chats.path),
            *("--split", "100,0,0", "--eval-iters", 0, "--data-cache-path", tmp_path / name),
            *shlex.split(topology),
            replicas=num_ranks,
        )
        found.append([step.all_ids for step in run.steps])
        assert list((tmp_path / name).rglob("*.npy"))
    assert found[0] == found[1]
    assert len({ids[:2] for step in found[0] for ids in step}) == 2  # both files


@pytest.mark.parametrize(
    ("num_ranks", "flags", "tolerance"),
    [
        (4, f"{TP} {SP} {SHARDED} --overlap-grad-reduce --overlap-param-gather", 0),
        (2, f"{TP} {RECOMPUTE} full --recompute-method uniform --recompute-num-layers 1", 0),
        (2, f"{PP} {RECOMPUTE} selective", 0),
        (4, f"{PP} {TP} --bf16", 3e-2),
    ],
)  # fmt: skip
def test_the_optimizers_side(
    megatron: Megatron,
    initial: tuple[Any, ...],
    reference: Run,
    num_ranks: int,
    flags: str,
    tolerance: float,
) -> None:
    """Gradients are clipped in all runs: their norm is above `--clip-grad 1.0`."""
    run = train_changed(megatron, (*initial, *shlex.split(flags)), num_ranks, seed=1)
    if tolerance:
        assert run.losses == pytest.approx(reference.losses, abs=tolerance)
    else:
        assert_equal(run, reference)
    assert max(step.record["grad_norm"] for step in reference.steps) > 1.0


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, VPP),
        (2, CP),
        (2, f"{EXPERTS} {EP} --moe-z-loss-coeff 0.01"),
        (4, f"{EXPERTS} {EP} {TP} {SP}"),
    ],
)  # fmt: skip
def test_micro_batches_padded_to_the_budget(
    megatron: Megatron, data_flags: tuple[str, ...], num_ranks: int, flags: str
) -> None:
    """The budget is 64 tokens. One size is what the `allgather` dispatcher takes."""
    flags = (*MODEL, *LENGTH, *data_flags, *shlex.split(flags))
    pads = ["--odb-pad-to", "budget"]
    pads += ["--moe-token-dispatcher-type", "allgather"] if "--num-experts" in flags else []
    plain, padded = (megatron.train(*flags, *more, replicas=num_ranks) for more in ((), pads))
    assert_equal(padded, plain)
    for step in padded.steps:
        record = step.record
        num_micro_batches = record["num_micro_batches"] * len(step.ids)
        assert record["computed_tokens"] == 64 * num_micro_batches > record["tokens"]
    assert [one.record["lengths"] for one in padded.steps] == [
        one.record["lengths"] for one in plain.steps
    ]


ON_THE_CPU = "/testing/|packed_attention"


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(1, ""), (2, f"{TP} {SP}"), (2, PP), (2, CP), (2, f"{EXPERTS} {EP} --moe-z-loss-coeff 0.01")],
)
def test_nothing_of_ours_waits_for_the_device(
    megatron: Megatron, data_flags: tuple[str, ...], num_ranks: int, flags: str
) -> None:
    """No tensor is read on the host, in no step: a loss is copied, and shown with the next step.

    Attention is torch's here, which reads where samples begin; `select` says so.
    """
    run = megatron.train(
        *(*MODEL, *LENGTH, *data_flags, *shlex.split(flags)),
        replicas=num_ranks,
        counts_reads=True,
    )
    assert all(math.isfinite(loss) for loss in run.losses)
    for replica in run.replicas:
        assert [read for read in replica.reads if not re.search(ON_THE_CPU, read)] == []
