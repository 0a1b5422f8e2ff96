"""Step policies: which samples of a replica's window the next step consumes.

Pure. A policy sees the gathered records and this replica's own window; what it derives from the
records alone (`StepTarget`) is equal on all replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import numpy as np

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.reassign import EndLoads
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.selection import Selection
from odb_megatron.plan.target import StepTarget
from odb_megatron.plan.window import SampleWindow

__all__ = [
    "BalanceScope",
    "ExchangeMode",
    "PolicyName",
    "SamplesPolicy",
    "StepPolicy",
    "StepState",
    "select_all",
    "select_none",
]


class PolicyName(Enum):
    """Which step policy is in force."""

    SAMPLES = "samples"
    COST = "cost"


class BalanceScope(Enum):
    """Where replicas wait for each other, and so what should cost the same.

    STEP: once per optimizer step. MICROBATCH: in every micro-batch (expert parallelism, sharded
    parameters, global auxiliary loss, pipelining).
    """

    STEP = "step"
    MICROBATCH = "microbatch"


class ExchangeMode(Enum):
    """Whether replicas hand samples to each other so that a step costs the same on all.

    NONE: never. TOKENS: in every step. AUTO: where it is worth it (`exchange_choice`).
    """

    NONE = "none"
    TOKENS = "tokens"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What every replica knows when a step begins.

    Attributes:
        step: 0-based.
        consumed: positions consumed before it by all replicas.
        start: positions consumed when step 0 began.
    """

    step: int
    consumed: int
    start: int


class StepPolicy(ABC):
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

    @property
    def mean_cost(self) -> int:
        """Cost of an average sample as far as known, at least 1."""
        return 1

    @abstractmethod
    def draw_before(self, consumed: int) -> tuple[int, int]:
        """Return (end, most): draw own positions below `end` until `most` samples are held."""

    def describe(
        self, window: SampleWindow, *, state: StepState, first_new: int, num_emitted: int
    ) -> dict[str, int]:
        """Return the fields of a window record that this policy needs.

        Args:
            window: this replica's.
            state: the step's.
            first_new: samples that arrived from this one on are in no earlier record.
            num_emitted: samples this replica has emitted.
        """
        del window, state, first_new, num_emitted
        return {}

    def offer(self, window: SampleWindow, *, load: int) -> dict[str, int]:
        """Return the fields of a window record that offer a sample to another replica.

        Args:
            window: this replica's.
            load: cost of what it has left, positions assigned and not drawn included.
        """
        del window, load  # a policy need not give anything away
        return {}

    def note_ends(self, ends: EndLoads) -> None:
        """Take note of what replicas are expected to have left after a step."""
        del ends  # see `offer`

    @abstractmethod
    def target(
        self, table: RecordTable[WindowRecord], *, state: StepState, steps_left: int, drained: bool
    ) -> StepTarget:
        """Derive the step's target from all replicas' records.

        Args:
            table: first records.
            state: the step's.
            steps_left: from `Termination.begin_step`.
            drained: some replica has nothing left to draw.
        """

    @abstractmethod
    def select(
        self, window: SampleWindow, *, target: StepTarget, state: StepState, num_to_come: int | None
    ) -> Selection:
        """Pick what this replica emits.

        Args:
            window: this replica's.
            target: the step's.
            state: the step's.
            num_to_come: samples that will still join the window, None for "as many as it emits".
        """

    def learn(self, table: RecordTable[PlanRecord], *, target: StepTarget, count: int) -> None:
        """Take note of a step's outcome: all second records and the common count."""
        del table, target, count  # a policy need not learn

    def set_cost(self, cost: CostModel) -> None:
        """Go on with another cost model; what was learned in units of the old one is void."""
        del cost  # a policy need not know costs

    def knowledge(self) -> list[int]:
        """Return what was learned, for the state."""
        return []

    def restore(self, knowledge: list[int]) -> None:
        """Continue from `knowledge`."""
        del knowledge  # see `learn`


class SamplesPolicy(StepPolicy):
    """Each step consumes exactly the next `global_batch_size` positions of the stream.

    Args:
        total: see base.
        global_batch_size: see base.
        from_front: each replica counts the positions from where the last step left it (shards of
            unknown length: one that has ended gives nothing).
    """

    def __init__(self, *, total: int, global_batch_size: int, from_front: bool = False) -> None:
        super().__init__(total=total, global_batch_size=global_batch_size)
        self._from_front = from_front

    def draw_before(self, consumed: int) -> tuple[int, int]:
        """See base: the step's own positions, all of them."""
        if self._from_front:
            return self.global_batch_size, self.total
        return min(consumed + self.global_batch_size, self.total), self.total

    def target(
        self, table: RecordTable[WindowRecord], *, state: StepState, steps_left: int, drained: bool
    ) -> StepTarget:
        """See base."""
        end = min(state.consumed + self.global_batch_size, self.total)
        return StepTarget(end=end, cost=None, steps_left=steps_left)

    def select(
        self, window: SampleWindow, *, target: StepTarget, state: StepState, num_to_come: int | None
    ) -> Selection:
        """See base: everything held."""
        return select_all(window)


def select_all(window: SampleWindow) -> Selection:
    """Return everything held, to be packed by the caller."""
    return Selection(chosen=np.ones(len(window), dtype=np.bool_))


def select_none() -> Selection:
    """Return an empty selection."""
    return Selection(chosen=np.zeros(0, dtype=np.bool_), micro_batches=[])
