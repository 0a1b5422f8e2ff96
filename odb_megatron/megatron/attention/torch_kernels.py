"""Core attention by torch's own kernels for packed samples: varlen, and flex with a block mask.

Must not compile anything on the CPU, where flex-attention runs as plain operations (and without
gradients, which torch refuses there). Shapes as in `varlen`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from odb_megatron.megatron.attention.varlen import Segments, VarlenCoreAttention

__all__ = ["TorchCoreAttention", "TorchFlexCoreAttention"]


class TorchCoreAttention(VarlenCoreAttention):
    """`torch.nn.attention.varlen.varlen_attn` (torch 2.13): CUDA, half precision, no dropout.

    torch 2.11 has no `enable_gqa`; keys and values are then repeated.
    """

    backend = "torch"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from torch.nn.attention import varlen

        super().__init__(*args, **kwargs)
        self._kernel: Callable[..., Any] = varlen.varlen_attn
        known = inspect.signature(self._kernel).parameters
        if not {"scale", "window_size"} <= known.keys():
            raise ValueError(
                f"attention backend torch needs varlen_attn with scale and window_size, and that "
                f"of torch {torch.__version__} has {', '.join(known)}: use torch 2.11 or later, or "
                "--odb-attention torch_flex"
            )
        self._has_groups = "enable_gqa" in known

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, where: Segments
    ) -> Any:
        options = {}
        if query_TND.size(1) != key_TGD.size(1):
            if self._has_groups:
                options["enable_gqa"] = True
            else:
                times = query_TND.size(1) // key_TGD.size(1)
                key_TGD, value_TGD = (
                    tensor.repeat_interleave(times, dim=1) for tensor in (key_TGD, value_TGD)
                )
        return self._kernel(
            query_TND,
            key_TGD,
            value_TGD,
            where.offsets_K1,
            where.offsets_K1,
            where.longest,
            where.longest,
            scale=self.softmax_scale,
            window_size=(self.window, 0),
            **options,
        )


class TorchFlexCoreAttention(VarlenCoreAttention):
    """`flex_attention` with a block mask of samples: any dtype and head size, slower than varlen.

    All layers of a micro-batch share the mask.
    """

    backend = "torch_flex"

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, where: Segments
    ) -> Any:
        query, key, value = (
            tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_TND, key_TGD, value_TGD)
        )
        attend: Any = flex_attention if query.device.type == "cpu" else _compiled(flex_attention)
        out = attend(
            query,
            key,
            value,
            block_mask=_LAST.of(where.offsets_K1, num_tokens=query.size(2), window=self.window),
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.squeeze(0).transpose(0, 1)


class _LastMask:
    """The block mask of the micro-batch that layers are at: they come with the same offsets."""

    def __init__(self) -> None:
        self._offsets: Tensor | None = None
        self._masks: dict[tuple[int, int], BlockMask] = {}

    def of(self, offsets_K1: Tensor, *, num_tokens: int, window: int) -> BlockMask:
        """Return the mask, made once for a tensor object (whose content does not change)."""
        if offsets_K1 is not self._offsets:
            self._offsets, self._masks = offsets_K1, {}
        if (num_tokens, window) not in self._masks:
            self._masks[num_tokens, window] = _block_mask(offsets_K1, num_tokens, window)
        return self._masks[num_tokens, window]


_LAST = _LastMask()


def _block_mask(offsets_K1: Tensor, num_tokens: int, window: int) -> BlockMask:
    places_T = torch.arange(num_tokens, device=offsets_K1.device)
    sample_T = torch.bucketize(places_T, offsets_K1[1:], right=True)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = (sample_T[query] == sample_T[key]) & (query >= key)
        return within & (query - key <= window) if window >= 0 else within

    make: Any = (
        create_block_mask if offsets_K1.device.type == "cpu" else _compiled(create_block_mask)
    )
    mask: BlockMask = make(sees, None, None, num_tokens, num_tokens, device=offsets_K1.device.type)
    return mask


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled
