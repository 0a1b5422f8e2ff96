"""The window of one replica: samples observed and not yet emitted, as columns of integers.

Pure: numpy alone. Work per step follows the part of the window that is looked at, not its size;
nothing here decides what is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel

__all__ = ["Column", "SampleWindow", "token_counts"]

Integers = npt.NDArray[np.int64]


class Column(IntEnum):
    """What is kept of each sample; one int64 each.

    `ARRIVAL` is the sample's rank among those the replica has observed (0 first). `DUE` is the
    step in which first-in-first-out order would have emitted it, -1 while that is not past.
    `PAYLOAD` is the sample's size in bytes when one replica hands it to another.
    """

    POSITION = 0
    ARRIVAL = 1
    NUM_TOKENS = 2
    PADDED = 3
    LOSS_TOKENS = 4
    PATCHES = 5
    COST = 6
    TRUNCATED = 7
    DUE = 8
    PAYLOAD = 9


class SampleWindow:
    """Samples in order of arrival.

    Rows live in one buffer between `_start` and `_stop`; new rows wait in a list until they are
    looked at. Emitted rows are squeezed out of the front, so the rest of the buffer never moves.
    """

    def __init__(self) -> None:
        self._rows: Integers = np.empty((len(Column), 256), dtype=np.int64)
        self._start = self._stop = 0
        self._new: list[Sequence[int]] = []
        self._cost = 0

    def __len__(self) -> int:
        return self._stop - self._start + len(self._new)

    @property
    def cost(self) -> int:
        """Cost of all samples held."""
        self._flush()
        return self._cost

    def append(self, row: Sequence[int]) -> None:
        """Take in one sample, given in the order of `Column`."""
        self._new.append(row)

    def extend(self, rows: Integers) -> None:
        """Take in samples as int64 [len(Column), samples]."""
        self._flush()
        size = rows.shape[1]
        self._reserve(size)
        self._rows[:, self._stop : self._stop + size] = rows
        self._stop += size
        self._cost += int(rows[Column.COST].sum())

    def rows(self, most: int | None = None) -> Integers:
        """Return the oldest samples (all, or at most `most`) as a view [len(Column), samples].

        The view is valid until the next change.
        """
        self._flush()
        stop = self._stop if most is None else min(self._stop, self._start + most)
        return self._rows[:, self._start : stop]

    def remove(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Remove the marked ones of the oldest `len(chosen)` samples."""
        view = self.rows(len(chosen))
        self._cost -= int(view[Column.COST][chosen].sum())
        kept = view[:, ~chosen]
        begin = self._start + len(chosen) - kept.shape[1]
        self._rows[:, begin : begin + kept.shape[1]] = kept
        self._start = begin

    def reprice(self, cost: CostModel) -> None:
        """Give every sample its cost under another model.

        Raises:
            ValueError: a cost beyond the records; nothing has changed then.
        """
        rows = self.rows()
        costs = cost.samples(rows[Column.PADDED], rows[Column.PATCHES])
        rows[Column.COST] = costs
        self._cost = int(costs.sum())

    def mark_due(self, *, num_emitted: int, step: int) -> None:
        """Note `step` as due step of samples that first-in-first-out would have emitted by now.

        Args:
            num_emitted: samples this replica has emitted so far.
            step: the step just emitted.
        """
        self._flush()
        arrival = self._rows[Column.ARRIVAL, self._start : self._stop]
        past = int(np.searchsorted(arrival, num_emitted))
        due = self._rows[Column.DUE, self._start : self._start + past]
        due[due < 0] = step

    def _flush(self) -> None:
        if self._new:
            rows, self._new = self._new, []
            self.extend(np.array(rows, dtype=np.int64).T)

    def _reserve(self, size: int) -> None:
        held, capacity = self._stop - self._start, self._rows.shape[1]
        if self._stop + size <= capacity:
            return
        grown = self._rows
        if 2 * (held + size) > capacity:
            grown = np.empty((len(Column), 4 * (held + size)), dtype=np.int64)
        grown[:, :held] = self._rows[:, self._start : self._stop].copy()
        self._rows, self._start, self._stop = grown, 0, held


def token_counts(rows: Integers) -> dict[str, int]:
    """Return what a plan record says of the tokens of some samples.

    Args:
        rows: the samples, int64 [len(Column), samples].
    """
    tokens = rows[Column.NUM_TOKENS]
    return {
        "num_truncated": int(rows[Column.TRUNCATED].sum()),
        "num_tokens": int(tokens.sum()),
        "num_padded_tokens": int(rows[Column.PADDED].sum()),
        "num_squared_tokens": int((tokens * tokens).sum()),
        "num_loss_tokens": int(rows[Column.LOSS_TOKENS].sum()),
    }
