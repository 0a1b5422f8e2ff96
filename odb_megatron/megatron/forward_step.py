"""Batch, loss and forward step for `megatron.training.pretrain()`, packed and padded.

Must not plan: what a micro-batch holds was decided by the data loader. Follows pretrain_gpt.py of
Megatron-LM core_v0.19 (`get_batch`, `loss_func`, `forward_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.megatron.compat import packed_seq_params, seqlen_stats_updater

__all__ = ["Batch", "loss_func", "make_forward_step", "packed_batch", "padded_batch"]

_SMALLEST_COUNT = 1e-30
_SPIKY_LOSS_FACTOR = 10
"""As in pretrain_gpt.py: a loss above this many times the largest seen is spiky."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Model inputs on the device; shapes as in `data.thd.MicroBatch`, or [b, s] when padded.

    Middle pipeline stages get none of the four tensors.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    packed_seq_params: Any = None
    cu_seqlens: Tensor | None = None


def packed_batch(item: MicroBatchLayout) -> Batch:
    """Move a packed micro-batch to the device and describe its layout to Megatron."""
    device = torch.cuda.current_device()
    cu_seqlens = item.cu_seqlens.to(device, non_blocking=True)
    cu_seqlens_padded = item.cu_seqlens_padded.to(device, non_blocking=True)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    used = names if isinstance(item, MicroBatch) else ()
    return Batch(
        **{name: getattr(item, name).to(device, non_blocking=True) for name in used},
        cu_seqlens=cu_seqlens,
        packed_seq_params=packed_seq_params(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens_padded,
            cu_seqlens_kv_padded=cu_seqlens_padded,
            max_seqlen_q=item.max_seqlen,
            max_seqlen_kv=item.max_seqlen,
        ),
    )


def padded_batch(item: dict[str, Tensor]) -> Batch:
    """Move a padded micro-batch to the device, without the columns that pad every row."""
    device = torch.cuda.current_device()
    width = max(1, int(item["length"].max()))
    names = ("tokens", "labels", "loss_mask", "position_ids")
    tensors = {
        name: item[name][:, :width].contiguous().to(device, non_blocking=True) for name in names
    }
    return Batch(**tensors)


def loss_func(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of token losses, number of loss tokens, and both for reporting.

    Three values, so that the schedule does not divide by the number of micro-batches. The reported
    count is at least 1e-30: Megatron divides the sums of a step, or of an evaluation, by it, which
    leaves every real count unchanged in float32 and gives 0 instead of NaN where nothing carries
    loss.

    Args:
        loss_mask: float32, shape of `output`.
        output: token losses.
    """
    assert loss_mask is not None, "the last pipeline stage has the loss mask"
    losses_T = output.view(-1).float()
    loss_mask_T = loss_mask.view(-1).float()
    loss = torch.sum(losses_T * loss_mask_T)
    count = loss_mask_T.sum().clone().detach()
    _validate(loss)
    report = torch.cat([loss.clone().detach().view(1), count.clamp(min=_SMALLEST_COUNT).view(1)])
    return loss, count.to(torch.int), {"lm loss": report}


def make_forward_step(
    build_batch: Callable[[Any], Batch], *, on_batch: Callable[[Any], None]
) -> Callable[..., tuple[Tensor, Callable[[Tensor], Any]]]:
    """Return the forward step function for `pretrain()`.

    Args:
        build_batch: `packed_batch` or `padded_batch`.
        on_batch: called once with every micro-batch, for logging.
    """
    from megatron.core.utils import StragglerDetector
    from megatron.training import get_timers

    update_seqlen_stats = seqlen_stats_updater()
    stimer = StragglerDetector()

    def forward_step(
        data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        if return_schedule_plan:
            raise ValueError(
                "--overlap-moe-expert-parallel-comm is not supported with this forward step: "
                "drop the flag"
            )
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with stimer(bdata=True):
            item = next(data_iterator)
            batch = build_batch(item)
        if _is_first_chunk(model):
            on_batch(item)
            if batch.cu_seqlens is not None and torch.is_grad_enabled():
                update_seqlen_stats(batch.cu_seqlens)
        timers("batch-generator").stop()
        with stimer:
            output = model(
                batch.tokens,
                batch.position_ids,
                None,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                packed_seq_params=batch.packed_seq_params,
            )
        return output, partial(loss_func, batch.loss_mask)

    return forward_step


def _is_first_chunk(model: Any) -> bool:
    """Whether this is the rank's first virtual pipeline chunk: it counts a micro-batch once."""
    while not hasattr(model, "vp_stage") and hasattr(model, "module"):
        model = model.module
    return not getattr(model, "vp_stage", None)


def _validate(loss: Tensor) -> None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(
                machine.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
