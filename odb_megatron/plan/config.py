"""What all replicas of a loader must agree on for their plans to be one plan.

Pure values; `digest` is what replicas compare.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import CostPolicy, PolicyName, SamplesPolicy, StepPolicy

__all__ = ["PlanConfig"]


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
        max_delay_steps: see `CostPolicy`.
        count_multiple: the micro-batch count is a multiple of this.
        cost: cost model.
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

    def digest(self) -> int:
        """Signed 64-bit digest of all fields."""
        values = asdict(self) | {"policy": self.policy.value}
        text = json.dumps(values, sort_keys=True).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)

    def build_policy(self) -> StepPolicy:
        """Return the step policy in force."""
        if self.policy is PolicyName.SAMPLES:
            return SamplesPolicy(total=self.total, global_batch_size=self.global_batch_size)
        return CostPolicy(
            total=self.total,
            global_batch_size=self.global_batch_size,
            window=self.window,
            max_delay_steps=self.max_delay_steps,
            num_replicas=self.num_replicas,
        )
