"""Flags of ModelOpt's stages, and the refusal by name of what cannot work with them.

Must not import ModelOpt or Megatron. Flags that Megatron-LM's `megatron.post_training` has
(`--export-*`, `--modelopt-enabled`) keep their names there, so these have others.
"""

from __future__ import annotations

import argparse
import importlib.util

from odb_megatron.megatron.modelopt.checkpoint import FORMATS

__all__ = [
    "add_distillation_arguments",
    "add_export_arguments",
    "add_quantization_arguments",
    "refuse_unsupported",
    "require_modelopt",
]


def add_quantization_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what `quantize_gpt` takes."""
    group = parser.add_argument_group(title="ModelOpt")
    group.add_argument(
        "--modelopt-quant-cfg",
        default="INT8_DEFAULT_CFG",
        help="ModelOpt's configuration by its name in modelopt.torch.quantization. --train-samples "
        "is the number of samples that calibrate it. Default INT8_DEFAULT_CFG.",
    )
    return parser


def add_distillation_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what `train_gpt` takes."""
    group = parser.add_argument_group(title="ModelOpt")
    group.add_argument(
        "--modelopt-teacher",
        default=None,
        metavar="DIR",
        help="Distil from the model whose checkpoints (torch_dist) are in this folder. Its shape "
        "is read from there.",
    )
    group.add_argument(
        "--modelopt-kd-cfg",
        default=None,
        metavar="FILE.yaml",
        help="Fields of ModelOpt's DistillationConfig. Default: the logits alone.",
    )
    group.add_argument(
        "--modelopt-intermediate-weight",
        type=float,
        default=None,
        help="Weight of hidden states beside the logits' 1 (ModelOpt's own balancer scales them "
        "by ratios of each micro-batch). Default 1.",
    )
    return parser


def add_export_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what `export_gpt` takes."""
    group = parser.add_argument_group(title="ModelOpt")
    group.add_argument(
        "--modelopt-fold-weights",
        action="store_true",
        help="Write the weights as the quantizers round them, instead of as they were trained.",
    )
    return parser


def require_modelopt() -> None:
    """Check that ModelOpt is here.

    Raises:
        ValueError: it is not.
    """
    if importlib.util.find_spec("modelopt") is None:
        raise ValueError(
            "nvidia-modelopt is not installed: pip install '.[megatron,modelopt]' in a checkout of "
            "this repository (or make venv-modelopt there)"
        )


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Check validated arguments of any stage.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    teacher = getattr(args, "modelopt_teacher", None)
    messages = [text for applies, text in _refusals(args, teacher) if applies]
    if messages:
        raise ValueError("\n".join(messages))


def _refusals(args: argparse.Namespace, teacher: str | None) -> list[tuple[bool, str]]:
    pipelined = args.pipeline_model_parallel_size > 1
    return [
        (
            args.virtual_pipeline_model_parallel_size is not None,
            "ModelOpt's state does not know virtual pipeline stages: drop "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank",
        ),
        (
            args.ckpt_format not in FORMATS,
            f"--ckpt-format {args.ckpt_format} does not keep ModelOpt's state: use "
            f"{' or '.join(FORMATS)}",
        ),
        (
            getattr(args, "num_experts", None) is not None,
            "ModelOpt with mixtures of experts is not in this version: idle micro-batches would "
            "count in the experts' ranges: drop --num-experts",
        ),
        (
            bool(getattr(args, "mtp_num_layers", None)),
            "ModelOpt with multi-token prediction is not in this version: drop --mtp-num-layers",
        ),
        (
            teacher is None and getattr(args, "modelopt_kd_cfg", None) is not None,
            "--modelopt-kd-cfg would do nothing without --modelopt-teacher: add it, or drop this",
        ),
        (
            teacher is None and getattr(args, "modelopt_intermediate_weight", None) is not None,
            "--modelopt-intermediate-weight would do nothing without --modelopt-teacher: add it, "
            "or drop this",
        ),
        (
            teacher is not None and pipelined and getattr(args, "odb_pad_to", None) == ["budget"],
            "--modelopt-teacher sends two hidden states between pipeline stages, which tell each "
            "other the shape only where micro-batches differ in length: drop --odb-pad-to budget",
        ),
        (
            teacher is not None and bool(getattr(args, "manual_gc", False)),
            "--modelopt-teacher and --manual-gc run out of memory (megatron/post_training/"
            "model_builder.py 475, core_v0.19.0): drop --manual-gc",
        ),
        (
            teacher is not None and bool(getattr(args, "tp_comm_overlap", False)),
            "ModelOpt's distillation does not work with --tp-comm-overlap: drop it",
        ),
    ]
