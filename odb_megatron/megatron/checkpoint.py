"""What a checkpoint has to hold for a run's data to go on: a text among Megatron's arguments.

They are part of the common state of every checkpoint format, so no checkpoint is without it. Of
map-style data the consumed samples are all there is; the text tells which data they were counted
in. Iterable sources add their own states.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from odb_megatron.comm.groups import ReplicaGroup, SourceGroup
from odb_megatron.data.feed import StepFeed
from odb_megatron.data.iterable import ItemStream
from odb_megatron.data.loop import Progress
from odb_megatron.data.records import file_fingerprint
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.errors import SettingError

__all__ = ["DataCheckpoint", "DataState", "gather_json", "restore", "saved_text"]

T = TypeVar("T")

_VERSION = 2
_MAX_COUNT = 1 << 62
_MAX_BLEND_PLACES = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ANEW = "restore it, or start the data anew ({finetune})"


def gather_json(group: SourceGroup, value: Any) -> list[Any]:
    """Return the values of all members, by two gathers of records of one size."""
    data = json.dumps(value, sort_keys=True).encode()
    sizes = group.gather_all(len(data).to_bytes(8, "little"))
    most = max(int.from_bytes(size, "little") for size in sizes)
    return [json.loads(one) for one in group.gather_all(data.ljust(most))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """What is saved.

    Attributes:
        data: see `data_identity`.
        consumed: samples consumed since the run's start.
        num_bad: bad records of all replicas since then.
        sources: states of the iterators, by replica; empty for map-style data.
        version: of this format.
    """

    data: Mapping[str, Any]
    consumed: int
    num_bad: int
    sources: Sequence[Any] = ()
    version: int = _VERSION

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: Any) -> DataState:
        """Inverse of `to_text`; the text comes from a file and is not trusted.

        Raises:
            ValueError: something else.
        """
        try:
            state = cls(**json.loads(text))
            kinds = [type(value) for value in (state.data, state.sources)]
            counts = [state.consumed, state.num_bad, state.version]
            is_count = all(type(one) is int and 0 <= one < _MAX_COUNT for one in counts)
            if kinds != [dict, list] or not is_count or state.version != _VERSION:
                raise ValueError(f"counts and version {counts}, {kinds[0].__name__} of data")
        except (ValueError, TypeError, RecursionError) as error:
            raise SettingError(
                "the checkpoint's data state is {text!r} ({error}): it is damaged, or was written "
                f"by another version of odb_megatron; {_ANEW}",
                text=str(text)[:80],
                error=str(error)[:200],
            ) from error
        return state


def data_identity(
    args: argparse.Namespace,
    stream: SampleStream | ItemStream,
    *,
    num_places: int = _MAX_BLEND_PLACES,
) -> dict[str, Any]:
    """Return the sources of a stream, the beginning of their blend and the tokenizer.

    The tokenizer is named by its type and the digest of its files, wherever they lie, and of the
    chat templates that were chosen, with their arguments.

    Args:
        args: Megatron's.
        stream: of the training data.
        num_places: places of the blend to look at; as many as the identity compared with.
    """
    folder = args.tokenizer_model or ""
    paths = [folder, *(os.path.join(folder, name) for name in _TOKENIZER_FILES)]
    parts = [file_fingerprint(path) for path in paths if os.path.isfile(path)]
    parts += [getattr(args, "odb_templates", "")]
    files = hashlib.sha256("".join(parts).encode()).hexdigest()[:12] if any(parts) else folder
    return {
        "sources": stream.sources(),
        "blend": list(stream.blend_digest(num_places)),
        "tokenizer": f"{args.tokenizer_type} {files}".strip(),
    }


def _require_same_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise unless stream positions name the same records as when the state was saved.

    Raises:
        ValueError: with what differs.
    """

    def differing(name: str, what: str) -> list[str]:
        return [
            f"{what.format(new['path'])}: {_shown(old[name])} then, {_shown(new[name])} now"
            for old, new in pairs
            if old[name] != new[name] and (name != "ends" or old["seed"] == new["seed"])
        ]

    then, now = saved["sources"], current["sources"]
    pairs = list(zip(then, now, strict=False))
    if len(then) != len(now):
        moved = [f"{len(then)} sources then, {len(now)} now"]
    elif saved["blend"] != current["blend"] and current["blend"][0] >= saved["blend"][0]:
        moved = ["the weights of the blend have changed"]
    else:
        moved = differing("num_records", "records of {}") + differing("seed", "seed of {}")
        moved += differing("ends", "split of {}, by its first and last record")
    if moved:
        raise SettingError(
            "the data state was saved with other data ({found}), so samples would be lost or "
            "repeated: restore files, their order, {split} and {seed} (of an iterable data set its "
            "parts), or start the data anew ({finetune})",
            found=_some(moved),
        )
    changed = differing("fingerprint", "fingerprint of {}")
    if saved["tokenizer"] != current["tokenizer"]:
        changed.append(f"tokenizer: {saved['tokenizer']} then, {current['tokenizer']} now")
    if changed:
        raise SettingError(
            "data changed since the checkpoint was saved ({found}): restore it, or start the data "
            "anew from its weights ({finetune})",
            found=_some(changed),
        )


def _shown(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)[:12]


def _some(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


class DataCheckpoint:
    """One rank's part in saving the data state.

    Args:
        args: Megatron's; `odb_data_state` is set on them.
        group: of the source ranks, for this alone; None on other ranks.
        channel: to the other ranks of the replica, for this alone; None for a replica of one rank.
            All ranks save the same text: Megatron compares what they save.
    """

    def __init__(
        self, args: argparse.Namespace, *, group: SourceGroup | None, channel: ReplicaGroup | None
    ) -> None:
        self._args, self._group, self._channel = args, group, channel
        self._feed: StepFeed | None = None
        self._identity: Mapping[str, Any] = {}
        self._trained: Progress | None = None
        self._has_warned = False

    def watch(self, feed: StepFeed, *, identity: Mapping[str, Any]) -> None:
        """Save the state of this feed of training data; source ranks call it.

        Args:
            feed: of the training data.
            identity: of its data; see `data_identity`.
        """
        self._feed, self._identity = feed, identity

    def note_trained(self) -> None:
        """Keep the loader's progress if it is of the last step trained; before a step is fetched.

        A step is handed out and not trained where Megatron's rerun machine saves and exits, and
        while it replays one.
        """
        if self._feed is not None:
            progress = self._feed.progress
            if progress.consumed == self._args.consumed_train_samples:
                self._trained = progress

    def state(self) -> DataState:
        """Return this replica's state, with its own iterator's alone; source ranks call it."""
        self.note_trained()
        assert self._trained is not None, "a checkpoint before any step"
        source = self._trained.source
        if source is not None and not source["has_state"] and not self._has_warned:
            self._has_warned = True
            if self._group is None or self._group.replica == 0:
                print(
                    "odb: WARNING: the train dataset has no state of its own (state_dict() and "
                    "load_state_dict()): a run that resumes from this checkpoint cannot go on with "
                    "its data",
                    flush=True,
                )
        return DataState(
            data=self._identity,
            consumed=self._trained.consumed,
            num_bad=self._trained.num_bad,
            sources=[] if source is None else [source],
        )

    def save(self) -> None:
        """Put the state into Megatron's arguments, before it saves; all ranks call it."""
        text = None
        if self._group is not None:
            state = self.state()
            if state.sources:
                found = gather_json(self._group, state.sources[0])
                state = replace(state, sources=found)
            text = state.to_text().encode()
        if self._channel is not None:
            text = self._channel.header(text)
        self._args.odb_data_state = (text or b"").decode()


def saved_text(args: argparse.Namespace) -> str | None:
    """Return what the checkpoint holds that Megatron has loaded; None for nothing.

    Every rank must call it: Megatron compares what they find (checkpointing.py `read_metadata`).
    """
    from megatron.training.checkpointing import load_args_from_checkpoint

    found = load_args_from_checkpoint(copy.copy(args))
    saved = found[1] if isinstance(found, tuple) else None
    text: str | None = getattr(saved, "odb_data_state", None)
    return text


def restore(
    args: argparse.Namespace, loader: StepLoader, *, group: SourceGroup, text: str | None
) -> bool:
    """Let the loader go on where a checkpoint left the data; source ranks of all replicas call it.

    Args:
        args: Megatron's, after the checkpoint was loaded.
        loader: of the training data.
        group: to the other replicas.
        text: see `saved_text`.

    Returns:
        Whether there was a state.

    Raises:
        ValueError: on all replicas: the state is missing, damaged, or belongs to other data.
    """
    stream = loader.stream
    if text is None:
        if isinstance(stream, ItemStream):
            raise SettingError(
                "no data state in the checkpoint, and an iterable source cannot be continued "
                f"without: {_ANEW}"
            )
        if args.rank == 0:
            print(
                f"odb: no data state in the checkpoint of iteration {args.iteration}; the data "
                f"goes on at sample {args.consumed_train_samples} of the stream",
                flush=True,
            )
        return False
    source = _together(group, lambda: _restored(args, loader, text))
    if isinstance(stream, ItemStream):  # may be at its end, which the consumed samples do not tell
        has_ended = source["ended"] and source["passes"] == stream.passes
        loader.is_over = all(map(any, group.gather_all(bytes([has_ended]))))
    return True


def _restored(args: argparse.Namespace, loader: StepLoader, text: str) -> Any:
    """Return the state of this replica's iterator."""
    state = DataState.parse(text)
    try:
        current = data_identity(args, loader.stream, num_places=state.data["blend"][0])
        _require_same_data(state.data, current)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise SettingError(
            f"the checkpoint's data state is damaged ({{error}}): {_ANEW}",
            error=f"{type(error).__name__}: {error}",
        ) from error
    if state.consumed != args.consumed_train_samples:
        raise ValueError(
            f"the data state was saved after {state.consumed} samples, the checkpoint after "
            f"{args.consumed_train_samples}: one of them was changed; restore it"
        )
    source, num = None, loader.config.num_replicas
    if isinstance(loader.stream, ItemStream):
        source = loader.stream.own_state(state.sources, replica=loader.replica, num_replicas=num)
    loader.restore(Progress(consumed=state.consumed, num_bad=state.num_bad, source=source))
    return source


def _together(group: SourceGroup, function: Callable[[], T]) -> T:
    """Return what `function` does, or raise on all replicas what it raises on one."""
    failure = None
    try:
        result = function()
    except ValueError as error:
        failure = error
    texts = gather_json(group, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for replica, text in enumerate(texts):
        if text is not None:
            raise ValueError(f"replica {replica} cannot resume its data: {text}")
    return result
