"""ModelOpt's state in Megatron's checkpoints: saved beside the weights, restored before them.

Megatron saves the state by itself where `megatron.post_training` is there (a checkout).
megatron-core's wheel is without that package (checkpointing.py 70-76, 0.19.2), and gets the names
that it lacks from here, for the time of a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["checkpoint_folder", "is_converted", "refuse_converted", "require_checkpoint"]
__all__ += ["restore_state", "saving_state"]

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"


@contextmanager
def saving_state() -> Iterator[None]:
    """Let Megatron's `save_checkpoint` write ModelOpt's state as well."""
    from megatron.training import checkpointing
    from modelopt.torch.opt import plugins

    if checkpointing.has_nvidia_modelopt:
        yield
        return
    added = {
        "save_modelopt_state": plugins.save_modelopt_state,
        "save_sharded_modelopt_state": plugins.save_sharded_modelopt_state,
        "print_distributed_quant_summary": _print_nothing,
    }
    for name, value in added.items():
        setattr(checkpointing, name, value)
    checkpointing.has_nvidia_modelopt = True
    try:
        yield
    finally:
        checkpointing.has_nvidia_modelopt = False
        for name in added:
            delattr(checkpointing, name)


def checkpoint_folder(args: argparse.Namespace) -> Path | None:
    """Return the folder of the iteration that will be loaded; None where there is none.

    Megatron's own way to ask is a collective.
    """
    step = getattr(args, "ckpt_step", None)
    given = [getattr(args, name, None) for name in ("load", "pretrained_checkpoint")]
    for folder in given:
        tracker = Path(folder or "") / _TRACKER
        if folder and tracker.is_file():
            said = tracker.read_text(encoding="utf-8").strip()
            iteration = str(step) if step and said != _RELEASE else said
            found = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
            return tracker.parent / found
    if step and given[0] and not given[1]:  # Megatron does not look for a tracker then
        return Path(given[0]) / f"iter_{step:07d}"
    return None


def require_checkpoint(args: argparse.Namespace) -> Path:
    """Return `checkpoint_folder`, which must be there.

    Megatron prints a warning and begins with random weights.

    Raises:
        ValueError: nothing to load.
    """
    folder = checkpoint_folder(args)
    if folder is None or not folder.is_dir():
        seen = f"no checkpoint (no {_TRACKER})" if folder is None else f"no {folder.name}"
        flag = "--pretrained-checkpoint" if args.load is None else "--load"
        raise ValueError(
            f"{flag} {args.load or args.pretrained_checkpoint} holds {seen}, and the model would "
            "have random weights: give the folder that --save of the run before named"
        )
    return folder


def is_converted(folder: Path) -> bool:
    """Whether a checkpoint (the folder of its iteration) holds ModelOpt's state."""
    return (folder / "modelopt_state").is_dir()


def refuse_converted(args: argparse.Namespace) -> None:
    """Check that a script without ModelOpt loads no converted model.

    Megatron drops what it does not expect, and so quantizers, without a word (0.19.2).

    Raises:
        ValueError: it would.
    """
    folder = None if hasattr(args, "modelopt_kd_cfg") else checkpoint_folder(args)
    if folder is not None and is_converted(folder):
        raise ValueError(
            f"--load {args.load} is a model that ModelOpt has converted, and this script would "
            "load its weights alone: train it with examples/modelopt/train.py"
        )


def restore_state(models: Sequence[Any], args: argparse.Namespace) -> bool:
    """Convert a model as the loaded checkpoint's was; return whether that one was.

    Call it on a model as it was built, before DDP and optimizer: conversions can add parameters.

    Raises:
        ValueError: ranges that depend on the packing, or would be loaded into the wrong channels.
    """
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    folder = checkpoint_folder(args)
    if folder is None or not is_converted(folder):
        return False
    restore_sharded_modelopt_state(list(models), folder)
    _refuse_ranges_of_tokens(models[0])
    _refuse_other_layout(models[0], args, folder)
    return True


def _refuse_ranges_of_tokens(model: Any) -> None:
    """Refuse ranges that depend on how samples are packed."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and module.is_enabled
        and getattr(module, "_dynamic", False)
        and module.axis is None
        and not module.block_sizes
    ]
    if found:
        raise ValueError(
            f"{len(found)} quantizers ({found[0]}, ...) take their range from all tokens of a "
            "micro-batch anew each time, so the loss would depend on how samples are packed: use a "
            "configuration with calibrated or per-token ranges, such as INT8_DEFAULT_CFG, "
            "FP8_DEFAULT_CFG or FP8_PER_CHANNEL_PER_TOKEN_CFG"
        )


def _refuse_other_layout(model: Any, args: argparse.Namespace, folder: Path) -> None:
    """Check that ranges per channel are loaded where they belong.

    A gated linear unit's first layer keeps its two halves in one weight, which Megatron cuts half
    by half over tensor-parallel ranks. ModelOpt 0.47.0 means to cut a range per channel likewise,
    but looks for its name at the start of the whole key (`_QuantMegatronMLP._modelopt_state_keys`
    and `re.match`), never finds it, and cuts the ranges straight through.
    """
    from megatron.core import dist_checkpointing

    if not model.config.gated_linear_unit:
        return
    saved = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
    then, now = getattr(saved, "tensor_model_parallel_size", None), args.tensor_model_parallel_size
    if then in (None, now):
        return
    mixed = [
        name
        for name, module in model.named_modules()
        if name.endswith("linear_fc1")
        and getattr(getattr(module, "weight_quantizer", None), "axis", None) is not None
    ]
    if mixed:
        raise ValueError(
            f"--load {args.load} was quantized with --tensor-model-parallel-size {then}, and this "
            f"run has {now}: ModelOpt 0.47 would give the channels of {mixed[0]} (--swiglu) each "
            f"other's ranges. Quantize with {now}, or with one range per weight (FP8_DEFAULT_CFG)"
        )


def _print_nothing(_model: Any, msg: str = "") -> None:
    """In place of Megatron's list of every quantizer after a load: the run says one line."""
