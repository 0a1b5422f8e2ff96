"""How many records may be bad, and what the error says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from odb_megatron.data.bad_records import BadRecords, TooManyBadRecordsError
from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.plan.record import StepTotals

TOTALS = StepTotals(
    **{field.name: 0 for field in fields(StepTotals) if field.name != "is_final"}, is_final=False
)


def totals(num_bad: int, *, before: int = 0, consumed: int = 9) -> StepTotals:
    """A step's, of which so many records are bad."""
    return replace(TOTALS, num_bad=num_bad, consumed_before=before, num_consumed=consumed)


def skipped(text: str, reason: SkipReason = SkipReason.BAD_RECORD) -> Skipped:
    return Skipped(reason=reason, message=text)


def test_the_error_names_counts_limit_and_the_first_of_this_replica() -> None:
    own, other = BadRecords(3), BadRecords(3)
    own.note(skipped("too long", SkipReason.OVERLONG))
    for number in range(5):
        own.note(skipped(f"a.jsonl:{number}: bad\nOriginal traceback: long"))
    for one in (own, other):
        one.add_up(totals(3))  # three are allowed
    with pytest.raises(TooManyBadRecordsError) as caught:
        own.add_up(totals(1, before=11))
    assert str(caught.value) == (
        "4 of the 20 samples consumed so far are bad records, and --odb-max-bad-records 3 are "
        "allowed. The first of this replica: a.jsonl:0: bad | a.jsonl:1: bad | a.jsonl:2: bad. "
        "Mend the data, or raise --odb-max-bad-records"
    )
    with pytest.raises(TooManyBadRecordsError, match="none; other replicas name theirs"):
        other.add_up(totals(1, before=11))


def test_an_evaluation_only_counts() -> None:
    BadRecords(None).add_up(totals(10**6))
