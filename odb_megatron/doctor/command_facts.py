"""Facts about a command line, gathered in a process of its own.

Must not import torch, Megatron or numpy: doctor says that they are missing. Must not start what the
command would, and must not judge: see `command_line`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_megatron.doctor.host import Load
from odb_megatron.doctor.started import Started

__all__ = [
    "CommandFacts",
    "DataFacts",
    "FlagFacts",
    "Request",
    "facts_of",
    "gather_command",
    "job_options",
]

_EXAMINER = "odb_megatron.doctor.flag_facts"
_MAX_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the process that checks flags is asked.

    Attributes:
        script: first word of `sys.argv`.
        flags: the rest.
        folder: of the script; empty for a module.
        on_cpu: under the CPU device layer.
        num_records: most records of a file that are read, besides its largest.
    """

    script: str
    flags: tuple[str, ...]
    folder: str = ""
    on_cpu: bool = False
    num_records: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Lengths in one file.

    Attributes:
        path: as in `--data-path`.
        num_records: in it.
        num_read: that were read.
        longest: tokens of the longest sample, before padding.
        longest_at: its line, or number.
        num_overlong: samples above the limit after padding.
        num_bad: bad records.
        first_bad: what the first one is.
        error: why the file cannot be read; empty where it can.
    """

    path: str
    num_records: int = 0
    num_read: int = 0
    longest: int = 0
    longest_at: int = 0
    num_overlong: int = 0
    num_bad: int = 0
    first_bad: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFacts:
    """Flags of a command, parsed and validated.

    Attributes:
        problems: what is refused, one text each.
        unknown: what is said of flags that the parser does not know.
        backend: attention backend that would be chosen on this machine, and why.
        backend_problem: why none would be.
        described: ODB's flags, defaults filled in.
        has_odb: `--odb`.
        uses_nccl: `--distributed-backend nccl`.
        num_workers: `--num-workers`.
        replicas: data-parallel size.
        model_parallel: tensor × pipeline × context parallel size.
        batch_tokens: see `host.Load`.
        overlong: `--odb-overlong`.
        bad_record: `--odb-bad-record`.
        multiple: padding multiple.
        context: `--seq-length`.
        token_budget: most tokens of a micro-batch.
        limit: longest padded sample; 0 where it is not known.
        data: of every file.
    """

    problems: tuple[str, ...] = ()
    unknown: str = ""
    backend: str = ""
    backend_problem: str = ""
    described: str = ""
    has_odb: bool = False
    uses_nccl: bool = True
    num_workers: int = 0
    replicas: int = 1
    model_parallel: int = 1
    batch_tokens: int = 0
    overlong: str = "error"
    bad_record: str = "error"
    multiple: int = 1
    context: int = 0
    token_budget: int = 0
    limit: int = 0
    data: tuple[DataFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFacts:
    """A command line and what became of its flags.

    Attributes:
        started: what it starts.
        processes: on each node, GPUs of this one filled in.
        script_exists: whether the script, or module, is there.
        knows_odb: whether it takes `--odb`; a script of the user's might import what does.
        python_differs: the interpreter it names is another than this one.
        max_connections: CUDA_DEVICE_MAX_CONNECTIONS.
        flags: None where they could not, or need not, be checked.
        error: why they could not.
        unchecked: why they are none of Megatron's; empty where they are.
    """

    started: Started
    processes: int
    script_exists: bool = True
    knows_odb: bool = True
    python_differs: bool = False
    max_connections: str = ""
    flags: FlagFacts | None = None
    error: str = ""
    unchecked: str = ""

    @property
    def load(self) -> Load | None:
        """What it asks of one machine."""
        if self.flags is None or not self.flags.limit:
            return None
        flags = self.flags
        return Load(
            ranks=self.processes,
            readers=max(1, min(self.processes // flags.model_parallel, flags.replicas)),
            num_workers=flags.num_workers,
            replicas=flags.replicas,
            uses_nccl=flags.uses_nccl and not self.started.on_cpu,
            batch_tokens=flags.batch_tokens,
        )


def gather_command(
    started: Started,
    environment: Mapping[str, str],
    *,
    num_gpus: int,
    num_records: int,
    missing: str = "",
) -> CommandFacts:
    """Look at a command's script, flags and data.

    Args:
        started: what it starts.
        environment: of the run.
        num_gpus: of this machine.
        num_records: see `Request`.
        missing: what is not installed, so that flags cannot be checked.
    """
    processes = started.processes or max(1, num_gpus)
    flags, error = None, f"{missing} not installed" if missing else ""
    seen = started.in_environment(environment)
    unchecked = started.unchecked or _unchecked(started)
    if not missing and not unchecked:
        folder = "" if started.is_module or started.is_job else os.path.dirname(started.script)
        request = Request(
            script=started.script,
            flags=started.flags,
            folder="" if started.is_module or started.is_job else os.path.abspath(folder),
            on_cpu=started.on_cpu,
            num_records=num_records,
        )
        ranks = {"WORLD_SIZE": f"{processes * started.nodes}", "RANK": "0", "LOCAL_RANK": "0"}
        flags, error = _examine(request, {**seen, **ranks})
    return CommandFacts(
        started=started,
        processes=processes,
        script_exists=_exists(started),
        knows_odb=_knows_odb(started),
        python_differs=_differs(started.python),
        max_connections=seen.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        flags=flags,
        error=error,
        unchecked=unchecked,
    )


def job_options(path: str) -> list[str]:
    """Return the words of a job script's `#SBATCH` lines; none where it cannot be read."""
    words: list[str] = []
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return words  # said elsewhere
    for line in lines:
        if line.strip() and not line.startswith("#"):
            break  # sbatch reads no further than the first command
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                raise ValueError(f"{path}: {line}: {error}") from error
    return words


def facts_of(values: dict[str, Any]) -> FlagFacts:
    """Return the facts that were written as JSON."""
    data = tuple(DataFacts(**one) for one in values.pop("data"))
    problems = tuple(values.pop("problems"))
    return FlagFacts(**values, data=data, problems=problems)


def _examine(request: Request, environment: Mapping[str, str]) -> tuple[FlagFacts | None, str]:
    with tempfile.TemporaryDirectory(prefix="odb-doctor-") as folder:
        asked, out = Path(folder) / "request.json", Path(folder) / "facts.json"
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", _EXAMINER, str(asked), str(out)],
                capture_output=True,
                text=True,
                timeout=_MAX_S,
                env=dict(environment),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"reading flags and data took longer than {_MAX_S:g} s"
        if not out.is_file():
            told = (done.stderr or done.stdout).strip().splitlines()
            return None, told[-1] if told else f"it ended with exit code {done.returncode}"
        return facts_of(json.loads(out.read_text(encoding="utf-8"))), ""


def _exists(started: Started) -> bool:
    if not started.is_module:
        return os.path.isfile(started.script)
    top = started.script.partition(".")[0]
    if top == "odb_megatron":
        return (
            Path(__file__).parents[1] / (started.script.partition(".")[2].replace(".", "/") + ".py")
        ).is_file()
    from importlib.util import find_spec

    return find_spec(top) is not None


def _knows_odb(started: Started) -> bool:
    if started.via or started.is_module or started.is_job:
        return True
    text = _text(started)
    return text is None or "odb_megatron" in text  # a script that is not there is said elsewhere


def _text(started: Started) -> str | None:
    try:
        return Path(started.script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _unchecked(started: Started) -> str:
    """Return why a script's flags are none of Megatron's; empty where they are, or may be."""
    if started.via or started.is_module or started.is_job:
        return ""
    text = _text(started) or ""
    if "megatron.bridge" in text:
        return "arguments of a script that uses Megatron-Bridge: it checks them as it starts"
    has_own = "ArgumentParser(" in text and not _PARSES_AS_MEGATRON.search(text)
    if has_own:
        return "flags of a parser of the script's own: it checks them as it starts"
    return ""


_PARSES_AS_MEGATRON = re.compile(r"(?:from|import) megatron\.training|read_args|pretrain\w*\(")
"""In a script's text: what parses flags as Megatron does."""


def _differs(python: str) -> bool:
    """Whether a path names another interpreter; a bare `python` goes by PATH, as this one did."""
    return os.sep in python and os.path.realpath(python) != os.path.realpath(sys.executable)
