"""Pretrain or fine-tune a GPT with Megatron; `--odb` switches on online dynamic batching.

Megatron's own pretrain_gpt.py in shape: arguments, model configuration, `pretrain()`. Without
`--odb` the same data is trained in padded micro-batches.

    torchrun --nproc-per-node 8 examples/pretrain_gpt_odb.py --odb --odb-token-budget 16384 \
        --calculate-per-token-loss --micro-batch-size 1 --data-path chat.jsonl ...
"""

from __future__ import annotations

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

from odb_megatron.megatron.compat import require_config_container
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.setup import parse_and_validate_args


def main() -> None:
    """Run the script."""
    require_config_container()
    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    model_config = gpt_config_from_args(args)
    with OdbRun(args) as run:
        run.prepare_model(model_config)
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            run.datasets_provider,
            ModelType.encoder_or_decoder,
            run.forward_step,
        )


if __name__ == "__main__":
    main()
