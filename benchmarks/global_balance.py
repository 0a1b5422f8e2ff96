"""The global auxiliary loss of several replicas, computed by one process.

Megatron defines it over the micro-batches that replicas run at the same time: the share of tokens
per expert is that of all of them. One process runs them one after the other, so it first runs all
of them without gradients to count, and hands the counts to the runs with gradients. Must not use
process groups, or anything of what ODB mends in routers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["run_together"]

ForwardStep = Callable[..., Any]


@contextmanager
def run_together(forward_step: ForwardStep, count: int) -> Iterator[ForwardStep]:
    """Yield a forward step that takes each `count` micro-batches in a row as run at one time."""
    import torch
    from megatron.core.transformer.moe import router as module

    kind = module.TopKRouter
    originals = kind.routing, kind._apply_global_aux_loss
    counts: dict[Any, Any] = {}  # by router: tokens per expert of the micro-batches together
    before: dict[Any, Any] = {}  # by router: what was added up over the step's earlier ones
    waiting: deque[Any] = deque()

    def routing(self: Any, logits: Any, padding_mask: Any = None) -> Any:
        if not torch.is_grad_enabled():
            flat_mask = None if padding_mask is None else padding_mask.reshape(-1)
            chosen, _ = module.compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.shape[-1]),
                self.topk,
                self.score_function,
                padding_mask=flat_mask,
            )
            counts[self] = counts.get(self, 0) + chosen.sum(dim=0)
        return originals[0](self, logits, padding_mask=padding_mask)

    def apply_global_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(waiting) == count - 1:
            before[self] = self.global_tokens_per_expert.clone(), self.ga_steps.clone()
        self.global_tokens_per_expert.copy_(before[self][0])
        self.ga_steps.copy_(before[self][1])

        def together(**_options: Any) -> Any:
            total = counts[self].sum() / self.topk
            return counts[self], total / count, total

        mended = module.get_tokens_per_expert_and_token_count
        module.get_tokens_per_expert_and_token_count = together
        try:
            return originals[1](self, *args, **kwargs)
        finally:
            module.get_tokens_per_expert_and_token_count = mended

    def step(data_iterator: Any, model: Any, *rest: Any) -> Any:
        if not waiting:
            counts.clear()
            waiting.extend(next(data_iterator) for _ in range(count))
            with torch.no_grad():
                for item in waiting:
                    forward_step(iter([item]), model, *rest)
        item = waiting.popleft()
        return forward_step(iter([item]), model, *rest)

    kind.routing, kind._apply_global_aux_loss = routing, apply_global_aux_loss
    try:
        yield step
    finally:
        kind.routing, kind._apply_global_aux_loss = originals
