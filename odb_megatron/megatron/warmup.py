"""Runs the worst micro-batches once before the first step, so that lack of memory shows at once.

Must not read the run's data, train, or leave a trace (`no_trace`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from odb_megatron.data.thd import MicroBatchLayout, layout, slice_micro_batch
from odb_megatron.data.worst_case import WorstCase, worst_cases
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.device_memory import MemoryUse, gibibytes, memory_use, reset_peak
from odb_megatron.megatron.no_trace import no_trace
from odb_megatron.megatron.replica_ranks import ReplicaRanks
from odb_megatron.megatron.topology import count_multiple, padding_multiple
from odb_megatron.plan.padding import OverlongPolicy

__all__ = ["WarmUp", "WorstCaseError", "num_in_flight", "optimizer_bytes", "run_cases", "warm_up"]


class WorstCaseError(ValueError):
    """The worst case does not fit into the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What the worst micro-batches took on one rank, or at most on several.

    Attributes:
        set_aside: bytes that were set aside for optimizer states.
        took: memory use with each of them.
    """

    set_aside: int
    took: tuple[tuple[WorstCase, MemoryUse], ...]

    def numbers(self) -> list[int]:
        """Return the memory use as numbers, of which ranks can take the largest."""
        numbers = [(use.peak, use.reserved) for _, use in self.took]
        return [self.set_aside, *chain.from_iterable(numbers)]

    def with_numbers(self, numbers: Sequence[float]) -> WarmUp:
        """Return the same micro-batches with other numbers."""
        set_aside, *pairs = (int(number) for number in numbers)
        took = [
            (case, replace(use, peak=peak, reserved=reserved))
            for (case, use), peak, reserved in zip(self.took, pairs[::2], pairs[1::2], strict=True)
        ]
        return WarmUp(set_aside=set_aside, took=tuple(took))

    def __str__(self) -> str:
        """For a message."""
        cases = "; ".join(f"{case}: {use}" for case, use in self.took)
        return f"worst case: {cases}; {_set_aside(self.set_aside)}"


def run_cases(args: argparse.Namespace, config: OdbConfig) -> tuple[WorstCase, ...]:
    """Return the worst micro-batches of a run.

    A micro-batch has no more samples than a step has.
    """
    solo = config.overlong is OverlongPolicy.SOLO
    batch = int(args.global_batch_size)
    return worst_cases(
        token_budget=config.token_budget,
        longest=config.context if solo else min(config.context, config.token_budget),
        rule=config.size_rule(padding_multiple(args)),
        max_samples=batch,
    )


def num_in_flight(args: argparse.Namespace) -> int:
    """Return how many micro-batches fill the pipeline, so that its first stage reaches its peak.

    1F1B holds as many as there are stages; the interleaved schedule's warm-up,
    `2 (stages - 1) + (chunks - 1) group` passes and one more, ends within two groups.
    """
    if getattr(args, "virtual_pipeline_model_parallel_size", None):
        return 2 * count_multiple(args)
    return int(args.pipeline_model_parallel_size)


def warm_up(
    train_step: Mapping[str, Any], args: argparse.Namespace, config: OdbConfig, place: ReplicaRanks
) -> WarmUp:
    """Run each worst case once, through the schedule that trains, and discard it.

    Every rank of the world calls it, before its first step.

    Args:
        train_step: arguments of Megatron's `train_step`, by name.
        args: Megatron's.
        config: ODB's.
        place: of this rank in its replica.

    Raises:
        WorstCaseError: out of memory.
    """
    found = []
    set_aside = optimizer_bytes(train_step["optimizer"], args)
    doing = "states of the optimizer"
    try:
        held = torch.empty(set_aside, dtype=torch.uint8, device=torch.cuda.current_device())
        for case in run_cases(args, config):
            doing = f"{case}, {num_in_flight(args)} micro-batches in the pipeline"
            reset_peak()
            with no_trace(train_step["model"], args):
                _run(case, train_step, args, config, place)
                torch.cuda.synchronize()
            found.append((case, memory_use()))
        del held
    except torch.OutOfMemoryError as error:
        raise WorstCaseError(_message(args, config, doing, set_aside, error)) from error
    reset_peak()
    return WarmUp(set_aside=set_aside, took=tuple(found))


def optimizer_bytes(optimizer: Any, args: argparse.Namespace) -> int:
    """Return what the optimizer's states will take that its first step allocates on the device.

    Adam keeps two moments of each parameter (of this rank's share, where they are distributed),
    other optimizers one. None where states live on the CPU (`--optimizer-cpu-offload`) or were
    loaded from a checkpoint.

    Args:
        optimizer: Megatron's.
        args: Megatron's.
    """
    if optimizer is None or getattr(args, "optimizer_cpu_offload", False):
        return 0
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Any = getattr(part, "optimizer", None)
        if inner is None:  # a rank without a share
            continue
        for group in inner.param_groups:
            for param in group["params"]:
                if not inner.state.get(param):
                    total += param.numel() * _state_size(param, args)
    return total


def _state_size(param: torch.Tensor, args: argparse.Namespace) -> int:
    """Return the bytes of state for each of a parameter's elements."""
    if args.optimizer == "sgd":
        return param.element_size() if args.sgd_momentum else 0
    if args.optimizer != "adam":
        return param.element_size()
    if not getattr(args, "use_precision_aware_optimizer", False):
        return 2 * param.element_size()
    main = args.main_params_dtype
    kept = 0 if main is torch.float32 else main.itemsize  # a float32 one exists already
    return int(args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize + kept)


def _run(
    case: WorstCase,
    train_step: Mapping[str, Any],
    args: argparse.Namespace,
    config: OdbConfig,
    place: ReplicaRanks,
) -> None:
    length = config.micro_batch_length(padding_multiple(args))
    rule = config.size_rule(padding_multiple(args))
    whole = case.micro_batch(vocab_size=args.padded_vocab_size, rule=rule)
    item: MicroBatchLayout
    if place.uses_tokens:
        item = slice_micro_batch(whole, size=place.context_size, rank=place.context_rank)
    else:
        item = layout(case.lengths, positions=whole.positions, rule=rule)
    count, chunks = num_in_flight(args), train_step["model"]
    iterators = [iter([item] * count) for _ in chunks]
    train_step["forward_backward_func"](
        forward_step_func=train_step["forward_step_func"],
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=count,
        seq_length=length or args.seq_length,
        micro_batch_size=1,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
        p2p_communicator=train_step.get("p2p_communicator"),
        pg_collection=train_step.get("pg_collection"),
    )


def _set_aside(num_bytes: int) -> str:
    if not num_bytes:
        return "the optimizer allocates no states on the device"
    return f"{gibibytes(num_bytes)} of it set aside for states that the optimizer will allocate"


def _message(
    args: argparse.Namespace,
    config: OdbConfig,
    doing: str,
    set_aside: int,
    error: torch.OutOfMemoryError,
) -> str:
    return (
        f"out of memory on rank {args.rank} in --odb-warmup-worst-case, with {doing}: "
        f"{memory_use()}; {_set_aside(set_aside)}; lower --odb-token-budget "
        f"({config.token_budget}), raise tensor, pipeline or context parallelism, or recompute "
        "activations (--recompute-granularity full --recompute-method uniform "
        f"--recompute-num-layers 1); torch says: {str(error)[:200]}"
    )
