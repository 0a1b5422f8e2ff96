"""Pretrains or fine-tunes a GPT with a vision tower on chats with pictures, under `--odb`.

As `odb_megatron.megatron.pretrain`, with the flags of images and of the tower. Data-loader workers
import this module again, so it imports neither torch nor Megatron before it runs.

    torchrun --nproc-per-node 8 examples/multimodal/pretrain_pictures.py --odb \
        --odb-token-budget 16384 --odb-max-patches 32768 --position-embedding-type mrope \
        --mrope-section 16 24 24 --no-rope-fusion --data-path chats.jsonl ...
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of images, and the tower's."""
    from odb_megatron.megatron.images import add_image_arguments

    sizes = {"layers": 2, "hidden-size": 64, "ffn-hidden-size": 128, "attention-heads": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--vision-{name}", type=int, default=default)
    return add_image_arguments(parser)


def vision_shape(args: argparse.Namespace) -> Any:
    """Return the tower's sizes, and tell the planner what a patch costs in it."""
    from image_gpt import VisionShape

    from odb_megatron.megatron.images import image_rules

    rules = image_rules(args)
    assert rules is not None, "the script has image flags"
    shape = VisionShape(
        num_layers=args.vision_layers,
        hidden=args.vision_hidden_size,
        ffn_hidden=args.vision_ffn_hidden_size,
        num_heads=args.vision_attention_heads,
        patch_width=rules.width,
        merge=rules.merge,
        output=args.hidden_size,
        seed=args.seed,
    )
    mlp = (3 if args.swiglu else 2) * args.hidden_size * args.ffn_hidden_size
    layer = 2 * (4 * args.hidden_size**2 + mlp)  # FLOPs of a token, output layer left out
    flops = shape.flops_per_patch(num_patches=rules.max_patches)
    args.odb_patch_tokens = flops / (args.num_layers * layer)
    return shape


def main() -> None:
    """Train as the command line says."""
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.image_run import ImageRun
    from odb_megatron.megatron.images import refuse_unsupported
    from odb_megatron.megatron.setup import read_args

    with usage_errors():
        args = read_args({"tokenizer_type": "HuggingFaceTokenizer"}, add_arguments)
        refuse_unsupported(args)
        vision = vision_shape(args)
    from image_gpt import ImageGPT

    with ImageRun(args) as run:
        run.pretrain(model_class=partial(ImageGPT, vision=vision))


if __name__ == "__main__":
    main()
