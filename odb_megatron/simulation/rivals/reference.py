"""The reference package `online-dynamic-batching`, its own collate loop run in this process.

Nothing is imitated: N threads run the package's `collate_loop_odb`, which calls its
`grouping_data`; only the queues and the all-gather are replaced by ones within the process. The
package is optional; without it there is no such row.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from odb_megatron.simulation.schedule import Schedule, rectangular
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["INSTALL", "ReferenceMissingError", "odb_reference", "reference_version"]

INSTALL = "pip install online-dynamic-batching==0.1.2"
_DISTRIBUTION = "online-dynamic-batching"


class ReferenceMissingError(RuntimeError):
    """The reference package cannot be imported."""


def reference_version() -> str | None:
    """Return the installed version of the reference package, None without it."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return None


def odb_reference(stream: Stream, setting: Setting) -> Schedule:
    """Return the reference package's groups: join mode, buffer size = window, its defaults.

    A replica's shard is every N-th position. Each group is a padded micro-batch; a step takes so
    many that it holds the global batch size most nearly. A replica that ends early idles.

    Raises:
        ReferenceMissingError: with the command that installs it.
    """
    try:
        collate, grouping = (importlib.import_module(f"odb.{n}") for n in ("collate", "grouping"))
    except ImportError as error:
        raise ReferenceMissingError(f"not importable ({error}): {INSTALL}") from error
    num = setting.num_replicas
    groups: list[list[list[int]]] = [[] for _ in range(num)]
    with _in_process(num, collate, grouping) as world:

        def run(replica: int) -> None:
            shard = range(replica, len(stream), num)
            collate.collate_loop_odb(
                _ShardQueue(shard, stream.lengths[replica::num].tolist()),
                _GroupQueue(groups[replica]),
                _positions,
                setting.window,
                setting.token_budget,
                threading.Event(),
                join_mode=True,
            )

        world.run(run)
    dealt: list[list[int]] = [group or [] for row in zip_longest(*groups) for group in row]
    emitted = [np.array(sorted(chain.from_iterable(one)), dtype=np.int64) for one in groups]
    mean = max(1.0, sum(map(len, emitted)) / max(1, sum(map(len, groups))))
    steps = rectangular(
        dealt,
        num_replicas=num,
        count=setting.num_micro_batches(mean),
        multiple=setting.count_multiple,
    )
    return Schedule.build(steps, num_replicas=num, is_padded=True, arrivals=emitted)


class _Ids(list[int]):
    """Token ids of which only the number matters, so that none are stored."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length


class _ShardQueue:
    """What workers would put into the collate process's queue: one sample at a time, then None."""

    def __init__(self, shard: range, lengths: list[int]) -> None:
        self._items = iter(enumerate(zip(shard, lengths, strict=True)))
        self._num = len(shard)

    def get(self, timeout: float | None = None) -> tuple[int, list[dict[str, Any]] | None]:
        """Return the next item; it never has to wait."""
        del timeout
        for index, (position, length) in self._items:
            return index, [{"input_ids": _Ids(length), "position": position}]
        return self._num, None


class _GroupQueue:
    """Takes what the collate process would send to the trainer; idle slots are dropped."""

    def __init__(self, groups: list[list[int]]) -> None:
        self._groups = groups

    def put(self, item: tuple[int, Any], timeout: float | None = None) -> None:
        """Keep a group."""
        del timeout
        if isinstance(item[1], dict):
            self._groups.append(item[1]["positions"])


def _positions(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {"positions": [sample["position"] for sample in batch]}


class _World:
    """N threads in place of N ranks, as the `dist` module that the package sees."""

    distributed_c10d = SimpleNamespace()

    def __init__(self, num_ranks: int) -> None:
        self._num = num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._own = threading.local()
        self._slots: list[Any] = [None] * num_ranks
        self._errors: list[BaseException] = []

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work(rank)` on all ranks; raise the first error of any."""
        threads = [
            threading.Thread(target=self._guard, args=(work, rank)) for rank in range(self._num)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _guard(self, work: Callable[[int], None], rank: int) -> None:
        self._own.rank = rank
        try:
            work(rank)
        except threading.BrokenBarrierError:
            pass  # another rank's error is the one to show
        except BaseException as error:
            self._errors.append(error)
            self._barrier.abort()

    def is_initialized(self) -> bool:
        """See torch.distributed."""
        return True

    def new_group(self, **_: object) -> _World:
        """See torch.distributed."""
        return self

    def destroy_process_group(self, group: object) -> None:
        """See torch.distributed."""

    def get_world_size(self, group: object = None) -> int:
        """See torch.distributed."""
        return self._num

    def get_rank(self, group: object = None) -> int:
        """See torch.distributed."""
        rank: int = self._own.rank
        return rank

    def all_gather_into_tensor(self, output: Any, value: Any, *, group: object = None) -> None:
        """See torch.distributed."""
        self._slots[self._own.rank] = value
        self._barrier.wait()
        for rank, part in enumerate(output.view(self._num, -1)):
            part.copy_(self._slots[rank])
        self._barrier.wait()


@contextmanager
def _in_process(num_ranks: int, collate: ModuleType, grouping: ModuleType) -> Iterator[_World]:
    """Let the package's modules talk to threads; undo all they change in this process."""
    torch = collate.__dict__["torch"]
    before = (collate.__dict__["dist"], grouping.__dict__["dist"])
    threads, sharing = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    world = _World(num_ranks)
    collate.__dict__["dist"] = grouping.__dict__["dist"] = world
    try:
        yield world
    finally:
        collate.__dict__["dist"], grouping.__dict__["dist"] = before
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(sharing)
