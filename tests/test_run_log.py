"""`odb_megatron.report.steps`: what is written is read back, and nothing else."""

from __future__ import annotations

import json
import math
import resource
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    folder: Path, iterations: Iterable[int], *, loss: float = 2.5, replicas: int = 1, **how: Any
) -> None:
    """One process start: a header and a step for each iteration, on every replica."""
    for replica in range(replicas):
        log = StepLog(
            str(folder), header=replace(HEADER, replica=replica, num_replicas=replicas, **how)
        )
        for iteration in iterations:
            log.write(replace(RECORD, iteration=iteration, loss=loss))
        log.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    _log(tmp_path, (1, 2), replicas=2, loss=math.inf)
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 2]
    assert run.steps[1].records == dict.fromkeys(
        (0, 1), replace(RECORD, iteration=2, loss=math.inf)
    )
    assert run.headers == (replace(HEADER, num_replicas=2),)
    assert run.notes == ()
    assert [step.iteration for step in read_run(str(tmp_path), steps=(2, 9)).steps] == [2]


def test_a_resumed_run_goes_on_and_what_was_trained_anew_replaces(tmp_path: Path) -> None:
    """Steps 4 and 5 were trained again after the resume, 6 was not; then by fewer replicas."""
    _log(tmp_path, range(1, 7), replicas=2, run=1)
    _log(tmp_path, (4, 5), replicas=2, run=2, iteration=3, loss=1.0)
    _log(tmp_path, (6,), run=3, iteration=5)
    run = read_run(str(tmp_path))
    assert [(step.iteration, step.part, step.first.loss) for step in run.steps] == [
        *((1, 0, 2.5), (2, 0, 2.5), (3, 0, 2.5)), *((4, 1, 1.0), (5, 1, 1.0)), (6, 2, 2.5),
    ]  # fmt: skip
    assert [sorted(step.records) for step in run.steps] == [*[[0, 1]] * 5, [0]]
    assert [header.num_replicas for header in run.headers] == [2, 2, 1]
    assert run.notes == ("3 steps after iteration 3 are left out: trained anew",)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_no_step_is_lost_or_doubled(starts: list[tuple[int, int]], replicas: int) -> None:
    """Whatever was saved, killed and resumed: of each iteration the last training counts."""
    with tempfile.TemporaryDirectory() as name:
        expected: dict[int, float] = {}
        for number, (saved, trained) in enumerate(starts):
            start = min(saved, max(expected, default=0)) if number else 0
            expected = {at: loss for at, loss in expected.items() if at <= start}
            iterations = range(start + 1, start + 1 + trained)
            _log(
                Path(name), iterations, run=number, iteration=start, loss=float(number),
                replicas=replicas,
            )  # fmt: skip
            expected |= dict.fromkeys(iterations, float(number))
        if not expected:
            with pytest.raises(ValueError, match="has no step: the run has not been logged"):
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
    _log(tmp_path, (1, 4), replicas=2)
    (tmp_path / "steps-00001.jsonl").unlink()
    assert read_run(str(tmp_path)).notes == (
        "2 steps are missing: 2, 3",
        "2 steps lack the records of some replicas: 1, 4",
    )


def _line(**values: Any) -> str:
    return json.dumps(asdict(RECORD) | values) + "\n"


HEAD = HEADER.line()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"steps-00000.jsonl is empty"),
        (_line(), r":1 is no line .*\(a step before any header\)"),
        (HEAD + "[]\n", r":2 is no line .*\(no object\): read it with the odb_megatron that wrote"),
        (HEAD + "[" * 9000 + "\n", r":2 is no line of a step log of this version \("),
        (HEAD + "__import__('os')\n" + _line(), r":2 is no line of a step log"),
        (HEAD + _line(more=3), r":2 is no line .* unexpected keyword argument 'more'"),
        (HEAD + '{"iteration": 3}\n', r":2 is no line .* missing \d+ required keyword-only"),
        (HEAD.replace('"version": 2', '"version": 1'), r":1 is no line .*', 1\) where \("),
        (HEAD.replace("odb_megatron steps", "x"), r":1 is no line .*\('x', 2\) where \("),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "steps-00000.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(str(tmp_path))


def test_a_folder_without_logs(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nope"):
        with pytest.raises(ValueError, match=r"is no folder with step logs .*: give that of --odb"):
            read_run(str(folder))
    _log(tmp_path, (1,))
    with pytest.raises(ValueError, match=r"no step from 5 to 6: the run has not been logged that"):
        read_run(str(tmp_path), steps=(5, 6))
    (tmp_path / "steps-00001.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"steps-00001.jsonl cannot be read \("):
        read_run(str(tmp_path))


def test_a_full_disk_is_told_of_once_and_leaves_no_half_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may grow by ten bytes, until there is room again."""
    log = StepLog(str(tmp_path), header=HEADER)
    log.write(RECORD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(log.path).stat().st_size + 10, limits[1]))
    try:
        for iteration in (2, 3):
            log.write(replace(RECORD, iteration=iteration))
        with pytest.raises(ValueError, match=r"cannot be written \(.*\): give --odb-log-dir a fol"):
            StepLog(str(tmp_path), header=HEADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write(replace(RECORD, iteration=4))
    log.close()
    run = read_run(str(tmp_path))
    assert [step.iteration for step in run.steps] == [1, 4]
    assert run.notes == ("2 steps are missing: 2, 3",)
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "iteration 2 is missing in the step log" in said


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


def test_what_is_kept_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ended_cleanly in (False, True):
        write_run(str(tmp_path), {"flags": "--odb", "ended_cleanly": ended_cleanly})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["ended_cleanly"]
    write_run(str(tmp_path / "nope"), {"flags": "--odb"})
    assert "warning" in capsys.readouterr().err
