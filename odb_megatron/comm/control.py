"""The name and methods that `SourceGroup` had before; on its way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from odb_megatron.comm.blocks import ControlError, SourceGroup
from odb_megatron.comm.gloo_group import ranks_of

if TYPE_CHECKING:
    from odb_megatron.comm.deadline import Deadline
    from odb_megatron.comm.payload import PayloadGroup

__all__ = ["ControlError", "ControlGroup", "ranks_of"]


class ControlGroup:
    """One loader's channel between the source ranks of all replicas; see `SourceGroup`."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        name: str,
        timeout_s: float,
        patience: Deadline | None = None,
    ) -> None:
        self._group = SourceGroup(ranks, name=name, timeout_s=timeout_s, deadline=patience)
        self.name = name
        self.replica, self.num_replicas = self._group.replica, self._group.num_replicas
        self.num_exchanges = 0
        self.payloads: PayloadGroup | None = None

    def exchange(self, record: bytes) -> list[bytes]:
        """All-gather equal-sized records, in replica order."""
        found = self._group.gather_all(record)
        self.num_exchanges += 1
        return found

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
