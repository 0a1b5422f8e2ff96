"""A forward and backward pass that leaves no trace in the model, Megatron's globals or any counter.

Must not run the pass. What is kept and put back follows `train_step`, `forward_backward_*` and
`finalize_model_grads` of Megatron 0.19.2.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from odb_megatron.megatron.compat_metrics import metrics_kept

__all__ = ["no_trace"]

_BUCKET_STATE = ("is_first_batch", "golden_per_param_grad_ready_counts")


@contextmanager
def no_trace(chunks: Iterable[Any], args: argparse.Namespace) -> Iterator[None]:
    """Put back, at its end, what a pass changes; gradients are zero at its begin and end.

    | changed by the pass | put back |
    |---|---|
    | gradients, counts of ready ones | zeroed, reset |
    | buffers of the model: expert bias, tokens per expert, steps of a global loss | copied back |
    | largest attention logit of `--qk-clip` | set back |
    | random generators: Python, NumPy, torch CPU and CUDA, Megatron's tracker | set back |
    | router and multi-token-prediction losses to be logged, counts of FLOPs | set back |
    | checks of the rerun machine, timers | switched off; `interval-time` leaves it out |

    Args:
        chunks: the model's, wrapped for data parallelism.
        args: Megatron's.
    """
    chunks = list(chunks)
    with ExitStack() as stack:
        for kept in (
            _attributes_kept(_changed_attributes(chunks, args)),
            _random_state_kept(),
            metrics_kept(),
            _timers_kept(),
            _buffers_kept(chunks),
            _gradients_zero(chunks),
        ):
            stack.enter_context(kept)
        yield


def _changed_attributes(chunks: list[Any], args: argparse.Namespace) -> list[tuple[Any, str, Any]]:
    """Return (owner, name, value while the pass runs)."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import get_model_config

    changed = [
        (args, "check_for_nan_in_loss_and_grad", False),
        (args, "check_for_spiky_loss", False),
        (get_rerun_state_machine(), "mode", RerunMode.DISABLED),
    ]
    for chunk in chunks:
        changed.append((get_model_config(chunk), "timers", None))
        for name in ("check_for_nan_in_grad", "check_for_large_grads"):
            if hasattr(chunk.ddp_config, name):
                changed.append((chunk.ddp_config, name, False))
        changed += [
            (module, "current_max_attn_logits", module.current_max_attn_logits)
            for module in chunk.modules()
            if hasattr(module, "current_max_attn_logits")
        ]
    return changed


@contextmanager
def _attributes_kept(changed: list[tuple[Any, str, Any]]) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = {
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in tracker.get_states().items()
    }
    python, numpy = random.getstate(), np.random.get_state()
    cpu, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(device)
        current = tracker.get_states()
        for name, state in states.items():
            if isinstance(current[name], torch.Generator):
                current[name].set_state(state)
            else:
                current[name] = state
        tracker.set_states(current)


@contextmanager
def _timers_kept() -> Iterator[None]:
    """Time nothing, and let the timer that spans iterations leave this time out."""
    from megatron.core.timers import Timers
    from megatron.training import global_vars

    timers = global_vars._GLOBAL_TIMERS
    global_vars._GLOBAL_TIMERS = Timers(log_level=-1, log_option="max")
    started = time.time()
    try:
        yield
    finally:
        global_vars._GLOBAL_TIMERS = timers
        timers("interval-time", log_level=0)._start_time += time.time() - started


@contextmanager
def _buffers_kept(chunks: list[Any]) -> Iterator[None]:
    """Keep them on the CPU, where they do not add to the peak."""
    kept = [
        (buffer, buffer.detach().to("cpu", copy=True))
        for chunk in chunks
        for buffer in chunk.module.buffers()  # DDP has its own by that name
    ]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


@contextmanager
def _gradients_zero(chunks: list[Any]) -> Iterator[None]:
    """Begin with gradients of zero, as `train_step` does, and end so."""
    _zero(chunks)
    kept = [
        (group, name, getattr(group, name))
        for chunk in chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        for name in _BUCKET_STATE
        if hasattr(group, name)
    ]
    try:
        yield
    finally:
        _zero(chunks)
        for group, name, value in kept:
            setattr(group, name, value)


def _zero(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for param in chunk.parameters():
            param.grad = None
