"""Step policies: which samples of a replica's window the next step consumes.

Pure. A policy sees the gathered records and this replica's own window; what it derives from the
records alone (`StepTarget`) is equal on all replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from odb_megatron.plan.records import WindowRecord

__all__ = [
    "CostPolicy",
    "Held",
    "PolicyName",
    "SamplesPolicy",
    "StepPolicy",
    "StepTarget",
]


class PolicyName(Enum):
    """Which step policy is in force."""

    SAMPLES = "samples"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A sample in the window.

    Attributes:
        position: position in the run's stream.
        arrival: its rank among the samples this replica has observed (0 first).
        num_tokens: length before padding.
        padded: length after padding to the multiple.
        num_loss_tokens: positions that carry loss.
        cost: predicted cost.
        truncated: whether it was cut.
        due_step: step at which first-in-first-out order would have emitted it; None while that
            step has not come.
    """

    position: int
    arrival: int
    num_tokens: int
    padded: int
    num_loss_tokens: int
    cost: int
    truncated: bool = False
    due_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTarget:
    """What all replicas derive from the first exchange.

    Attributes:
        end: stream positions below this may be drawn for this step.
        cost: cost each replica should reach; None for no target (everything drawn is emitted).
        steps_left: steps the remaining samples should spread over, this one included.
    """

    end: int
    cost: int | None
    steps_left: int

    def digest(self) -> int:
        """Signed 64-bit digest, compared in the second exchange."""
        text = f"{self.end} {self.cost} {self.steps_left}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)


class StepPolicy:
    """Base of the policies.

    Args:
        total: samples of the whole run, over all replicas.
        global_batch_size: samples per step that are asked for.
    """

    def __init__(self, *, total: int, global_batch_size: int) -> None:
        if global_batch_size < 1 or total < 0:
            raise ValueError(
                "a run needs a global batch size of at least 1 and a sample count of at least 0; "
                f"got {global_batch_size} and {total}"
            )
        self.total = total
        self.global_batch_size = global_batch_size

    def draw_before(self, consumed: int, *, num_held: int) -> tuple[int, int]:
        """Return (end, most): draw own positions below `end` until `most` samples are held."""
        raise NotImplementedError

    def target(self, records: Sequence[WindowRecord], *, start: int) -> StepTarget:
        """Derive the step's target from all replicas' records.

        Args:
            records: one per replica.
            start: positions consumed when step 0 of the run began (0, or more after a resume
                that changed the data-parallel size).
        """
        raise NotImplementedError

    def select(
        self, window: Sequence[Held], *, target: StepTarget, step: int, num_undrawn: int
    ) -> list[Held]:
        """Pick what this replica emits; `window` is in stream order."""
        raise NotImplementedError


class SamplesPolicy(StepPolicy):
    """Each step consumes exactly the next `global_batch_size` positions of the stream."""

    def draw_before(self, consumed: int, *, num_held: int) -> tuple[int, int]:
        """See base: the step's own positions, all of them."""
        return min(consumed + self.global_batch_size, self.total), self.total

    def target(self, records: Sequence[WindowRecord], *, start: int) -> StepTarget:
        """See base."""
        consumed = records[0].position
        left = -(-(self.total - consumed) // self.global_batch_size)
        end = min(consumed + self.global_batch_size, self.total)
        return StepTarget(end=end, cost=None, steps_left=left)

    def select(
        self, window: Sequence[Held], *, target: StepTarget, step: int, num_undrawn: int
    ) -> list[Held]:
        """See base: everything held."""
        return list(window)


class CostPolicy(StepPolicy):
    """Each replica fills the step from its window to a common cost target.

    Oldest first to 70 % of the target, then the largest that still fits (design: cost first).
    The number of samples per step follows the global batch size: its running mean is steered to
    it, because every step corrects for what earlier steps were over or under.

    Args:
        window: samples a replica looks ahead.
        max_delay_steps: a sample is emitted at most this many steps after first-in-first-out
            order would have emitted it; at least 1.
        num_replicas: data-parallel replicas.
    """

    def __init__(
        self,
        *,
        total: int,
        global_batch_size: int,
        window: int,
        max_delay_steps: int,
        num_replicas: int,
    ) -> None:
        super().__init__(total=total, global_batch_size=global_batch_size)
        least = -(-global_batch_size // num_replicas)
        if window < least:
            raise ValueError(
                f"--odb-window {window} is below the {least} samples that a replica needs for one "
                f"step (global batch size {global_batch_size}, {num_replicas} replicas): raise it"
            )
        if max_delay_steps < 1:
            raise ValueError(
                f"--odb-max-delay-steps must be at least 1, got {max_delay_steps}: use "
                "--odb-policy samples for strict order"
            )
        self.window = window
        self.max_delay_steps = max_delay_steps
        self.num_replicas = num_replicas

    def draw_before(self, consumed: int, *, num_held: int) -> tuple[int, int]:
        """See base: fill the window."""
        return self.total, self.window

    def target(self, records: Sequence[WindowRecord], *, start: int) -> StepTarget:
        """See base."""
        first = records[0]
        batch = self.global_batch_size
        remaining = self.total - first.position
        steps_left = max(1, (remaining + batch // 2) // batch)
        held = sum(record.num_held for record in records)
        if steps_left == 1 or held == 0:
            return StepTarget(end=self.total, cost=None, steps_left=steps_left)
        behind = batch * first.step - (first.position - start)
        wanted = batch + max(-batch // 2, min(batch // 2, behind))
        cost = sum(record.cost_held for record in records) * wanted // (held * self.num_replicas)
        return StepTarget(end=self.total, cost=max(1, cost), steps_left=steps_left)

    def select(
        self, window: Sequence[Held], *, target: StepTarget, step: int, num_undrawn: int
    ) -> list[Held]:
        """See base."""
        if target.cost is None:
            return list(window) if target.steps_left == 1 else []
        limit = target.cost
        if num_undrawn == 0:  # this shard is drained: spread what is left evenly
            limit = -(-sum(held.cost for held in window) // target.steps_left)
        chosen = {held.position for held in window if self._overdue(held, step)}
        cost = sum(held.cost for held in window if held.position in chosen)
        for held in window:
            if cost * 10 >= limit * 7:
                break
            if held.position not in chosen and cost + held.cost <= limit:
                chosen.add(held.position)
                cost += held.cost
        for held in sorted(window, key=lambda held: (-held.cost, held.position)):
            if held.position not in chosen and cost + held.cost <= limit:
                chosen.add(held.position)
                cost += held.cost
        if not chosen and window:
            chosen.add(window[0].position)
        return [held for held in window if held.position in chosen]

    def _overdue(self, held: Held, step: int) -> bool:
        return held.due_step is not None and step - held.due_step >= self.max_delay_steps
