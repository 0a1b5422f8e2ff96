"""The source ranks' channel of one loader: all-gather of records, and samples for each other.

Replicas form blocks of at most 64, as even as possible. Records and samples stay within a block;
the blocks' first ranks gather one record each, in blocks of their own where they are many, and hand
all on. So connections and work of a rank do not grow with the number of replicas beyond a block.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from odb_megatron.comm.deadline import Deadline
from odb_megatron.comm.gloo_group import Channel, ControlError, numbered
from odb_megatron.plan.blocks import BLOCK, block_of, blocks_of

__all__ = ["ControlError", "SourceGroup"]

_HEADER = struct.Struct("<qqq")
"""Before the samples that a replica sends another: step, replica, bytes that follow."""

_FAILED = -1
"""In place of the bytes that follow: the replica has failed, and nobody sends any."""


class SourceGroup(Channel):
    """This rank's part; all source ranks must make one, equally often for each name.

    Other ranks may, and have no part in it. The methods are collective: all replicas of the block
    (`gather`, `exchange`) or of all blocks call them in one order. They raise ControlError, naming
    replica and step, where a replica is gone, late or somewhere else; the channel is closed then.

    Args:
        ranks: global ranks of the source ranks, in replica order.
        name: the loader's, such as "train".
        timeout_s: seconds that an operation may take.
        deadline: ends operations in place of the time-out, and names who is missing.
        block: most replicas of a block, at least 2.

    Attributes:
        replica: this rank's; -1 where it is no source rank.
        num_replicas: number of replicas.
        block: the replicas of this rank's block; empty where it is no source rank.
        num_blocks: number of blocks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        name: str,
        timeout_s: float,
        deadline: Deadline | None = None,
        block: int = BLOCK,
    ) -> None:
        assert block > 1, "the blocks' first ranks would be all ranks"
        rank, size = dist.get_rank(), len(ranks)
        self.replica = list(ranks).index(rank) if rank in ranks else -1
        self._blocks = blocks_of(size, block)
        self.num_replicas, self.num_blocks, self.block = size, len(self._blocks), range(0)
        self._heads: SourceGroup | None = None
        self._rounds = self._block_rounds = 0
        who = f"replica {self.replica}"
        super().__init__(ranks, who=who, timeout_s=timeout_s, deadline=deadline)
        if self.replica < 0:
            return
        self.block = block_of(self.replica, size, block)
        at = self._blocks.index(self.block)
        self._ranks = [ranks[one] for one in self.block]
        own_name = numbered(f"{name} source ranks", ranks)
        self._group = self._join(self._ranks, f"{own_name}, block {at}")
        own = f"block {at}'s {name}" if self.num_blocks > 1 else name
        self._gather, self._exchange = f"{own} gather", f"{own} exchange"
        self._gather_blocks = f"{name} gather between blocks"
        self._expect(self._gather, self._exchange)
        if self.num_blocks > 1:
            self._expect(self._gather_blocks)
            if self.replica == self.block[0]:
                self._heads = SourceGroup(
                    [ranks[one[0]] for one in self._blocks],
                    name=f"{name} blocks",
                    timeout_s=timeout_s,
                    deadline=deadline,
                    block=block,
                )

    def gather(self, record: bytes) -> list[bytes]:
        """Return the records of the block's replicas, which have one size, in replica order."""
        with self._operation(self._gather, self._rounds):
            found = self._group.all_gather(record)
        self._rounds += 1
        return found

    def gather_blocks(self, record: bytes) -> list[bytes]:
        """Return the records of the blocks' first replicas, which have one size, in block order.

        Args:
            record: not used on other replicas, but for its size.
        """
        if self.num_blocks == 1:
            return [record]
        size = len(record)
        with self._operation(self._gather_blocks, self._block_rounds):
            data = np.zeros(size * self.num_blocks, np.uint8)
            if self._heads is not None:
                data[:] = np.frombuffer(b"".join(self._heads.gather_all(record)), np.uint8)
            self._group.broadcast(data)
        self._block_rounds += 1
        return [data[at : at + size].tobytes() for at in range(0, len(data), size)]

    def gather_all(self, record: bytes) -> list[bytes]:
        """Return the records of all replicas, which have one size, in replica order.

        For what is rare, such as a checkpoint: every rank gets the records of all replicas.
        """
        own = self.gather(record)
        if self.num_blocks == 1:
            return own
        most = max(map(len, self._blocks))
        found = self.gather_blocks(b"".join(own).ljust(most * len(record), b"\0"))
        return [
            data[at * len(record) : (at + 1) * len(record)]
            for data, block in zip(found, self._blocks, strict=True)
            for at in range(len(block))
        ]

    def exchange(
        self, step: int, sends: Mapping[int, bytes] | None, receives: Mapping[int, int]
    ) -> dict[int, bytes | None]:
        """Send samples to other replicas of the block, and return what they send.

        All of the block call it. Where replicas have failed they alone are returned, with None.

        Args:
            step: equal on all.
            sends: bytes for each replica; None where this one has failed.
            receives: number of bytes that each replica is going to send.
        """
        assert {*(sends or ()), *receives} <= {*self.block}, "samples stay within a block"
        if len(self.block) < 2:
            return {}
        parts = [(sends or {}).get(peer, b"") for peer in self.block]
        sizes = [receives.get(peer, 0) for peer in self.block]
        with self._operation(self._exchange, step):
            own = (step, self.replica)
            headers = [_HEADER.pack(*own, _FAILED if sends is None else len(p)) for p in parts]
            # First sizes alone: gloo ends the process where more bytes arrive than are expected.
            heads = self._group.all_to_all(headers, [_HEADER.size] * len(headers))
            found = [_HEADER.unpack(head) for head in heads]
            if failed := [by for _, by, announced in found if announced == _FAILED]:
                return dict.fromkeys(failed)
            for peer, size, (there, by, announced) in zip(self.block, sizes, found, strict=True):
                if (there, by, announced) != (step, peer, size) and peer != self.replica:
                    raise ControlError(
                        f"{self._who}: {self._exchange}: expected {size} bytes of step {step} from "
                        f"replica {peer}; {announced} bytes of step {there} from replica {by} were "
                        "announced. Start every rank with the same flags, data and code version"
                    )
            data = self._group.all_to_all(parts, sizes)
        return {peer: part for peer, part in zip(self.block, data, strict=True) if peer in receives}

    def close(self) -> None:
        """Close the connections; replicas that wait for this one learn it at once."""
        super().close()
        if self._heads is not None:
            self._heads.close()
