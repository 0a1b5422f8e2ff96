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
- `MoEAuxLossAutoScaler.set_loss_scale`: gradients of routers' losses, weighted by tokens, are
  divided by the step's count as all are. Where loss weights are not 0 and 1 that is no number of
  tokens, so the losses are multiplied by what it is for each loss token.
"""

from __future__ import annotations

from typing import Any

from odb_megatron.plan.record import StepTotals

__all__ = ["RouterFixes"]


class RouterFixes:
    """Has Megatron's routers treat padding masks and weights as they should; see the module."""

    def __init__(self) -> None:
        self._originals: tuple[Any, Any, Any] | None = None
        self._weight = 1.0  # that Megatron counts for a loss token

    def begin_step(self, totals: StepTotals) -> None:
        """The trainer is about to run this step."""
        self._weight = (
            totals.loss_weight / totals.num_loss_tokens if totals.num_loss_tokens else 1.0
        )

    def install(self) -> None:
        """Replace the functions."""
        from megatron.core.transformer.moe import router as module

        scaler = module.MoEAuxLossAutoScaler
        original_scale = scaler.set_loss_scale
        original_bias = module.TopKRouter._apply_expert_bias
        original_count = module.get_tokens_per_expert_and_token_count
        self._originals = (original_bias, original_count, original_scale)

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

        def set_loss_scale(scale: Any) -> None:
            original_scale(scale if self._weight == 1 else scale * self._weight)

        scaler.set_loss_scale = staticmethod(set_loss_scale)
        module.TopKRouter._apply_expert_bias = apply_expert_bias
        module.get_tokens_per_expert_and_token_count = count

    def remove(self) -> None:
        """Put the originals back; harmless when called twice."""
        if self._originals is None:
            return
        from megatron.core.transformer.moe import router as module

        module.MoEAuxLossAutoScaler.set_loss_scale = staticmethod(self._originals[2])
        module.TopKRouter._apply_expert_bias = self._originals[0]
        module.get_tokens_per_expert_and_token_count = self._originals[1]
        self._originals = None
