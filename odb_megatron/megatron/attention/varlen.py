"""Core attention of kernels that take cumulative lengths: what is common to all of them.

Must not wait for the device: offsets stay there, and what they say is not looked at, except on the
CPU. Subclasses hold one kernel each.

Samples are told to the kernel with their padding (`cu_seqlens_q_padded`): padding lies behind the
tokens of its sample, so that causal attention never sees it, no kernel needs to know of it, and
what comes out there is finite and without loss.

Shapes: T tokens of a pack, S sequence length, B batch, N heads, G key/value heads (query groups),
D channels per head, K samples. All per tensor-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

__all__ = ["Segments", "VarlenCoreAttention", "packed_segments"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where samples lie in a pack.

    Attributes:
        offsets_K1: int32 [K + 1] on the device, from 0 to T.
        longest: a bound on their lengths, on the host.
    """

    offsets_K1: Tensor
    longest: int


class VarlenCoreAttention(MegatronModule):
    """Causal self-attention over packed samples (THD) or a right-padded batch (SBHD).

    Constructor and forward are those of mcore's `DotProductAttention`
    (megatron/core/transformer/dot_product_attention.py) and the two arguments that multi-latent
    attention adds. It has no parameters, so checkpoints are interchangeable.

    Args:
        config: the transformer's configuration.
        layer_number: 1-based layer number.
        attn_mask_type: must be causal.
        attention_type: must be `"self"`.
        attention_dropout: probability; `config.attention_dropout` if None.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
        k_channels: channels per head of keys; `config.kv_channels` if None.
        v_channels: of values; unused, the tensors say it.
        cp_comm_type: unused.
        pg_collection: unused.

    Attributes:
        backend: its name, for messages.

    Raises:
        ValueError: a feature this backend does not have, with the flag that asks for it.
    """

    backend = ""
    has_dropout = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        layer_number = max(1, layer_number)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        asked = [
            (config.context_parallel_size > 1, "--context-parallel-size above 1"),
            (dropout > 0 and not self.has_dropout, "--attention-dropout above 0"),
            (config.softmax_type != "vanilla", f"--softmax-type {config.softmax_type}"),
            (config.qk_clip, "--qk-clip"),
            (config.log_max_attention_logit, "--log-max-attention-logit"),
            (config.fp8_dot_product_attention, "--fp8-dot-product-attention"),
        ]
        for is_asked, flag in asked:
            if is_asked:
                raise ValueError(
                    f"attention backend {self.backend} does not support {flag}: drop it, or choose "
                    "another backend (--odb-attention)"
                )
        if attention_type != "self" or attn_mask_type not in _CAUSAL:
            raise ValueError(
                f"attention backend {self.backend} has causal self-attention only, got "
                f"{attention_type!r} and attn_mask_type {attn_mask_type.name}: build others with "
                "mcore's own spec"
            )
        self.layer_number = layer_number
        self.dropout = dropout
        head_size = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale
        self.window = -1  # keys that a query sees before itself, all of them
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sample.

        Args:
            query: [T, N, D] if packed, else [S, B, N, D].
            key: [T, G, D] or [S, B, G, D]; G divides N.
            value: as `key`, also with another D.
            attention_mask: unused: it can only be the causal one (`reset_attention_mask` is
                refused at start-up), and right padding never influences earlier tokens.
            attn_mask_type: None or causal.
            attention_bias: must be None.
            packed_seq_params: `thd` offsets.

        Returns:
            [T, N * D] if packed, else [S, B, N * D].

        Raises:
            ValueError: a bias, another mask, another layout, or lengths that do not fit.
        """
        if attention_bias is not None:
            raise ValueError(
                f"attention backend {self.backend} has no attention_bias: use rope or "
                "learned_absolute positions (--position-embedding-type)"
            )
        if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
            raise ValueError(
                f"attention backend {self.backend} got attn_mask_type {attn_mask_type.name}, "
                "supports causal and padding_causal"
            )
        if packed_seq_params is not None:
            where = packed_segments(packed_seq_params, num_tokens=query.size(0))
            packed_out: Tensor = self._attend(query, key, value, where).flatten(1)
            return packed_out
        num_positions, num_rows = query.shape[:2]
        if num_positions != key.size(0):
            raise ValueError(
                f"attention backend {self.backend} got {num_positions} queries for {key.size(0)} "
                "keys: it has no key/value cache, use mcore's own spec for inference"
            )
        offsets = torch.arange(
            0,
            (num_rows + 1) * num_positions,
            num_positions,
            dtype=torch.int32,
            device=query.device,
        )
        rows = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        where = Segments(offsets_K1=offsets, longest=num_positions)
        out: Tensor = self._attend(rows[0], rows[1], rows[2], where).flatten(1)
        return out.view(num_rows, num_positions, out.size(1)).transpose(0, 1).contiguous()

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, where: Segments
    ) -> Any:
        """Return [T, N, D]: the kernel, causal, with the scale and the window of this layer."""
        raise NotImplementedError

    @property
    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0


def packed_segments(packed: PackedSeqParams, *, num_tokens: int) -> Segments:
    """Return the samples of a pack, each with its padding.

    Args:
        packed: `thd` parameters of self-attention.
        num_tokens: T.

    Raises:
        ValueError: another layout; no bound on the lengths; offsets that do not begin at 0 and end
            at T (on a GPU an assertion there: nothing waits for it), or (CPU) decrease.
    """
    if packed.qkv_format != "thd":
        raise ValueError(f"packed samples must come as qkv_format 'thd', got {packed.qkv_format!r}")
    offsets = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else (packed.cu_seqlens_q_padded)
    )
    others = (
        packed.cu_seqlens_kv
        if packed.cu_seqlens_kv_padded is None
        else (packed.cu_seqlens_kv_padded)
    )
    if others is not None and others is not offsets and others.shape != offsets.shape:
        raise ValueError(
            f"self-attention got {others.numel()} offsets of keys for {offsets.numel()} of queries"
        )
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.numel() < 2:
        raise ValueError(
            f"cu_seqlens must be int32 [samples + 1], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if packed.max_seqlen_q is None:
        raise ValueError("packed samples must come with max_seqlen_q, which kernels size grids by")
    if offsets.is_cuda:
        torch._assert_async((offsets[0] == 0) & (offsets[-1] == num_tokens))
    else:
        _check(offsets.tolist(), num_tokens=num_tokens)
    return Segments(offsets_K1=offsets, longest=int(packed.max_seqlen_q))


def _check(offsets: list[int], *, num_tokens: int) -> None:
    if offsets[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens {offsets} do not end at the pack's {num_tokens} tokens: a kernel would "
            "leave what is behind unwritten; end them there"
        )
    if offsets[0] != 0 or sorted(offsets) != offsets:
        raise ValueError(
            f"cu_seqlens {offsets} do not go up from 0: samples would overlap or be left out"
        )
