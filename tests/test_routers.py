"""What ODB mends of Megatron's routers and their log lines, and the mask it gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_megatron.data.thd import layout
from odb_megatron.megatron.routers import ExpertBiasMask, logged_per_micro_batch


class _Helper:
    @staticmethod
    def track_mtp_metrics(scale: float, iteration: int) -> tuple[float, int]:
        return scale, iteration

    @staticmethod
    def other() -> str:
        return "other"


def test_losses_are_logged_per_micro_batch() -> None:
    def report(**values: Any) -> dict[str, Any]:
        return values

    def tracker() -> Any:
        return SimpleNamespace(report=report)

    module: Any = SimpleNamespace(get_moe_metrics_tracker=tracker, MTPLossLoggingHelper=_Helper)
    with logged_per_micro_batch(module, 4):
        found = module.get_moe_metrics_tracker().report(loss_scale=9.0, iteration=3)
        assert found == {"loss_scale": 0.25, "iteration": 3}
        assert module.MTPLossLoggingHelper.track_mtp_metrics(9.0, 3) == (0.25, 3)
        assert module.MTPLossLoggingHelper.other() == "other"
    assert module.get_moe_metrics_tracker is tracker
    assert module.MTPLossLoggingHelper is _Helper


def test_a_megatron_without_them() -> None:
    module = SimpleNamespace()
    with logged_per_micro_batch(module, 4):
        assert vars(module) == {}


@pytest.mark.megatron
def test_padding_does_not_count_in_the_expert_bias() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter._apply_expert_bias
    router: Any = SimpleNamespace(
        enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2, dtype=torch.int64)
    )
    routing_map = torch.tensor([[True, False], [False, True], [True, False]])
    mask = torch.tensor([False, False, True])
    mend = ExpertBiasMask()
    mend.install()
    try:
        TopKRouter._apply_expert_bias(router, routing_map, padding_mask=mask)
        TopKRouter._apply_expert_bias(router, routing_map)
    finally:
        mend.remove()
    mend.remove()
    assert router.local_tokens_per_expert.tolist() == [3, 2]
    assert TopKRouter._apply_expert_bias is original


@pytest.mark.megatron
def test_which_part_of_the_mask_a_stage_gets() -> None:
    """The first stage cuts it for sequence parallelism by itself."""
    from odb_megatron.megatron.forward_step import RouterMask

    item = layout((3, 5), positions=(0, 1), multiple=4)  # 000100000111
    part = RouterMask(sequence_size=2, sequence_rank=1)
    assert part.build(item, is_first_stage=True).shape == (1, 12)
    assert part.build(item, is_first_stage=False).tolist() == [[False] * 3 + [True] * 3]
    assert RouterMask().build(item, is_first_stage=False).shape == (1, 12)
