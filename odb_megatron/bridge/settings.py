"""What `dataset.odb.*` of a configuration says, and where Bridge keeps Megatron's arguments.

Bridge sets attributes one by one, without looking at types: `megatron.config` does.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from odb_megatron.errors import flag_of
from odb_megatron.megatron.config import SETTINGS

__all__ = ["PATHS", "OdbSettings", "described", "setting_in_bridge", "unknown_setting"]

_settings: Any = make_dataclass(
    "_settings",
    [(name, Any, field(default=None)) for name, one in SETTINGS.items() if one.in_bridge],
)


@dataclass
class OdbSettings(_settings):
    """Values of `dataset.odb`; None leaves the default. There are no other attributes.

    Those not named here are the settings of `megatron.config`.

    Attributes:
        data_path: data instead of the recipe's own: one path, or a list of paths or of
            WEIGHT PATH pairs, as for `--data-path`.
        train_data_path: the same for one split, with the next two.
        split: as for `--split`; None: the recipe's.
        order: order of the samples, `single` or `cyclic`, as Megatron's samplers have it.
    """

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

    @property
    def has_data(self) -> bool:
        """Whether data are named that are not the recipe's own."""
        paths = (self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(path is not None for path in paths)

    def as_flags(self) -> dict[str, Any]:
        """Return the arguments that Megatron's parser would give for these settings."""
        given = {name: getattr(self, name, None) for name in SETTINGS}
        return {"odb": True, **{f"odb_{name}": value for name, value in given.items()}}


def unknown_setting(name: str) -> str:
    """Return what to say of a setting that is not there."""
    known = [field.name for field in fields(OdbSettings)]
    similar = difflib.get_close_matches(name, known, n=1)
    if similar:
        return f"there is no dataset.odb.{name}: did you mean dataset.odb.{similar[0]}?"
    return f"there is no dataset.odb.{name}: the settings are {', '.join(known)}"


def described(settings: OdbSettings) -> str:
    """Return the overrides that give these settings, as a shell takes them."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = [field.name for field in fields(settings) if given[field.name] != field.default]
    overrides = [f"dataset.odb.{name}={_written(given[name])}" for name in changed]
    return " ".join(shlex.quote(text) if '"' in text else text for text in overrides)


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and {*value} & {*",= "} else str(value)


_SECTIONS = {
    "model": "calculate_per_token_loss context_parallel_size cuda_graph_impl "
    "experimental_attention_variant expert_model_parallel_size ffn_hidden_size fp16 fp4 fp8 "
    "hidden_size hybrid_context_parallel kv_channels microbatch_group_size_per_vp_stage "
    "moe_expert_capacity_factor moe_router_load_balancing_type moe_token_dispatcher_type "
    "mtp_num_layers num_attention_heads num_layers num_query_groups "
    "overlap_moe_expert_parallel_comm pipeline_model_parallel_size seq_length sequence_parallel "
    "tensor_model_parallel_size virtual_pipeline_model_parallel_size",
    "train": "decrease_batch_size_if_needed global_batch_size iterations_to_skip micro_batch_size "
    "phase_transition_iterations rampup_batch_size step_batch_size_schedule train_samples",
    "validation": "eval_global_batch_size eval_interval eval_iters eval_micro_batch_size "
    "multiple_validation_sets skip_train",
    "checkpoint": "finetune load non_persistent_ckpt_type save",
    "dist": "distributed_timeout_minutes use_torch_fsdp2 use_tp_pp_dp_mapping",
    "ddp": "data_parallel_sharding_strategy overlap_param_gather use_megatron_fsdp",
    "tokenizer": "tokenizer_model tokenizer_type",
    "dataset": "eod_mask_loss reset_attention_mask reset_position_ids",
}
PATHS = {
    **{name: f"{where}.{name}" for where, names in _SECTIONS.items() for name in names.split()},
    "ddp_average_in_collective": "ddp.average_in_collective",
    "num_experts": "model.num_moe_experts",
    "swiglu": "model.gated_linear_unit",
}
"""Where Bridge's configuration has what Megatron's arguments have; `dataset` is the recipe's."""

_NAMES = {
    "bf16": "mixed_precision=bf16_mixed",
    "dataloader_type": "dataset.odb.order",
    "finetune": "checkpoint.finetune=true",
    "fp16": "mixed_precision=fp16_mixed",
    "num_workers": "dataset.num_workers",
    "odb": "dataset.odb",
    "seed": "rng.seed",
    "train_iters": "train.train_iters",
    "use_distributed_optimizer": "optimizer.use_distributed_optimizer",
    **{
        name: f"dataset.odb.{name}"
        for name in ("data_path", "split", "test_data_path", "train_data_path", "valid_data_path")
    },
}


def setting_in_bridge(name: str) -> str:
    """Return what Bridge calls one of Megatron's arguments, or of ODB's (`odb_...`)."""
    own = f"dataset.odb.{name.removeprefix('odb_')}" if name.startswith("odb_") else None
    return _NAMES.get(name) or own or PATHS.get(name) or flag_of(name)
