"""Composition of the yardstick's steps where single samples make all replicas wait.

Pure. Where replicas meet in every micro-batch, a sample that costs more than an ordinary one makes
all wait, unless each of them runs one like it at the same time; where they meet once per step, so
does one that costs more than a replica's share of the step. With global knowledge such samples are
held, at most `max_delay_steps` steps, and released one per replica, of nearly equal cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.policy import BalanceScope
from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["hold_outliers"]

Integers = npt.NDArray[np.int64]

_ORDINARY = 0.9
_HOLD_SHARE = 0.5


def hold_outliers(stream: Stream, setting: Setting, *, sizes: Sequence[int]) -> list[Integers]:
    """Return the stream positions of each step, ascending.

    Args:
        stream: the samples.
        setting: what the policies have in common.
        sizes: samples of each step; the last step takes what is held.
    """
    pool = _Pool(stream, setting, sizes)
    return [pool.step(index) for index in range(len(sizes))]


class _Pool:
    """Samples read and held, and where the stream has been read to."""

    def __init__(self, stream: Stream, setting: Setting, sizes: Sequence[int]) -> None:
        total = sum(sizes)
        rate = int(stream.costs.sum()) / int(stream.lengths.sum())
        level = _ORDINARY * rate * setting.token_budget
        if setting.sync is BalanceScope.STEP:
            share = int(stream.costs[:total].sum()) / (len(sizes) * setting.num_replicas)
            level = max(level, _ORDINARY * share)
        self._costs = stream.costs
        self._is_outlier = stream.costs[:total] > level
        self._ordinary = np.flatnonzero(~self._is_outlier)
        self._outliers = np.flatnonzero(self._is_outlier)
        self._num = setting.num_replicas
        self._sizes = list(sizes)
        self._fifo_step = np.repeat(np.arange(len(sizes)), sizes)
        self._most = setting.max_delay_steps
        self._hold = max(1, round(_HOLD_SHARE * setting.max_delay_steps))
        self._next = self._num_read = 0  # ordinary samples emitted, outliers read
        self._held: list[int] = []

    def step(self, index: int) -> Integers:
        """Return the positions of the next step."""
        size = self._sizes[index]
        reach = self._next + size
        last = self._ordinary[reach - 1] if reach <= len(self._ordinary) else len(self._fifo_step)
        seen = int(np.searchsorted(self._outliers, last))
        self._held += self._outliers[self._num_read : seen].tolist()
        self._num_read = seen
        released = self._release(index)
        ordinary = self._ordinary[self._next : self._next + size - len(released)]
        missing = size - len(released) - len(ordinary)
        if missing > 0:  # the stream ends: nothing but outliers is left
            more = self._held[:missing]
            released += more
            self._held = self._held[missing:]
        self._next += len(ordinary)
        return np.sort(np.concatenate((np.array(released, dtype=np.int64), ordinary)))

    def _release(self, index: int) -> list[int]:
        """Return the outliers of a step: rows of one per replica, those due among them."""
        left = len(self._sizes) - index
        hold = min(self._hold, left)
        rows = round(len(self._held) / (self._num * hold))
        due = [one for one in self._held if index - self._fifo_step[one] >= self._most]
        released: list[int] = []
        while self._held and (rows > 0 or due):
            oldest = due[0] if due else self._held[0]
            row = self._row_with(oldest)
            if len(released) + len(row) > self._sizes[index]:
                break
            released += row
            chosen = set(row)
            self._held = [one for one in self._held if one not in chosen]
            due = [one for one in due if one not in chosen]
            rows -= 1
        return released

    def _row_with(self, sample: int) -> list[int]:
        """Return one outlier per replica, this one among them, that waste least together."""
        held = sorted(self._held, key=lambda one: -self._costs[one])
        at, num = held.index(sample), min(self._num, len(held))
        options = []
        for start in range(max(0, at - num + 1), min(at, len(held) - num) + 1):
            row = held[start : start + num]
            waste = int(self._costs[row[0]]) * num - int(self._costs[row].sum())
            options.append((waste, row))
        return min(options)[1]
