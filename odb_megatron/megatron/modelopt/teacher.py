"""Builds a frozen teacher beside a student: of its own shape, on the student's layout of ranks.

Its shape is read from its checkpoint's arguments; everything else (parallelism, precision, kernels,
attention backend) is the run's. Must not change Megatron's arguments or what a resume looks at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odb_megatron.megatron.modelopt.checkpoint import is_converted, require_checkpoint

__all__ = ["SHAPE", "build_teacher", "shape_of"]

SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("use_rope_scaling", "rope_scaling_factor", "swiglu", "squared_relu", "normalization"),
    *("norm_epsilon", "apply_layernorm_1p", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    "untie_embeddings_and_output_weights",
)
"""Arguments that a dense GPT's shape depends on (checkpointing.py `load_args_from_checkpoint`)."""

_OTHER = {
    "num_experts": "mixtures of experts",
    "mtp_num_layers": "multi-token prediction",
    "multi_latent_attention": "multi-latent attention",
    "heterogeneous_layers_config_path": "heterogeneous layers",
}


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a model's shape, those that are there."""
    return {name: getattr(args, name) for name in SHAPE if hasattr(args, name)}


def build_teacher(
    args: argparse.Namespace, student: Any, *, build_model: Callable[..., Any]
) -> Any:
    """Build this stage of the teacher and load its weights; every rank calls it.

    Args:
        args: Megatron's; `modelopt_teacher` is the folder of the teacher's checkpoints.
        student: this stage of the student.
        build_model: as for the student, see `OdbRun.build_model`.

    Raises:
        ValueError: no checkpoint, one in another format, or a model that cannot teach this one.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.process_groups_config import ProcessGroupCollection

    folder = _teacher_folder(args)
    saved = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    _check(saved, args, folder)
    own = argparse.Namespace(**{**vars(args), **shape_of(saved)})
    teacher = build_model(
        own,
        pre_process=student.pre_process,
        post_process=student.post_process,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    wanted = teacher.sharded_state_dict(metadata=metadata)
    loaded = dist_checkpointing.load(wanted, str(folder))  # with all that is common to ranks
    teacher.load_state_dict({name: loaded[name] for name in wanted})
    return teacher


def _teacher_folder(args: argparse.Namespace) -> Path:
    from megatron.core import dist_checkpointing

    folder = require_checkpoint(args, "modelopt_teacher")
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ValueError(
            f"--modelopt-teacher: {folder} is not in format torch_dist: save the teacher with "
            "--ckpt-format torch_dist"
        )
    return folder


def _check(saved: argparse.Namespace, args: argparse.Namespace, folder: Path) -> None:
    found = [what for name, what in _OTHER.items() if getattr(saved, name, None)]
    if found:
        raise ValueError(
            f"--modelopt-teacher: the model in {folder} has {', '.join(found)}, which this version "
            "does not build beside a student: give a dense GPT"
        )
    if is_converted(folder):
        raise ValueError(
            f"--modelopt-teacher: {folder} is a model that ModelOpt has converted: give the one it "
            "was made of, or export it first (examples/modelopt/export.py)"
        )
    if saved.padded_vocab_size != args.padded_vocab_size:
        raise ValueError(
            f"--modelopt-teacher: the teacher's vocabulary has {saved.padded_vocab_size} entries "
            f"after padding, the student's {args.padded_vocab_size}: logits can be compared only "
            "with one tokenizer, and one --make-vocab-size-divisible-by and tensor-parallel size "
            "in its padding"
        )
