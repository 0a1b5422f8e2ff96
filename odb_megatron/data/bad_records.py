"""Bad records that a run leaves out: how many it may, and which a resumed run leaves out again.

Must not exchange records: all replicas count the same totals, so all raise in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.plan.step import StepTotals

__all__ = ["BadRecords", "TooManyBadRecordsError", "check_bad_records", "most_bad_records"]

_LEAST, _SHARE = 100, 100
"""Without a limit of the user's own: so many, or one in so many samples where that is more. What is
wrong with all records shows within the first hundreds; rare ones never end a long run."""

_MOST_NAMED = 3
_KEPT_STEPS = 8
"""A checkpoint is of the last step trained; the trainer may have been given a later one."""


class TooManyBadRecordsError(ValueError):
    """More records are bad than `--odb-max-bad-records` allows."""


def most_bad_records(limit: int, *, consumed: int) -> int:
    """Return how many bad records a run may have met.

    Args:
        limit: the user's; 0 for none of their own.
        consumed: samples consumed so far, bad ones included.
    """
    return limit or max(_LEAST, consumed // _SHARE)


class BadRecords:
    """Those of one loader on one replica.

    Args:
        limit: see `most_bad_records`; None for any number.

    Attributes:
        num: bad records of all replicas in the steps planned so far, and before a resume.
        known: positions of this stream that were found bad before a resume, and are left out
            without being fetched: one that only hung or whose file was away may be good now.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._first: list[str] = []
        self._found: deque[tuple[int, int]] = deque()  # step, position
        self._to_come: set[int] = set()  # of `known`
        self._step = 0
        self.num = 0
        self.known: frozenset[int] = frozenset()

    def note(self, position: int, skipped: Skipped) -> None:
        """Note one of this replica's positions that emits nothing, if a bad record is why.

        Args:
            position: its stream position.
            skipped: what stands in its place.
        """
        if skipped.reason is SkipReason.BAD_RECORD:
            self._found.append((self._step, position))
            self._to_come.discard(position)
            if len(self._first) < _MOST_NAMED:
                self._first.append(skipped.message.partition("\n")[0])

    def add_up(self, totals: StepTotals) -> None:
        """Count the bad records of a planned step.

        Raises:
            TooManyBadRecordsError: on all replicas; names the first of this one.
        """
        self._step = totals.step + 1
        self.num += totals.num_bad
        consumed = totals.consumed_before + totals.num_consumed
        if self._limit is None or self.num <= most_bad_records(self._limit, consumed=consumed):
            return
        allowed = f"--odb-max-bad-records {self._limit}"
        if not self._limit:
            most = most_bad_records(0, consumed=consumed)
            allowed = f"{most}, the larger of {_LEAST} and 1 in {_SHARE}"
        named = " | ".join(self._first) or "none; other replicas name theirs"
        raise TooManyBadRecordsError(
            f"{self.num} of the {consumed} samples consumed so far are bad records, and {allowed} "
            f"are allowed. The first of this replica: {named}. Mend the data, or raise "
            "--odb-max-bad-records"
        )

    def after(self, step: int) -> list[int]:
        """Return bad positions that the first `step` steps have not consumed, ascending.

        May be called while another thread plans.
        """
        ahead = [position for at, position in self._found.copy() if at >= step]
        return sorted({*ahead, *self._to_come.copy()})

    def forget(self, step: int) -> None:
        """Forget positions that no checkpoint will ask for, once `step` steps were handed out."""
        while self._found and self._found[0][0] < step - _KEPT_STEPS:
            self._found.popleft()

    def restore(self, num: int, positions: Iterable[int], *, step: int) -> None:
        """Go on from a saved run.

        Args:
            num: see the attribute.
            positions: `after` of the replicas whose positions come to this one.
            step: the planner's next step.
        """
        self.num, self.known, self._step = num, frozenset(positions), step
        self._to_come = set(self.known)


def check_bad_records(value: Any) -> None:
    """Raise unless a value read from a file is `{"num": N, "positions": [...]}`.

    Raises:
        ValueError: something else.
    """
    is_good = isinstance(value, Mapping) and set(value) == {"num", "positions"}
    if is_good:
        positions = value["positions"]
        numbers = [value["num"], *positions] if isinstance(positions, list) else [None]
        is_good = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    if not is_good:
        raise ValueError(f"bad_records is {str(value)[:80]}; expected a count and positions")
