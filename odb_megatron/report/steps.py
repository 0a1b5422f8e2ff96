"""The step log of a run (`--odb-log-dir`): what a line holds, its writer, and its reader.

One file `steps-RRRRR.jsonl` for each replica. Each process start appends a header and then a line
for each step, so that a resumed run goes on in the same files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["LogHeader", "LoggedStep", "RunLog", "StepLog", "StepRecord", "read_run", "write_run"]

LOG_FORMAT, LOG_VERSION = "odb_megatron steps", 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as one replica saw it; fields marked (all) are sums over replicas.

    Attributes:
        iteration: 1-based iteration, as Megatron logs it.
        loss: sum of weighted token losses over `loss_weight` (all); None where this rank has none.
        grad_norm: gradient norm before clipping, or None.
        learning_rate: learning rate of the step.
        consumed_samples: samples consumed after the step (all).
        samples: samples trained (all).
        left_out: samples skipped, by `--odb-overlong` or as bad records (all).
        tokens: tokens before padding (all).
        computed_tokens: tokens the model ran, padding included (all).
        loss_tokens: positions that carried loss (all).
        loss_weight: sum of their weights (all): `loss_tokens` where all are 1, the samples that
            have any with `--odb-loss-per sample`.
        num_micro_batches: M.
        idle: idle micro-batches (all).
        fill: tokens over M * replicas * token budget; None for the padded baseline.
        balance: mean over max cost of the replicas; None for the padded baseline.
        moved: samples that another replica trained than the one that had read them (all).
        bytes_moved: their bytes on the wire (all).
        wait_s: seconds this replica's trainer waited for the step; 0 for the padded baseline.
        step_s: wall-clock seconds since the previous step ended, evaluation and saving excluded.
        lengths: tokens of this replica's samples, per micro-batch; an empty one is idle.
        ids: the same samples as "source:record@epoch".
        collectives: broadcasts inside this replica that brought the step to its ranks.
        bytes_delivered: bytes of one copy of what they brought.
        reports: point-to-point transfers of the loss to this replica's source rank.
        context_balance: mean over max of the attention cost of this replica's context-parallel
            ranks; None without context parallelism.
        idle_router_share: share of the tokens that routers' losses see which are those of idle
            micro-batches (all); None for dense models.
        fetch_wait_s: longest that a replica's planner waited for samples of the step, seconds.
        queue_bytes: bytes of the finished steps that wait behind this one.
        peak_memory_bytes: most device memory that tensors have taken so far on this replica's first
            or last pipeline stage; without a device, that the process has.
        reserved_memory_bytes: the same of torch's allocator, 0 without a device.
        num_shapes: different lengths of micro-batches on this replica so far.
        widths: tokens that this replica's micro-batches computed, padding included.
        costs: their predicted cost, in that of one token that attends to nothing; empty for the
            padded baseline.
        micro_batch_s: seconds from one micro-batch's arrival to the next one's, of the last one to
            the end of the gradients' reduction; empty where that is not known (pipelining, padded
            baseline).
        plan_s: seconds that making the step took this replica, in the background: the waits for
            samples and for other replicas are in it.
        queue_steps: finished steps that wait behind this one.
        truncated: samples that were cut (all).
        bad_records: samples skipped because their records are bad (all).
        patches: image patches of this replica's micro-batches; empty where none has any.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    consumed_samples: int
    samples: int
    left_out: int
    tokens: int
    computed_tokens: int
    loss_tokens: int
    num_micro_batches: int
    idle: int
    fill: float | None
    balance: float | None
    moved: int
    bytes_moved: int
    wait_s: float
    step_s: float
    lengths: tuple[tuple[int, ...], ...]
    ids: tuple[tuple[str, ...], ...] = ()
    collectives: int = 0
    bytes_delivered: int = 0
    reports: int = 0
    context_balance: float | None = None
    idle_router_share: float | None = None
    fetch_wait_s: float = 0.0
    queue_bytes: int = 0
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    num_shapes: int = 0
    widths: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    micro_batch_s: tuple[float, ...] = ()
    plan_s: float = 0.0
    queue_steps: int = 0
    truncated: int = 0
    bad_records: int = 0
    patches: tuple[int, ...] = ()
    loss_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """First line of each process's part of a step log.

    Attributes:
        run: the same number in the parts of all replicas that ran together.
        replica: which replica writes.
        num_replicas: data-parallel size.
        iteration: iterations done before; records of later ones in older parts are void.
        started: date and time, for readers.
        flags: that give the run again.
        batches: `odb`, or `padded` for the padded baseline.
        cost: value of `--odb-cost` that gives the cost model; empty for the padded baseline.
        multiple: what each sample is padded to.
        token_budget: most tokens of a micro-batch; `--seq-length` for the padded baseline.
        seq_length: `--seq-length`.
        global_batch_size: `--global-batch-size`.
        sizes: parallel sizes by name, `tp`, `pp`, `vpp`, `cp` and `ep`.
    """

    run: int
    replica: int
    num_replicas: int
    iteration: int
    started: str
    flags: str
    batches: str
    cost: str
    multiple: int
    token_budget: int
    seq_length: int
    global_batch_size: int
    sizes: dict[str, int]

    def line(self) -> str:
        """Return it as a line of a log."""
        head = {"format": LOG_FORMAT, "version": LOG_VERSION}
        return json.dumps(head | asdict(self)) + "\n"


# --- writing ---------------------------------------------------------------------------------


class StepLog:
    """Appends a header, then a line per step, to the step log of one replica.

    Each line is one write to the file, which holds nothing back: what was written survives the end
    of the process. Parts of earlier processes stay as they are.

    Args:
        folder: created if missing.
        header: of this process.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, folder: str, *, header: LogHeader) -> None:
        self.path = os.path.join(folder, f"steps-{header.replica:05d}.jsonl")
        self._has_warned = False
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115  # see close
            size = self._file.seek(0, os.SEEK_END)
            is_cut = size and os.pread(self._file.fileno(), 1, size - 1) != b"\n"
            self._append("\n" * bool(is_cut) + header.line())
        except OSError as error:
            raise ValueError(
                f"the step log {self.path} cannot be written ({error}): give --odb-log-dir a "
                "folder that can"
            ) from error

    def write(self, record: StepRecord) -> None:
        """Append one line; where that fails the step is missing, and the first one is warned of.

        Raises:
            ValueError: the log is closed.
        """
        try:
            self._append(json.dumps(asdict(record)) + "\n")
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"odb: warning: iteration {record.iteration} is missing in the step log "
                    f"{self.path} ({error}), and so will be those that follow until it can be "
                    "written again; the run goes on",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Close the file; later writes fail. Harmless when called again."""
        self._file.close()

    def _append(self, text: str) -> None:
        """Write a whole line or none of it."""
        left, size = text.encode(), self._file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise


def write_run(folder: str, values: Mapping[str, object]) -> None:
    """Write what holds for the whole run to `run.json`; where that fails, say so."""
    path = Path(folder, "run.json")
    try:
        path.with_suffix(".part").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
    except OSError as error:
        print(f"odb: warning: {path} could not be written ({error})", file=sys.stderr, flush=True)


# --- reading ---------------------------------------------------------------------------------

_NAME = re.compile(r"steps-(\d{5,})\.jsonl")
_FEW = 5
_Part = tuple[LogHeader, dict[int, StepRecord]]


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
        headers: of the process starts that the run is made of, in order; those of the lowest
            replica that has a log.
        steps: in order, each iteration once.
        notes: what was left out, or is missing.
    """

    headers: tuple[LogHeader, ...]
    steps: tuple[LoggedStep, ...]
    notes: tuple[str, ...] = ()


def read_run(folder: str, *, steps: tuple[int, int] | None = None) -> RunLog:
    """Read the step logs of a folder.

    What a killed process has left (a last line cut short, steps that were trained again) is left
    out and noted.

    Args:
        folder: of `--odb-log-dir`.
        steps: first and last iteration to keep; None keeps all.

    Raises:
        ValueError: there are none, or a line that this version has not written, each named.
    """
    notes: list[str] = []
    paths = Path(folder).iterdir() if Path(folder).is_dir() else ()
    files = {int(name[1]): path for path in paths if (name := _NAME.fullmatch(path.name))}
    if not files:
        raise ValueError(
            f"{folder} is no folder with step logs (steps-00000.jsonl and so on): give that of "
            "--odb-log-dir"
        )
    parts = {replica: _read_parts(files[replica], notes) for replica in sorted(files)}
    headers = tuple(header for header, _ in parts[min(parts)])
    found = _join(parts, headers, notes)
    first, last = steps or (0, sys.maxsize)
    logged = tuple(found[at] for at in sorted(found) if first <= at <= last)
    if not logged:
        wanted = f"no step from {first} to {last}" if steps else "no step"
        raise ValueError(f"{folder} has {wanted}: the run has not been logged that far")
    absent = sorted({*range(logged[0].iteration, logged[-1].iteration)} - {*found})
    short = [s.iteration for s in logged if len(s.records) < headers[s.part].num_replicas]
    for what, those in (("are missing", absent), ("lack the records of some replicas", short)):
        if those:
            more = f" and {len(those) - _FEW} more" if len(those) > _FEW else ""
            notes.append(f"{len(those)} steps {what}: {', '.join(map(str, those[:_FEW]))}{more}")
    return RunLog(headers=headers, steps=logged, notes=tuple(notes))


def _read_parts(path: Path, notes: list[str]) -> list[_Part]:
    """Return what each process start has written: its header, and records by iteration."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    parts: list[_Part] = []
    for number, line in enumerate(lines, 1):
        try:
            found = _parsed(line) if line else None
            if isinstance(found, StepRecord):
                if not parts:
                    raise ValueError("a step before any header")
                parts[-1][1][found.iteration] = found
            elif found is not None:
                parts.append((found, {}))
        except (ValueError, TypeError, RecursionError) as error:
            # A process was killed as it wrote; another may have gone on behind it.
            is_last = number == len(lines)
            if parts and (is_last or lines[number].startswith('{"format"')):
                notes.append(
                    f"{path}:{number} was cut short, as a killed process leaves it, and is left out"
                )
                continue
            raise ValueError(
                f"{path}:{number} is no line of a step log of this version ({error!s:.120}): read "
                "it with the odb_megatron that wrote it"
            ) from error
    if not parts:
        raise ValueError(f"{path} is empty: nothing was logged")
    return parts


def _parsed(line: str) -> LogHeader | StepRecord:
    """Return what a line holds; a ValueError or TypeError where it is neither of these."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError("no object")
    if "format" not in values:
        return StepRecord(**{name: _frozen(value) for name, value in values.items()})
    about = values.pop("format"), values.pop("version", None)
    if about != (LOG_FORMAT, LOG_VERSION):
        raise ValueError(f"{about} where {(LOG_FORMAT, LOG_VERSION)} was expected")
    return LogHeader(**values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _join(
    parts: Mapping[int, Sequence[_Part]], headers: Sequence[LogHeader], notes: list[str]
) -> dict[int, LoggedStep]:
    """Put the replicas' parts together; a later start voids what older ones have after it."""
    starts = {header.run for header in headers}
    strangers = {replica for replica, own in parts.items() for h, _ in own if h.run not in starts}
    if strangers:
        those = ", ".join(map(str, sorted(strangers)))
        notes.append(f"parts of replicas {those} belong to no run of the others: left out")
    found: dict[int, LoggedStep] = {}
    for at, start in enumerate(headers):
        void = [iteration for iteration in found if iteration > start.iteration]
        for iteration in void:
            del found[iteration]
        if void:
            what = "trained anew" if start.iteration else "of a run before, which began anew"
            notes.append(
                f"{len(void)} steps after iteration {start.iteration} are left out: {what}"
            )
        for replica, own in parts.items():
            for header, records in own:
                for iteration, record in records.items() if header.run == start.run else ():
                    step = LoggedStep(iteration=iteration, part=at, records={})
                    found.setdefault(iteration, step).records[replica] = record
    return found
