"""All that an inspection found, and what follows from it at once.

Pure: figures in, figures out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.advice import Advice
from odb_megatron.inspection.lengths import Reading
from odb_megatron.inspection.logits import LogitsMemory
from odb_megatron.inspection.prediction import ADVISED, ODB, Run
from odb_megatron.inspection.setting import Kept, TrainingSetting
from odb_megatron.simulation.schedules import Stream

__all__ = ["Findings", "cut_offs"]

Integers = npt.NDArray[np.int64]

_MAX_CUT_OFFS = 6
_NEAR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was found.

    Attributes:
        reading: lengths as they are.
        setting: of the training.
        kept: lengths after the overlong policy.
        stream: the samples that were simulated.
        runs: by method.
        logits: None where the vocabulary is not known.
        advice: None where none was asked for.
        fixed: `standard-safe` with the larger of the token budgets given and advised.
        epoch_samples: positions of an epoch, or of the run where its length was given: bad records,
            dropped samples and those that were not read included, as training counts them.
        is_run: whether the run's length was given; only positions that it takes are read then.
    """

    reading: Reading
    setting: TrainingSetting
    kept: Kept
    stream: Stream
    runs: Mapping[str, Run]
    logits: LogitsMemory | None
    advice: Advice | None
    fixed: Run
    epoch_samples: int
    is_run: bool = False

    def steps_per_epoch(self, name: str) -> int:
        """Return the optimizer steps of an epoch, or of the run where its length was given."""
        run = self.runs[name]
        if self.epoch_samples == len(run.stream):
            return run.method.num_steps
        return math.ceil(self.epoch_samples * run.method.num_steps / len(run.stream))

    def speedup(self, name: str, rival: str) -> float:
        """Return the rate of a method over that of another."""
        return self.runs[name].method.rate / self.runs[rival].method.rate

    def fair_speedup(self) -> float:
        """Return the rate of the method that matters most over `fixed`, whose budget is no less."""
        return self.runs[self.planned].method.rate / self.fixed.method.rate

    def other_step_sizes(self) -> dict[str, float]:
        """Return the samples per step of methods that cannot keep to those asked for."""
        asked = self.runs[ODB].method.samples_per_step
        found = {name: run.method.samples_per_step for name, run in self.runs.items()}
        return {name: num for name, num in found.items() if abs(num / asked - 1) > _NEAR}

    @property
    def planned(self) -> str:
        """The method that matters most: as advised, where that is another budget, or as given."""
        return ADVISED if ADVISED in self.runs else ODB

    def avoided(self) -> float:
        """Return the share of the tokens of a batch padded to the context that are not computed."""
        return 1 - int(self.kept.positions.sum()) / self.context_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens of a batch padded to the context, in which a bad record has its row too."""
        return self.setting.seq_length * len(self.kept.positions)


def cut_offs(lengths: Integers, *, limit: int) -> list[dict[str, float | int]]:
    """Return what cutting samples at some lengths costs: powers of two around the data, the limit.

    Args:
        lengths: tokens of each sample, int64.
        limit: in force.
    """
    longest, total = int(lengths.max()), int(lengths.sum())
    powers = [1 << bits for bits in range(5, 40) if 1 << bits < longest]
    found = []
    for at in sorted({*powers[-(_MAX_CUT_OFFS - 1) :], limit}):
        over = lengths[lengths > at]
        found.append(
            {
                "at": at,
                "samples": len(over) / len(lengths),
                "tokens": (int(over.sum()) - at * len(over)) / total,
            }
        )
    return found
