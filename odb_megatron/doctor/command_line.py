"""The command line to check: facts about it from a process of its own, and checks of those.

Must not import torch, Megatron or, before there is data to judge, numpy: doctor says that they are
missing. Must not start what the command would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning
from odb_megatron.doctor.host import Load
from odb_megatron.doctor.started import Started

__all__ = ["CommandFacts", "DataFacts", "FlagFacts", "Request", "check_command", "gather_command"]

_EXAMINER = "odb_megatron.doctor.flag_facts"
_MOST_S = 3600.0
_OWN_FLAGS = ("odb_megatron.megatron.pretrain", "pretrain_gpt_odb.py")
"""Scripts without flags of their own: what their parser does not know is wrong."""


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
        flags: None where they could not be checked.
        error: why not.
    """

    started: Started
    processes: int
    script_exists: bool = True
    knows_odb: bool = True
    python_differs: bool = False
    max_connections: str = ""
    flags: FlagFacts | None = None
    error: str = ""

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
    if not missing:
        folder = "" if started.is_module or started.is_job else os.path.dirname(started.script)
        request = Request(
            script=started.script,
            flags=started.flags,
            folder="" if started.is_module or started.is_job else os.path.abspath(folder),
            on_cpu=started.on_cpu,
            num_records=num_records,
        )
        ranks = {"WORLD_SIZE": f"{processes * started.nodes}", "RANK": "0", "LOCAL_RANK": "0"}
        flags, error = _examine(request, {**environment, **started.environment, **ranks})
    return CommandFacts(
        started=started,
        processes=processes,
        script_exists=_exists(started),
        knows_odb=_knows_odb(started),
        python_differs=_differs(started.python),
        max_connections={**environment, **started.environment}.get(
            "CUDA_DEVICE_MAX_CONNECTIONS", ""
        ),
        flags=flags,
        error=error,
    )


def check_command(facts: CommandFacts, *, num_gpus: int) -> list[Finding]:
    """Check a command line.

    Args:
        facts: about it.
        num_gpus: of this machine.
    """
    return [
        fine("command", str(facts.started)),
        *_script(facts),
        *_processes(facts, num_gpus),
        *_flags(facts),
        *_attention(facts, num_gpus),
        *_data(facts),
    ]


def _script(facts: CommandFacts) -> Iterator[Finding]:
    started = facts.started
    if not facts.script_exists:
        kind = "module" if started.is_module else "file"
        yield failure(
            "script",
            f"there is no {kind} {started.script}",
            expected=f"a {kind} that Python finds from this folder",
            way_out="give its whole path, or run doctor where the command is run",
        )
    elif "--odb" in started.flags and not facts.knows_odb:
        report = failure if os.path.basename(started.script) == "pretrain_gpt.py" else warning
        yield report(
            "script",
            f"{started.script} does not name odb_megatron: it would not know --odb",
            expected="a script with ODB in it",
            way_out=f"-m odb_megatron.run {started.script} ..., or odb-megatron patch CHECKOUT "
            "--apply",
        )
    if facts.python_differs:
        yield warning(
            "interpreter",
            f"the command names {started.python}; checked with {sys.executable}",
            expected="the same one, so that packages and flags are the same",
            way_out=f"{started.python} -m odb_megatron doctor -- ...",
        )


def _processes(facts: CommandFacts, num_gpus: int) -> Iterator[Finding]:
    if facts.started.on_cpu:
        return
    if not num_gpus:
        yield warning(
            "processes",
            f"{facts.processes} on each node, and no GPU here",
            expected="a GPU for each",
            way_out="run doctor on a node of the job (srun --pty), or add --device cpu to try it",
        )
    elif facts.processes > num_gpus:
        yield failure(
            "processes",
            f"{facts.processes} on each node, and {num_gpus} GPUs here",
            expected="a GPU for each",
            way_out=f"--nproc-per-node {num_gpus}",
        )
    flags = facts.flags
    parallel = flags is not None and flags.model_parallel > 1
    if parallel and not num_gpus and facts.max_connections != "1" and not facts.started.is_job:
        yield warning(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            facts.max_connections or "not set",
            expected="1 with tensor or context parallelism on GPUs before Blackwell: Megatron "
            "refuses to start otherwise (no GPU here to tell)",
            way_out="export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )


def _flags(facts: CommandFacts) -> Iterator[Finding]:
    flags = facts.flags
    if flags is None:
        if facts.error.endswith("not installed"):
            yield not_applicable("flags", f"not checked: {facts.error}")
        else:
            expected = "flags that Megatron's parser and validation take"
            way_out = "run the command with one process: it ends with the same error"
            yield failure("flags", facts.error, expected=expected, way_out=way_out)
        return
    started = facts.started
    if flags.unknown:
        own = os.path.basename(started.script) in _OWN_FLAGS
        yield (failure if own else warning)(
            "flags",
            flags.unknown,
            expected="flags of Megatron and odb_megatron" if own else "flags of the script's own",
            way_out="mend or drop them",
        )
    for problem in flags.problems:
        seen, way_out = _split(problem)
        yield failure("flags", seen, expected="flags that fit together", way_out=way_out)
    if not flags.problems and not flags.unknown:
        yield fine("flags", flags.described or "they fit together")
    if not flags.problems and not flags.has_odb:
        yield warning(
            "--odb",
            "not among the flags: micro-batches are padded, nothing of ODB runs",
            expected="--odb",
            way_out="add --odb, or ignore this for a baseline",
        )


def _split(problem: str) -> tuple[str, str]:
    """Return what was seen and the way out, which a refusal has in one text."""
    needs = re.match(r"--odb needs (--[\w-]+(?: \d+)?): ", problem)
    if needs:
        return problem, f"add {needs[1]}"
    seen, _, way_out = problem.partition(": ")
    return (seen, way_out) if way_out else (problem, "mend what it names")


def _attention(facts: CommandFacts, num_gpus: int) -> Iterator[Finding]:
    flags = facts.flags
    if flags is None or flags.problems or not (flags.backend or flags.backend_problem):
        return
    if flags.backend:
        on = "" if num_gpus or facts.started.on_cpu else " (on this machine, without a GPU)"
        yield fine("--odb-attention", f"{flags.backend}{on}")
    elif num_gpus or facts.started.on_cpu:
        expected = "a backend that computes what the flags ask for"
        way_out = "as it says, or --odb-attention auto"
        yield failure("--odb-attention", flags.backend_problem, expected=expected, way_out=way_out)
    else:
        yield not_applicable("--odb-attention", f"no GPU here: {flags.backend_problem}")


def _data(facts: CommandFacts) -> Iterator[Finding]:
    if facts.flags is None:
        return
    if not facts.flags.data:
        yield not_applicable("data", "no --data-path: the script's own data, or none, is not read")
    for one in facts.flags.data:
        yield from _file(one, facts.flags)


def _file(data: DataFacts, flags: FlagFacts) -> Iterator[Finding]:
    subject = "data"
    if data.error:
        seen, _, way_out = data.error.partition(": ")
        expected = "data that can be read"
        yield failure(
            subject, f"{data.path}: {seen}", expected=expected, way_out=way_out or "mend the path"
        )
        return
    part = "all" if data.num_read == data.num_records else f"{data.num_read} of"
    read = f"{part} {data.num_records} records read" + (
        "" if part == "all" else ", the largest among them"
    )
    if data.num_bad:
        yield _bad(data, flags, read)
    if not data.longest:
        return
    longest = f"{data.path}:{data.longest_at} is the longest with {data.longest} tokens ({read})"
    if not data.num_overlong:
        yield fine(subject, f"{longest}; the limit is {flags.limit}")
        return
    from odb_megatron.plan.padding import OverlongError, OverlongPolicy, judge_length

    try:
        verdict = judge_length(
            data.longest,
            multiple=flags.multiple,
            token_budget=flags.token_budget,
            context=flags.context,
            policy=OverlongPolicy(flags.overlong),
        )
    except OverlongError as error:
        _, _, way_out = str(error).rpartition(": ")
        yield failure(
            subject,
            f"{longest}; {data.num_overlong} are longer than {flags.limit}, and --odb-overlong "
            f"{flags.overlong} ends the run at the first",
            expected=f"at most {flags.limit} tokens after padding (--seq-length {flags.context}, "
            f"token budget {flags.token_budget})",
            way_out=way_out,
        )
        return
    share = 100.0 * data.num_overlong / data.num_read
    yield warning(
        subject,
        f"{longest}; {data.num_overlong} ({share:.2g} % of those read) are longer than "
        f"{flags.limit}: --odb-overlong {flags.overlong}",
        expected=verdict.message,
        way_out="raise --seq-length and --odb-token-budget where they should be whole",
    )


def _bad(data: DataFacts, flags: FlagFacts, read: str) -> Finding:
    seen = f"{data.path}: {data.num_bad} bad records ({read}); the first: {data.first_bad}"
    if flags.bad_record == "error":
        way_out = "mend them, or --odb-bad-record skip"
        expected = "none: --odb-bad-record error ends the run at the first"
        return failure("data", seen, expected=expected, way_out=way_out)
    expected = "none; they are left out and counted"
    return warning("data", seen, expected=expected, way_out="mend them")


# --- gathering -------------------------------------------------------------------------------


def _examine(request: Request, environment: Mapping[str, str]) -> tuple[FlagFacts | None, str]:
    with tempfile.TemporaryDirectory(prefix="odb-doctor-") as folder:
        asked, out = Path(folder) / "request.json", Path(folder) / "facts.json"
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", _EXAMINER, str(asked), str(out)],
                capture_output=True,
                text=True,
                timeout=_MOST_S,
                env=dict(environment),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"reading flags and data took longer than {_MOST_S:g} s"
        if not out.is_file():
            told = (done.stderr or done.stdout).strip().splitlines()
            return None, told[-1] if told else f"it ended with exit code {done.returncode}"
        return facts_of(json.loads(out.read_text(encoding="utf-8"))), ""


def facts_of(values: dict[str, Any]) -> FlagFacts:
    """Return the facts that were written as JSON."""
    data = tuple(DataFacts(**one) for one in values.pop("data"))
    problems = tuple(values.pop("problems"))
    return FlagFacts(**values, data=data, problems=problems)


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
    try:
        return "odb_megatron" in Path(started.script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # said elsewhere


def _differs(python: str) -> bool:
    """Whether a path names another interpreter; a bare `python` goes by PATH, as this one did."""
    return os.sep in python and os.path.realpath(python) != os.path.realpath(sys.executable)
