"""What one rank of a run knows of the others: heartbeat, watchdog, and deadline for each loader.

Must not plan or train. A world of one rank has no peers, and no threads for them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial

from megatron.core import parallel_state as mpu

from odb_megatron.comm.deadline import Deadline
from odb_megatron.comm.heartbeat import Heartbeat
from odb_megatron.comm.watchdog import Watchdog, limit_end
from odb_megatron.elastic import leave_reason
from odb_megatron.megatron.config import OdbConfig

__all__ = ["PeerWatch"]

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
