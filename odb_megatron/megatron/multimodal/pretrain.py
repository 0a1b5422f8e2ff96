"""Pretrains or fine-tunes a GPT with a vision tower on chats with pictures, under `--odb`.

As `odb_megatron.megatron.pretrain`, with the flags of `arguments`. Must not import Megatron or
torch before it runs: data-loader workers import the main module again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main", "pretrain_images"]


def pretrain_images(
    *, datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None
) -> None:
    """Train as `sys.argv` says.

    Args:
        datasets: your own datasets instead of `--data-path`, as `OdbRun` takes them; images as in
            `data.sources.MapSource`.

    Raises:
        SystemExit: flags that cannot be used (2), `--help`, or Megatron's own exits.
    """
    from odb_megatron.megatron.multimodal.arguments import add_image_arguments, refuse_unsupported
    from odb_megatron.megatron.multimodal.run import ImageRun
    from odb_megatron.megatron.setup import read_args
    from odb_megatron.megatron.usage import usage_errors

    with usage_errors():
        args = read_args({"tokenizer_type": "HuggingFaceTokenizer"}, add_image_arguments)
        refuse_unsupported(args)
    run = ImageRun(args, datasets=datasets)
    with run:
        run.pretrain()


def main() -> None:
    """Run `pretrain_images` on the data that the flags name."""
    pretrain_images()


if __name__ == "__main__":
    main()
