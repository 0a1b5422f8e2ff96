"""A run under Megatron's `pretrain()` of a model that ModelOpt has converted, or that is taught.

What differs from `OdbRun`: the model is converted as it is built, ModelOpt's state goes into the
checkpoints, and a student has its own loss. Must not calibrate: that is a stage before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from odb_megatron.errors import usage_errors
from odb_megatron.megatron.compat_pretrain import PretrainForm, pretrain_form
from odb_megatron.megatron.forward_step import LossOf
from odb_megatron.megatron.modelopt.arguments import refuse_unsupported
from odb_megatron.megatron.modelopt.checkpoint import (
    checkpoint_folder,
    has_state,
    refuse_other_layout,
    require_checkpoint,
    restore_state,
    saving_state,
)
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.run_report import RunReport

__all__ = ["CalibrationRun", "ModelOptRun"]

_ADJUST = "get_tensor_shapes_adjust_fn_for_distillation"


class ModelOptRun(OdbRun):
    """A run whose `--load` can hold ModelOpt's state, and `--modelopt-teacher` names a teacher.

    Args:
        args: from `setup.parse_and_validate_args` with `add_distillation_arguments`.
        datasets: see `OdbRun`.
        needs_conversion: whether a run with neither is refused.

    Raises:
        ValueError: flags that ModelOpt does not work with, folders without the checkpoint that
            they should hold, or nothing for ModelOpt to do.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None,
        needs_conversion: bool = True,
    ) -> None:
        refuse_unsupported(args)
        form = pretrain_form()
        if form is not PretrainForm.MODEL_CONFIG:
            raise ValueError(
                "ModelOpt's stages build the model by GPTModelConfig, which this megatron-core "
                "does not have: use 0.19"
            )
        self._teacher_given = getattr(args, "modelopt_teacher", None) is not None
        if self._teacher_given:
            require_checkpoint(args, "modelopt_teacher")
        if not _starts_by_itself(args):
            require_checkpoint(args)
        if needs_conversion and not self._teacher_given and not has_state(args):
            raise ValueError(
                f"there is nothing for ModelOpt to do: --load {args.load} holds no state of it, "
                "and there is no --modelopt-teacher: quantize the model first "
                "(examples/modelopt/quantize.py), or name a teacher"
            )
        self._undo = ExitStack()
        super().__init__(args, datasets=datasets)

    def _loss(self) -> LossOf | None:
        if not self._teacher_given:
            return None
        from odb_megatron.megatron.modelopt.distillation import distillation_loss

        return distillation_loss

    def prepare_model(self, model_config: Any) -> None:
        """Converts the model before it is wrapped."""
        super().prepare_model(model_config)
        model_config.pre_wrap_hooks.append(self._convert)

    def __enter__(self) -> ModelOptRun:
        super().__enter__()
        self._undo.enter_context(saving_state())
        self._leave_shapes_alone()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()
        super().__exit__(kind, error, trace)

    def _convert(self, models: list[Any]) -> list[Any]:
        args = self._args
        with usage_errors():
            restored = restore_state(models, args)
            if restored:
                refuse_other_layout(models[0], args)
            if self._teacher_given:
                models = [self._teach(models[0])]
        if args.rank == 0:
            what = ["restored from the checkpoint"] if restored else []
            what += [f"student of {args.modelopt_teacher}"] if self._teacher_given else []
            print(f"odb: ModelOpt: model {' and '.join(what) or 'as it was built'}", flush=True)
        return models

    def _teach(self, student: Any) -> Any:
        from odb_megatron.megatron.modelopt.distillation import convert, distillation_config
        from odb_megatron.megatron.modelopt.teacher import build_teacher

        args = self._args
        teacher = build_teacher(args, student, prepare_model=super().prepare_model)
        weight = args.modelopt_intermediate_weight
        config = distillation_config(
            args.modelopt_kd_cfg,
            student=student.config,
            teacher=teacher.config,
            intermediate_weight=1.0 if weight is None else weight,
        )
        return convert(student, teacher, config)

    def _leave_shapes_alone(self) -> None:
        """Keep a checkout's training loop from adding to shapes that stages tell each other.

        It would add the teacher's hidden size to a shape that is empty where micro-batches differ
        in length (training.py 2366, core_v0.19.0).
        """
        from megatron.training import training

        if not hasattr(training, _ADJUST):
            return
        self._undo.callback(setattr, training, _ADJUST, getattr(training, _ADJUST))
        setattr(training, _ADJUST, lambda *_args, **_kwargs: None)


def _starts_by_itself(args: argparse.Namespace) -> bool:
    """Whether no weights are asked for.

    A first start may have a `--load` that is its own `--save` and holds nothing yet.
    """
    if args.pretrained_checkpoint is not None:
        return False
    if args.load is None or args.save is None:
        return args.load is None
    own = Path(args.load).resolve() == Path(args.save).resolve()
    return own and checkpoint_folder(args) is None


class CalibrationRun(ModelOptRun):
    """A `ModelOptRun` that trains nothing, so that there are no steps to record or sum up."""

    def _make_report(self) -> RunReport:
        return _NoSteps(self._args, self.config, backend=self._backend)


class _NoSteps(RunReport):
    def open(self, stream: Any, group: Any) -> None:
        """Begin nothing."""
