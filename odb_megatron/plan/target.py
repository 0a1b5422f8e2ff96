"""What a step should come to on every replica, from gathered records alone.

Pure, integers only: leaders may have different CPUs, and all must find the same numbers. Kept
between steps: what an average sample is, and how much of a replica's reach to leave unused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isqrt

import numpy as np

from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord

__all__ = ["Knowledge", "StepTarget", "StepWish", "choose_count", "wanted_samples"]

_PPM = 1_000_000
_MOST_SAMPLES = 1 << 22
_FIRST_MARGIN = 20_000
_MARGINS = (-150_000, 120_000)
_GAIN = 4
_LARGEST_CHANGE = 10_000
_BALANCE_PER_PRICE = 100
_MOST_STRETCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTarget:
    """What all replicas derive from the first exchange.

    Attributes:
        end: stream positions below this may be drawn for this step.
        cost: cost each replica should reach; None for no target (everything drawn is emitted in
            the last step, nothing in another).
        steps_left: steps the remaining samples should spread over, this one included.
        num_micro_batches: micro-batches of the step, 0 for as many as are needed.
        heights: costs of micro-batches that take a large sample, descending (balance scope
            `microbatch`); the others share what is left of `cost`.
    """

    end: int
    cost: int | None
    steps_left: int
    num_micro_batches: int = 0
    heights: tuple[int, ...] = ()

    def digest(self) -> int:
        """Signed 64-bit digest, compared in the second exchange."""
        text = (
            f"{self.end} {self.cost} {self.steps_left} {self.num_micro_batches} {self.heights}"
        )
        return int.from_bytes(
            hashlib.sha256(text.encode()).digest()[:8], "little", signed=True
        )


def wanted_samples(*, global_batch_size: int, step: int, consumed: int) -> int:
    """Return the samples a step should have so that the running mean is the batch size.

    Args:
        global_batch_size: samples per step asked for.
        step: steps before this one.
        consumed: positions they consumed.
    """
    half = global_batch_size // 2
    behind = global_batch_size * step - consumed
    return max(1, global_batch_size + max(-half, min(half, behind)))


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What all replicas have learned from each other's records; equal everywhere.

    Attributes:
        num_samples: samples seen (weight of the sums below; old ones fade).
        tokens: their padded tokens.
        cost: their cost.
        spread: sum of their squared excess cost, in tokens squared.
        margin: parts per million of a replica's reach to leave unused; negative to use more than
            the oldest samples alone allow.
    """

    num_samples: int = 0
    tokens: int = 0
    cost: int = 0
    spread: int = 0
    margin: int = _FIRST_MARGIN

    @property
    def mean_cost(self) -> int:
        """Cost of an average sample, at least 1."""
        return max(1, self.cost // max(1, self.num_samples))

    @property
    def cost_per_token(self) -> int:
        """Cost of an average padded token, at least 1; 0 while nothing is known."""
        return max(1, self.cost // self.tokens) if self.tokens else 0

    def deviation(self, num_samples: int, *, unit: int) -> int:
        """Return the standard deviation of the excess cost of so many samples.

        Args:
            num_samples: how many.
            unit: cost of a token without its quadratic part.
        """
        variance = num_samples * self.spread // max(1, self.num_samples)
        return isqrt(variance) * unit

    def observe(self, table: RecordTable[WindowRecord]) -> None:
        """Add what replicas have observed since their last records."""
        self.num_samples += table.total("num_observed")
        self.tokens += table.total("tokens_observed")
        self.cost += table.total("cost_observed")
        self.spread += table.total("spread_observed")
        if self.num_samples > _MOST_SAMPLES:
            self.num_samples //= 2
            self.tokens //= 2
            self.cost //= 2
            self.spread //= 2

    def learn(self, table: RecordTable[PlanRecord], *, fixed: int, count: int) -> None:
        """Adapt the margin to a step's balance.

        A full micro-batch costs its fixed price once: the cheaper that price, the less an
        imbalance is worth. The margin grows while the imbalance is above that and shrinks below.

        Args:
            table: second records of the step.
            fixed: price of a micro-batch.
            count: micro-batches of the step.
        """
        costs = table.column("cost")
        most = int(costs.max())
        if not most:
            return
        lost = _PPM - _PPM * table.total("cost") // (len(table) * most)
        allowed = _PPM * fixed * count // (_BALANCE_PER_PRICE * most)
        change = max(-_LARGEST_CHANGE, min(_LARGEST_CHANGE, _GAIN * (lost - allowed)))
        self.margin = max(_MARGINS[0], min(_MARGINS[1], self.margin + change))

    def state(self) -> list[int]:
        """Return the fields as a list."""
        return [self.num_samples, self.tokens, self.cost, self.spread, self.margin]

    @classmethod
    def restore(cls, state: list[int]) -> Knowledge:
        """Inverse of `state`."""
        num_samples, tokens, cost, spread, margin = state
        return cls(
            num_samples=num_samples, tokens=tokens, cost=cost, spread=spread, margin=margin
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWish:
    """What a step should be, before the replicas' reach is looked at.

    Attributes:
        cost: cost per replica that the wanted samples come to.
        token_budget: most tokens of a micro-batch.
        count_multiple: the micro-batch count is a multiple of this.
    """

    cost: int
    token_budget: int
    count_multiple: int


def choose_count(
    wish: StepWish, table: RecordTable[WindowRecord], *, margin: int
) -> tuple[int, int]:
    """Return the step's micro-batch count and cost per replica.

    The count is the one whose reach comes closest to the wish: a micro-batch has its fixed price
    however full it is, so the cost may stretch by half a micro-batch to fill the last one, and
    the next step asks for that much less.

    Args:
        wish: what the step should be.
        table: first records of the step.
        margin: see `Knowledge`.
    """
    rates = table.column("cost_per_token")
    rates = rates[rates > 0]
    least = int(rates.min()) if len(rates) else 1
    reach = max(1, wish.token_budget * least * (_PPM - margin) // _PPM)
    multiple = wish.count_multiple
    low = max(multiple, wish.cost // reach // multiple * multiple)
    options = []
    for count in (low, low + multiple):
        stretch = wish.cost * multiple // (2 * count)
        most = wish.cost + min(stretch, wish.cost // _MOST_STRETCH)
        cost = min(most, count * reach)
        options.append((abs(cost - wish.cost), count, cost))
    _, count, cost = min(options)
    must = table.largest("cost_due")
    if must > cost:  # nobody can stay below: let everyone come up to it
        cost = must
        count = max(count, -(-cost // reach))
    count = max(count, table.largest("micro_batches_due"))
    return -(-count // multiple) * multiple, max(1, cost)


def squared_tokens(excess: np.ndarray[tuple[int], np.dtype[np.float64]], *, unit: int) -> int:
    """Return the sum of squared excess costs in tokens squared, as it goes into a record."""
    tokens = np.minimum(np.abs(excess) / unit, float(1 << 30)).astype(np.int64)
    squares = tokens * tokens
    total = (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())
    return min(total, 1 << 62)
