"""Bad records that a run skips: how many it may.

All replicas count the same totals, so all raise in the same step.
"""

from __future__ import annotations

from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.plan.record import StepTotals

__all__ = ["BadRecords", "TooManyBadRecordsError", "max_bad_records"]

_MIN, _SHARE = 100, 100
"""Without a limit of the user's own: so many, or one in so many samples where that is more. What is
wrong with all records shows within the first hundreds; rare ones never end a long run."""

_MAX_NAMED = 3


class TooManyBadRecordsError(ValueError):
    """More records are bad than `--odb-max-bad-records` allows."""


def max_bad_records(limit: int, *, consumed: int) -> int:
    """Return how many bad records a run may have met.

    Args:
        limit: the user's; 0 for none of their own.
        consumed: samples consumed so far, bad ones included.
    """
    return limit or max(_MIN, consumed // _SHARE)


class BadRecords:
    """Those of one loader.

    Args:
        limit: see `max_bad_records`; None for any number.
        num: bad records before a resume.

    Attributes:
        num: bad records of all replicas so far.
    """

    def __init__(self, limit: int | None, *, num: int = 0) -> None:
        self._limit = limit
        self._first: list[str] = []
        self.num = num

    def note(self, skipped: Skipped) -> None:
        """Keep the message of one of this replica's first bad records."""
        if skipped.reason is SkipReason.BAD_RECORD and len(self._first) < _MAX_NAMED:
            self._first.append(skipped.message.partition("\n")[0])

    def add_up(self, totals: StepTotals) -> None:
        """Count the bad records of a planned step.

        Raises:
            TooManyBadRecordsError: on all replicas; names the first of this one.
        """
        self.num += totals.num_bad
        consumed = totals.consumed_before + totals.num_consumed
        if self._limit is None or self.num <= max_bad_records(self._limit, consumed=consumed):
            return
        allowed = f"--odb-max-bad-records {self._limit}"
        if not self._limit:
            most = max_bad_records(0, consumed=consumed)
            allowed = f"{most}, the larger of {_MIN} and 1 in {_SHARE}"
        named = " | ".join(self._first) or "none; other replicas name theirs"
        raise TooManyBadRecordsError(
            f"{self.num} of the {consumed} samples consumed so far are bad records, and {allowed} "
            f"are allowed. The first of this replica: {named}. Mend the data, or raise "
            "--odb-max-bad-records"
        )
