"""Which ranks form a replica, which is its source rank, and what of a micro-batch each one uses.

Must not communicate: it follows from Megatron's sizes and rank order alone (parallel_state.py,
`RankGenerator`, 0.16.1 to 0.19.2).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ReplicaRanks", "replica_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRanks:
    """One rank's place in its replica.

    Attributes:
        rank: this rank.
        ranks: all ranks of the replica, ascending; the first one (tensor, pipeline and context
            rank 0) is its source rank.
        payload_ranks: those that use tokens, labels or loss masks: the ranks of the first and the
            last pipeline stage, and of stages with multi-token prediction; the source rank first.
        first_stage: the ranks of the first pipeline stage, the source rank first; they encode
            images.
        reporter: the rank of the last pipeline stage (tensor and context rank 0) that knows the
            loss.
        context_size: context-parallel size.
        context_rank: this rank's context-parallel rank.
        tensor_rank: this rank's tensor-parallel rank.
    """

    rank: int
    ranks: tuple[int, ...]
    payload_ranks: tuple[int, ...]
    reporter: int
    context_size: int
    context_rank: int
    tensor_rank: int
    first_stage: tuple[int, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether this rank reads data and plans: the source rank."""
        return self.rank == self.ranks[0]

    @property
    def uses_tokens(self) -> bool:
        """Whether this rank's stage uses tokens, labels or loss masks."""
        return self.rank in self.payload_ranks


def replica_ranks(
    args: argparse.Namespace, *, rank: int, token_stages: Sequence[int] = ()
) -> ReplicaRanks:
    """Return a rank's place, from Megatron's arguments.

    Args:
        args: `world_size`, the parallel sizes, and `use_tp_pp_dp_mapping`.
        rank: global rank.
        token_stages: pipeline stages that use tokens besides the first and the last.
    """
    from megatron.core.parallel_state import RankGenerator

    stages = args.pipeline_model_parallel_size
    shape = {
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "pp": stages,
    }
    size = shape["tp"] * shape["cp"] * stages
    mapping = getattr(args, "use_tp_pp_dp_mapping", False)
    generator = RankGenerator(
        **shape,
        ep=1,
        dp=args.world_size // size,
        order="tp-cp-ep-pp-dp" if mapping else "tp-cp-ep-dp-pp",
    )

    def group(token: str, member: int) -> list[int]:
        found: list[int] = next(ranks for ranks in generator.get_ranks(token) if member in ranks)
        return found

    ranks = sorted(group("tp-cp-pp", rank))
    stage_of = {other: group("pp", other).index(other) for other in ranks}
    users = {0, stages - 1, *token_stages}
    return ReplicaRanks(
        rank=rank,
        ranks=tuple(ranks),
        payload_ranks=tuple(other for other in ranks if stage_of[other] in users),
        reporter=group("pp", ranks[0])[-1],
        context_size=shape["cp"],
        context_rank=group("cp", rank).index(rank),
        tensor_rank=group("tp", rank).index(rank),
        first_stage=tuple(other for other in ranks if stage_of[other] == 0),
    )
