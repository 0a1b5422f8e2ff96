"""Core attention by torch's scaled-dot-product attention, one call per sample.

Must not move data between devices, the cumulative lengths aside. It runs on any device but is meant
for the CPU, where it is the fastest exact way (4096 tokens in 12 segments, forward and backward: 7
times faster than a dense block mask); on a GPU each call waits for the cumulative lengths to reach
the host. Under context parallelism keys and values of all ranks are gathered: correct, not fast.

Shapes: T tokens of a pack, S sequence length, B batch, N heads, G key/value heads (query groups),
D channels per head, K samples. All per tensor-parallel rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from odb_megatron.data.thd import chunk_indices

__all__ = ["CpuCoreAttention", "segment_bounds"]

Bounds = list[tuple[int, int, int]]


class CpuCoreAttention(MegatronModule):
    """Causal self-attention over packed samples (THD) or a right-padded batch (SBHD).

    Constructor and forward are those of mcore's `DotProductAttention`
    (megatron/core/transformer/dot_product_attention.py, the same text in 0.16.1 to 0.19.2), which
    refuses packed samples, and the two arguments that multi-latent attention adds. It has no
    parameters, so checkpoints are interchangeable with it.

    `--apply-query-key-layer-scaling` needs nothing: upstream divides the scores by the layer number
    before an fp16 product and multiplies them again in its fp32 softmax; here the softmax
    accumulates in fp32 on unscaled scores, which is the same function.

    Args:
        config: the transformer's configuration.
        layer_number: 1-based layer number.
        attn_mask_type: must be causal.
        attention_type: must be `"self"`.
        attention_dropout: probability; `config.attention_dropout` if None.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
        k_channels: channels per head of keys; `config.kv_channels` if None.
        v_channels: of values; unused, the tensors say it.
        cp_comm_type: unused, keys and values are always gathered.
        pg_collection: its `tp` group is kept for sharded checkpoints, its `cp` group is that of
            context parallelism.

    Raises:
        ValueError: a feature this backend does not have, with the flag that asks for it.
    """

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
        _refuse_unsupported(config)
        if attention_type != "self":
            raise ValueError(
                f"attention backend cpu has self-attention only, got {attention_type!r}: build "
                "cross-attention with mcore's own spec"
            )
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attention backend cpu is causal, got attn_mask_type {attn_mask_type.name}: use "
                "a decoder spec with AttnMaskType.causal"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = pg_collection.tp
        self.cp_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None
        head_dim = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window: int | None = None  # keys that a query sees before itself; None for all
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
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
            query: [T, N, D] if packed (this context-parallel rank's chunks of each sample), else
                [S, B, N, D].
            key: [T, G, D] or [S, B, G, D]; G divides N.
            value: as `key`.
            attention_mask: unused if packed. For a padded batch None, or bool [1 or B, 1, S, S]
                that masks (True) exactly what is above the diagonal, as Megatron's causal masks
                do; right padding needs no mask, since it never influences earlier tokens.
            attn_mask_type: None or causal; `padding_causal` if packed.
            attention_bias: must be None.
            packed_seq_params: `thd` offsets; with `cu_seqlens_q_padded` samples start there and
                `cu_seqlens_q` gives their true lengths. Outputs at padding are zero.

        Returns:
            [T, N * D] if packed, else [S, B, N * D].

        Raises:
            ValueError: a bias, another mask, another layout, or lengths that do not fit.
        """
        if attention_bias is not None:
            raise ValueError(
                "attention backend cpu has no attention_bias: use rope or learned_absolute "
                "positions (--position-embedding-type)"
            )
        if packed_seq_params is not None:
            _refuse_mask_type(attn_mask_type, AttnMaskType.causal, AttnMaskType.padding_causal)
            if self.cp_group is not None:
                return self._packed_chunks(query, key, value, packed_seq_params)
            return self._packed(query, key, value, packed_seq_params)
        if self.cp_group is not None:
            raise ValueError(
                "attention backend cpu has context parallelism for packed samples only: use --odb, "
                "or --context-parallel-size 1"
            )
        _refuse_mask_type(attn_mask_type or self.attn_mask_type, AttnMaskType.causal)
        return self._padded(query, key, value, attention_mask)

    def _packed(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        bounds = segment_bounds(packed, num_tokens=query_TND.size(0))
        width = query_TND.size(1) * value_TGD.size(2)
        query_NTD, key_GTD, value_GTD = (
            tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_TND, key_TGD, value_TGD)
        )
        parts: list[Tensor] = []
        with self._dropout_rng():
            for start, end, padded_end in bounds:
                if end > start:
                    out_NLD = self._attend(
                        query_NTD[:, :, start:end],
                        key_GTD[:, :, start:end],
                        value_GTD[:, :, start:end],
                    )
                    parts.append(out_NLD.squeeze(0).transpose(0, 1).flatten(1))
                if padded_end > end:
                    parts.append(query_TND.new_zeros(padded_end - end, width))
        out = torch.cat(parts)
        if not out.requires_grad:  # an idle micro-batch; gradient hooks wait for every weight
            out = out + _nothing_of(query_NTD, key_GTD, value_GTD)
        return out

    def _packed_chunks(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """As `_packed`, where this rank holds two chunks of each sample (`data.context_parallel`).

        T is the number of tokens of one rank.
        """
        size, rank = self.cp_group.size(), self.cp_group.rank()
        width = query_TND.size(1) * value_TGD.size(2)
        bounds = segment_bounds(packed, num_tokens=size * query_TND.size(0))
        offsets = np.array([start for start, _, _ in bounds] + [size * query_TND.size(0)])
        order_T = torch.from_numpy(
            np.concatenate([chunk_indices(offsets, size=size, rank=r) for r in range(size)])
        ).to(query_TND.device)
        key_GTD, value_GTD = (
            gather_from_sequence_parallel_region(tensor, group=self.cp_group)[order_T.argsort()]
            .transpose(0, 1)
            .unsqueeze(0)
            for tensor in (key_TGD, value_TGD)
        )
        query_NTD = query_TND.transpose(0, 1).unsqueeze(0)
        parts: list[Tensor] = []
        at = 0
        with self._dropout_rng():
            for start, end, padded_end in bounds:
                chunk = (padded_end - start) // (2 * size)
                for index in (rank, 2 * size - 1 - rank):
                    first = start + index * chunk
                    real = max(0, min(chunk, end - first))
                    if real:
                        out_NLD = self._attend_to_earlier(
                            query_NTD[:, :, at : at + real],
                            key_GTD[:, :, start : first + real],
                            value_GTD[:, :, start : first + real],
                        )
                        parts.append(out_NLD.squeeze(0).transpose(0, 1).flatten(1))
                    parts.append(query_TND.new_zeros(chunk - real, width))
                    at += chunk
        # The gradient's collective needs every rank, also one whose chunks are all padding.
        return torch.cat(parts) + _nothing_of(query_NTD, key_GTD, value_GTD)

    def _padded(
        self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, mask: Tensor | None
    ) -> Tensor:
        if query_SBND.size(0) != key_SBGD.size(0):
            raise ValueError(
                f"attention backend cpu got {query_SBND.size(0)} queries for {key_SBGD.size(0)} "
                "keys: it has no key/value cache, use mcore's own spec for inference"
            )
        _refuse_other_than_causal(mask, query_SBND.size(0))
        query_BNSD, key_BGSD, value_BGSD = (
            tensor.permute(1, 2, 0, 3) for tensor in (query_SBND, key_SBGD, value_SBGD)
        )
        with self._dropout_rng():
            out_BNSD = self._attend(query_BNSD, key_BGSD, value_BGSD)
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query_BNLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor) -> Tensor:
        if self.window is not None and query_BNLD.size(2) > self.window + 1:
            return self._attend_to_earlier(query_BNLD, key_BGLD, value_BGLD)
        return F.scaled_dot_product_attention(
            query_BNLD,
            key_BGLD,
            value_BGLD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_BNLD.size(1) != key_BGLD.size(1),
        )

    def _attend_to_earlier(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last positions of a sample to all of it up to there."""
        num_queries, num_keys = query.size(2), key.size(2)
        sees_LK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(
            num_keys - num_queries
        )
        if self.window is not None:
            sees_LK = sees_LK.triu(num_keys - num_queries - self.window)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=sees_LK,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )

    @contextlib.contextmanager
    def _dropout_rng(self) -> Iterator[None]:
        """The generator upstream draws attention dropout from (dot_product_attention.py 0.19.2)."""
        if not self.training or self.dropout == 0.0 or self.config.sequence_parallel:
            yield
            return
        with tensor_parallel.get_cuda_rng_tracker().fork():
            yield


def _nothing_of(*tensors: Tensor) -> Tensor:
    """Return 0 with a gradient (of 0) to each tensor, [1, heads, T, D]."""
    return torch.stack([tensor[:, :, :0].sum() for tensor in tensors]).sum()


def segment_bounds(packed: PackedSeqParams, *, num_tokens: int) -> Bounds:
    """Where each sample of a pack starts, ends, and where its padding ends.

    Converting the cumulative lengths costs about 1 µs per 100 samples on the CPU, so it is done in
    each layer rather than cached on an object that is Megatron's.

    Args:
        packed: `thd` parameters; `cu_seqlens_q` int32 [K + 1] and, optionally,
            `cu_seqlens_q_padded` int32 [K + 1].
        num_tokens: T, the length of the pack.

    Returns:
        (start, end, padded_end) per sample, covering [0, T) without gaps.

    Raises:
        ValueError: another layout than `thd`, key lengths that differ from query lengths, or
            cumulative lengths that do not fit the pack.
    """
    if packed.qkv_format != "thd":
        raise ValueError(f"packed samples must come as qkv_format 'thd', got {packed.qkv_format!r}")
    _refuse_other_key_lengths(packed)
    ends: list[int] = packed.cu_seqlens_q.tolist()
    offsets = ends if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
    fits = len(ends) >= 2 and len(offsets) == len(ends) and ends[0] == offsets[0] == 0
    if not fits or offsets[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens_q {ends} and its padded form {offsets} must hold a sample, start at 0, "
            f"be equally long, and the latter end at the pack's {num_tokens} tokens"
        )
    lengths = [end - start for start, end in pairwise(ends)]
    bounds = [
        (start, start + length, limit)
        for (start, limit), length in zip(pairwise(offsets), lengths, strict=True)
    ]
    for index, (start, end, limit) in enumerate(bounds):
        if not start <= end <= limit:
            raise ValueError(
                f"sample {index} of the pack has {end - start} tokens from {start} on, but the "
                f"next one starts at {limit}: cu_seqlens_q {ends}, padded {offsets}"
            )
    return bounds


def _refuse_other_key_lengths(packed: PackedSeqParams) -> None:
    for of_query, of_key in (
        (packed.cu_seqlens_q, packed.cu_seqlens_kv),
        (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded),
    ):
        if of_key is of_query or of_key is None:
            continue
        if of_query is None or not torch.equal(of_query, of_key):
            raise ValueError(
                f"attention backend cpu is self-attention: cu_seqlens of keys {of_key} differ "
                f"from those of queries {of_query}"
            )


def _refuse_unsupported(config: TransformerConfig) -> None:
    """Refuse what the configuration asks for and this backend does not compute."""
    asked: list[tuple[bool, str]] = [
        (config.softmax_type != "vanilla", f"--softmax-type {config.softmax_type}"),
        (config.qk_clip, "--qk-clip"),
        (config.log_max_attention_logit, "--log-max-attention-logit"),
        (config.fp8_dot_product_attention, "--fp8-dot-product-attention"),
    ]
    for is_asked, flag in asked:
        if is_asked:
            raise ValueError(
                f"attention backend cpu does not support {flag}: drop it, or choose another "
                "backend (--odb-attention)"
            )


def _refuse_mask_type(mask_type: AttnMaskType | None, *supported: AttnMaskType) -> None:
    if mask_type is not None and mask_type not in supported:
        raise ValueError(
            f"attention backend cpu got attn_mask_type {mask_type.name}, supports "
            f"{' and '.join(each.name for each in supported)} here"
        )


def _refuse_other_than_causal(mask: Any, num_positions: int) -> None:
    """Refuse an explicit mask that says something else than causal (True is masked)."""
    if mask is None:
        return
    above_SS = torch.ones(num_positions, num_positions, dtype=torch.bool, device=mask.device).triu(
        1
    )
    fits = mask.dtype == torch.bool and mask.shape[-2:] == above_SS.shape
    if not fits or not torch.equal(mask, above_SS.expand_as(mask)):
        raise ValueError(
            f"attention backend cpu got an attention_mask of {mask.dtype} {tuple(mask.shape)} that "
            "is not the causal one: pass attention_mask=None (right padding needs none); "
            "--reset-attention-mask is not supported, pack the documents instead"
        )
