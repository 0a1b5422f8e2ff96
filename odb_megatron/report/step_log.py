"""Writes the step log of one replica, `steps-RRRRR.jsonl`, and `run.json` beside it.

Must not end a run: what cannot be written after the start is a warning, once. `run_log` reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from odb_megatron.report.step_record import StepRecord

__all__ = ["LOG_FORMAT", "LOG_VERSION", "LogHeader", "StepLog", "header_of", "log_path"]
__all__ += ["write_run"]

LOG_FORMAT = "odb_megatron steps"
LOG_VERSION = 2


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


def header_of(values: Mapping[str, Any]) -> LogHeader:
    """Return the header that a line's values describe.

    Raises:
        ValueError: another format or version, or a field that is missing, unknown or of another
            type.
    """
    found = {name: value for name, value in values.items() if name not in ("format", "version")}
    if values.get("format") != LOG_FORMAT:
        raise ValueError(f"format is {values.get('format')!r:.80}, not {LOG_FORMAT!r}")
    if values.get("version") != LOG_VERSION:
        raise ValueError(
            f"version {values.get('version')!r:.80} of the step log; this odb_megatron reads "
            f"version {LOG_VERSION}: use the one that wrote it"
        )
    types = {field.name: str(field.type) for field in fields(LogHeader)}
    if found.keys() != types.keys():
        differ = sorted(found.keys() ^ types.keys())
        raise ValueError(f"header with {differ[0]!r} missing or unknown")
    for name, value in found.items():
        kind = {"int": int, "str": str}.get(types[name], dict)
        if type(value) is not kind:
            raise ValueError(f"header field {name!r} is {value!r:.80}: {kind.__name__} expected")
    if not all(type(size) is int for size in found["sizes"].values()):
        raise ValueError(f"header field 'sizes' is {found['sizes']!r:.80}: whole numbers expected")
    if found["multiple"] < 1:
        raise ValueError(f"header field 'multiple' is {found['multiple']}: at least 1 expected")
    if not 0 <= found["replica"] < found["num_replicas"] or found["iteration"] < 0:
        raise ValueError(
            f"header of replica {found['replica']} of {found['num_replicas']} at iteration "
            f"{found['iteration']}"
        )
    return LogHeader(**found)


def log_path(folder: str, replica: int) -> str:
    """Return the file of a replica's step log."""
    return os.path.join(folder, f"steps-{replica:05d}.jsonl")


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
        self.path = log_path(folder, header.replica)
        self._has_warned = False
        self._file = -1
        try:
            os.makedirs(folder, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o666)
            self._size = os.fstat(self._file).st_size
            start = "\n" if self._size and os.pread(self._file, 1, self._size - 1) != b"\n" else ""
            self._append(start + header.line())
        except OSError as error:
            self.close()
            raise ValueError(
                f"the step log {self.path} cannot be written ({error}): give --odb-log-dir a "
                "folder that can"
            ) from error

    def write(self, record: StepRecord) -> None:
        """Append one line; where that fails the step is missing, and the first one is told of.

        Raises:
            ValueError: the log is closed.
        """
        if self._file < 0:
            raise ValueError(f"write to the closed file {self.path}")
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
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _append(self, text: str) -> None:
        """Write a whole line or none of it."""
        data = text.encode()
        try:
            left = data
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)


def write_run(folder: str, values: Mapping[str, object]) -> None:
    """Write what holds for the whole run to `run.json`; where that fails, say so."""
    path = os.path.join(folder, "run.json")
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
        os.replace(f"{path}.part", path)
    except OSError as error:
        print(f"odb: warning: {path} could not be written ({error})", file=sys.stderr, flush=True)
