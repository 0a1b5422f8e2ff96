"""Batch, loss and forward step for `megatron.training.pretrain()`, packed and padded.

Follows pretrain_gpt.py of Megatron-LM core_v0.19 (`get_batch`, `loss_func`, `forward_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from odb_megatron.data.thd import (
    MicroBatch,
    MicroBatchLayout,
    context_part,
    padding_mask,
    sample_index,
)
from odb_megatron.plan.padding import padded_length

__all__ = [
    "Batch",
    "Loss",
    "LossOf",
    "RouterMask",
    "loss_func",
    "make_forward_step",
    "packed_batch",
    "padded_batch",
    "pinned",
    "reported",
    "to_device",
    "validate_loss",
]

Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Sum of weighted token losses, sum of weights ("tokens", to Megatron), and what is reported."""

LossOf = Callable[[Any, Tensor | None, Tensor], Loss]
"""A loss of the model chunk, the loss mask and the chunk's output."""

_ALIGNMENT = 16
"""Bytes: of what kernels read at once."""

_SMALLEST_COUNT = 1e-30
_SPIKY_LOSS_FACTOR = 10
"""As in pretrain_gpt.py: a loss above this many times the largest seen is spiky."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Model inputs on the device; shapes as in `data.thd.MicroBatch`, or [b, s] when padded.

    Middle pipeline stages get none of the four tensors. `model_inputs` are further arguments of the
    model's `forward`. `cu_seqlens` are those of real tokens, for Megatron's count of FLOPs: 0 where
    another replica counts them.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    packed_seq_params: Any = None
    cu_seqlens: Tensor | None = None
    model_inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMask:
    """Tells routers of mixtures of experts which tokens of this rank are padding.

    The model wants it as bool [1, T] (True is padding). Its first stage cuts it for sequence
    parallelism by itself (gpt_model.py 352, 0.19.2); other stages take it as it comes.

    Attributes:
        context_size: context-parallel size.
        context_rank: context-parallel rank.
        sequence_size: tensor-parallel size if sequence parallelism is on, else 1.
        sequence_rank: tensor-parallel rank.
    """

    context_size: int = 1
    context_rank: int = 0
    sequence_size: int = 1
    sequence_rank: int = 0

    def build(self, item: MicroBatchLayout, *, is_first_stage: bool) -> Tensor:
        """Return the mask of a micro-batch for one model chunk, on the CPU."""
        mask = padding_mask(item, size=self.context_size, rank=self.context_rank)
        if is_first_stage or self.sequence_size == 1:
            return mask
        return mask.chunk(self.sequence_size, dim=1)[self.sequence_rank].contiguous()


def to_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return them on the device: one copy from page-locked memory, which nothing waits for.

    In the trainer's thread: page-locking in another one ends a capture of CUDA graphs (mode
    "global": cuda_graphs.py 1428, megatron-core 0.19.2; Transformer Engine's graph.py 99).
    """
    buffer = pinned(tensors)[0].to(torch.cuda.current_device(), non_blocking=True)
    return _views(buffer, tensors)


def pinned(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a buffer with copies of them, page-locked where there is a device, and the copies."""
    num_bytes = sum(_room(one) for one in tensors.values())
    is_locked = torch.cuda.is_available()
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_locked)
    views = _views(buffer, tensors)
    for name, view in views.items():
        view.copy_(tensors[name])
    return buffer, views


def _views(buffer: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found, start = {}, 0
    for name, one in tensors.items():
        found[name] = buffer[start : start + one.nbytes].view(one.dtype).view(one.shape)
        start += _room(one)
    return found


def _room(tensor: Tensor) -> int:
    return padded_length(tensor.nbytes, _ALIGNMENT)


def packed_batch(
    item: MicroBatchLayout,
    *,
    has_state_layers: bool = False,
    context_size: int = 1,
    group_of: Callable[[int], Any] | None = None,
    model_inputs: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Move a packed micro-batch to the device and describe its layout to Megatron.

    Each sample's padding is named as tokens of its own; it lies behind those that attention sees.
    Told of padding between samples, Transformer Engine leaves out FlashAttention and, from 2.4 to
    2.16, waits for the device in every layer to find out whether there is any. Its context
    parallelism asks for padded offsets all the same: then they are the very same tensor.

    Args:
        item: the micro-batch, or its layout.
        has_state_layers: whether the model has state-space layers (`--hybrid-layer-pattern`), which
            go by `seq_idx`: without it their state runs on into the next sample.
        context_size: context-parallel size of a replica.
        group_of: returns the context-parallel group of so many replicas; where some micro-batches
            are shared, each names its group, since the model keeps the last one named.
        model_inputs: on the CPU; see `Batch`.
    """
    inputs = model_inputs or {}
    real = item.cu_seqlens if item.share[1] == 0 else torch.zeros_like(item.cu_seqlens)
    tensors = {"cu_seqlens": real, "offsets": item.cu_seqlens_padded, **inputs}
    names: tuple[str, ...] = ()
    if isinstance(item, MicroBatch):
        names = ("tokens", "labels", "loss_mask", "position_ids")
        tensors |= {name: getattr(item, name) for name in names}
        size, _ = context_part(item, context_size, 0)
        ends, whole = item.cu_seqlens_padded.numpy(), item.tokens.size(1) * size
        assert ends[0] == 0 and ends[-1] == whole and (np.diff(ends) >= 0).all()  # noqa: PT018
    if has_state_layers:  # of the whole pack, also under context parallelism: it is gathered there
        tensors["seq_idx"] = sample_index(item)
    placed = to_device(tensors)
    group: dict[str, Any] = {}
    if group_of is not None:
        group = {"cp_group": group_of(item.share[0])}
        group["local_cp_size"] = context_size * item.share[0]
    padded = placed["offsets"] if context_size * item.share[0] > 1 else None
    # Rotary tables are kept for 32 different lengths (`RotaryEmbedding.forward`), and cuDNN plans
    # by length: a power of two makes few of them, and no kernel computes more by it.
    longest = 1 << (item.max_seqlen - 1).bit_length()
    own: dict[str, Any] = {name: placed[name] for name in names}
    return Batch(
        **own,
        cu_seqlens=placed["cu_seqlens"],
        model_inputs={name: placed[name] for name in inputs},
        packed_seq_params=packed_seq_params(
            qkv_format="thd",
            cu_seqlens_q=placed["offsets"],
            cu_seqlens_kv=placed["offsets"],
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            **group,
            **({"seq_idx": placed["seq_idx"]} if has_state_layers else {}),
        ),
    )


def packed_seq_params(**values: Any) -> PackedSeqParams:
    """Build PackedSeqParams of samples without padding between them."""
    if "pad_between_seqs" in {field.name for field in fields(PackedSeqParams)}:
        values["pad_between_seqs"] = False  # from 0.19 on: Transformer Engine then does not look
    return PackedSeqParams(**values)


def padded_batch(item: dict[str, Tensor], *, multiple: int = 1) -> Batch:
    """Move a padded micro-batch to the device, without the columns that pad every row.

    Args:
        item: from Megatron's own loader.
        multiple: columns that are left are a multiple of this, as sequence parallelism needs.
    """
    width = padded_length(max(1, int(item["length"].max())), multiple)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    tensors: dict[str, Any] = to_device({name: item[name][:, :width] for name in names})
    return Batch(**tensors)


def loss_func(loss_mask: Tensor | None, output: Tensor) -> Loss:
    """Sum of weighted token losses, sum of weights, and both for reporting.

    Three values, so that the schedule does not divide by the number of micro-batches.

    Args:
        loss_mask: float32, shape of `output`; weights, see `data.sample.count_scale`.
        output: token losses.
    """
    assert loss_mask is not None, "the last pipeline stage has the loss mask"
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    count = mask.sum().clone().detach()
    validate_loss(loss)
    return loss, count.round().to(torch.int), {"lm loss": reported(loss, count)}


def reported(loss: Tensor, count: Tensor) -> Tensor:
    """Return sums of weighted token losses and of weights as Megatron takes a report.

    The count is at least 1e-30: Megatron divides the sums of a step, or of an evaluation, by it,
    which leaves every real count unchanged in float32 and gives 0 instead of NaN where nothing
    carries loss.
    """
    return torch.cat([loss.clone().detach().view(1), count.clamp(min=_SMALLEST_COUNT).view(1)])


def make_forward_step(
    build_batch: Callable[..., Batch],
    *,
    on_batch: Callable[[Any], None],
    router_mask: RouterMask | None = None,
    loss: LossOf | None = None,
) -> Callable[..., tuple[Tensor, Callable[[Tensor], Any]]]:
    """Return the forward step function for `pretrain()`.

    Args:
        build_batch: `packed_batch` or `padded_batch`; with a router mask `packed_batch`.
        on_batch: called once with every micro-batch, for logging.
        router_mask: for packed mixtures of experts; None for dense models.
        loss: None for `loss_func`.
    """
    from megatron.core.utils import StragglerDetector
    from megatron.training import get_timers
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    stimer = StragglerDetector()

    def forward_step(
        data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        if return_schedule_plan:
            raise ValueError("--overlap-moe-expert-parallel-comm is refused with --odb: drop it")
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with stimer(bdata=True):
            item = next(data_iterator)
            more = {}
            if router_mask is not None:
                is_first_stage = _attribute(model, "pre_process")
                mask = router_mask.build(item, is_first_stage=is_first_stage)
                more["model_inputs"] = {"padding_mask": mask}
            batch = build_batch(item, **more)
        if _is_first_chunk(model):
            on_batch(item)
            if batch.cu_seqlens is not None and torch.is_grad_enabled():
                update_seqlen_stats_from_cu_seqlens(batch.cu_seqlens)
        timers("batch-generator").stop()
        with stimer:
            output = model(
                batch.tokens,
                batch.position_ids,
                None,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                packed_seq_params=batch.packed_seq_params,
                **batch.model_inputs,
            )
        if loss is not None:
            return output, partial(loss, model, batch.loss_mask)
        return output, partial(loss_func, batch.loss_mask)

    return forward_step


def _is_first_chunk(model: Any) -> bool:
    """Whether this is the rank's first virtual pipeline chunk: it counts a micro-batch once."""
    return not _attribute(model, "vp_stage")


def _attribute(model: Any, name: str) -> Any:
    """Return an attribute of a model inside its wrappers (DDP, half precision); None if absent."""
    while not hasattr(model, name) and hasattr(model, "module"):
        model = model.module
    return getattr(model, name, None)


def validate_loss(loss: Tensor) -> None:
    """Let Megatron's rerun machine look at a micro-batch's loss, as pretrain_gpt.py does."""
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
