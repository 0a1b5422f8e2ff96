"""What a step should come to on every replica, from gathered records alone.

Pure, integers only: leaders may have different CPUs, and all must find the same numbers. Kept
between steps: what an average sample is, and how much of a replica's reach to leave unused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from math import isqrt

import numpy as np

from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord

__all__ = [
    "Knowledge",
    "LargeHold",
    "StepTarget",
    "StepWish",
    "squared_tokens",
    "wanted_samples",
]

_PPM = 1_000_000
_MOST_SAMPLES = 1 << 22
_FIRST_MARGIN = 20_000
_MARGINS = (-150_000, 250_000)
_GAIN = 4
_LARGEST_CHANGE = 10_000
_BALANCE_PER_PRICE = 100
_MOST_STRETCH = 8
_MOST_HEIGHTS = 4
_MOST_PRODUCT = 1 << 62


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
        text = f"{self.end} {self.cost} {self.steps_left} {self.num_micro_batches} {self.heights}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


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
        num_small: samples emitted in ordinary micro-batches (scope `microbatch`; old ones fade).
        small_cost: what they cost.
        level: cost of an ordinary micro-batch of the last step (scope `microbatch`), else 0.
        end_level, end_lowest: see `reassign.EndLoads`; after the last step.
    """

    num_samples: int = 0
    tokens: int = 0
    cost: int = 0
    spread: int = 0
    margin: int = _FIRST_MARGIN
    level: int = 0
    num_small: int = 0
    small_cost: int = 0
    end_level: int = 0
    end_lowest: int = 0

    @property
    def mean_cost(self) -> int:
        """Cost of an average sample, at least 1."""
        return max(1, self.cost // max(1, self.num_samples))

    @property
    def ordinary_cost(self) -> int:
        """Cost of an average sample of ordinary micro-batches, at least 1."""
        return max(1, self.small_cost // self.num_small) if self.num_small else self.mean_cost

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

    def learn(
        self, table: RecordTable[PlanRecord], *, fixed: int, count: int, by_missing: bool = False
    ) -> None:
        """Adapt the margin to a step's balance.

        A full micro-batch costs its fixed price once: the cheaper that price, the less an
        imbalance is worth. The margin grows while the imbalance is above that and shrinks below.

        Args:
            table: second records of the step.
            fixed: price of a micro-batch.
            count: micro-batches of the step.
            by_missing: go by what the replicas missed, not by the largest cost.
        """
        costs = table.column("cost")
        most = int(costs.max())
        if not most:
            return
        lost = _PPM - _PPM * table.total("cost") // (len(table) * most)
        if by_missing:
            self.num_small += table.total("num_samples") - table.total("num_large")
            self.small_cost += table.total("cost") - table.total("cost_large")
            if self.num_small > _MOST_SAMPLES:
                self.num_small //= 2
                self.small_cost //= 2
            lost = _PPM * table.total("cost_missing") // (len(table) * most) // 4
        allowed = _PPM * fixed * count // (_BALANCE_PER_PRICE * most)
        change = max(-_LARGEST_CHANGE, min(_LARGEST_CHANGE, _GAIN * (lost - allowed)))
        self.margin = max(_MARGINS[0], min(_MARGINS[1], self.margin + change))

    def choose_step(
        self, wish: StepWish, table: RecordTable[WindowRecord]
    ) -> tuple[int, int, tuple[int, ...]]:
        """Return the step's micro-batch count, cost per replica and heights.

        Args:
            wish: what the step should be.
            table: first records of the step.
        """
        rates = table.column("cost_per_token")
        rates = rates[rates > 0]
        least = int(rates.min()) if len(rates) else 1
        reach = max(1, wish.token_budget * least * (_PPM - self.margin) // _PPM)
        multiple = wish.count_multiple
        heights: tuple[int, ...] = ()
        if wish.hold is not None:
            heights = _heights(table, wish.hold, above=reach)
            self.level = reach
        ordinary = max(1, wish.samples - len(heights) * len(table))
        wanted = max(1, ordinary * self.ordinary_cost // len(table))
        count, cost = _nearest_count(wanted, reach, multiple)
        must = table.largest("cost_due") - sum(heights)
        if must > cost:  # nobody can stay below: let everyone come up to it
            cost = must
            count = max(count, -(-cost // reach))
        count = max(count + len(heights), table.largest("micro_batches_due"))
        return -(-count // multiple) * multiple, cost + sum(heights), heights

    def state(self) -> list[int]:
        """Return the fields as a list."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def restore(cls, state: list[int]) -> Knowledge:
        """Inverse of `state`."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, state, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeHold:
    """How long samples wait that cost more than an ordinary micro-batch (scope `microbatch`).

    Attributes:
        num_steps: steps they are held on average.
        longest: wait (`WindowRecord.large_wait_0`) that ends it at once.
        life: samples a replica emits from a sample's entry into the window to that wait.
    """

    num_steps: int
    longest: int
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWish:
    """What a step should be, before the replicas' reach is looked at.

    Attributes:
        samples: samples wanted of all replicas.
        token_budget: most tokens of a micro-batch.
        count_multiple: the micro-batch count is a multiple of this.
        hold: how long large samples wait for micro-batches of agreed heights; None where there are
            none (scope `step`).
    """

    samples: int
    token_budget: int
    count_multiple: int
    hold: LargeHold | None = None


def _heights(table: RecordTable[WindowRecord], hold: LargeHold, *, above: int) -> tuple[int, ...]:
    """Return the costs of the large samples that are released in this step, descending.

    So many per replica that they are held for `hold.num_steps` on average, and all that have
    waited for `hold.longest`. Each time the oldest asks for a height; every replica releases the
    largest that fits, so what is taller and has to go soon had better go along: the height is
    raised to it where releasing it early loses less than a release of its own later. With a life
    of T that is where (its cost - level) * (what it could wait longer) <= (cost asked for - level)
    * T. Without that, replicas ask for one tall height after the other.
    """
    num = len(table)
    divisor = 2 * num * hold.num_steps
    count = (2 * table.total("num_large") + divisor // 2) // divisor
    waits = np.stack([table.column(f"large_wait_{index}") for index in (0, 1)])
    costs = np.stack([table.column(f"large_cost_{index}") for index in (0, 1)])
    is_held = costs > above
    heights: list[int] = []
    while len(heights) < _MOST_HEIGHTS and is_held.any():
        longest = int(waits[is_held].max())
        if len(heights) >= count and longest < hold.longest:
            break
        asked = int(costs[is_held & (waits == longest)].max())
        most = min(_MOST_PRODUCT, (asked - above) * hold.life) // np.maximum(1, longest - waits)
        height = int(costs[is_held & (costs - above <= np.maximum(most, asked - above))].max())
        heights.append(height)
        fits = is_held & (costs <= height)
        pressing = fits & (waits >= hold.longest)
        fits = np.where(pressing.any(axis=0), pressing, fits)
        taken = np.where(fits, costs, 0).argmax(axis=0)
        is_held[taken, np.arange(num)] &= ~fits.any(axis=0)
    return tuple(sorted(heights, reverse=True))


def _nearest_count(wanted: int, reach: int, multiple: int) -> tuple[int, int]:
    """Return the micro-batch count whose reach comes closest to the cost wanted, and its cost.

    A micro-batch has its fixed price however full it is, so the cost may stretch by half a
    micro-batch to fill the last one, and the next step asks for that much less.
    """
    low = max(multiple, wanted // reach // multiple * multiple)
    options = []
    for count in (low, low + multiple):
        stretch = min(wanted * multiple // (2 * count), wanted // _MOST_STRETCH)
        cost = min(wanted + stretch, count * reach)
        options.append((abs(cost - wanted), count, cost))
    _, count, cost = min(options)
    return count, max(1, cost)


def squared_tokens(excess: np.ndarray[tuple[int], np.dtype[np.float64]], *, unit: int) -> int:
    """Return the sum of squared excess costs in tokens squared, as it goes into a record."""
    tokens = np.minimum(np.abs(excess) / unit, float(1 << 30)).astype(np.int64)
    squares = tokens * tokens
    total = (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())
    return min(total, 1 << 62)
