"""Lets one process call Megatron's `pretrain()` again and again."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

__all__ = ["forget_run", "keep_imports"]

_runs = 0
_caches: list[Any] = []
"""Cached functions of Megatron's that the garbage collector no longer shows."""


def keep_imports() -> None:
    """Make small runs fast, once, before the first one.

    Most of their time went into collecting garbage among all objects of torch and Megatron, and
    into Megatron's reading its own sources for its flags' help texts whenever it makes a parser.
    """
    from megatron.training import argument_utils, training  # noqa: F401  what a run imports

    from odb_megatron.megatron import run  # noqa: F401

    # A group that its members make alone is named by its ranks, and a second one would find the
    # addresses of the first, which is gone, in the store.
    names: Any = torch.distributed.distributed_c10d
    named = names._hash_ranks_to_str
    names._hash_ranks_to_str = lambda ranks: f"{named(ranks)}/{_runs}"
    factory: Any = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    texts = functools.cache(lambda kind: read(factory.__new__(factory), kind))
    factory._get_field_docstrings = lambda _factory, kind: texts(kind)
    gc.unfreeze()
    gc.collect()
    _caches.extend(held for held in gc.get_objects() if _is_megatrons_cache(held))
    gc.freeze()


def forget_run() -> None:
    """Drop every global of a run, so that the next one starts as in a fresh process."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.training import checkpointing, global_vars, training

    global _runs  # noqa: PLW0603
    _runs += 1
    global_vars.unset_global_variables()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    training.num_checkpoints_memory_reported = 0
    training._seqlen_stats_in_iteration, training._seqlen_stats_active = None, False
    checkpointing._LOADED_ITERATION = None
    _drop_holders()
    gc.collect()
    distributed = torch.distributed
    for group in list(distributed.distributed_c10d._world.pg_map):
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)
    gc.collect()  # three threads of a group live until the last that refers to it is gone


def _drop_holders() -> None:
    """Drop what keeps a model alive, and with it its groups, unseen by the garbage collector.

    Cached methods hold rotary embeddings. Token dispatchers hold the graph of their last
    probabilities, and that, in C++, the hooks of the model's parameters.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for held in gc.get_objects():
        if issubclass(type(held), MoETokenDispatcher):  # isinstance() would ask a proxy's object
            vars(held).clear()
        elif _is_megatrons_cache(held):
            held.cache_clear()
    for held in _caches:
        held.cache_clear()


def _is_megatrons_cache(held: Any) -> bool:
    return type(held) is functools._lru_cache_wrapper and str(
        getattr(held, "__module__", None)
    ).startswith("megatron.")
