"""Trains a quantized GPT, or distils a teacher, or both, on packed micro-batches.

Data-loader workers import this module again, so it imports neither torch nor Megatron before it
runs. See docs/models.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("use_rope_scaling", "rope_scaling_factor", "swiglu", "squared_relu", "normalization"),
    *("norm_epsilon", "apply_layernorm_1p", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    "untie_embeddings_and_output_weights",
)
"""Arguments that a dense GPT's shape depends on (checkpointing.py `load_args_from_checkpoint`)."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the teacher."""
    from odb_megatron.megatron.modelopt.run import add_modelopt_arguments

    parser.add_argument(
        "--modelopt-teacher",
        default=None,
        metavar="DIR",
        help="Distil from the dense GPT whose checkpoints (torch_dist) are in this folder.",
    )
    return add_modelopt_arguments(parser)


def build_teacher(args: argparse.Namespace, run: Any, folder: Path, student: Any) -> Any:
    """Build this pipeline stage of the teacher, of the shape in its checkpoint, and load it.

    Everything else (parallelism, precision, kernels) is the run's.

    Raises:
        ValueError: a model that cannot teach this one.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.process_groups_config import ProcessGroupCollection

    saved = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    if saved.padded_vocab_size != args.padded_vocab_size:
        raise ValueError(
            f"--modelopt-teacher: the teacher's vocabulary has {saved.padded_vocab_size} entries "
            f"after padding, the student's {args.padded_vocab_size}: logits can be compared only "
            "with one tokenizer, and one --make-vocab-size-divisible-by and tensor-parallel size "
            "in its padding"
        )
    shape = {name: getattr(saved, name) for name in SHAPE if hasattr(saved, name)}
    teacher = run.build_model(
        argparse.Namespace(**{**vars(args), **shape}),
        pre_process=student.pre_process,
        post_process=student.post_process,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    wanted = teacher.sharded_state_dict(metadata=metadata)
    loaded = dist_checkpointing.load(wanted, str(folder))
    teacher.load_state_dict({name: loaded[name] for name in wanted})
    return teacher


def main() -> None:
    """Train as the command line says."""
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.modelopt.checkpoint import is_converted, require_checkpoint
    from odb_megatron.megatron.modelopt.run import ModelOptRun
    from odb_megatron.megatron.setup import parse_and_validate_args

    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"}, add_arguments)
    with usage_errors():
        teacher: Any = None
        if args.modelopt_teacher is not None:
            folder = require_checkpoint(
                argparse.Namespace(load=args.modelopt_teacher, pretrained_checkpoint=None)
            )
            if is_converted(folder):
                raise ValueError(f"--modelopt-teacher {folder} is converted: give a plain GPT")

            def teacher(student: Any) -> Any:
                return build_teacher(args, run, folder, student)

        run = ModelOptRun(args, teacher=teacher)
    with run:
        run.pretrain()


if __name__ == "__main__":
    main()
