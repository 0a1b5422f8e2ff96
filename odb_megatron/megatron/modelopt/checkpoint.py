"""ModelOpt's state in Megatron's checkpoints: saved beside the weights, restored before them.

Must not load weights. Megatron saves the state by itself where `megatron.post_training` is there
(a checkout); megatron-core's wheel is without that package (checkpointing.py 70-76, 0.19.2), and
gets from here the three names that it lacks, for the time of a run.
"""

from __future__ import annotations

import argparse
import os
import pickletools
import re
import struct
import zipfile
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
    "require_checkpoint",
    "restore_state",
    "saving_state",
]

STAGE_NAMES = ("modelopt_quant_cfg", "modelopt_teacher", "modelopt_fold_weights")
"""Arguments of which each stage has one, and no other script has any."""

FORMATS = ("torch_dist", "torch")
"""Values of `--ckpt-format` that ModelOpt's state goes with."""

_FOLDER = "modelopt_state"
_KEY = "modelopt_state"
_KEYS = re.compile(rf"{_KEY}(_\d+)?")
"""In a rank's file of format torch; numbered with virtual pipelines (Megatron-LM alone)."""

_SIZES_AT = 26
_SIZES = struct.Struct("<HH")
"""Sizes of the name and of the extra field, at the end of a zip file's local header of 30 bytes."""

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


def checkpoint_folder(args: argparse.Namespace, name: str = "load") -> Path | None:
    """Return the folder of the iteration that will be loaded; None where there is none.

    Megatron's own way to ask is a collective.

    Args:
        args: Megatron's.
        name: attribute that holds the folder of checkpoints.
    """
    step = getattr(args, "ckpt_step", None) if name == "load" else None
    others = ("pretrained_checkpoint",) if name == "load" else ()
    given = [getattr(args, each, None) for each in (name, *others)]
    for folder in given:
        tracker = Path(folder or "") / _TRACKER
        if folder and tracker.is_file():
            said = tracker.read_text(encoding="utf-8").strip()
            iteration = str(step) if step and said != _RELEASE else said
            found = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
            return tracker.parent / found
    if step and given[0] and not any(given[1:]):  # Megatron does not look for a tracker then
        return Path(given[0]) / f"iter_{step:07d}"
    return None


def require_checkpoint(args: argparse.Namespace, name: str = "load") -> Path:
    """Return `checkpoint_folder`, which must be there.

    Megatron prints a warning and begins with random weights.

    Raises:
        ValueError: nothing to load.
    """
    if getattr(args, name) is None:
        name = "pretrained_checkpoint"
    flag, given = "--" + name.replace("_", "-"), getattr(args, name)
    folder = checkpoint_folder(args, "load" if name == "pretrained_checkpoint" else name)
    if folder is None:
        seen = f"holds no checkpoint (no {_TRACKER})" if Path(given).is_dir() else "is no folder"
        raise ValueError(
            f"{flag} {given} {seen}, and the model would have random weights: give the folder that "
            "--save of the run before named"
        )
    if not folder.is_dir():
        there = sorted(path.name for path in folder.parent.glob("iter_*"))
        says = "--ckpt-step" if getattr(args, "ckpt_step", None) and name == "load" else _TRACKER
        raise ValueError(
            f"{flag} {given} holds no {folder.name}, which {says} names; it holds "
            f"{', '.join(there) or 'no iteration at all'}: give one that is there"
        )
    return folder


def has_state(args: argparse.Namespace) -> bool:
    """Whether the checkpoint that will be loaded holds ModelOpt's state."""
    folder = checkpoint_folder(args)
    return folder is not None and is_converted(folder)


def is_converted(folder: Path) -> bool:
    """Whether a checkpoint holds ModelOpt's state, in either format.

    Megatron goes by the files in the folder (`_get_checkpoint_format`), not by `--ckpt-format`.

    Args:
        folder: of the iteration.
    """
    return _has_sharded_state(folder) or any(map(_names_state, _rank_files(folder)[:1]))


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
    if _has_sharded_state(folder):
        restore_sharded_modelopt_state(list(models), folder)
        return True
    from megatron.training import checkpointing

    own = Path(checkpointing.get_checkpoint_name(str(folder.parent), 0)).parent.name
    state = _unsharded_state(folder, own)
    if state is None:
        return False
    mto.restore_from_modelopt_state(models[0], state)
    return True


def refuse_converted(args: argparse.Namespace) -> None:
    """Check that a script without ModelOpt loads no converted model.

    Megatron drops what it does not expect, and so quantizers: without a word in format torch_dist,
    with a line of names in format torch (checkpointing.py 2521-2528, 0.19.2).

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
    if folder is None or not _has_sharded_state(folder) or not model.config.gated_linear_unit:
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


def _has_sharded_state(folder: Path) -> bool:
    return (folder / _FOLDER).is_dir()


def _rank_files(folder: Path, rank: str = "mp_rank_*") -> list[Path]:
    """Return the files of a checkpoint in format torch; none of one in another format."""
    return sorted(folder.glob(f"{rank}/model_optim_rng.pt"))


def _names_state(path: Path) -> bool:
    """Whether a file of `torch.save` has ModelOpt's state; reads names alone and executes nothing.

    Args:
        path: one that is no zip archive was written before torch 1.6, and ModelOpt.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    contents = [_stored(path, info) for info in pickles]
    return any(
        isinstance(value, str) and _KEYS.fullmatch(value)
        for content in contents
        if _KEY.encode() in content  # most have it nowhere, and this is quick
        for _, value, _ in pickletools.genops(content)
    )


def _stored(path: Path, pickled: zipfile.ZipInfo) -> bytes:
    """Return a pickle without a look at its checksum, which torch does not look at either.

    The ranks of a context-parallel group write the same file at once (docs/versions.md). torch
    compresses nothing.
    """
    with path.open("rb") as file:
        file.seek(pickled.header_offset + _SIZES_AT)
        name_size, extra_size = _SIZES.unpack(file.read(_SIZES.size))
        file.seek(name_size + extra_size, os.SEEK_CUR)
        return file.read(pickled.file_size)


def _unsharded_state(folder: Path, rank: str) -> dict[str, Any] | None:
    """Return the state in one rank's file of a checkpoint in format torch; None without any.

    Args:
        folder: of the iteration.
        rank: the rank's folder within.
    """
    import torch

    found = _rank_files(folder, rank)
    if not found:
        return None
    # As Megatron loads it, whose import tells torch which classes of its arguments are safe.
    loaded = torch.load(found[0], map_location="cpu", mmap=True, weights_only=True)
    state: dict[str, Any] | None = loaded.get(_KEY)
    return state


def _print_nothing(_model: Any, msg: str = "") -> None:
    """In place of Megatron's list of every quantizer after a load: `OdbRun` says one line."""
