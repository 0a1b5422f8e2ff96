"""Pretrains or fine-tunes a GPT with Megatron; `--odb` switches on online dynamic batching.

Megatron's own pretrain_gpt.py in shape: arguments, model configuration, `pretrain()`. Without
`--odb` the same data is trained in padded micro-batches. Must not import Megatron or torch before
it runs: data-loader workers import the main module again.

    torchrun --nproc-per-node 8 -m odb_megatron.megatron.pretrain --odb --odb-token-budget 16384 \
        --data-path chat.jsonl ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main", "pretrain_gpt"]


def pretrain_gpt(
    *, datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None
) -> None:
    """Train as `sys.argv` says.

    Args:
        datasets: your own datasets instead of `--data-path`, as `OdbRun` takes them.

    Raises:
        SystemExit: flags that cannot be used (2), `--help`, or Megatron's own exits.
    """
    from odb_megatron.megatron.compat_pretrain import pretrain_gpt as pretrain
    from odb_megatron.megatron.paths import require_paths
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args

    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    require_paths(args, has_datasets=datasets is not None)
    with OdbRun(args, datasets=datasets) as run:
        pretrain(
            args,
            prepare_model=run.prepare_model,
            datasets_provider=run.datasets_provider,
            forward_step=run.forward_step,
        )


def main() -> None:
    """Run `pretrain_gpt` on the data that the flags name."""
    pretrain_gpt()


if __name__ == "__main__":
    main()
