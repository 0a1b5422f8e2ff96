"""The third exchange of a planner's steps: whether there is one, and what follows from it.

Pure. Everything here is a function of gathered records, so it is equal on all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from odb_megatron.plan.alignment import common_count
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.exchange import Assignment, assign
from odb_megatron.plan.exchange_choice import ExchangeChoice, choose_for_run, is_worth_it
from odb_megatron.plan.packing import Caps
from odb_megatron.plan.placement import ExchangeRules
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.sample_list import unpack_lists

__all__ = ["ExchangePhase"]

_UNDECIDED = -1


class ExchangePhase:
    """Whether replicas hand samples to each other, frozen or step by step.

    Args:
        config: equal on all replicas.

    Attributes:
        choice: what mode `auto` chose for the run (policy `cost`); None where it did not, or not
            in this process.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.choice: ExchangeChoice | None = None
        self._config = config
        is_alone = config.num_replicas == 1
        self._exchanges = config.exchange is ExchangeMode.TOKENS and not is_alone
        self._is_undecided = config.exchange is ExchangeMode.AUTO and not is_alone

    def set_cost(self, cost: CostModel) -> None:
        """Go on with another cost model."""
        self._config = replace(self._config, cost=cost)

    def choose(self, table: RecordTable[WindowRecord]) -> bool | None:
        """Let mode `auto` choose for the run, once samples have been seen (policy `cost`).

        Returns:
            The choice if it was made now, else None.
        """
        if not self._is_undecided or self._config.policy is PolicyName.SAMPLES:
            return None
        if not table.total("num_observed"):
            return None
        self.choice = choose_for_run(table, self._config)
        self._freeze(self.choice.exchanges)
        return self._exchanges

    def is_wanted(self, table: RecordTable[PlanRecord]) -> bool:
        """Whether the step has a third exchange."""
        if not table.total("num_samples"):
            return False
        if self._exchanges or not self._is_undecided:
            return self._exchanges
        return self._config.policy is PolicyName.SAMPLES and is_worth_it(
            table, self._config, local_count=self.local_count(table)
        )

    def local_count(self, table: RecordTable[PlanRecord]) -> int:
        """Return the micro-batches of the step without an exchange."""
        needed = table.largest("num_micro_batches")
        return common_count([needed], multiple=self._config.count_multiple)

    def assign(self, table: RecordTable[PlanRecord], lists: Sequence[bytes]) -> Assignment:
        """Assign the step's samples.

        Raises:
            ReplicaFailedError: see `unpack_lists`.
        """
        config = self._config
        samples = unpack_lists(lists, table.column("num_samples"), config=config)
        rules = ExchangeRules(
            num_replicas=config.num_replicas,
            caps=Caps(token_budget=config.token_budget, max_patches=config.max_patches),
            count_multiple=config.count_multiple,
            fixed=config.cost.fixed,
            scope=config.balance,
        )
        return assign(samples, rules, local_count=self.local_count(table))

    def state(self) -> int:
        """Return what was chosen: 0 or 1, -1 while nothing is."""
        return _UNDECIDED if self._is_undecided else int(self._exchanges)

    def restore(self, state: int) -> bool | None:
        """Continue from `state`; return what mode `auto` had chosen, else None.

        Where the flag itself says whether to exchange, it decides.
        """
        if self._config.exchange is not ExchangeMode.AUTO or state == _UNDECIDED:
            return None
        self._freeze(bool(state) and self._config.num_replicas > 1)
        return self._exchanges

    def _freeze(self, exchanges: bool) -> None:
        self._is_undecided, self._exchanges = False, exchanges
