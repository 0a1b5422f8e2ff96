"""The policy `cost`: each replica fills the step from its own window to a common cost target.

Pure. Joint decisions are in `target`, the choice of samples in `selection` and `aligned`; this
module says what a replica reports of its window and what it aims at.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.aligned import select_aligned
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.packing import Caps, pack
from odb_megatron.plan.policy import (
    BalanceScope,
    StepPolicy,
    StepState,
    select_all,
    select_none,
)
from odb_megatron.plan.reassign import EndLoads, offers
from odb_megatron.plan.records import PlanRecord, RecordTable, WindowRecord
from odb_megatron.plan.selection import Aim, Selection, select
from odb_megatron.plan.target import (
    Knowledge,
    LargeHold,
    StepTarget,
    StepWish,
    squared_tokens,
    wanted_samples,
)
from odb_megatron.plan.window import Column, SampleWindow

__all__ = ["CostPolicy"]

_VIEW_STEPS = 8
_LEAST_VIEW = 1024
_RESERVE = 6  # quarters of a step's standard deviation of excess cost to hold in reserve ...
_RESERVE_PER_DOUBLING = 2  # ... and more for more replicas, since the poorest window limits all
_LARGE_SPARE = 2  # steps before they are due that large samples have to be released
_EVEN_STEPS = 2  # so many last steps cost the same
_RETURN = 4  # a window returns to its reserve by this part of the difference per step
_MAX_FILL = (127, 128)
_REACH_SHARE = 2, 5  # of the way from the oldest samples' rate to the longest samples' rate


class CostPolicy(StepPolicy):
    """Each replica fills the step from its window to a common cost target.

    Oldest first, long samples held back or brought forward so that tokens fit too (`selection`);
    micro-batch count and cost of the step follow from what every replica can reach (`target`).
    The number of samples per step follows the global batch size: its running mean is steered to
    it, because every step corrects for what earlier steps were over or under.

    Args:
        config: what all replicas agree on.

    Raises:
        ValueError: a window below one step's share, or no delay allowed.
    """

    def __init__(self, config: PlanConfig) -> None:
        super().__init__(total=config.total, global_batch_size=config.global_batch_size)
        least = -(-config.global_batch_size // config.num_replicas)
        if config.window < least:
            raise ValueError(
                f"--odb-window {config.window} is below the {least} samples that a replica needs "
                f"for one step (global batch size {config.global_batch_size}, "
                f"{config.num_replicas} replicas): raise it"
            )
        if config.max_delay_steps < 1:
            raise ValueError(
                f"--odb-max-delay-steps must be at least 1, got {config.max_delay_steps}: use "
                "--odb-policy samples for strict order"
            )
        self._config = config
        self._caps = Caps(token_budget=config.token_budget, max_patches=config.max_patches)
        self._is_aligned = config.balance is BalanceScope.MICROBATCH
        self._knowledge = Knowledge()

    @property
    def mean_cost(self) -> int:
        """See base."""
        return self._knowledge.mean_cost

    def draw_before(self, consumed: int) -> tuple[int, int]:
        """See base: fill the window."""
        return self.total, self._config.window

    def describe(
        self, window: SampleWindow, *, state: StepState, first_new: int, num_emitted: int
    ) -> dict[str, int]:
        """See base."""
        rows = self._view(window, state)
        if not rows.shape[1]:
            return {}
        due = rows[:, self._due(rows, state.step)]
        held = window.rows()
        fresh = held[:, int(np.searchsorted(held[Column.ARRIVAL], first_new)) :]
        tokens, cost = int(fresh[Column.PADDED].sum()), int(fresh[Column.COST].sum())
        rate = self._knowledge.cost_per_token or max(1, cost // max(1, tokens))
        excess = fresh[Column.COST] - float(rate) * fresh[Column.PADDED]
        return {
            "num_observed": fresh.shape[1],
            "tokens_observed": tokens,
            "cost_observed": cost,
            "spread_observed": squared_tokens(excess, unit=COST_UNIT),
            "cost_due": int(due[Column.COST].sum()),
            "micro_batches_due": self._needs(due),
            "cost_per_token": self._rate(rows, state),
            **self._large(rows, num_emitted),
        }

    def offer(self, window: SampleWindow, *, load: int) -> dict[str, int]:
        """See base: near the end of the run, where more is left here than elsewhere."""
        known, config = self._knowledge, self._config
        ends = EndLoads(level=known.end_level, lowest=known.end_lowest)
        a_step = known.mean_cost * config.global_batch_size // config.num_replicas
        if not 0 < known.end_level <= a_step * (config.max_delay_steps - 1):
            return {}  # the end is further off than a sample may be late, wherever it is counted
        return offers(window.rows(), load=load, ends=ends, each=known.mean_cost)

    def note_ends(self, ends: EndLoads) -> None:
        """See base."""
        self._knowledge.end_level, self._knowledge.end_lowest = ends.level, ends.lowest

    def target(
        self, table: RecordTable[WindowRecord], *, state: StepState, steps_left: int, drained: bool
    ) -> StepTarget:
        """See base."""
        knowledge = self._knowledge
        knowledge.observe(table)
        if steps_left == 1 or not knowledge.num_samples or not table.total("num_held"):
            return StepTarget(end=self.total, cost=None, steps_left=steps_left)
        samples = self._wanted(state)
        if steps_left <= _EVEN_STEPS and self._config.is_online:
            samples = self._even_share(table, state, steps_left)
        cost = max(1, samples * knowledge.cost // knowledge.num_samples)
        cost = max(1, cost // self._config.num_replicas)
        if drained and not self._config.is_online:
            return StepTarget(end=self.total, cost=cost, steps_left=steps_left)
        wish = StepWish(
            samples=samples,
            token_budget=self._caps.token_budget,
            count_multiple=self._config.count_multiple,
            hold=self._large_hold(state) if self._is_aligned else None,
        )
        count, cost, heights = knowledge.choose_step(wish, table)
        return StepTarget(
            end=self.total,
            cost=cost,
            steps_left=steps_left,
            num_micro_batches=count,
            heights=heights,
        )

    def select(
        self, window: SampleWindow, *, target: StepTarget, state: StepState, num_to_come: int | None
    ) -> Selection:
        """See base."""
        if target.cost is None:
            return select_all(window) if target.steps_left == 1 else select_none()
        if not len(window):
            return select_none()
        rows = self._view(window, state)
        due = self._due(rows, state.step)
        cost = target.cost
        is_drained = num_to_come is not None and not self._config.is_online
        if num_to_come is not None and is_drained:  # spread what is left evenly
            left = window.cost + num_to_come * self.mean_cost
            cost = -(-left // target.steps_left)
        aim = self._aim(rows, cost=cost, target=target, state=state, is_drained=is_drained)
        found = None
        if self._is_aligned and aim.num_micro_batches is not None:
            pressing = self._due(rows, state.step + _LARGE_SPARE)
            aligned = replace(aim, heights=target.heights)
            found = select_aligned(rows, due, pressing=pressing, aim=aligned, caps=self._caps)
        found = found or select(rows, due, aim=aim, caps=self._caps)
        if found.chosen.any():
            return found
        only = np.zeros(rows.shape[1], dtype=np.bool_)
        only[0] = True
        return Selection(chosen=only, micro_batches=[[0]])

    def learn(self, table: RecordTable[PlanRecord], *, target: StepTarget, count: int) -> None:
        """See base."""
        if target.cost is not None and target.num_micro_batches:
            self._knowledge.learn(
                table,
                fixed=self._config.cost.fixed,
                count=count,
                by_missing=self._is_aligned,
            )

    def set_cost(self, cost: CostModel) -> None:
        """See base: what samples cost is learned again; the margin is a share and stays."""
        self._config = replace(self._config, cost=cost)
        self._knowledge = Knowledge(margin=self._knowledge.margin)

    def knowledge(self) -> list[int]:
        """See base."""
        return self._knowledge.state()

    def restore(self, knowledge: list[int]) -> None:
        """See base."""
        self._knowledge = Knowledge.restore(knowledge)

    def _aim(
        self,
        rows: npt.NDArray[np.int64],
        *,
        cost: int,
        target: StepTarget,
        state: StepState,
        is_drained: bool,
    ) -> Aim:
        """Return this replica's aim: enough tokens to bring its window back to its reserve."""
        knowledge = self._knowledge
        rate = knowledge.cost_per_token
        share = self._share(state)
        quarters = _RESERVE + _RESERVE_PER_DOUBLING * self._config.num_replicas.bit_length()
        reserve = quarters * knowledge.deviation(share, unit=COST_UNIT) // 4
        excess = int(rows[Column.COST].sum()) - rate * int(rows[Column.PADDED].sum())
        tokens = (cost - (excess - reserve) // _RETURN) // rate
        count = None
        if target.num_micro_batches and not is_drained:
            count = target.num_micro_batches
            tokens = min(tokens, count * self._caps.token_budget * _MAX_FILL[0] // _MAX_FILL[1])
        if is_drained:
            tokens = int(rows[Column.PADDED].sum()) // target.steps_left
        return Aim(
            cost=cost,
            tokens=max(tokens, 1),
            cost_per_token=rate,
            num_micro_batches=count,
            hold=_VIEW_STEPS * share,
        )

    def _view(self, window: SampleWindow, state: StepState) -> npt.NDArray[np.int64]:
        """Return the oldest samples, as many as one step may choose from: all overdue ones too."""
        most = max(_LEAST_VIEW, _VIEW_STEPS * self._share(state))
        rows = window.rows(most)
        while most < len(window) and self._due(rows[:, -1:], state.step).any():
            most *= 2
            rows = window.rows(most)
        return rows

    def _wanted(self, state: StepState) -> int:
        return wanted_samples(
            global_batch_size=self.global_batch_size,
            step=state.step,
            consumed=state.consumed - state.start,
        )

    def _even_share(
        self, table: RecordTable[WindowRecord], state: StepState, steps_left: int
    ) -> int:
        """Return how many average samples cost as much as each of the last steps should.

        Online all replicas have about the same left, so one target serves all.
        """
        num_held = table.total("num_held")
        left = max(0, self.total - state.consumed - num_held)
        each = self._knowledge.mean_cost
        return max(1, (table.total("cost_held") // each + left) // steps_left)

    def _share(self, state: StepState) -> int:
        return -(-self._wanted(state) // self._config.num_replicas)

    def _large_hold(self, state: StepState) -> LargeHold:
        share = self._share(state)
        longest = (self._config.max_delay_steps - _LARGE_SPARE) * share
        return LargeHold(
            num_steps=max(1, self._config.window // share),
            longest=longest,
            life=self._config.window + longest,
        )

    def _due(self, rows: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.bool_]:
        since = rows[Column.DUE]
        due: npt.NDArray[np.bool_] = (since >= 0) & (step - since >= self._config.max_delay_steps)
        return due

    def _large(self, rows: npt.NDArray[np.int64], num_emitted: int) -> dict[str, int]:
        """Return number, waits and costs of samples that need a micro-batch of their own."""
        level = self._knowledge.level
        if not self._is_aligned or not level:
            return {}
        large = rows[:, rows[Column.COST] > level]
        found = {"num_large": large.shape[1]}
        for index, (arrival, cost) in enumerate(
            zip(large[Column.ARRIVAL, :2].tolist(), large[Column.COST, :2].tolist(), strict=True)
        ):
            found[f"large_wait_{index}"] = num_emitted - arrival
            found[f"large_cost_{index}"] = cost
        return found

    def _needs(self, rows: npt.NDArray[np.int64]) -> int:
        bins = pack(
            rows[Column.PADDED].tolist(),
            token_budget=self._caps.token_budget,
            patches=rows[Column.PATCHES].tolist(),
            max_patches=self._caps.max_patches,
        )
        return len(bins)

    def _rate(self, rows: npt.NDArray[np.int64], state: StepState) -> int:
        """Return the cost per token that this replica can sustain.

        Between what its oldest samples (one and a half steps of them) cost per token, and what
        their longest third does.
        """
        near = rows[:, : max(1, 3 * self._share(state) // 2)]
        if not near.shape[1]:
            return 0
        if self._is_aligned:  # what costs more than a full one goes apart
            rate = int(near[Column.COST].sum()) // int(near[Column.PADDED].sum())
            small = near[Column.COST] <= rate * self._caps.token_budget
            near = near[:, small] if small.any() else near
        costs, padded = near[Column.COST], near[Column.PADDED]
        plain = int(costs.sum()) // int(padded.sum())
        order = np.argsort(-padded, kind="stable")
        tokens = np.cumsum(padded[order])
        most = max(1, int(np.searchsorted(tokens, 2 * int(tokens[-1]) // 3, side="right")))
        best = int(costs[order[:most]].sum()) // int(tokens[most - 1])
        return max(1, plain + (best - plain) * _REACH_SHARE[0] // _REACH_SHARE[1])
