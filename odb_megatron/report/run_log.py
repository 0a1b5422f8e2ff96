"""Reads a run's step logs (`--odb-log-dir`): the steps that the run is made of, replica by replica.

Must not evaluate or guess: what is no log is an error with its file and line. What a killed process
left behind (a last line cut short, steps that were trained again) is left out and told of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odb_megatron.report.step_log import LOG_FORMAT, LogHeader, header_of
from odb_megatron.report.step_record import StepRecord, record_of

__all__ = ["LoggedStep", "RunLog", "read_run", "read_steps"]

_NAME = re.compile(r"steps-(\d{5,})\.jsonl")
_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One optimizer step.

    Attributes:
        iteration: 1-based.
        part: which of `RunLog.headers` it belongs to.
        records: by replica; one that is missing was not written.
    """

    iteration: int
    part: int
    records: dict[int, StepRecord]

    @property
    def first(self) -> StepRecord:
        """The record of the lowest replica: fields that are sums over replicas are equal in all."""
        return self.records[min(self.records)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What a folder of step logs says of its run.

    Attributes:
        folder: where it was read from.
        headers: of the process starts that the run is made of, in order; those of the lowest
            replica that has a log.
        steps: in order, each iteration once.
        notes: what was left out, or is missing.
    """

    folder: str
    headers: tuple[LogHeader, ...]
    steps: tuple[LoggedStep, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Part:
    """What one process wrote."""

    header: LogHeader
    records: dict[int, StepRecord] = field(default_factory=dict)


def read_run(folder: str, *, steps: tuple[int, int] | None = None) -> RunLog:
    """Read the step logs of a folder.

    Args:
        folder: of `--odb-log-dir`.
        steps: first and last iteration to keep; None keeps all.

    Raises:
        ValueError: there are none, or a line that no version has written, each named.
    """
    files = _files(folder)
    notes: list[str] = []
    parts = {replica: _read_parts(path, notes) for replica, path in files.items()}
    lowest = min(parts)
    order = {part.header.run: at for at, part in enumerate(parts[lowest])}
    if len(order) < len(parts[lowest]):
        raise ValueError(f"{files[lowest]} has the header of one process start twice")
    headers = tuple(part.header for part in parts[lowest])
    found = _join(parts, order, headers, notes)
    if steps is not None:
        found = {at: step for at, step in found.items() if steps[0] <= at <= steps[1]}
    logged = tuple(found[at] for at in sorted(found))
    if not logged:
        span = "" if steps is None else f" from {steps[0]} to {steps[1]}"
        raise ValueError(
            f"{folder} has no step{span}: "
            + ("the run was not logged that far" if steps else "the run has not trained one yet")
        )
    notes += _missing(logged, headers)
    return RunLog(folder=folder, headers=headers, steps=logged, notes=tuple(notes))


def read_steps(folder: str, replica: int) -> tuple[StepRecord, ...]:
    """Return the records of one replica, in order.

    Raises:
        ValueError: see `read_run`.
    """
    run = read_run(folder)
    return tuple(step.records[replica] for step in run.steps if replica in step.records)


def _files(folder: str) -> dict[int, Path]:
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder} is no folder: give that of --odb-log-dir")
    names = {int(found[1]): one for one in path.iterdir() if (found := _NAME.fullmatch(one.name))}
    if not names:
        raise ValueError(
            f"{folder} has no step logs (steps-00000.jsonl and so on): give the folder of "
            "--odb-log-dir"
        )
    return dict(sorted(names.items()))


def _read_parts(path: Path, notes: list[str]) -> list[_Part]:
    parts: list[_Part] = []
    broken: tuple[int, str] | None = None
    for number, line in _lines(path):
        try:
            found = _parsed(line)
        except ValueError as error:
            if broken is not None:
                break
            broken = (number, str(error))
            continue
        if isinstance(found, LogHeader):
            if broken is not None:
                notes.append(_cut(path, broken[0]))
                broken = None
            parts.append(_Part(found))
        elif broken is not None:
            break
        elif not parts:
            raise ValueError(f"{path}:{number}: a step before any header: it is no step log")
        else:
            parts[-1].records[found.iteration] = found
    else:
        if broken is not None and parts and not _ends_whole(path):
            notes.append(_cut(path, broken[0]))
            broken = None
    if broken is not None:
        raise ValueError(f"{path}:{broken[0]}: {broken[1]}")
    if not parts:
        raise ValueError(f"{path} is empty: nothing was logged")
    return parts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _parsed(line: str) -> LogHeader | StepRecord:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({str(error)[:80]})") from error
    if not isinstance(values, dict):
        raise ValueError("neither a header nor a step")
    if "format" in values:
        return header_of(values)
    if "iteration" not in values:
        raise ValueError(f"neither a header (format {LOG_FORMAT!r}) nor a step")
    return record_of(values)


def _cut(path: Path, number: int) -> str:
    return f"{path}:{number} was cut short, as a killed process leaves it, and is left out"


def _join(
    parts: dict[int, list[_Part]],
    order: dict[int, int],
    headers: Sequence[LogHeader],
    notes: list[str],
) -> dict[int, LoggedStep]:
    """Put the replicas' parts together; a later start voids what older ones have after it."""
    by_part: list[dict[int, dict[int, StepRecord]]] = [{} for _ in headers]
    for replica, own in parts.items():
        for part in own:
            at = order.get(part.header.run)
            if at is None:
                notes.append(
                    f"replica {replica} has a part that began after iteration "
                    f"{part.header.iteration} and belongs to no run of the others: left out"
                )
                continue
            for iteration, record in part.records.items():
                by_part[at].setdefault(iteration, {})[replica] = record
    found: dict[int, LoggedStep] = {}
    for at, header in enumerate(headers):
        void = [iteration for iteration in found if iteration > header.iteration]
        for iteration in void:
            del found[iteration]
        if void:
            what = "trained anew" if header.iteration else "of a run before, which began anew"
            notes.append(
                f"{len(void)} steps after iteration {header.iteration} are left out: {what}"
            )
        for iteration, records in by_part[at].items():
            found[iteration] = LoggedStep(
                iteration=iteration, part=at, records=dict(sorted(records.items()))
            )
    return found


def _missing(steps: Sequence[LoggedStep], headers: Sequence[LogHeader]) -> list[str]:
    notes = []
    iterations = [step.iteration for step in steps]
    absent = sorted(set(range(iterations[0], iterations[-1] + 1)) - set(iterations))
    if absent:
        notes.append(f"{len(absent)} steps are missing: {_some(absent)}")
    short = [s.iteration for s in steps if len(s.records) < headers[s.part].num_replicas]
    if short:
        notes.append(f"{len(short)} steps lack the records of some replicas: {_some(short)}")
    return notes


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_FEW]))
    return shown if len(numbers) <= _FEW else f"{shown} and {len(numbers) - _FEW} more"
