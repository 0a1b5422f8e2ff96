"""The common form of what a policy did: which samples ran in which micro-batch of which step.

Pure. Flat arrays, so that millions of samples are scored in seconds; knows no costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Schedule", "rectangular"]

Integers = npt.NDArray[np.int64]
MicroBatches = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All steps of a run. Micro-batches lie in the order step, replica, micro-batch.

    Attributes:
        num_replicas: data-parallel size.
        counts: M of each step, int64 [steps].
        sizes: samples of each micro-batch, int64 [sum of counts * num_replicas]; 0 for idle.
        positions: stream positions of the samples, int64 [sum of sizes].
        is_padded: each sample is computed at the length of its micro-batch's longest.
        arrivals: stream positions of each replica in the order in which it drew them; None where
            all replicas share the stream's order.
        bytes_moved: payload bytes that replicas handed to each other in each step, int64 [steps];
            None where nothing moves.
        keeps_order: which samples a step has follows from the stream's order; the policy places
            them only.
        exchange: what `--exchange auto` chose for the run and why, where it did.
    """

    num_replicas: int
    counts: Integers
    sizes: Integers
    positions: Integers
    is_padded: bool = False
    arrivals: Sequence[Integers] | None = None
    bytes_moved: Integers | None = None
    keeps_order: bool = False
    exchange: str = ""

    @classmethod
    def build(
        cls,
        steps: Iterable[Sequence[MicroBatches]],
        *,
        num_replicas: int,
        is_padded: bool = False,
        arrivals: Sequence[Integers] | None = None,
        bytes_moved: Sequence[int] = (),
    ) -> Schedule:
        """Build from nested sequences.

        Args:
            steps: `steps[step][replica][micro-batch]` are stream positions.
            num_replicas: data-parallel size.
            is_padded: see the class.
            arrivals: see the class.
            bytes_moved: see the class; empty where nothing moves.
        """
        counts: list[int] = []
        sizes: list[int] = []
        positions: list[int] = []
        for step in steps:
            assert len(step) == num_replicas
            counts.append(len(step[0]))
            for replica in step:
                assert len(replica) == counts[-1], "every replica runs the same count"
                for micro_batch in replica:
                    sizes.append(len(micro_batch))
                    positions.extend(micro_batch)
        return cls(
            num_replicas=num_replicas,
            counts=np.array(counts, dtype=np.int64),
            sizes=np.array(sizes, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            is_padded=is_padded,
            arrivals=arrivals,
            bytes_moved=np.array(bytes_moved, dtype=np.int64) if bytes_moved else None,
        )

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def micro_batch_starts(self) -> Integers:
        """Index into `sizes` of each step's first micro-batch, int64 [steps + 1]."""
        return _starts(self.counts * self.num_replicas)

    @property
    def sample_starts(self) -> Integers:
        """Index into `positions` of each micro-batch's first sample, int64 [micro-batches + 1]."""
        return _starts(self.sizes)

    @property
    def step_starts(self) -> Integers:
        """Index into `positions` of each step's first sample, int64 [steps + 1]."""
        starts: Integers = self.sample_starts[self.micro_batch_starts]
        return starts

    @property
    def step_samples(self) -> Integers:
        """Samples of each step, int64 [steps]."""
        return np.diff(self.step_starts)

    def within(self, first: int, last: int) -> Schedule:
        """Return the steps from `first` up to and without `last`; arrivals are left out."""
        micro_batches, samples = self.micro_batch_starts, self.step_starts
        return Schedule(
            num_replicas=self.num_replicas,
            counts=self.counts[first:last],
            sizes=self.sizes[micro_batches[first] : micro_batches[last]],
            positions=self.positions[samples[first] : samples[last]],
            is_padded=self.is_padded,
            bytes_moved=None if self.bytes_moved is None else self.bytes_moved[first:last],
        )


def rectangular(
    micro_batches: Sequence[Sequence[int]], *, num_replicas: int, count: int, multiple: int = 1
) -> list[list[list[Sequence[int]]]]:
    """Deal micro-batches to steps: neighbours to the replicas of one micro-batch index.

    Args:
        micro_batches: in order; idle ones are appended to fill the last step's last index.
        num_replicas: data-parallel size.
        count: micro-batches per replica and step.
        multiple: the last step may have fewer, but a multiple of this.

    Returns:
        `steps[step][replica][micro-batch]`.
    """
    rows: list[list[Sequence[int]]] = []
    for start in range(0, len(micro_batches), num_replicas):
        row = list(micro_batches[start : start + num_replicas])
        rows.append(row + [()] * (num_replicas - len(row)))
    rows += [[()] * num_replicas for _ in range(-len(rows) % multiple)]
    steps = []
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        steps.append([[row[replica] for row in part] for replica in range(num_replicas)])
    return steps


def _starts(sizes: Integers) -> Integers:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)))
