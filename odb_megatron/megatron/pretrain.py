"""Pretrains or fine-tunes a GPT with Megatron; `--odb` switches on online dynamic batching.

Megatron's own pretrain_gpt.py in shape: arguments, model configuration, `pretrain()`. Without
`--odb` the same data is trained in padded micro-batches. Must not import Megatron or torch before
it runs: data-loader workers import the main module again.

    torchrun --nproc-per-node 8 -m odb_megatron.megatron.pretrain --odb --odb-token-budget 16384 \
        --calculate-per-token-loss --micro-batch-size 1 --data-path chat.jsonl ...
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
    from odb_megatron.megatron.compat import require_config_container

    require_config_container()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args

    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    model_config = gpt_config_from_args(args)
    with OdbRun(args, datasets=datasets) as run:
        run.prepare_model(model_config)
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            run.datasets_provider,
            ModelType.encoder_or_decoder,
            run.forward_step,
        )


def main() -> None:
    """Run `pretrain_gpt` on the data that the flags name."""
    pretrain_gpt()


if __name__ == "__main__":
    main()
