"""Checks of a command line: its script, processes, flags, attention backend and data.

Must not import torch, Megatron or, before there is data to judge, numpy: doctor says that they are
missing. Must not gather anything: see `command_facts`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from odb_megatron.doctor.command_facts import CommandFacts, DataFacts, FlagFacts
from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning
from odb_megatron.doctor.started import Started

__all__ = ["check_command"]

_OWN_FLAGS = ("odb_megatron.megatron.pretrain", "pretrain_gpt_odb.py")
"""Scripts without flags of their own: what their parser does not know is wrong."""

_WITH_DEVICE = ("odb-megatron launch", "odb-megatron pretrain")


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
            way_out=f"-m odb_megatron.run {started.script} ...",
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
            way_out="run doctor on a node of the job (srun --pty)"
            + (", or add --device cpu to try it" if facts.started.by in _WITH_DEVICE else ""),
        )
    elif facts.processes > num_gpus:
        yield failure(
            "processes",
            f"{facts.processes} on each node, and {num_gpus} GPUs here",
            expected="a GPU for each",
            way_out=_fewer(facts.started, num_gpus),
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


def _fewer(started: Started, num_gpus: int) -> str:
    """Return what starts as many processes on each node as it has GPUs."""
    if started.by in ("srun", "sbatch"):
        return f"--ntasks-per-node {num_gpus}, and -N for the number of nodes"
    return f"--nproc-per-node {num_gpus}"


def _flags(facts: CommandFacts) -> Iterator[Finding]:
    flags = facts.flags
    if facts.unchecked:
        yield not_applicable("flags", f"not checked: {facts.unchecked}")
        return
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
    """Return what was seen and the hint, which a refusal has in one text."""
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
