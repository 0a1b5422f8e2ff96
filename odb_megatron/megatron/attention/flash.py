"""Core attention by flash-attn 2, 3 and 4: `flash_attn_varlen_func` of each.

Must not import flash-attn before a layer is built. Shapes as in `varlen`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

from odb_megatron.megatron.attention.varlen import Segments, VarlenCoreAttention

__all__ = ["Flash3CoreAttention", "Flash4CoreAttention", "FlashCoreAttention"]


class FlashCoreAttention(VarlenCoreAttention):
    """flash-attn 2 (flash_attn/flash_attn_interface.py, v2.6 to v2.8)."""

    backend = "flash"
    has_dropout = True
    module = "flash_attn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernel: Callable[..., Any] = importlib.import_module(
            self.module
        ).flash_attn_varlen_func

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, where: Segments
    ) -> Any:
        with self._dropout_rng():
            out = self._kernel(
                query_TND,
                key_TGD,
                value_TGD,
                cu_seqlens_q=where.offsets_K1,
                cu_seqlens_k=where.offsets_K1,
                max_seqlen_q=where.longest,
                max_seqlen_k=where.longest,
                softmax_scale=self.softmax_scale,
                causal=True,
                **self._options(),
            )
        return out[0] if isinstance(out, tuple) else out

    def _options(self) -> dict[str, Any]:
        """What the versions call differently."""
        return {
            "dropout_p": self._dropout_now,
            "window_size": (self.window, 0 if self.window >= 0 else -1),
            "deterministic": self.config.deterministic_mode,
        }

    @contextlib.contextmanager
    def _dropout_rng(self) -> Iterator[None]:
        """The generator upstream draws attention dropout from (dot_product_attention.py 0.19.2)."""
        if self._dropout_now == 0.0 or self.config.sequence_parallel:
            yield
            return
        with tensor_parallel.get_cuda_rng_tracker().fork():
            yield


class Flash3CoreAttention(FlashCoreAttention):
    """flash-attn 3 (hopper/flash_attn_interface.py): no dropout; some builds return a tuple."""

    backend = "flash3"
    has_dropout = False
    module = "flash_attn_interface"

    def _options(self) -> dict[str, Any]:
        return {
            "window_size": (self.window, 0 if self.window >= 0 else -1),
            "deterministic": self.config.deterministic_mode,
        }


class Flash4CoreAttention(FlashCoreAttention):
    """flash-attn 4 (flash_attn/cute/interface.py): no dropout; None for no window."""

    backend = "flash4"
    has_dropout = False
    module = "flash_attn.cute"

    def _options(self) -> dict[str, Any]:
        return {
            "window_size": (self.window, 0) if self.window >= 0 else (None, None),
            "deterministic": self.config.deterministic_mode,
        }
