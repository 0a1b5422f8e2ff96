"""Random small runs of all replicas, and what must hold of every run.

For the fuzzers and tests. A sample's tokens are its id, so that what is trained shows what was
read. What is checked is read off the packed steps alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from odb_megatron.data.loop import PackedStep, Progress, StepLoop
from odb_megatron.data.sample import Sample, Skipped, SkipReason
from odb_megatron.data.stream import own_positions
from odb_megatron.data.wire import StepHeader, decode_step
from odb_megatron.data.workers import Reader
from odb_megatron.plan.blocks import blocks_of
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.plan.record import OPEN_TOTAL, PlanConfig, Sync
from odb_megatron.testing.replicas import Lockstep

__all__ = ["FAULTS", "Fault", "InjectedError", "SyntheticReader", "Tally", "World", "check_run"]
__all__ += ["decoded", "random_world"]

_VOCAB = 1 << 20
_VERBS = {"read": "_read", "measure": "_read", "plan": "_planned", "encode": "_encoded"}
_VERBS |= {"decode": "_decoded", "pack": "_pack"}
FAULTS = tuple(_VERBS)
"""Where a loop raises: in each verb, in delivery on both sides."""


class InjectedError(Exception):
    """What a replica raises on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one replica does in a step: raise in one of the verbs, or close its loader."""

    step: int
    replica: int
    where: str  # one of FAULTS, or close

    def put_into(self, loop: Any) -> None:
        """Have a loop do it."""
        name = _VERBS.get(self.where, "_read")
        original = getattr(loop, name)

        def spoilt(*args: Any) -> Any:
            if self.where == "close":
                if loop._step >= self.step:
                    loop.close()
            elif loop._step == self.step:
                if self.where == "measure":
                    original(*args)
                raise InjectedError(f"{self.where} of step {self.step}")
            return original(*args)

        setattr(loop, name, spoilt)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A run.

    Attributes:
        config: what all replicas agree on.
        lengths: tokens of the sample with each id, 0 for a skipped one; of iterators, item k of
            replica r has the id `k * num_replicas + r`.
        patches: of each, by id; empty for none.
        shards: items of each replica's iterator; empty for random access.
        starts_again: iterators start again where they end.
    """

    config: PlanConfig
    lengths: Mapping[int, int]
    patches: Mapping[int, int] = field(default_factory=dict)
    shards: tuple[int, ...] = ()
    starts_again: bool = False

    def loops(
        self, starts: Sequence[Progress] | None = None, *, fault: Fault | None = None
    ) -> list[StepLoop]:
        """Return one loop per replica."""
        starts = starts or [Progress(consumed=0)] * self.config.num_replicas
        loops = [
            StepLoop(SyntheticReader(self, at, start), self.config, replica=at, start=start)
            for at, start in enumerate(starts)
        ]
        if fault is not None:
            fault.put_into(loops[fault.replica])
        return loops

    def run(self, *, rng: random.Random | None = None) -> list[list[PackedStep]]:
        """Run to the end; return the steps, each of all replicas."""
        lockstep = Lockstep(self.loops(), self.config, rng=rng)
        lockstep.run()
        for error in lockstep.errors:
            if error is not None:
                raise error
        return [list(step) for step in zip(*lockstep.steps, strict=True)]

    def expected(self) -> set[int]:
        """Ids that are trained when the run goes to its end; of iterators without a quota."""
        if not self.shards:
            return {at for at in range(self.config.total) if self.lengths[at]}
        num = self.config.num_replicas
        ids = (k * num + r for r, size in enumerate(self.shards) for k in range(size))
        return {at for at in ids if self.lengths[at]}


class SyntheticReader(Reader):
    """A reader of a world."""

    def __init__(self, world: World, replica: int, start: Progress) -> None:
        self._world, self._replica = world, replica
        self._next = 0 if start.source is None else int(start.source["next"])
        self._positions: Iterator[int] = own_positions(
            world.config, replica=replica, consumed=start.consumed
        )

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        found: list[tuple[int, Sample | Skipped]] = []
        while len(found) < count and not self.has_ended():
            number = self._id()
            length, patches = self._world.lengths[number], self._world.patches.get(number, 0)
            if length:
                tokens = np.full(length, number % _VOCAB, dtype=np.int64)
                mask = (np.arange(length) % 2).astype(np.float32)
                item: Sample | Skipped = Sample(
                    tokens=tokens, labels=tokens, loss_mask=mask, num_patches=patches
                )
            else:
                item = Skipped(reason=SkipReason.OVERLONG, message=f"sample {number}")
            found.append((number, item))
        return found

    def has_ended(self) -> bool:
        world = self._world
        if not world.shards or world.starts_again:
            return False
        return self._next >= world.shards[self._replica]

    def head(self) -> bytes:
        return b"head"

    def check_heads(self, heads: Sequence[bytes]) -> None:
        assert len(heads) == self._world.config.num_replicas

    def state(self) -> Any:
        return {"next": self._next} if self._world.shards else None

    def close(self) -> None:
        pass

    def _id(self) -> int:
        if not self._world.shards:
            return next(self._positions)
        self._next += 1
        return (self._next - 1) * self._world.config.num_replicas + self._replica


class Tally(Counter[str]):
    """Violations found (all must be 0), and cases that occurred (none should be 0 in many runs).

    - `lost`: samples that were not trained.
    - `duplicated`: samples trained again, or that are none of the run.
    - `over_budget`: micro-batches of several samples over the token budget or the patch cap.
    - `misaligned`: steps in which replicas differ in M or in the totals, whose M is no multiple of
      what it should be, that idle where a replica has enough samples, that hold other samples than
      Megatron's order gives, or fewer than a global batch before the end.
    - `idle` micro-batches, `moved`, `shared` and `skipped` samples, runs of `several_blocks`, in
      which an iterator ends before others (`drained_early`) or that end within an epoch (`quota`),
      runs that a replica closed before their end (`closed_early`) or in which one `failed`.
    """

    VIOLATIONS: tuple[str, ...] = ("lost", "duplicated", "over_budget", "misaligned")
    CASES: tuple[str, ...] = (
        "idle",
        "moved",
        "shared",
        "skipped",
        "several_blocks",
        "drained_early",
        "quota",
    )
    CASES += ("closed_early", "failed")

    @property
    def num_violations(self) -> int:
        """Sum of the violations."""
        return sum(self[name] for name in self.VIOLATIONS)


def decoded(step: PackedStep) -> StepHeader:
    """Return what a step's header says."""
    return step.header


def check_run(world: World, steps: Sequence[Sequence[PackedStep]], *, is_whole: bool) -> Tally:
    """Hold a run against what must be.

    Args:
        world: what was run.
        steps: packed steps, each of all replicas, from the beginning.
        is_whole: whether it went to its end.
    """
    config, tally = world.config, Tally()
    trained: Counter[int] = Counter()
    consumed = 0
    for number, packed in enumerate(steps):
        found = [decoded(one) for one in packed]
        totals = found[0].totals
        ids = [at for one in found for row in one.own_positions for at in row]
        trained.update(ids)
        is_last = is_whole and number == len(steps) - 1
        wanted = min(config.global_batch_size, config.total - consumed)
        of_step = range(consumed, consumed + wanted)
        tally["misaligned"] += not all(
            (
                all(one.totals == totals for one in found),
                all(len(one.positions) == totals.num_micro_batches for one in found),
                totals.num_micro_batches % config.count_multiple == 0,
                totals.consumed_before == consumed,
                totals.is_final == is_last,
                totals.num_samples == len(ids),
                totals.num_consumed == totals.num_samples + totals.num_left_out,
                totals.num_consumed == wanted or (is_last and config.has_unknown_end),
                totals.num_idle == sum(not row for one in found for row in one.positions),
                totals.num_tokens == sum(world.lengths[at] for at in ids),
                all(
                    all(one.positions)
                    for one in found
                    if _num_whole(one) >= totals.num_micro_batches
                ),
                all(_meet(block, found) for block in blocks_of(config.num_replicas, config.block)),
                world.shards or sorted(ids) == [at for at in of_step if world.lengths[at]],
                all(map(_has_own_tokens, found, packed)),
            )
        )
        consumed += totals.num_consumed
        tally["over_budget"] += sum(_over_budget(config, one) for one in found)
        counts = {"idle": totals.num_idle, "moved": totals.num_moved, "shared": totals.num_shared}
        tally.update(counts, skipped=totals.num_left_out)
    tally["duplicated"] = trained.total() - len(trained)
    if is_whole and not world.starts_again:
        expected = world.expected()
        if not (world.shards and config.total != OPEN_TOTAL):  # else a quota is what is due
            tally["lost"] = len(expected - trained.keys())
        tally["duplicated"] += len(trained.keys() - expected)
    if is_whole and not config.has_unknown_end:
        tally["misaligned"] += consumed != config.total
    tally["several_blocks"] = int(config.num_replicas > config.block)
    tally["drained_early"] = int(len(set(world.shards)) > 1 and not world.starts_again)
    tally["quota"] = int(world.starts_again)
    return tally


def _num_whole(step: StepHeader) -> int:
    """Return how many samples, or shared micro-batches, a replica has."""
    pairs = zip(step.positions, step.shares, strict=True)
    return sum(len(row) if width == 1 else 1 for row, (width, _) in pairs)


def _meet(block: range, steps: Sequence[StepHeader]) -> bool:
    """Whether replicas that share a micro-batch have the same one, and are aligned in the block."""
    for at, replica in enumerate(block):
        for m, (width, place) in enumerate(steps[replica].shares):
            first = steps[block[at - place]]
            same = first.positions[m] == steps[replica].positions[m]
            if at % width != place or first.shares[m] != (width, 0) or not same:
                return False
    return True


def _over_budget(config: PlanConfig, step: StepHeader) -> int:
    found = 0
    rows = zip(step.lengths, step.patches, step.shares, strict=True)
    for lengths, patches, (width, _) in rows:
        size = sum(map(config.size_rule.shared(width).padded, lengths)) // width
        over = size > config.token_budget or patches > config.max_patches > 0
        found += over and (len(lengths) > 1 or width > 1)
    return found


def _has_own_tokens(metadata: StepHeader, step: PackedStep) -> bool:
    return all(
        int(item.tokens[0, start]) == number % _VOCAB
        for item in decode_step(metadata, step.payload)
        for number, start in zip(item.positions, item.cu_seqlens_padded.tolist(), strict=False)
    )


def random_world(rng: random.Random) -> tuple[World, Fault | None]:
    """Return a world and what goes wrong in it; a function of the generator's state alone."""
    num = rng.choice([1, 2, 2, 3, 4, 5, 8, 16])
    sizes = [_shard_size(rng) for _ in range(num)]
    kind = rng.choice(["positions", "positions", "iterators", "quota"])
    shards: tuple[int, ...] = ()
    starts_again, total = False, sum(sizes)
    if kind == "iterators":
        shards, total = tuple(sizes), OPEN_TOTAL
    elif kind == "quota":
        shards, starts_again, total = tuple(sizes), True, rng.randint(0, sum(sizes))
    batch = rng.randint(1, 8) * num
    budget = rng.choice([16, 64, 512])
    longest = rng.choice([budget // 8, budget // 2, budget, budget * 3 // 2, budget * 4])
    skipped = rng.choice([0.0, 0.0, 0.1, 0.9])
    count = (max(sizes) + batch + sum(sizes)) * num + 1
    lengths = {at: 0 if rng.random() < skipped else _length(rng, longest) for at in range(count)}
    patches = {at: rng.randint(0, 12) for at in range(count)} if rng.random() < 0.2 else {}
    multiple, stages = rng.choice([1, 1, 2, 4, 16]), rng.choice([1, 1, 2, 4])
    block = rng.choice([64, 64, 2, 3])
    share = min(rng.choice([1, 1, 2, 4, 16]), *map(len, blocks_of(num, block)))
    config = PlanConfig(
        total=total,
        global_batch_size=batch,
        num_replicas=num,
        token_budget=budget,
        multiple=multiple,
        count_multiple=stages,
        pipeline=Pipeline(stages=stages, chunks=min(stages, 2)),
        cost=CostModel.from_ratios(
            quadratic=rng.choice([0.0, 1 / budget, 10 / budget]),
            fixed_tokens=rng.choice([0.0, budget / 20]),
            patch_tokens=rng.choice([0.0, 2.0]),
        ),
        sync=rng.choice(list(Sync)),
        max_patches=10 if patches else 0,
        max_share=1 << share.bit_length() - 1,
        has_iterators=bool(shards),
        block=block,
    )
    fault = None
    if rng.random() < 0.3:
        fault = Fault(
            step=rng.randint(0, max(1, min(sum(sizes), total) // batch)),
            replica=rng.randrange(num),
            where=rng.choice([*FAULTS, "close"]),
        )
    world = World(
        config=config, lengths=lengths, patches=patches, shards=shards, starts_again=starts_again
    )
    return world, fault


def _shard_size(rng: random.Random) -> int:
    """Return 0 to 200, small ones more often."""
    return 0 if rng.random() < 0.2 else round(math.exp(rng.uniform(0.0, math.log(200))))


def _length(rng: random.Random, longest: int) -> int:
    return max(1, min(longest, round(rng.lognormvariate(math.log(max(1, longest / 3)), 1.0))))
