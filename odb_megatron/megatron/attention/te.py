"""Core attention by Transformer Engine: mcore's `TEDotProductAttention`, told of samples its way.

Must be imported only where Transformer Engine is installed. Context parallelism (`--cp-comm-type`),
windows, dropout, sinks and multi-latent attention are Transformer Engine's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from odb_megatron.megatron.attention.varlen import packed_segments

__all__ = ["TECoreAttention", "without_padding"]


class TECoreAttention(TEDotProductAttention):
    """`TEDotProductAttention` (megatron/core/extensions/transformer_engine.py, 0.16.1 to 0.19.2).

    Told of padding between samples, Transformer Engine leaves out its FlashAttention backends
    (attention/dot_product_attention/utils.py, v2.9 to v2.18) and, where it has to find out
    (v2.5 to v2.13), waits for the device in every layer. Causal attention does not need to know.

    Raises:
        ValueError: attention itself in FP8.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name, False):
                raise ValueError(
                    f"attention backend te: Transformer Engine has no FP8 attention for packed "
                    "samples (attention/dot_product_attention/utils.py, v2.9 to v2.18): leave "
                    f"{name} out"
                )
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """As upstream; see `without_padding`."""
        if packed_seq_params is not None:
            size = self.config.context_parallel_size
            packed_segments(packed_seq_params, num_tokens=size * query.size(0))
            packed_seq_params = without_padding(packed_seq_params, has_context=size > 1)
        return super().forward(
            query,
            key,
            value,
            attention_mask,
            *args,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


def without_padding(packed: PackedSeqParams, *, has_context: bool) -> PackedSeqParams:
    """Return the same samples, each with its padding as tokens of its own.

    Args:
        packed: of self-attention.
        has_context: whether context parallelism cuts samples: it goes by the padded offsets, which
            are then given too, as the same tensor.
    """
    offsets = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else (packed.cu_seqlens_q_padded)
    )
    known = {field.name for field in dataclasses.fields(packed)}
    is_told = "pad_between_seqs" in known
    padded = offsets if has_context or is_told else None
    changes: dict[str, Any] = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
    }
    if is_told:
        changes["pad_between_seqs"] = False
    if "total_tokens" in known:  # else `__post_init__` counts samples anew, for Mamba layers only
        changes["total_tokens"] = None
    return dataclasses.replace(packed, **changes)
