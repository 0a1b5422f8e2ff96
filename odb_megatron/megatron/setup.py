"""Arguments of a pretrain script: parsed as Megatron parses them, with the run length resolved."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from odb_megatron.data.megatron_dataset import SampleDatasetConfig, count_epoch
from odb_megatron.data.pictures import ImageRules
from odb_megatron.data.records import require_data
from odb_megatron.data.sample import SampleRules
from odb_megatron.errors import raise_usage_errors, usage_errors
from odb_megatron.megatron.attention import Attention, select
from odb_megatron.megatron.config import OdbConfig, add_odb_arguments, given
from odb_megatron.megatron.modelopt.checkpoint import refuse_converted
from odb_megatron.megatron.replica import replica_ranks
from odb_megatron.megatron.validation import RULES, refuse_flags, refuse_unsupported, set_needs
from odb_megatron.plan.record import OPEN_TOTAL

__all__ = [
    "choose_backend",
    "dataset_config",
    "device_type",
    "exchange_shapes",
    "parse_and_validate_args",
    "read_args",
    "require_paths",
    "total_samples",
]


ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Megatron's `extra_args_provider`."""


def parse_and_validate_args(
    args_defaults: dict[str, Any] | None = None, extra_args: ExtraArgs | None = None
) -> argparse.Namespace:
    """Return `read_args`; flags that cannot be used end the process with one message.

    Args:
        args_defaults: as upstream.
        extra_args: see `read_args`.

    Raises:
        SystemExit: flags that cannot be used (2), or `--help` (0).
    """
    with usage_errors():
        return read_args(args_defaults, extra_args)


_NEVER = 2**31 - 1
"""Iterations between evaluations where no `--eval-interval` was given: none while training."""


def read_args(
    args_defaults: dict[str, Any] | None = None, extra_args: ExtraArgs | None = None
) -> argparse.Namespace:
    """Parse `sys.argv`, validate, and set Megatron's global variables.

    Follows `megatron.training.arguments.parse_and_validate_args` (0.19.2), with two steps of its
    own in between: `--odb-epochs` becomes `--train-samples`, and what cannot work is refused.

    Args:
        args_defaults: as upstream; `train_samples` is for a run whose length no flag gives.
        extra_args: adds a script's own flags, as upstream's `extra_args_provider`.

    Raises:
        ValueError: flags that are not known or do not fit together, each named on a line of its
            own.
    """
    from megatron.training import arguments as megatron_arguments
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    args: argparse.Namespace = megatron_arguments.parse_args(
        lambda parser: _add_arguments(parser if extra_args is None else extra_args(parser))
    )
    if getattr(args, "yaml_cfg", None) is not None:
        raise ValueError(
            "--yaml-cfg replaces the command line that --odb reads: give flags instead"
        )
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
    set_of_needs = set_needs(args, vars(args).pop("odb_unset"))
    defaults = dict(args_defaults or {})
    length = defaults.pop("train_samples", None)
    if args.odb_epochs is args.train_samples is args.train_iters is None:
        args.train_samples = length
    try:
        args.odb_epochs = given(args).get("epochs")
        _check_flags(args)
        _resolve_epochs(args)
        megatron_arguments.validate_args(args, defaults)
        config = OdbConfig.from_args(args)
    except Exception as error:
        # What ODB refuses says more than what Megatron names as another flag's need.
        refuse_flags(args, besides=error if isinstance(error, ValueError) else None)
        raise
    if args.eval_interval is None:  # 0.19.2 divides by it all the same (training.py 4481)
        args.eval_interval = _NEVER
    refuse_unsupported(args, config)
    refuse_converted(args)
    if args.pipeline_model_parallel_size > 1 and not config.enabled:
        exchange_shapes(args)  # the baseline's batches are as long as their longest sample
    if set_of_needs and args.rank == 0:
        print(f"odb: set {set_of_needs}", flush=True)
    if config.dry_run:
        args.tensorboard_dir = args.wandb_project = None
        args.log_progress = False
    choose_backend(args)
    set_global_variables(args)
    return args


def exchange_shapes(args: argparse.Namespace) -> None:
    """Have pipeline stages learn shapes from each other, where no step header has them.

    Megatron demands the alltoall dispatcher for it, also of dense models (transformer_config.py,
    0.18.2, 0.19.2).
    """
    args.variable_seq_lengths = True
    if args.num_experts is None:
        args.moe_token_dispatcher_type = "alltoall"


def device_type() -> str:
    """Return what the model runs on: `cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_backend(args: argparse.Namespace) -> Attention:
    """Return the attention of validated arguments.

    Raises:
        ValueError: see `attention.select`.
    """
    device = device_type()
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    return select(args, device_type=device, capability=capability)


def total_samples(args: argparse.Namespace) -> int:
    """Return the run's length in samples: `--train-samples`, or iterations times batch size."""
    total = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    return int(total)


def dataset_config(
    args: argparse.Namespace,
    *,
    rules: SampleRules,
    tokenizer: Any = None,
    renderer: Any = None,
    images: ImageRules | None = None,
) -> SampleDatasetConfig:
    """Build the dataset configuration from `--data-path`, `--split`, `--seed` and their kin."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        raise ValueError(
            "no data: give --data-path FILE.jsonl (or a Megatron prefix, or WEIGHT PATH pairs), "
            "or --train-data-path and --valid-data-path"
        )
    for paths, weights in filter(None, (blend, *(blend_per_split or ()))):
        for path, weight in zip(paths, weights or (), strict=False):
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"the weight of {path} is {weight:g}; expected a number above 0: leave out "
                    "the pairs that are not to be read"
                )
    return SampleDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split if blend is not None else None,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=getattr(args, "mid_level_dataset_surplus", 0.005),
        rules=rules,
        renderer=renderer,
        images=images,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ODB's flags, let `--help` print Megatron's, and errors be raised.

    Some help texts of Megatron 0.19.2 hold a bare percent sign, on which argparse fails.
    """
    formatter = argparse.HelpFormatter(prog="")
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
    if device_type() == "cpu":
        parser.set_defaults(distributed_backend="gloo")
    raise_usage_errors(parser)
    unset = {rule.name: parser.get_default(rule.name) for rule in RULES if rule.is_set}
    parser.set_defaults(**dict.fromkeys(unset), odb_unset=unset)
    return add_odb_arguments(parser)


def _check_flags(args: argparse.Namespace) -> None:
    """Check what Megatron's own validation would take, or say less clearly.

    Raises:
        ValueError: a tokenizer that is not there, a micro-batch size or length that is not given.
    """
    model = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer" and model:
        names_path = model.startswith((".", "/", "~"))
        if os.path.isfile(model) or (names_path and not os.path.exists(model)):
            raise ValueError(
                f"--tokenizer-model {model} is no folder of a Hugging Face tokenizer, which has a "
                "tokenizer_config.json: give that"
            )
    if args.micro_batch_size is None:
        raise ValueError(
            "--micro-batch-size is not given, and without --odb Megatron's padded micro-batches "
            "have that many samples: give it, or add --odb"
        )
    lengths = {name: getattr(args, name) for name in ("odb_epochs", "train_samples", "train_iters")}
    flags = {f"--{name.replace('_', '-')}": n for name, n in lengths.items() if n is not None}
    for flag, value in flags.items():
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if len(flags) > 1:
        raise ValueError(f"{' and '.join(flags)} each give the run's length: keep one")
    if not flags:
        raise ValueError(
            "the run has no length: give --train-samples N, --train-iters N or (with --odb) "
            "--odb-epochs N"
        )


def _resolve_epochs(args: argparse.Namespace) -> None:
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.odb_epochs is None:
        return
    if not any(get_blend_and_blend_per_split(args)):  # the user's own data sets are to come
        _leave_length_open(args)
        return
    if args.data_path is not None and args.split is None:
        args.split = "969, 30, 1"  # Megatron's own default (validate_args 654, 0.19.2)
    rules = SampleRules(context=args.seq_length, token_budget=args.seq_length)
    args.train_samples = args.odb_epochs * count_epoch(dataset_config(args, rules=rules))
    args.odb_epoch_samples = args.train_samples // args.odb_epochs


def _leave_length_open(args: argparse.Namespace) -> None:
    """Prepare for `--odb-epochs` over iterables, whose length shows when they end.

    Raises:
        ValueError: a schedule that needs the run's length.
    """
    needs = args.lr_decay_style != "constant" or args.lr_warmup_fraction is not None
    if needs and args.lr_decay_samples is None:
        raise ValueError(
            "--odb-epochs without --data-path is for iterable data sets, whose number of samples "
            "is known only when they end: give --lr-decay-samples N for the learning rate (or "
            "--lr-decay-style constant), or --train-samples N instead of --odb-epochs; or, where "
            "files are to be trained, --data-path"
        )
    if args.weight_decay_incr_style != "constant":
        raise ValueError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs the run's length, "
            "which --odb-epochs over an iterable data set does not give: use constant, or "
            "--train-samples N instead of --odb-epochs"
        )
    args.train_samples = OPEN_TOTAL


def require_paths(args: argparse.Namespace, *, has_datasets: bool = False) -> None:
    """Check the paths that this rank reads and writes; called by a script that is about to train.

    Args:
        args: from `setup.parse_and_validate_args`.
        has_datasets: the script gives datasets of its own, so that no data flags are read.

    Raises:
        SystemExit: no data flags, or a path that cannot be used (2).
    """
    config = OdbConfig.from_args(args)
    is_source = replica_ranks(args, rank=args.rank).is_source
    with usage_errors():
        if not has_datasets:
            for path in _data_paths(args):
                if is_source or not config.enabled:  # the padded baseline reads on every rank
                    require_data(path)
        if (folder := args.odb_log_dir) is not None and is_source:
            try:
                os.makedirs(folder, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):  # permissions do not tell all
                    pass
            except OSError as error:
                raise ValueError(
                    f"--odb-log-dir {folder} cannot be written ({error}): give a folder that can"
                ) from error


def _data_paths(args: argparse.Namespace) -> Iterator[str]:
    rules = SampleRules(context=args.seq_length, token_budget=args.seq_length)
    data = dataset_config(args, rules=rules)
    for blend in (data.blend, *(data.blend_per_split or ())):
        if blend is not None:
            yield from blend[0]
