"""Continues a run's data where the loaded checkpoint left it.

Must not keep state of its own. Whatever one leader refuses, all refuse, each with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.item_stream import ItemStream
from odb_megatron.data.source_counts import added_counts
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.data_checkpoint import loaded_folder, place_staged, saving_folder
from odb_megatron.megatron.data_identity import changed_files, check_same_samples, data_identity
from odb_megatron.megatron.data_state import (
    Digest,
    decode_state,
    read_file,
    staged_path,
    state_path,
)
from odb_megatron.plan.elastic import elastic_state
from odb_megatron.plan.policy import PolicyName

__all__ = ["resume_data"]

T = TypeVar("T")

_MESSAGE_BYTES = 1024
_ABSENT = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A state file: its path, digest (`_ABSENT`: there is none), and content where it was read."""

    path: str
    digest: bytes
    data: bytes = b""


def resume_data(
    args: argparse.Namespace,
    config: OdbConfig,
    loader: StepLoader,
    *,
    exchange: ControlGroup,
    saved: str | None,
) -> dict[str, Any] | None:
    """Load the loader's state, if the run resumes and has one; leaders of all replicas call it.

    Under `samples` the data goes on at Megatron's own consumed-samples count, at any data-parallel
    size; under `cost` with the replica's window or, at another size, with what all windows held.

    Args:
        args: Megatron's, after the checkpoint was loaded.
        config: ODB's.
        loader: of the training data.
        exchange: to the other replicas.
        saved: what the checkpoint says of its data state (`Digest`); None for nothing.

    Returns:
        The saved state (see `data_state.encode_state`), or None for a start anew.

    Raises:
        ValueError: the state is missing, incomplete, damaged, or belongs to other data or another
            checkpoint.
    """
    if not args.iteration or args.finetune or args.skip_train:
        return None
    is_iterable = isinstance(loader.stream, ItemStream)
    if saved is None and is_iterable:
        raise ValueError(_no_place("no data state in the checkpoint"))
    if saved is None:
        _together(exchange, lambda: _refuse_unknown(args, replica=exchange.replica))
        _tell(args, "no data state in the checkpoint")
        return None
    digest = _together(exchange, lambda: Digest.parse(saved))
    replicas = range(digest.num_replicas)
    is_same_size = len(replicas) == exchange.num_replicas
    options = [
        _found(
            [path_of(loaded_folder(args), iteration=args.iteration, replica=r) for r in replicas],
            exchange=exchange,
            is_same_size=is_same_size,
        )
        for path_of in (state_path, staged_path)
    ]
    files = _together(exchange, lambda: _chosen(options, digest))
    if files is None:
        if is_iterable:
            raise ValueError(_no_place(f"data state {options[0][0].path} is missing"))
        if config.policy is PolicyName.COST and config.resume_strict:
            raise ValueError(_gone(options[0][0].path))
        is_cost = config.policy is PolicyName.COST
        after = ": samples held back then are lost, others come twice" if is_cost else ""
        _tell(args, "warning: the data state is gone from the checkpoint", after)
        return None
    own = files[exchange.replica if is_same_size else 0]
    state = _together(exchange, lambda: decode_state(own.data, own.path))
    is_changed = _together(exchange, lambda: _check(args, config, loader, state, own.path))
    is_samples = config.policy is PolicyName.SAMPLES
    goes_on = is_same_size and (is_samples or not is_changed)  # each replica with its own
    states = [state] if goes_on else _together(exchange, lambda: _decoded(files))
    loader.bad_records.restore(
        state["bad_records"]["num"],
        [position for one in states for position in one["bad_records"]["positions"]],
        step=0 if is_samples and not is_iterable else state["planner"]["step"],
    )
    share = slice(exchange.replica, None, exchange.num_replicas)
    counted = states if goes_on else states[share]
    if counted:  # else there are more replicas than were saved
        loader.count_from(added_counts([one["source_counts"] for one in counted]))
    if _is_own(args):
        placed = [file.path for file in options[0]]
        staged = zip([file.path for file in files], placed, strict=True)
        place_staged([(old, new) for old, new in list(staged)[share] if old != new])
    if is_iterable and is_same_size:
        source = state.get("source")
        _together(exchange, lambda: loader.load_state_dict(state["planner"], source=source))
    elif is_samples and not is_iterable:
        loader.load_cost(state["planner"])
    elif goes_on:
        _together(exchange, lambda: loader.load_state_dict(state["planner"]))
    else:
        _together(exchange, lambda: _load_elastic(loader, states, replica=exchange.replica))
    return state


def _is_own(args: argparse.Namespace) -> bool:
    """Whether the run saves where it was loaded from: another run's files are left alone."""
    if not args.save:
        return False
    loaded = os.path.realpath(loaded_folder(args))
    own = [saving_folder(args, is_persistent=persistent) for persistent in (True, False)]
    return loaded in map(os.path.realpath, own)


def _together(exchange: ControlGroup, function: Callable[[], T]) -> T:
    """Return what `function` does, or raise on all replicas what it raises on one."""
    message, failure, result = "", None, None
    try:
        result = function()
    except ValueError as error:
        message, failure = str(error) or type(error).__name__, error
    sent = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    found = exchange.exchange(sent)
    if failure is not None:
        raise failure
    for replica, text in enumerate(part.rstrip(b"\0").decode("utf-8", "ignore") for part in found):
        if text:
            raise ValueError(f"replica {replica} cannot resume its data: {text}")
    return result  # type: ignore[return-value]


def _found(paths: Sequence[str], *, exchange: ControlGroup, is_same_size: bool) -> list[_File]:
    """Return the files of all saved replicas: all read or, at the same size, only the own one."""
    if not is_same_size:
        return _together(exchange, lambda: [_read(path) for path in paths])
    own = _together(exchange, lambda: _read(paths[exchange.replica]))
    digests = exchange.exchange(own.digest)
    files = [_File(path=path, digest=one) for path, one in zip(paths, digests, strict=True)]
    files[exchange.replica] = own
    return files


def _read(path: str) -> _File:
    data = read_file(path)
    if data is None:
        return _File(path=path, digest=_ABSENT)
    return _File(path=path, digest=hashlib.sha256(data).digest(), data=data)


def _chosen(options: Sequence[Sequence[_File]], digest: Digest) -> list[_File] | None:
    """Return the files that the checkpoint was saved with, None where none is left.

    Args:
        options: files in their place, and files left staged by a kill; equal on all replicas as
            far as digests go.
        digest: what the checkpoint says.

    Raises:
        ValueError: a file is missing, or they are of another save.
    """
    placed, staged = options
    newest = [
        there if new.digest == _ABSENT else new for there, new in zip(placed, staged, strict=True)
    ]
    for files in (placed, newest):
        if Digest.of([file.digest for file in files]) == digest:
            return list(files)
    missing = [file.path for file in newest if file.digest == _ABSENT]
    if len(missing) == len(newest):
        return None
    if missing:
        raise ValueError(
            f"data state {missing[0]} is missing and those of other replicas are not: restore it, "
            "or start the data anew (--finetune)"
        )
    seen = Digest.of([file.digest for file in newest])
    raise ValueError(
        f"the data states beside {newest[0].path} are not those that the checkpoint was saved "
        f"with (digest {seen}, expected {digest}): files of another save are among them, or one "
        "was changed; restore them, or start the data anew (--finetune)"
    )


def _check(
    args: argparse.Namespace,
    config: OdbConfig,
    loader: StepLoader,
    state: dict[str, Any],
    path: str,
) -> bool:
    """Hold a state against this run; return whether data files have changed, which is allowed.

    Raises:
        ValueError: the state is of another policy, other data or another step.
    """
    planner = state["planner"]
    if planner["policy"] != config.policy.value:
        raise ValueError(
            f"data state was saved with policy={planner['policy']}, this run has "
            f"{config.policy.value}: resume with the same setting, or start the data anew "
            "(--finetune)"
        )
    num_places = state["data"]["blend"][0]
    current = data_identity(args, loader.stream, num_places=num_places)
    check_same_samples(state["data"], current)
    if planner["consumed"] != args.consumed_train_samples:
        raise ValueError(
            f"data state {path} was saved after {planner['consumed']} samples, the checkpoint "
            f"after {args.consumed_train_samples}: restore the file that belongs to it"
        )
    changed = changed_files(state["data"], current)
    if changed and config.resume_strict:
        raise ValueError(
            f"data changed since the checkpoint was saved: {changed}. Restore it, or pass "
            "--no-odb-resume-strict to go on with every record number that is left, whatever the "
            "records now hold"
        )
    if changed and args.rank == 0:
        print(f"odb: WARNING: data changed since the checkpoint was saved: {changed}", flush=True)
    return bool(changed)


def _load_elastic(loader: StepLoader, states: Sequence[Mapping[str, Any]], *, replica: int) -> None:
    """Deal what all replicas of the saved run held to those of this one."""
    planners = [state["planner"] for state in states]
    loader.load_state_dict(elastic_state(planners, loader.config, replica=replica))


def _decoded(files: Sequence[_File]) -> list[dict[str, Any]]:
    """Return the states of all replicas of the saved run."""
    states = []
    for file in files:
        found = file if file.data else _read(file.path)
        if found.digest != file.digest:
            raise ValueError(f"data state {file.path} changes while it is read: try again")
        states.append(decode_state(found.data, found.path))
    return states


def _refuse_unknown(args: argparse.Namespace, *, replica: int) -> None:
    """Refuse files that the checkpoint knows nothing of."""
    path = state_path(loaded_folder(args), iteration=args.iteration, replica=replica)
    if read_file(path) is not None:
        raise ValueError(
            f"data state {path} exists, but its checkpoint was saved without one or by an older "
            "version of odb_megatron: resume with that version; or delete the file, to go on at "
            f"sample {args.consumed_train_samples} of the stream; or start the data anew "
            "(--finetune)"
        )


def _no_place(what: str) -> str:
    return (
        f"{what}, and an iterable source cannot be continued without: restore it, or start the "
        "data anew (--finetune)"
    )


def _gone(path: str) -> str:
    return (
        f"data state {path} and those of all other replicas are missing, and the checkpoint was "
        "saved with them: restore them; or pass --no-odb-resume-strict to go on without what the "
        "windows held (samples are left out, others come twice); or start the data anew "
        "(--finetune)"
    )


def _tell(args: argparse.Namespace, what: str, after: str = "") -> None:
    if args.rank == 0:
        print(
            f"odb: {what} of iteration {args.iteration}; the data goes on at sample "
            f"{args.consumed_train_samples} of the stream{after}",
            flush=True,
        )
