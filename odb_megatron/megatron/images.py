"""Flags of a run whose samples have images, and what they say; imports no Megatron.

Pictures are cut into patches, and their visual tokens counted, on the data side. The vision tower
is the model's: examples/multimodal has one.
"""

from __future__ import annotations

import argparse
import shlex

from odb_megatron.data.pictures import ImageRules

__all__ = ["add_image_arguments", "image_flags", "image_rules", "refuse_unsupported"]

_DEFAULTS = ImageRules()
_FLAGS = (
    (
        *("folder", "folder"),
        "Folder below which pictures lie that a chat file names; nothing outside it is read. "
        "Default: the folder of the chat file.",
    ),
    ("patch-size", "patch", "Side of a patch in pixels."),
    ("merge", "merge", "Side of the squares of patches that become one visual token."),
    ("min-pixels", "min_pixels", "Pictures of fewer pixels are enlarged."),
    ("max-pixels", "max_pixels", "Pictures of more pixels are made smaller."),
    ("token", "token", "The tokenizer's token at visual places."),
)
"""Flag behind `--odb-image-`, field of `ImageRules`, help."""


def add_image_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser (`read_args(extra_args=...)`)."""
    group = parser.add_argument_group(title="images")
    for name, field, meaning in _FLAGS:
        default = getattr(_DEFAULTS, field)
        group.add_argument(f"--odb-image-{name}", type=type(default), default=default, help=meaning)
    return parser


def image_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of this module that differ from their defaults, as a shell takes them."""
    rules = image_rules(args) or _DEFAULTS
    values = {name: (getattr(rules, field), getattr(_DEFAULTS, field)) for name, field, _ in _FLAGS}
    return [
        f"--odb-image-{name} {shlex.quote(str(value))}"
        for name, (value, default) in values.items()
        if value != default
    ]


def image_rules(args: argparse.Namespace) -> ImageRules | None:
    """Return what becomes of pictures; None for a script without images.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    if not hasattr(args, "odb_image_token"):
        return None
    given = {field: f"odb_image_{name.replace('-', '_')}" for name, field, _ in _FLAGS}
    return ImageRules(**{field: getattr(args, name) for field, name in given.items()})


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raise for what does not work with images.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    is_mrope = args.position_embedding_type == "mrope"
    sections = sum(getattr(args, "mrope_section", None) or ())
    rotated = round(args.kv_channels * args.rotary_percent) // 2
    refusals = {
        "samples with images are trained packed: add --odb (Megatron's padded loader carries no "
        "images)": not args.odb,
        "--context-parallel-size above 1 is not supported with images: Megatron cuts the positions "
        "of mrope as one sequence, and packed samples are cut one by one": (
            args.context_parallel_size > 1
        ),
        f"--position-embedding-type {args.position_embedding_type} has no place for images: use "
        "mrope (positions in time, height and width) or rope": (
            args.position_embedding_type not in ("mrope", "rope")
        ),
        "--position-embedding-type mrope needs --no-rope-fusion: the fused kernel counts positions "
        "from 0 in each sample, and would ignore those of images": (
            is_mrope and bool(args.apply_rope_fusion)
        ),
        f"--mrope-section sums to {sections}; expected half of the rotated channels of a head, "
        f"{rotated}": is_mrope and sections != rotated,
        "multi-token prediction embeds shifted tokens by itself, without images: drop "
        "--mtp-num-layers": bool(getattr(args, "mtp_num_layers", None)),
    }
    if found := [message for message, applies in refusals.items() if applies]:
        raise ValueError("\n".join(found))
    image_rules(args)  # refuses sizes
