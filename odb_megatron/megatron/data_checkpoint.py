"""Saves the data state with each of Megatron's checkpoints, so that no checkpoint is without it.

Must not know what the state holds, nor share a process group with the loader: its planner may be
exchanging records at any time.

Order of a save: every leader stages its file; a digest of all files goes into Megatron's arguments,
which are part of the common state of every checkpoint format; Megatron writes the checkpoint (or
hands it to its asynchronous writer) and its tracker file; the files move to their place. A kill in
between leaves the tracker at the checkpoint before, which has its own files, or at this one, whose
files are staged.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.finished_step import Progress
from odb_megatron.megatron.data_state import (
    Digest,
    encode_state,
    staged_path,
    state_path,
    write_file,
)

__all__ = ["DataCheckpoint", "DataSource", "loaded_folder", "place_staged", "saving_folder"]

_OK, _FAILED = b"\1", b"\0"
_NON_PERSISTENT = "non_persistent"  # checkpointing.py _NON_PERSISTENT_CKPT_SUBDIR, 0.19.2


class DataSource(Protocol):
    """What `data.step_feed.StepFeed` has to tell for its state to be saved."""

    @property
    def progress(self) -> Progress:
        """Where the loader stood after the last step that was handed out."""


class HeaderChannel(Protocol):
    """What `comm.delivery.ReplicaGroup` does."""

    def header(self, data: bytes | None = None) -> bytes:
        """Broadcast a header; the leader passes it."""


def saving_folder(args: argparse.Namespace, *, is_persistent: bool) -> str:
    """Return the folder that holds the iteration directory of a checkpoint being saved."""
    if is_persistent:
        return str(args.save)
    folder = args.non_persistent_global_ckpt_dir
    return str(folder or os.path.join(args.save, _NON_PERSISTENT))


def loaded_folder(args: argparse.Namespace) -> str:
    """Return the folder that holds the iteration directory of the checkpoint that was loaded.

    Megatron prefers a non-persistent checkpoint that is not older (checkpointing.py
    `_load_base_checkpoint`, 0.19.2).
    """
    if args.non_persistent_ckpt_type != "global":
        return str(args.load)
    folder = args.non_persistent_global_ckpt_dir or os.path.join(args.load, _NON_PERSISTENT)
    tracker = os.path.join(folder, "latest_checkpointed_iteration.txt")
    with contextlib.suppress(OSError), open(tracker, encoding="utf-8") as file:
        if file.read().strip() == str(args.iteration):
            return str(folder)
    return str(args.load)


class DataCheckpoint:
    """One rank's part in saving the data state.

    Args:
        args: Megatron's; `odb_data_state` is set on them.
        exchange: between leaders, for this alone; None on other ranks.
        channel: to the other ranks of the replica, for this alone; None for a replica of one rank.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        exchange: ControlGroup | None,
        channel: HeaderChannel | None,
    ) -> None:
        self._args = args
        self._exchange = exchange
        self._channel = channel
        self._source: DataSource | None = None
        self._identity: Mapping[str, Any] = {}
        self._trained: Progress | None = None
        self._has_warned = False

    def watch(self, source: DataSource, *, identity: Mapping[str, Any]) -> None:
        """Save the state of this feed of training data; leaders call it.

        Args:
            source: the feed of training data.
            identity: of its data; see `data_identity`.
        """
        self._source, self._identity = source, identity

    def note_trained(self) -> None:
        """Keep the loader's state if it is of the last step trained; before a step is fetched.

        A step is handed out and not trained where Megatron's rerun machine saves and exits, and
        while it replays one.
        """
        if self._source is not None:
            progress = self._source.progress
            if progress.snapshot["consumed"] == self._args.consumed_train_samples:
                self._trained = progress

    def stage(self, iteration: int, *, tokens_so_far: int, is_persistent: bool) -> None:
        """Write this replica's file, before Megatron saves; all ranks call it.

        Args:
            iteration: of the checkpoint.
            tokens_so_far: tokens trained by all replicas since the run's start.
            is_persistent: see `saving_folder`.

        Raises:
            RuntimeError: a replica could not write its file.
        """
        text = b""
        if self._exchange is not None:
            folder = saving_folder(self._args, is_persistent=is_persistent)
            path = staged_path(folder, iteration=iteration, replica=self._exchange.replica)
            text = self._stage(path, self._exchange, tokens_so_far=tokens_so_far)
        if self._channel is not None:
            text = self._channel.header(text if self._exchange is not None else None)
        self._args.odb_data_state = text.decode()

    def publish(self, iteration: int, *, is_persistent: bool) -> None:
        """Move this replica's file to its place, after Megatron has begun or ended its save."""
        if self._exchange is None:
            return
        folder = saving_folder(self._args, is_persistent=is_persistent)
        replica = self._exchange.replica
        path = state_path(folder, iteration=iteration, replica=replica)
        staged = staged_path(folder, iteration=iteration, replica=replica)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.replace(staged, path)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"the data state {staged}, written when this save began, is gone: does another run "
                f"save to {folder} too? Give each run a --save folder of its own"
            ) from error
        _remove_empty(os.path.dirname(staged))
        if replica == 0:
            _remove_left_over(folder, before=iteration)

    def _stage(self, path: str, exchange: ControlGroup, *, tokens_so_far: int) -> bytes:
        try:
            self.note_trained()
            assert self._trained is not None, "a checkpoint before any step"
            state: dict[str, Any] = {
                "data": self._identity,
                "tokens_so_far": tokens_so_far,
                "planner": self._trained.state_dict(),
                "bad_records": self._trained.bad_records_state(),
                "source_counts": [one.state_dict() for one in self._trained.source_counts],
            }
            if self._trained.source is not None:
                state["source"] = self._trained.source
                self._warn_once(self._trained.source, replica=exchange.replica)
            data = encode_state(state)
            write_file(path, data)
        except BaseException:
            exchange.exchange(_FAILED + bytes(32))
            raise
        found = exchange.exchange(_OK + hashlib.sha256(data).digest())
        failed = [replica for replica, record in enumerate(found) if record[:1] == _FAILED]
        if failed:
            raise RuntimeError(
                f"replica {failed[0]} could not write its data state beside {path}; its own output "
                "says why"
            )
        return str(Digest.of([record[1:] for record in found])).encode()

    def _warn_once(self, source: Mapping[str, Any], *, replica: int) -> None:
        if not source["has_state"] and not self._has_warned and replica == 0:
            print(
                "odb: WARNING: the train dataset has no state of its own (state_dict() and "
                "load_state_dict()): a run that resumes from this checkpoint cannot go on with its "
                "data",
                flush=True,
            )
            self._has_warned = True


def place_staged(paths: Iterable[tuple[str, str]]) -> None:
    """Move files that a kill left staged, and that this run resumes from, to their places.

    Else a later save that is killed too could find them gone. Harmless where it cannot be done:
    they are found where they are.

    Args:
        paths: of each, where it is staged and its place.
    """
    for staged, path in paths:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(staged, path)
            _remove_empty(os.path.dirname(staged))


def _remove_left_over(folder: str, *, before: int) -> None:
    """Remove what earlier saves staged for checkpoints that do not exist: they were interrupted.

    Files of a checkpoint that exists may be all the data state it has. Nothing is done in other
    folders, nor to later iterations.
    """
    top = os.path.dirname(os.path.dirname(staged_path(folder, iteration=before, replica=0)))
    with contextlib.suppress(OSError):
        for name in os.listdir(top):
            if not name.isdecimal() or int(name) >= before:
                continue
            checkpoint = os.path.dirname(
                os.path.dirname(state_path(folder, iteration=int(name), replica=0))
            )
            if os.path.exists(checkpoint):
                continue
            for file in os.listdir(os.path.join(top, name)):
                if file.startswith("replica-"):
                    os.remove(os.path.join(top, name, file))
            _remove_empty(os.path.join(top, name))


def _remove_empty(folder: str) -> None:
    """Remove a folder of staged files, and the one of all of them, if nothing is in them."""
    for place in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):  # other files are still there
            os.rmdir(place)
