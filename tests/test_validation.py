"""What `--odb` refuses, row by row, and that each row is refused by a flag's name."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron_world import Megatron

from odb_megatron.megatron import validation
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.validation import _REFUSALS, _REFUSALS_ALWAYS, refuse_unsupported
from odb_megatron.megatron.versions import megatron_version

pytest_plugins = ["megatron_fixtures"]

OTHER_VERSIONS = {"sequence_packing_scheduler", "use_varlen_dataset"}
"""Names that Megatron 0.19.2 does not have: newer, or gone."""

NOT_YET = {
    (0, 18): {
        "logits_load_dir",
        "dataloader_inter_document_masking",
        "gtp_weight_remat_size",
        "override_ckpt_iteration",
    },
    (0, 17): {
        "logits_load_dir",
        "step_batch_size_schedule",
        "eval_micro_batch_size",
        "dataloader_inter_document_masking",
        "gtp_weight_remat_size",
        "override_ckpt_iteration",
    },
}
"""Names that an older Megatron does not have either."""

KERNEL_NAMES = {
    *("apply_rope_fusion", "attention_dropout", "bf16", "cuda_graph_impl", "cuda_graph_modules"),
    *("deterministic_mode", "fp16", "fp4", "fp8", "fp8_recipe", "hybrid_layer_pattern"),
    *("kv_channels",),
    *("log_max_attention_logit", "multi_latent_attention", "position_embedding_type", "qk_clip"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "sequence_parallel", "softmax_type", "window_size"),
}
"""What `kernel_rules` looks at, by the names of 0.19."""

GOOD: dict[str, Any] = {
    "odb": True,
    "odb_token_budget": None,
    "odb_pad_to": None,
    "odb_epochs": None,
    "odb_cost": None,
    "odb_max_patches": None,
    "odb_overlong": "error",
    "odb_template_args": None,
    "odb_loss_per": None,
    "odb_max_bad_records": None,
    "odb_log_dir": None,
    "odb_timeout_s": None,
    "odb_dry_run": None,
    "calculate_per_token_loss": True,
    "micro_batch_size": 1,
    "eval_micro_batch_size": 1,
    "global_batch_size": 8,
    "data_parallel_size": 2,
    "transformer_impl": "local",
    "seq_length": 128,
    "dataloader_type": "single",
    "cuda_graph_impl": "none",
    "num_experts": None,
    "sequence_packing_scheduler": None,
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
    "iterations_to_skip": [],
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "gtp_weight_remat_size": 1,
    "fp8": None,
    "fp4": None,
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
    ({"micro_batch_size": 2, "eval_micro_batch_size": 2}, "--micro-batch-size 1"),
    ({"eval_micro_batch_size": 4}, "--eval-micro-batch-size"),
    ({"sft": True}, "--sft"),
    ({"full_validation": True}, "--eval-iters"),
    ({"transformer_impl": "inference_optimized"}, "--transformer-impl local"),
    ({"dataloader_type": "external"}, "--dataloader-type single or cyclic"),
    ({"dataloader_type": "batch"}, "--dataloader-type single or cyclic"),
    ({"cuda_graph_impl": "local"}, "add --odb-pad-to budget"),
    ({"trust_remote_code": True}, "--trust-remote-code"),
    ({"mock_data": True}, "--mock-data"),
    ({"fim_data": True}, "--fim-data"),
    ({"reset_position_ids": True}, "--reset-position-ids"),
    ({"reset_attention_mask": True}, "--reset-attention-mask"),
    ({"eod_mask_loss": True}, "--eod-mask-loss"),
    ({"rampup_batch_size": ["8", "8", "100"]}, "--rampup-batch-size"),
    ({"step_batch_size_schedule": "0:8 100:16"}, "--step-batch-size-schedule"),
    ({"decrease_batch_size_if_needed": True}, "--decrease-batch-size-if-needed"),
    ({"override_ckpt_iteration": 4}, "--ckpt-step"),
    ({"iterations_to_skip": [3]}, "--iterations-to-skip"),
    ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type global"),
    ({"phase_transition_iterations": [5]}, "--phase-transition-iterations"),
    ({"multiple_validation_sets": True}, "--multiple-validation-sets"),
    ({"perform_rl_step": True}, "--perform-rl-step"),
    ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ({"sequence_packing_scheduler": "dp_balanced"}, "--sequence-packing-scheduler"),
    ({"use_varlen_dataset": True}, "--use-varlen-dataset"),
    ({"inprocess_restart": True}, "--inprocess-restart"),
    ({"logits_load_dir": "logits"}, "--logits-load-dir"),
    ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking"),
    (
        {"spec": ["a.module", "a_spec"]},
        "local layers of --spec may not take packed samples of --odb",
    ),
    ({"use_megatron_fsdp": True}, "--use-distributed-optimizer"),
    ({"use_torch_fsdp2": True}, "--use-distributed-optimizer"),
    (
        {"odb_cost": "linear=1e-12,quadratic=1"},
        "--odb-cost linear=1e-12,quadratic=1.0: the cost quadratic is",
    ),
    ({"odb_cost": "linear=1e-12,overhead=1"}, "the cost fixed is 1e+12 tokens"),
    (
        {"num_experts": 8, "moe_router_load_balancing_type": "quantile_balancing"},
        "--moe-router-load-balancing-type quantile_balancing",
    ),
    (
        {"num_experts": 8, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        "--moe-router-load-balancing-type quantile_balancing",
    ),
    ({"num_experts": 8, "moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
    (
        {
            "num_experts": 8,
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": 2,
        },
        "--moe-token-dispatcher-type alltoall",
    ),
    (
        {
            "num_experts": 8,
            "moe_token_dispatcher_type": "flex",
            "pipeline_model_parallel_size": 2,
        },
        "--moe-token-dispatcher-type alltoall",
    ),
    (
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm",
    ),
    (
        {
            "context_parallel_size": 64,
            "tensor_model_parallel_size": 1,
            "odb_token_budget": 127,
            "odb_overlong": "truncate",
        },
        "every sample is padded to a multiple of 128",
    ),
    ({"fp8": "e4m3"}, "--transformer-impl transformer_engine"),
    ({"fp4": "e2m1"}, "--bf16"),
    ({"mtp_num_layers": 1, "context_parallel_size": 2}, "drop --mtp-num-layers, or both"),
    ({"mtp_num_layers": 1, "num_experts": 8}, "drop --mtp-num-layers or --num-experts"),
    ({"gtp_weight_remat_size": 2}, "--gtp-weight-remat-size 1"),
    ({"odb_pad_to": ["budget"], "odb_overlong": "solo"}, "or drop --odb-pad-to"),
    (
        {
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 2,
            "microbatch_group_size_per_vp_stage": 2,
        },
        "micro-batches: 2 is below the 4 pipeline stages",
    ),
    ({"odb_loss_per": "sample", "fp16": True}, "--fp16 has no room for that: use --bf16"),
    (
        {"odb_loss_per": "token", "experimental_attention_variant": "dsa"},
        "--odb-loss-per token and --experimental-attention-variant",
    ),
    ({"odb_token_budget": 64}, "--odb-token-budget 64 is below --seq-length 128"),
]


def _check(**values: Any) -> None:
    args = argparse.Namespace(**{**GOOD, **values})
    refuse_unsupported(args, OdbConfig.from_args(args))


def test_nothing_to_refuse() -> None:
    _check()


def test_flags_an_older_megatron_does_not_have_are_not_needed() -> None:
    needed = {"calculate_per_token_loss", "micro_batch_size", "dataloader_type", "seq_length"}
    old = {k: v for k, v in GOOD.items() if k.startswith("odb") or k in needed}
    args = argparse.Namespace(**old, global_batch_size=8)
    config = OdbConfig.from_args(args)
    refuse_unsupported(args, config)  # raises nothing
    assert config.enabled


@pytest.mark.parametrize(("values", "text"), BAD, ids=[text for _, text in BAD])
def test_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        _check(**values)
    assert "\n" not in str(caught.value)


def test_weights_of_the_padded_baseline() -> None:
    """Router losses are weighed by a step's sum of weights, which only a plan knows beforehand."""
    weighed = {**GOOD, "odb_loss_per": "token", "num_experts": 4}
    config = OdbConfig.from_args(argparse.Namespace(**weighed))
    refuse_unsupported(argparse.Namespace(**weighed), config)
    with pytest.raises(ValueError, match="--odb-loss-per token .*: add --odb, or drop --num-exp"):
        refuse_unsupported(argparse.Namespace(**weighed), replace(config, enabled=False))


def test_every_row_is_covered() -> None:
    """Each refusal applies to one of the cases above."""
    cases = [bad for bad, _ in BAD]
    for refusal in (*_REFUSALS, *_REFUSALS_ALWAYS):
        assert any(refusal.applies(argparse.Namespace(**{**GOOD, **bad})) for bad in cases)


def test_a_folder_that_cannot_be_saved_to(tmp_path: Path) -> None:
    _check(save=None)
    _check(save=str(tmp_path / "new" / "folder"))
    _check(save="msc://bucket/folder")
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
        _check(
            calculate_per_token_loss=False,
            micro_batch_size=4,
            eval_micro_batch_size=4,
            sft=True,
            odb_token_budget=64,
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "--calculate-per-token-loss" in lines[0]
    assert "--odb-overlong truncate, drop or solo" in lines[-1]


@pytest.mark.megatron
def test_the_names_are_megatrons(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """A row with a misspelt name would never apply: Megatron prints all of its arguments."""
    printed = megatron.train("--odb", "--train-samples", 1, *data_flags).replicas[0].output
    known = set(re.findall(r"^  (\w+) \.{2,} ", printed, flags=re.MULTILINE))
    assert len(known) > 500
    looked_at = set(GOOD) | {name for bad, _ in BAD for name in bad}
    assert looked_at - known == OTHER_VERSIONS | NOT_YET.get(megatron_version()[:2], set())
    if megatron_version()[:2] == (0, 19):
        assert KERNEL_NAMES - known == set()


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--sft",), "--odb and --sft are two packings of the same data"),
        (("--rampup-batch-size", 4, 4, 100), "--rampup-batch-size"),
        (("--odb-token-budget", 32), "--odb-token-budget 32 is below --seq-length 64"),
        (("--odb-epochs", 1), "--odb-epochs, --train-samples and --train-iters each give"),
        (("--attention-backend", "flash"), "there is no CUDA device"),
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
