"""Control groups: all-gather of equal-sized byte strings over a gloo group of leaders.

Must not interpret a record, and must not use the device or NCCL.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from odb_megatron.comm.payload import PayloadGroup

__all__ = ["ControlError", "ControlGroup", "ranks_of"]


class ControlError(RuntimeError):
    """An exchange did not complete: a peer is gone, stuck, or sent something else."""


class ControlGroup:
    """One loader's channel between the leaders of all replicas.

    Every rank of the world must call the constructor, in the same order for each loader (torch's
    `new_group` demands it), also ranks that are not members.

    Args:
        ranks: global ranks of the leaders, in replica order.
        name: shown in errors, such as "train".
        timeout_s: seconds an exchange may take.

    Attributes:
        num_exchanges: exchanges completed.
        payloads: the loader's channel for samples that replicas hand to each other; None where
            they never do.
    """

    def __init__(self, ranks: Sequence[int], *, name: str, timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._name = name
        self._timeout_s = timeout_s
        rank = dist.get_rank()
        self._replica = self._ranks.index(rank) if rank in self._ranks else -1
        self._slots = [sorted(self._ranks).index(rank) for rank in self._ranks]  # torch sorts them
        self._group = dist.new_group(
            self._ranks, backend="gloo", timeout=timedelta(seconds=timeout_s)
        )
        # Joins gloo's threads while there is an interpreter: one that still frees the tensors of
        # the last exchange as Python ends aborts the process (exit code 134 after a good run).
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group(self._group))
        self.num_exchanges = 0
        self.payloads: PayloadGroup | None = None

    @property
    def replica(self) -> int:
        """This rank's replica; -1 on a rank that is not a leader."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self._ranks)

    def exchange(self, record: bytes) -> list[bytes]:
        """All-gather `record`; all replicas must send the same number of bytes.

        Returns:
            Everybody's record, in replica order.

        Raises:
            ControlError: a peer is gone or did not answer in time.
        """
        if self._replica < 0:
            raise ControlError(f"rank {dist.get_rank()} is no leader of control group {self._name}")
        sent = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in self._ranks]
        try:
            dist.all_gather(received, sent, group=self._group)
        except RuntimeError as error:
            raise ControlError(
                f"replica {self._replica}: exchange {self.num_exchanges} of the {self._name} "
                f"loader failed after at most {self._timeout_s:.0f} s ({error}). A rank of "
                f"{self._ranks} has stopped or is stuck; its own output says why"
            ) from error
        self.num_exchanges += 1
        return [received[slot].numpy().tobytes() for slot in self._slots]

    def gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """All-gather equally long lists of integers (64 bit), in replica order."""
        data = b"".join(count.to_bytes(8, "little", signed=True) for count in counts)
        return [
            [
                int.from_bytes(part[at : at + 8], "little", signed=True)
                for at in range(0, len(part), 8)
            ]
            for part in self.exchange(data)
        ]


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, in group order."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks
