"""Flags of a run whose samples have images, and what they say; imports no Megatron.

Pictures are cut into patches, and their visual tokens counted, on the data side. The vision tower
is the model's: examples/multimodal has one.
"""

from __future__ import annotations

import argparse
import shlex

from odb_megatron.data.pictures import IMAGE_TOKEN, ImageRules

__all__ = ["add_image_arguments", "image_flags", "image_rules", "refuse_unsupported"]

_DEFAULTS = ImageRules()


def add_image_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser (`read_args(extra_args=...)`)."""
    group = parser.add_argument_group(title="images")
    group.add_argument(
        "--odb-image-folder",
        default="",
        help="Folder below which pictures lie that a chat file names; nothing outside it is read. "
        "Default: the folder of the chat file.",
    )
    numbers = (
        ("patch-size", _DEFAULTS.patch, "Side of a patch in pixels."),
        ("merge", _DEFAULTS.merge, "Side of the squares of patches that become one visual token."),
        ("min-pixels", _DEFAULTS.min_pixels, "Pictures of fewer pixels are enlarged."),
        ("max-pixels", _DEFAULTS.max_pixels, "Pictures of more pixels are made smaller."),
    )
    for name, default, meaning in numbers:
        group.add_argument(f"--odb-image-{name}", type=int, default=default, help=meaning)
    group.add_argument(
        "--odb-image-token",
        default=IMAGE_TOKEN,
        help="The tokenizer's token at visual places.",
    )
    return parser


def image_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of this module that differ from their defaults, as a shell takes them."""
    if not hasattr(args, "odb_image_token"):
        return []
    defaults = vars(add_image_arguments(argparse.ArgumentParser()).parse_args([]))
    return [
        f"--{name.replace('_', '-')} {shlex.quote(str(getattr(args, name)))}"
        for name, default in defaults.items()
        if getattr(args, name) != default
    ]


def image_rules(args: argparse.Namespace) -> ImageRules | None:
    """Return what becomes of pictures; None for a script without images.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    if not hasattr(args, "odb_image_token"):
        return None
    return ImageRules(
        patch=args.odb_image_patch_size,
        merge=args.odb_image_merge,
        min_pixels=args.odb_image_min_pixels,
        max_pixels=args.odb_image_max_pixels,
        folder=args.odb_image_folder,
        token=args.odb_image_token,
    )


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raise for what does not work with images.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    found = [message for applies, message in _refusals(args) if applies]
    if found:
        raise ValueError("\n".join(found))
    image_rules(args)  # refuses sizes


def _refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    is_mrope = args.position_embedding_type == "mrope"
    sections = sum(getattr(args, "mrope_section", None) or ())
    rotated = round(args.kv_channels * args.rotary_percent) // 2
    return [
        (
            not args.odb,
            "samples with images are trained packed: add --odb (Megatron's padded loader, which "
            "runs without it, carries no images)",
        ),
        (
            args.context_parallel_size > 1,
            "--context-parallel-size above 1 is not supported with images: Megatron cuts the "
            "positions of --position-embedding-type mrope as one sequence, and packed samples are "
            "cut one by one",
        ),
        (
            args.position_embedding_type not in ("mrope", "rope"),
            f"--position-embedding-type {args.position_embedding_type} has no place for images: "
            "use mrope (positions in time, height and width) or rope",
        ),
        (
            is_mrope and bool(args.apply_rope_fusion),
            "--position-embedding-type mrope needs --no-rope-fusion: the fused kernel counts "
            "positions from 0 in each packed sample by itself, and would ignore those of images",
        ),
        (
            is_mrope and sections != rotated,
            f"--mrope-section sums to {sections}; expected half of the rotated channels of a head, "
            f"{rotated}",
        ),
        (
            bool(getattr(args, "mtp_num_layers", None)),
            "multi-token prediction embeds shifted tokens by itself, without images: drop "
            "--mtp-num-layers",
        ),
    ]
