"""Writes the `odb/...` series to Megatron's own TensorBoard and W&B writers.

Must not gather anything: only the last rank has the writers, and it writes what it knows of a step.
"""

from __future__ import annotations

import argparse
from typing import Any

from odb_megatron.report.live import series_of
from odb_megatron.report.steps import StepRecord

__all__ = ["SeriesWriters", "megatron_writers"]


class SeriesWriters:
    """The writers of this rank.

    Args:
        tensorboard: a `SummaryWriter`; None where this rank has none.
        wandb: the module `wandb`; None where this rank has none.
        interval: iterations between writes, as the host's own series have it.
    """

    def __init__(self, tensorboard: Any, wandb: Any, *, interval: int) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._interval = max(1, interval)

    def __bool__(self) -> bool:
        """Whether this rank has any."""
        return self._tensorboard is not None or self._wandb is not None

    def step(self, record: StepRecord) -> None:
        """Write a step, if it is one of those that are written."""
        iteration = record.iteration
        if not self or iteration % self._interval:
            return
        values = {f"odb/{name}": value for name, value in series_of(record).items()}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(values, iteration)


def megatron_writers(args: argparse.Namespace) -> SeriesWriters:
    """Return Megatron's own, which its last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    return SeriesWriters(
        get_tensorboard_writer(), get_wandb_writer(), interval=args.tensorboard_log_interval
    )
