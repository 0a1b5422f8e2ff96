"""The data of one rank of a replica: its source rank's loaders, or what the source rank sends.

All ranks build it together: what fails on the source rank is raised on every rank of the replica.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron.core.datasets.utils import Split

from odb_megatron.comm.deadline import Deadline
from odb_megatron.comm.delivery import ReplicaGroup
from odb_megatron.comm.gloo_group import GlooGroup, numbered
from odb_megatron.data.feed import ChunkIterator, ContextPart, StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.megatron.replica_ranks import ReplicaRanks
from odb_megatron.plan.record import ReplicaFailedError

__all__ = ["ReplicaData", "require_agreement"]

Loaders = Sequence[StepLoader | None]


_OWN_NAMES = ("rank", "local_rank")
"""Arguments that differ between ranks by nature; so do paths, which may be a node's own."""


def require_agreement(args: argparse.Namespace, place: ReplicaRanks) -> None:
    """Check that all ranks of the replica were started with the same arguments.

    Every rank calls it, before anything that they do together depends on one.

    Raises:
        ValueError: on all ranks of the replica, with what differs.
    """
    if len(place.ranks) == 1:
        return
    values = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in _OWN_NAMES and os.sep not in str(value)
    }
    found = differences(
        values, ranks=place.ranks, timeout_s=60.0 * args.distributed_timeout_minutes
    )
    if found:
        raise ValueError(
            f"ranks {list(place.ranks)} form one replica and were started with different "
            f"arguments: {'; '.join(found)}. Start all with the same flags and environment"
        )


def differences(values: Mapping[str, str], *, ranks: Sequence[int], timeout_s: float) -> list[str]:
    """Return what differs from the source rank's values, one text for each rank that differs.

    Every rank of the replica must call it; all get the same texts. Equal ranks pay one all-gather.

    Args:
        values: this rank's.
        ranks: global ranks, the source rank first.
        timeout_s: seconds that each exchange may take.

    Raises:
        RuntimeError: a rank is gone or did not come in time.
    """
    group = GlooGroup(ranks, name=numbered("arguments", ranks), timeout_s=timeout_s)
    try:
        own = json.dumps(dict(values), sort_keys=True).encode()
        digest = hashlib.blake2b(own, digest_size=32).digest()
        found = group.all_gather(digest + len(own).to_bytes(8, "little"))
        if found == found[:1] * len(found):
            return []
        most = max(int.from_bytes(one[32:], "little") for one in found)
        first, *others = map(json.loads, group.all_gather(own.ljust(most)))
    finally:
        group.close()
    return [
        "; ".join(
            f"{name} is {there.get(name, 'absent')} on rank {rank} and "
            f"{first.get(name, 'absent')} on rank {ranks[0]}"
            for name in sorted({*there, *first})
            if there.get(name, "") != first.get(name, "")
        )
        for rank, there in zip(ranks[1:], others, strict=True)
        if there != first
    ]


class ReplicaData:
    """Iterators of the three splits on one rank, for every virtual pipeline chunk.

    Args:
        args: Megatron's arguments.
        place: this rank's place in its replica.
        plan_ahead: see `StepFeed`.
        deadlines: of each split's loader, by its name.
        num_chunks: iterators per split; None for one for each virtual pipeline chunk.
        has_images: samples may have images, which go to the ranks of the first pipeline stage.

    Attributes:
        place: see above.
        channels: to the other ranks of the replica, by split; empty for a replica of one rank.
        checkpoint_channel: the one that saving uses; None for a replica of one rank.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        place: ReplicaRanks,
        *,
        plan_ahead: int = 2,
        deadlines: Mapping[str, Deadline] | None = None,
        num_chunks: int | None = None,
        has_images: bool = False,
    ) -> None:
        self._deadlines = deadlines or {}
        self.place = place
        self._args = args
        self._num_chunks = num_chunks or args.virtual_pipeline_model_parallel_size or 1
        self._feeds: list[StepFeed | None] = []
        self._loaders: Loaders = ()
        self._reported = 0
        self._plan_ahead = plan_ahead
        self.channels: list[ReplicaGroup] = []
        self._reports: ReplicaGroup | None = None
        if len(place.ranks) > 1:
            self.channels = [
                ReplicaGroup(
                    place.ranks,
                    payload_ranks=place.payload_ranks,
                    name=split.name,
                    timeout_s=60.0 * args.distributed_timeout_minutes,
                    deadline=self._deadlines.get(split.name),
                    attachment_ranks=place.first_stage if has_images else (),
                )
                for split in Split
            ]
        self.checkpoint_channel: ReplicaGroup | None = None
        if self.channels:
            self.checkpoint_channel = ReplicaGroup(
                place.ranks,
                payload_ranks=place.ranks[:1],
                name="checkpoint",
                timeout_s=60.0 * args.distributed_timeout_minutes,
            )
        if place.reporter != place.ranks[0] and place.rank in (place.ranks[0], place.reporter):
            # Of its own: the channels belong to the threads that make steps.
            self._reports = ReplicaGroup(
                [place.ranks[0], place.reporter],
                payload_ranks=[place.ranks[0]],
                name="report",
                timeout_s=60.0 * args.distributed_timeout_minutes,
            )

    @contextmanager
    def error_broadcast(self) -> Iterator[None]:
        """Run what only the source rank does; an error is told to the other ranks of the replica.

        Raises:
            ReplicaFailedError: on the others, with the source rank's error.
        """
        try:
            yield
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        self._tell("")

    def build(self, make_loaders: Callable[[], Loaders]) -> None:
        """Build the feeds.

        Args:
            make_loaders: returns the loaders of the three splits; called on the source rank alone.

        Raises:
            ReplicaFailedError: the source rank failed, on the other ranks.
        """
        with self.error_broadcast():
            if self.place.is_source:
                self._loaders = make_loaders()
        lengths = self._share_lengths()
        part = ContextPart(size=self.place.context_size, rank=self.place.context_rank)
        for at, split in enumerate(Split):
            feed = None
            if lengths[at] is not None:
                feed = StepFeed(
                    self._loaders[at] if self._loaders else None,
                    channel=self.channels[split.value] if self.channels else None,
                    part=part,
                    num_chunks=self._num_chunks,
                    plan_ahead=self._plan_ahead,
                    num_steps=lengths[at] or 0,
                )
                feed.deadline = self._deadlines.get(split.name)
            self._feeds.append(feed)

    @property
    def train(self) -> StepFeed | None:
        """The training data's feed; None before `build`, or without training data."""
        return self._feeds[Split.train.value] if self._feeds else None

    def close(self, *, timeout_s: float) -> bool:
        """Close all feeds; return whether all have ended within the time. See `StepFeed.close`."""
        deadline = time.monotonic() + timeout_s
        have_ended = [
            feed.close(timeout_s=max(0.0, deadline - time.monotonic()))
            for feed in self._feeds
            if feed is not None
        ]
        return all(have_ended)

    def num_reported(self) -> int:
        """Return how many reports the replica's source rank has got since the last call."""
        total = 0 if self._reports is None else self._reports.num_reports
        new, self._reported = total - self._reported, total
        return new

    def iterators(self, chunk: int) -> tuple[ChunkIterator | None, ...]:
        """Return the iterators of the three splits for a virtual pipeline chunk."""
        return tuple(None if feed is None else feed.iterators[chunk] for feed in self._feeds)

    def report(self, values: Sequence[float]) -> list[float]:
        """Return on the source rank what the last pipeline stage knows (training only)."""
        if self._reports is None:
            return list(values)
        return self._reports.report(values)

    def _tell(self, error: str) -> None:
        if not self.channels:
            return
        channel, leads = self.channels[0], self.place.is_source
        found = json.loads(channel.header(json.dumps(error).encode() if leads else None))
        if found and not leads:
            raise ReplicaFailedError(f"the source rank of this replica failed: {found}")

    def _share_lengths(self) -> list[int | None]:
        """Return the steps of one pass of each split; None for a split without data."""
        own: list[int | None] = [
            None if loader is None else len(loader) for loader in self._loaders
        ]
        if not self.channels:
            return own or [None] * len(Split)
        leads = self.place.is_source
        shared: list[int | None] = json.loads(
            self.channels[0].header(json.dumps(own).encode() if leads else None)
        )
        return shared
