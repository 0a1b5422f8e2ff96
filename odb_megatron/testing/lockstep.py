"""All step loops of a run in one thread: answers their requests as process groups would.

For tests and fuzzing. In any order of progress, also a random one; that all loops wait for ever is
found and named.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from odb_megatron.data.loop import (
    Exchange,
    Failure,
    Gather,
    GatherAll,
    GatherBlocks,
    PackedStep,
    StepLoop,
)
from odb_megatron.plan.blocks import block_of
from odb_megatron.plan.record import PlanConfig

__all__ = ["Lockstep"]


class Lockstep:
    """Runs loops to their end.

    Args:
        loops: of all replicas.
        config: theirs.
        rng: in which order they go on; None for one after the other.

    Attributes:
        steps: steps made by each replica.
        errors: what each loop has raised.
        failures: what each loop has told its trainer before that.
    """

    def __init__(
        self,
        loops: Sequence[StepLoop],
        config: PlanConfig,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._blocks = [block_of(at, config.num_replicas, config.block) for at in range(len(loops))]
        self._rng = rng
        self._runs = [loop.run() for loop in loops]
        self._waiting: list[Any] = [None] * len(loops)
        self._is_over = [False] * len(loops)
        self.steps: list[list[PackedStep]] = [[] for _ in loops]
        self.errors: list[BaseException | None] = [None] * len(loops)
        self.failures: list[BaseException | None] = [None] * len(loops)
        for replica in range(len(loops)):
            self._advance(replica, None)

    def run(self, *, num_steps: int | None = None) -> None:
        """Go on until all loops have ended, or every one has made so many steps.

        Raises:
            AssertionError: loops wait for each other for ever.
        """
        while not all(self._is_over):
            if num_steps is not None and all(
                over or len(steps) >= num_steps
                for over, steps in zip(self._is_over, self.steps, strict=True)
            ):
                return
            answers = list(self._answers(num_steps))
            assert answers, f"no loop can go on: {[type(one).__name__ for one in self._waiting]}"
            if self._rng is not None:
                answers = [self._rng.choice(answers)]
            for group in answers:
                for replica, answer in group:
                    self._advance(replica, answer)

    def close(self) -> None:
        """Drop all loops."""
        for run in self._runs:
            run.close()

    def _answers(self, num_steps: int | None) -> Iterator[list[tuple[int, Any]]]:
        """Yield the answers that can be given now: of one replica, or of several at once."""
        everyone = range(len(self._runs))
        for block in sorted(set(self._blocks), key=lambda one: one.start):
            if all(isinstance(self._waiting[at], Gather) for at in block):
                records = [self._waiting[at].record for at in block]
                assert len({len(one) for one in records}) == 1, "records of different sizes"
                yield [(at, records) for at in block]
            if all(isinstance(self._waiting[at], Exchange) for at in block):
                yield self._exchanged(block)
        for kind in (GatherBlocks, GatherAll):
            if all(isinstance(self._waiting[at], kind) for at in everyone):
                records = [self._waiting[at].record for at in everyone]
                if kind is GatherBlocks:
                    records = [records[at] for at in everyone if at == self._blocks[at].start]
                yield [(at, records) for at in everyone]
        for at in everyone:
            request = self._waiting[at]
            goes_on = num_steps is None or len(self.steps[at]) < num_steps or self.failures[at]
            if isinstance(request, (PackedStep, Failure)) and goes_on:
                yield [(at, None)]

    def _exchanged(self, block: range) -> list[tuple[int, Any]]:
        asked: dict[int, Exchange] = {at: self._waiting[at] for at in block}
        assert len({one.step for one in asked.values()}) == 1, "exchanges of different steps"
        failed = {at: None for at, one in asked.items() if one.sends is None}
        if failed:
            return [(at, failed) for at in block]
        sent = {at: one.sends or {} for at, one in asked.items()}
        for at, one in asked.items():
            sizes = {by: len(sent[by][at]) for by in block if at in sent[by]}
            assert sizes == one.receives, "bytes that were not announced"
        return [(at, {by: sent[by][at] for by in one.receives}) for at, one in asked.items()]

    def _advance(self, replica: int, answer: Any) -> None:
        try:
            request = self._runs[replica].send(answer)
        except StopIteration:
            self._is_over[replica], request = True, None
        except Exception as error:
            self._is_over[replica], request = True, None
            self.errors[replica] = error
        self._waiting[replica] = request
        if isinstance(request, PackedStep):
            self.steps[replica].append(request)
        elif isinstance(request, Failure):
            self.failures[replica] = request.error
