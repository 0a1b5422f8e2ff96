"""A planner's saved state: what it must match, and the window's rows it is rebuilt from.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import padded_length
from odb_megatron.plan.window import SampleWindow

__all__ = [
    "NOT_CALIBRATED",
    "STATE_VERSION",
    "check_state",
    "plain_state",
    "restored_window",
    "saved_cost",
    "window_row",
]

STATE_VERSION = 3

NOT_CALIBRATED = -1
"""Stands for the picoseconds per token of a cost model that no calibration has decided."""

_SAME = ("version", "policy", "num_replicas", "replica", "assignment")


def check_state(state: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise unless a saved state fits this planner.

    Args:
        state: the saved one.
        current: the planner's own.

    Raises:
        ValueError: unknown or missing keys, another version, policy, topology, replica or way of
            assigning positions.
    """
    if set(state) != set(current):
        raise ValueError(
            f"data state has the keys {sorted(state)}; expected {sorted(current)}: it was "
            "written by another version of odb_megatron"
        )
    for name in _SAME:
        if state[name] != current[name]:
            raise ValueError(
                f"data state was saved with {name}={state[name]}, this run has "
                f"{current[name]}: resume with the same setting, or start the data anew "
                "(--finetune)"
            )


def plain_state(snapshot: Mapping[str, Any]) -> dict[str, object]:
    """Return a planner's snapshot as plain ints and lists."""
    return {**snapshot, "window": snapshot["window"].tolist()}


def saved_cost(state: Mapping[str, Any]) -> tuple[CostModel, int]:
    """Return a state's cost model, and picoseconds per token or `NOT_CALIBRATED`."""
    quadratic, fixed, per_patch, linear_ps = state["cost"]
    return CostModel(quadratic=quadratic, fixed=fixed, per_patch=per_patch), linear_ps


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
        config: padding multiple and cost model.
        position: its stream position.
        arrival: its rank among the replica's samples.
        due: see `window.Column`.
        sample: its tokens, loss tokens, whether it was truncated, patches and payload bytes.

    Raises:
        ValueError: a cost beyond the records.
    """
    num_tokens, num_loss_tokens, truncated, num_patches, num_bytes = sample
    padded = padded_length(num_tokens, config.multiple)
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
