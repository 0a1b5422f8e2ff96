"""Continues a run's data where the loaded checkpoint left it.

Must not keep state of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.megatron.arguments import OdbConfig
from odb_megatron.megatron.data_state import read_state, state_path
from odb_megatron.plan.policy import PolicyName

__all__ = ["resume_data"]

_LOST_WINDOW = (
    ". That is right after a run without --odb or with --odb-policy samples; after --odb-policy "
    "cost its windows are lost, so samples are left out and others come twice"
)


def resume_data(
    args: argparse.Namespace, config: OdbConfig, loader: StepLoader, *, exchange: ControlGroup
) -> dict[str, Any] | None:
    """Load the loader's state, if the run resumes and has one; leaders of all replicas call it.

    Under `samples` the data goes on at Megatron's own consumed-samples count, at any data-parallel
    size; under `cost` with the replica's window, so topology and policy must be the same.

    Args:
        args: Megatron's, after the checkpoint was loaded.
        config: ODB's.
        loader: of the training data.
        exchange: to the other replicas.

    Returns:
        The saved state (see `data_state.write_state`), or None for a start anew.

    Raises:
        ValueError: the state is missing on some replicas, or belongs to other data.
    """
    if not args.iteration:
        return None
    if args.finetune or args.skip_train:
        return None
    is_cost = config.policy is PolicyName.COST
    replica = exchange.replica if is_cost else 0
    path = state_path(args.load, iteration=args.iteration, replica=replica)
    state = read_state(path)
    found = exchange.gather_counts([int(state is not None)])
    if [0] in found and [1] in found:
        missing = state_path(args.load, iteration=args.iteration, replica=found.index([0]))
        raise ValueError(
            f"data state {missing} is missing and those of other replicas are not: restore it, "
            "use the data-parallel size that saved, or start the data anew (--finetune)"
        )
    if state is None:
        if args.rank == 0:
            print(
                f"odb: no data state in the checkpoint of iteration {args.iteration}; the data "
                f"goes on at sample {args.consumed_train_samples} of the stream"
                + (_LOST_WINDOW if is_cost else ""),
                flush=True,
            )
        return None
    if state["data"] != loader.stream.data_digest():
        raise ValueError(
            f"data state {path} was saved with other data: the files, their order, --split or "
            "--seed have changed, so samples would be lost or repeated; restore them, or start "
            "the data anew (--finetune)"
        )
    planner = state["planner"]
    if planner["consumed"] != args.consumed_train_samples:
        raise ValueError(
            f"data state {path} was saved after {planner['consumed']} samples, the checkpoint "
            f"after {args.consumed_train_samples}: restore the file that belongs to it"
        )
    if is_cost or planner["policy"] != PolicyName.SAMPLES.value:
        loader.load_state_dict(planner)
    else:
        loader.load_cost(planner)
    return state
