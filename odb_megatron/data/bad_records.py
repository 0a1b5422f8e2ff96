"""Bad records that a run skips: how many it may.

All replicas count the same totals, so all raise in the same step.
"""

from __future__ import annotations

from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.plan.record import StepTotals

__all__ = ["BadRecords", "TooManyBadRecordsError"]

_MAX_NAMED = 3


class TooManyBadRecordsError(ValueError):
    """More records are bad than `--odb-max-bad-records` allows."""


class BadRecords:
    """Those of one loader.

    Args:
        limit: most bad records of a run; None for any number.
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
        if self._limit is None or self.num <= self._limit:
            return
        named = " | ".join(self._first) or "none; other replicas name theirs"
        raise TooManyBadRecordsError(
            f"{self.num} of the {consumed} samples consumed so far are bad records, and "
            f"--odb-max-bad-records {self._limit} are allowed. The first of this replica: "
            f"{named}. Mend the data, or raise --odb-max-bad-records"
        )
