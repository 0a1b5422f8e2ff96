"""Control groups: all-gather of equal-sized byte strings over a gloo group of leaders.

Must not interpret a record, and must not use the device or NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from odb_megatron.comm.gloo_group import GlooGroup, numbered
from odb_megatron.comm.patience import PeerError

if TYPE_CHECKING:
    from odb_megatron.comm.patience import Patience
    from odb_megatron.comm.payload import PayloadGroup

__all__ = ["ControlError", "ControlGroup", "cluster_size", "ranks_of", "why_failed"]

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

    All leaders must call the constructor, equally often for each name; other ranks may, and have no
    part in it.

    Up to 128 leaders exchange in one ring. More form clusters of about the square root of their
    number: records go round each cluster, the first leaders of the clusters exchange what they
    have, and hand it on. That is about three times the root in hops and connections.

    Args:
        ranks: global ranks of the leaders, in replica order.
        name: shown in errors, such as "train".
        timeout_s: seconds an exchange may take.
        cluster: leaders per cluster; None for `cluster_size`.
        patience: ends exchanges in place of the time-out, and names who is missing.

    Attributes:
        num_exchanges: exchanges completed.
        payloads: the loader's channel for samples that replicas hand to each other; None where
            they never do.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        name: str,
        timeout_s: float,
        cluster: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._patience, self._what = patience, f"{name} exchange"
        self._ranks = list(ranks)
        self._name = name
        self._timeout_s = timeout_s
        rank = dist.get_rank()
        self._replica = self._ranks.index(rank) if rank in self._ranks else -1
        own_name = numbered(f"{name} control group", self._ranks)
        size = cluster or cluster_size(len(self._ranks))
        clusters = [self._ranks[at : at + size] for at in range(0, len(self._ranks), size)]
        self._cluster_size, self._num_clusters = size, len(clusters)
        self._groups: list[GlooGroup] = []
        for number, members in enumerate(clusters):
            if rank in members:
                self._groups.append(self._group(members, f"{own_name}/{number}"))
        heads = [members[0] for members in clusters]
        if len(clusters) > 1 and rank in heads:
            self._groups.append(self._group(heads, f"{own_name}/heads"))
        if patience is not None and self._replica >= 0:
            patience.expect(self._what)
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
        if self._groups[0].is_closed:
            raise ControlError(f"control group {self._name} is closed: an exchange had failed")
        if self._patience is not None:
            self._patience.begin(self._what, self.num_exchanges)
        try:
            gathered = self._gather(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        except RuntimeError as error:
            self._close()  # whoever waits for this rank in the same exchange learns it at once
            raise ControlError(
                f"replica {self._replica}: exchange {self.num_exchanges} of the {self._name} "
                + why_failed(error, self._patience, ranks=self._ranks, timeout_s=self._timeout_s)
            ) from error
        self.num_exchanges += 1
        data, size = gathered.numpy().tobytes(), len(record)
        return [data[at : at + size] for at in range(0, size * len(self._ranks), size)]

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

    def _gather(self, sent: torch.Tensor) -> torch.Tensor:
        """Return everybody's bytes in replica order; with clusters, the last one may be padded."""
        cluster, *heads = self._groups
        own = cluster.all_gather(sent)
        if self._num_clusters == 1:
            return own
        room = self._cluster_size * len(sent)
        received = torch.zeros(self._num_clusters * room, dtype=torch.uint8)
        received[: own.numel()] = own.view(-1)
        if heads:
            received = heads[0].all_gather(received[:room].clone()).view(-1)
        cluster.broadcast(received, source=0)
        return received

    def _group(self, ranks: Sequence[int], name: str) -> GlooGroup:
        return GlooGroup(ranks, name=name, timeout_s=self._timeout_s, patience=self._patience)

    def _close(self) -> None:
        for group in self._groups:
            group.close()


def why_failed(
    error: RuntimeError, patience: Patience | None, *, ranks: Sequence[int], timeout_s: float
) -> str:
    """Return how an operation of a loader's group ended, and who is missing if that is known."""
    if isinstance(error, PeerError):
        return f"loader ended: {error}"
    missing = "" if patience is None else patience.explain()
    limit = f" after at most {timeout_s:.0f} s" if patience is None else ""
    blame = missing or (f"A rank of {list(ranks)} has stopped or is stuck; its own output says why")
    return f"loader failed{limit} ({error}). {blame}"


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, in group order."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks
