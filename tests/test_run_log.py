"""`odb_megatron.report.steps`: what is written is read back, and nothing else."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.report import steps
from odb_megatron.report.steps import LogHeader, StepLog, StepRecord, read_run, write_run

RECORD = StepRecord(
    iteration=1, loss=2.5, grad_norm=None, learning_rate=1e-3, consumed_samples=8, samples=7,
    left_out=1, tokens=300, computed_tokens=320, loss_tokens=150, num_micro_batches=2, idle=0,
    fill=0.75, balance=0.9, moved=0, bytes_moved=0, wait_s=0.25, step_s=0.5,
    lengths=((100,), (150, 50)), ids=(("0:3@0",), ("0:5@0", "1:0@0")), widths=(100, 200),
    costs=(101.5, 203.0), micro_batch_s=(0.1, 0.25), patches=(0, 48),
)  # fmt: skip
HEADER = LogHeader(
    run=5, replica=0, num_replicas=1, iteration=0, started="2026-01-01T00:00:00+00:00",
    flags="--odb", batches="odb", cost="linear=1.0", multiple=1, token_budget=512, seq_length=512,
    global_batch_size=8, sizes={"tp": 1, "pp": 1},
)  # fmt: skip


def _log(
    folder: Path,
    iterations: Any,
    *,
    loss: float = 2.5,
    replicas: tuple[int, ...] = (0,),
    **how: Any,
) -> None:
    """One process start: a header and a step for each iteration, on every replica."""
    for replica in replicas:
        header = replace(HEADER, replica=replica, num_replicas=len(replicas), **how)
        log = StepLog(str(folder), header=header)
        for iteration in iterations:
            log.write(replace(RECORD, iteration=iteration, loss=loss))
        log.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    _log(tmp_path, (1, 2), replicas=(0, 1))
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 2]
    assert run.steps[1].records == {0: replace(RECORD, iteration=2)} | {
        1: replace(RECORD, iteration=2)
    }
    assert run.headers == (replace(HEADER, num_replicas=2),)
    assert run.notes == ()
    assert [step.iteration for step in read_run(str(tmp_path), steps=(2, 9)).steps] == [2]


def test_a_resumed_run_goes_on_and_what_was_trained_anew_replaces(tmp_path: Path) -> None:
    """Steps 4 and 5 were trained by the killed process and again after the resume, 6 only once."""
    _log(tmp_path, (1, 2, 3, 4, 5, 6), replicas=(0, 1), run=1)
    _log(tmp_path, (4, 5), replicas=(0, 1), run=2, iteration=3, loss=1.0)
    run = read_run(str(tmp_path))
    assert [(step.iteration, step.part) for step in run.steps] == [
        *((1, 0), (2, 0), (3, 0)),
        *((4, 1), (5, 1)),
    ]
    assert [step.first.loss for step in run.steps] == [2.5, 2.5, 2.5, 1.0, 1.0]
    assert run.notes == ("3 steps after iteration 3 are left out: trained anew",)


def test_fewer_replicas_after_a_resume(tmp_path: Path) -> None:
    _log(tmp_path, (1, 2, 3), replicas=(0, 1), run=1)
    _log(tmp_path, (3,), replicas=(0,), run=2, iteration=2)
    run = read_run(str(tmp_path))
    assert [sorted(step.records) for step in run.steps] == [[0, 1], [0, 1], [0]]
    assert [header.num_replicas for header in run.headers] == [2, 1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_no_step_is_lost_or_doubled(starts: list[tuple[int, int]], replicas: int) -> None:
    """Whatever was saved, killed and resumed: of each iteration the last training counts."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        expected: dict[int, float] = {}
        for number, (saved, trained) in enumerate(starts):
            start = min(saved, max(expected, default=0)) if number else 0
            expected = {at: loss for at, loss in expected.items() if at <= start}
            iterations = range(start + 1, start + 1 + trained)
            _log(
                Path(name), iterations, run=number, iteration=start, loss=float(number),
                replicas=tuple(range(replicas)),
            )  # fmt: skip
            expected |= dict.fromkeys(iterations, float(number))
        if not expected:
            with pytest.raises(ValueError, match="the run has not trained one yet"):
                read_run(name)
            return
        run = read_run(name)
        assert {step.iteration: step.first.loss for step in run.steps} == expected
        assert all(len(step.records) == replicas for step in run.steps)


def test_a_killed_process_leaves_a_line_cut_short(tmp_path: Path) -> None:
    _log(tmp_path, (1, 2, 3), run=1)
    path = tmp_path / "steps-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 2]
    assert run.notes == (f"{path}:4 was cut short, as a killed process leaves it, and is left out",)
    _log(tmp_path, (3,), run=2, iteration=2)  # goes on behind it
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 2, 3]
    assert "cut short" in run.notes[0]


def test_steps_and_replicas_that_are_missing_are_told_of(tmp_path: Path) -> None:
    _log(tmp_path, (1, 4), replicas=(0, 1))
    (tmp_path / "steps-00001.jsonl").unlink()
    assert read_run(str(tmp_path)).notes == (
        "2 steps are missing: 2, 3",
        "2 steps lack the records of some replicas: 1, 4",
    )
    _log(tmp_path, range(5, 30), run=9, replicas=(0,), iteration=20)
    assert "18 steps" not in str(read_run(str(tmp_path)).notes)


def _line(values: Any) -> str:
    return json.dumps(values) + "\n"


GOOD = asdict(RECORD)
HEAD = HEADER.line()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"steps-00000.jsonl is empty"),
        (_line(GOOD), r":1: a step before any header"),
        (HEAD + "[]\n", r":2: neither a header .* nor a step"),
        (HEAD + "{}\n", r":2: neither a header .* nor a step"),
        (HEAD + "[" * 9000 + "\n", r":2: no JSON \("),
        (HEAD + "__import__('os')\n" + _line(GOOD), r":2: no JSON \("),
        (HEAD + _line(GOOD | {"tokens": True}), r":2: field 'tokens' is True: int was"),
        (HEAD + _line(GOOD | {"step_s": None}), r":2: field 'step_s' is None: float was"),
        (HEAD + _line(GOOD | {"lengths": 3}), r":2: field 'lengths' is 3: tuple"),
        (HEAD + _line(GOOD | {"ids": [[3]]}), r":2: field 'ids' is \[\[3\]\]: tuple"),
        (HEAD + _line(GOOD | {"more": 3}), r":2: field 'more' is missing or unknown"),
        (HEAD + '{"iteration": 3}\n', r":2: field 'balance' is missing"),
        (HEAD + HEAD, r"has the header of one process start twice"),
        (HEAD.replace('"version": 2', '"version": 1'), r":1: version 1 of another log; this odb"),
        (HEAD.replace("odb_megatron steps", "x"), r":1: version 2 of another log"),
        (HEAD.replace('"tp": 1', '"tp": []'), r":1: field 'sizes' is"),
        (HEAD.replace('"replica": 0', '"replica": 1'), r":1: header of replica 1 of 1, iter"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "steps-00000.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(str(tmp_path))


def test_a_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nope is no folder: give that of --odb-log-dir"):
        read_run(str(tmp_path / "nope"))
    with pytest.raises(ValueError, match=r"has no step logs \(steps-00000.jsonl and so on\)"):
        read_run(str(tmp_path))
    _log(tmp_path, (1,))
    with pytest.raises(ValueError, match=r"no step from 5 to 6: the run was not logged that far"):
        read_run(str(tmp_path), steps=(5, 6))
    (tmp_path / "steps-00001.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"steps-00001.jsonl cannot be read \("):
        read_run(str(tmp_path))


def test_a_full_disk_is_told_of_once_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes ten bytes of each line, until there is room again."""
    log = StepLog(str(tmp_path), header=HEADER)
    log.write(RECORD)
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < len(HEAD):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) - 10])

    monkeypatch.setattr(steps.os, "write", full)
    for iteration in (2, 3):
        log.write(replace(RECORD, iteration=iteration))
    monkeypatch.undo()
    log.write(replace(RECORD, iteration=4))
    log.close()
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 4]
    assert run.notes == ("2 steps are missing: 2, 3",)
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "iteration 2 is missing in the step log" in said
    assert "No space left on device" in said


def test_each_line_is_written_at_once_behind_what_is_there(tmp_path: Path) -> None:
    for number in (1, 2):
        log = StepLog(str(tmp_path / "logs"), header=replace(HEADER, replica=3, num_replicas=4))
        log.write(RECORD)
        assert len(Path(log.path).read_text().splitlines()) == 2 * number
        log.close()
        with pytest.raises(ValueError, match="closed file"):
            log.write(RECORD)
    assert Path(log.path).name == "steps-00003.jsonl"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written .*: give --odb-log-dir a folder"):
        StepLog(str(tmp_path / "file" / "logs"), header=HEADER)


def test_a_full_disk_at_the_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(steps.os, "write", full)
    with pytest.raises(ValueError, match=r"cannot be written \(.*No space left.*\): give"):
        StepLog(str(tmp_path), header=HEADER)


def test_numbers_that_json_does_not_know_survive(tmp_path: Path) -> None:
    odd = replace(RECORD, loss=float("nan"), grad_norm=float("inf"))
    log = StepLog(str(tmp_path), header=HEADER)
    log.write(odd)
    log.close()
    again = read_run(str(tmp_path)).steps[0].first
    assert replace(again, loss=1.0) == replace(odd, loss=1.0)
    assert again.loss != again.loss


def test_what_is_kept_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ended_cleanly in (False, True):
        write_run(str(tmp_path), {"flags": "--odb", "ended_cleanly": ended_cleanly})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["ended_cleanly"]
    write_run(str(tmp_path / "nope"), {"flags": "--odb"})
    assert "warning" in capsys.readouterr().err
