"""What a simulation compares policies under: topology, limits, cost model and the sample stream.

Pure values; nothing here plans or scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.policy import BalanceScope, ExchangeMode

__all__ = ["CostShares", "Setting", "Stream"]

Integers = npt.NDArray[np.int64]

_MOST_REPLICAS = 1 << 16
_MOST_SAMPLES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class CostShares:
    """The cost model, stated by shares.

    Attributes:
        attention: share of attention in the cost of a sample of mean length.
        fixed: price of a micro-batch, as a share of the cost of one that is full of tokens.
    """

    attention: float = 0.3
    fixed: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.attention < 1:
            raise ValueError(f"--attention-share {self.attention} is not in [0, 1)")
        if not 0 <= self.fixed < 1:
            raise ValueError(f"--fixed-cost {self.fixed} is not in [0, 1)")

    def model(self, lengths: Integers, *, token_budget: int) -> CostModel:
        """Return the cost model for these lengths.

        Args:
            lengths: of all samples, int64.
            token_budget: tokens of a full micro-batch.
        """
        mean = float(lengths.mean())
        quadratic = self.attention / (1 - self.attention) / mean
        without = CostModel.from_ratios(quadratic=quadratic, fixed_tokens=0)
        costs = without.samples(lengths, np.zeros_like(lengths))
        rate = int(costs.sum()) / int(lengths.sum()) / COST_UNIT
        return CostModel.from_ratios(
            quadratic=quadratic, fixed_tokens=self.fixed * token_budget * rate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of one simulation have in common.

    Attributes:
        num_replicas: data-parallel size.
        token_budget: most tokens of a micro-batch.
        window: samples each replica looks ahead.
        global_batch_size: samples per step asked for.
        cost: cost model.
        sync: where replicas wait for each other.
        num_stages: pipeline stages; 1 for no pipeline.
        num_chunks: virtual pipeline chunks per stage; 1 for none.
        max_delay_steps: see `plan.config.PlanConfig`.
        exchange: whether replicas hand samples to each other (our policies).
        seed: of everything random.
    """

    num_replicas: int
    token_budget: int
    window: int
    global_batch_size: int
    cost: CostModel
    sync: BalanceScope = BalanceScope.STEP
    num_stages: int = 1
    num_chunks: int = 1
    max_delay_steps: int = 8
    exchange: ExchangeMode = ExchangeMode.NONE
    seed: int = 0

    def __post_init__(self) -> None:
        for name, flag in _FLAGS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{flag} must be at least 1, got {getattr(self, name)}")
        if self.num_replicas > _MOST_REPLICAS:
            raise ValueError(
                f"--dp {self.num_replicas} is above the {_MOST_REPLICAS} that are simulated: "
                "lower it"
            )
        if self.num_chunks > 1 and self.num_stages == 1:
            raise ValueError(
                f"--vpp {self.num_chunks} needs a pipeline: pass --pp with at least 2 stages"
            )

    @property
    def count_multiple(self) -> int:
        """The micro-batch count is a multiple of this (Megatron's group size under VPP)."""
        return self.num_stages if self.num_chunks > 1 else 1

    def num_micro_batches(self, mean_samples: float) -> int:
        """Return the count per step that holds the global batch size most nearly.

        Args:
            mean_samples: samples of an average micro-batch.
        """
        multiple = self.count_multiple
        wanted = self.global_batch_size / (self.num_replicas * mean_samples * multiple)
        return max(1, round(wanted)) * multiple


_FLAGS = {
    "num_replicas": "--dp",
    "token_budget": "--token-budget",
    "window": "--window",
    "global_batch_size": "--global-batch-size",
    "num_stages": "--pp",
    "num_chunks": "--vpp",
    "max_delay_steps": "--max-delay-steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The samples of a run, in the order in which it reads them.

    Attributes:
        lengths: tokens of the sample at each position, int64; 0 where a position emits nothing.
        costs: its cost, int64.
        num_epochs: the stream is so many epochs of equal size.
    """

    lengths: Integers
    costs: Integers
    num_epochs: int = 1

    @classmethod
    def of_epochs(cls, lengths: Integers, *, epochs: int, cost: CostModel, seed: int) -> Stream:
        """Repeat the samples for some epochs, each in an order of its own.

        Args:
            lengths: of one epoch, int64, at least one.
            epochs: how many.
            cost: cost model.
            seed: of the orders; the first epoch's is that of `lengths`.
        """
        if epochs < 1:
            raise ValueError(f"--epochs must be at least 1, got {epochs}")
        if epochs * len(lengths) > _MOST_SAMPLES:
            raise ValueError(
                f"--epochs {epochs} of {len(lengths)} samples are more than the {_MOST_SAMPLES} "
                "samples that are simulated: lower --epochs, or give fewer lengths"
            )
        random = np.random.default_rng([seed, 1])
        later = [lengths[random.permutation(len(lengths))] for _ in range(epochs - 1)]
        stream = np.concatenate([lengths, *later])
        costs = cost.samples(stream, np.zeros_like(stream))
        return cls(lengths=stream, costs=costs, num_epochs=epochs)

    def epochs(self) -> Iterator[Integers]:
        """Yield the stream positions of each epoch."""
        yield from np.split(np.arange(len(self), dtype=np.int64), self.num_epochs)

    def __len__(self) -> int:
        return len(self.lengths)
