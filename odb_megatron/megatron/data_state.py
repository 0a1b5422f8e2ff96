"""The data loader's state beside Megatron's checkpoint: one small JSON file per replica.

Must not hold payloads or pickles. Written atomically into the iteration's directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["read_state", "state_path", "write_state"]

_KEYS = {"data", "planner", "tokens_so_far"}


def state_path(folder: str, *, iteration: int, replica: int) -> str:
    """Path of a replica's state for a checkpoint of `iteration` under `--save` or `--load`."""
    return os.path.join(folder, f"iter_{iteration:07d}", "odb", f"replica-{replica:05d}.json")


def write_state(path: str, state: Mapping[str, Any]) -> None:
    """Write `state`; a reader sees all of it or none.

    Args:
        path: from `state_path`.
        state: `planner` (see `ReplicaPlanner.state_dict`), `tokens_so_far`, and `data` (see
            `SampleStream.data_digest`).
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read_state(path: str) -> dict[str, Any] | None:
    """Return the state, or None where no such file exists.

    Raises:
        ValueError: the file is no JSON object with the keys that `write_state` takes.
    """
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"data state {path} is not JSON ({error}): restore or delete it"
        ) from error
    if not isinstance(state, dict) or set(state) != _KEYS:
        seen = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"data state {path} holds {seen}; expected {sorted(_KEYS)}: it was written by another "
            "version of odb_megatron"
        )
    return state
