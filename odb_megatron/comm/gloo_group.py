"""A gloo process group that only its members make.

Must not be used for device tensors. `torch.distributed.new_group` makes every rank of the world
wait for every group: with a group per replica and loader, start-up on a thousand replicas would
take minutes. This is the same backend object on the same store, without that.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from odb_megatron.comm.patience import Patience

__all__ = ["GlooGroup", "numbered"]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

_UNCHECKED_S = 0.05
"""Seconds of waiting that nobody's patience is asked about."""

_ENDLESS = timedelta(days=365)
"""Time-out of an operation that patience ends."""

_made: Counter[str] = Counter()
"""How often `numbered` was asked for a name."""


_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
"""All groups; a group nobody holds any more closes by itself, with its thread."""


@atexit.register
def _close_all() -> None:
    for group in list(_groups):
        group.close()


def numbered(name: str, ranks: Sequence[int]) -> str:
    """Return a name with the members, and a number that counts the calls for both in this process.

    For `GlooGroup`: a second run of one process finds the keys of the first in the store. Members
    must have called it equally often for the name and these very ranks; a process may have been in
    other groups of that name in between, as when runs of different topologies follow each other.
    """
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    own_name = f"{name} of ranks {members}"
    number = _made[own_name]
    _made[own_name] += 1
    return f"{own_name} {number}"


class GlooGroup:
    """Collectives over the CPU between some ranks.

    The world must be initialised (`torch.distributed.init_process_group`), with any backend.

    Args:
        ranks: global ranks of the members, in group order; this rank is one of them.
        name: equal on all members, and of no other group of this run (see `numbered`).
        timeout_s: seconds that making it, or an operation, may take.
        patience: ends operations in place of the time-out.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        name: str,
        timeout_s: float,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience
        self._rank = list(ranks).index(dist.get_rank())
        self._size = len(ranks)
        c10d: Any = dist  # its stubs lack what is used here
        store = c10d.PrefixStore(f"odb_megatron/{name}", dist.distributed_c10d._get_default_store())
        self._group: Any = c10d.ProcessGroupGloo(
            store, self._rank, self._size, timedelta(seconds=timeout_s)
        )
        # Joins gloo's threads while there is an interpreter: one that still frees the tensors of
        # the last operation as Python ends aborts the process (exit code 134 after a good run).
        _groups.add(self)

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._group is None

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Fill `tensor` on all members with that of member `source`.

        Raises:
            RuntimeError: a member is gone or did not come in time, or the group is closed.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        if self._patience is not None:
            options.timeout = _ENDLESS
        group = self._open()
        self._complete(group, group.broadcast([tensor], options))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all members' tensors of one shape, [size, ...], in group order.

        Raises:
            RuntimeError: see `broadcast`.
        """
        gathered = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype)
        c10d: Any = dist.distributed_c10d
        options = c10d.AllgatherOptions()
        if self._patience is not None:
            options.timeout = _ENDLESS
        group = self._open()
        self._complete(group, group.allgather([list(gathered.unbind())], [tensor], options))
        return gathered

    def send(self, tensor: Tensor, *, target: int, tag: int = 0) -> Any:
        """Start to send to a member; return the work to wait for. `tensor` must live until then.

        Raises:
            RuntimeError: the member is gone, or the group is closed.
        """
        return self._open().send([tensor], target, tag)

    def receive(self, tensor: Tensor, *, source: int, tag: int = 0) -> Any:
        """Start to receive from a member into `tensor`; return the work to wait for.

        Raises:
            RuntimeError: see `send`.
        """
        return self._open().recv([tensor], source, tag)

    def close(self) -> None:
        """Close the connections; members that wait for this one learn it at once.

        While another thread waits in an operation they are closed when that ends: the group waits
        for its operations as it is freed, and would hold up this thread, and so the end of the
        process, until a peer is gone. The waiting thread's frame keeps it.
        """
        group, self._group = self._group, None
        del group

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group

    def _complete(self, group: Any, work: Any) -> None:
        """Wait for a collective in Python, looking after it at least once per millisecond.

        A daemon thread that waited inside `work.wait()` would be ended there if a peer's death woke
        it while the interpreter shuts down: that aborts the process ("terminate called without an
        active exception", exit code 134 in place of the run's own).
        """
        started = time.perf_counter()
        while not work.is_completed():
            waited = time.perf_counter() - started
            if self._patience is not None and waited > _UNCHECKED_S:
                try:
                    self._patience.check()
                except BaseException:
                    _never_free(group)
                    raise
            time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited / 4)))
        work.wait()


def _never_free(group: Any) -> None:
    """Keep a group with an operation under way: freeing it would wait for that operation."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
