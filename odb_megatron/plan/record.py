"""What replicas tell each other of a step, and what all of them then know of it.

Pure: one numpy dtype per record, from measuring over the wire to the planner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.blocks import BLOCK, MAX_OFFERS
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import SizeRule, size_rule
from odb_megatron.plan.pipeline import Pipeline

__all__ = ["HEADER", "OPEN_TOTAL", "ROW", "SUMMARY", "TABLE", "TEXT_BYTES", "LoaderClosedError"]
__all__ += ["PlanConfig", "ReplicaFailedError", "SkipReason", "StepTotals", "Sync"]
__all__ += ["config_differences", "num_patches"]

OPEN_TOTAL = 1 << 40
"""Samples of a run whose length nobody knows before its end."""

TEXT_BYTES = 8192
"""Of the text that each replica sends when one has failed, or configurations differ."""

_MAX_SHOWN = 200

HEADER = np.dtype(
    [
        ("config", "<i8"),  # digest of the PlanConfig
        ("step", "<i8"),
        ("consumed", "<i8"),  # samples before this step
        ("rows", "<u4"),  # that follow
        ("wait_us", "<u4"),  # for data, since the last record
        ("loss_weight", "<u8"),  # sum of the scaled weights of the rows' samples
        ("ended", "u1"),  # this replica's iterator has no further sample
        ("closing", "u1"),
        ("failed", "u1"),
        ("reserved", "V21"),
    ]
)
"""First 64 bytes of a replica's record."""

ROW = np.dtype(
    [
        ("tokens", "<u4"),  # before padding; 0 for a skipped sample
        ("loss_tokens", "<u4"),  # of a skipped sample its SkipReason
        ("patches", "<u4"),  # with the bit TRUNCATED where the sample's end was cut
        ("bytes", "<u4"),  # on the wire
    ]
)
"""A sample in a replica's record: 16 bytes."""

TRUNCATED = 1 << 31

TABLE = np.dtype(
    [
        *ROW.descr,
        ("slot", "<i4"),  # its place among those of the block, and then of other blocks
        ("owner", "<i4"),  # which replica of the block has read it; -1 for another block's
    ]
)
"""A sample of a step as the replicas of a block know it."""

OFFER = np.dtype([("row", TABLE), ("cost", "<i8")])
"""A sample that may move to another block."""

SUMMARY = np.dtype(
    [
        ("failed", "<i8"),
        ("closing", "<i8"),
        ("differs", "<i8"),  # replicas of the block have different configurations or steps
        ("config", "<i8"),
        ("consumed", "<i8"),
        ("rows", "<i8"),  # read so far in this step
        ("live", "<i8"),  # replicas whose iterator has not ended
        ("cost", "<i8"),  # of all its samples
        ("offers", OFFER, MAX_OFFERS),
    ]
)
"""What the first replicas of several blocks tell each other in a round."""


def num_patches(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the image patches of the samples of a `ROW` or `TABLE`."""
    found: npt.NDArray[np.int64] = (rows["patches"] & ~np.uint32(TRUNCATED)).astype(np.int64)
    return found


class Sync(Enum):
    """Where replicas wait for each other: the objective of planning."""

    STEP = "step"
    MICROBATCH = "microbatch"


class SkipReason(IntEnum):
    """Why a sample is consumed and not trained."""

    BAD_RECORD = 1
    OVERLONG = 2


class ReplicaFailedError(RuntimeError):
    """Another replica, or another rank of this one, has failed; the message says why."""


class LoaderClosedError(RuntimeError):
    """A replica has closed its loader: no further step is made anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Everything that must be equal on all replicas for their plans to agree.

    Attributes:
        total: samples of the run (train) or of the stream (evaluation), over all replicas;
            `OPEN_TOTAL` where the iterators' ends decide.
        global_batch_size: samples of a step.
        num_replicas: data-parallel size.
        token_budget: most padded tokens of a micro-batch.
        multiple: see `padding.length_multiple`.
        sizes: token counts to the nearest of which micro-batches are padded; empty for none.
        context: most tokens of a sample, where there are sizes; 0 for the budget.
        count_multiple: the number of micro-batches is a multiple of this.
        cost: cost model.
        sync: where replicas wait for each other.
        pipeline: the stages for which micro-batches are put in order.
        max_patches: most patches of a micro-batch; 0 for no cap.
        max_share: most replicas that share a long sample, a power of two.
        has_iterators: each replica reads an iterator of its own.
        max_bad_records: most bad records of a run; None for no limit.
        block: most replicas of a block.
        data: digest of the data and its order, so that different files are noticed.
        loss_per: what counts once in the loss, and the scale of its weights.
    """

    total: int
    global_batch_size: int
    num_replicas: int
    token_budget: int
    multiple: int = 1
    sizes: tuple[int, ...] = ()
    context: int = 0
    count_multiple: int = 1
    cost: CostModel = CostModel()
    sync: Sync = Sync.STEP
    pipeline: Pipeline = Pipeline()
    max_patches: int = 0
    max_share: int = 1
    has_iterators: bool = False
    max_bad_records: int | None = None
    block: int = BLOCK
    data: str = ""
    loss_per: str = ""

    def __post_init__(self) -> None:
        if self.token_budget < self.multiple:
            raise ValueError(
                f"token budget {self.token_budget} is below the length multiple {self.multiple}: "
                "no sample fits; raise --odb-token-budget"
            )

    @property
    def has_unknown_end(self) -> bool:
        """Whether the iterators' ends decide how long the run is."""
        return self.total == OPEN_TOTAL

    @property
    def size_rule(self) -> SizeRule:
        """What samples and micro-batches are padded to."""
        budget, context = self.token_budget, self.context
        return size_rule(self.sizes, token_budget=budget, context=context, multiple=self.multiple)

    def digest(self) -> int:
        """Signed 64-bit digest of all fields."""
        text = json.dumps(self._values(), sort_keys=True).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)

    def to_text(self) -> str:
        """Return all fields for `config_differences`; long ones are cut."""
        values = {name: str(value)[:_MAX_SHOWN] for name, value in self._values().items()}
        return json.dumps(values, sort_keys=True)

    def _values(self) -> dict[str, object]:
        return asdict(self) | {"sync": self.sync.value}


def config_differences(texts: Sequence[str]) -> str:
    """Say how configurations differ from replica 0's, field by field; "" where they do not.

    Args:
        texts: `PlanConfig.to_text` of each replica.
    """
    first, *others = map(json.loads, texts)
    return "; ".join(
        f"{name} is {other.get(name)} on replica {at} and {first[name]} on replica 0"
        for at, other in enumerate(others, 1)
        for name in first
        if first[name] != other.get(name)
    )


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks know of a step, over all replicas; of one size, however many they are.

    Attributes:
        step: 0-based, since this loader began.
        consumed_before: samples consumed before it.
        num_consumed: samples consumed, skipped ones included.
        num_micro_batches: M, equal on all replicas.
        num_replicas: data-parallel size.
        num_samples: samples trained.
        num_left_out: samples skipped.
        num_bad: those of them whose records are bad.
        num_truncated: samples whose end was cut.
        num_tokens: tokens before padding.
        num_padded_tokens: tokens after padding each sample.
        num_squared_tokens: sum of squared lengths.
        num_loss_tokens: positions that carry loss.
        loss_weight: sum of their scaled weights: what Megatron counts as tokens.
        num_patches: image patches.
        num_idle: idle micro-batches.
        num_shared: samples that several replicas train together.
        num_moved: samples that another replica trains than the one that has read them; a shared one
            counts once for each.
        bytes_moved: their bytes.
        cost_sum: predicted cost of all replicas, per-micro-batch overhead included.
        cost_max: that of the costliest replica.
        wait_us: longest wait for data of any replica, microseconds.
        is_final: nothing is left after this step.
    """

    step: int = 0
    consumed_before: int = 0
    num_consumed: int = 0
    num_micro_batches: int = 0
    num_replicas: int = 0
    num_samples: int = 0
    num_left_out: int = 0
    num_bad: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    num_squared_tokens: int = 0
    num_loss_tokens: int = 0
    loss_weight: int = 0
    num_patches: int = 0
    num_idle: int = 0
    num_shared: int = 0
    num_moved: int = 0
    bytes_moved: int = 0
    cost_sum: int = 0
    cost_max: int = 0
    wait_us: int = 0
    is_final: bool = False

    @property
    def balance(self) -> float:
        """Mean over max predicted cost of the replicas; 1.0 when there is no cost."""
        return self.cost_sum / (self.num_replicas * self.cost_max) if self.cost_max else 1.0

    def to_bytes(self) -> bytes:
        """Return the numbers, 8 bytes each."""
        return np.array([getattr(self, name) for name in _NAMES], dtype="<i8").tobytes()

    @classmethod
    def merged(cls, parts: Sequence[bytes]) -> StepTotals:
        """Return the totals of several blocks.

        Args:
            parts: `to_bytes` of each block's.
        """
        table = np.stack([np.frombuffer(part, dtype="<i8") for part in parts])
        values = np.where([name in _NO_SUMS for name in _NAMES], table.max(0), table.sum(0))
        *numbers, is_final = values.tolist()
        return cls(**dict(zip(_NAMES, numbers, strict=False)), is_final=bool(is_final))


_NAMES = [field.name for field in fields(StepTotals)]
_NO_SUMS = {"step", "consumed_before", "num_consumed", "num_micro_batches", "num_replicas"}
_NO_SUMS |= {"cost_max", "wait_us", "is_final"}
