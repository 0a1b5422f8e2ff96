"""Recipes and a forward step of the tests of Megatron-Bridge: tiny models on a CPU.

Must be imported after `odb_megatron.testing.bridge_cpu.activate()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.bridge.data.builders import (
    DirectHFSFTDatasetConfig,
    GPTSFTDatasetConfig,
    HFDatasetSourceConfig,
)
from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training import gpt_step
from megatron.bridge.training.state import GlobalState

from odb_megatron.testing.bridge_cpu import local_layers

__all__ = [
    "forward_step",
    "forwards",
    "tiny_packed_config",
    "tiny_pretrain_config",
    "tiny_sft_config",
]

SEQ_LENGTH = 64
_MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "ffn_hidden_size": 64,
    "seq_length": SEQ_LENGTH,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 256,
    "should_pad_vocab": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "transformer_impl": "local",
    "transformer_layer_spec": local_layers,
}

forwards: list[tuple[bool, int]] = []
"""(training, optimizer steps done) of each forward step in this process."""


def tiny_pretrain_config() -> Any:
    """A pretraining recipe on mock data, as Bridge's recipes are before data is chosen."""
    cfg = vanilla_gpt_pretrain_config()
    for name, value in _MODEL.items():
        setattr(cfg.model, name, value)
    cfg.mixed_precision, cfg.optimizer.bf16 = None, False
    cfg.optimizer.params_dtype = torch.float32
    cfg.train.train_iters = 6
    cfg.train.global_batch_size = 8
    cfg.validation.eval_iters = 1
    cfg.validation.eval_interval = 3
    cfg.dataset.seq_length = SEQ_LENGTH
    cfg.dataset.num_workers = 0
    cfg.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
    cfg.checkpoint.save = None
    cfg.checkpoint.save_interval = None
    cfg.logger.log_interval = 1
    cfg.logger.tensorboard_dir = None
    cfg.scheduler.lr_warmup_iters = 0
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-2, 1e-3
    # Without Transformer Engine and Apex it cannot be loaded (distrib_optimizer.py 839, 0.19.2).
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    cfg.dist.distributed_backend = "gloo"
    return cfg


def tiny_sft_config() -> Any:
    """A fine-tuning recipe with Bridge's own text SFT dataset."""
    cfg = tiny_pretrain_config()
    cfg.dataset = GPTSFTDatasetConfig(
        seq_length=SEQ_LENGTH, dataset_root="", do_test=False, num_workers=0
    )
    return cfg


def tiny_packed_config() -> Any:
    """A recipe whose own dataset packs in the batch."""
    cfg = tiny_pretrain_config()
    cfg.dataset = DirectHFSFTDatasetConfig(
        seq_length=SEQ_LENGTH,
        source=HFDatasetSourceConfig(path_or_dataset="somewhere"),
        enable_in_batch_packing=True,
    )
    return cfg


def forward_step(
    state: GlobalState, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> Any:
    """Bridge's own forward step, counted."""
    forwards.append((torch.is_grad_enabled(), state.train_state.step))
    return gpt_step.forward_step(state, data_iterator, model, return_schedule_plan)
