"""Distillation of a teacher's logits and hidden states on the same packed micro-batches.

ModelOpt's own criteria, as a sum over tokens: a step's gradient does not depend on how its samples
are packed. ModelOpt's own balancer (`LogitsAndIntermediatesLossBalancer`, 0.47.0) scales the losses
by their ratio in each micro-batch, which a sum of micro-batches does not commute with; here weights
are fixed. `distillation_loss` follows `megatron/post_training/loss_func.py` (core_v0.19.0).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from modelopt.torch import distill
from modelopt.torch.distill.loss_balancers import STUDENT_LOSS_KEY
from modelopt.torch.distill.plugins import megatron as host
from torch import Tensor

from odb_megatron.megatron.forward_step import Loss, reported, validate_loss

__all__ = ["PerTokenBalancer", "distillation_config", "distillation_loss", "taught"]


class PerTokenBalancer(distill.DistillationLossBalancer):
    """Adds sums over tokens with fixed weights, so that micro-batches add up to the step.

    Args:
        lm: weight of the labels' cross entropy; 0 leaves it out of training.
        logits: of the divergence from the teacher's logits.
        intermediate: of the mean over the pairs of hidden states.
    """

    def __init__(self, *, lm: float = 0.0, logits: float = 1.0, intermediate: float = 1.0) -> None:
        super().__init__()
        if min(lm, logits, intermediate) < 0 or logits <= 0:
            raise ValueError(
                "weights of a distillation must not be negative, and that of the logits must be "
                f"above 0; got lm {lm}, logits {logits}, intermediate {intermediate}"
            )
        self.lm, self._logits, self._intermediate = lm, logits, intermediate

    def forward(self, loss_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weighted sum as `kd_loss`, and its parts, under the names of ModelOpt's own.

        Args:
            loss_dict: sums over tokens: the student's own, and one for each criterion.
        """
        criteria = {name: loss for name, loss in loss_dict.items() if name != STUDENT_LOSS_KEY}
        logits = [loss for name, loss in criteria.items() if "Logits" in name]
        others = [loss for name, loss in criteria.items() if "Logits" not in name]
        assert len(logits) == 1, f"expected one criterion on logits, got {list(criteria)}"
        intermediate = torch.stack(others).mean() if others else torch.zeros_like(logits[0])
        total = self._logits * logits[0] + self._intermediate * intermediate
        if self.lm:
            total = total + self.lm * loss_dict[STUDENT_LOSS_KEY]
        return {"kd_loss": total, "logits_loss": logits[0], "intermediate_loss": intermediate}


def distillation_config(
    path: str | None, *, student: Any, teacher: Any, intermediate_weight: float = 1.0
) -> Any:
    """Return ModelOpt's `DistillationConfig` with a `PerTokenBalancer`.

    Args:
        path: YAML file of its fields, as `--export-kd-cfg` of Megatron-LM takes it; None for logits
            alone. `skip_lm_loss` and `kd_loss_scale` become fixed weights.
        student: transformer configuration.
        teacher: the teacher's.
        intermediate_weight: see `PerTokenBalancer`.

    Raises:
        ValueError: a file that is not one.
    """
    import yaml

    try:
        fields = {} if path is None else yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        config = host.DistillationConfig(**fields)
    except (OSError, yaml.YAMLError, TypeError, AssertionError) as error:
        raise ValueError(
            f"--modelopt-kd-cfg {path}: {error}: give the fields of ModelOpt's DistillationConfig "
            "(logit_layers, intermediate_layer_pairs, skip_lm_loss, kd_loss_scale, "
            "logit_kl_temperature, logit_kl_topk)"
        ) from error
    scale = 1.0 if config.skip_lm_loss else config.kd_loss_scale
    config.loss_balancer = PerTokenBalancer(
        lm=0.0 if config.skip_lm_loss else 1.0,
        logits=scale,
        intermediate=scale * intermediate_weight,
    )
    return host.setup_distillation_config(config, student_cfg=student, teacher_cfg=teacher)


def taught(model: Any, teacher: Any, args: argparse.Namespace) -> Any:
    """Make a student of a model, in place, before DDP; return it.

    Args:
        model: this pipeline stage of it.
        teacher: the same stage of the teacher, which is frozen.
        args: with `add_modelopt_arguments`.
    """
    config = distillation_config(
        args.modelopt_kd_cfg,
        student=model.config,
        teacher=teacher.config,
        intermediate_weight=args.modelopt_intermediate_weight,
    )
    mode = {
        "teacher_model": teacher,
        "criterion": config.criterion,
        "loss_balancer": config.loss_balancer,
    }
    student = distill.convert(model, mode=[("kd_loss", mode)])
    host.adjust_distillation_model_for_mcore(student, config)
    # Stages send both hidden states as one tensor and tell each other its shape, so only where to
    # cut it has to be known: at the student's hidden size.
    student.set_student_input_tensor_shape([(student.config.hidden_size,)])
    return student


def distillation_loss(model: Any, loss_mask: Tensor | None, output: Tensor) -> Loss:
    """Sum of weighted token losses, sum of weights, and every part for reporting.

    In evaluation the loss is the cross entropy of the labels. Where training leaves that out, it
    is not reported there (upstream reports 0).

    Args:
        model: chunk that holds a student of `convert`, wrappers included.
        loss_mask: float32 [b, s].
        output: the student's token losses, [b, s].
    """
    assert loss_mask is not None, "the last pipeline stage has the loss mask"
    student = unwrap_model(model)
    lm = _masked_sum(loss_mask, output)
    count = loss_mask.sum().clone().detach()
    losses = student.compute_kd_loss(
        student_loss=lm, loss_reduction_fn=partial(_masked_sum, loss_mask)
    )
    loss = losses["kd_loss"] if student.training else lm
    validate_loss(loss)
    report = {
        "total loss": reported(losses["kd_loss"], count),
        "logits distillation loss": reported(losses["logits_loss"], count),
        "intermediate distillation loss": reported(losses["intermediate_loss"], count),
    }
    if not student.training or student.loss_balancer.lm:
        report = {"lm loss": reported(lm, count), **report}
    return loss, count.round().to(torch.int), report


def _masked_sum(loss_mask: Tensor, output: Any) -> Tensor:
    """Sum token losses by their weights.

    Args:
        loss_mask: [b, s].
        output: [b, s], or a criterion's (losses, whether each tensor-parallel rank has a part of
            every token's loss, whether each has a part of the tokens).
    """
    has_parts, has_some_tokens = False, False
    if isinstance(output, tuple):
        output, has_parts, has_some_tokens = output
    if has_some_tokens:
        size, rank = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_tensor_model_parallel_rank(),
        )
        loss_mask = torch.tensor_split(loss_mask, size, dim=1)[rank]
    total = torch.sum(output.reshape(-1).float() * loss_mask.reshape(-1).float())
    if has_parts or has_some_tokens:
        total = reduce_from_tensor_model_parallel_region(total)
    return total
