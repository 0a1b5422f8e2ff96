"""gloo process groups that only their members make, and the channel that a loader has of them.

`torch.distributed.new_group` makes every rank of the world wait for every group: with a group per
replica and loader, start-up on a thousand replicas would take minutes. This is the same backend
object on the same store, without that. For bytes on the CPU only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from odb_megatron.comm.deadline import Deadline

__all__ = ["Bytes", "Channel", "ControlError", "GlooGroup", "PeerError", "numbered", "ranks_of"]

Bytes = npt.NDArray[np.uint8]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-3
_UNCHECKED_S = 0.05  # seconds of waiting before the deadline is looked at
_ENDLESS = timedelta(days=365)  # time-out of an operation that a deadline ends

_c10d: Any = dist.distributed_c10d  # its stubs lack what is used here
_made: Counter[str] = Counter()
_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Joins gloo's threads while there is an interpreter: one that still frees the tensors of the
    # last operation as Python ends aborts the process (exit code 134 after a good run).
    for group in list(_groups):
        group.close()


class ControlError(RuntimeError):
    """An operation between ranks did not complete: one is gone, stuck, or sent something else."""


class PeerError(ControlError):
    """A peer is gone, or has not come before the deadline (see `Deadline`)."""


def numbered(name: str, ranks: Sequence[int]) -> str:
    """Return a name with the members, and a number that counts the calls for both in this process.

    A second run of one process finds the keys of the first in the store. Members must have called
    it equally often for the name and these very ranks.
    """
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    own_name = f"{name} of ranks {members}"
    number = _made[own_name]
    _made[own_name] += 1
    return f"{own_name} {number}"


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group, in group order."""
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


class GlooGroup:
    """Collectives over the CPU between some ranks.

    The world must be initialised (`torch.distributed.init_process_group`), with any backend. All
    methods raise RuntimeError where a member is gone or did not come in time.

    Args:
        ranks: global ranks of the members, in group order; this rank is one of them.
        name: equal on all members, and of no other group of this run (see `numbered`).
        timeout_s: seconds that making it, or an operation, may take.
        deadline: ends operations in place of the time-out.
    """

    def __init__(
        self, ranks: Sequence[int], *, name: str, timeout_s: float, deadline: Deadline | None = None
    ) -> None:
        self._deadline = deadline
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        store = _c10d.PrefixStore(f"odb_megatron/{name}", _c10d._get_default_store())
        self._group: Any = _c10d.ProcessGroupGloo(
            store, self.rank, self.size, timedelta(seconds=timeout_s)
        )
        _groups.add(self)

    def broadcast(self, data: Bytes, *, source: int = 0) -> None:
        """Fill `data` on all members with that of member `source`."""
        options = self._options(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        self._complete("broadcast", [torch.from_numpy(data)], options)

    def all_gather(self, record: bytes) -> list[bytes]:
        """Return all members' records, which have one size, in group order."""
        # gloo's own goes round a ring: as many hops as members, in place of one.
        return self.all_to_all([record] * self.size, [len(record)] * self.size)

    def all_to_all(self, sent: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Send each member its bytes; return what each member sent here.

        Args:
            sent: for each member, in group order.
            sizes: bytes to come from each. gloo ends the process where more arrive.
        """
        if self.size == 1:
            return list(sent)
        joined = np.frombuffer(b"".join(sent), np.uint8).copy()
        received = np.empty(sum(sizes), np.uint8)
        self._complete(
            "alltoall_base",
            torch.from_numpy(received),
            torch.from_numpy(joined),
            list(sizes),
            [len(part) for part in sent],
            self._options(_c10d.AllToAllOptions()),
        )
        return [part.tobytes() for part in np.split(received, np.cumsum(sizes)[:-1])]

    def close(self) -> None:
        """Close the connections: members that wait for this one learn it at once.

        While another thread waits in an operation its frame keeps the group: freeing one waits for
        its operations, and would hold up the end of this process until a peer is gone.
        """
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(AttributeError, RuntimeError):  # not in every torch
                group.abort()

    def _options(self, options: Any) -> Any:
        if self._deadline is not None:
            options.timeout = _ENDLESS
        return options

    def _complete(self, name: str, *arguments: Any) -> None:
        """Run a collective, waiting for it in Python.

        A daemon thread that waited inside `work.wait()` would be ended there if a peer's death woke
        it while the interpreter shuts down: that aborts the process ("terminate called without an
        active exception", exit code 134 in place of the run's own).
        """
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        work = getattr(group, name)(*arguments)
        started = time.perf_counter()
        while not work.is_completed():
            waited = time.perf_counter() - started
            if self._deadline is not None and waited > _UNCHECKED_S:
                try:
                    self._deadline.check()
                except BaseException:
                    # Freeing the group, or the tensors, would wait for the operation.
                    for one in (group, arguments):
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
                    raise
            time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited / 4)))
        work.wait()


class Channel:
    """The groups of one loader on one rank, which fail together.

    Args:
        ranks: of the peers, for errors.
        who: this rank in errors.
        timeout_s: seconds that an operation may take.
        deadline: ends operations in place of the time-out, and names who is missing.
    """

    def __init__(
        self, ranks: Sequence[int], *, who: str, timeout_s: float, deadline: Deadline | None
    ) -> None:
        self._who, self._ranks = who, list(ranks)
        self._timeout_s, self._deadline = timeout_s, deadline
        self._groups: list[GlooGroup] = []
        self.is_closed = False

    def close(self) -> None:
        """Close the connections; ranks that wait for this one learn it at once."""
        self.is_closed = True
        for group in self._groups:
            group.close()

    def _join(self, ranks: Sequence[int], name: str) -> GlooGroup:
        group = GlooGroup(ranks, name=name, timeout_s=self._timeout_s, deadline=self._deadline)
        self._groups.append(group)
        return group

    def _expect(self, *operations: str) -> None:
        """This rank will take part in them."""
        if self._deadline is not None:
            for what in operations:
                self._deadline.expect(what)

    @contextlib.contextmanager
    def _operation(self, what: str, number: int) -> Iterator[None]:
        """Run operation `number` of a kind; where it fails the channel is closed.

        Raises:
            ControlError: it has failed; names this rank, the operation and who is missing.
        """
        if self.is_closed:
            raise ControlError(f"{self._who}: {what} {number}: the channel is closed")
        if self._deadline is not None:
            self._deadline.begin(what, number)
        try:
            yield
        except RuntimeError as error:
            self.close()
            if isinstance(error, ControlError):
                raise
            missing = self._deadline.explain() if self._deadline else ""
            limit = "" if self._deadline else f" after at most {self._timeout_s:.0f} s"
            peers = f"A rank of {self._ranks} has stopped or is stuck; its own output says why"
            raise ControlError(
                f"{self._who}: {what} {number} failed{limit} ({error}). {missing or peers}"
            ) from error
