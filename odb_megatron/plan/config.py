"""What all replicas of a loader must agree on for their plans to be one plan.

Pure values; `digest` is what replicas compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.padding import SizeRule, size_rule
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName

__all__ = [
    "MAX_WINDOW",
    "OPEN_TOTAL",
    "TEXT_BYTES",
    "PlanConfig",
    "ShardLength",
    "config_differences",
]

TEXT_BYTES = 8192
"""Bytes in which replicas tell each other their configurations when they differ."""

_MOST_SHOWN = 200

MAX_WINDOW = 1 << 16
"""Largest window: the cost of so many samples fits a record (see `cost.MAX_SAMPLE_COST`)."""

OPEN_TOTAL = 1 << 40
"""Stands for the positions of a run whose length nobody knows before its end."""


class ShardLength(Enum):
    """What is known of the length of a replica's shard.

    KNOWN: it follows from `total`. ENDLESS: each replica's own shard starts its next pass where it
    ends, so the run ends by its quota, `total`. UNKNOWN: each replica's own shard ends where it
    ends, which the replica finds out when it gets there, and the run when all have.
    """

    KNOWN = "known"
    ENDLESS = "endless"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Everything that must be equal on all replicas for their plans to agree.

    Attributes:
        policy: step policy.
        total: samples of the run (train), or of the stream (evaluation), over all replicas.
        global_batch_size: samples per step asked for.
        num_replicas: data-parallel size.
        token_budget: most padded tokens of a micro-batch.
        multiple: see `padding.length_multiple`.
        window: samples each replica looks ahead (`cost`; ignored by `samples`).
        max_delay_steps: a sample is emitted at most so many steps after first-in-first-out order
            would have emitted it (`cost`); at least 1.
        count_multiple: the micro-batch count is a multiple of this.
        cost: cost model.
        max_patches: most patches of a micro-batch, 0 for no cap.
        balance: where replicas wait for each other (`cost` policy).
        assignment: how positions come to replicas (`cost` policy; `samples` has fixed shards).
        shards: samples of each replica's own shard, for sources that are sharded already (`cost`
            with fixed shards): replica r's are the positions after those of the replicas before
            it. Empty for shards that are dealt from one stream (`position % num_replicas`).
        shard_length: what is known of the replicas' shards. Where it is not `KNOWN` each replica
            has an iterator of its own, and a position stands for the next item of the replica that
            draws it. With `UNKNOWN` the k-th item of replica r has the position
            `k * num_replicas + r`, and `total` is `OPEN_TOTAL`.
        draw_lead: positions assigned to a replica beyond its window, so that workers can fetch
            ahead; None for one step's share. It must not depend on the number of workers.
        exchange: whether replicas hand samples to each other.
        max_bad_records: see `bad_records`; None for no limit.
        pads_to_budget: whether every micro-batch is padded to the budget, to have one shape.
        shape_buckets: token counts to the nearest of which every micro-batch is padded.
        context: most tokens of a sample, where shapes are fixed; 0 for the budget.
        data: digest of the data source and its order, so that different files are noticed.
    """

    policy: PolicyName
    total: int
    global_batch_size: int
    num_replicas: int
    token_budget: int
    multiple: int = 1
    window: int = 0
    max_delay_steps: int = 8
    count_multiple: int = 1
    cost: CostModel = CostModel()
    max_patches: int = 0
    balance: BalanceScope = BalanceScope.STEP
    assignment: Assignment = Assignment.ONLINE
    shards: tuple[int, ...] = ()
    shard_length: ShardLength = ShardLength.KNOWN
    draw_lead: int | None = None
    exchange: ExchangeMode = ExchangeMode.NONE
    pads_to_budget: bool = False
    shape_buckets: tuple[int, ...] = ()
    context: int = 0
    max_bad_records: int | None = None
    data: str = ""

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.count_multiple < 1:
            raise ValueError(
                f"num_replicas and count_multiple must be at least 1; got {self.num_replicas} "
                f"and {self.count_multiple}"
            )
        if self.token_budget < self.multiple:
            raise ValueError(
                f"token budget {self.token_budget} is below the length multiple {self.multiple}: "
                "no sample fits; raise --odb-token-budget"
            )

        if not 0 <= self.window <= MAX_WINDOW:
            raise ValueError(
                f"--odb-window {self.window} is not between 0 and {MAX_WINDOW}: its cost would not "
                "fit the records; lower it"
            )
        if self.max_patches < 0 or (self.draw_lead or 0) < 0:
            raise ValueError(
                "max_patches and draw_lead must not be negative; got "
                f"{self.max_patches} and {self.draw_lead}"
            )
        if (self.max_bad_records or 0) < 0:
            raise ValueError(f"max_bad_records must not be negative; got {self.max_bad_records}")
        if self.shards:
            self._check_shards()
        if self.has_unknown_end:
            self._check_unknown_end()

    @property
    def assignment_in_force(self) -> Assignment:
        """How positions come to replicas under the policy in force."""
        is_cost = self.policy is PolicyName.COST and not self.has_unknown_end
        return self.assignment if is_cost else Assignment.FIXED

    @property
    def is_online(self) -> bool:
        """Whether positions are assigned online."""
        return self.assignment_in_force is Assignment.ONLINE

    @property
    def has_own_iterators(self) -> bool:
        """Whether positions stand for the next item of whoever draws them."""
        return self.shard_length is not ShardLength.KNOWN

    @property
    def has_unknown_end(self) -> bool:
        """Whether nobody knows the run's length before its end."""
        return self.shard_length is ShardLength.UNKNOWN

    def own_positions(self, replica: int) -> range:
        """Return a replica's stream positions where assignment is fixed."""
        if not self.shards:
            return range(replica, self.total, self.num_replicas)
        first = sum(self.shards[:replica])
        return range(first, first + self.shards[replica])

    @property
    def lead(self) -> int:
        """`draw_lead` with its default."""
        share = -(-self.global_batch_size // self.num_replicas)
        return share if self.draw_lead is None else self.draw_lead

    @property
    def size_rule(self) -> SizeRule:
        """What samples and micro-batches are padded to."""
        return size_rule(
            self.shape_buckets or ((self.token_budget,) if self.pads_to_budget else ()),
            token_budget=self.token_budget,
            context=self.context,
            multiple=self.multiple,
        )

    def digest(self) -> int:
        """Signed 64-bit digest of all fields."""
        text = json.dumps(self._values(), sort_keys=True).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)

    def to_text(self) -> bytes:
        """Return all fields in `TEXT_BYTES` bytes, for `config_differences`; long ones are cut."""
        values = {name: str(value)[:_MOST_SHOWN] for name, value in self._values().items()}
        return json.dumps(values, sort_keys=True).encode().ljust(TEXT_BYTES, b" ")[:TEXT_BYTES]

    def _values(self) -> dict[str, object]:
        return asdict(self) | {
            "policy": self.policy.value,
            "balance": self.balance.value,
            "assignment": self.assignment.value,
            "exchange": self.exchange.value,
            "shard_length": self.shard_length.value,
        }

    def _check_unknown_end(self) -> None:
        if self.total != OPEN_TOTAL or self.shards:
            raise ValueError(
                f"a run over shards of unknown length has total {OPEN_TOTAL} and no shards, got "
                f"{self.total} and {self.shards}: use the length `endless` for a quota"
            )
        if self.global_batch_size % self.num_replicas and self.policy is PolicyName.SAMPLES:
            raise ValueError(
                f"global batch size {self.global_batch_size} is no multiple of the "
                f"{self.num_replicas} replicas, which take as many samples each from shards of "
                "unknown length: change it, or use the policy cost"
            )

    def _check_shards(self) -> None:
        if len(self.shards) != self.num_replicas or min(self.shards) < 0:
            raise ValueError(
                f"shards {self.shards} are not {self.num_replicas} sizes of at least 0: give one "
                "for each replica"
            )
        if sum(self.shards) != self.total:
            raise ValueError(
                f"shards {self.shards} hold {sum(self.shards)} samples, not the {self.total} of "
                "the run"
            )
        if self.policy is PolicyName.SAMPLES or self.is_online:
            raise ValueError(
                "shards of their own need the policy cost and fixed assignment: the policy samples "
                "and online assignment deal one stream to all replicas"
            )


def config_differences(texts: Sequence[bytes]) -> str:
    """Say how configurations differ from replica 0's, field by field.

    Args:
        texts: `PlanConfig.to_text` of each replica.
    """
    first, *others = (json.loads(text) for text in texts)
    parts = [
        f"{name} is {other.get(name, 'absent')} on replica {replica} and "
        f"{first.get(name, 'absent')} on replica 0"
        for replica, other in enumerate(others, 1)
        for name in sorted({*first, *other})
        if first.get(name) != other.get(name)
    ]
    return (
        f"replicas were started differently: {'; '.join(parts) or 'in a field that was cut'}. "
        "Start every rank with the same flags, data and code version"
    )
