"""Core attention of Megatron's local layers over packed samples: by flash-attn 2 or 3, or by torch.

Each sample is attended with its padding, which lies behind it: causal attention lets no real token
see it, and its outputs are finite and carry no loss.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
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

__all__ = ["CLASSES", "Flash3Attention", "FlashAttention", "PackedAttention", "TorchAttention"]

_CAUSAL = (None, AttnMaskType.causal, AttnMaskType.padding_causal)
_KNOWN = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"}
_KNOWN |= {"cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "pad_between_seqs"}
_KNOWN |= {"total_tokens", "seq_idx", "tokens_per_sample"}  # Mamba's, the routers'


class PackedAttention(MegatronModule):
    """Causal self-attention over packed samples (THD) or a right-padded batch (SBHD).

    Constructor and forward are those of mcore's `DotProductAttention` (0.18.2, 0.19.2), and the
    two arguments that multi-latent attention adds. It has no parameters, so checkpoints are
    interchangeable.

    Raises:
        ValueError: a feature that it does not have, with the flag that asks for it.
    """

    has_dropout = True
    has_context_parallel = False

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
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        has_context = config.context_parallel_size > 1
        asked = {
            "--context-parallel-size above 1": has_context and not self.has_context_parallel,
            "--attention-dropout above 0": self.dropout > 0 and not self.has_dropout,
            f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
            "--qk-clip": config.qk_clip,
            "--log-max-attention-logit": config.log_max_attention_logit,
            "--fp8-dot-product-attention": config.fp8_dot_product_attention,
            f"{attention_type} attention": attention_type != "self",
        }
        for flag in (flag for flag, is_asked in asked.items() if is_asked):
            raise ValueError(
                f"{type(self).__name__} of local layers does not support {flag}: drop it, or use "
                "--transformer-impl transformer_engine"
            )
        _require_causal(attn_mask_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = pg_collection.tp  # of sharded checkpoints
        self.cp_group: Any = pg_collection.cp if has_context else None
        head_dim = config.kv_channels if k_channels is None else k_channels
        # --apply-query-key-layer-scaling divides and multiplies again, so it needs nothing here.
        self.softmax_scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.window = -1  # keys that a query sees before itself; all of them
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
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
            query: [t, np, hn] if packed (of context parallelism, this rank's chunks), else
                [s, b, np, hn].
            key: [t, ng, hn] or [s, b, ng, hn]; ng divides np.
            value: as `key`, also with another hn.
            attention_mask: unused: only the causal one is left (`--reset-attention-mask` is
                refused), and right padding never influences earlier tokens.
            attn_mask_type: None or causal.
            attention_bias: must be None.
            packed_seq_params: `thd` offsets.

        Returns:
            [t, np * hn] if packed, else [s, b, np * hn].

        Raises:
            ValueError: a bias, another mask or layout, or lengths that do not fit.
        """
        _require_causal(attn_mask_type)
        if attention_bias is not None:
            raise ValueError(
                "attention of packed samples has no attention_bias: use rope or learned_absolute "
                "positions (--position-embedding-type)"
            )
        if packed_seq_params is not None:
            offsets, longest = _offsets(packed_seq_params), packed_seq_params.max_seqlen_q
            packed: Tensor = self._attend(query, key, value, offsets, longest).flatten(1)
            return packed
        length, rows = query.shape[:2]
        if self.cp_group is not None or length != key.size(0):
            raise ValueError(
                f"attention of local layers got {length} queries for {key.size(0)} keys in a "
                f"padded batch, context-parallel size {self.config.context_parallel_size}: it has "
                "context parallelism for packed samples only (--odb), and no key/value cache"
            )
        offsets = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
        offsets = offsets.to(query.device)
        flat = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        out: Tensor = self._attend(flat[0], flat[1], flat[2], offsets, length).flatten(1)
        return out.view(rows, length, -1).transpose(0, 1).contiguous()

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int | None
    ) -> Tensor:
        """Return [t, np, hn], causal within the segments of `offsets`, int32 [segments + 1]."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _dropout_rng(self) -> Iterator[float]:
        """Yield the probability, with the generator that upstream draws attention dropout from."""
        dropout = self.dropout if self.training else 0.0
        draws = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if draws else contextlib.nullcontext():
            yield dropout


class FlashAttention(PackedAttention):
    """`flash_attn_varlen_func` of flash-attn 2; nothing waits for the device."""

    module = "flash_attn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        installed = importlib.import_module(self.module)
        self._kernel: Callable[..., Any] = installed.flash_attn_varlen_func
        wanted = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
        wanted |= {"causal", "window_size", "deterministic", *["dropout_p"] * self.has_dropout}
        if missing := wanted - inspect.signature(self._kernel).parameters.keys():
            raise ValueError(
                f"flash_attn_varlen_func of the installed {self.module} does not take "
                f"{', '.join(sorted(missing))}: install flash-attn 2.6 to 2.8, or 3"
            )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int | None
    ) -> Tensor:
        if longest is None:
            raise ValueError("packed samples come without max_seqlen_q, which flash-attn needs")
        with self._dropout_rng() as dropout:
            out = self._kernel(
                query,
                key,
                value,
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=int(longest),
                max_seqlen_k=int(longest),
                softmax_scale=self.softmax_scale,
                causal=True,
                window_size=(self.window, 0 if self.window >= 0 else -1),
                deterministic=self.config.deterministic_mode,
                **({"dropout_p": dropout} if self.has_dropout else {}),
            )
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # some builds add the softmax
        return attended


class Flash3Attention(FlashAttention):
    """The same of flash-attn 3 (hopper/)."""

    module = "flash_attn_interface"
    has_dropout = False


class TorchAttention(PackedAttention):
    """`scaled_dot_product_attention`, one call per sample: exact, on any device, and for the CPU.

    On a GPU each call waits for the offsets. Under context parallelism keys and values of all ranks
    are gathered.
    """

    has_context_parallel = True

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int | None
    ) -> Tensor:
        size = 1 if self.cp_group is None else self.cp_group.size()
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        ends: list[int] = offsets.tolist()
        if ends[0] != 0 or ends[-1] != size * query.size(0) or sorted(ends) != ends:
            raise ValueError(
                f"cu_seqlens {ends} do not go up from 0 to the pack's {size * query.size(0)} "
                "tokens: samples would overlap or be left out"
            )
        if size > 1:
            whole = np.array(ends)
            order = torch.from_numpy(
                np.concatenate([chunk_indices(whole, size=size, rank=r) for r in range(size)])
            ).to(query.device)
            key, value = (
                gather_from_sequence_parallel_region(tensor, group=self.cp_group)[order.argsort()]
                for tensor in (key, value)
            )
        parts = []
        at = 0
        with self._dropout_rng() as dropout:
            for start, end in pairwise(ends):
                num = (end - start) // (2 * size) if size > 1 else end - start
                for index in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
                    if num:
                        seen = slice(start, start + (index + 1) * num)
                        last = query[at : at + num]
                        parts.append(self._last_of(last, key[seen], value[seen], dropout))
                        at += num
        return torch.cat(parts)

    def _last_of(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attend from the last positions of a sample to all of it up to there."""
        num_queries, num_keys = query.size(0), key.size(0)
        is_windowed = 0 <= self.window < num_keys - 1
        sees = None
        if num_queries < num_keys or is_windowed:
            sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            sees = sees.tril(num_keys - num_queries)
            if is_windowed:
                sees = sees.triu(num_keys - num_queries - self.window)
        heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        out = F.scaled_dot_product_attention(
            heads[0],
            heads[1],
            heads[2],
            attn_mask=sees,
            is_causal=sees is None,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out[0].transpose(0, 1)


CLASSES: dict[str, type[PackedAttention]] = {
    "flash3": Flash3Attention,
    "flash": FlashAttention,
    "torch": TorchAttention,
}


def _require_causal(mask: AttnMaskType | None) -> None:
    if mask not in _CAUSAL:
        raise ValueError(f"attention of packed samples is causal, got {mask}")


def _offsets(packed: PackedSeqParams) -> Tensor:
    """Return where samples start, each with its padding; what else is said must be known here."""
    unknown = [
        field.name
        for field in fields(packed)
        if field.name not in _KNOWN
        and getattr(packed, field.name) is not None
        and getattr(packed, field.name) is not field.default
    ]
    if packed.qkv_format != "thd" or unknown or getattr(packed, "pad_between_seqs", False):
        raise ValueError(
            f"packed samples must come as qkv_format 'thd', got {packed.qkv_format!r}; and with "
            f"nothing that is not known here, got {', '.join(unknown) or 'pad_between_seqs'}"
        )
    offsets, keys = (
        plain if padded is None else padded
        for plain, padded in (
            (packed.cu_seqlens_q, packed.cu_seqlens_q_padded),
            (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded),
        )
    )
    is_known = offsets.dtype == torch.int32 and offsets.dim() == 1 and offsets.numel() > 1
    if not is_known or (keys is not None and keys.shape != offsets.shape):
        raise ValueError(
            "cu_seqlens must be int32 [samples + 1], as many for keys as for queries; got "
            f"{offsets.dtype} {tuple(offsets.shape)} for queries"
        )
    found: Tensor = offsets
    return found
