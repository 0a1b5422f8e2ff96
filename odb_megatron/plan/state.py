"""A planner's saved state: what it must look like and match, and the window it is rebuilt from.

Pure. A state comes from a file, so nothing in it is taken on trust: types and ranges are checked
before a value is used. Another number of replicas is `elastic`'s part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.window import SampleWindow

__all__ = [
    "NOT_CALIBRATED",
    "STATE_VERSION",
    "begin_state",
    "check_state",
    "check_values",
    "plain_state",
    "restored_window",
    "resume_point",
    "saved_cost",
    "window_row",
]

STATE_VERSION = 4

NOT_CALIBRATED = -1
"""Stands for the picoseconds per token of a cost model that no calibration has decided."""

_SAME = ("policy", "num_replicas", "replica", "assignment")

_KEYS = frozenset(
    (
        *("version", *_SAME),
        *("total", "global_batch_size", "start", "step", "consumed", "deadline", "cost"),
        *("knowledge", "exchanges", "cursor", "upcoming", "num_emitted", "num_recorded", "window"),
    )
)

_TEXTS = ("policy", "assignment")
_COUNTS = ("num_replicas", "replica", "total", "global_batch_size", "step", "consumed", "cursor")
_MOST = 1 << 62  # a number in a state; sums of two still fit 64 bits
_LEAST = {"start": -_MOST, "deadline": -1, "exchanges": -1}  # others are at least 0
_LENGTHS = {"cost": 4, "knowledge": 64}  # of knowledge: at most; its policy knows how many


def begin_state(config: PlanConfig, *, replica: int) -> dict[str, object]:
    """Return the part of a state that says of which version, run and replica it is."""
    return {
        "version": STATE_VERSION,
        "policy": config.policy.value,
        "num_replicas": config.num_replicas,
        "replica": replica,
        "assignment": config.assignment_in_force.value,
        "total": config.total,
        "global_batch_size": config.global_batch_size,
    }


def check_values(state: Any) -> None:
    """Raise unless `state` is one of `ReplicaPlanner.state_dict`, as far as it alone can tell.

    Args:
        state: read from a file.

    Raises:
        ValueError: unknown or missing keys, another version, a value of another type or out of
            range, or positions that contradict each other.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"data state is of type {type(state).__name__}; expected an object: restore the file"
        )
    version = state.get("version")
    if "version" in state and (type(version) is not int or version != STATE_VERSION):
        raise ValueError(
            f"data state was saved with version={str(version)[:40]}, this run has {STATE_VERSION}: "
            "resume with the version of odb_megatron that saved it, or start the data anew "
            "(--finetune)"
        )
    if set(state) != _KEYS:
        raise ValueError(
            f"data state has the keys {str(sorted(map(str, state)))[:400]}; expected "
            f"{sorted(_KEYS)}: it was written by another version of odb_megatron"
        )
    for name in _TEXTS:
        if not isinstance(state[name], str):
            raise _wrong(name, state[name], "a name")
    for name in (*_COUNTS, *_LEAST, "num_emitted", "num_recorded"):
        _check_number(name, state[name], least=_LEAST.get(name, 0))
    for name, length in _LENGTHS.items():
        _check_numbers(name, state[name], least=-_MOST)
        if len(state[name]) > length or (name == "cost" and len(state[name]) < length):
            raise _wrong(name, state[name], f"a list of {length} integers")
    _check_numbers("upcoming", state["upcoming"], least=0)
    if not isinstance(state["window"], list):
        raise _wrong("window", state["window"], "a list")
    for row in state["window"]:
        _check_numbers("window", row, least=-1)
        if len(row) != 3 or min(row[:2]) < 0:
            raise _wrong("window", row, "lists of position, arrival and due step")
    _check_positions(state)


def check_state(state: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise unless a saved state fits this planner.

    Args:
        state: the saved one.
        current: the planner's own.

    Raises:
        ValueError: see `check_values`; another policy, topology, replica or way of assigning
            positions; a run that is shorter than what has been drawn.
    """
    check_values(state)
    for name in _SAME:
        if state[name] != current[name]:
            raise ValueError(
                f"data state was saved with {name}={state[name]}, this run has "
                f"{current[name]}: resume with the same setting, or start the data anew "
                "(--finetune)"
            )
    if len(state["knowledge"]) != len(current["knowledge"]):
        expected = f"a list of {len(current['knowledge'])} integers"
        raise _wrong("knowledge", state["knowledge"], expected)
    total, is_online = current["total"], state["assignment"] == Assignment.ONLINE.value
    drawn = state["cursor"] if is_online else state["total"]
    if state["policy"] == PolicyName.COST.value and state["consumed"] < total < drawn:
        raise ValueError(
            f"the run has {total} samples, but the data state has {drawn} drawn already: ask for "
            "at least as many, or start the data anew (--finetune)"
        )


def _check_positions(state: Mapping[str, Any]) -> None:
    """Raise unless each position is held once, and (online) all up to the cursor add up."""
    held = [row[0] for row in state["window"]] + state["upcoming"]
    arrivals = [row[1] for row in state["window"]]
    if len(set(held)) < len(held) or arrivals != sorted(set(arrivals)):
        raise ValueError(
            "data state holds a position or an arrival twice, or out of order: the file was "
            "changed; restore it"
        )
    is_online = state["assignment"] == Assignment.ONLINE.value
    last = state["cursor"] if is_online else state["total"]
    if max(held, default=-1) >= last:
        raise ValueError(
            f"data state holds position {max(held)}, of {last} that were drawn: the file was "
            "changed; restore it"
        )


def _check_numbers(name: str, values: Any, *, least: int) -> None:
    if not isinstance(values, list):
        raise _wrong(name, values, "a list of integers")
    for value in values:
        _check_number(name, value, least=least)


def _check_number(name: str, value: Any, *, least: int) -> None:
    if type(value) is not int or not least <= value < _MOST:  # a bool is none
        raise _wrong(name, value, f"an integer of {least} or more, below 2**62")


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    seen = repr(value)
    seen = seen if len(seen) < 80 else f"{seen[:76]} ..."
    return ValueError(
        f"data state has {name} {seen}; expected {expected}: the file is damaged, restore it"
    )


def plain_state(snapshot: Mapping[str, Any]) -> dict[str, object]:
    """Return a planner's snapshot as plain ints and lists."""
    return {**snapshot, "window": snapshot["window"].tolist()}


def saved_cost(state: Mapping[str, Any]) -> tuple[CostModel, int]:
    """Return a state's cost model, and picoseconds per token or `NOT_CALIBRATED`."""
    quadratic, fixed, per_patch, linear_ps = state["cost"]
    return CostModel(quadratic=quadratic, fixed=fixed, per_patch=per_patch), linear_ps


def resume_point(state: Mapping[str, Any], config: PlanConfig) -> tuple[int, int]:
    """Return the start and the deadline (-1 for none) with which a run goes on.

    A run that goes on with another batch size does not make up for steps of the old one; with
    another length or batch size the drain has a deadline of its own.

    Args:
        state: the saved one.
        config: of the run that goes on.
    """
    start, deadline = state["start"], state["deadline"]
    is_same_batch = state["global_batch_size"] == config.global_batch_size
    if not is_same_batch:
        start = state["consumed"] - state["step"] * config.global_batch_size
    if not is_same_batch or state["total"] != config.total:
        deadline = -1
    return start, deadline


def restored_window(
    config: PlanConfig, state: Mapping[str, Any], fetched: Mapping[int, tuple[int, ...]]
) -> SampleWindow:
    """Return the window of a saved state.

    Args:
        config: with the cost model of the state.
        state: the saved one.
        fetched: see `ReplicaPlanner.load_state_dict`.

    Raises:
        ValueError: a sample is no longer usable.
    """
    window = SampleWindow()
    for position, arrival, due in state["window"]:
        num_tokens, num_loss_tokens, truncated, *more = fetched[position]
        if num_tokens == 0:
            raise ValueError(
                f"position {position} was in the window when the state was saved and can no "
                "longer be used: the data or its policies have changed"
            )
        sample = (num_tokens, num_loss_tokens, bool(truncated), *more, 0, 0)[:5]
        window.append(window_row(config, position, arrival, due, sample))
    return window


def window_row(
    config: PlanConfig, position: int, arrival: int, due: int, sample: tuple[int, ...]
) -> tuple[int, ...]:
    """Return a sample as a row of the window, in the order of `window.Column`.

    Args:
        config: padding rule and cost model.
        position: its stream position.
        arrival: its rank among the replica's samples.
        due: see `window.Column`.
        sample: its tokens, loss tokens, whether it was truncated, patches and payload bytes.

    Raises:
        ValueError: a cost beyond the records.
    """
    num_tokens, num_loss_tokens, truncated, num_patches, num_bytes = sample
    padded = config.size_rule.padded(num_tokens)
    cost = config.cost.sample(padded, num_patches=num_patches)
    return (
        position,
        arrival,
        num_tokens,
        padded,
        num_loss_tokens,
        num_patches,
        cost,
        truncated,
        due,
        num_bytes,
    )
