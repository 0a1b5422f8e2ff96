"""Bridge's configuration and state, seen as the arguments that `odb_megatron.megatron` reads.

Must not change the configuration, the end of the loop aside (`train_iters`). What Megatron counts
in its arguments Bridge counts in its `TrainState`: it is read there.
"""

from __future__ import annotations

import argparse
from typing import Any

from odb_megatron.bridge.settings import OdbSettings, flag_values

__all__ = ["BridgeArgs", "data_paths", "transformer_of"]

_NO_SPLIT = "969, 30, 1"  # Megatron's own default (validate_args 654, 0.19.2)


class BridgeArgs(argparse.Namespace):
    """Arguments of one run.

    Args:
        cfg: Bridge's `ConfigContainer`, after `validate()`.
        state: Bridge's `GlobalState`, whose `train_state` is read at each question.
        rank: this rank.
        world_size: number of ranks.
    """

    __slots__ = ("_state",)  # not among the arguments, which ranks compare

    def __init__(self, cfg: Any, state: Any, *, rank: int, world_size: int) -> None:
        super().__init__()
        self._state = state
        self.rank, self.world_size = rank, world_size
        self.data_parallel_size = cfg.data_parallel_size
        self.iteration = 0  # of the checkpoint, once it is loaded
        settings: OdbSettings = cfg.dataset.odb
        vars(self).update(flag_values(settings))
        vars(self).update(_of_model(cfg.model))
        vars(self).update(_of_run(cfg))
        vars(self).update(_of_data(cfg, settings))

    @property
    def curr_iteration(self) -> int:
        """Iterations done."""
        return int(self._state.train_state.step)

    @property
    def consumed_train_samples(self) -> int:
        """Samples trained."""
        return int(self._state.train_state.consumed_train_samples)

    @property
    def consumed_valid_samples(self) -> int:
        """Samples evaluated."""
        return int(self._state.train_state.consumed_valid_samples)

    @property
    def train_iters(self) -> int:
        """Where the loop ends."""
        return int(self._state.cfg.train.train_iters or 0)

    @train_iters.setter
    def train_iters(self, value: int) -> None:
        self._state.cfg.train.train_iters = value

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; 0 until the tokenizer is there."""
        model = self._state.cfg.model
        if not model.vocab_size:
            return 0
        if not model.should_pad_vocab:
            return int(model.vocab_size)
        from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

        return int(
            calculate_padded_vocab_size(
                model.vocab_size,
                model.make_vocab_size_divisible_by,
                self.tensor_model_parallel_size,
                logging_enabled=False,
            )
        )


def transformer_of(model: Any) -> Any:
    """Return the transformer's configuration: a `GPTModelProvider` is one, others have one."""
    return getattr(model, "transformer", model)


_MODEL_NAMES = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    **{
        name: name
        for name in (
            "calculate_per_token_loss",
            "context_parallel_size",
            "cuda_graph_impl",
            "enable_cuda_graph",
            "experimental_attention_variant",
            "expert_model_parallel_size",
            "external_cuda_graph",
            "ffn_hidden_size",
            "fp16",
            "fp4",
            "fp8",
            "hidden_size",
            "hybrid_context_parallel",
            "kv_channels",
            "microbatch_group_size_per_vp_stage",
            "moe_expert_capacity_factor",
            "moe_router_load_balancing_type",
            "moe_token_dispatcher_type",
            "mtp_num_layers",
            "num_attention_heads",
            "num_layers",
            "num_query_groups",
            "overlap_moe_expert_parallel_comm",
            "pipeline_model_parallel_size",
            "sequence_parallel",
            "tensor_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
        )
    },
}


def _of_model(model: Any) -> dict[str, Any]:
    transformer = transformer_of(model)
    found = {
        name: getattr(transformer, source, getattr(model, source, None))
        for name, source in _MODEL_NAMES.items()
    }
    found["seq_length"] = model.seq_length
    heads = found["num_attention_heads"]
    groups = found["num_query_groups"]
    found["group_query_attention"] = groups is not None and groups != heads
    return found


def _of_run(cfg: Any) -> dict[str, Any]:
    train, evaluation, checkpoint, dist = cfg.train, cfg.validation, cfg.checkpoint, cfg.dist
    return {
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "train_samples": train.train_samples,
        "rampup_batch_size": train.rampup_batch_size,
        "step_batch_size_schedule": getattr(train, "step_batch_size_schedule", None),
        "decrease_batch_size_if_needed": train.decrease_batch_size_if_needed,
        "iterations_to_skip": getattr(train, "iterations_to_skip", None),
        "phase_transition_iterations": getattr(train, "phase_transition_iterations", None),
        "eval_iters": evaluation.eval_iters or 0,
        "eval_interval": evaluation.eval_interval,
        "eval_global_batch_size": evaluation.eval_global_batch_size,
        "eval_micro_batch_size": evaluation.eval_micro_batch_size,
        "skip_train": evaluation.skip_train,
        "full_validation": False,  # Bridge has the field and does not read it (eval.py, 0.6.2)
        "multiple_validation_sets": getattr(evaluation, "multiple_validation_sets", False),
        "save": checkpoint.save,
        "load": checkpoint.load,
        "finetune": checkpoint.finetune,
        "non_persistent_ckpt_type": checkpoint.non_persistent_ckpt_type,
        "distributed_timeout_minutes": dist.distributed_timeout_minutes,
        "use_tp_pp_dp_mapping": dist.use_tp_pp_dp_mapping,
        "use_megatron_fsdp": dist.use_megatron_fsdp or cfg.ddp.use_megatron_fsdp,
        "use_torch_fsdp2": dist.use_torch_fsdp2,
        "data_parallel_sharding_strategy": cfg.ddp.data_parallel_sharding_strategy,
        "overlap_param_gather": cfg.ddp.overlap_param_gather,
    }


def _of_data(cfg: Any, settings: OdbSettings) -> dict[str, Any]:
    recipe = cfg.dataset.recipe
    blend, per_split = _blends(recipe, settings)
    seed = getattr(recipe, "random_seed", getattr(recipe, "seed", None))
    splits = per_split or (None, None, None)
    names = ("train_data_path", "valid_data_path", "test_data_path")
    split = settings.split or getattr(recipe, "split", None)
    return {
        "data_path": blend,
        "data_args_path": None,
        "per_split_data_args_path": None,
        **dict(zip(names, splits, strict=True)),
        "split": (split or _NO_SPLIT) if blend is not None else None,
        "seed": cfg.rng.seed if seed is None else seed,
        "dataloader_type": settings.order,
        "data_sharding": getattr(recipe, "data_sharding", True),
        "num_workers": cfg.dataset.num_workers,
        "num_dataset_builder_threads": getattr(recipe, "num_dataset_builder_threads", 1),
        "data_cache_path": getattr(recipe, "path_to_cache", None),
        "mmap_bin_files": getattr(recipe, "mmap_bin_files", True),
        "tokenizer_type": cfg.tokenizer.tokenizer_type,
        "tokenizer_model": cfg.tokenizer.tokenizer_model,
        "reset_position_ids": getattr(recipe, "reset_position_ids", False),
        "reset_attention_mask": getattr(recipe, "reset_attention_mask", False),
        "eod_mask_loss": getattr(recipe, "eod_mask_loss", False),
    }


def data_paths(cfg: Any) -> list[str]:
    """Return the data paths that a run of this configuration reads its samples from."""
    from megatron.core.datasets.utils import get_blend_from_list

    blend, per_split = _blends(cfg.dataset.recipe, cfg.dataset.odb)
    blends = (get_blend_from_list(words) for words in (blend, *(per_split or ())))
    return [path for paths, *_ in filter(None, blends) for path in paths]


def _blends(
    recipe: Any, settings: OdbSettings
) -> tuple[list[str] | None, list[list[str] | None] | None]:
    """Return the files of one blend, or those of each split, as Megatron's flags have them."""
    own = [settings.train_data_path, settings.valid_data_path, settings.test_data_path]
    if settings.data_path is not None:
        return _as_list(settings.data_path), None
    if any(path is not None for path in own):
        return None, [None if path is None else _as_list(path) for path in own]
    blend = getattr(recipe, "blend", None)
    if blend is not None:
        return _as_words(blend), None
    per_split = getattr(recipe, "blend_per_split", None)
    if per_split is None:
        return None, None
    return None, [None if one is None else _as_words(one) for one in per_split]


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _as_words(blend: Any) -> list[str]:
    """Return WEIGHT PATH pairs, or paths, of a blend as mcore has it: (paths, weights or None)."""
    paths, weights = blend
    if weights is None:
        return list(paths)
    return [str(word) for pair in zip(weights, paths, strict=True) for word in pair]
