"""The loss that `pretrain()` gets: sums and counts, never means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import padding_mask, sample_index, slice_micro_batch
from odb_megatron.data.wire import assemble
from odb_megatron.plan.padding import SizeRule

pytest.importorskip("megatron.training")

from odb_megatron.megatron import forward_step

pytestmark = pytest.mark.megatron


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(
        "megatron.core.rerun_state_machine.get_rerun_state_machine", SimpleNamespace
    )


def test_no_mean_of_means() -> None:
    """pitfalls.md: 1 and 999 loss tokens with mean losses 10 and 1 give 1.009, not 5.5."""
    reports = []
    for count, mean in ((1, 10.0), (999, 1.0)):
        loss_mask = torch.ones(1, count + 7)
        loss_mask[0, count:] = 0
        losses = torch.full((1, count + 7), mean)
        losses[0, count:] = 1e6  # masked: must not show
        loss, num_tokens, report = forward_step.loss_func(loss_mask, losses)
        assert loss.item() == pytest.approx(count * mean)
        assert (num_tokens.dtype, num_tokens.item()) == (torch.int32, count)
        reports.append(report["lm loss"])
    total = torch.vstack(reports).sum(dim=0)
    assert (total[0] / total[1]).item() == pytest.approx(1.009)


def test_weights_are_counted_to_the_nearest_whole_number() -> None:
    weights = torch.tensor([[0.7, 0.0, 2.0]])
    loss, count, report = forward_step.loss_func(weights, torch.tensor([[1.0, 5.0, 3.0]]))
    assert (loss.item(), count.item()) == (pytest.approx(6.7), 3)
    assert report["lm loss"].tolist() == pytest.approx([6.7, 2.7])


def test_three_values_so_that_the_schedule_does_not_divide_again() -> None:
    assert len(forward_step.loss_func(torch.ones(1, 4), torch.ones(1, 4))) == 3


def test_nothing_to_learn_reports_zero() -> None:
    loss, num_tokens, report = forward_step.loss_func(torch.zeros(1, 4), torch.ones(1, 4))
    assert (loss.item(), num_tokens.item()) == (0.0, 0)
    total = report["lm loss"] + report["lm loss"]
    assert (total[0] / total[1]).item() == 0.0


def test_a_count_beside_real_ones_is_unchanged() -> None:
    empty = forward_step.loss_func(torch.zeros(1, 4), torch.ones(1, 4))[2]["lm loss"]
    real = forward_step.loss_func(torch.ones(1, 4), torch.ones(1, 4))[2]["lm loss"]
    assert (empty + real)[1].item() == 4.0


@pytest.mark.parametrize("size", [1, 2])
def test_one_copy_from_locked_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a micro-batch and what goes with it: the routers' mask, `seq_idx`."""
    ids = [np.arange(length, dtype=np.int64) for length in (5, 1, 8)]
    samples = [Sample(tokens=one, labels=one + 1, loss_mask=np.float32(one > 0)) for one in ids]
    item = assemble(samples, positions=range(3), rule=SizeRule(multiple=4))
    item = slice_micro_batch(item, size=size, rank=0)
    mask = padding_mask(item, size=size)
    copies, locked = [], []
    empty, to = torch.empty, torch.Tensor.to

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append((self.dtype, kwargs))
        return to(self, *args, **kwargs).clone()

    def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        locked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.Tensor, "to", counted)
    batch = forward_step.packed_batch(
        item, has_state_layers=True, context_size=size, model_inputs={"padding_mask": mask}
    )
    monkeypatch.undo()
    assert copies == [(torch.uint8, {"non_blocking": True})]
    assert locked == [True]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(batch, name), getattr(item, name))
        assert getattr(batch, name).dtype is getattr(item, name).dtype
        assert getattr(batch, name).data_ptr() % 16 == 0
    assert torch.equal(batch.model_inputs["padding_mask"], mask)
    assert torch.equal(batch.packed_seq_params.seq_idx, sample_index(item))
    assert torch.equal(batch.packed_seq_params.cu_seqlens_q, item.cu_seqlens_padded)
