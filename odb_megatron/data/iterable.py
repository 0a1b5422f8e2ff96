"""Iterable data sets: how one is handed over, how a replica reads its parts, and where it stands.

A replica reads its parts in turns of `TURN` items. The next item is of the part that has had the
fewest turns in this pass, the first of several. So the order of items follows from the parts, not
from the worker processes that read them, and all there is to save is of each part how many items
were taken, and the part's own state some items before.
"""

from __future__ import annotations

import base64
import copyreg
import hashlib
import importlib
import io
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from odb_megatron.data.sample import Sample, SampleRules, Skipped
from odb_megatron.data.sources import DATA_ERRORS, MapSource
from odb_megatron.data.stream import Location
from odb_megatron.data.workers import Reader, limited
from odb_megatron.plan.record import OPEN_TOTAL, PlanConfig

__all__ = ["HEAD_ITEMS", "ItemReader", "ItemStream", "IterableShards", "SourceError", "as_shards"]
__all__ += ["is_iterable"]

TURN = 8
"""Items of a part that are read in a turn."""

SNAPSHOT_TURNS = 8
"""Turns between two states of a part: after a resume, so many are read again at most."""

HEAD_ITEMS = 8
"""Items of an iterator that tell it from others."""

_STATE_VERSION = 5
_STATE_KEYS = {"version", "replicas", "passes", "has_state", "ended", "next", "pass", "parts"}


class SourceError(RuntimeError):
    """An iterable data set raised, has no data, or is not sharded."""


# --- how one is handed over --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IterableShards:
    """An iterable data set, by the function that makes each of its shards.

    Attributes:
        make: `make(index, num_shards)` returns an iterable over one of `num_shards` disjoint shards
            that together are the data set. It is called in the process that reads the shard.
        parts: shards that a replica reads in turns, and so the most worker processes it can have
            (`--num-workers`). Plans depend on it, and not on the number of workers.
        total_parts: shards of all replicas together, in place of `parts`: shard n is read by
            replica n mod replicas, and a run may go on with another number of replicas. 0: none.
        name: for reports and errors.
        is_own: `make` returns the replica's own shard, whatever it is asked for.
    """

    make: Callable[[int, int], Iterable[Any]]
    parts: int = 1
    total_parts: int = 0
    name: str = ""
    is_own: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1, got {self.parts}")
        if self.total_parts < 0 or (self.total_parts and self.parts > 1):
            raise ValueError(
                f"parts is {self.parts} and total_parts {self.total_parts}: give one of them"
            )

    @property
    def has_own_workers(self) -> bool:
        """Whether it is a loader, which worker processes (having no children) cannot run."""
        return self.is_own and isinstance(self.make(0, 1), torch.utils.data.DataLoader)

    def numbers(self, replica: int, num_replicas: int) -> range:
        """Return the numbers of a replica's parts among all."""
        if self.total_parts:
            return range(replica, self.total_parts, num_replicas)
        return range(replica * self.parts, (replica + 1) * self.parts)


def _own(dataset: Any, index: int, num_shards: int) -> Any:
    del index, num_shards
    return dataset


def is_iterable(dataset: Any) -> bool:
    """Whether a data set is to be iterated, for want of random access."""
    if isinstance(dataset, (IterableShards, torch.utils.data.IterableDataset)):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    return hasattr(dataset, "__iter__")


def as_shards(dataset: Any, *, name: str) -> IterableShards:
    """Return a user's iterable as shards; a bare one is this replica's own shard.

    Raises:
        ValueError: it can be run through only once.
    """
    if isinstance(dataset, IterableShards):
        return dataset
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"the {name} is a {type(dataset).__name__}, which can be run through only once: give "
            "an object whose __iter__ starts anew each time"
        )
    return IterableShards(make=partial(_own, dataset), name=type(dataset).__name__, is_own=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemStream:
    """An iterable data set with what is done with it.

    Attributes:
        shards: the data set.
        rules: policies for every item.
        name: for reports and errors.
        passes: passes over each shard, after which it ends; None where each starts again until the
            quota is reached.
        num_samples: the quota; `OPEN_TOTAL` with `passes`.
        keeps_state: whether the run may be saved.
    """

    shards: IterableShards
    rules: SampleRules
    name: str
    passes: int | None = None
    num_samples: int = OPEN_TOTAL
    keeps_state: bool = True

    def __len__(self) -> int:
        return self.num_samples

    @property
    def source_names(self) -> tuple[str, ...]:
        """Name of the one source."""
        return (self.name,)

    def locate(self, position: int) -> Location:
        """Return what names a position in reports; it does not say which item it stands for."""
        return Location(epoch=0, place=position, source=0, record=position)

    def sources(self) -> list[dict[str, object]]:
        """Length and order are not known."""
        ends = [0, self.shards.total_parts or self.shards.parts]
        known = {"path": self.name, "fingerprint": self.data_digest()}
        return [known | {"num_records": -1, "seed": 0, "ends": ends}]

    def blend_digest(self, most: int) -> tuple[int, str]:
        """A single source."""
        del most
        return 0, ""

    def data_digest(self) -> str:
        """Digest of what the data set says of itself: its name and parts, equal on all replicas."""
        shards = self.shards
        text = f"{shards.name} {shards.parts} {shards.total_parts} {shards.is_own}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Digest of all that all replicas must have alike."""
        text = f"{self.data_digest()} {self.passes} {self.num_samples}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def own_state(self, states: Sequence[Any], *, replica: int, num_replicas: int) -> Any:
        """Return the state that a replica goes on with; see `ItemReader`.

        Args:
            states: of all replicas when they were saved, or this replica's alone; not trusted.

        Raises:
            ValueError: of another number of replicas, and the parts cannot be assigned anew.
        """
        then = states[0].get("replicas") if states and isinstance(states[0], Mapping) else None
        if not _is_count(then) or (then == num_replicas and len(states) not in (1, then)):
            raise ValueError(_NO_STATE)
        if then == num_replicas:
            return states[0] if len(states) == 1 else states[replica]
        if not self.shards.total_parts or len(states) != then:
            raise ValueError(
                f"each replica reads an iterator of its own, and the data was saved with {then} "
                f"of them: resume with that data-parallel size, not {num_replicas}, or start the "
                "data anew (--finetune); IterableShards(make, total_parts=N) can be resumed at any"
            )
        readers = [
            (at, state, _checked_places(self, state, replica=at, num_replicas=then))
            for at, state in enumerate(states)
        ]
        current = min(state["pass"] for _, state, parts in readers if parts)
        places: dict[int, _Place] = {}
        for at, state, parts in readers:
            if state["pass"] == current + 1 and not any(part.count for part in parts):
                parts = [_Place(count=1, ended=True)] * len(parts)
            elif parts and state["pass"] != current:
                raise ValueError(
                    f"the {then} replicas were in different passes of {self.name} when it was "
                    f"saved: resume with that data-parallel size, not {num_replicas}"
                )
            places |= zip(self.shards.numbers(at, then), parts, strict=True)
        own = self.shards.numbers(replica, num_replicas)
        return states[0] | {
            "replicas": num_replicas,
            "ended": all(state["ended"] for state in states),
            "next": -(-max(state["next"] for state in states) * then // num_replicas),  # ids go on
            "pass": current,
            "parts": [asdict(places[one]) for one in own],
        }


# --- in the process that reads -----------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """Where a part is in this pass.

    Attributes:
        count: items taken of it.
        ended: it has no more.
        at: items before `state`.
        state: what it has said of itself then, encoded; None for its beginning.
    """

    count: int = 0
    ended: bool = False
    at: int = 0
    state: str | None = None


@dataclass(slots=True)
class _Turn:
    """Items of one part in one turn.

    Attributes:
        items: up to `TURN` of them; an error in place of what could not be read.
        has_ended: the part has no more in this pass.
        state: after them, encoded, where one was due.
        has_state: whether the part can say where it is.
    """

    part: int
    items: deque[Sample | Skipped | Exception] = field(default_factory=deque)
    has_ended: bool = False
    state: str | None = None
    has_state: bool = True


class _Part:
    """One shard, read pass after pass."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name, self.count = dataset, name, 0
        self._items: Iterator[Any] = iter(())

    @property
    def methods(self) -> tuple[str, str] | None:
        """Names of what saves and loads its state; None where it has none."""
        for names in (("state_dict", "load_state_dict"), ("save_state_rank", "restore_state_rank")):
            if all(callable(getattr(self.dataset, name, None)) for name in names):
                return names
        return None

    def begin(self, pass_index: int, place: _Place) -> None:
        """Start a pass, or go on in one.

        Raises:
            ValueError: the state does not fit, or the data has changed.
        """
        state = None if place.state is None else _decode(place.state)
        try:
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(pass_index)
            if place.state is not None:
                if self.methods is None:
                    raise TypeError("it has no state of its own, and had one when it was saved")
                getattr(self.dataset, self.methods[1])(state)
            self._items, self.count = iter(self.dataset), place.at
            while self.count < place.count and next(self._items, self) is not self:
                self.count += 1
        except Exception as error:
            what = "starting a pass" if place.state is None else "going on with its saved state"
            raise ValueError(_raised(f"{self.name}, {what},", error)) from error
        if self.count < place.count:
            raise ValueError(
                f"{self.name}, has fewer items than had been read when the state was saved: "
                "the data has changed; restore it, or start the data anew (--finetune)"
            )

    def turn(self, number: int, stream: ItemStream, limit_s: float) -> _Turn:
        """Read the rest of a turn."""
        turn, item = _Turn(number, has_state=self.methods is not None), dict[int, Any]()
        source = MapSource(item, rules=stream.rules, name=self.name)
        while not turn.items or self.count % TURN:
            try:
                with limited(limit_s, what=lambda: f"an item of {self.name}"):
                    item[self.count] = next(self._items)
            except StopIteration:
                turn.has_ended = True
                return turn
            except Exception as error:
                note = (
                    "; an iterator cannot go on after that, so --odb-max-bad-records does not apply"
                )
                turn.items.append(SourceError(_raised(self.name, error, note=note)))
                turn.has_ended = True
                return turn
            try:
                turn.items.append(source.sample(self.count, source=0))
            except DATA_ERRORS as error:
                turn.items.append(error)
            del item[self.count]
            self.count += 1
        if stream.keeps_state and self.methods and self.count % (TURN * SNAPSHOT_TURNS) == 0:
            try:
                found = getattr(self.dataset, self.methods[0])()
            except Exception as error:
                raise ValueError(_raised(f"{self.name}, saying where it is,", error)) from error
            turn.state = _encode(found, owner=self.name)
        return turn


class _Turns(torch.utils.data.IterableDataset[list[_Turn]]):
    """One pass over the parts that this worker reads; iterated anew for each pass."""

    def __init__(
        self,
        stream: ItemStream,
        places: Sequence[_Place],
        *,
        replica: int,
        num_replicas: int,
        pass_index: int,
        limit_s: float,
    ) -> None:
        super().__init__()
        self._stream, self._places, self._limit_s = stream, list(map(replace, places)), limit_s
        self._replica, self._num_replicas, self._pass = replica, num_replicas, pass_index
        self._parts: dict[int, _Part] = {}

    def __iter__(self) -> Iterator[list[_Turn]]:
        info = torch.utils.data.get_worker_info()
        live = {}
        for at in range(info.id if info else 0, len(self._places), info.num_workers if info else 1):
            place, self._places[at] = self._places[at], _Place()
            if not place.ended:
                live[at] = self._parts[at] = self._parts.get(at) or self._open(at)
                live[at].begin(self._pass, place)
        self._pass += 1
        while live:
            turns = [part.turn(at, self._stream, self._limit_s) for at, part in live.items()]
            live = {one.part: live[one.part] for one in turns if not one.has_ended}
            yield turns

    def _open(self, at: int) -> _Part:
        shards, name = self._stream.shards, self._stream.name
        index = shards.numbers(self._replica, self._num_replicas)[at]
        num = shards.total_parts or self._num_replicas * shards.parts
        try:
            dataset = shards.make(index, num)
        except Exception as error:
            who = f"{name}: make({index}, {num}) of IterableShards"
            raise ValueError(_raised(who, error)) from error
        where = f"replica {self._replica}" if shards.is_own else f"shard {index} of {num}"
        is_worker = torch.utils.data.get_worker_info() is not None
        if is_worker and isinstance(dataset, torch.utils.data.DataLoader):
            raise ValueError(
                f"{name}, {where} is a DataLoader, whose own workers a worker process cannot "
                "start: hand over the loader itself in place of IterableShards, or pass "
                "--num-workers 0"
            )
        return _Part(dataset, f"{name}, {where}")


def _raised(who: str, error: Exception, *, note: str = "") -> str:
    """Say what a user's data set raised, with its traceback."""
    trace = "".join(traceback.format_exception(error))
    return f"{who} raised {type(error).__name__}: {error}{note}\nOriginal traceback:\n{trace}"


# --- one replica's items -----------------------------------------------------------------------


class ItemReader(Reader):
    """The items of one replica's iterators.

    The k-th item of replica r has the id `k * num_replicas + r`.

    Args:
        stream: what is read.
        config: how many replicas there are.
        replica: which one this is.
        num_workers: worker processes; at most one for each part.
        limit_s: seconds that an item may take in one; 0 for any time.
        state: where to go on, see `ItemReader.state`; it comes from a file and is not trusted.

    Raises:
        ValueError: the state is damaged or does not fit, or the source gives less than it did.
    """

    def __init__(
        self,
        stream: ItemStream,
        config: PlanConfig,
        *,
        replica: int,
        num_workers: int = 0,
        limit_s: float = 0.0,
        state: Any = None,
    ) -> None:
        num_replicas = config.num_replicas
        self._stream, self._replica, self._num_replicas = stream, replica, num_replicas
        self._pass = self._next = 0
        self._places = [_Place() for _ in stream.shards.numbers(replica, num_replicas)]
        if state is not None:
            who = {"replica": replica, "num_replicas": num_replicas}
            self._places = _checked_places(stream, state, **who)
            self._pass, self._next = state["pass"], state["next"]
        num = min(num_workers, len(self._places))
        turns = _Turns(
            stream,
            self._places,
            replica=replica,
            num_replicas=num_replicas,
            pass_index=self._pass,
            limit_s=limit_s if num else 0.0,
        )
        super().__init__(turns, num, batch_size=None, persistent_workers=num > 0)
        self._pending: list[deque[_Turn]] = [deque() for _ in self._places]
        self._has_state = True
        self._head, self._head_items, self._num_head = hashlib.sha256(), set[bytes](), 0
        if state is not None:
            try:
                self._upcoming()
            except RuntimeError as error:  # told to the other replicas as what cannot be resumed
                raise ValueError(str(error)) from error

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        """Return the next items with their ids, fewer where the iterators end.

        Raises:
            BadRecordError, OverlongError, ChatFormatError: by policy.
            SourceError: a part raised, or an endless shard is empty.
            ValueError: a part's state cannot be saved, or does not fit.
            WorkerError: a worker process has died.
        """
        items: list[tuple[int, Sample | Skipped]] = []
        while len(items) < count and (turn := self._upcoming()) is not None:
            item, place = turn.items.popleft(), self._places[turn.part]
            if isinstance(item, Exception):
                raise item
            place.count += 1
            if turn.state is not None and not turn.items:
                place.at, place.state = place.count, turn.state
            items.append((self._next * self._num_replicas + self._replica, item))
            self._next += 1
            if self._num_head < HEAD_ITEMS:
                self._num_head += 1
                if isinstance(item, Sample):
                    data = item.tokens.tobytes() + item.labels.tobytes()
                    self._head.update(data)
                    self._head_items.add(data)
        return items

    def has_ended(self) -> bool:
        """Whether the iterators have no further item; reads ahead to find out."""
        return self._stream.passes is not None and self._upcoming() is None

    def head(self) -> bytes:
        """Return 48 bytes of the first items read."""
        counts = (self._num_head, len(self._head_items))
        return self._head.digest() + b"".join(n.to_bytes(8, "little") for n in counts)

    def check_heads(self, heads: Sequence[bytes]) -> None:
        """Raise if replicas begin with the same items, or none has any.

        Equal items one after the other (synthetic data) tell nothing.

        Raises:
            SourceError: on all replicas.
        """
        counts = [int.from_bytes(head[32:40], "little") for head in heads]
        if not any(counts):
            raise SourceError("no replica has any data: every shard of the train dataset is empty")
        first: dict[bytes, int] = {}
        for replica, head in enumerate(heads):
            if int.from_bytes(head[40:48], "little") < 2:
                continue
            other = first.setdefault(head, replica)
            if other != replica:
                raise SourceError(
                    f"replicas {other} and {replica} begin with the same {counts[replica]} "
                    "samples: each has to read a shard of its own; pass IterableShards(make=...), "
                    "whose make(index, num_shards) returns one, or shard the dataset by the "
                    "data-parallel rank"
                )

    def state(self) -> dict[str, Any]:
        """Return where the replica is, as JSON values."""
        has_ended = self.has_ended()  # may begin the next pass
        return {
            "version": _STATE_VERSION,
            "replicas": self._num_replicas,
            "passes": self._stream.passes,
            "has_state": self._has_state and self._stream.keeps_state,
            "ended": has_ended,
            "next": self._next,
            "pass": self._pass,
            "parts": list(map(asdict, self._places)),
        }

    def _upcoming(self) -> _Turn | None:
        """Return the turn that the next item is in; None at the end of the last pass."""
        passes = self._stream.passes
        while passes is None or self._pass < passes:
            live = [at for at, place in enumerate(self._places) if not place.ended]
            if not live:
                self._begin_pass()
                continue
            at = min(live, key=lambda one: (self._places[one].count // TURN, one))
            while not self._pending[at]:
                for turn in self._next_batch(self._reading):
                    self._has_state &= turn.has_state
                    self._pending[turn.part].append(turn)
            turn = self._pending[at][0]
            if turn.items:
                return turn
            self._places[at].ended = turn.has_ended
            self._pending[at].popleft()
        return None

    def _begin_pass(self) -> None:
        if self._stream.passes is None and not any(place.count for place in self._places):
            raise SourceError(
                f"{self._stream.name} gives replica {self._replica} no item: it cannot take part "
                "in a run whose length is a number of samples; give it data, fewer replicas, or "
                "use --odb-epochs, with which a replica without data idles"
            )
        self._pass += 1
        self._places = [_Place() for _ in self._places]
        self._batches = None

    def _reading(self) -> str:
        where = f"item {self._next} of replica {self._replica} or one soon after"
        return f"it read {self._stream.name}, {where}"


# --- states ------------------------------------------------------------------------------------

_NO_STATE = (
    "the data state holds no state of an iterable source, and this run has one: resume "
    "with the data that was saved, or start the data anew (--finetune)"
)


def _checked_places(
    stream: ItemStream, state: Any, *, replica: int, num_replicas: int
) -> list[_Place]:
    """Return the places of a state, once it was held against what it is to go on with.

    Raises:
        ValueError: it does not fit.
    """
    if not isinstance(state, Mapping) or set(state) != _STATE_KEYS:
        raise ValueError(_NO_STATE)
    try:
        places = [_Place(**part) for part in state["parts"]]
        counts = [state["next"], state["pass"], *(n for one in places for n in (one.at, one.count))]
        is_sound = state["version"] == _STATE_VERSION and state["replicas"] == num_replicas
        is_sound &= all(map(_is_count, counts)) and type(state["ended"]) is bool
        is_sound &= all(
            type(one.ended) is bool and isinstance(one.state, str | None) and one.at <= one.count
            for one in places
        )
    except TypeError:
        is_sound = False
    if not is_sound:
        raise ValueError(
            "the source's state is damaged or of another version: restore the file, or start "
            "the data anew (--finetune)"
        )
    if state["has_state"] is not True:
        raise ValueError(
            f"{stream.name} had no state of its own when the checkpoint was saved, so a "
            "run cannot go on with its data: give it state_dict() and load_state_dict() (or "
            "use torchdata's StatefulDataLoader, or Megatron-Energon's savable loader), and "
            "start the data anew (--finetune)"
        )
    num, saved, passes = (
        len(stream.shards.numbers(replica, num_replicas)),
        state["passes"],
        stream.passes,
    )
    if len(places) != num:
        raise ValueError(
            f"the source was saved with {len(places)} parts for each replica, this run has "
            f"{num}: give IterableShards the same parts"
        )
    if (saved is None) is not (passes is None):
        then = "a number of samples" if saved is None else f"--odb-epochs {saved}"
        raise ValueError(
            f"the data state was saved with {then} and this run has the other: resume with the "
            "same kind of run length, or start the data anew (--finetune)"
        )
    if passes is not None and (type(saved) is not int or saved > passes):
        raise ValueError(
            f"the data state was saved with --odb-epochs {saved}, this run has {passes}: ask "
            "for at least as many, or start the data anew (--finetune)"
        )
    return places


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


_ENERGON = {
    "SavableDataLoaderState": "megatron.energon.savable_loader",
    "SavableDatasetCheckpoint": "megatron.energon.savable_loader",
    "SavableDatasetState": "megatron.energon.savable_loader",
    "SliceState": "megatron.energon.flavors.webdataset.sample_loader",
    "SystemRngState": "megatron.energon.rng",
    "FlexState": "megatron.energon.state",
}
"""Classes of megatron-energon 7 that a loader's state consists of, and where they are."""


_LOADING = threading.Lock()  # torch has one list of safe classes for all threads


def _known(data: bytes) -> Any:
    """Load a state by torch's restricted unpickler: plain values, arrays, Energon's states."""
    from numpy._core import multiarray

    kinds: list[Any] = [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype]
    kinds += {type(np.dtype(code)) for code in "?bhilqBHILQefd"}
    if b"megatron.energon" in data:
        kinds += [getattr(importlib.import_module(at), name) for name, at in _ENERGON.items()]
    with _LOADING, torch.serialization.safe_globals(kinds):
        return torch.load(io.BytesIO(data), weights_only=True)


def _encode(value: Any, *, owner: str) -> str:
    """Return a part's state as text.

    Raises:
        ValueError: something in it is of no known kind.
    """
    buffer = io.BytesIO()
    energon = sys.modules.get("megatron.energon.state")
    if energon is not None:  # a dict of its own, which torch would not fill
        copyreg.pickle(energon.FlexState, lambda one: (type(one), (dict(one),)))
    try:
        torch.save(value, buffer)
        _known(buffer.getvalue())
    except Exception as error:  # pickle raises what it likes
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise ValueError(
            f"the state of {owner} cannot be saved as plain values "
            f"({reason.partition('. Please')[0]}): return numbers, texts, bytes, arrays, lists "
            "and mappings of them from state_dict()"
        ) from error
    return base64.b64encode(buffer.getvalue()).decode()


def _decode(text: str) -> Any:
    try:
        return _known(base64.b64decode(text, validate=True))
    except Exception as error:
        raise ValueError(
            f"the source's state is damaged ({type(error).__name__}: {error}), or of a "
            "Megatron-Energon that is not installed: restore the file, or start the data anew "
            "(--finetune)"
        ) from error
