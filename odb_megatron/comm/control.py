"""Control groups: all-gather of equal-sized byte strings over a gloo group of leaders.

Must not interpret a record, and must not use the device or NCCL.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from odb_megatron.comm.payload import PayloadGroup

__all__ = ["ControlError", "ControlGroup", "cluster_size", "ranks_of"]

_MOST_IN_A_RING = 128
"""Leaders that exchange in one ring; more exchange in clusters. A ring takes a hop per leader and
connects every leader with every other: 8192 of them would need as many file descriptors each."""


class ControlError(RuntimeError):
    """An exchange did not complete: a peer is gone, stuck, or sent something else."""


def cluster_size(num_replicas: int) -> int:
    """Return how many leaders exchange among themselves first; all of them up to 128."""
    if num_replicas <= _MOST_IN_A_RING:
        return num_replicas
    return math.isqrt(num_replicas - 1) + 1


class ControlGroup:
    """One loader's channel between the leaders of all replicas.

    Every rank of the world must call the constructor, in the same order for each loader (torch's
    `new_group` demands it), also ranks that are not members.

    Up to 128 leaders exchange in one ring. More form clusters of about the square root of their
    number: records go round each cluster, the first leaders of the clusters exchange what they
    have, and hand it on. That is about three times the root in hops and connections.

    Args:
        ranks: global ranks of the leaders, in replica order.
        name: shown in errors, such as "train".
        timeout_s: seconds an exchange may take.
        cluster: leaders per cluster; None for `cluster_size`.

    Attributes:
        num_exchanges: exchanges completed.
        payloads: the loader's channel for samples that replicas hand to each other; None where
            they never do.
    """

    def __init__(
        self, ranks: Sequence[int], *, name: str, timeout_s: float, cluster: int | None = None
    ) -> None:
        self._ranks = list(ranks)
        self._name = name
        self._timeout_s = timeout_s
        rank = dist.get_rank()
        self._replica = self._ranks.index(rank) if rank in self._ranks else -1
        in_order = sorted(self._ranks)  # as torch orders the members of a group
        self._slots = [in_order.index(rank) for rank in self._ranks]
        size = cluster or cluster_size(len(in_order))
        clusters = [in_order[at : at + size] for at in range(0, len(in_order), size)]
        self._cluster_size, self._num_clusters = size, len(clusters)
        self._groups: list[Any] = []
        self._cluster, self._heads, self._head = None, None, -1
        for members in clusters:
            group = self._new_group(members)
            if rank in members:
                self._cluster, self._head = group, members[0]
        if len(clusters) > 1:
            self._heads = self._new_group([members[0] for members in clusters])
        # Joins gloo's threads while there is an interpreter: one that still frees the tensors of
        # the last exchange as Python ends aborts the process (exit code 134 after a good run).
        atexit.register(self._destroy)
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
        if not self._groups:
            raise ControlError(f"control group {self._name} is closed: an exchange had failed")
        try:
            gathered = self._gather(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        except RuntimeError as error:
            self._destroy()  # whoever waits for this rank in the same exchange learns it at once
            raise ControlError(
                f"replica {self._replica}: exchange {self.num_exchanges} of the {self._name} "
                f"loader failed after at most {self._timeout_s:.0f} s ({error}). A rank of "
                f"{self._ranks} has stopped or is stuck; its own output says why"
            ) from error
        self.num_exchanges += 1
        data, size = gathered.numpy().tobytes(), len(record)
        return [data[slot * size : (slot + 1) * size] for slot in self._slots]

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

    def _new_group(self, ranks: Sequence[int]) -> Any:
        group = dist.new_group(
            list(ranks), backend="gloo", timeout=timedelta(seconds=self._timeout_s)
        )
        if dist.get_rank() in ranks:
            self._groups.append(group)
        return group

    def _gather(self, sent: torch.Tensor) -> torch.Tensor:
        """Return everybody's bytes in rank order; with clusters, the last one may be padded."""
        room = self._cluster_size * len(sent)
        received = torch.zeros(self._num_clusters * room, dtype=torch.uint8)
        parts = received[: dist.get_world_size(self._cluster) * len(sent)]
        dist.all_gather(list(parts.view(-1, len(sent))), sent, group=self._cluster)
        if self._num_clusters > 1:
            if dist.get_rank() == self._head:
                own = received[:room].clone()
                dist.all_gather(list(received.view(-1, room)), own, group=self._heads)
            dist.broadcast(received, src=self._head, group=self._cluster)
        return received

    def _destroy(self) -> None:
        self._cluster = self._heads = None  # connections close with the last reference
        while self._groups and dist.is_initialized():
            dist.destroy_process_group(self._groups.pop())


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, in group order."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks
