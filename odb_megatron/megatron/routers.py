"""Mixtures of experts under varying micro-batch counts: what Megatron's own code needs mended.

Must not change a loss where Megatron's own is right. Of megatron-core (0.17.1 to 0.19.2, the same
text) are replaced during a run, besides what is logged (`compat_metrics.logged_per_micro_batch`):

- `TopKRouter._apply_expert_bias` combines a mask of tokens with a map of tokens and experts as if
  they had one shape (router.py 738, 0.19.2).
- `get_tokens_per_expert_and_token_count` counts the tokens of this rank, where there is a padding
  mask, after the sum over the ranks was written over its counts (moe_utils.py 270 to 277, 0.19.2;
  `_reduce` in mappings.py works in place). So load-balancing losses weigh as many times too much as
  the loss has ranks. Mended, the weight is the mean over those ranks: without padding that is what
  Megatron gives with no mask, and with padding it does not depend on which rank has it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RouterMasks"]


class RouterMasks:
    """Has Megatron's routers treat a padding mask as they should; see the module's text."""

    def __init__(self) -> None:
        self._originals: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Replace both functions."""
        from megatron.core.transformer.moe import router as module

        original_bias = module.TopKRouter._apply_expert_bias
        original_count = module.get_tokens_per_expert_and_token_count
        self._originals = (original_bias, original_count)

        def apply_expert_bias(router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
            if padding_mask is not None and padding_mask.dim() == 1:
                padding_mask = padding_mask.unsqueeze(-1)
            return original_bias(router, routing_map, padding_mask=padding_mask)

        def count(*, reduce_group: Any, with_padding_mask: bool = False, **options: Any) -> Any:
            found = original_count(
                reduce_group=reduce_group, with_padding_mask=with_padding_mask, **options
            )
            if not with_padding_mask:
                return found
            per_expert, _, total = found
            return per_expert, total / reduce_group.size(), total

        module.TopKRouter._apply_expert_bias = apply_expert_bias
        module.get_tokens_per_expert_and_token_count = count

    def remove(self) -> None:
        """Put the originals back; harmless when called twice."""
        if self._originals is None:
            return
        from megatron.core.transformer.moe import router as module

        module.TopKRouter._apply_expert_bias = self._originals[0]
        module.get_tokens_per_expert_and_token_count = self._originals[1]
        self._originals = None
