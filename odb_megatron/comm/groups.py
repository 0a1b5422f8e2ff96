"""Process groups over the CPU (gloo): between the source ranks of all replicas, and inside one.

Knows ranks, time-outs and bytes; nothing of data, plans or Megatron. Replicas form blocks of at
most 64, as even as possible. Records and samples stay within a block; the blocks' first ranks
gather one record each, in blocks of their own where they are many, and hand all on. So connections
and work of a rank do not grow with the number of replicas beyond a block.

Inside a replica a step is two broadcasts, however many micro-batches it has: a header to every
rank, and a payload to those that use it; steps with images have a second payload, the attachment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from odb_megatron.comm.heartbeat import ControlError, Deadline, numbered
from odb_megatron.plan.blocks import BLOCK, blocks_of

__all__ = ["Bytes", "ControlError", "ReplicaGroup", "SourceGroup", "ranks_of"]
__all__ += ["add_up", "device_group", "largest"]

Bytes = npt.NDArray[np.uint8]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-3
_UNCHECKED_S = 0.05  # seconds of waiting before the deadline is looked at
_ENDLESS = timedelta(days=365)  # time-out of an operation that a deadline ends

_FAILED = -1
"""In place of the bytes that follow: the replica has failed, and nobody sends any."""

_LENGTH_BYTES = 8
_FIRST_CAPACITY = 4096

_c10d: Any = dist.distributed_c10d  # its stubs lack what is used here
_channels: weakref.WeakSet[_Channel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Joins gloo's threads while there is an interpreter: one that still frees the tensors of the
    # last operation as Python ends aborts the process (exit code 134 after a good run).
    for channel in list(_channels):
        channel.close()


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, in group order."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def device_group(ranks: Sequence[int], timeout: timedelta) -> Any:
    """Make a group of Megatron's own kind, of which members alone know."""
    return dist.new_group(sorted(ranks), timeout=timeout, use_local_synchronization=True)


def add_up(tensor: torch.Tensor, group: Any) -> None:
    """Let a tensor be the sum over a group's ranks."""
    dist.all_reduce(tensor, group=group)


def largest(value: torch.Tensor) -> float:
    """Return the largest of all ranks' values."""
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


class _Channel:
    """The groups of one loader on one rank, which fail together.

    `torch.distributed.new_group` makes every rank of the world wait for every group: with a group
    per replica and loader, start-up on a thousand replicas would take minutes. These are the same
    backend objects on the same store, made by their members alone. The world must be initialised
    (`torch.distributed.init_process_group`), with any backend.

    Args:
        ranks: of the peers, for errors.
        who: this rank in errors.
        timeout_s: seconds that making a group, or an operation, may take.
        deadline: ends operations in place of the time-out, and names who is missing.
    """

    def __init__(
        self, ranks: Sequence[int], *, who: str, timeout_s: float, deadline: Deadline | None
    ) -> None:
        self._who, self._ranks = who, list(ranks)
        self._timeout_s, self._deadline = timeout_s, deadline
        self._groups: list[Any] = []
        self._is_closed = False
        _channels.add(self)

    def close(self) -> None:
        """Close the connections; ranks that wait for this one learn it at once.

        While another thread waits in an operation its frame keeps the group: freeing one waits for
        its operations, and would hold up the end of this process until a peer is gone.
        """
        self._is_closed = True
        while self._groups:
            with contextlib.suppress(AttributeError, RuntimeError):  # not in every torch
                self._groups.pop().abort()

    def _join(self, ranks: Sequence[int], name: str) -> weakref.ref[Any]:
        """Make a group with these ranks, this one among them; a name's are made in one order."""
        store = _c10d.PrefixStore(
            f"odb_megatron/{numbered(name, ranks)}", _c10d._get_default_store()
        )
        rank, timeout = list(ranks).index(dist.get_rank()), timedelta(seconds=self._timeout_s)
        self._groups.append(_c10d.ProcessGroupGloo(store, rank, len(ranks), timeout))
        return weakref.ref(self._groups[-1])

    def _expect(self, *operations: str) -> None:
        """This rank will take part in them."""
        for what in operations if self._deadline else ():
            assert self._deadline is not None
            self._deadline.expect(what)

    def _begin(self, what: str, number: int) -> None:
        if self._is_closed:
            raise ControlError(f"{self._who}: {what} {number}: the channel is closed")
        if self._deadline is not None:
            self._deadline.begin(what, number)

    def _run(self, what: str, number: int, group: weakref.ref[Any], name: str, *of: Any) -> None:
        """Run operation `number` of a kind, the group's method `name`, waiting for it in Python.

        A daemon thread that waited inside `work.wait()` would be ended there if a peer's death woke
        it while the interpreter shuts down: that aborts the process ("terminate called without an
        active exception", exit code 134 in place of the run's own).

        Raises:
            ControlError: it has failed; names this rank, the operation and who is missing. The
                channel is closed then.
        """
        self._begin(what, number)
        deadline, backend = self._deadline, group()
        if deadline is not None:
            of[-1].timeout = _ENDLESS
        started = time.perf_counter()
        try:
            work = getattr(backend, name)(*of)
            while not work.is_completed():
                waited = time.perf_counter() - started
                if deadline is not None and waited > _UNCHECKED_S:
                    deadline.check()
                time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited / 4)))
            work.wait()
        except ControlError:
            for one in (backend, of):  # freeing them would wait for the operation
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            limit = "" if deadline else f" after at most {self._timeout_s:.0f} s"
            missing = deadline.explain() if deadline else ""
            peers = f"A rank of {self._ranks} has stopped or is stuck; its own output says why"
            raise ControlError(
                f"{self._who}: {what} {number} failed{limit} ({error}). {missing or peers}"
            ) from error

    def _broadcast(
        self, what: str, number: int, group: weakref.ref[Any], data: Bytes, source: int = 0
    ) -> None:
        """Fill `data` on all members with that of member `source`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._run(what, number, group, "broadcast", [torch.from_numpy(data)], options)


class SourceGroup(_Channel):
    """This rank's part; all source ranks must make one, equally often for each name.

    The methods are collective: all replicas of the block (`gather`, `exchange`) or of all blocks
    call them in one order. They raise ControlError, naming replica and step, where a replica is
    gone, late or somewhere else; the channel is closed then.

    Args:
        ranks: global ranks of the source ranks, in replica order; this rank is one of them.
        name: the loader's, such as "train".
        timeout_s: seconds that an operation may take.
        deadline: ends operations in place of the time-out, and names who is missing.
        block: most replicas of a block, at least 2.

    Attributes:
        replica: this rank's.
        num_replicas: number of replicas.
        block: the replicas of this rank's block.
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
        self.replica, self.num_replicas = list(ranks).index(dist.get_rank()), len(ranks)
        self._blocks = blocks_of(len(ranks), block)
        self.block = next(one for one in self._blocks if self.replica in one)
        at, members = self._blocks.index(self.block), [ranks[one] for one in self.block]
        who = f"replica {self.replica}"
        super().__init__(members, who=who, timeout_s=timeout_s, deadline=deadline)
        self._group = self._join(members, f"{name} source ranks of {len(ranks)}, block {at}")
        own = f"block {at}'s {name}" if len(self._blocks) > 1 else name
        self._gather, self._exchange = f"{own} gather", f"{own} exchange"
        self._gather_blocks = f"{name} gather between blocks"
        self._expect(self._gather, self._exchange)
        self._rounds = self._block_rounds = 0
        self._heads: SourceGroup | None = None
        if len(self._blocks) > 1:
            self._expect(self._gather_blocks)
            if self.replica == self.block[0]:
                self._heads = SourceGroup(
                    [ranks[one[0]] for one in self._blocks],
                    name=f"{name} blocks",
                    timeout_s=timeout_s,
                    deadline=deadline,
                    block=block,
                )

    def close(self) -> None:
        """Close the connections; replicas that wait for this one learn it at once."""
        super().close()
        if self._heads is not None:
            self._heads.close()

    def gather(self, record: bytes) -> list[bytes]:
        """Return the records of the block's replicas, which have one size, in replica order."""
        # gloo's own goes round a ring: as many hops as members, in place of one.
        size = len(self.block)
        self._rounds += 1
        return self._all_to_all(
            self._gather, self._rounds - 1, [record] * size, [len(record)] * size
        )

    def gather_blocks(self, record: bytes) -> list[bytes]:
        """Return the records of the blocks' first replicas, which have one size, in block order.

        Args:
            record: not used on other replicas, but for its size.
        """
        if len(self._blocks) == 1:
            return [record]
        size = len(record)
        data = np.zeros(size * len(self._blocks), np.uint8)
        if self._heads is not None:
            try:
                data[:] = np.frombuffer(b"".join(self._heads.gather_all(record)), np.uint8)
            except ControlError:
                self.close()
                raise
        self._broadcast(self._gather_blocks, self._block_rounds, self._group, data)
        self._block_rounds += 1
        return [data[at : at + size].tobytes() for at in range(0, len(data), size)]

    def gather_all(self, record: bytes) -> list[bytes]:
        """Return the records of all replicas, which have one size, in replica order.

        For what is rare, such as a checkpoint: every rank gets the records of all replicas.
        """
        own = self.gather(record)
        if len(self._blocks) == 1:
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
        # First sizes alone: gloo ends the process where more bytes arrive than are expected.
        announced = [_FAILED if sends is None else len(part) for part in parts]
        heads = [np.array((step, size)).tobytes() for size in announced]
        heads = self._all_to_all(self._exchange, step, heads, [len(heads[0])] * len(heads))
        found = [tuple(np.frombuffer(head, np.int64).tolist()) for head in heads]
        if failed := [at for at, one in zip(self.block, found, strict=True) if one[1] == _FAILED]:
            return dict.fromkeys(failed)
        for peer, size, one in zip(self.block, sizes, found, strict=True):
            if one != (step, size) and peer != self.replica:
                self.close()
                raise ControlError(
                    f"{self._who}: {self._exchange}: expected {size} bytes of step {step} from "
                    f"replica {peer}, which announced {one[1]} bytes of step {one[0]}. Start "
                    "every rank with the same flags, data and code version"
                )
        data = self._all_to_all(self._exchange, step, parts, sizes)
        return {peer: part for peer, part in zip(self.block, data, strict=True) if peer in receives}

    def _all_to_all(
        self, what: str, number: int, sent: Sequence[bytes], sizes: Sequence[int]
    ) -> list[bytes]:
        """Send each replica of the block its bytes; return what each has sent here.

        Args:
            what: and `number`, the operation.
            sent: for each.
            sizes: bytes to come from each. gloo ends the process where more arrive.
        """
        if len(self.block) == 1:
            self._begin(what, number)
            return list(sent)
        joined = np.frombuffer(b"".join(sent), np.uint8).copy()
        received = np.empty(sum(sizes), np.uint8)
        tensors = torch.from_numpy(received), torch.from_numpy(joined)
        splits = list(sizes), list(map(len, sent))
        options = _c10d.AllToAllOptions()
        self._run(what, number, self._group, "alltoall_base", *tensors, *splits, options)
        return [part.tobytes() for part in np.split(received, np.cumsum(sizes)[:-1])]


class ReplicaGroup(_Channel):
    """One loader's channel from the source rank of a replica to its other ranks.

    Every rank of the replica makes one, in the same order for each loader. All methods raise
    ControlError where a rank is gone or did not come in time.

    Args:
        ranks: global ranks of the replica, the source rank first.
        payload_ranks: those that get payloads, the source rank first; a subset of `ranks`.
        name: the loader's, such as "train".
        timeout_s: seconds a broadcast may take.
        deadline: see `SourceGroup`.
        attachment_ranks: those that get attachments, the source rank first; a subset of `ranks`.

    Attributes:
        is_source: whether this rank sends.
        has_payload: whether it takes part in broadcasts of payloads.
        has_attachment: whether it takes part in broadcasts of attachments.
        num_collectives: broadcasts that it has taken part in.
        num_bytes: bytes that it has sent (source rank) or received by them.
        num_reports: `report`s that it has taken part in.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        payload_ranks: Sequence[int],
        name: str,
        timeout_s: float,
        deadline: Deadline | None = None,
        attachment_ranks: Sequence[int] = (),
    ) -> None:
        rank = dist.get_rank()
        super().__init__(ranks, who=f"rank {rank}", timeout_s=timeout_s, deadline=deadline)
        self._headers = self._join(ranks, f"{name} headers")
        self._payloads, self._attachments = (
            self._join(own, f"{name} {kind}") if len(own) > 1 and rank in own else None
            for kind, own in (("payloads", payload_ranks), ("attachments", attachment_ranks))
        )
        self._what = f"{name} broadcast from rank {ranks[0]}:"
        self._expect(self._what)
        self._capacity = _FIRST_CAPACITY
        self.is_source, self.has_payload = rank == ranks[0], rank in payload_ranks
        self.has_attachment = self._attachments is not None
        self.num_collectives = self.num_bytes = self.num_reports = 0

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the source rank passes it, the others get it.

        One broadcast of `_capacity` bytes, which grows on all ranks to hold twice the last header:
        only one of more than twice the size of all before it needs a second broadcast.
        """
        data = data or b""
        room = self._capacity - _LENGTH_BYTES
        first = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        first = self._send(_buffer(first, self._capacity), self._headers).tobytes()
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        found = first[_LENGTH_BYTES:][:length]
        if length > room:
            found += self._send(_buffer(data[room:], length - room), self._headers).tobytes()
        while self._capacity - _LENGTH_BYTES < 2 * length:
            self._capacity *= 2
        return found

    def payload(self, data: Bytes) -> Bytes:
        """Broadcast a payload; the others pass a buffer of its size, which is filled and returned.

        Args:
            data: uint8 [bytes], contiguous.
        """
        return self._send(data, self._payloads)

    def attachment(self, data: Bytes) -> Bytes:
        """Broadcast a second payload, as `payload`."""
        return self._send(data, self._attachments)

    def report(self, values: Sequence[float]) -> list[float]:
        """Send numbers from the last rank of the group to the source rank; both get them.

        For a group of two; both call it, with equally many values.
        """
        data, what = np.array(values, np.float64), f"report to rank {self._ranks[0]}"
        self._broadcast(what, self.num_reports, self._headers, data.view(np.uint8), source=1)
        self.num_reports += 1
        found: list[float] = data.tolist()
        return found

    def _send(self, data: Bytes, group: weakref.ref[Any] | None) -> Bytes:
        if group is not None and data.size:
            self._broadcast(self._what, self.num_collectives, group, data)
            self.num_collectives += 1
            self.num_bytes += data.nbytes
        return data


def _buffer(data: bytes, size: int) -> Bytes:
    return np.frombuffer(bytearray(data.ljust(size, b"\0")), np.uint8)
