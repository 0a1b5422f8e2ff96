"""A saved run goes on with another number of replicas: who gets what had been drawn.

Pure, integers only: every replica computes the same from all the states of the saved run. Nothing
that was in a window is fetched here; it is dealt out as positions to draw, before any new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.draw import Assignment
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.state import check_values

__all__ = ["check_together", "elastic_state", "leftovers"]

_OWN = frozenset(("replica", "upcoming", "num_emitted", "num_recorded", "window"))
"""What may differ between the replicas of a saved run; `cursor` too where shards are fixed."""


def elastic_state(
    states: Sequence[Mapping[str, Any]], config: PlanConfig, *, replica: int
) -> dict[str, object]:
    """Return the state from which a replica of another run goes on.

    All positions that were drawn and not emitted are dealt in turns, oldest first, so that the
    replicas' numbers differ by one at most. Windows start empty; whether to exchange samples is
    chosen anew, and so is the deadline of the drain.

    Args:
        states: of all replicas of the saved run, in order.
        config: of the run that goes on.
        replica: whose state.

    Returns:
        To be loaded by `ReplicaPlanner.load_state_dict`, which needs no samples for it.

    Raises:
        ValueError: states that do not belong together, or data that cannot be dealt anew.
    """
    check_together(states)
    first = states[0]
    if config.has_own_iterators:
        raise ValueError(
            f"the data state is of {len(states)} replicas and this run has {config.num_replicas}: "
            "the shards of an iterable source belong to their replicas and cannot be dealt anew; "
            f"use the data-parallel size that saved ({len(states)}), or start the data anew "
            "(--finetune)"
        )
    if config.policy is not PolicyName.COST or not config.is_online:
        shards = "shards of their own" if config.shards else "fixed shards"
        raise ValueError(
            f"the data state is of {len(states)} replicas and this run has {config.num_replicas}: "
            f"a source with {shards} cannot be dealt anew; use the data-parallel size that saved, "
            "or start the data anew (--finetune)"
        )
    return {
        **first,
        "num_replicas": config.num_replicas,
        "replica": replica,
        "deadline": -1,
        "exchanges": -1,
        "upcoming": leftovers(states)[replica :: config.num_replicas],
        "num_emitted": 0,
        "num_recorded": 0,
        "window": [],
    }


def leftovers(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the positions that were drawn and not emitted, oldest first.

    First those that first-in-first-out order would have emitted, in the order in which it would;
    then the others as they lie in the stream.
    """
    overdue, others = [], []
    for state in states:
        for position, _, due in state["window"]:
            if due >= 0:
                overdue.append((due, position))
            else:
                others.append(position)
        others += state["upcoming"]
    return [position for _, position in sorted(overdue)] + sorted(others)


def check_together(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the states are those of all replicas of one run after one step.

    Args:
        states: in order of replicas.

    Raises:
        ValueError: a replica is missing, states of different steps or runs, or positions that are
            lost or held twice.
    """
    for replica, state in enumerate(states):
        check_values(state)
        for name, expected in (("num_replicas", len(states)), ("replica", replica)):
            if state[name] != expected:
                raise ValueError(
                    f"the data state at place {replica} has {name}={state[name]}; expected "
                    f"{expected}: restore the files of all replicas that saved"
                )
    is_online = states[0]["assignment"] == Assignment.ONLINE.value
    for replica, state in enumerate(states):
        for name in sorted(states[0]):
            if name in _OWN or (name == "cursor" and not is_online):
                continue
            if state[name] != states[0][name]:
                raise ValueError(
                    f"the data states of replicas 0 and {replica} differ in {name} "
                    f"({states[0][name]} and {state[name]}): they are of different steps or runs; "
                    "restore those that were saved together"
                )
    held = leftovers(states)
    if len(set(held)) < len(held):
        raise ValueError(
            "the data states hold a position on two replicas: they are of different steps or "
            "runs; restore those that were saved together"
        )
    cursor, consumed = states[0]["cursor"], states[0]["consumed"]
    if is_online and consumed + len(held) != cursor:
        raise ValueError(
            f"the data states hold {len(held)} positions and {consumed} were consumed, of "
            f"{cursor} that were drawn: a position is lost or came twice; restore those that were "
            "saved together"
        )
