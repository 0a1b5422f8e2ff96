"""`odb_megatron.data.bad_records`: how many records may be bad; a resume skips the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_data import rules

from odb_megatron.data.bad_records import (
    BadRecords,
    TooManyBadRecordsError,
    check_bad_records,
    most_bad_records,
)
from odb_megatron.data.finished_step import FinishedStep
from odb_megatron.data.order import PassOrder
from odb_megatron.data.preprocess import BadRecordPolicy
from odb_megatron.data.sample import Skipped, SkipReason
from odb_megatron.data.sources import MapSource
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.policy import PolicyName
from odb_megatron.plan.records import PlanRecord, RecordTable
from odb_megatron.plan.step import StepTotals
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

TOTAL, BATCH = 48, 8
SKIP = rules(context=32, token_budget=32, bad_record=BadRecordPolicy.SKIP)


def _totals(step: int, *, bad: tuple[int, ...], consumed: int = 0) -> StepTotals:
    records = [
        PlanRecord(target=0, num_samples=4, num_left_out=num, num_bad=num, num_micro_batches=1)
        for num in bad
    ]
    return StepTotals.add_up(
        RecordTable.from_records(records),
        step=step,
        consumed=consumed,
        num_unassigned=0,
        count=1,
        fixed=0,
    )


def _hole(text: str, reason: SkipReason = SkipReason.BAD_RECORD) -> Skipped:
    return Skipped(reason=reason, message=text)


@pytest.mark.parametrize(
    ("limit", "consumed", "most"),
    [(7, 10, 7), (7, 10**6, 7), (0, 8, 100), (0, 10_000, 100), (0, 10_100, 101)],
)
def test_the_limit(limit: int, consumed: int, most: int) -> None:
    assert most_bad_records(limit, consumed=consumed) == most


def test_the_error_names_counts_limit_and_the_first_of_this_replica() -> None:
    found, others = BadRecords(3), BadRecords(3)
    for number in range(5):
        found.note(number, _hole(f"a.jsonl:{number}: bad\nOriginal traceback: long"))
    for one in (found, others):
        one.add_up(_totals(0, bad=(2, 1)))  # three are allowed
    with pytest.raises(TooManyBadRecordsError) as caught:
        found.add_up(_totals(1, bad=(1, 0), consumed=11))
    assert str(caught.value) == (
        "4 of the 20 samples consumed so far are bad records, and --odb-max-bad-records 3 are "
        "allowed. The first of this replica: a.jsonl:0: bad | a.jsonl:1: bad | a.jsonl:2: bad. "
        "Mend the data, or raise --odb-max-bad-records"
    )
    with pytest.raises(TooManyBadRecordsError, match="none; other replicas name theirs"):
        others.add_up(_totals(1, bad=(1, 0), consumed=11))
    default = BadRecords(0)
    default.add_up(_totals(0, bad=(100, 0)))
    with pytest.raises(TooManyBadRecordsError, match="100, the larger of 100 and 1 in 100 are all"):
        default.add_up(_totals(1, bad=(0, 1), consumed=108))
    BadRecords(None).add_up(_totals(0, bad=(10**6, 0)))  # an evaluation's are only counted


def test_what_a_checkpoint_says_of_steps_planned_ahead() -> None:
    records = BadRecords(9)
    records.note(3, _hole("bad"))
    records.note(4, _hole("long", SkipReason.OVERLONG))
    records.add_up(_totals(0, bad=(1,)))
    records.note(12, _hole("bad"))
    records.add_up(_totals(1, bad=(1,), consumed=5))
    records.note(20, _hole("bad"))
    assert [records.after(step) for step in range(4)] == [[3, 12, 20], [12, 20], [20], []]
    records.forget(9)
    assert records.after(0) == [12, 20]
    resumed = BadRecords(9)
    resumed.restore(1, [12, 20], step=1)
    assert (resumed.num, resumed.known) == (1, {12, 20})
    resumed.note(12, _hole("bad"))
    resumed.add_up(_totals(1, bad=(1,), consumed=5))
    assert resumed.after(2) == [20]  # not drawn yet: kept for the next checkpoint
    assert resumed.num == 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"num": 1},
        {"num": 1, "positions": 2},
        {"num": -1, "positions": []},
        {"num": 1, "positions": [True]},
        {"num": 1, "positions": [1 << 62]},
        {"num": 1, "positions": [], "more": 0},
    ],
)
def test_a_damaged_state_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="bad_records is .*; expected a count and positions"):
        check_bad_records(value)


class Flaky:
    """Items of which some fail, as long as a file is there."""

    def __init__(self, bad: set[int], flag: Path) -> None:
        self._bad, self._flag = bad, flag

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index in self._bad and self._flag.exists():
            raise OSError("the file server does not answer")
        size = 3 + index % 9
        return {"tokens": [1] * size, "labels": [1] * size, "loss_mask": [1] * size}


def _stream(bad: set[int], flag: Path) -> SampleStream:
    source = MapSource(Flaky(bad, flag), rules=SKIP, name="flaky")
    return SampleStream([SourcePart(source=source, order=PassOrder(np.arange(TOTAL), seed=1))])


def _config(policy: PolicyName, **changes: Any) -> PlanConfig:
    values: dict[str, Any] = {
        "policy": policy,
        "total": TOTAL,
        "global_batch_size": BATCH,
        "num_replicas": 2,
        "token_budget": 32,
        "window": 8,
        "max_bad_records": 30,
    }
    return PlanConfig(**values | changes)


def _ids(step: FinishedStep | None) -> list[int]:
    assert step is not None
    return sorted(position for part in step.header.micro_batches for position in part)


def _results(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("policy", list(PolicyName))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_skips_what_was_skipped_though_it_would_succeed_now(
    tmp_path: Path, policy: PolicyName, num_workers: int
) -> None:
    """The checkpoint is of step 2 while the planner has met bad records for step 4."""
    flag = tmp_path / "down"
    flag.touch()
    stream = _stream(set(range(0, TOTAL, 3)), flag)
    config = _config(policy)
    stop, ahead = 2, 4

    def first(exchange: ThreadExchange) -> tuple[list[list[int]], str, Any, int]:
        loader = StepLoader(stream, config, exchange=exchange)
        steps = [loader.make_step() for _ in range(ahead)]
        trained = steps[stop - 1]
        assert trained is not None
        assert trained.progress is not None
        saved = json.dumps(trained.progress.bad_records_state())
        return list(map(_ids, steps)), saved, trained.progress.state_dict(), loader.bad_records.num

    before = _results(run_in_threads(first, thread_exchanges(2)))
    flag.unlink()  # all would succeed now

    def second(exchange: ThreadExchange) -> tuple[list[list[int]], int]:
        _, saved, planner, _ = before[exchange.replica]
        state = json.loads(saved)
        check_bad_records(state)
        is_cost = policy is PolicyName.COST
        consumed = 0 if is_cost else planner["consumed"]
        loader = StepLoader(
            stream, config, exchange=exchange, num_workers=num_workers, consumed=consumed
        )
        step = planner["step"] if is_cost else 0
        loader.bad_records.restore(state["num"], state["positions"], step=step)
        if is_cost:
            loader.load_state_dict(planner)
        ids = [_ids(loader.make_step()) for _ in range(ahead - stop)]
        loader.close()
        return ids, loader.bad_records.num

    after = _results(run_in_threads(second, thread_exchanges(2)))
    for (whole, saved, _, num), (rest, num_after) in zip(before, after, strict=True):
        assert rest == whole[stop:]
        assert num_after == num
        assert json.loads(saved)["num"] < num
        assert json.loads(saved)["positions"], "guard: bad records were met ahead"


def test_all_replicas_end_in_the_step_with_one_too_many(tmp_path: Path) -> None:
    flag = tmp_path / "down"
    flag.touch()
    stream = _stream(set(range(12, TOTAL)), flag)
    config = _config(PolicyName.SAMPLES, max_bad_records=3)

    def go(exchange: ThreadExchange) -> tuple[int, str]:
        loader = StepLoader(stream, config, exchange=exchange)
        for made in range(TOTAL):
            try:
                loader.make_step()
            except TooManyBadRecordsError as error:
                return made, str(error)
        return -1, ""

    (made, text), other = _results(run_in_threads(go, thread_exchanges(2)))
    assert made == other[0] >= 0
    assert " samples consumed so far are bad records, and --odb-max-bad-records 3 are all" in text
    assert "flaky:" in text + other[1]
