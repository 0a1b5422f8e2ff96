"""Map-style data: the run's stream of samples, one replica's share of it, the padded baseline.

A stream has random access by position over blended, shuffled sources. An epoch is one pass of the
(blended) index; every further epoch continues each source where the last one stopped, reshuffled
once per pass of that source.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.order import CyclicOrder, PassOrder
from odb_megatron.data.sample import Sample, Skipped
from odb_megatron.data.sources import DATA_ERRORS, SampleSource
from odb_megatron.data.thd import PAD_TOKEN
from odb_megatron.data.workers import PREFETCH, Reader, limited
from odb_megatron.errors import SettingError
from odb_megatron.plan.record import PlanConfig

__all__ = ["Blend", "Location", "PaddedDataset", "SampleStream", "SourcePart", "StreamReader"]
__all__ += ["own_positions"]

_MAX_IN_GROUP = 8
"""Positions that a worker fetches and sends at once, at most: sending each sample by itself costs
the planner 0.3 ms of processor time."""

_MAX_NAMED = 8


class Location(NamedTuple):
    """Where a stream position comes from; a tuple, which is sent to workers in a few bytes.

    Attributes:
        epoch: pass of the blended index, from 0.
        place: position inside that epoch; (epoch, place) identifies a sample of the run.
        source: index of the data source.
        record: record number inside the source.
    """

    epoch: int
    place: int
    source: int
    record: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """A source and the order of its split's records."""

    source: SampleSource
    order: PassOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """One pass of a blend, as Megatron's BlendedDataset holds it.

    Attributes:
        source_index: int [N], the source at each place of the pass.
        source_place: int [N], how many samples of that source came before it.
    """

    source_index: npt.NDArray[np.integer]
    source_place: npt.NDArray[np.integer]


class SampleStream:
    """Samples by stream position.

    Args:
        parts: sources with their orders.
        blend: how one epoch interleaves them; None for a single source.
        num_samples: `len()`, the positions that will be asked for; None for one epoch.
        order: Megatron's `--dataloader-type`; see `order.build_order`.
        split: name of the split, for errors.

    Raises:
        ValueError: a source has no record in this split.
    """

    def __init__(
        self,
        parts: Sequence[SourcePart],
        *,
        blend: Blend | None = None,
        num_samples: int | None = None,
        order: CyclicOrder | None = None,
        split: str = "",
    ) -> None:
        assert len(parts) == 1 or (parts and blend), "several sources need a blend"
        for part in parts:
            if len(part.order) == 0:
                raise SettingError(
                    f"{{path}} has {len(part.source)} records and none of them falls into the "
                    f"{split + ' ' if split else ''}split: change {{split}} (100,0,0 with "
                    "{eval_iters} 0 trains on all of them), or add data",
                    path=part.source.path,
                )
        self._parts = tuple(parts)
        self._blend = blend
        self._counts = (
            None if blend is None else np.bincount(blend.source_index, minlength=len(parts))
        )
        self.epoch_size = len(parts[0].order) if blend is None else len(blend.source_index)
        self._num_samples = self.epoch_size if num_samples is None else num_samples
        self._order = order

    def __len__(self) -> int:
        return self._num_samples

    @property
    def source_names(self) -> tuple[str, ...]:
        """Path of each source, in blend order."""
        return tuple(part.source.path for part in self._parts)

    def locate(self, position: int) -> Location:
        """Return where stream position `position` comes from; any position >= 0 is legal."""
        index = position if self._order is None else self._order[position]
        epoch, place = divmod(index, self.epoch_size)
        if self._blend is None or self._counts is None:
            source, index = 0, epoch * self.epoch_size + place
        else:
            source = int(self._blend.source_index[place])
            index = epoch * int(self._counts[source]) + int(self._blend.source_place[place])
        return Location(epoch, place, source, self._parts[source].order[index])

    def describe(self, position: int, where: Location | None = None) -> str:
        """Return in words where a position comes from, for errors."""
        where = where or self.locate(position)
        path = self._parts[where.source].source.path
        return f"stream position {position} (record {where.record} of {path})"

    def fetch(self, position: int, where: Location | None = None) -> Sample | Skipped:
        """Preprocess the sample at `position`.

        Args:
            position: stream position.
            where: `locate(position)`, from a process that has the permutations.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatFormatError, DataFileError: always.
        """
        where = where or self.locate(position)
        return self._parts[where.source].source.sample(where.record, source=where.source)

    def sources(self) -> list[dict[str, object]]:
        """Return each source as plain values: path, fingerprint, records, seed, order's ends."""
        return [
            {
                "path": part.source.path,
                "fingerprint": part.source.fingerprint(),
                "num_records": len(part.order),
                "seed": part.order.seed,
                "ends": [part.order[0], part.order[len(part.order) - 1]],
            }
            for part in self._parts
        ]

    def blend_digest(self, most: int) -> tuple[int, str]:
        """Digest of the first places of a blend; a longer run's blend begins with the same.

        Args:
            most: places looked at, at most.

        Returns:
            The places looked at, 0 for a single source, and the digest.
        """
        if self._blend is None:
            return 0, ""
        places = np.ascontiguousarray(self._blend.source_index[:most], dtype=np.int64)
        return len(places), hashlib.sha256(places.tobytes()).hexdigest()[:16]

    def repeats(self) -> str:
        """Say what an epoch of a blend repeats or leaves out; "" where each sample comes once."""
        sizes = [len(part.order) for part in self._parts]
        if self._counts is None or self._counts.tolist() == sizes:
            return ""
        found = []
        for part, size, drawn in zip(self._parts, sizes, self._counts.tolist(), strict=True):
            more = drawn - size
            note = f"{more} of them again" if more > 0 else f"{-more} not in this epoch"
            found.append(
                f"{drawn} of the {size} samples of {part.source.path}"
                + (f" ({note})" if more else "")
            )
        return f"an epoch of the blend is {self.epoch_size} draws by weight: {', '.join(found)}"

    def fingerprint(self) -> str:
        """Digest of all that decides the stream; equal on all replicas."""
        # Without the paths, which may be a node's own.
        known = [{**one, "path": ""} for one in self.sources()]
        digest = hashlib.sha256(repr(known).encode())
        if self._blend is not None:
            digest.update(np.ascontiguousarray(self._blend.source_index))
        digest.update(f"{self.epoch_size} {self._num_samples} {self._order}".encode())
        return digest.hexdigest()[:16]


# --- one replica's share -----------------------------------------------------------------------


def own_positions(config: PlanConfig, *, replica: int, consumed: int) -> Iterator[int]:
    """Yield the stream positions that a replica reads, step by step.

    Of each step's samples, in Megatron's order, every `num_replicas`-th from `replica` on.
    """
    while consumed < config.total:
        end = min(consumed + config.global_batch_size, config.total)
        yield from range(consumed + replica, end, config.num_replicas)
        consumed = end


class StreamReader(Reader):
    """A replica's samples of a stream with random access.

    Which positions are its own follows from the run's length, its batch size and what was consumed
    before, so that workers fetch ahead.

    Args:
        stream: the run's stream.
        config: how positions come to replicas.
        replica: which one this is.
        consumed: samples consumed before the first.
        num_workers: worker processes; 0 fetches in the calling thread.
        limit_s: seconds that a sample may take in one; 0 for any time.
    """

    def __init__(
        self,
        stream: SampleStream,
        config: PlanConfig,
        *,
        replica: int,
        consumed: int = 0,
        num_workers: int = 0,
        limit_s: float = 0.0,
    ) -> None:
        self._stream = stream
        self._asked: deque[int] = deque()  # given to workers, and not yet come
        self._items: deque[tuple[int, Sample | Skipped | Exception]] = deque()
        share, size = -(-config.global_batch_size // config.num_replicas), 1
        if num_workers:
            size = max(1, min(_MAX_IN_GROUP, share // (num_workers * PREFETCH)))
        super().__init__(
            _Fetcher(stream, limit_s=limit_s if num_workers else 0.0),
            num_workers,
            batch_size=size,
            sampler=self._places(own_positions(config, replica=replica, consumed=consumed)),
        )

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        found: list[tuple[int, Sample | Skipped]] = []
        while len(found) < count:
            if not self._items:
                self._items.extend(self._next_batch(self._fetching))
                for _ in self._items:
                    self._asked.popleft()
            position, item = self._items.popleft()
            if isinstance(item, Exception):
                raise item
            found.append((position, item))
        return found

    def _places(self, positions: Iterator[int]) -> Iterator[tuple[int, Location]]:
        """Yield positions and where they are: only this process has the permutations."""
        for position in positions:
            self._asked.append(position)
            yield position, self._stream.locate(position)

    def _fetching(self) -> str:
        asked = [self._stream.describe(position) for position in self._asked]
        more = f" and {len(asked) - _MAX_NAMED} more" if len(asked) > _MAX_NAMED else ""
        return f"the workers were to fetch {', '.join(asked[:_MAX_NAMED])}{more}"


class _Fetcher(torch.utils.data.Dataset[Any]):
    """What a worker runs: a position and where it is give the position and its sample."""

    def __init__(self, stream: SampleStream, *, limit_s: float) -> None:
        self._stream, self._limit_s = stream, limit_s

    def __getitem__(self, place: tuple[int, Location]) -> tuple[int, Sample | Skipped | Exception]:
        position, where = place
        try:
            with limited(self._limit_s, what=lambda: self._stream.describe(position, where)):
                return position, self._stream.fetch(position, where)
        except DATA_ERRORS as error:  # as a value: torch would change its type and text
            return position, error


# --- the padded baseline -----------------------------------------------------------------------


class PaddedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """The same stream as fixed-length items for Megatron's own data loader.

    An item holds int64 `tokens`, `labels`, `position_ids` and float32 `loss_mask`, each
    [sequence_length], the ints `length` (0 for a position that emits nothing), `position` and
    `truncated` (0 or 1), and why a position emits nothing: `skipped` (a SkipReason, else 0)
    and `message`.

    Args:
        stream: its `len()` is this one's.
        sequence_length: `--seq-length`.
        split: Megatron's Split; its sampler chooses the batch size by it.
    """

    def __init__(self, stream: SampleStream, *, sequence_length: int, split: Any) -> None:
        self.stream, self.split = stream, split
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, position: int) -> dict[str, Any]:
        size = self._sequence_length
        item: dict[str, Any] = {
            "tokens": np.full(size, PAD_TOKEN, dtype=np.int64),
            "labels": np.full(size, PAD_TOKEN, dtype=np.int64),
            "loss_mask": np.zeros(size, dtype=np.float32),
            "position_ids": np.arange(size, dtype=np.int64),
            "position": position,
        }
        sample = self.stream.fetch(position)
        if isinstance(sample, Skipped):
            why = {"skipped": int(sample.reason), "message": sample.message}
            return item | {"length": 0, "truncated": 0} | why
        for name in ("tokens", "labels", "loss_mask"):
            item[name][: len(sample)] = getattr(sample, name)
        known = {"length": len(sample), "truncated": int(sample.truncated > 0)}
        return item | known | {"skipped": 0, "message": ""}
