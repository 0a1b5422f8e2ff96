"""`odb_megatron.megatron.pretrain` as a script, to start from: Megatron's pretrain_gpt.py with ODB.

`--odb` switches on online dynamic batching; without it the same data is trained in padded
micro-batches.

    torchrun --nproc-per-node 8 examples/pretrain_gpt_odb.py --odb --odb-token-budget 16384 \
        --data-path chat.jsonl ...
"""

from __future__ import annotations

from odb_megatron.megatron.pretrain import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt()
