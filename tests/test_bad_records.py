"""`odb_megatron.data.bad_records`: how many records may be bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_plan_parts import TOTALS

from odb_megatron.data.bad_records import BadRecords, TooManyBadRecordsError, max_bad_records
from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.plan.record import StepTotals


def _totals(*, bad: int, consumed: int = 0) -> StepTotals:
    return replace(
        TOTALS, consumed_before=consumed, num_consumed=8 + bad, num_left_out=bad, num_bad=bad
    )


@pytest.mark.parametrize(
    ("limit", "consumed", "most"),
    [(7, 10, 7), (7, 10**6, 7), (0, 8, 100), (0, 10_000, 100), (0, 10_100, 101)],
)
def test_the_limit(limit: int, consumed: int, most: int) -> None:
    assert max_bad_records(limit, consumed=consumed) == most


def test_the_error_names_counts_limit_and_the_first_of_this_replica() -> None:
    found, others = BadRecords(3), BadRecords(3)
    for number in range(5):
        text = f"a.jsonl:{number}: bad\nOriginal traceback: long"
        found.note(Skipped(reason=SkipReason.BAD_RECORD, message=text))
    found.note(Skipped(reason=SkipReason.OVERLONG, message="long"))
    for one in (found, others):
        one.add_up(_totals(bad=3))  # three are allowed
    with pytest.raises(TooManyBadRecordsError) as caught:
        found.add_up(_totals(bad=1, consumed=11))
    assert str(caught.value) == (
        "4 of the 20 samples consumed so far are bad records, and --odb-max-bad-records 3 are "
        "allowed. The first of this replica: a.jsonl:0: bad | a.jsonl:1: bad | a.jsonl:2: bad. "
        "Mend the data, or raise --odb-max-bad-records"
    )
    with pytest.raises(TooManyBadRecordsError, match="none; other replicas name theirs"):
        others.add_up(_totals(bad=1, consumed=11))


def test_the_default_limit_and_what_a_resumed_run_had_met() -> None:
    resumed = BadRecords(0, num=100)
    with pytest.raises(TooManyBadRecordsError, match="100, the larger of 100 and 1 in 100 are all"):
        resumed.add_up(_totals(bad=1, consumed=108))
    BadRecords(None).add_up(_totals(bad=10**6))  # an evaluation's are only counted
