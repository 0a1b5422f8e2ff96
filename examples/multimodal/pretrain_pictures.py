"""`odb_megatron.megatron.multimodal.pretrain` as a script, to start from: chats with pictures.

    torchrun --nproc-per-node 8 examples/multimodal/pretrain_pictures.py --odb \
        --odb-token-budget 16384 --odb-max-patches 32768 --position-embedding-type mrope \
        --mrope-section 16 24 24 --no-rope-fusion --data-path chats.jsonl ...
"""

from __future__ import annotations

from odb_megatron.megatron.multimodal.pretrain import pretrain_images

if __name__ == "__main__":
    pretrain_images()
