"""Length-sorted padded batches under a token budget, chosen with all lengths known beforehand.

The offline oracle that online batching is compared with. Pure: lengths in, stream positions out;
replicas enter as data. Must not read a sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Round", "SortedStep", "num_padded", "sorted_rounds", "sorted_steps"]

Round = tuple[tuple[int, ...], ...]
"""One micro-batch of stream positions for each replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedStep:
    """One optimizer step: `rounds[m][replica]` is that replica's micro-batch m."""

    rounds: tuple[Round, ...]

    @property
    def num_samples(self) -> int:
        """Samples of all replicas."""
        return sum(len(batch) for one in self.rounds for batch in one)


def sorted_rounds(
    lengths: Sequence[int], *, token_budget: int, max_samples: int, num_replicas: int
) -> list[Round]:
    """Cut the samples, longest first, into batches; deal neighbours to the replicas of a round.

    A batch holds as many samples as fit `longest * number <= token_budget`. Batches of most samples
    are halved until their number is a multiple of the replicas.

    Args:
        lengths: by stream position.
        token_budget: most tokens of a batch, padding included.
        max_samples: most samples of a batch, so that a round is no larger than a step.
        num_replicas: data-parallel size.

    Raises:
        ValueError: a sample over the budget, no room for one, or samples that are no multiple of
            the replicas.
    """
    if max(lengths, default=0) > token_budget:
        raise ValueError(f"a sample of {max(lengths)} tokens is over the budget of {token_budget}")
    if len(lengths) % num_replicas or max_samples < 1:
        raise ValueError(
            f"{len(lengths)} samples in batches of at most {max_samples} cannot be dealt to "
            f"{num_replicas} replicas: give a multiple of the replicas, and at least 1 per batch"
        )
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        size = min(max_samples, token_budget // max(1, lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    while len(batches) % num_replicas:
        at = max(range(len(batches)), key=lambda index: (len(batches[index]), -index))
        half = len(batches[at]) // 2
        batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
    return [
        tuple(tuple(batch) for batch in batches[at : at + num_replicas])
        for at in range(0, len(batches), num_replicas)
    ]


def sorted_steps(rounds: Sequence[Round], *, global_batch_size: int, seed: int) -> list[SortedStep]:
    """Shuffle the rounds and gather them into steps of about `global_batch_size` samples.

    A step ends where the samples emitted so far come closest to that many per step.
    """
    shuffled = list(rounds)
    random.Random(seed).shuffle(shuffled)
    steps: list[SortedStep] = []
    current: list[Round] = []
    emitted = 0
    for one in shuffled:
        size = sum(len(batch) for batch in one)
        target = (len(steps) + 1) * global_batch_size
        if current and abs(emitted - target) < abs(emitted + size - target):
            steps.append(SortedStep(rounds=tuple(current)))
            current = []
        current.append(one)
        emitted += size
    if current:
        steps.append(SortedStep(rounds=tuple(current)))
    return steps


def num_padded(positions: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a batch, padding included."""
    return len(positions) * max(lengths[position] for position in positions)
