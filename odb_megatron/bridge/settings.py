"""What `dataset.odb.*` of a recipe's configuration says, and the `--odb-*` flags it stands for.

Must not import Bridge or decide what works with what. Bridge sets attributes one by one, without
looking at types: the flags' own parser checks them, when the run starts.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from odb_megatron.errors import raise_usage_errors
from odb_megatron.megatron.config import add_odb_arguments

__all__ = ["OdbSettings", "described", "flag_values", "in_bridge_words", "unknown_setting"]

_DATA_FIELDS = {
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "split",
    "order",
}


@dataclass(kw_only=True, slots=True)
class OdbSettings:
    """Values of `dataset.odb`; None leaves the flag's default. There are no other attributes.

    Attributes:
        token_budget: `--odb-token-budget`; so do all that are not named below.
        data_path: data instead of the recipe's own: one path, or a list of paths or of
            WEIGHT PATH pairs, as for `--data-path`.
        train_data_path: the same for one split, with the next two.
        valid_data_path: see above.
        test_data_path: see above.
        split: as for `--split`; None: the recipe's.
        order: order of the samples, `single` or `cyclic`, as Megatron's samplers have it.
    """

    token_budget: int | None = None
    pad_to: Any = None
    cost: str | None = None
    template_args: Any = None
    overlong: str | None = None
    loss_per: str | None = None
    max_bad_records: int | None = None
    timeout_s: float | None = None
    log_dir: str | None = None
    dry_run: bool | None = None
    data_path: Any = None
    train_data_path: Any = None
    valid_data_path: Any = None
    test_data_path: Any = None
    split: str | None = None
    order: str = "single"

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__:
            raise AttributeError(unknown_setting(name))
        object.__setattr__(self, name, value)


def unknown_setting(name: str) -> str:
    """Return what to say of a setting that is not there."""
    known = [field.name for field in fields(OdbSettings)]
    similar = difflib.get_close_matches(name, known, n=1)
    if similar:
        return f"there is no dataset.odb.{name}: did you mean dataset.odb.{similar[0]}?"
    return f"there is no dataset.odb.{name}: the settings are {', '.join(known)}"


def flag_values(settings: OdbSettings) -> dict[str, Any]:
    """Return the parsed `--odb*` arguments that settings stand for, defaults included.

    Raises:
        ValueError: a value of a wrong type or none of the choices, in Bridge's words.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    raise_usage_errors(parser)
    add_odb_arguments(parser)
    flags = ["--odb"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in _DATA_FIELDS or value is None:
            continue
        flag = "--odb-" + field.name.replace("_", "-")
        if "bool" in str(field.type):
            if not isinstance(value, bool):
                raise ValueError(f"dataset.odb.{field.name} is {value!r}: give true or false")
            if value:
                flags.append(flag)
        elif isinstance(value, Mapping):
            flags.append(f"{flag}={json.dumps(dict(value))}")
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")
    if settings.order not in ("single", "cyclic"):
        raise ValueError(
            f"dataset.odb.order is {settings.order!r}: give single (Megatron's sequential order) "
            "or cyclic"
        )
    try:
        return vars(parser.parse_args(flags))
    except ValueError as error:
        raise ValueError(in_bridge_words(str(error))) from error


def described(settings: OdbSettings) -> str:
    """Return the overrides that give these settings, as a shell takes them."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = {field.name for field in fields(settings) if given[field.name] != field.default}
    written = {name: _written(value) for name, value in given.items() if name in changed}
    overrides = (f"dataset.odb.{name}={text}" for name, text in written.items())
    return " ".join(shlex.quote(text) if '"' in text else text for text in overrides)


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and {*value} & {*",= "} else str(value)


_NAMES = {
    "--odb": "dataset.odb",
    "--calculate-per-token-loss": "model.calculate_per_token_loss=true",
    "--micro-batch-size": "train.micro_batch_size",
    "--eval-micro-batch-size": "validation.eval_micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--train-samples": "train.train_samples",
    "--train-iters": "train.train_iters",
    "--seq-length": "model.seq_length",
    "--cuda-graph-impl": "model.cuda_graph_impl",
    "--reset-position-ids": "dataset.reset_position_ids",
    "--reset-attention-mask": "dataset.reset_attention_mask",
    "--eod-mask-loss": "dataset.eod_mask_loss",
    "--rampup-batch-size": "train.rampup_batch_size",
    "--step-batch-size-schedule": "train.step_batch_size_schedule",
    "--decrease-batch-size-if-needed": "train.decrease_batch_size_if_needed",
    "--iterations-to-skip": "train.iterations_to_skip",
    "--non-persistent-ckpt-type": "checkpoint.non_persistent_ckpt_type",
    "--multiple-validation-sets": "validation.multiple_validation_sets",
    "--hybrid-context-parallel": "model.hybrid_context_parallel",
    "--use-distributed-optimizer": "optimizer.use_distributed_optimizer",
    "--data-path": "dataset.odb.data_path",
    "--train-data-path": "dataset.odb.train_data_path",
    "--valid-data-path": "dataset.odb.valid_data_path",
    "--split": "dataset.odb.split",
    "--seed": "rng.seed",
    "--eval-iters": "validation.eval_iters",
    "--finetune": "checkpoint.finetune=true",
    "--bf16": "mixed_precision=bf16_mixed",
    "--fp16": "mixed_precision=fp16_mixed",
    "--experimental-attention-variant": "model.experimental_attention_variant",
    "--microbatch-group-size-per-virtual-pipeline-stage": (
        "model.microbatch_group_size_per_vp_stage"
    ),
}
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def in_bridge_words(text: str) -> str:
    """Return a message about Megatron's flags with the names that Bridge's configuration has."""

    def named(found: re.Match[str]) -> str:
        flag = found[0]
        if flag in _NAMES:
            return _NAMES[flag]
        if flag.startswith("--odb-"):
            return "dataset.odb." + flag.removeprefix("--odb-").replace("-", "_")
        return flag

    return _FLAG.sub(named, text)
