"""Pretrain or fine-tune a GPT with Megatron; `--odb` switches on online dynamic batching.

Megatron's own pretrain_gpt.py in shape: arguments, model configuration, `pretrain()`. Without
`--odb` the same data is trained in padded micro-batches.

    torchrun --nproc-per-node 8 examples/pretrain_gpt_odb.py --odb --odb-token-budget 16384 \
        --calculate-per-token-loss --micro-batch-size 1 --data-path chat.jsonl ...
"""

from __future__ import annotations

from odb_megatron.megatron.compat_pretrain import pretrain_gpt
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.setup import parse_and_validate_args


def main() -> None:
    """Run the script."""
    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    with OdbRun(args) as run:
        pretrain_gpt(
            args,
            prepare_model=run.prepare_model,
            datasets_provider=run.datasets_provider,
            forward_step=run.forward_step,
        )


if __name__ == "__main__":
    main()
