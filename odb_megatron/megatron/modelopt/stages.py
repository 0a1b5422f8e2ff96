"""The three stages of a ModelOpt model, each a script's whole work: quantize, train, export.

Quantizing and exporting build the model as `pretrain()` does and have no optimizer. Must not import
Megatron, torch or ModelOpt before it runs: data-loader workers import the main module again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odb_megatron.megatron.run import OdbRun

__all__ = ["export_gpt", "quantize_gpt", "train_gpt"]

Datasets = Callable[[Sequence[int | None]], Sequence[Any]]

_DEFAULTS = {"tokenizer_type": "HuggingFaceTokenizer"}
_SAVES_ONCE = {**_DEFAULTS, "save_interval": 1}  # Megatron wants an interval beside --save
_TRAINS_NOTHING = {**_SAVES_ONCE, "train_samples": 1}  # and a length


def train_gpt(*, datasets: Datasets | None = None) -> None:
    """Train a quantized model, a student, or both, as `sys.argv` says.

    Args:
        datasets: see `OdbRun`.

    Raises:
        SystemExit: flags that cannot be used (2), or Megatron's own exits.
    """
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.compat_pretrain import pretrain_gpt
    from odb_megatron.megatron.modelopt.arguments import add_distillation_arguments
    from odb_megatron.megatron.modelopt.run import ModelOptRun

    args = _parse(add_distillation_arguments, _DEFAULTS)
    with usage_errors():
        run = ModelOptRun(args, datasets=datasets)
    with run:
        pretrain_gpt(
            args,
            prepare_model=run.prepare_model,
            datasets_provider=run.datasets_provider,
            forward_step=run.forward_step,
        )


def quantize_gpt(*, datasets: Datasets | None = None) -> None:
    """Calibrate and quantize the model of `--load`, and write it to `--save`.

    `--train-samples` says how many samples calibrate: the first of those that training on the same
    data with the same seed would see.

    Args:
        datasets: see `OdbRun`.

    Raises:
        SystemExit: flags that cannot be used (2).
    """
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.modelopt.arguments import add_quantization_arguments
    from odb_megatron.megatron.modelopt.run import CalibrationRun
    from odb_megatron.megatron.setup import total_samples

    args = _parse(add_quantization_arguments)
    with usage_errors():
        _check_stage(args)
        _check_calibration(args)
        from odb_megatron.megatron.modelopt.calibration import quantization_config

        config = quantization_config(args.modelopt_quant_cfg)
        run = CalibrationRun(args, datasets=datasets, needs_conversion=False)
    with run:
        models = _build(args, run)
        with usage_errors():
            _refuse_quantized(args, models)
        from odb_megatron.megatron.modelopt.calibration import CalibrationLoop, quantize

        items, *_ = run.datasets_provider([total_samples(args), 0, 0])
        loop = CalibrationLoop(models, items, seq_length=args.seq_length)
        quantize(models, config, forward_loop=loop)
        assert loop.result is not None, "every algorithm runs its forward loop"
        seen = loop.result
        if args.rank == args.world_size - 1:  # has the loss, as with Megatron's own log
            loss = "" if seen.loss is None else f", loss {seen.loss:.6f} before quantization"
            print(
                f"odb: ModelOpt {args.modelopt_quant_cfg}: calibrated on {seen.samples} samples, "
                f"{seen.tokens} tokens in {seen.steps} steps; this replica ran "
                f"{seen.micro_batches} micro-batches and left out {seen.left_out} idle ones{loss}",
                flush=True,
            )
        _save(models)


def export_gpt() -> None:
    """Write the model of `--load` to `--save` as a plain one that pruning and others can take.

    Quantizers, a teacher and ModelOpt's state are left behind. `model_config.yaml` beside it says
    the shape, as Megatron-LM's `--export-kd-teacher-load` reads it.

    Raises:
        SystemExit: flags that cannot be used (2).
    """
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.modelopt.arguments import add_export_arguments
    from odb_megatron.megatron.modelopt.run import ModelOptRun
    from odb_megatron.megatron.run import OdbRun

    args = _parse(add_export_arguments, _TRAINS_NOTHING)
    with usage_errors():
        _check_stage(args)
        run = ModelOptRun(args)
    from megatron.core.utils import unwrap_model

    models = _build(args, run)
    trained = unwrap_model(models[0])
    if args.modelopt_fold_weights:
        import modelopt.torch.quantization as mtq

        mtq.fold_weight(trained)
    plain = _build_model(args, OdbRun(args))
    weights = trained.state_dict()
    kept = unwrap_model(plain[0]).state_dict()
    unwrap_model(plain[0]).load_state_dict(
        {name: weights.get(name) if value is not None else None for name, value in kept.items()}
    )
    _save(plain)
    if args.rank == 0:
        _write_shape(args)


def _parse(
    add_arguments: Callable[[Any], Any], defaults: dict[str, Any] = _SAVES_ONCE
) -> argparse.Namespace:
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.modelopt.arguments import require_modelopt
    from odb_megatron.megatron.setup import parse_and_validate_args

    with usage_errors():
        require_modelopt()
    return parse_and_validate_args(defaults, add_arguments)


def _check_stage(args: argparse.Namespace) -> None:
    from odb_megatron.megatron.modelopt.checkpoint import require_checkpoint

    for name in ("load", "save"):
        if not getattr(args, name):
            raise ValueError(f"this stage reads a model and writes another: give --{name} DIR")
    if Path(args.load).resolve() == Path(args.save).resolve():
        raise ValueError(f"--load and --save are both {args.save}: give --save another folder")
    require_checkpoint(args)
    args.iteration = 0
    args.finetune = True  # weights alone: no iteration, samples, optimizer or generators
    args.no_load_optim = args.no_load_rng = args.no_save_optim = args.no_save_rng = True
    args.eval_iters = 0
    args.full_validation = False


def _check_calibration(args: argparse.Namespace) -> None:
    from odb_megatron.megatron.setup import total_samples
    from odb_megatron.megatron.topology import padding_multiple

    if not args.odb:
        raise ValueError("calibration runs on packed micro-batches: add --odb")
    if args.odb_pad_to or padding_multiple(args) > 1:
        raise ValueError(
            "padding would count in the quantizers' ranges: calibrate without --odb-pad-to, "
            "--context-parallel-size and --sequence-parallel (training can have them)"
        )
    if total_samples(args) < args.global_batch_size:
        raise ValueError(
            f"--train-samples {total_samples(args)} is below --global-batch-size "
            f"{args.global_batch_size}, so that a replica may get none: raise it"
        )


def _refuse_quantized(args: argparse.Namespace, models: list[Any]) -> None:
    from megatron.core.utils import unwrap_model
    from modelopt.torch.quantization.utils import is_quantized

    if is_quantized(unwrap_model(models[0])):
        raise ValueError(
            f"--load {args.load} is quantized already: give the model it was made of, or export it "
            "first (examples/modelopt/export.py)"
        )


def _build(args: argparse.Namespace, run: OdbRun) -> list[Any]:
    """Start Megatron, build the model as the run wants it, and load the weights of `--load`."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron

    initialize_megatron()
    get_rerun_state_machine().set_mode(RerunMode.DISABLED)
    models = _build_model(args, run)
    load_checkpoint(models, None, None)
    return models


def _build_model(args: argparse.Namespace, run: OdbRun) -> list[Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    run.prepare_model(config)
    models: list[Any] = config.get_builder_cls()(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False
    )
    return models


def _save(models: list[Any]) -> None:
    from megatron.training.checkpointing import save_checkpoint

    save_checkpoint(0, models, None, None, 0, release=True)


def _write_shape(args: argparse.Namespace) -> None:
    import yaml

    from odb_megatron.megatron.modelopt.teacher import shape_of

    path = Path(args.save) / "model_config.yaml"
    path.write_text(yaml.safe_dump(shape_of(args)), encoding="utf-8")
