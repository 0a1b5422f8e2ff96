"""Runs the arms of one row side by side, round by round, and sums up what was measured.

A round is one optimizer step of every arm, each round beginning with another arm; the first is
warm-up and is not counted. Must not decide how many rounds are run: the caller says before each
whether there is time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from gpu_arms import ArmSteps, StepBatches
from gpu_model import Item
from intervals import rate_ratio_interval

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import PAD_TOKEN, assemble
from odb_megatron.plan.cost import COST_UNIT, CostModel, ModelShape
from odb_megatron.simulation.schedules import Stream

__all__ = [
    "RATIOS",
    "ArmResult",
    "MicroBatchTime",
    "StepMaker",
    "Steps",
    "measure_rounds",
    "microbatch_cost",
    "run_step",
    "summarize_arm",
    "summarize_ratios",
]

RATIOS = {
    "odb_over_standard": ("odb", "standard"),
    "odb_over_standard_mean": ("odb", "standard_mean"),
    "odb_over_sorted": ("odb", "sorted"),
}
_BACKWARD = 3  # forward and backward pass cost three forward passes


class Steps(Protocol):
    """What runs a step; `gpu_model.Trainer`."""

    clock: Any

    def begin_step(self) -> None:
        pass

    def run_replica(self, items: Sequence[Item]) -> tuple[list[Any], torch.Tensor]:
        pass

    def end_step(self, sums: torch.Tensor) -> tuple[list[Any], float]:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTime:
    """One measured micro-batch.

    Attributes:
        tokens: computed tokens.
        squares: sum of squared lengths, as computed.
        time_ns: forward and backward pass, nanoseconds.
    """

    tokens: int
    squares: int
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One measured step.

    Attributes:
        times: of each replica's micro-batches, lengths as computed; idle ones included.
        optimizer_s: finishing the gradients and the optimizer's step.
        num_samples: samples.
        num_tokens: their tokens, padding not counted.
        flops: of the tokens, forward and backward, padding not counted.
        computed_flops: with padding.
        loss: mean loss.
        peak_bytes: most device memory; None on the CPU.
        alloc_retries: times that the allocator had to give memory back to go on, which costs time.
    """

    times: tuple[tuple[MicroBatchTime, ...], ...]
    optimizer_s: float
    num_samples: int
    num_tokens: int
    flops: float
    computed_flops: float
    loss: float
    peak_bytes: int | None
    alloc_retries: int

    @property
    def replica_s(self) -> list[float]:
        """Seconds of each replica's micro-batches."""
        return [sum(one.time_ns for one in replica) / 1e9 for replica in self.times]

    @property
    def step_s(self) -> float:
        """Seconds of the step: the slowest replica, then the optimizer."""
        return max(self.replica_s) + self.optimizer_s


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """What an arm did in a row.

    Attributes:
        steps: of each measured round.
        out_of_memory: what the device said, if it ran out of memory; it is not run again then.
    """

    steps: list[StepResult] = field(default_factory=list)
    out_of_memory: str | None = None


class StepMaker:
    """Makes micro-batches of random tokens with the stream's lengths.

    Args:
        stream: the samples.
        vocab: tokens are below it.
        seed: of the tokens.
    """

    def __init__(self, stream: Stream, *, vocab: int, seed: int) -> None:
        self._lengths: list[int] = stream.lengths.tolist()
        self._vocab = vocab
        self._seed = seed

    def lengths(self, positions: Sequence[int]) -> list[int]:
        """Tokens of the samples at these positions."""
        return [self._lengths[position] for position in positions]

    def items(self, batches: Sequence[Sequence[int]], *, is_padded: bool) -> list[Item]:
        """Return one replica's micro-batches of a step, on the CPU."""
        make = self._padded if is_padded else self._packed
        return [make(batch) for batch in batches]

    def _sample(self, position: int) -> Sample:
        random = np.random.default_rng([self._seed, position])
        tokens = random.integers(0, self._vocab, self._lengths[position] + 1)
        mask = np.ones(len(tokens) - 1, dtype=np.float32)
        return Sample(tokens=tokens[:-1], labels=tokens[1:], loss_mask=mask)

    def _packed(self, positions: Sequence[int]) -> Item:
        if not positions:
            return assemble([], positions=[])
        return assemble([self._sample(each) for each in positions], positions=positions)

    def _padded(self, positions: Sequence[int]) -> Item:
        samples = [self._sample(position) for position in positions]
        width = max(map(len, samples))
        tokens = np.full((len(samples), width), PAD_TOKEN, dtype=np.int64)
        labels, loss_mask = tokens.copy(), np.zeros(tokens.shape, dtype=np.float32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)] = sample.tokens
            labels[row, : len(sample)] = sample.labels
            loss_mask[row, : len(sample)] = sample.loss_mask
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(width).repeat(len(samples), 1),
            "length": torch.tensor([len(sample) for sample in samples]),
        }


def run_step(
    trainer: Steps, step: StepBatches, maker: StepMaker, *, is_padded: bool, shape: ModelShape
) -> StepResult:
    """Train one step, replica after replica.

    Raises:
        RuntimeError: the loss is not a number.
    """
    prepared = [maker.items(batches, is_padded=is_padded) for batches in step]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    retries = _alloc_retries()
    trainer.begin_step()
    marks, sums = [], torch.zeros(2)
    for items in prepared:
        replica_marks, replica_sums = trainer.run_replica(items)
        marks.append(replica_marks)
        sums = replica_sums if len(marks) == 1 else sums + replica_sums
    optimizer_marks, loss = trainer.end_step(sums)
    if not math.isfinite(loss):
        raise RuntimeError(
            f"the loss of a step is {loss}: a finite one was expected, so its times mean nothing; "
            "see the backends' checks, or choose another one with --attention"
        )
    clock = trainer.clock
    computed = [[_computed(maker.lengths(one), is_padded) for one in part] for part in step]
    own = [maker.lengths(one) for part in step for one in part]
    return StepResult(
        times=tuple(
            tuple(
                MicroBatchTime(
                    tokens=sum(lengths),
                    squares=sum(length * length for length in lengths),
                    time_ns=round(clock.elapsed_s(start, end) * 1e9),
                )
                for lengths, (start, end) in zip(replica, pairwise(replica_marks), strict=True)
            )
            for replica, replica_marks in zip(computed, marks, strict=True)
        ),
        optimizer_s=clock.elapsed_s(*optimizer_marks),
        num_samples=sum(map(len, own)),
        num_tokens=sum(map(sum, own)),
        flops=_flops(own, shape),
        computed_flops=_flops([one for part in computed for one in part], shape),
        loss=loss,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        alloc_retries=_alloc_retries() - retries,
    )


def measure_rounds(
    trainer: Steps,
    arms: Mapping[str, ArmSteps],
    maker: StepMaker,
    *,
    shape: ModelShape,
    may_begin: Callable[[int, str], bool],
    on_round: Callable[[int, Mapping[str, ArmResult]], None],
) -> dict[str, ArmResult]:
    """Run the arms in rounds until `may_begin` says no or the steps are used up.

    A round that was not finished by all arms is left out of the results.

    Args:
        trainer: runs the steps.
        arms: their batches.
        maker: makes the micro-batches.
        shape: of the model.
        may_begin: whether this arm's step of this round may begin; round 0 is the warm-up.
        on_round: called when a round was finished, with the results so far.
    """
    results = {name: ArmResult() for name in arms}
    names = list(arms)
    for round_ in range(min(len(one.steps) for one in arms.values())):
        done: dict[str, StepResult] = {}
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            if results[name].out_of_memory is not None:
                continue
            if not may_begin(round_, name):
                return results
            arm = arms[name]
            try:
                done[name] = run_step(
                    trainer, arm.steps[round_], maker, is_padded=arm.is_padded, shape=shape
                )
            except torch.OutOfMemoryError as error:
                results[name] = ArmResult(out_of_memory=str(error).split(". ")[0])
            if results[name].out_of_memory is not None:  # outside the handler: it holds the frames
                gc.collect()
                torch.cuda.empty_cache()
        if round_ > 0:
            for name, step in done.items():
                results[name].steps.append(step)
        on_round(round_, results)
    return results


def microbatch_cost(time: MicroBatchTime, cost: CostModel) -> int:
    """Return the predicted cost of a micro-batch, its fixed price included."""
    return time.tokens * COST_UNIT + (cost.quadratic * time.squares >> 16) + cost.fixed


def summarize_arm(
    result: ArmResult, *, mean_length: float, cost: CostModel, peak_flops: float | None
) -> dict[str, object]:
    """Return the figures of an arm.

    Args:
        result: its steps.
        mean_length: mean tokens of the stream's samples. Samples per second are tokens per second
            over it: which samples fall into the measured steps differs between arms.
        cost: cost model in force.
        peak_flops: of one device; None if not known.
    """
    if result.out_of_memory is not None:
        return {"out_of_memory": result.out_of_memory}
    steps = result.steps
    if not steps:
        return {"num_steps": 0}
    num_replicas = len(steps[0].times)
    seconds = sum(step.step_s for step in steps)
    tokens = sum(step.num_tokens for step in steps)
    computed = sum(one.tokens for step in steps for replica in step.times for one in replica)
    predicted = [
        [sum(microbatch_cost(one, cost) for one in replica) for replica in step.times]
        for step in steps
    ]
    device_s = num_replicas * seconds

    def utilization(flops: float) -> float | None:
        return None if peak_flops is None else flops / (device_s * peak_flops)

    return {
        "samples_per_s": tokens / seconds / mean_length,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_device": tokens / device_s,
        "mfu": utilization(sum(step.flops for step in steps)),
        "computed_mfu": utilization(sum(step.computed_flops for step in steps)),
        "peak_memory_bytes": max(step.peak_bytes or 0 for step in steps) or None,
        "alloc_retries": sum(step.alloc_retries for step in steps),
        "padding_fraction": 1 - tokens / computed,
        "balance_measured": _balance([step.replica_s for step in steps]),
        "balance_predicted": _balance(predicted),
        "step_s": seconds / len(steps),
        "optimizer_s": sum(step.optimizer_s for step in steps) / len(steps),
        "num_steps": len(steps),
        "samples_per_step": sum(step.num_samples for step in steps) / len(steps),
        "mean_M": sum(len(step.times[0]) for step in steps) / len(steps),
        "max_micro_batch_tokens": max(
            one.tokens for step in steps for replica in step.times for one in replica
        ),
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
    }


def summarize_ratios(results: Mapping[str, ArmResult]) -> dict[str, object]:
    """Return the ratios of tokens per second, each with its interval over the rounds."""
    rates = {
        name: [(float(step.num_tokens), step.step_s) for step in result.steps]
        for name, result in results.items()
        if result.steps
    }
    found: dict[str, object] = {}
    for name, (over, under) in RATIOS.items():
        if over in rates and under in rates:
            found[name] = rate_ratio_interval(rates[over], rates[under]).as_json()
    return found


def _alloc_retries() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _computed(lengths: Sequence[int], is_padded: bool) -> list[int]:
    """Lengths as they are computed; an idle micro-batch has one token."""
    if is_padded:
        return [max(lengths)] * len(lengths)
    return list(lengths) or [1]


def _flops(micro_batches: Sequence[Sequence[int]], shape: ModelShape) -> float:
    linear, quadratic = shape.linear_flops(), shape.quadratic_flops()
    lengths = [length for one in micro_batches for length in one]
    return float(_BACKWARD * sum(linear * length + quadratic * length**2 for length in lengths))


def _balance(values: Sequence[Sequence[float]]) -> float:
    """Mean over the steps of mean over largest of the replicas."""
    return float(np.mean([np.mean(step) / np.max(step) for step in values]))
