"""ModelOpt's state in Megatron's checkpoints: saved beside the weights, restored before them.

Must not load weights. Megatron saves the state by itself where `megatron.post_training` is there
(a checkout); megatron-core's wheel is without that package (checkpointing.py 70-76, 0.19.2), and
gets from here the three names that it lacks, for the time of a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "FORMATS",
    "STAGE_NAMES",
    "checkpoint_folder",
    "has_state",
    "is_converted",
    "refuse_converted",
    "refuse_other_layout",
    "restore_state",
    "saving_state",
]

STAGE_NAMES = ("modelopt_quant_cfg", "modelopt_teacher", "modelopt_fold_weights")
"""Arguments of which each stage has one, and no other script has any."""

FORMATS = ("torch_dist", "torch")
"""Values of `--ckpt-format` that ModelOpt's state goes with."""

_FOLDER = "modelopt_state"
_KEY = "modelopt_state"


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


def checkpoint_folder(args: argparse.Namespace, name: str = "load") -> Path | None:
    """Return the folder of the iteration that will be loaded; None where there is none.

    Megatron's own way to ask is a collective.

    Args:
        args: Megatron's.
        name: attribute that holds the folder of checkpoints.
    """
    step = getattr(args, "ckpt_step", None) if name == "load" else None
    others = ("pretrained_checkpoint",) if name == "load" else ()
    for folder in (getattr(args, each, None) for each in (name, *others)):
        tracker = Path(folder or "") / "latest_checkpointed_iteration.txt"
        if folder and tracker.is_file():
            said = tracker.read_text(encoding="utf-8").strip()
            iteration = str(step) if step else said
            found = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
            return tracker.parent / found
    return None


def has_state(args: argparse.Namespace) -> bool:
    """Whether the checkpoint that will be loaded holds ModelOpt's state."""
    folder = checkpoint_folder(args)
    if folder is None:
        return False
    return is_converted(folder) or _unsharded_state(args, folder, "mp_rank_*") is not None


def is_converted(folder: Path) -> bool:
    """Whether a checkpoint in format torch_dist holds ModelOpt's state."""
    return (folder / _FOLDER).is_dir()


def restore_state(models: Sequence[Any], args: argparse.Namespace) -> bool:
    """Convert a model as the loaded checkpoint's was; return whether that one was.

    Call it on a model as it was built, before DDP and optimizer: conversions can add parameters.

    Raises:
        ValueError: several model chunks, which ModelOpt's state does not know.
    """
    import modelopt.torch.opt as mto
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    folder = checkpoint_folder(args)
    if folder is None:
        return False
    if len(models) > 1:
        raise ValueError(
            "ModelOpt's state does not know virtual pipeline stages: drop "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        )
    if is_converted(folder):
        restore_sharded_modelopt_state(list(models), folder)
        return True
    from megatron.training import checkpointing

    own = Path(checkpointing.get_checkpoint_name(str(folder.parent), 0)).parent.name
    state = _unsharded_state(args, folder, own)
    if state is None:
        return False
    mto.restore_from_modelopt_state(models[0], state)
    return True


def refuse_converted(args: argparse.Namespace) -> None:
    """Check that a script without ModelOpt loads no converted model.

    Megatron drops what it does not expect, and so quantizers without a word.

    Raises:
        ValueError: it would.
    """
    folder = None if any(hasattr(args, name) for name in STAGE_NAMES) else checkpoint_folder(args)
    if folder is not None and is_converted(folder):
        raise ValueError(
            f"--load {args.load} is a model that ModelOpt has converted, and this script would "
            "load its weights alone: train it with examples/modelopt/train.py, or export it first"
        )


def refuse_other_layout(model: Any, args: argparse.Namespace) -> None:
    """Check that a restored model's ranges will be loaded where they belong.

    A gated linear unit's first layer keeps its two halves in one weight, which Megatron cuts half
    by half over tensor-parallel ranks. ModelOpt 0.47.0 means to cut a range per channel likewise,
    but looks for its name at the start of the whole key (`_QuantMegatronMLP._modelopt_state_keys`
    and `re.match`), never finds it, and cuts the ranges straight through.

    Raises:
        ValueError: such ranges, saved with another tensor-parallel size.
    """
    from megatron.core import dist_checkpointing

    folder = checkpoint_folder(args)
    if folder is None or not is_converted(folder) or not model.config.gated_linear_unit:
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


def _unsharded_state(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any] | None:
    """Return the state in one rank's file of a checkpoint in format `torch`; None without any.

    Args:
        args: Megatron's.
        folder: of the iteration.
        name: pattern of the rank's folder within.
    """
    import torch

    found = sorted(folder.glob(f"{name}/model_optim_rng.pt"))
    if args.ckpt_format != "torch" or not found:
        return None
    # As Megatron loads it: its arguments are in there, which are more than weights.
    loaded = torch.load(found[0], map_location="cpu", mmap=True, weights_only=False)
    state: dict[str, Any] | None = loaded.get(_KEY)
    return state


def _print_nothing(_model: Any, msg: str = "") -> None:
    """In place of Megatron's list of every quantizer after a load: `OdbRun` says one line."""
