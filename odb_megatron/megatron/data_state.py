"""The data loader's state beside Megatron's checkpoint: one small JSON file per replica.

Must not hold payloads or pickles, and nothing that is read is evaluated or taken on trust. Files
are written whole or not at all. They are *staged* before Megatron begins to write the checkpoint
and moved into its iteration's directory afterwards: Megatron takes a directory that is not empty
for a broken checkpoint, and counts it as the latest when it deletes old ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odb_megatron.data.bad_records import check_bad_records
from odb_megatron.data.source_counts import check_source_counts
from odb_megatron.plan.state import check_values

__all__ = [
    "MAX_BLEND_PLACES",
    "MAX_STATE_BYTES",
    "Digest",
    "decode_state",
    "encode_state",
    "read_file",
    "staged_path",
    "state_path",
    "write_file",
]

MAX_STATE_BYTES = 1 << 26
"""Largest state file that is read: a window of 65536 samples takes 2 MiB."""

MAX_BLEND_PLACES = 4096
"""Places of a blend that a state compares, at most."""

_KEYS = {"bad_records", "data", "planner", "source_counts", "tokens_so_far"}
_SOURCE = "source"  # of an iterable source only
_DATA_KEYS = {"blend", "sources", "tokenizer"}
_SOURCE_KEYS = {"path", "fingerprint", "num_records", "seed", "ends"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What a checkpoint knows of the data state saved with it.

    Attributes:
        num_replicas: files it has.
        value: digest of all of them, in replica order.
    """

    num_replicas: int
    value: str

    @classmethod
    def of(cls, digests: Sequence[bytes]) -> Digest:
        """Return the digest of files whose own SHA-256 digests are given."""
        return cls(
            num_replicas=len(digests), value=hashlib.sha256(b"".join(digests)).hexdigest()[:32]
        )

    @classmethod
    def parse(cls, text: Any) -> Digest:
        """Inverse of `str()`.

        Raises:
            ValueError: something else.
        """
        count, _, value = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (count.isascii() and count.isdigit() and len(count) < 6 and len(value) == 32):
            raise ValueError(
                f"the checkpoint's odb_data_state is {str(text)[:80]!r}; expected COUNT:DIGEST: it "
                "was written by another version of odb_megatron; start the data anew (--finetune)"
            )
        return cls(num_replicas=int(count), value=value)

    def __str__(self) -> str:
        return f"{self.num_replicas}:{self.value}"


def state_path(folder: str, *, iteration: int, replica: int) -> str:
    """Path of a replica's state for a checkpoint of `iteration` in a checkpoint folder."""
    return os.path.join(folder, f"iter_{iteration:07d}", "odb", _name(replica))


def staged_path(folder: str, *, iteration: int, replica: int) -> str:
    """Path of the same file before Megatron has written the checkpoint."""
    return os.path.join(folder, "odb-staged", f"{iteration:07d}", _name(replica))


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Return the file's content.

    Args:
        state: `planner` (see `ReplicaPlanner.state_dict`), `tokens_so_far`, `bad_records` (see
            `Progress.bad_records_state`), `source_counts` (see `SourceCounts`), `data` (see
            `data_identity`), and `source` (see `ReplicaItems.state`) of an iterable source.
    """
    return json.dumps(dict(state), sort_keys=True).encode()


def decode_state(data: bytes, path: str) -> dict[str, Any]:
    """Return the state that a file holds.

    Args:
        data: its content.
        path: named in errors.

    Raises:
        ValueError: no JSON, or not what `encode_state` takes.
    """
    try:
        state = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"data state {path} is not JSON ({error}): restore it, or start the data anew "
            "(--finetune)"
        ) from error
    if not isinstance(state, dict) or set(state) - {_SOURCE} != _KEYS:
        seen = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"data state {path} holds {str(seen)[:200]}; expected {sorted(_KEYS)}: it was written "
            "by another version of odb_megatron; resume with that, or start the data anew "
            "(--finetune)"
        )
    try:
        check_values(state["planner"])
        check_bad_records(state["bad_records"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tokens = state["tokens_so_far"]
    wrong = _wrong_in_identity(state["data"])
    if type(tokens) is not int or not 0 <= tokens < 1 << 62:
        wrong = "tokens_so_far"
    if wrong:
        raise ValueError(
            f"data state {path} has a damaged {wrong} entry: restore it, or start the data anew "
            "(--finetune)"
        )
    try:
        check_source_counts(state["source_counts"], num_sources=len(state["data"]["sources"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return state


def write_file(path: str, data: bytes) -> None:
    """Write a file; a reader sees all of it or none."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read_file(path: str) -> bytes | None:
    """Return a file's content, or None where there is none.

    Raises:
        ValueError: it is larger than `MAX_STATE_BYTES`, no regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is no regular file")
        with open(path, "rb") as file:
            data = file.read(MAX_STATE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(
            f"data state {path} cannot be read ({error}): restore it, or start the data anew "
            "(--finetune)"
        ) from error
    if len(data) > MAX_STATE_BYTES:
        raise ValueError(
            f"data state {path} is larger than {MAX_STATE_BYTES} bytes: it is none; restore it, or "
            "start the data anew (--finetune)"
        )
    return data


def _name(replica: int) -> str:
    return f"replica-{replica:05d}.json"


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _wrong_in_identity(data: Any) -> str:
    """Return which entry of `data` is not what `data_identity` gives; "" for none."""
    if not isinstance(data, dict) or set(data) != _DATA_KEYS:
        return "data"
    if not isinstance(data["tokenizer"], str):
        return "data.tokenizer"
    blend = data["blend"]
    if not isinstance(blend, list) or [type(value) for value in blend] != [int, str]:
        return "data.blend"
    if not 0 <= blend[0] <= MAX_BLEND_PLACES:
        return "data.blend"
    if not isinstance(data["sources"], list):
        return "data.sources"
    for at, part in enumerate(data["sources"]):
        name = _wrong_in_source(part)
        if name is not None:
            return f"data.sources[{at}]{name}"
    return ""


def _wrong_in_source(part: Any) -> str | None:
    """Return what is wrong, "" for the whole; None for nothing."""
    if not isinstance(part, dict) or set(part) != _SOURCE_KEYS:
        return ""
    for name in ("path", "fingerprint"):
        if not isinstance(part[name], str):
            return f".{name}"
    ends = part["ends"]
    if not isinstance(ends, list) or len(ends) != 2:
        return ".ends"
    for name, values in (
        ("num_records", [part["num_records"]]),
        ("seed", [part["seed"]]),
        ("ends", ends),
    ):
        if not all(type(value) is int and abs(value) < 1 << 62 for value in values):
            return f".{name}"
    return None
