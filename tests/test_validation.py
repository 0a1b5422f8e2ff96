"""What `--odb` sets and refuses, row by row, and that each row is refused by a flag's name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron_world import Megatron

from odb_megatron.megatron import validation
from odb_megatron.megatron.config import OdbConfig, add_odb_arguments
from odb_megatron.megatron.validation import RULES, refuse_unsupported, set_needs
from odb_megatron.megatron.versions import megatron_version

pytest_plugins = ["megatron_fixtures"]

OTHER_VERSIONS = {"sequence_packing_scheduler", "use_varlen_dataset"}
"""Names that Megatron 0.19.2 does not have: newer, or gone."""

GOOD: dict[str, Any] = {
    **vars(add_odb_arguments(argparse.ArgumentParser()).parse_args(["--odb"])),
    **dict.fromkeys(("calculate_per_token_loss", "apply_rope_fusion"), True),
    **{"micro_batch_size": 1, "eval_micro_batch_size": 1, "global_batch_size": 8},
    **{"transformer_impl": "local", "seq_length": 128, "dataloader_type": "single"},
    **{"cuda_graph_impl": "none", "num_experts": None, "iterations_to_skip": []},
    **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
    **{"context_parallel_size": 1, "gtp_weight_remat_size": 1, "fp8": None, "fp4": None},
}
TE = {"transformer_impl": "transformer_engine", "fp8": "hybrid"}
MLP = {"cuda_graph_modules": ["mlp"]}
BUDGET = {"odb_pad_to": ["budget"]}
LOCAL = {"cuda_graph_impl": "local", **BUDGET}
GRAPHS = {"cuda_graph_impl": "transformer_engine", **BUDGET}
EXPERTS = {"num_experts": 8}
MEETS = {**EXPERTS, "expert_model_parallel_size": 2}
FLEX = {**MEETS, "moe_token_dispatcher_type": "flex"}
HYBRID = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
NCCL = {**FLEX, "moe_flex_dispatcher_backend": "ncclep"}
OFF = [rule.name for rule in RULES if not rule.values]


def _check(**values: Any) -> None:
    args = argparse.Namespace(**{**GOOD, **values})
    refuse_unsupported(args, OdbConfig.from_args(args))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"save": "msc://bucket/folder"},
        *({"odb_token_budget": 64, "odb_overlong": one} for one in ("truncate", "drop", "solo")),
        {
            **EXPERTS,
            "moe_token_dispatcher_type": "allgather",  # on one replica
            "pipeline_model_parallel_size": 2,
        },
        *({**MEETS, **BUDGET, "moe_token_dispatcher_type": one} for one in ("allgather", "flex")),
        {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
        {**HYBRID, "moe_hybridep_pad_uneven_dispatch_inputs": True},
        {**HYBRID, **BUDGET},
        {**NCCL, **BUDGET, "moe_expert_rank_capacity_factor": 2.0},
        {"tp_comm_overlap": True, **BUDGET},
        TE,
        {**TE, "fp8_recipe": "mxfp8"},
        LOCAL,
        {**GRAPHS, **MLP},
        {**GRAPHS, **MLP, "seq_length": 96, "odb_token_budget": 96},
        {**LOCAL, **MLP, "apply_rope_fusion": False},
        {"odb": False, "odb_loss_per": "token", "sft": True, "micro_batch_size": 4},
    ],
)
def test_nothing_to_refuse(values: dict[str, Any]) -> None:
    _check(**values)


def test_flags_an_older_megatron_does_not_have_are_not_needed() -> None:
    old = {name: value for name, value in GOOD.items() if name.startswith("odb")}
    args = argparse.Namespace(**old, seq_length=128)
    refuse_unsupported(args, OdbConfig.from_args(args))  # raises nothing


BAD: list[tuple[dict[str, Any], str]] = [
    ({"calculate_per_token_loss": False}, "--odb needs --calculate-per-token-loss: without it"),
    ({"micro_batch_size": 2}, "--odb needs --micro-batch-size 1: a packed"),
    ({"eval_micro_batch_size": 4}, "--odb needs --eval-micro-batch-size 1: "),
    ({"dataloader_type": "external"}, "--odb needs --dataloader-type single or cyclic: "),
    ({"non_persistent_ckpt_type": "local"}, "--odb needs --non-persistent-ckpt-type global: "),
    ({"gtp_weight_remat_size": 2}, "--odb needs --gtp-weight-remat-size 1: "),
    (
        {**MEETS, "moe_token_dispatcher_type": "allgather"},
        "--odb needs --moe-token-dispatcher-type alltoall or flex: replicas' micro-batches differ "
        "in size (--odb-pad-to budget gives all one)",
    ),
    (HYBRID, "add --moe-hybridep-pad-uneven-dispatch-inputs, or --odb-pad-to budget"),
    (NCCL, "ncclep sizes its buffers by the first micro-batch"),
    ({**HYBRID, **BUDGET, "moe_expert_rank_capacity_factor": 2.0}, "--moe-expert-rank-capacity-"),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap has buffers for --seq-length 128 tokens"),
    ({"tp_comm_overlap": True, **BUDGET, "odb_token_budget": 256}, "a budget of as many"),
    ({"overlap_moe_expert_parallel_comm": True}, "its schedule routes without the padding mask"),
    *(({name: True}, f": drop --{name.replace('_', '-')}") for name in OFF),
    ({"mock_data": True}, "real samples are trained: give --data-path: drop --mock-data"),
    ({"transformer_impl": "inference_optimized"}, "use --transformer-impl local or transf"),
    (
        {"spec": ["a.module", "a_spec"]},
        "local layers of --spec may not take packed samples",
    ),
    ({**EXPERTS, "moe_router_load_balancing_type": "quantile_balancing"}, "use aux_loss, seq_"),
    ({**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "use aux_loss, "),
    ({**EXPERTS, "moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor drops"),
    ({"mtp_num_layers": 1, "context_parallel_size": 2}, "drop --mtp-num-layers or --context"),
    (
        {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "load": "x"},
        "with --mtp-num-layers add --untie-embeddings-and-output-weights",
    ),
    ({"mtp_num_layers": 1, **EXPERTS}, "drop --mtp-num-layers or --num-experts"),
    ({"fp8": "e4m3"}, "--fp8-format is of Transformer Engine's layers: use --transformer-impl "),
    ({**TE, "fp8_recipe": "custom"}, "--fp8-recipe custom does not say"),
    ({"odb_loss_per": "sample", "fp16": True}, "--fp16 has no room for that: use --bf16"),
    (
        {"odb": False, "odb_loss_per": "token", **EXPERTS},
        "--odb-loss-per token weighs the routers' losses by what --odb knows of a step",
    ),
    (
        {"odb_loss_per": "token", "experimental_attention_variant": "dsa"},
        "--odb-loss-per token and --experimental-attention-variant",
    ),
    ({"cuda_graph_impl": "full_iteration"}, "replays a whole step"),
    ({**LOCAL, "cuda_graph_modules": ["full_iteration"]}, "replays a whole step"),
    ({"cuda_graph_impl": "local"}, "add --odb-pad-to budget"),
    ({**LOCAL, "apply_rope_fusion": False}, "drop --no-rope-fusion"),
    (
        {**LOCAL, "attention_backend": SimpleNamespace(name="unfused")},
        "reads lengths on the host",
    ),
    (GRAPHS, "leave attention out with --cuda-graph-modules mlp"),
    ({**GRAPHS, "cuda_graph_modules": ["mlp", "attn"]}, "leave attention out"),
    ({**GRAPHS, **MLP, "odb_token_budget": 256}, "captures --seq-length 128 tokens, and"),
    *(
        ({**one, **MLP, "pipeline_model_parallel_size": 2}, "a graph for each micro-batch under")
        for one in (GRAPHS, LOCAL)
    ),
    (
        {"context_parallel_size": 64, "odb_token_budget": 127, "odb_overlong": "truncate"},
        "every sample is padded to a multiple of 128",
    ),
    ({"odb_token_budget": 64}, "--odb-token-budget 64 is below --seq-length 128"),
    ({"odb_cost": "linear=1e-12,quadratic=1"}, "--odb-cost linear=1e-12,quadratic=1.0: the cost"),
    (
        {
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 2,
            "microbatch_group_size_per_vp_stage": 2,
        },
        "--microbatch-group-size-per-virtual-pipeline-stage micro-batches: 2 is below the 4",
    ),
    ({**BUDGET, "odb_overlong": "solo"}, "or drop --odb-pad-to"),
]


@pytest.mark.parametrize(("values", "text"), BAD, ids=[text for _, text in BAD])
def test_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        _check(**values)
    assert "\n" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_a_folder_that_cannot_be_saved_to(tmp_path: Path) -> None:
    _check(save=str(tmp_path / "new" / "folder"))
    file = tmp_path / "file"
    file.touch()
    for save in (file, file / "below"):
        with pytest.raises(ValueError, match=f"--save {save}: {file} is no folder"):
            _check(save=str(save))
    with (
        mock.patch.object(validation.os, "access", return_value=False),
        pytest.raises(ValueError, match=f"no permission to write to {tmp_path}"),
    ):
        _check(save=str(tmp_path / "new"))


def test_all_that_applies_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="--odb") as caught:
        _check(calculate_per_token_loss=False, micro_batch_size=4, sft=True, odb_token_budget=64)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "--calculate-per-token-loss" in lines[0]
    assert "--odb-overlong truncate, drop or solo" in lines[-1]


DEFAULTS = {
    "calculate_per_token_loss": False,
    "micro_batch_size": None,
    "eval_micro_batch_size": None,
    "moe_token_dispatcher_type": "allgather",
}


def test_what_nobody_asked_for_is_set() -> None:
    args = argparse.Namespace(**{**GOOD, **dict.fromkeys(DEFAULTS)})
    said = set_needs(args, DEFAULTS)
    assert said == "--calculate-per-token-loss --micro-batch-size 1 --eval-micro-batch-size 1"
    assert args == argparse.Namespace(**GOOD, moe_token_dispatcher_type="allgather")
    args = argparse.Namespace(**{**GOOD, **MEETS}, moe_token_dispatcher_type=None)
    assert set_needs(args, {"moe_token_dispatcher_type": "allgather"}) == (
        "--moe-token-dispatcher-type alltoall"
    )


def test_what_was_asked_for_stays_and_so_does_the_baseline() -> None:
    given = {**GOOD, "micro_batch_size": 2, "moe_token_dispatcher_type": "flex"}
    args = argparse.Namespace(**given)
    assert set_needs(args, DEFAULTS) == ""
    assert args == argparse.Namespace(**given)
    args = argparse.Namespace(**dict.fromkeys(DEFAULTS), odb=False)
    assert set_needs(args, DEFAULTS) == ""
    assert args == argparse.Namespace(**DEFAULTS, odb=False)


@pytest.mark.megatron
def test_the_names_are_megatrons(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """A row with a misspelt name would never apply: Megatron prints all of its arguments."""
    printed = megatron.train("--odb", "--train-samples", 1, *data_flags).replicas[0].output
    known = set(re.findall(r"^  (\w+) \.{2,} ", printed, flags=re.MULTILINE))
    assert len(known) > 500
    looked_at = set(GOOD) | {name for bad, _ in BAD for name in bad}
    unknown = (looked_at | {rule.name for rule in RULES}) - known
    if megatron_version()[:2] == (0, 19):
        assert unknown == OTHER_VERSIONS


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--sft",), "--odb and --sft: two packings of the same data"),
        (("--rampup-batch-size", 4, 4, 100), "--rampup-batch-size"),
        (("--odb-token-budget", 32), "--odb-token-budget 32 is below --seq-length 64"),
        (("--odb-epochs", 1), "--odb-epochs and --train-samples each give the run's length"),
        (("--attention-backend", "flash"), "there is no CUDA device"),
        (
            ("--odb-share-long", 2, "--odb-pad-to", "budget"),
            "--odb-share-long 2: micro-batches have fixed sizes",
        ),
    ],
)
def test_nothing_trains(
    megatron: Megatron, data_flags: tuple[str, ...], flags: tuple[Any, ...], text: str
) -> None:
    run = megatron.run("--odb", "--train-samples", 8, *data_flags, *flags)
    for replica in run.replicas:
        assert replica.error.startswith("ValueError: ")
        assert text in replica.error
        assert replica.forwards == {}


@pytest.mark.megatron
def test_planning_flags_need_odb(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    errors = megatron.refused("--train-samples", 8, *data_flags, "--odb-token-budget", 99)
    assert all("--odb-token-budget would do nothing without --odb" in error for error in errors)


@pytest.mark.parametrize("overlong", ["truncate", "drop", "solo"])
def test_a_small_budget_with_a_policy(overlong: str) -> None:
    _check(odb_token_budget=64, odb_overlong=overlong)
