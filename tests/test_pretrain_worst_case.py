"""`--odb-warmup-worst-case` in `pretrain()`: leaves no trace, and names what does not fit."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from megatron_world import Megatron, Run
from parallel_runs import CP, EP, EXPERTS, LENGTH, MODEL, PP, SHARDED, SP, TP, VPP

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

WARMED_UP: dict[str, tuple[int, str]] = {
    "dp2": (2, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "vpp2x2": (2, VPP),
    "experts": (4, f"{EXPERTS} {EP} {PP} --moe-z-loss-coeff 0.01"),
    "expert_bias_cp2": (
        2,
        f"{EXPERTS.replace('aux_loss', 'global_aux_loss')} {CP} --moe-router-score-function "
        "sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1",
    ),
    "mtp_pp2": (2, f"--mtp-num-layers 1 {PP}"),
    "tp2_sp": (2, f"{TP} {SP} --hidden-dropout 0.1"),
}


@pytest.mark.parametrize("name", WARMED_UP)
def test_the_worst_case_leaves_no_trace(
    megatron: Megatron, data_flags: tuple[str, ...], name: str
) -> None:
    num_ranks, topology = WARMED_UP[name]
    flags = (*MODEL, *LENGTH, *data_flags, *shlex.split(topology))
    plain, warmed = (
        megatron.train(*flags, *more, replicas=num_ranks)
        for more in ((), ("--odb-warmup-worst-case",))
    )
    assert [step.ids for step in warmed.steps] == [step.ids for step in plain.steps]
    assert warmed.losses == plain.losses
    fields = ("grad_norm", "learning_rate", "consumed_samples", "num_micro_batches", "lengths")
    fields += ("reports", "num_shapes", "loss_tokens")
    for step, other in zip(warmed.steps, plain.steps, strict=True):
        assert [step.record[field] for field in fields] == [other.record[field] for field in fields]
    for run, other in zip(warmed.replicas, plain.replicas, strict=True):
        assert (run.final, run.flops) == (other.final, other.flops)
        more = run.forwards.pop(1) - other.forwards.pop(1)
        chunks = 2 if name.startswith("vpp") else 1
        assert more == 2 * chunks * (4 if chunks == 2 else 2 if PP in topology else 1)
        assert run.forwards == other.forwards
    logged = [_router_losses(run.replicas[-1].output) for run in (warmed, plain)]
    assert logged[0] == logged[1]
    assert bool(logged[0]) == ("aux" in topology or "mtp" in topology)
    (line,) = [
        line for line in warmed.replicas[0].output.splitlines() if "odb: worst case: " in line
    ]
    assert "longest samples (1 in 64 tokens, up to 64 each)" in line
    assert "GiB of it set aside for states that the optimizer will allocate" in line
    assert all("worst case" not in replica.output for replica in warmed.replicas[1:])
    _assert_memory_is_reported(warmed, json.loads(megatron.last_log("run.json")))


def _assert_memory_is_reported(run: Run, written: dict[str, Any]) -> None:
    memory, num_shapes = written["memory_bytes"], written["num_shapes"]
    assert 1 << 27 < memory["peak"] < memory["total"]
    assert memory["reserved"] == 0  # there is no device
    assert f"  memory              {written['memory']}\n" in run.summary
    assert written["memory"].endswith(f"; {num_shapes} shapes of micro-batches")
    logs = [replica.steps for replica in run.replicas if replica.steps]
    assert num_shapes == max(log[-1]["num_shapes"] for log in logs)
    assert memory["peak"] >= max(log[-1]["peak_memory_bytes"] for log in logs) > 1 << 27
    for log in logs:
        counts = [step["num_shapes"] for step in log]
        assert counts[0] > 1
        assert counts == sorted(counts)
        lengths = {sum(batch) for step in log for batch in step["lengths"]}
        assert counts[-1] <= len(lengths)  # with padding, several lengths have one shape


def _router_losses(output: str) -> list[str]:
    return re.findall(r"(?:load_balancing_loss|z_loss|mtp_1 loss): \S+", output)


def test_a_worst_case_that_does_not_fit(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """The first stage runs out of memory in its second case, and the last one waits for it."""
    flags = (*MODEL, *LENGTH, *data_flags, *shlex.split(PP), "--odb-warmup-worst-case")
    first, last = megatron.refused(*flags, out_of_memory_in=3)
    reason = (
        "WorstCaseError: out of memory on rank 0 in --odb-warmup-worst-case, with most samples "
        "(8 in 64 tokens, up to 8 each), 2 micro-batches in the pipeline: process peak "
    )
    assert first.startswith(reason)
    assert "lower --odb-token-budget (64), raise tensor, pipeline or context" in first
    assert first.endswith("torch says: no more")
    assert last.startswith("RuntimeError: the worst case could not be run to its end: rank 0 ")
    assert reason in last
    assert "lower --odb-token-budget (64)" in last
