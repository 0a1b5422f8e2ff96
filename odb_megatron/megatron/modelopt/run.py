"""A run under Megatron's `pretrain()` of a model that ModelOpt has converted, or that is taught.

The model is converted as it is built, ModelOpt's state goes into the checkpoints, and a student has
its own loss. Quantizing and building a teacher are the script's (examples/modelopt).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from odb_megatron.errors import usage_errors
from odb_megatron.megatron.forward_step import LossOf
from odb_megatron.megatron.modelopt.checkpoint import (
    checkpoint_folder,
    is_converted,
    require_checkpoint,
    restore_state,
    saving_state,
)
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.setup import exchange_shapes

__all__ = ["ModelOptRun", "add_modelopt_arguments", "refuse_unsupported"]

_ADJUST = "get_tensor_shapes_adjust_fn_for_distillation"


def add_modelopt_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what `ModelOptRun` reads; Megatron-LM's own flags are `--export-*`."""
    group = parser.add_argument_group(title="ModelOpt")
    group.add_argument(
        "--modelopt-kd-cfg",
        default=None,
        metavar="FILE.yaml",
        help="Fields of ModelOpt's DistillationConfig. Default: the logits alone.",
    )
    group.add_argument(
        "--modelopt-intermediate-weight",
        type=float,
        default=1.0,
        help="Weight of hidden states beside the logits' 1 (ModelOpt's own balancer scales them "
        "by ratios of each micro-batch). Default 1.",
    )
    return parser


def refuse_unsupported(args: argparse.Namespace, *, is_taught: bool = False) -> None:
    """Check validated arguments.

    Raises:
        ValueError: every refusal that applies, one line each.
    """
    if importlib.util.find_spec("modelopt") is None:
        raise ValueError(
            "nvidia-modelopt is not installed: pip install '.[megatron,modelopt]' in a checkout of "
            "this repository (or make venv-modelopt there)"
        )
    refusals = {
        "ModelOpt's state does not know virtual pipeline stages: drop "
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank": (
            args.virtual_pipeline_model_parallel_size is not None
        ),
        f"--ckpt-format {args.ckpt_format} does not keep ModelOpt's state here: use torch_dist": (
            args.ckpt_format != "torch_dist"
        ),
        "ModelOpt with mixtures of experts is not in this version: idle micro-batches would count "
        "in the experts' ranges: drop --num-experts": getattr(args, "num_experts", None),
        "ModelOpt with multi-token prediction is not in this version: drop --mtp-num-layers": (
            getattr(args, "mtp_num_layers", None)
        ),
        "--modelopt-kd-cfg would do nothing without a teacher: name one, or drop this": (
            not is_taught and getattr(args, "modelopt_kd_cfg", None)
        ),
        "a teacher and --manual-gc run out of memory (megatron/post_training/model_builder.py, "
        "core_v0.19.0): drop --manual-gc": is_taught and getattr(args, "manual_gc", False),
        "ModelOpt's distillation does not work with --tp-comm-overlap: drop it": (
            is_taught and getattr(args, "tp_comm_overlap", False)
        ),
    }
    if messages := [text for text, applies in refusals.items() if applies]:
        raise ValueError("\n".join(messages))


class ModelOptRun(OdbRun):
    """A run whose `--load` can hold ModelOpt's state, and that can have a teacher.

    Args:
        args: from `setup.parse_and_validate_args` with `add_modelopt_arguments`.
        teacher: returns the teacher's part of this pipeline stage, its weights loaded, for the
            student's; called by every rank.
        datasets: see `OdbRun`.

    Raises:
        ValueError: flags that ModelOpt does not work with, a `--load` without the checkpoint that
            it should hold, or nothing for ModelOpt to do.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        teacher: Callable[[Any], Any] | None = None,
        datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None,
    ) -> None:
        refuse_unsupported(args, is_taught=teacher is not None)
        folder = None if _starts_by_itself(args) else require_checkpoint(args)
        if teacher is None and (folder is None or not is_converted(folder)):
            raise ValueError(
                f"there is nothing for ModelOpt to do: --load {args.load} holds no state of it, "
                "and there is no teacher: quantize the model first (examples/modelopt/quantize.py)"
            )
        if teacher is not None and args.pipeline_model_parallel_size > 1:
            exchange_shapes(args)
        self._teacher = teacher
        self._undo = ExitStack()
        super().__init__(args, datasets=datasets)

    @property
    def _plans_shapes(self) -> bool:
        """A student's stages send what the teacher sends as well."""
        return super()._plans_shapes and self._teacher is None

    def _loss(self) -> LossOf | None:
        if self._teacher is None:
            return None
        from odb_megatron.megatron.modelopt.distillation import distillation_loss

        return distillation_loss

    def model_provider(self, *args: Any, **kwargs: Any) -> Any:
        """Converts the model before it is wrapped."""
        model = super().model_provider(*args, **kwargs)
        with usage_errors():
            restored = restore_state([model], self._args)
            if self._teacher is not None:
                from odb_megatron.megatron.modelopt.distillation import taught

                model = taught(model, self._teacher(model), self._args)
        if self._args.rank == 0:
            what = ["restored from the checkpoint"] if restored else []
            what += ["the student of a teacher"] if self._teacher is not None else []
            print(f"odb: ModelOpt: model {' and '.join(what) or 'as it was built'}", flush=True)
        return model

    def __enter__(self) -> ModelOptRun:
        super().__enter__()
        self._undo.enter_context(saving_state())
        from megatron.training import training

        if hasattr(training, _ADJUST):
            # A checkout's loop adds the teacher's hidden size to a shape that is empty where
            # micro-batches differ in length (training.py 2366, core_v0.19.0).
            self._undo.callback(setattr, training, _ADJUST, getattr(training, _ADJUST))
            setattr(training, _ADJUST, lambda *_args, **_kwargs: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()
        super().__exit__(kind, error, trace)


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
