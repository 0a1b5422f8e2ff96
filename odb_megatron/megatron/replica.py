"""A replica: its ranks, what they share of its data, and what they know of other ranks' failures.

All ranks build the data together: what fails on the source rank is raised on every rank of the
replica.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core import parallel_state as mpu
from megatron.core.datasets.utils import Split
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from odb_megatron.comm.groups import GlooGroup, ReplicaGroup
from odb_megatron.comm.heartbeat import Deadline, Heartbeat
from odb_megatron.comm.watchdog import Watchdog, limit_end
from odb_megatron.data.feed import ChunkIterator, StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.elastic import leave_reason
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
    shape = {
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "pp": stages,
    }
    size = shape["tp"] * shape["cp"] * stages
    mapping = getattr(args, "use_tp_pp_dp_mapping", False)
    generator = mpu.RankGenerator(
        **shape,
        ep=1,
        dp=args.world_size // size,
        order="tp-cp-ep-pp-dp" if mapping else "tp-cp-ep-dp-pp",
    )

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
    group = GlooGroup(ranks, name="arguments", timeout_s=timeout_s)
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
        self.checkpoint_channel: ReplicaGroup | None = None
        make = partial(ReplicaGroup, timeout_s=60.0 * args.distributed_timeout_minutes)
        if len(place.ranks) > 1:
            self.channels = [
                make(
                    place.ranks,
                    payload_ranks=place.payload_ranks,
                    name=split.name,
                    deadline=self._deadlines.get(split.name),
                    attachment_ranks=place.first_stage if has_images else (),
                )
                for split in Split
            ]
            source = place.ranks[:1]
            self.checkpoint_channel = make(place.ranks, payload_ranks=source, name="checkpoint")
        if place.reporter != place.ranks[0] and place.rank in (place.ranks[0], place.reporter):
            # Of its own: the channels belong to the threads that make steps.
            pair = [place.ranks[0], place.reporter]
            self._reports = make(pair, payload_ranks=pair[:1], name="report")

    @contextlib.contextmanager
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
        part = (self.place.context_size, self.place.context_rank)
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


_GRACE_S = 8.0
"""Seconds that a process has to end by itself once a peer is gone: its trainer may raise first."""

_NEWS_S = 0.5
"""Seconds in which the news of a loss comes that an error may be the consequence of."""

_SHOWN = 600


class PeerWatch:
    """Every rank of the world makes one, in the same order.

    Args:
        args: Megatron's arguments.
        config: ODB's.

    Attributes:
        deadlines: of each loader, by the split's name.
    """

    def __init__(self, args: argparse.Namespace, config: OdbConfig) -> None:
        self._is_saving = False
        self._watchdog: Watchdog | None = None
        timeout_s = 60.0 * args.distributed_timeout_minutes
        self._heartbeat = Heartbeat(
            f"replica {mpu.get_data_parallel_rank()}",
            timeout_s=timeout_s,
            silent_s=config.warn_s,
        )
        if args.world_size > 1:
            self._watchdog = Watchdog(
                self._heartbeat,
                grace_s=_GRACE_S,
                is_saving=lambda: self._is_saving,
                longest_save_s=timeout_s,
                leave_reason=partial(leave_reason, is_told=True),
            )
        self.deadlines = {
            name: Deadline(self._heartbeat, timeout_s=config.timeout_s, warn_s=config.warn_s)
            for name in ("train", "valid", "test")
        }

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is written, or given up, within."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def loss_behind(self, error: BaseException | None) -> str:
        """Return the loss of a peer that an error may be the consequence of; empty for none."""
        if self._watchdog is None or error is None:
            return ""
        return self._heartbeat.diagnosis() if self._heartbeat.wait_for_loss(_NEWS_S) else ""

    def tell_failure(self, text: str) -> None:
        """Tell all ranks that this one ends with an error."""
        self._heartbeat.tell_failure(text[:_SHOWN])

    def begin_step(self) -> None:
        """The trainer begins a step, of training or evaluation."""
        self._heartbeat.begin_step()

    def leave(self, *, within_step: bool) -> None:
        """The script has ended without an error: after the last step of all, or others miss it."""
        self._heartbeat.leave(within_step=within_step)

    def close(self, *, clean: bool) -> None:
        """End; while a peer is gone the watchdog stays until the process has ended.

        Args:
            clean: the run has not failed.
        """
        if self._watchdog is not None:
            self._watchdog.stop()
            if not clean:
                limit_end()
            if not self._heartbeat.gone:
                self._heartbeat.close()
