"""What ODB mends of Megatron's routers and their log lines, and the mask it gives them."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_megatron.data.thd import layout
from odb_megatron.megatron.compat_metrics import logged_per_micro_batch
from odb_megatron.megatron.routers import RouterFixes
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals


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
    mend = RouterFixes()
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
def test_load_balancing_weighs_the_tokens_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same three real tokens; Megatron's own count takes them for six."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, router

    def all_reduce(tensor: torch.Tensor, *, group: Any) -> None:
        tensor.mul_(group.size())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", mappings._reduce)
    original = router.get_tokens_per_expert_and_token_count
    routing_map = torch.tensor(
        [[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]]
    ).bool()  # one is padding
    asked: dict[str, Any] = {"reduce_group": SimpleNamespace(size=lambda: 2), "topk": 2}

    def counts(*, with_padding_mask: bool) -> tuple[list[int], float, float]:
        per_expert, own, total = router.get_tokens_per_expert_and_token_count(
            routing_map=routing_map, with_padding_mask=with_padding_mask, **asked
        )
        return per_expert.tolist(), float(own), float(total)

    assert counts(with_padding_mask=True) == ([4, 4, 4], 6, 6)  # else it need not be mended
    mend = RouterFixes()
    mend.install()
    try:
        assert counts(with_padding_mask=True) == ([4, 4, 4], 3, 6)
        assert counts(with_padding_mask=False) == ([4, 4, 4], 4, 8)
    finally:
        mend.remove()
    assert router.get_tokens_per_expert_and_token_count is original


@pytest.mark.megatron
def test_router_losses_are_weighed_as_what_they_are_divided_by() -> None:
    """A step whose 8 loss tokens count for 2 times 4."""
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    original = MoEAuxLossAutoScaler.set_loss_scale
    names = [field.name for field in fields(StepTotals)]
    none = StepTotals(**dict.fromkeys(names, 0) | {"is_final": False})
    fixes = RouterFixes()
    fixes.install()
    try:
        for totals, expected in (
            (none, 3.0),
            (replace(none, num_loss_tokens=8, loss_weight=8), 3.0),
            (replace(none, num_loss_tokens=8, loss_weight=64), 24.0),
        ):
            fixes.begin_step(totals)
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(3.0))
            assert MoEAuxLossAutoScaler.main_loss_backward_scale == expected
    finally:
        fixes.remove()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
    assert MoEAuxLossAutoScaler.set_loss_scale is original


@pytest.mark.megatron
def test_which_part_of_the_mask_a_stage_gets() -> None:
    """The first stage cuts it for sequence parallelism by itself."""
    from odb_megatron.megatron.forward_step import RouterMask

    item = layout((3, 5), positions=(0, 1), rule=SizeRule(multiple=4))  # 000100000111
    part = RouterMask(sequence_size=2, sequence_rank=1)
    assert part.build(item, is_first_stage=True).shape == (1, 12)
    assert part.build(item, is_first_stage=False).tolist() == [[False] * 3 + [True] * 3]
    assert RouterMask().build(item, is_first_stage=False).shape == (1, 12)
