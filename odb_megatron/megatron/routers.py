"""Mixtures of experts under varying micro-batch counts: what Megatron's own code needs mended.

Must not change a loss. Two things of megatron-core 0.19.2 are replaced during a run: `training_log`
scales router and multi-token-prediction losses by `1 / get_num_microbatches()`, which here counts
samples, not micro-batches; and `TopKRouter._apply_expert_bias` combines a mask of tokens with a map
of tokens and experts as if they had one shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ExpertBiasMask", "logged_per_micro_batch"]


class ExpertBiasMask:
    """Gives routers' expert bias a padding mask of shape [tokens, 1] (router.py 738, 0.19.2)."""

    def __init__(self) -> None:
        self._original: Any = None

    def install(self) -> None:
        """Replace the method."""
        from megatron.core.transformer.moe.router import TopKRouter

        original = self._original = TopKRouter._apply_expert_bias

        def apply_expert_bias(router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
            if padding_mask is not None and padding_mask.dim() == 1:
                padding_mask = padding_mask.unsqueeze(-1)
            return original(router, routing_map, padding_mask=padding_mask)

        TopKRouter._apply_expert_bias = apply_expert_bias

    def remove(self) -> None:
        """Put the original back; harmless when called twice."""
        if self._original is None:
            return
        from megatron.core.transformer.moe.router import TopKRouter

        TopKRouter._apply_expert_bias = self._original
        self._original = None


class _Scaled:
    """An object one of whose methods gets another loss scale."""

    def __init__(self, wrapped: Any, name: str, scale: float) -> None:
        self._wrapped, self._name, self._scale = wrapped, name, scale

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name != self._name:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if args:
                return found(self._scale, *args[1:], **kwargs)
            return found(**{**kwargs, "loss_scale": self._scale})

        return call


@contextmanager
def logged_per_micro_batch(module: Any, count: int) -> Iterator[None]:
    """Have `training_log` average the losses of `count` micro-batches.

    Args:
        module: `megatron.training.training`.
        count: micro-batches that this replica ran in the step.
    """
    originals = {
        name: getattr(module, name)
        for name in ("get_moe_metrics_tracker", "MTPLossLoggingHelper")
        if hasattr(module, name)
    }
    scale = 1 / count
    if (tracker := originals.get("get_moe_metrics_tracker")) is not None:
        module.get_moe_metrics_tracker = lambda: _Scaled(tracker(), "report", scale)
    if (helper := originals.get("MTPLossLoggingHelper")) is not None:
        module.MTPLossLoggingHelper = _Scaled(helper, "track_mtp_metrics", scale)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
