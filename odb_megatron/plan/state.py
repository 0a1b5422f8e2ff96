"""A planner's saved state: what it must match, and the window's rows it is rebuilt from.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.padding import padded_length

__all__ = ["STATE_VERSION", "check_state", "window_row"]

STATE_VERSION = 3

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


def window_row(
    config: PlanConfig, position: int, arrival: int, due: int, sample: tuple[int, ...]
) -> tuple[int, ...]:
    """Return a sample as a row of the window, in the order of `window.Column`.

    Args:
        config: padding multiple, cost model and patch cap.
        position: its stream position.
        arrival: its rank among the replica's samples.
        due: see `window.Column`.
        sample: its tokens, loss tokens, whether it was truncated, patches and payload bytes.

    Raises:
        ValueError: more patches than a micro-batch may hold, or a cost beyond the records.
    """
    num_tokens, num_loss_tokens, truncated, num_patches, num_bytes = sample
    if num_patches > config.max_patches > 0:
        raise ValueError(
            f"position {position} has {num_patches} patches; a micro-batch may hold "
            f"{config.max_patches}: raise max_patches, or shrink the images"
        )
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
