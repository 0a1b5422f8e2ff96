"""A replica: its ranks, what they share of its data, and what they know of other ranks' failures.

All ranks build the data together: what fails on the source rank is raised on every rank of the
replica.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core import parallel_state as mpu
from megatron.core.datasets.utils import Split
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from odb_megatron.comm.groups import ReplicaGroup, SourceGroup
from odb_megatron.comm.heartbeat import Deadline, Heartbeat
from odb_megatron.comm.watchdog import Watchdog, limit_end
from odb_megatron.data.feed import ChunkIterator, StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.elastic import leave_reason
from odb_megatron.megatron.checkpoint import gather_json
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.plan.record import ReplicaFailedError

__all__ = ["PeerWatch", "ReplicaData", "ReplicaRanks", "replica_ranks", "require_agreement"]

Loaders = Sequence[StepLoader | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRanks:
    """One rank's place in its replica.

    Attributes:
        rank: this rank.
        ranks: all ranks of the replica, ascending; the first one (tensor, pipeline and context
            rank 0) is its source rank.
        payload_ranks: those that use tokens, labels or loss masks: the ranks of the first and the
            last pipeline stage, and of one that predicts further tokens; the source rank first.
        first_stage: the ranks of the first pipeline stage, the source rank first; they encode
            images.
        reporter: the rank of the last pipeline stage (tensor and context rank 0) that knows the
            loss.
        context_size: context-parallel size.
        context_rank: this rank's context-parallel rank.
        tensor_rank: this rank's tensor-parallel rank.
    """

    rank: int
    ranks: tuple[int, ...]
    payload_ranks: tuple[int, ...]
    reporter: int
    context_size: int
    context_rank: int
    tensor_rank: int
    first_stage: tuple[int, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether this rank reads data and plans: the source rank."""
        return self.rank == self.ranks[0]


def replica_ranks(args: argparse.Namespace, *, rank: int) -> ReplicaRanks:
    """Return a rank's place: it follows from Megatron's sizes and rank order (`RankGenerator`).

    Args:
        args: `world_size`, the parallel sizes, and `use_tp_pp_dp_mapping`.
        rank: global rank.
    """
    stages = args.pipeline_model_parallel_size
    shape = {"tp": args.tensor_model_parallel_size, "cp": args.context_parallel_size, "pp": stages}
    size = math.prod(shape.values())
    mapping = getattr(args, "use_tp_pp_dp_mapping", False)
    order = "tp-cp-ep-pp-dp" if mapping else "tp-cp-ep-dp-pp"
    generator = mpu.RankGenerator(**shape, ep=1, dp=args.world_size // size, order=order)

    def group(token: str, member: int) -> list[int]:
        found: list[int] = next(ranks for ranks in generator.get_ranks(token) if member in ranks)
        return found

    ranks = sorted(group("tp-cp-pp", rank))
    stage_of = {other: group("pp", other).index(other) for other in ranks}
    users = {0, stages - 1}
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        pieces = PipelineParallelLayerLayout.parse_str_to_list(layout)
        users |= {at % stages for at, piece in enumerate(pieces) if LayerType.mtp in piece}
    return ReplicaRanks(
        rank=rank,
        ranks=tuple(ranks),
        payload_ranks=tuple(other for other in ranks if stage_of[other] in users),
        reporter=group("pp", ranks[0])[-1],
        context_size=shape["cp"],
        context_rank=group("cp", rank).index(rank),
        tensor_rank=group("tp", rank).index(rank),
        first_stage=tuple(other for other in ranks if stage_of[other] == 0),
    )


_OWN_NAMES = ("rank", "local_rank")
"""Arguments that differ between ranks by nature; so do paths, which may be a node's own."""


def require_agreement(args: argparse.Namespace, place: ReplicaRanks) -> None:
    """Check that all ranks of the replica were started with the same arguments.

    Every rank calls it, before anything that they do together depends on one.

    Raises:
        ValueError: on all ranks of the replica, with what differs.
    """
    values = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in _OWN_NAMES and os.sep not in str(value)
    }
    timeout_s = 60.0 * args.distributed_timeout_minutes
    if found := differences(values, ranks=place.ranks, timeout_s=timeout_s):
        raise ValueError(
            f"ranks {list(place.ranks)} form one replica and were started with different "
            f"arguments: {'; '.join(found)}. Start all with the same flags and environment"
        )


def differences(values: Mapping[str, str], *, ranks: Sequence[int], timeout_s: float) -> list[str]:
    """Return what differs from the source rank's values, one text for each rank that differs.

    Every rank of the replica must call it; all get the same texts.

    Args:
        values: this rank's.
        ranks: global ranks, the source rank first.
        timeout_s: seconds that each exchange may take.

    Raises:
        RuntimeError: a rank is gone or did not come in time.
    """
    if len(ranks) == 1:
        return []
    group = SourceGroup(ranks, name="arguments", timeout_s=timeout_s)
    try:
        first, *others = gather_json(group, dict(values))
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
        deadlines: of each split's loader, by its name.
        num_chunks: iterators per split; None for one for each virtual pipeline chunk.
        has_images: samples may have images, which go to the ranks of the first pipeline stage.

    Attributes:
        checkpoint_channel: to the other ranks of the replica, for saving; None for a replica of one
            rank.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        place: ReplicaRanks,
        *,
        deadlines: Mapping[str, Deadline],
        num_chunks: int | None = None,
        has_images: bool = False,
    ) -> None:
        self._place, self._deadlines = place, deadlines
        self._num_chunks = num_chunks or args.virtual_pipeline_model_parallel_size or 1
        self._feeds: list[StepFeed | None] = []
        self._num_reported = 0
        self._channels: list[ReplicaGroup] = []  # by split
        self._reports: ReplicaGroup | None = None
        self.checkpoint_channel: ReplicaGroup | None = None
        make = partial(ReplicaGroup, timeout_s=60.0 * args.distributed_timeout_minutes)
        source = place.ranks[:1]
        if len(place.ranks) > 1:
            self._channels = [
                make(
                    place.ranks,
                    payload_ranks=place.payload_ranks,
                    name=split.name,
                    deadline=deadlines.get(split.name),
                    attachment_ranks=place.first_stage if has_images else (),
                )
                for split in Split
            ]
            self.checkpoint_channel = make(place.ranks, payload_ranks=source, name="checkpoint")
        if place.reporter not in source and place.rank in (*source, place.reporter):
            # Of its own: the channels belong to the threads that make steps.
            pair = (*source, place.reporter)
            self._reports = make(pair, payload_ranks=source, name="report")

    def build(self, make_loaders: Callable[[], Loaders]) -> None:
        """Build the feeds.

        Args:
            make_loaders: returns the loaders of the three splits on the source rank, and nothing on
                others; called on every rank.

        Raises:
            ReplicaFailedError: the source rank failed, on the other ranks.
        """
        try:
            loaders = make_loaders()
        except Exception as error:
            self._share(f"{type(error).__name__}: {error}")
            raise
        steps = self._share([None if one is None else len(one) for one in loaders])
        part = (self._place.context_size, self._place.context_rank)
        for at, (split, num_steps) in enumerate(zip(Split, steps, strict=True)):
            feed = None
            if num_steps is not None:
                feed = StepFeed(
                    loaders[at] if loaders else None,
                    channel=self._channels[at] if self._channels else None,
                    part=part,
                    num_chunks=self._num_chunks,
                    num_steps=num_steps,
                )
                feed.deadline = self._deadlines.get(split.name)
            self._feeds.append(feed)

    def _share(self, found: str | list[int | None]) -> list[int | None]:
        """Return the source rank's steps of one pass of each split; None for one without data.

        Args:
            found: this rank's, or its error.
        """
        is_source = self._place.is_source
        if self._channels:
            data = json.dumps(found).encode() if is_source else None
            found = json.loads(self._channels[0].header(data))
        if isinstance(found, str) and not is_source:
            raise ReplicaFailedError(f"the source rank of this replica failed: {found}")
        return found if isinstance(found, list) else []

    @property
    def train(self) -> StepFeed | None:
        """The training data's feed; None before `build`, or without training data."""
        return self._feeds[Split.train.value] if self._feeds else None

    def close(self, *, timeout_s: float) -> bool:
        """Close all feeds; return whether all have ended within the time. See `StepFeed.close`."""
        end = time.monotonic() + timeout_s
        have_ended = [
            feed.close(timeout_s=max(0.0, end - time.monotonic()))
            for feed in self._feeds
            if feed is not None
        ]
        return all(have_ended)

    def iterators(self, chunk: int) -> tuple[ChunkIterator | None, ...]:
        """Return the iterators of the three splits for a virtual pipeline chunk."""
        return tuple(None if feed is None else feed.iterators[chunk] for feed in self._feeds)

    def report(self, values: Sequence[float]) -> list[float]:
        """Return on the source rank what the last pipeline stage knows (training only)."""
        return list(values) if self._reports is None else self._reports.report(values)

    def num_reported(self) -> int:
        """Return how many reports the replica's source rank has got since the last call."""
        total = 0 if self._reports is None else self._reports.num_reports
        new, self._num_reported = total - self._num_reported, total
        return new


_GRACE_S = 8.0
"""Seconds that a process has to end by itself once a peer is gone: its trainer may raise first."""

_NEWS_S = 0.5
"""Seconds in which the news of a loss comes that an error may be the consequence of."""


class PeerWatch:
    """What this rank knows of the others; every rank of the world makes one, in the same order.

    Args:
        args: Megatron's arguments.
        config: ODB's.

    Attributes:
        heartbeat: tells and knows.
        deadlines: of each loader, by the split's name.
    """

    def __init__(self, args: argparse.Namespace, config: OdbConfig) -> None:
        self._is_saving = False
        self._watchdog: Watchdog | None = None
        timeout_s = 60.0 * args.distributed_timeout_minutes
        self.heartbeat = Heartbeat(
            f"replica {mpu.get_data_parallel_rank()}", timeout_s=timeout_s, silent_s=config.warn_s
        )
        if args.world_size > 1:
            self._watchdog = Watchdog(
                self.heartbeat,
                grace_s=_GRACE_S,
                is_saving=lambda: self._is_saving,
                longest_save_s=timeout_s,
                leave_reason=partial(leave_reason, is_told=True),
            )
        self.deadlines = {
            split.name: Deadline(self.heartbeat, timeout_s=config.timeout_s, warn_s=config.warn_s)
            for split in Split
        }

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is written, or given up, within: no watchdog ends the process."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def loss_behind_error(self) -> str:
        """Return the loss of a peer that an error may be the consequence of; empty for none."""
        if self._watchdog is None or not self.heartbeat.wait_for_loss(_NEWS_S):
            return ""
        return self.heartbeat.diagnosis()

    def close(self, *, clean: bool) -> None:
        """End; while a peer is gone the watchdog stays until the process has ended.

        Args:
            clean: the run has not failed.
        """
        if self._watchdog is not None:
            self._watchdog.stop()
            if not clean:
                limit_end()
            if not self.heartbeat.gone:
                self.heartbeat.close()
