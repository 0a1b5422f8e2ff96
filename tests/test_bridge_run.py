"""Megatron-Bridge's own `pretrain()` and `finetune()` with ODB, on a CPU.

Every run goes through the launcher, one through `enable`.
"""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec("megatron.bridge"):
    pytest.skip(
        "megatron-bridge is not installed here: make test-bridge builds an environment with it",
        allow_module_level=True,
    )

from bridge_run import Bridge, Run
from megatron_world import ChatFile

pytest_plugins = ["megatron_fixtures", "bridge_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

BUDGET = "dataset.odb.token_budget=96"
TOPOLOGIES = {
    "dp2": (),
    "dp2_sharded": (
        "optimizer.use_distributed_optimizer=true",
        "ddp.use_distributed_optimizer=true",
        "ddp.overlap_grad_reduce=true",
        "ddp.overlap_param_gather=true",
    ),
    "tp2": ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
    "pp2": ("model.pipeline_model_parallel_size=2",),
    "pp2_one_shape": (
        "model.pipeline_model_parallel_size=2",
        "dataset.odb.pad_to=budget",
    ),
    "vpp2x2": (
        "model.pipeline_model_parallel_size=2",
        "model.virtual_pipeline_model_parallel_size=2",
    ),
    "cp2": ("model.context_parallel_size=2",),
}


@pytest.fixture(scope="module")
def saved(bridge: Bridge, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Six steps, saved after the third and the last."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run = bridge.train(BUDGET, f"checkpoint.save={folder}", "checkpoint.save_interval=3")
    return run, folder


def test_pretrain(saved: tuple[Run, Path], chats: ChatFile) -> None:
    run, _ = saved
    assert [record["samples"] for record in run.records] == [8] * 6
    assert [record["consumed_samples"] for record in run.records] == [8, 16, 24, 32, 40, 48]
    assert len(set(chain.from_iterable(run.ids))) == 48
    counts = [record["num_micro_batches"] for record in run.records]
    assert len(set(counts)) > 1, "M must change"
    for rank in run.ranks:
        assert [rank.forwards[step] for step in range(6)] == counts
        assert rank.evaluated > 3  # in steps 3 and 6, and at the end
    for record, ids in zip(run.records, run.ids, strict=True):
        tokens, _, loss_tokens = chats.sums(ids)
        assert (record["tokens"], record["loss_tokens"]) == (tokens, loss_tokens)
        assert record["computed_tokens"] < 8 * 64
    rates = [record["learning_rate"] for record in run.records]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-3)
    assert run.losses[-1] < run.losses[0]
    last = run.ranks[-1].output
    assert "consumed samples:           48" in last
    assert "global batch size:     8" in last
    assert "validation loss at iteration 3 " in last
    assert "validation loss at iteration 6 on validation set" in last


def test_says_what_is_on(saved: tuple[Run, Path], chats: ChatFile) -> None:
    output = saved[0].output
    assert "train.micro_batch_size=1 (was 2)" in output
    assert "odb: set model.calculate_per_token_loss=True (was False), " in output
    assert f"dataset.odb over {chats.path}" in output
    assert "odb: reproduce with dataset.odb.token_budget=96 " in output
    assert "6 optimizer steps, 48 samples (48 of 48 requested)" in output


def test_packing_does_not_change_the_loss(bridge: Bridge, saved: tuple[Run, Path]) -> None:
    run = bridge.train("dataset.odb.token_budget=200")
    assert run.ids == saved[0].ids
    assert run.losses == pytest.approx(saved[0].losses, abs=1e-5)
    counts, before = (
        [record["num_micro_batches"] for record in one.records] for one in (run, saved[0])
    )
    assert sum(counts) < sum(before)


def test_resume(bridge: Bridge, saved: tuple[Run, Path]) -> None:
    before, folder = saved
    run = bridge.train(BUDGET, f"checkpoint.load={folder}", "+checkpoint.ckpt_step=3")
    assert [record["iteration"] for record in run.records] == [4, 5, 6]
    assert run.replica_ids == before.replica_ids[3:]
    assert run.losses == before.losses[3:]
    assert "restoring dataloader state at iteration 3" in run.output
    assert "24 samples" in run.output.rpartition("sources:")[2]  # since it was resumed


def test_exit_interval(bridge: Bridge) -> None:
    """Bridge ends by `sys.exit(0)`, which it takes for a failure; ODB does not."""
    run = bridge.train(BUDGET, "train.exit_interval=2")
    assert len(run.records) == 2
    assert "not reached         32 requested samples" in run.output
    assert "did not end cleanly" not in run.output


def test_bad_record_ends_the_run_on_all_ranks(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user"\n' * 40)
    told = bridge.refused(
        *(BUDGET, "validation.eval_iters=0", f"dataset.odb.data_path={path}"), own_data=False
    )
    assert "chats.jsonl:" in told
    assert "this replica only: the run did not end cleanly" in told


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_finetune(bridge: Bridge, saved: tuple[Run, Path], tuned: Run, name: str) -> None:
    """Every topology starts from one checkpoint and is compared with two replicas."""
    run = _tune(bridge, saved[1], TOPOLOGIES[name])
    assert run.ids == tuned.ids
    assert run.losses == pytest.approx(tuned.losses, abs=1e-5)
    norms, others = ([record["grad_norm"] for record in one.records] for one in (run, tuned))
    assert norms == pytest.approx(others, rel=1e-3)
    assert _evaluations(run) == pytest.approx(_evaluations(tuned), abs=1e-5)
    counts = [record["num_micro_batches"] for record in run.records]
    assert len(set(counts)) > 1
    if not name.startswith("dp2"):
        chunks = 2 if name == "vpp2x2" else 1
        assert [run.ranks[1].forwards[step] for step in range(6)] == [c * chunks for c in counts]


def test_a_middle_stage_without_sample_bounds_would_be_seen(
    bridge: Bridge, saved: tuple[Run, Path], tuned: Run
) -> None:
    """The test above can fail: the second rank has a middle chunk and the last one."""
    run = _tune(bridge, saved[1], TOPOLOGIES["vpp2x2"], merged_on=[1])
    assert abs(run.losses[0] - tuned.losses[0]) > 1e-5


@pytest.fixture(scope="module")
def tuned(bridge: Bridge, saved: tuple[Run, Path]) -> Run:
    """Two replicas."""
    return _tune(bridge, saved[1], ())


def _tune(bridge: Bridge, folder: Path, overrides: tuple[str, ...], **case: object) -> Run:
    return bridge.train(
        BUDGET,
        "validation.eval_interval=100",
        "optimizer.lr=1e-3",
        "optimizer.min_lr=1e-4",
        f"checkpoint.pretrained_checkpoint={folder}",
        *overrides,
        options=("--mode", "finetune"),
        **case,
    )


def _evaluations(run: Run) -> list[float]:
    lines = run.ranks[-1].output.splitlines()
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines if "PPL" in line]
