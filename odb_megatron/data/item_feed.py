"""The items of one replica's shards in a fixed order, read by data-loader workers.

A replica reads its parts in turns, some items of each; a worker reads whole parts. So the order of
items follows from the parts, not from the workers. Must not know positions or other replicas.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from odb_megatron.data.fetch_limit import limited
from odb_megatron.data.iterable import (
    IterableShards,
    PartReader,
    SourceError,
    has_own_workers,
    raised,
)
from odb_megatron.data.replica_stream import WorkerError, end_with_trainer
from odb_megatron.data.sample import BadRecordError, Sample, SampleRules, Skipped
from odb_megatron.data.sources import ItemSource
from odb_megatron.data.stream import FetchError
from odb_megatron.data.workers import Workers, starting
from odb_megatron.plan.padding import OverlongError

__all__ = ["BEGINNING", "ItemFeed", "ReplicaShard", "Snapshot"]

TURN = 8
"""Items of a part that are read in a turn."""

SNAPSHOT_TURNS = 8
"""Turns between two snapshots: after a resume, so many are read again at most."""

_PREFETCH = 2

_LOADER_IN_WORKER = (
    "{name} is a DataLoader, whose own workers a worker process cannot start: hand over the loader "
    "itself in place of IterableShards, or pass --num-workers 0"
)

_CHANGED = (
    "{name}, has fewer items than had been read when the state was saved: the data has changed; "
    "restore it, or start the data anew (--finetune)"
)

Item = Sample | Skipped | FetchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a replica's shards were before an item.

    Attributes:
        number: of the item, counted from the start of the run.
        pass_index: passes finished.
        turn: turns of that pass finished.
        parts: of each part a list of its state as JSON values, empty where it begins, or None
            where it has ended in this pass; None for the beginning of a pass.
        skips: items of each part that are passed over behind its state; empty for none.
        read: items of each part that this feed has read before, those passed over included.
    """

    number: int = 0
    pass_index: int = 0
    turn: int = 0
    parts: tuple[list[Any] | None, ...] | None = None
    skips: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


BEGINNING = Snapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShard:
    """What a replica reads, and how.

    Attributes:
        shards: the data set.
        replica: which replica this is.
        num_replicas: how many there are.
        rules: policies for every item.
        name: for reports and errors.
        passes: passes to read; None for no end.
        keeps_state: whether snapshots are taken.
    """

    shards: IterableShards
    replica: int
    num_replicas: int
    rules: SampleRules
    name: str
    passes: int | None
    keeps_state: bool

    @property
    def parts(self) -> range:
        """Numbers of its parts among all."""
        if self.shards.total_parts:
            return range(self.replica, self.shards.total_parts, self.num_replicas)
        parts = self.shards.parts
        return range(self.replica * parts, (self.replica + 1) * parts)

    def reader(self, part: int) -> PartReader:
        """Open a part, in the process that reads it.

        Raises:
            ValueError: `make` raised.
        """
        index = self.parts[part]
        num = self.shards.total_parts or self.num_replicas * self.shards.parts
        where = f"replica {self.replica}" if self.shards.is_own else f"shard {index} of {num}"
        try:
            dataset = self.shards.make(index, num)
        except Exception as error:
            who = f"{self.name}: make({index}, {num}) of IterableShards"
            raise ValueError(raised(who, error)) from error
        return PartReader(dataset, f"{self.name}, {where}")


@dataclass(slots=True)
class _Turn:
    """Items of one part in one turn.

    Attributes:
        items: up to `TURN` of them.
        has_ended: the part has no more in this pass.
        state: after them, where a snapshot was due.
        error: why the part cannot be read on.
        has_state: whether the part can say where it is.
    """

    part: int
    items: list[Item] = field(default_factory=list)
    has_ended: bool = False
    state: Any = None
    error: str = ""
    has_state: bool = True


class _Turns(torch.utils.data.IterableDataset[list[_Turn]]):
    """One pass over the parts that this worker reads; iterated anew for each pass."""

    def __init__(self, shard: ReplicaShard, *, begin: Snapshot, limit_s: float) -> None:
        super().__init__()
        self._shard = shard
        self._begin: Snapshot | None = begin
        self._pass = begin.pass_index
        self._limit_s = limit_s
        self._readers: dict[int, PartReader] = {}

    def __iter__(self) -> Iterator[list[_Turn]]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        shard = self._shard
        begin = self._begin or Snapshot(pass_index=self._pass)
        self._begin, self._pass = None, self._pass + 1
        live = []
        for part in range(first, len(shard.parts), step):
            state = begin.parts[part] if begin.parts is not None else []
            if state is None:
                continue  # it had ended
            if part not in self._readers:
                self._readers[part] = reader = shard.reader(part)
                if info is not None and isinstance(reader.dataset, torch.utils.data.DataLoader):
                    raise ValueError(_LOADER_IN_WORKER.format(name=reader.name))
            self._readers[part].begin(begin.pass_index, state[0] if state else None)
            for _ in range(begin.skips[part] if begin.skips else 0):
                if not self._readers[part].take()[1]:
                    raise ValueError(_CHANGED.format(name=self._readers[part].name))
            live.append(part)
        source = ItemSource(rules=shard.rules, name=shard.name)
        turn = begin.turn
        while live:
            turn += 1
            found = [self._take(self._readers[part], part, source) for part in live]
            if shard.keeps_state and turn % SNAPSHOT_TURNS == 0:
                for one in found:
                    if not one.has_ended:
                        one.state = self._readers[one.part].state()
            live = [one.part for one in found if not one.has_ended]
            yield found

    def _take(self, reader: PartReader, part: int, source: ItemSource) -> _Turn:
        turn = _Turn(part=part, has_state=reader.has_state)
        while len(turn.items) < TURN:
            if self._limit_s:
                with limited(self._limit_s, what=lambda: f"an item of {reader.name}"):
                    item, is_there = reader.take()
            else:
                item, is_there = reader.take()
            if not is_there:
                turn.has_ended, turn.error = True, reader.error
                break
            source.path = reader.name
            reader.num_read += 1
            turn.items.append(_converted(source, item, reader.num_read))
        return turn


class ItemFeed:
    """The items of one replica, numbered from the start of the run.

    Args:
        shard: what is read.
        workers: worker processes; at most one for each part.
        begin: where to start.

    Attributes:
        next_number: number of the item that `take` returns next.
        num_workers: workers in use.

    Raises:
        ValueError: the shard cannot be sent to workers, or a state does not fit.
    """

    def __init__(
        self, shard: ReplicaShard, *, workers: Workers | None = None, begin: Snapshot = BEGINNING
    ) -> None:
        workers = workers or Workers()
        self._shard = shard
        self.num_workers = (
            0 if has_own_workers(shard.shards) else min(workers.num, len(shard.parts))
        )
        options = dict[str, Any]()
        if self.num_workers:
            options["prefetch_factor"] = _PREFETCH
            options["persistent_workers"] = True
            options["multiprocessing_context"] = multiprocessing.get_context("fork")
        self._loader = torch.utils.data.DataLoader(
            _Turns(shard, begin=begin, limit_s=workers.timeout_s if self.num_workers else 0.0),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(0),  # else the model's would be advanced
            worker_init_fn=end_with_trainer,
            **options,
        )
        self._turns: Iterator[list[_Turn]] | None = None
        self._pending: dict[int, deque[_Turn]] = {}
        self._items: deque[tuple[int, Item]] = deque()  # with their parts
        self._read_of = list(begin.skips) or [0] * len(shard.parts)
        self._taken_of = list(self._read_of)
        self._error = ""
        self._has_state = True
        self._place = begin
        self._num_in_pass = -1 if begin.parts is not None else 0  # -1: some, before the snapshot
        self._snapshots = deque([begin])
        self._live = list(range(len(shard.parts)))
        if begin.parts is not None:
            self._live = [part for part in self._live if begin.parts[part] is not None]
        self.next_number = begin.number

    @property
    def has_state(self) -> bool:
        """Whether all parts read so far can say where they are."""
        return self._has_state

    def has_next(self) -> bool:
        """Whether there is another item; reads ahead to find out.

        Raises:
            SourceError: a part raised, or an endless shard is empty.
            ValueError: a part's state cannot be saved, or does not fit.
            WorkerError: a worker process has died.
        """
        while not self._items:
            if self._error:
                raise SourceError(self._error)
            passes = self._shard.passes
            if passes is not None and self._place.pass_index >= passes:
                return False
            self._read()
        return True

    def take(self) -> tuple[int, Sample | Skipped]:
        """Return the next item and its number; there must be one.

        Raises:
            BadRecordError, OverlongError, ChatFormatError: by policy.
            SourceError, ValueError, WorkerError: see `has_next`.
        """
        assert self.has_next(), "an item past the end"
        item, number = self._pop(), self.next_number - 1
        if isinstance(item, FetchError):
            raise item.error
        return number, item

    def skip(self) -> None:
        """Pass over the next item, which was dealt with before; there must be one."""
        assert self.has_next(), "an item past the end"
        self._pop()

    def skips(self) -> list[int]:
        """Return how many items of each part were taken since the oldest snapshot that is kept."""
        read = self._snapshots[0].read or [0] * len(self._taken_of)
        return [taken - before for taken, before in zip(self._taken_of, read, strict=True)]

    def snapshot(self, number: int) -> Snapshot:
        """Return the newest snapshot at or before an item; older ones are forgotten."""
        while len(self._snapshots) > 1 and self._snapshots[1].number <= number:
            self._snapshots.popleft()
        return self._snapshots[0]

    def close(self) -> None:
        """End the workers; nothing more is read."""
        self._turns = None
        self._loader = None  # type: ignore[assignment]

    def _pop(self) -> Item:
        part, item = self._items.popleft()
        self._taken_of[part] += 1
        self.next_number += 1
        return item

    def _read(self) -> None:
        """Read one turn of every part that has not ended."""
        states: list[list[Any] | None] = [None] * len(self._shard.parts)
        live, num = [], 0
        for part in self._live:
            turn = self._turn_of(part)
            self._items.extend((part, item) for item in turn.items)
            self._read_of[part] += len(turn.items)
            num += len(turn.items)
            self._has_state = self._has_state and turn.has_state
            if turn.error:
                self._error = turn.error
                return
            states[part] = None if turn.state is None else [turn.state]
            if not turn.has_ended:
                live.append(part)
        self._live = live
        self._num_in_pass = self._num_in_pass if self._num_in_pass < 0 else self._num_in_pass + num
        place = self._place
        end = self.next_number + len(self._items)
        if live:
            self._place = Snapshot(number=end, pass_index=place.pass_index, turn=place.turn + 1)
            if all(states[part] is not None for part in live):
                read = tuple(self._read_of)
                self._snapshots.append(replace(self._place, parts=tuple(states), read=read))
            return
        if self._num_in_pass == 0 and self._shard.passes is None:
            self._error = (
                f"{self._shard.name} gives replica {self._shard.replica} no item: it cannot take "
                "part in a run whose length is a number of samples; give it data, fewer replicas, "
                "or use --odb-epochs, with which a replica without data idles"
            )
        self._num_in_pass = 0
        self._live = list(range(len(self._shard.parts)))
        self._place = Snapshot(
            number=end, pass_index=place.pass_index + 1, read=tuple(self._read_of)
        )
        self._snapshots.append(self._place)
        self._turns = None

    def _turn_of(self, part: int) -> _Turn:
        while not self._pending.get(part):
            if self._turns is None:
                with starting():
                    self._turns = iter(self._loader)
            try:
                found = next(self._turns)
            except StopIteration:
                raise AssertionError(f"part {part} ended without saying so") from None
            except RuntimeError as error:
                raise self._worker_error(error) from error
            for turn in found:
                self._pending.setdefault(turn.part, deque()).append(turn)
        return self._pending[part].popleft()

    def _worker_error(self, error: RuntimeError) -> RuntimeError:
        if not self.num_workers or "DataLoader worker" not in str(error):
            return error
        return WorkerError(
            f"a data-loader worker has ended ({error}) while it read {self._shard.name}, item "
            f"{self.next_number + len(self._items)} of replica {self._shard.replica} or one soon "
            "after. Its own output, or the system's log, may say why; SIGKILL often means that "
            "memory ran out: lower --num-workers"
        )


def snapshot_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values."""
    parts = None if snapshot.parts is None else list(snapshot.parts)
    return {
        "number": snapshot.number,
        "pass": snapshot.pass_index,
        "turn": snapshot.turn,
        "parts": parts,
        "skips": list(snapshot.skips),
    }


def snapshot_from(values: Any, *, num_parts: int) -> Snapshot:
    """Inverse of `snapshot_values`; the values come from a file and are not trusted.

    Raises:
        ValueError: they are no snapshot of so many parts.
    """
    names = {"number", "pass", "turn", "parts", "skips"}
    is_sound = isinstance(values, Mapping) and set(values) == names
    if is_sound:
        parts, skips = values["parts"], values["skips"]
        counts = [values[name] for name in ("number", "pass", "turn")]
        is_sound = isinstance(skips, list) and (parts is None or isinstance(parts, list))
        is_sound = is_sound and all(is_count(one) for one in (*counts, *skips))
        is_sound = is_sound and all(
            part is None or (isinstance(part, list) and len(part) < 2) for part in parts or ()
        )
        is_sound = is_sound and len(skips) in (0, len(parts or ()))
    if not is_sound:
        raise ValueError(
            "the source's state holds no place to go on from: the file is damaged; restore it, or "
            "start the data anew (--finetune)"
        )
    if parts is not None and len(parts) != num_parts:
        raise ValueError(
            f"the source was saved with {len(parts)} parts for each replica, this run has "
            f"{num_parts}: give IterableShards the same parts"
        )
    return Snapshot(
        number=values["number"],
        pass_index=values["pass"],
        turn=values["turn"],
        parts=None if parts is None else tuple(parts),
        skips=tuple(skips),
    )


def is_count(value: Any) -> bool:
    """Whether a value of a file is a number of items."""
    return type(value) is int and 0 <= value < 1 << 62


def _converted(source: ItemSource, item: Any, number: int) -> Item:
    try:
        return source.convert(item, number=number)
    except (BadRecordError, OverlongError) as error:
        return FetchError(error=error)


def _as_is(item: Any) -> Any:
    return item
