"""The run's stream of samples: random access by stream position over blended, shuffled sources.

Knows no replica and no step. An epoch is one pass of the (blended) index; every further epoch
continues each source where the last one stopped, reshuffled once per pass of that source.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from odb_megatron.data.chat_record import ChatFormatError
from odb_megatron.data.order import Order, PassOrder, SingleOrder
from odb_megatron.data.sample import BadRecordError, DataFileError, Sample, Skipped, SkipReason
from odb_megatron.data.sources import SampleSource
from odb_megatron.errors import SettingError
from odb_megatron.plan.padding import OverlongError

__all__ = ["Blend", "FetchError", "Location", "SampleStream", "SourcePart"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchError:
    """An error met while preprocessing, carried out of a worker process as a value."""

    error: BadRecordError | OverlongError | ChatFormatError | DataFileError


class SampleStream(torch.utils.data.Dataset[Sample | Skipped | FetchError]):
    """Map-style over stream positions; `[position]` is what a data-loader worker runs.

    Args:
        parts: sources with their orders.
        blend: how one epoch interleaves them; None for a single source.
        num_samples: `len()`, the positions that will be asked for; None for one epoch.
        order: see `order.build_order`.
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
        order: Order | None = None,
        split: str = "",
    ) -> None:
        if not parts or (blend is None and len(parts) > 1):
            raise ValueError(f"{len(parts)} sources need a blend; one source needs none")
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
        self._order: Order = order or SingleOrder()
        self._bad: frozenset[int] = frozenset()

    def without(self, positions: frozenset[int]) -> SampleStream:
        """Return the same stream, with positions that are known to be bad left out unfetched."""
        if not positions:
            return self
        stream = copy.copy(self)
        stream._bad = positions
        return stream

    def __len__(self) -> int:
        return self._num_samples

    @property
    def source_names(self) -> tuple[str, ...]:
        """Path of each source, in blend order."""
        return tuple(part.source.path for part in self._parts)

    def locate(self, position: int) -> Location:
        """Return where stream position `position` comes from; any position >= 0 is legal."""
        epoch, place = divmod(self._order[position], self.epoch_size)
        if self._blend is None or self._counts is None:
            source, index = 0, epoch * self.epoch_size + place
        else:
            source = int(self._blend.source_index[place])
            index = epoch * int(self._counts[source]) + int(self._blend.source_place[place])
        return Location(
            epoch=epoch, place=place, source=source, record=self._parts[source].order[index]
        )

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
        if position in self._bad:
            message = f"{self.describe(position, where)} was bad before the run was resumed"
            return Skipped(reason=SkipReason.BAD_RECORD, message=message, source=where.source)
        return self._parts[where.source].source.sample(where.record, source=where.source)

    def __getitem__(self, position: int) -> Sample | Skipped | FetchError:
        return self.fetched(position)

    def fetched(
        self, position: int, where: Location | None = None
    ) -> Sample | Skipped | FetchError:
        """Return what `fetch` gives, or its error as a value."""
        try:
            return self.fetch(position, where)
        except (BadRecordError, OverlongError, ChatFormatError, DataFileError) as error:
            return FetchError(error=error)

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

    def data_digest(self) -> str:
        """Digest of the sources, their split and the seed; a longer run has the same."""
        digest = hashlib.sha256()
        for part in self._parts:
            order = part.order
            digest.update(f"{part.source.fingerprint()} {len(order)} {order.seed}".encode())
            digest.update(f"{order[0]} {order[len(order) - 1]}".encode())
        return digest.hexdigest()[:16]

    def fingerprint(self) -> str:
        """Digest of all that decides the stream, blend and length too; equal on all replicas."""
        digest = hashlib.sha256(self.data_digest().encode())
        if self._blend is not None:
            digest.update(np.ascontiguousarray(self._blend.source_index))
        digest.update(f"{self.epoch_size} {self._num_samples} {self._order}".encode())
        return digest.hexdigest()[:16]
