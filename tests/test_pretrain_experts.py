"""Experts, expert parallelism and multi-token prediction in `pretrain()`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from megatron_world import Megatron
from parallel_runs import CP, EP, EXPERTS, LENGTH, MODEL, NO_ROUTER_LOSS, PP, SP, TP, train_changed

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

OTHER_MODELS: dict[str, tuple[int, str]] = {
    "ep2_cp2": (2, f"{NO_ROUTER_LOSS} {EP} {CP}"),
    "ep2_pp2": (4, f"{NO_ROUTER_LOSS} {EP} {PP}"),
    "ep2_tp2_sp": (4, f"{NO_ROUTER_LOSS} {EP} {TP} {SP}"),
    "mtp_pp2": (2, f"--mtp-num-layers 1 {PP}"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_no_sample_sees_another(megatron: Megatron, name: str) -> None:
    """Without router losses, which are of a micro-batch as a whole; which tokens go to an expert
    together changes the order of its sums.
    """
    num_ranks, flags = OTHER_MODELS[name]
    run, other = (
        train_changed(megatron, (*MODEL, *shlex.split(flags)), num_ranks, seed=seed)
        for seed in (1, 2)
    )
    assert run.losses == pytest.approx(other.losses, abs=2e-6)
    norms, others = ([step.record["grad_norm"] for step in one.steps] for one in (run, other))
    assert norms == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("topology", [EP, f"{EP} {PP}"])
def test_experts(megatron: Megatron, data_flags: tuple[str, ...], topology: str) -> None:
    num_ranks = 2 if topology == EP else 4
    flags = (*MODEL, *LENGTH, *data_flags, *shlex.split(f"{EXPERTS} {topology}"))
    run = megatron.train(*flags, "--moe-z-loss-coeff", 0.01, replicas=num_ranks)
    assert sum(step.record["idle"] for step in run.steps) > 0
    shares = [step.record["idle_router_share"] for step in run.steps]
    assert 0 < max(shares) < 0.1
    assert f"at most {max(shares):.2%}" in run.summary
    assert "odb: replicas are balanced in each microbatch: expert" in run.replicas[0].output
    assert "nan" not in run.replicas[-1].output.replace("nan iterations", "")


def test_multi_token_prediction(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where sequence parallelism pads samples, since offsets are those with padding, and in
    stages that load a checkpoint of one rank.
    """
    flags = (*MODEL, *LENGTH, *data_flags, "--mtp-num-layers", 1)
    flags += ("--untie-embeddings-and-output-weights",)
    form = ("--ckpt-format", "torch_dist")
    save = (*form, "--save", tmp_path, "--save-interval", 100)
    megatron.train(*flags, "--train-samples", 8, *save, replicas=1)
    load = (*form, "--load", tmp_path, "--finetune", "--no-load-optim", "--no-load-rng")
    runs = [megatron.train(*flags, *load, *shlex.split(e)) for e in ("", f"{TP} {SP}", PP)]
    assert "mtp_1 loss" in runs[-1].replicas[-1].output
    norms = [[step.record["grad_norm"] for step in each.steps] for each in runs]
    for run, norm in zip(runs[1:], norms[1:], strict=True):
        assert run.losses == pytest.approx(runs[0].losses, abs=2e-5)
        assert norm == pytest.approx(norms[0], rel=1e-4)
